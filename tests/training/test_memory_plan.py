"""The memory plan: arrays without memory behave like arrays, the counted pool like CuPy's, the plan like the device."""

import gc
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from checks import GPU, normal

from xtrain import device
from xtrain.config import ModelConfig
from xtrain.kernels.quantize import KINDS, quantize
from xtrain.kernels.runtime.launch import launch_observers, observe_launches
from xtrain.nn import autograd
from xtrain.nn.model import Transformer
from xtrain.nn.observers import Op
from xtrain.nn.optim import Muon
from xtrain.nn.quantized import linear_weights
from xtrain.training import memory_plan as memory
from xtrain.training.memory_plan import Meter, Pool, largest, plan, planning, saved_bytes
from xtrain.training.zero_plan import zero1

SMALL = ModelConfig(
    vocab_size=500, dim=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, hidden_dim=96, max_seq_len=32
)  # fmt: skip


# ----------------------------------------------------------------------------- arrays without memory
@pytest.fixture
def meta():
    with planning(logits_width=0) as meter:
        yield device.cupy(), meter


def like(x, array):
    assert (x.shape, x.dtype, x.strides) == (array.shape, array.dtype, array.strides)
    assert (x.size, x.ndim, x.nbytes) == (array.size, array.ndim, array.nbytes)
    assert x.flags.c_contiguous == array.flags.c_contiguous


def test_a_meta_array_has_the_shape_of_an_array(meta):
    cp, _ = meta
    x, planned = np.zeros((4, 6, 10), np.float32), cp.empty((4, 6, 10), np.float32)
    for change in (
        lambda a: a,
        lambda a: a[1:3],
        lambda a: a[..., :5],
        lambda a: a[:, 2],
        lambda a: a[2, 1:4, ::2],
        lambda a: a[:, :, 3:3],
        lambda a: a.reshape(24, -1),
        lambda a: a.reshape(-1),
        lambda a: a.reshape((2, 2, 60)),
        lambda a: a[1:2].reshape(6, 10),
        lambda a: a[..., :5].reshape(-1),
        lambda a: a[:, 2].copy(),
        lambda a: a[:, 2:4].reshape(2, 2, 2, 10),
        lambda a: a[:, 2:4].reshape(4, 20),
        lambda a: a[:, 2:4].reshape(8, 10),
        lambda a: a.astype(np.int32),
        lambda a: a.reshape(-1).view(np.int64),
    ):
        like(change(planned), change(x))


def test_a_view_shares_memory_and_a_copy_does_not(meta):
    cp, meter = meta
    x = cp.zeros(1000, np.float32)
    assert meter.live == 4096  # CuPy's pool gives multiples of 512 bytes
    view = x[10:].reshape(-1, 10)
    del x
    assert meter.live == 4096
    other = view.copy()
    assert meter.live == 4096 * 2
    del view
    assert meter.live == 4096
    del other
    assert meter.live == 0 and meter.peak == 8192


def test_values_are_refused(meta):
    x = meta[0].empty(3, np.float32)
    with pytest.raises(AttributeError):
        x.get()
    with pytest.raises(TypeError):
        x + x
    with pytest.raises(ValueError, match="cannot reshape"):
        x.reshape(2, 2)


def test_no_array_of_a_plan_stays_in_a_cache():
    before = {id(module) for module in autograd._units}
    with planning(SMALL.padded_vocab_size) as meter:
        model = Transformer(SMALL, None, "gpu")
        ids = np.zeros((2, 32), np.int32)
        model.loss(ids, ids).backward()
        assert len(autograd._units) == len(before) + 1
        del model
    assert {id(module) for module in autograd._units} == before
    assert meter.live == meter.now["workspace of cuBLAS"] == 0


MIXTURE = replace(SMALL, n_experts=3, experts_per_token=2, expert_hidden_dim=40)


@pytest.mark.parametrize("config", [SMALL, MIXTURE])
def test_a_frozen_model_in_codes(config):
    """The codes replace the matrices in the plan, to the byte; each product has its own dequantized copy."""
    matrices = linear_weights(Transformer(config, trainable=False))
    codes = {}
    plans = {}
    for kind in ("full", *KINDS):
        plans[kind] = plan(config, 1, 8, "bf16", lora=2, weights=kind)
        if kind != "full":
            stored = [a for _, p in matrices for a in quantize(p.data, kind).arrays]
            codes[kind] = sum(-(-a.nbytes // 512) * 512 for a in stored)
    frozen = {kind: p.kinds["frozen weights"] for kind, p in plans.items()}
    assert frozen["int8"] - codes["int8"] == frozen["int4"] - codes["int4"]
    whole = 2 * sum(p.size for _, p in matrices)
    left = frozen["full"] - whole
    assert left <= frozen["nf4"] - codes["nf4"] <= left + 512 * 4
    saved = plans["full"].peak - plans["int8"].peak
    copy = 2 * max(p.size for _, p in matrices)
    assert 0 < saved <= frozen["full"] - frozen["int8"] <= saved + copy


def test_planning_leaves_nothing_behind():
    before = device.cupy()
    with pytest.raises(ZeroDivisionError), planning(0):
        assert device.cupy() is not before and device.gpu_available()
        raise ZeroDivisionError
    assert device.cupy() is before and device.gpu_available() == GPU
    assert not launch_observers
    model = Transformer(SMALL)  # and the device is what it was
    assert type(model.arena.weights) is np.ndarray


# ----------------------------------------------------------------------------- the pool
def test_the_pool_splits_and_joins():
    pool = Pool()
    a = pool.allocate(1024)
    pool.free(a)
    b, c = pool.allocate(512), pool.allocate(512)  # the two halves of a
    assert pool.reserved == 1024
    pool.free(b)
    pool.free(c)
    d = pool.allocate(1024)
    assert pool.reserved == 1024 and d.size == 1024
    pool.allocate(512)
    assert pool.reserved == 1536


def test_the_smallest_block_that_is_large_enough_is_taken():
    pool = Pool()
    blocks = [pool.allocate(size) for size in (4096, 1024, 2048)]
    for block in blocks:
        pool.free(block)
    assert pool.allocate(1536) is blocks[2]  # 512 are left of it
    assert pool.allocate(512).left is blocks[2]
    assert pool.reserved == 4096 + 1024 + 2048


def test_the_pool_emptied():
    pool = Pool()
    a, b, c = (pool.allocate(1024) for _ in range(3))
    pool.free(a)
    part = pool.allocate(512)  # of a
    pool.free(b)
    pool.free_all_blocks()
    assert pool.reserved == 2048 and pool.most == 3072  # b is gone; a is in use in part
    pool.free(part)
    pool.free(c)
    pool.free_all_blocks()
    assert pool.reserved == 0 and not pool.free_blocks


def test_the_pool_under_random_use():
    draw, pool, held, live = random.Random(1), Pool(), [], 0
    for _ in range(3000):
        if held and draw.random() < 0.5:
            block = held.pop(draw.randrange(len(held)))
            live -= block.size
            pool.free(block)
        else:
            block = pool.allocate(512 * draw.randint(1, 40))
            live += block.size
            held.append(block)
        assert live + sum(size for size, _, _ in pool.free_blocks) == pool.reserved
    for block in held:
        pool.free(block)
    assert all(b.left is None and b.right is None for _, _, b in pool.free_blocks)


# ----------------------------------------------------------------------------- what a graph keeps
def test_saved_bytes_on_a_graph_that_can_be_counted_by_hand():
    from xtrain.nn import functional as F
    from xtrain.nn.autograd import Tensor

    x, w = (Tensor(normal(i, 4, 4), requires_grad=True) for i in range(2))
    y = F.linear(x, w)  # keeps x and w, which are leaves
    assert saved_bytes(y) == 0
    z = F.silu(y)  # keeps y
    assert saved_bytes(z) == 64
    assert (
        saved_bytes(F.add(F.silu(z), F.silu(z.reshape(16).reshape(4, 4)))) == 128
    )  # z counts once


@pytest.mark.parametrize("recompute", ["none", "attention", "block"])
def test_what_the_plan_keeps_is_what_numpy_keeps(recompute):
    """The same graph, once of NumPy arrays and once of MetaArrays. (To within the rounding to 512 bytes.)"""
    if GPU:
        # NumPy's arrays are counted; test_the_plan_agrees_with_the_device counts the GPU's
        pytest.skip("needs the CPU backend")
    ids = np.zeros((3, 32), np.int32)
    model = Transformer(SMALL, recompute=recompute)
    real = saved_bytes(model.loss(ids, ids)) - sum(t.nbytes for t in model.rotary(32))
    fixed = ("weights", "gradients", "moments", "workspace of cuBLAS", "other")
    kept = plan(SMALL, 3, 32, recompute=recompute).kept
    planned = sum(n for kind, n in kept.items() if kind not in fixed)
    assert real < planned < 1.02 * real + 512 * 60


# ----------------------------------------------------------------------------- the plan
def test_the_parts_of_a_plan():
    p = plan(SMALL, 4, 32)
    size = -(-memory.parameters(SMALL) * 4 // 512) * 512
    assert p.kinds["weights"] == p.kinds["gradients"] == size and p.kinds["moments"] == 2 * size
    assert p.kinds["logits"] >= 4 * 32 * SMALL.padded_vocab_size * 4
    assert sum(p.kinds.values()) == p.peak <= p.reserved < 1.2 * p.peak
    assert max(sum(now.values()) for _, now in p.timeline) == p.peak
    ways = [scope[1] for scope, _ in p.timeline]
    assert "forward" in ways[: ways.index("backward")] and ways[-1] == ""


def test_a_meta_array_has_as_many_rows_as_an_array(meta):
    rows = list(meta[0].empty((3, 2)))
    assert [row.shape for row in rows] == [(2,)] * 3
    assert rows[0][-2].shape == ()
    with pytest.raises(IndexError):
        rows[0][2]


def test_the_biases_of_routers_are_planned():
    mixture = dict(n_experts=4, experts_per_token=2)
    plain, biased = (
        plan(ModelConfig(**vars(SMALL) | mixture | {"expert_bias": bias}), 4, 32).kinds
        for bias in (False, True)
    )
    assert biased["weights"] - plain["weights"] == SMALL.n_layers * 4 * 64  # ALIGN


def test_less_is_less():
    peaks = [plan(SMALL, 8, 32, recompute=mode).peak for mode in ("none", "attention", "block")]
    assert peaks[0] > peaks[1] > peaks[2]
    assert plan(SMALL, 4, 32).peak < peaks[0] < plan(SMALL, 16, 32).peak
    twice = plan(SMALL, 8, 32, accumulate=2)
    assert twice.peak - peaks[0] < 1e5  # only the batch itself is larger


def test_bf16_is_planned_without_a_gpu():
    p, full = plan(SMALL, 8, 32, "bf16"), plan(SMALL, 8, 32)
    assert 0 <= 2 * p.kinds["bf16 copy of the weights"] - p.kinds["weights"] <= 512
    assert sum(p.kept.values()) < sum(full.kept.values())


def test_a_model_that_no_machine_here_could_hold():
    config = ModelConfig(vocab_size=128000, dim=8192, n_layers=80, n_heads=64, n_kv_heads=8, hidden_dim=28672, max_seq_len=4096)  # fmt: skip
    p = plan(config, 1, 4096, "bf16", "block")
    assert 70e9 < memory.parameters(config) < 73e9 and p.reserved > 18 * 70e9


def test_muon_and_a_moving_average():
    """One more array of the arena's size; and what Newton-Schulz launches: five iterations for each shape of matrix."""
    p, plain = plan(SMALL, 4, 32, "bf16", optimizer="muon", ema=0.9), plan(SMALL, 4, 32, "bf16")
    assert p.kinds["moving average"] == p.kinds["weights"]
    assert p.reserved >= plain.reserved + p.kinds["weights"]
    saved = p.reserved - zero1(p, 4)
    assert saved == 0.75 * sum(p.kinds[k] for k in ("moments", "weights", "moving average"))
    names = Counter()
    with planning(0):
        optimizer = Muon(Transformer(SMALL, None, "gpu", "bf16"), 1e-3)
        with observe_launches(lambda event, start: names.update([event.name.split()[0]])):
            optimizer.apply(optimizer.arena.weights[:3])
    shapes = len(optimizer.batches)
    once = {f"{name}_kernel": shapes for name in ("momentum", "normalize", "muon_update")}
    products = {"product": 15 * shapes, "add_to_diagonal_kernel": 10 * shapes}
    assert names == {**once, **products, "adamw_kernel": 2}


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 7, 8, 100])
def test_largest(limit):
    assert largest(lambda batch: batch <= limit) == limit


def test_the_meter_remembers_the_fullest_moment():
    with planning(logits_width=128) as meter:
        cp = device.cupy()
        with meter.observe(Op("SwiGLU", "forward", "layer 1")):
            x = cp.empty((4, 128), np.float32)
            y = cp.empty(256, np.float32)
        with meter.observe(Op("Linear", "backward", "")):
            z = cp.empty(512, np.float32)
        del x, y
    assert meter.kinds == {"logits": 2048, "SwiGLU": 1024, "gradients of activations": 2048}
    assert meter.op == "Linear backward" and meter.live == z.nbytes
    assert isinstance(meter, Meter)


# ----------------------------------------------------------------------------- against the device
@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8"])
@pytest.mark.parametrize("recompute", ["none", "block"])
@pytest.mark.parametrize("shape", [(6, 512, 8, 256), (3, 256, 2, 1024)], ids=str)
def test_the_plan_agrees_with_the_device(precision, recompute, shape):
    if precision == "fp8" and not device.has_fp8():
        pytest.skip("needs compute capability 8.9")
    layers, dim, batch, T = shape
    config = ModelConfig(
        vocab_size=20000,
        dim=dim,
        n_layers=layers,
        n_heads=dim // 64,
        head_dim=64,
        hidden_dim=3 * dim,
        max_seq_len=T,
    )
    expected = plan(config, batch, T, precision, recompute).reserved
    gc.collect()
    got = memory.measure(config, batch, T, precision, recompute)
    assert abs(expected - got) <= 0.05 * got, (
        f"plan {expected / 1e9:.3f} GB, device {got / 1e9:.3f} GB"
    )


@pytest.mark.gpu
def test_a_private_pool_gives_its_memory_back():
    cp, size = device.cupy(), 256 << 20
    pool = device.PrivatePool()
    held = pool.pool  # CuPy's own counter: other processes may use the same GPU meanwhile
    with cp.cuda.using_allocator(pool.malloc):
        arrays = [cp.empty(size // 2, np.uint8) for _ in range(2)]
        arrays[0] = arrays[0][: size // 4].copy()  # blocks that are split
    assert held.total_bytes() >= size
    del arrays, pool
    gc.collect()
    assert held.total_bytes() == 0
