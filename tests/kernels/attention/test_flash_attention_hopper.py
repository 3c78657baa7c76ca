"""FlashAttention for compute capability 9.0 in the simulator: the kernels against float64, combined with the mma.sync version.

test_flash_attention_hopper_gpu.py has the tests that need a GPU.
"""

import ctypes
import dataclasses
import itertools

import ml_dtypes
import numpy as np
import pytest
from checks import assert_as_good, normal, only_slow, sentinels
from flash_attention_cases import case, everything, exact, torch_sdpa

from xtrain import simulator
from xtrain.config import ModelConfig
from xtrain.kernels.attention import flash_attention as fa
from xtrain.kernels.attention import flash_attention_hopper as hopper
from xtrain.kernels.attention import flash_attention_hopper_bwd as backward
from xtrain.kernels.attention.flash_attention_hopper_table import TABLE, HopperPlan, HopperTiles
from xtrain.kernels.primitives import hopper_tiles, tma
from xtrain.kernels.primitives.tma import mappable, tensor_maps
from xtrain.kernels.runtime import compile as compile_file
from xtrain.kernels.runtime.compiler import cuda
from xtrain.simulator import sim
from xtrain.training.memory_plan import plan

BF16 = ml_dtypes.bfloat16
SHARED = 227 * 1024  # bytes that a block may have
ONE = dict.fromkeys(  # one warpgroup
    ("fwd", "dq", "dkdv"),
    HopperPlan(HopperTiles(step=32, warpgroups=1, stages=2, blocks=1, own=1), planes=0),
)
TWO = dict.fromkeys(  # two warpgroups
    ("dq", "dkdv"),
    HopperPlan(HopperTiles(step=16, warpgroups=2, stages=3, blocks=2, own=2), planes=1),
)
TWO["fwd"] = HopperPlan(HopperTiles(step=16, warpgroups=2, stages=2, blocks=2, own=2), planes=1)
EARLY = dict.fromkeys(  # the next tile is loaded early
    ("fwd", "dq", "dkdv"),
    HopperPlan(HopperTiles(step=16, warpgroups=1, stages=2, blocks=2, own=2), planes=1),
)
# B, T, S, H, G, D, causal, tiles: one token; ragged, a past and two sequences; grouped and more tiles than stages; wide heads
SHAPES = [
    (1, 1, 1, 1, 1, 64, True, ONE),
    (1, 9, 41, 2, 1, 64, True, ONE),
    (1, 70, 70, 1, 1, 64, True, ONE),
    (1, 5, 50, 1, 1, 128, False, ONE),
    (1, 70, 70, 1, 1, 64, True, EARLY),
]
SLOW = [
    (2, 9, 41, 1, 1, 64, True, ONE),
    (1, 131, 131, 1, 1, 64, True, TWO),
    (1, 70, 100, 1, 1, 128, True, TWO),
    (1, 65, 33, 1, 1, 64, False, TWO),
]


@pytest.fixture
def on_hopper(monkeypatch):
    """-> switch(plans) of the kernels"""
    assert fa.HOPPER

    def switch(plans):
        for module in (hopper, backward):
            monkeypatch.setattr(module, "choose", lambda kind, *rest: plans[kind])

    return switch


def check(switch, B, T, S, H, G, D, causal, plans):
    switch(plans)
    arrays, scale = case(B, T, S, H, G, D, dtype=BF16), D**-0.5
    got = everything(*map(sim, arrays), scale, causal)
    right = exact(arrays, scale, causal)
    theirs = torch_sdpa(*arrays, scale, causal)
    names = "o", "dq", "dk", "dv"
    for name, g, e, t in zip(names, (got[0], *got[2:]), (right[0], *right[2:]), theirs):
        assert_as_good(g, e, t, floor=2e-4, what=name, scale=1.0)  # at T = 1, dq is 1 - 1
    np.testing.assert_allclose(np.asarray(got[1]), right[1], rtol=1e-5, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: str(s[:-1]))
def test_as_exact_as_torch(on_hopper, shape):
    check(on_hopper, *shape)


@pytest.mark.slow
@only_slow
@pytest.mark.parametrize("shape", SLOW, ids=lambda s: str(s[:-1]))
def test_more_shapes(on_hopper, shape):
    check(on_hopper, *shape)


@pytest.mark.long
def test_lse_and_results_are_exchanged_with_the_other_version(on_hopper, monkeypatch):
    """Forward by one version, backward by the other."""
    on_hopper(ONE)
    arrays = case(1, 20, 24, 1, 1, 64, dtype=BF16)
    q, k, v, do = map(sim, arrays)
    right = exact(arrays, 0.3, True)
    new = fa.flash_attention_fwd(q, k, v, 0.3)
    monkeypatch.setattr(fa, "HOPPER", False)
    monkeypatch.setattr(fa, "choose", lambda kind, *rest: fa.SMALL[kind])
    old = fa.flash_attention_fwd(q, k, v, 0.3)
    np.testing.assert_allclose(np.asarray(new[1]), np.asarray(old[1]), rtol=1e-6, atol=1e-6)
    mixed = [fa.flash_attention_bwd(do, q, k, v, *new, 0.3)]
    monkeypatch.setattr(fa, "HOPPER", True)
    mixed.append(fa.flash_attention_bwd(do, q, k, v, *old, 0.3))
    for gradients in mixed:
        for name, g, e in zip(("dq", "dk", "dv"), gradients, right[2:]):
            assert_as_good(g, e, e.astype(BF16), floor=2e-2, what=name)


@pytest.mark.long
def test_packed_in_place_sentinels_and_the_same_bits_twice(on_hopper, monkeypatch):
    on_hopper(ONE)
    B, T, H, G, D = 2, 9, 1, 1, 64
    packed = sim(normal(0, B, T, (H + 2 * G) * D, dtype=BF16))
    heads = lambda first, n: packed[..., first * D : (first + n) * D].reshape(B, T, n, D)
    q, k, v = heads(0, H), heads(H, G), heads(H + G, G)
    assert all(mappable(x) is x and np.shares_memory(x, packed) for x in (q, k, v))
    do = sim(normal(1, B, T, H, D, dtype=BF16))
    with sentinels(monkeypatch):
        first = everything(q, k, v, do, 0.25, True)
    again = everything(q.copy(), k.copy(), v.copy(), do, 0.25, True)
    for a, b in zip(first, again):
        assert np.array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))
    gradient = sim(np.full(packed.shape, 7, BF16))
    dv = gradient.reshape(B, T, H + 2 * G, D)[:, :, H + G :]
    fa.flash_attention_bwd(do, q, k, v, *first[:2], 0.25, True, dv)
    assert np.array_equal(dv, first[4]) and (gradient[..., : (H + G) * D] == 7).all()
    odd = sim(normal(2, B, T, H, D + 4, dtype=BF16))[..., 4:]
    assert mappable(odd) is not odd and mappable(odd).flags.c_contiguous


def test_on_for_these_heads_alone_until_switched_off(monkeypatch):
    q = sim(normal(0, 1, 3, 1, 64, dtype=BF16))
    assert fa.use_hopper(q) and not fa.use_hopper(q.astype(np.float32))
    assert not fa.use_hopper(q[..., :32]) and not fa.use_hopper(q[:, :0])
    monkeypatch.setattr(fa, "HOPPER", False)
    assert not fa.use_hopper(q)


@pytest.mark.parametrize("recompute", ["none", "attention"])
def test_memory_plan(monkeypatch, recompute):
    """The plan launches nothing and needs no driver; these kernels keep what the others keep."""
    config = ModelConfig(
        vocab_size=300, dim=128, n_heads=2, n_kv_heads=1, head_dim=64, hidden_dim=96, n_layers=2, max_seq_len=256
    )  # fmt: skip
    wgmma = plan(config, 2, 256, "bf16", recompute)
    monkeypatch.setattr(fa, "HOPPER", False)
    usual = plan(config, 2, 256, "bf16", recompute)
    assert wgmma.kept == usual.kept and abs(wgmma.peak - usual.peak) < 64 * 1024


# ----------------------------------------------------------------------------- tables, tiles, maps
CHOSEN = sorted({(*key, plan) for key, rows in TABLE.items() for plan in rows.values()}, key=str)


@pytest.mark.parametrize("choice", CHOSEN, ids=str)
def test_chosen_tiles_fit(choice):
    kind, D, _, plan = choice
    tiles, step, per_sm = plan.tiles, plan.tiles.step, plan.tiles.blocks
    shared_bytes = {"fwd": hopper.fwd_shared_bytes, "dq": backward.dq_shared_bytes}
    shared = shared_bytes.get(kind, backward.dkdv_shared_bytes)(D, tiles)
    assert tiles.own in (1, 2) and plan.planes >= 0
    assert shared <= SHARED and per_sm * (shared + 1024) <= 228 * 1024  # 1024: the GPU's own
    assert step % 16 == 0 and step <= 256 and tiles.stages >= 2
    # a copy of statistics does not cross into the next head
    assert kind != "dkdv" or backward.PAD % step == 0
    few, many = hopper_tiles.registers(
        tiles.warpgroups, per_sm, 24 if (kind, D) == ("dkdv", 128) else 0
    )
    assert 128 * (few + tiles.warpgroups * many) * per_sm <= 65536
    # accumulators and operands that are live at the same time, plus about 24 registers
    sizes = {"fwd": step / 2 + step / 4 + D / 2, "dq": step + step / 4 + D / 2}
    assert many >= sizes.get(kind, step + step / 4 + D) + 24


@cuda.jit
def find_tile_kernel(found, blocks, planes, together):
    found[cuda.threadIdx.x, 0], found[cuda.threadIdx.x, 1] = hopper_tiles.find_tile(
        cuda.threadIdx.x, blocks, planes, together
    )


def test_every_tile_once_and_long_ones_first():
    for blocks, planes, together in itertools.product((1, 3), (1, 4, 7), (1, 3, 9)):
        found = np.full((blocks * planes, 2), -1, np.int32)
        simulator.run(find_tile_kernel, 1, len(found), found, blocks, planes, together)
        seen = [tuple(map(int, row)) for row in found]
        assert sorted(seen) == [(b, p) for b in range(blocks) for p in range(planes)]
        first = [b for b, p in seen if p < together]
        assert first == sorted(first)


def test_kernels_have_an_identity_for_the_cache():
    """A kernel that runtime/compile.py cannot tell from another would be compiled in every process, or be the wrong one."""
    kinds = hopper.make_fwd_kernel, backward.make_dq_kernel, backward.make_dkdv_kernel
    first = HopperTiles(step=32, warpgroups=1, stages=2, blocks=1, own=1)
    changes = ({}, {"step": 64}, {"warpgroups": 2}, {"stages": 3}, {"own": 2})
    kernels = [
        make(D, causal, dataclasses.replace(first, **change))
        for make in kinds
        for D in (64, 128)
        for causal in (True, False)
        for change in changes
    ]
    found = {compile_file._identity(k.py_func) for k in kernels}
    assert None not in found and len(found) == len(kernels)


def test_axes_of_one_element_have_any_stride():
    x = sim(np.zeros((1, 4, 1, 64), BF16))
    odd = np.lib.stride_tricks.as_strided(x, strides=(7, 128, 3, 2), subok=True)
    words = tensor_maps((odd, 16))
    assert list(words[2:10]) == [64, 1, 4, 1, 128, 128, 128, 64]  # dims, strides, columns of a box


def test_the_map_of_a_matrix():
    x = sim(np.zeros((3, 256), np.float32))
    assert list(tensor_maps((x, 64))[2:7]) == [256, 3, 1024, 64, 1]  # dims, stride, box


def test_what_the_driver_is_asked(monkeypatch):
    """cuTensorMapEncodeTiled(map, bfloat16, rank 4, address, dims, strides, box, steps, no interleave, swizzle 128, L2, zeros)"""
    asked = []

    def driver(place, *args):
        asked.append([place, *(list(a) if hasattr(a, "_length_") else a for a in args)])
        ctypes.memset(place, 7, 128)
        return status

    monkeypatch.setattr(tma, "_encoder", lambda: driver)
    described, spec = (
        (4096, (64, 3, 100, 2), (128, 640, 64000), (64, 1, 16, 1), 2),
        tma.TensorMapSpec,
    )
    status = 0
    assert tma._encode(spec(*described)) == bytes([7]) * 128
    place, *rest = asked[0]
    assert place % 64 == 0
    dims, strides, box = (list(x) for x in described[1:4])
    assert rest == [9, 4, 4096, dims, strides, box, [1] * 4, 0, 3, 3, 0]
    tma._encode(spec(4096, (256, 3), (1024,), (128, 1), 4))  # float32, no swizzle
    assert asked[1][1:] == [7, 2, 4096, [256, 3], [1024], [128, 1], [1] * 2, 0, 0, 3, 0]
    tma._encode(spec(4096, dims, strides, (32, 1, 16, 1), 4))  # float32 tiles
    assert asked[2][1:3] == [7, 4] and asked[2][6:] == [[32, 1, 16, 1], [1] * 4, 0, 3, 3, 0]
    status = 1
    with pytest.raises(
        RuntimeError, match=r"the driver rejected a tensor map of dims .* CUDA error 1"
    ):
        tma._encode(spec(*described))
