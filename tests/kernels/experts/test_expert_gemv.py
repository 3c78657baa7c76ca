"""The experts of a few rows: the reference against grouped products, the kernels against the reference, planted bugs."""

import contextlib
import functools
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from checks import (
    GPU,
    SLOW,
    assert_as_good,
    assert_bug_is_found,
    double,
    int32,
    normal,
    on_kernel,
    only_slow,
    pairwise,
    planted_bugs,
    rng,
    same_bytes,
    sentinels,
    to_host,
    to_kernel,
    with_planted_bug,
)

from xtrain.kernels.experts import expert_gemv as file
from xtrain.kernels.experts.expert_gemv import WIDE, expert_gemv, expert_gemv_ref
from xtrain.kernels.experts.expert_order import expert_order
from xtrain.kernels.experts.expert_rows import gather_rows, sum_rows
from xtrain.kernels.experts.expert_swiglu import expert_swiglu
from xtrain.kernels.experts.grouped_product import grouped_product
from xtrain.kernels.four_bits import FOUR_BITS
from xtrain.kernels.quantize import KINDS, dequantize, quantize
from xtrain.kernels.runtime.launch import launch
from xtrain.kernels.swiglu import swiglu_ref
from xtrain.simulator import KernelError

BF16 = ml_dtypes.bfloat16
SMALL = (2, 2, 4, 24, 16)
WIDE_ROW = (1, 1, 2, WIDE + 8, 8)
MANY_STEPS = (1, 22, 24, 8, 8)  # several warps for a sum; the last has fewer steps than the others
SHAPES = [(1, 1, 1, 8, 8), SMALL, (1, 1, 2, 8, WIDE + 8), WIDE_ROW, MANY_STEPS]
SHAPES += [
    (8, 8, 32, 2048, 768),
    (1, 2, 16, 1024, 2048),
    (1, 2, 2, 512, 14336),
] * GPU  # N, K, E, C, F


def case(N, K, E, C, F, dtype=np.float32):
    """-> x, weights, experts, gate_up, down"""
    experts = np.argsort(rng(N, E).random((N, E)), 1)[:, :K]
    arrays = normal(1, N, C), normal(2, N, K), normal(3, E, 2 * F, C), normal(4, E, C, F)
    x, w, gate_up, down = arrays
    scale = np.float32((4 * C) ** -0.5)
    return x.astype(dtype), w, int32(experts), (gate_up * scale).astype(dtype), down.astype(dtype)


def test_reference_is_that_of_grouped_products():
    x, w, experts, gate_up, down = case(5, 2, 4, 6, 3, np.float64)
    order = expert_order(experts, 4)
    a = expert_swiglu(grouped_product(gather_rows(x, order), gate_up, order), w, order)
    want = sum_rows(grouped_product(a, down, order), order)
    np.testing.assert_allclose(expert_gemv(x, w, experts, gate_up, down), want, rtol=1e-12)


@contextlib.contextmanager
def fewer_in_flight():
    """With half of the registers for loads: a warp has several rounds at small shapes."""
    kernels = file.make_gate_up_kernel, file.steps_of, file.make_down_kernel
    with mock.patch.object(file, "WORDS", 16):
        for make in kernels:
            make.cache_clear()
        yield
    for make in kernels:
        make.cache_clear()


def test_several_rounds():
    with fewer_in_flight():
        for shape in SHAPES[3:5]:
            check_kernels(shape, np.float32)


def check_kernels(shape, dtype):
    given = case(*shape, dtype)
    x, w, experts, gate_up, down = given
    y = expert_gemv(*map(to_kernel, given), weights_ready=True)
    single = [a.astype(np.float32) for a in (x, w, gate_up, down)]
    wide = double(*single)
    exact = expert_gemv_ref(*wide[:2], experts, *wide[2:])
    rounded = expert_gemv_ref(*single[:2], experts, *single[2:]).astype(dtype)
    # a is rounded to bf16, too
    assert_as_good(y, exact, rounded, floor=1e-6 if dtype == np.float32 else 4e-3, what="y")
    return to_host(y)


@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels(shape, dtype):
    if GPU or dtype == np.float32 or shape[4] < WIDE:  # the widest rows once
        check_kernels(shape, dtype)


def test_a_row_does_not_depend_on_the_others_and_nothing_outside_is_written(monkeypatch):
    x, w, experts, gate_up, down = case(3, 2, 5, 8, 16, BF16)
    with sentinels(monkeypatch):
        y = to_host(expert_gemv(*map(to_kernel, (x, w, experts, gate_up, down))))
    for n in range(3):
        one = [a[n : n + 1].copy() for a in (x, w, experts)]
        assert same_bytes(y[n], to_host(expert_gemv(*map(to_kernel, (*one, gate_up, down))))[0])


def test_bad_input():
    x, w, experts, gate_up, down = map(to_kernel, case(2, 2, 3, 8, 8))
    with pytest.raises(ValueError, match=r"gate_up has shape \(3, 8, 8\), expected \(3, 16, 8\)"):
        expert_gemv(x, w, experts, down, down)
    with pytest.raises(TypeError, match="down is bfloat16"):
        expert_gemv(x, w, experts, gate_up, to_kernel(to_host(down).astype(BF16)))
    many = map(to_kernel, case(9, 2, 3, 8, 8))
    with pytest.raises(
        ValueError, match="9 rows of 8 with 8, supported are 1 to 8, of multiples of 8, C to 8192"
    ):
        expert_gemv(*many)
    for kind, shape, words in (
        ("int4", (65, 1, 1, 8, 8), "65 rows of 8 with 8, supported are 1 to 64, of multiples of 8"),
        ("nf4", (1, 1, 1, 12, 8), "1 rows of 12 with 8, supported are 1 to 64, of multiples of 8"),
        (
            "int8",
            (1, 1, 1, 16, 8),
            "1 rows of 16 with 8, supported are 1 to 64, of multiples of 16",
        ),
    ):
        given, _ = coded(*shape, np.float32, kind)
        with pytest.raises(ValueError, match=words):
            expert_gemv(*given)
    (x, w, experts, gate_up, down), _ = coded(1, 1, 2, 16, 16, np.float32, "int8")
    with pytest.raises(ValueError, match=r"have \(64, 16\) rows of codes, expected \(32, 16\)"):
        expert_gemv(x, w, experts, gate_up, down.rows(0, 16))
    with pytest.raises(ValueError, match="gate_up of kind 'int8', down of ''"):
        expert_gemv(x, w, experts, gate_up, to_kernel(normal(0, 2, 16, 16)))
    with pytest.raises(ValueError, match="codes of float32, x is bfloat16"):
        expert_gemv(to_kernel(to_host(x).astype(BF16)), w, experts, gate_up, down)


# ----------------------------------------------------------------------------- codes
# The last group of four bits has padding; of a row of y several warps share the steps.
CODED = [(1, 1, 2, 16, 16), (2, 2, 3, 16, 32)]
CODED += [(1, 7, 7, 16, 16)] * (SLOW or GPU)
CODED += [(1, 2, 2, 144, 16), (1, 2, 2, 1040, 16), (1, 9, 9, 16, 1040)] * GPU
CODED += [(16, 8, 32, 2048, 768), (1, 2, 2, 1024, 14336), (3, 2, 4, 8192, 512)] * GPU


def coded(N, K, E, C, F, dtype, kind):
    """-> the arguments with codes, where kernels run; the same with the arrays that they stand for, float32"""
    x, w, experts, *matrices = case(N, K, E, C, F, dtype)
    codes = [quantize(m.reshape(-1, m.shape[-1]), kind) for m in matrices]
    dense = [dequantize(c, np.float32).reshape(E, -1, c.shape[1]) for c in codes]
    given = *map(to_kernel, (x, w, experts)), *map(on_kernel, codes)
    return given, (x.astype(np.float32), w, experts, *dense)


def check_codes(shape, dtype, kind):
    given, (x, w, experts, *matrices) = coded(*shape, dtype, kind)
    exact = expert_gemv_ref(*double(x, w), experts, *double(*matrices))
    rounded = expert_gemv_ref(x, w, experts, *matrices).astype(dtype)
    floor = 1e-6 if dtype == np.float32 else 4e-3
    y = expert_gemv(*given, weights_ready=True)
    assert_as_good(y, exact, rounded, floor=floor, what=kind)
    return y


GATE_UP, DOWN = "expert_gate_up_kernel", "expert_down_kernel"


def run_one_kernel(name, given, a):
    """Run this one of the two kernels. -> what it has computed. a: what the other one computes for it"""
    found = []

    def launch_one(kernel, grid, block, out, vector, *rest, **more):
        if kernel.__name__ == name:
            vector = to_kernel(a.reshape(-1)) if name == DOWN else vector
            launch(kernel, grid, block, out, vector, *rest, **more)
            found.append(to_host(out))

    with mock.patch.object(file, "launch", launch_one):
        expert_gemv(*given, weights_ready=True)
    return found[0]


def a_ref(x, w, experts, gate_up):
    """-> a (N, K, F)"""
    rows = (
        swiglu_ref((gate_up[e] @ x[n])[None])[0] * w[n, k] for (n, k), e in np.ndenumerate(experts)
    )
    return np.reshape([*rows], (*experts.shape, -1))


def check_one_kernel(name, shape, dtype, kind):
    """The rows of one matrix are as many as the other has columns: rows as long as this take a kernel of many equal blocks."""
    given, (x, w, experts, gate_up, down) = coded(*shape, dtype, kind)
    a = a_ref(x, w, experts, gate_up).astype(dtype)
    found = run_one_kernel(name, given, a)
    if name == GATE_UP:
        exact = a_ref(*double(x, w), experts, *double(gate_up))
        rounded = a
    else:
        sums = lambda a, down: np.einsum("nkf,nkcf->nc", a, down[experts])
        single = a.astype(np.float32)
        exact = sums(*double(single, down))
        rounded = sums(single, down).astype(dtype)
    floor = 1e-6 if dtype == np.float32 else 4e-3
    assert_as_good(found.reshape(exact.shape), exact, rounded, floor=floor, what=kind)


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_computes_with_what_codes_stand_for(kind):
    x, w, experts, gate_up, down = case(3, 2, 4, 20, 12)
    codes = [quantize(m.reshape(-1, m.shape[-1]), kind) for m in (gate_up, down)]
    dense = [dequantize(c).reshape(m.shape) for c, m in zip(codes, (gate_up, down))]
    found, wanted = (expert_gemv(x, w, experts, *m) for m in (codes, dense))
    assert same_bytes(found, wanted) and np.abs(found).max() > 0


@pairwise({"kind": KINDS, "shape": CODED, "dtype": [np.float32, BF16]})
def test_codes(kind, shape, dtype):
    check_codes(shape, dtype, kind)


@only_slow
@pairwise({"kind": KINDS, "dtype": [np.float32, BF16]})
def test_rows_of_several_groups(kind, dtype):
    check_one_kernel(GATE_UP, (1, 2, 2, 144, 16), dtype, kind)
    check_one_kernel(DOWN, (1, 2, 2, 16, 144), dtype, kind)


def test_several_accesses_to_a_row_of_codes():
    check_one_kernel(GATE_UP, (1, 1, 1, 528, 16), np.float32, "int8")
    check_one_kernel(DOWN, (1, 1, 1, 16, 528), np.float32, "int8")


def test_a_row_of_codes_does_not_depend_on_the_others(monkeypatch):
    """Whichever experts they choose."""
    (x, w, experts, *codes), _ = coded(2, 1, 3, 16, 16, BF16, "int4")
    with sentinels(monkeypatch):
        y = to_host(expert_gemv(x, w, experts, *codes))
    other = to_kernel(int32([to_host(experts)[0], (to_host(experts)[1] + 1) % 3]))
    again = to_host(expert_gemv(x, w, other, *codes))
    assert same_bytes(y[0], again[0]) and not same_bytes(y[1], again[1])


@planted_bugs
@pytest.mark.parametrize(
    "kind, name, old, new",
    [
        ("int4", "make_reader", "(RUN - 1)) >> 2) + 32 * part", "(RUN - 1)) >> 0) + 8 * part"),
        ("int4", "make_reader", "return k + (k >> RUN_BITS) * GAP", "return k"),
        ("int4", "make_reader", "int64(c >> RUN_BITS) * matrices.scale.size + row", "int64(row)"),
        ("int4", "make_reader", "scale.size + row", "scale.size + row // 2"),
        ("int4", "make_reader", "total = acc + total * scale", "total = acc + total"),
        ("nf4", "make_reader", "nf4_group_scale(group, part // 2)", "nf4_group_scale(group, part % 2)"),
        ("int8", "make_reader", "at + CHUNK * h", "at"),
        ("int8", "make_gate_up_kernel", "up *= scale[up_row]", "up *= scale[gate_row]"),
        ("int8", "make_gate_up_kernel", "gate *= scale[gate_row]", "gate *= scale[f]"),
        ("fp8", "make_down_kernel", "matrices.scale[row]", "matrices.scale[c]"),
        ("fp8", "make_down_kernel", "total = float32(0.0) if CODES else acc", "total = acc"),
        ("int4", "make_down_kernel", "range(TURNS)", "range(1)"),
    ],
)  # fmt: skip
def test_planted_bugs_of_codes_are_found(kind, name, old, new):
    if kind in FOUR_BITS:  # two groups of a row of down; the second access of a warp that copies a
        shape = (1, 1, 2, 8, 272 if "TURNS" in old else 136)
        check = functools.partial(check_one_kernel, DOWN, shape, np.float32, kind)
    else:
        check = functools.partial(check_codes, (1, 2, 3, 16, 16), np.float32, kind)
    run_once(check.func, *check.args)
    with with_planted_bug([file], name, old, new), pytest.raises((KernelError, AssertionError)):
        check()


@functools.cache
def run_once(check, *arguments):
    check(*arguments)


@planted_bugs
@pytest.mark.parametrize(
    "shape, name, old, new",
    [
        (MANY_STEPS, "make_gate_up_kernel", "int64(pair // K) * C, c", "int64(pair) * C, c"),
        (SMALL, "make_gate_up_kernel", "* (2 * F) + f", "* F + f"),
        (SMALL, "make_gate_up_kernel", "c, C)", "c, ALL)"),
        (SMALL, "make_gate_up_kernel", "                cuda.syncthreads()", "                pass"),
        (WIDE_ROW, "make_gate_up_kernel", "x_s, first + s * WIDTH", "x_s, s * WIDTH"),
        (SMALL, "make_gate_up_kernel", "* weights_P[pair]", "* weights_P[0]"),
        (SMALL, "make_down_kernel", "experts_P[n * K + step // STEPS]", "experts_P[n * K]"),
        (MANY_STEPS, "make_down_kernel", "F if own < EACH and step < ALL else 0", "F if own < EACH else 0"),
        (MANY_STEPS, "make_down_kernel", "F if own < EACH and step < ALL else 0", "F if step < ALL else 0"),
        (MANY_STEPS, "make_down_kernel", "n, c, part * EACH)", "n, c, part)"),
        (MANY_STEPS, "make_down_kernel", "range(1, PARTS)", "range(2, PARTS)"),
        (MANY_STEPS, "make_down_kernel", "cuda.syncthreads()  # a of the steps", "pass  # a of the steps"),
        (SMALL, "make_down_kernel", "cuda.syncthreads()  # a is in", "pass  # a is in"),
        (MANY_STEPS, "make_down_kernel", "cuda.syncthreads()  # the sums", "pass  # the sums"),
        (SMALL, "make_down_kernel", "if overlap and ready:\n            wait_for_previous()", "if overlap and ready:\n            pass"),
    ],
)  # fmt: skip
def test_planted_bugs_are_found(shape, name, old, new):
    assert_bug_is_found(CHECKS[shape], [file], name, old, new)


def check_rounds(shape):
    with fewer_in_flight():
        check_kernels(shape, np.float32)


CHECKS = {shape: functools.partial(check_rounds, shape) for shape in SHAPES[1:5]}


@pytest.mark.parametrize(
    "shape, kind, rows, here, grouped",  # microseconds on one H200
    [
        ("Mixtral", "", 8, 1904, 723),
        ("Mixtral", "int8", 16, 2319, 2670),
        ("Mixtral", "int4", 32, 4416, 2229),
        ("Qwen3-30B-A3B", "", 8, 184, 203),
        ("Qwen3-30B-A3B", "", 16, 349, 303),
        ("Qwen3-30B-A3B", "int4", 64, 691, 886),
        ("Qwen3-30B-A3B", "nf4", 48, 742, 839),
        ("Qwen3-30B-A3B", "nf4", 64, 986, 889),
        ("16 x 0.1 B", "", 8, 60, 81),
        ("16 x 0.1 B", "", 16, 105, 98),
        ("16 x 0.1 B", "int8", 32, 149, 182),
        ("16 x 0.1 B", "int8", 48, 218, 203),
    ],
)
def test_the_faster_way_is_chosen(shape, kind, rows, here, grouped):
    shapes = {"Mixtral": (2, 8, 4096, 14336), "Qwen3-30B-A3B": (8, 128, 2048, 768)}
    K, E, C, F = (shapes | {"16 x 0.1 B": (2, 16, 1024, 2048)})[shape]
    assert file.expert_gemv_pays(rows, K, E, 3 * C * F, kind) is (here < grouped)
    assert file.expert_gemv_pays(1, K, K, 3 * C * F, kind)  # each expert is read once either way
