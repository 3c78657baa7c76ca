"""The kernel table: names out of mangled ones, times laid beside launches, rates, busy share, the trace."""

import json
import math
import types

import numpy as np
import pytest
from checks import GPU

from xtrain.config import ModelConfig
from xtrain.inspect import kernel_times
from xtrain.inspect.kernel_times import (
    Launch,
    Recorder,
    Timed,
    busy_share,
    chrome_trace,
    match,
    rows,
    short_name,
    without_first_step,
)
from xtrain.kernels import adamw, elementwise, embedding, qk_norm_rope, rmsnorm, softmax, swiglu
from xtrain.kernels.attention import (
    flash_attention_bf16,
    flash_attention_bf16_bwd,
    flash_attention_bf16_bwd_d128,
    flash_attention_hopper_bwd,
)
from xtrain.kernels.attention.flash_attention_hopper_table import HopperTiles
from xtrain.kernels.attention.flash_attention_table import Tiles
from xtrain.kernels.experts.grouped_product_hopper import TILES, Result, make_kernel
from xtrain.kernels.experts.grouped_product_tiled import DW, DX, FORWARD
from xtrain.kernels.primitives import tma
from xtrain.kernels.runtime.cost import declare_cost, kernel_cost, product_cost
from xtrain.nn.model import Transformer
from xtrain.nn.observers import Op
from xtrain.training.memory_plan import planning


@pytest.mark.parametrize(
    "mangled, name",
    [
        ("_ZN6xtrain7kernels5adamw17make_adamw_kernel12_3clocals_3e12adamw_kernelB2v1B92cw51E5ArrayIfLi1E", "adamw_kernel"),
        ("_ZN6xtrain7kernels7softmax26causal_softmax_fwd_kernel_B3v24", "causal_softmax_fwd_kernel_"),
        ("_ZN7cutlass7Kernel2I21cutlass_80_simt_sgemmEEvNT_6ParamsE", "cutlass_80_simt_sgemm"),
        ("_Z16gemmSN_NN_kernelIfLi128EEvi", "gemmSN_NN_kernel"),
        ("nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopB_TNT", "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopB_TNT"),
    ],
)  # fmt: skip
def test_short_names(mangled, name):
    assert short_name(mangled) == name


STEP = [
    Launch("norm_kernel", "RMSNorm", "forward", "layer 0", 1000, None),
    Launch("product 4 x 5 x 6", "Linear", "forward", "layer 0", 500, 240.0),
    Launch("product 4 x 5 x 5", "Linear", "forward", "layer 1", 500, 200.0),
    Launch("flash_attention_fwd_kernel", "Attention", "forward", "layer 1", 300, 100.0),
    Launch("adamw_kernel", "", "", "", 4000, None),
]


def gpu_times(*names, start=0):
    """Each takes 10 ns, 2 ns apart."""
    return [Timed(name, start + 12 * i, start + 12 * i + 10) for i, name in enumerate(names)]


NAMES = ["copy", "norm_kernel", "nvjet_a", "nvjet_splitK", "splitKreduce_kernel", "cupy_fill", "flash_attention_fwd_kernel", "memset32", "adamw_kernel"]  # fmt: skip


def test_times_find_their_launches():
    times = match(gpu_times(*NAMES * 3), STEP)
    expected = [None, STEP[0], STEP[1], STEP[2], None, None, STEP[3], None, STEP[4]] * 3
    assert [t.launch for t in times] == expected
    assert [t.name for t in times] == NAMES * 3


def test_a_product_that_left_no_trace_costs_only_itself():
    names = ["norm_kernel", "nvjet_a", "flash_attention_fwd_kernel", "adamw_kernel"]
    times = match(gpu_times(*names * 2), STEP)
    assert [t.launch for t in times] == [STEP[0], STEP[1], STEP[3], STEP[4]] * 2


def test_rows_are_per_step_and_sorted():
    table = rows(match(gpu_times(*NAMES * 2), STEP), steps=2)
    assert sum(row.ns for row in table) == 90
    by_name = {row.name: row for row in table}
    assert by_name["norm_kernel"].calls == 1 and by_name["norm_kernel"].nbytes == 1000
    assert by_name["product 4 x 5 x 6"].flops == 240 and by_name["copy"].nbytes is None
    assert [row.ns for row in table] == sorted((row.ns for row in table), reverse=True)


def test_busy_share_counts_overlaps_once():
    times = [Timed("a", 0, 10), Timed("b", 5, 12), Timed("c", 6, 8), Timed("d", 16, 20)]
    assert busy_share(times) == 16 / 20


def test_the_first_step_is_left_out():
    times = match(gpu_times(*NAMES * 3), STEP)
    rest = without_first_step(times, STEP)
    assert len(rest) == 2 * len(NAMES) - 1 and rest[0].launch is STEP[0]


def test_the_trace_has_spans_of_ops_and_layers():
    trace = json.loads(json.dumps(chrome_trace(match(gpu_times(*NAMES), STEP))))
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    layers = {e["name"]: e for e in spans if e["tid"] == 1}
    assert set(layers) == {"layer 0 forward", "layer 1 forward"}
    assert layers["layer 1 forward"]["ts"] == pytest.approx(0.036)
    assert layers["layer 1 forward"]["dur"] == pytest.approx(0.046)  # up to the end of attention
    kernels = [e for e in spans if e["tid"] == 3]
    assert len(kernels) == len(NAMES) and kernels[1]["args"]["bytes"] == 1000


# ----------------------------------------------------------------------------- what a launch moves
def array(n, at, dtype=np.float32):
    data = types.SimpleNamespace(ptr=at)
    return types.SimpleNamespace(nbytes=n * np.dtype(dtype).itemsize, size=n, data=data)


def moved(kernel, *args):
    return kernel_cost(kernel, args).nbytes


def test_bytes_of_a_launch():
    a, b, c, d = (array(100, at) for at in (1, 2, 3, 4))
    n = np.int64(7)
    assert moved(swiglu.make_swiglu_fwd_kernel(8, True), a, b, n) == 800
    assert moved(swiglu.make_swiglu_bwd_kernel(8, True, True), a, b, c, n) == 1600
    norm = rmsnorm.make_bwd_kernel(64, 4, True, False, False).kernel
    assert moved(norm, a, b, c, c, d, n) == 1600  # no skip: dy stands in for it
    again = rmsnorm.make_bwd_kernel(64, 4, True, False, False, True).kernel
    assert moved(again, a, b, c, c, d, n) == 2000  # dy is overwritten
    add = elementwise.add_kernel
    assert moved(add, a, b, c, n) == 1200 and moved(add, a, a, b, n) == 1200
    assert moved(softmax.causal_softmax_fwd_kernel, a, a, n) == 800  # read, and overwritten
    assert moved(embedding.make_sort_kernel(16), a, b, n) is None
    lookup = embedding.make_fwd_kernel(8, True)
    assert moved(lookup, a, array(10, 5), array(9999, 6), n) == 840
    wide, one = array(1000, 10), array(1, 11)  # packed: only the columns of v are read
    flash = flash_attention_bf16.make_fwd_kernel(64, True, Tiles(64, 64, 4, 1, True))
    assert moved(flash, a, one, b, c, wide, one, n, n) == 1604
    rope = qk_norm_rope.make_bwd_kernel(2, 2, 32, 8, True, False, False).kernel
    assert moved(rope, wide, one, a, b, array(1000, 12), n) == 2404
    small, half = array(1, 8), array(100, 9, np.float16)
    update = (a, b, c, half, d, small, small, n)
    assert moved(adamw.make_adamw_kernel(True, False), *update) == 100 * (24 + 4 + 2) + 4
    assert moved(adamw.make_adamw_kernel(True, True), *update) == 100 * (24 + 8 + 2) + 4


def test_a_declaration_names_parameters_of_the_kernel():
    with pytest.raises(ValueError, match="add_kernel has no parameter z_n"):
        declare_cost(elementwise.add_kernel, in_place=("z_n",))
    with pytest.raises(ValueError, match="add_kernel has no parameter z_n"):
        declare_cost(elementwise.add_kernel, sized_like={"a_n": ("z_n",)})


def test_operations_of_attention():
    B, T, H, D = 2, 64, 4, 32
    o, lse = array(B * T * H * D, 1), array(B * T * H, 2)
    sizes = [np.int32(x) for x in (T, T, H, 1, H * D, H * D, H * D)]
    flash = lambda causal: flash_attention_bf16.make_fwd_kernel(
        D, causal, Tiles(64, 64, 4, 1, True)
    )
    args = (o, lse, o, o, o, lse, *sizes)
    assert kernel_cost(flash(True), args).flops == 4 * B * H * T * T * D / 2
    assert kernel_cost(flash(False), args).flops == 4 * B * H * T * T * D
    window = flash_attention_bf16.make_fwd_kernel(D, True, Tiles(64, 64, 4, 1, True), 16)
    pairs = 16 * T - 16 * 16 / 2  # half of the triangle, as half of the square without a window
    assert kernel_cost(window, args).flops == 4 * B * H * pairs * D
    assert kernel_cost(elementwise.add_kernel, (o, o, o)).flops is None


def test_operations_of_attention_backward():
    B, T, H, G, D = 2, 64, 4, 2, 32
    sizes = [np.int32(x) for x in (T, T, H, H // G, 1, 1, 1, 1)]
    q, k, lse = array(B * T * H * D, 1), array(B * T * G * D, 2), array(B * T * H, 3)
    wide = flash_attention_bf16_bwd_d128.make_dkdv_d128_kernel
    dq, dkdv = flash_attention_bf16_bwd.make_dq_kernel, flash_attention_bf16_bwd.make_dkdv_kernel
    product = 2 * B * H * T * T * D / 2
    for kernel, arrays, products in (
        (dq(D, True, Tiles(64, 64, 4, 1)), (q, lse, q, q, k, k, q, lse, lse), 3),
        (dkdv(D, True, Tiles(64, 64, 4, 1)), (k, k, q, q, k, k, lse, lse, lse), 4),
        (wide(128, True, Tiles(64, 64, 8, 1)), (k, k, q, q, k, k, lse, lse, lse), 4),
    ):
        assert kernel_cost(kernel, (*arrays, *sizes)).flops == products * product


def test_operations_and_bytes_of_attention_through_tensor_maps(monkeypatch):
    B, T, S, H, G, D = 2, 64, 100, 4, 2, 64
    maps, lse = array(64, 1, np.uint64), array(B * T * H, 2)
    dims = (D, H, T, B), (D, G, S, B), (D, G, S, B), (D, H, T, B), (256, 8)
    specs = tuple(tma.TensorMapSpec(0, d, (), (), 2 if len(d) == 4 else 4) for d in dims)
    monkeypatch.setattr(tma, "_evictable", {(0, specs): maps})
    kernel = flash_attention_hopper_bwd.make_dq_kernel(D, True, HopperTiles(64, 2, 2, 1, 1))
    cost = kernel_cost(kernel, (maps, lse))
    assert cost.flops == 6 * B * H * T * S * D
    elements = 2 * B * H * T * D + 2 * B * G * S * D
    assert cost.nbytes == 2 * elements + 4 * 256 * 8 + maps.nbytes + lse.nbytes
    with pytest.raises(ValueError, match="does not come from tensor_maps"):
        kernel_cost(kernel, (lse,))


def test_cost_of_grouped_products(monkeypatch):
    """2 M O I operations for each; each array once, dw twice if it is added to."""
    M, O, I, E = 256, 24, 40, 3  # noqa: E741
    x, dy, w = (I, 1, M, 1), (O, 1, M, 1), (I, 1, O, E)
    for kind, mapped, size in ((FORWARD, (x, w, dy), 2), (DX, (dy, w, x), 2), (DW, (dy, x, w), 4)):
        maps = array(48, 1, np.uint64)
        specs = tuple(
            tma.TensorMapSpec(0, d, (), (), size if d == mapped[2] else 2) for d in mapped
        )
        monkeypatch.setattr(tma, "_evictable", {(0, specs): maps})
        for added in (False, True):
            kernel = make_kernel(kind, TILES[kind], Result(size == 4, added))
            cost = kernel_cost(kernel, (maps,))
            assert cost.flops == 2 * M * O * I
            sizes = [math.prod(d) for d in mapped]
            assert cost.nbytes == 2 * sum(sizes[:2]) + size * sizes[2] * (1 + added)


def test_cost_of_a_product():
    x = lambda *shape: np.zeros(shape, np.float32)
    cost = product_cost(x(3, 5), x(3, 7), x(5, 7))
    assert (cost.nbytes, cost.flops) == (4 * (15 + 21 + 35), 2.0 * 3 * 5 * 7)
    cost = product_cost(x(2, 3, 5), x(2, 3, 7), x(2, 7, 5))
    assert (cost.nbytes, cost.flops) == (8 * (15 + 21 + 35), 2.0 * 2 * 3 * 5 * 7)


def test_a_planned_step_is_recorded():
    """The order of launches and their ops, without a GPU: arrays without values, kernels that do not start."""
    config = ModelConfig(vocab_size=300, dim=64, n_layers=2, n_heads=2, head_dim=32, max_seq_len=64)
    recorder = Recorder()
    with planning(config.padded_vocab_size):
        model = Transformer(config, None, "gpu")
        ids = np.zeros((2, 64), np.int32)
        recorder(lambda: model.loss(ids, ids).backward())
    launches = recorder.launches
    assert {x.layer for x in launches} == {"", "layer 0", "layer 1"}
    products = [x for x in launches if x.name.startswith("product")]
    # 4 products in a layer's forward besides attention, 8 in its backward
    assert len([x for x in products if x.layer and "Linear" in x.op]) == 2 * 12
    assert [x.flops for x in products if x.layer == "" and x.way == "forward"] == 3 * [
        2.0 * 128 * 64 * config.padded_vocab_size
    ]
    assert recorder.open_ops == [Op("", "", "")]


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_eager_step_is_recorded_and_timed(precision):
    config = ModelConfig(
        vocab_size=300, dim=128, n_layers=2, n_heads=4, head_dim=32, max_seq_len=64
    )
    model = Transformer(config, device="gpu", precision=precision)
    ids = np.zeros((2, 64), np.int32)
    step = lambda: model.loss(ids, ids).backward()
    step()  # compiles
    recorder, plain = Recorder(events=True), Recorder()
    recorder(step)
    plain(step)
    assert recorder.launches == plain.launches and len(plain.launches) > 40
    products = [x for x in plain.launches if x.name.startswith("product")]
    head = [x for x in products if x.layer == "" and x.way == "forward"]
    # logits, and at once the gradients of what went in and of the weights
    assert [x.flops for x in head] == 3 * [2.0 * 128 * 128 * config.padded_vocab_size]
    assert {x.layer for x in plain.launches} == {"", "layer 0", "layer 1"}
    times = recorder.timed()
    assert all(t.end >= t.start for t in times) and times[-1].end > times[0].end
    assert GPU


@pytest.mark.gpu
def test_cupti_sees_kernels_inside_a_graph():
    pytest.importorskip("cupti")
    from xtrain.device import cupy
    from xtrain.kernels.elementwise import scale_fwd
    from xtrain.nn.cuda_graph import Graphed

    run = Graphed(lambda x: (scale_fwd(scale_fwd(x, 2.0), 3.0),))
    x = cupy().ones(1 << 20, np.float32)
    for _ in range(3):
        run(x)
    times = kernel_times.cupti_times(lambda: [run(x) for _ in range(5)])
    assert sum(t.name == "scale_kernel" for t in times) == 10
