"""gemv.py: every fused form against float64 and PyTorch; rows do not depend on each other."""

import functools
import itertools

import ml_dtypes
import numpy as np
import pytest
import torch
from checks import (
    GPU,
    assert_as_good,
    normal,
    planted_bugs,
    sentinels,
    to_host,
    to_kernel,
    with_bug,
    with_planted_bug,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from xtrain.kernels.decoding import gemv as file
from xtrain.kernels.decoding import gemv_tensor_cores
from xtrain.kernels.decoding.gemv import add_norm_gemv, gemv, gemv_fits, gemv_naive_kernel, gemv_ref
from xtrain.kernels.decoding.gemv_operands import Config, Variant, shared_bytes, staged
from xtrain.kernels.runtime.launch import launch
from xtrain.simulator import KernelError, sim

BF16 = ml_dtypes.bfloat16
EPS = 1e-6


def case(N, K, rows, x=np.float32, w=BF16, norm=False, delta=None, swiglu=False, bias=False):
    """-> x, delta, norm_w, w, eps, swiglu, b"""
    rows = rows * (2 if swiglu else 1)
    norm_w = normal(3, K) if norm else None
    added = normal(4, N, K).astype(delta) if delta else None
    weights = (normal(2, rows, K) * K**-0.5).astype(w)
    return (
        normal(1, N, K).astype(x),
        added,
        norm_w,
        weights,
        EPS,
        swiglu,
        normal(5, rows) if bias else None,
    )


def run(args, put, **more):
    """-> h, y on the host"""
    x, delta, norm_w, w, eps, swiglu, b = (put(a) if isinstance(a, np.ndarray) else a for a in args)
    if norm_w is None:
        return None, to_host(gemv(x, w, b_O=b, **more))
    return tuple(map(to_host, add_norm_gemv(x, delta, norm_w, w, eps, swiglu, b_O=b, **more)))


def exactly(args):
    x, delta, norm_w, w, eps, swiglu, b = (
        a.astype(np.float64) if isinstance(a, np.ndarray) else a for a in args
    )
    return gemv_ref(x, w, norm_w, eps, delta, swiglu, b)


def check(args, **more):
    (h, y), (h_ref, single) = run(args, to_kernel, **more), run(args, np.array, **more)
    _, exact = exactly(args)
    assert y.dtype == single.dtype
    # x becomes bf16
    rounded = args[3].dtype == BF16 and (args[2] is not None or args[0].dtype != BF16)
    # adding in tensor cores truncates: the error grows with the number of additions and has a sign
    floor = 6e-3 if rounded else 4e-6 if args[3].dtype == BF16 else 1e-6
    assert_as_good(y, exact, single, what="y", floor=floor, scale=1.0)
    assert h is None or (h.dtype == args[0].dtype and np.array_equal(h, h_ref))


SHAPES = [(8, 32, 5), (2, 288, 21)]
SHAPES += [(1, 2048, 2560), (8, 5632, 2048), (3, 2048, 32000), (1, 14336, 4096)] if GPU else []
FORMS = [  # x, w, then what is fused
    dict(x=BF16),
    dict(x=np.float32),
    dict(norm=True),
    dict(norm=True, swiglu=True),
    dict(norm=True, delta=BF16),
    dict(norm=True, delta=BF16, swiglu=True),
    dict(x=BF16, norm=True, swiglu=True),
    dict(w=np.float32),
    dict(w=np.float32, norm=True, swiglu=True),
    dict(w=np.float32, norm=True, delta=np.float32),
    dict(w=np.float32, x=BF16, norm=True),
    dict(x=BF16, bias=True),
    dict(norm=True, delta=BF16, bias=True),
    dict(norm=True, delta=BF16, swiglu=True, bias=True),
    dict(w=np.float32, norm=True, delta=np.float32, bias=True),
    dict(w=np.float32, norm=True, swiglu=True, bias=True),
]


# In the simulator every form with one shape: of each kind of weights and of what is fused, some have the one, some the other.
CASES = list(itertools.product(FORMS, SHAPES) if GPU else zip(FORMS, itertools.cycle(SHAPES)))


@pytest.mark.long
@pytest.mark.parametrize("form, shape", CASES, ids=str)
def test_kernel(form, shape):
    check(case(*shape, **form))


@pytest.mark.long
@pytest.mark.parametrize("swiglu", [False, True])
def test_many_tiles_per_block_and_steps_per_tile(monkeypatch, swiglu):
    monkeypatch.setattr(file, "MULTIPROCESSORS", 1)
    check(case(2, 32 * 18, 20, norm=True, delta=BF16, swiglu=swiglu))
    check(case(2, 32 * 5, 40, norm=True, swiglu=swiglu))


@pytest.mark.parametrize(
    "config", [Config(1, 1, 1), Config(2, 3, 1), Config(4, 4, 2), Config(16, 1, 1)], ids=str
)
def test_every_division_of_the_work(monkeypatch, config):
    args = case(3, 32 * 7, 40, norm=True, delta=BF16, bias=True)
    y, h = (to_kernel(np.full((3, n), np.nan, np.float32)) for n in (40, 32 * 7))
    x, delta, norm_w, w, b = (to_kernel(a) for a in (*args[:4], args[6]))
    monkeypatch.setattr(file, "MULTIPROCESSORS", 1)  # more than a tile per block
    file._launch(y, h, x, delta, norm_w, w, EPS, False, True, config, b)
    assert_as_good(y, exactly(args)[1], run(args, np.array, dtype=np.float32)[1], floor=6e-3)
    assert np.array_equal(to_host(h), args[0] + args[1].astype(np.float32))


def test_the_products_of_a_decoder():
    kinds = [(2048, 2560, False, True), (2048, 2048, False, False), (2048, 5632, True, True)]
    kinds += [(5632, 2048, False, False), (2048, 32000, False, True)]
    assert [gemv_tensor_cores.choose(*kind) for kind in kinds] == [
        Config(warps=16, chunks=4, blocks=1),
        Config(warps=8, chunks=8, blocks=2, stage=False),
        Config(warps=4, chunks=4, blocks=3),
        Config(warps=16, chunks=11, blocks=1),
        Config(warps=4, chunks=4, blocks=4),
    ]


@settings(max_examples=6, deadline=None)
@given(st.data())
def test_any_shape(data):
    form = dict(data.draw(st.sampled_from(FORMS)))
    K = data.draw(st.integers(1, 6)) * 32
    check(case(data.draw(st.integers(1, 8)), K, data.draw(st.integers(1, 40)), **form))


@pytest.mark.long
@pytest.mark.parametrize("form", [FORMS[0], FORMS[5], FORMS[9]], ids=str)
def test_a_row_does_not_depend_on_the_others(form):
    args = case(5, 96, 20, **form)
    rows = lambda take: tuple(None if a is None else a[take].copy() for a in args[:2])
    for put in (to_kernel, np.array):
        together = run(args, put)[1]
        turned = run((*rows(slice(None, None, -1)), *args[2:]), put)[1]
        assert np.array_equal(turned[::-1], together)
        for n, ready in ((1, True), (3, False)):
            some = run((*rows(slice(n)), *args[2:]), put, weights_ready=ready)[1]
            assert np.array_equal(some, together[:n])


@pytest.mark.parametrize("w", [np.float32, BF16])
def test_types_and_inputs_unchanged(w):
    args = case(2, 64, 10, w=w, norm=True, delta=w)
    for put in (to_kernel, np.array):
        x, delta, norm_w, weights = (put(a) for a in args[:4])
        h, y = add_norm_gemv(x, delta, norm_w, weights, EPS)
        assert y.dtype == w and h.dtype == np.float32
        assert np.array_equal(to_host(x), args[0]) and np.array_equal(to_host(delta), args[1])
        assert add_norm_gemv(x, None, norm_w, weights, EPS)[0] is x
        assert gemv(x, weights).dtype == w
        assert gemv(x, weights, np.float32).dtype == np.float32


def test_naive_kernel():
    x, w = normal(1, 2, 30), normal(2, 7, 30)
    y = to_kernel(np.zeros((2, 7), np.float32))
    launch(gemv_naive_kernel, (1, 2), file.BLOCK, y, to_kernel(x), to_kernel(w))
    np.testing.assert_allclose(to_host(y), x @ w.T, rtol=1e-5)


def test_against_pytorch():
    args = case(3, 64, 12, w=np.float32, norm=True, delta=np.float32, swiglu=True, bias=True)
    x, delta, norm_w, w, b = (torch.tensor(a) for a in (*args[:4], args[6]))
    normed = torch.nn.functional.rms_norm(x + delta, (64,), norm_w, EPS)
    gate, up = torch.nn.functional.linear(normed, w, b).chunk(2, 1)
    want = torch.nn.functional.silu(gate) * up
    for put in (to_kernel, np.array):
        np.testing.assert_allclose(run(args, put)[1], want.numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("w", [np.float32, BF16])
def test_nothing_outside_the_output_and_the_same_bits_twice(monkeypatch, w):
    args = case(3, 96, 21, w=w, norm=True, delta=w)
    with sentinels(monkeypatch):
        first = run(args, to_kernel)
    assert all(map(np.array_equal, first, run(args, to_kernel)))


@pytest.mark.parametrize(
    "stage, old, new",
    [
        (True, "            cuda.syncthreads()\n            finish", "            finish"),
        (True, "            cuda.syncthreads()  # the sums have been read\n", ""),
        (
            False,
            "        if ready:\n            load_first(words",
            "        if not ready:\n            load_first(words",
        ),
        (False, "                if tid & 3 == 0:\n    ", "                if True:\n    "),
        (True, "            cuda.syncthreads()  # x is in shared memory\n", ""),
    ],
)
def test_planted_bugs_are_found(stage, old, new):
    name = gemv_tensor_cores.__name__
    scope = with_bug(
        gemv_tensor_cores, old, new, dict(__name__=name, __package__=name.rpartition(".")[0])
    )
    without_a_bug(stage)
    with pytest.raises(KernelError):
        run_tensor_kernel(scope["make_tensor_kernel"], stage)


@functools.cache
def without_a_bug(stage):
    run_tensor_kernel(gemv_tensor_cores.make_tensor_kernel, stage)


def run_tensor_kernel(make, stage):
    x, delta, norm_w, w, *_, b = case(2, 128, 40, norm=True, delta=BF16, bias=True)
    y, h = sim(np.zeros((2, 40), np.float32)), sim(np.zeros((2, 128), np.float32))
    arrays = [a.reshape(-1) for a in (y, h, sim(x), sim(delta), sim(w), *[sim(norm_w)] * 3, sim(b))]
    variant = Variant(
        norm=True, add=True, half=False, swiglu=False, bias=True, overlap=True, ready=True, once=False, staged=stage
    )  # fmt: skip
    tensor_kernel = make(128, variant, Config(2, 1, 1))
    launch(tensor_kernel, 2, 64, *arrays, 2, 40, np.float32(EPS), shared=shared_bytes(2, 128))


@planted_bugs
@pytest.mark.parametrize(
    "w, name, old, new",
    [
        (BF16, "make_finish", "value += weights.b[o]", "value += weights.b[o + 1]"),
        (BF16, "make_finish", "up += weights.b[F + o]", "up += weights.b[2 * F + o]"),
        (BF16, "make_finish", "value += weights.b[o]", "value += weights.b[row]"),
        (np.float32, "make_multiply_row", "up += weights.b[F + o]", "up += weights.b[o]"),
        (np.float32, "make_multiply_row", "value += weights.b[o]", "value += weights.b[o] * r"),
    ],
)
def test_planted_bugs_of_the_bias_are_found(w, name, old, new):
    """By the simulator, or by wrong numbers."""
    check_the_bias(w)
    module = file if name == "make_multiply_row" else gemv_tensor_cores
    planted = with_planted_bug([module, file, gemv_tensor_cores], name, old, new)
    with planted, pytest.raises((KernelError, AssertionError)):
        check_the_bias.__wrapped__(w)


@functools.cache  # the kernels without bugs run once
def check_the_bias(w):
    check(case(2, 64, 21, w=w, norm=True, swiglu=True, bias=True))


@pytest.mark.long
@pytest.mark.parametrize("norm", [False, True])
def test_wider_than_shared_memory(norm):
    """x stays in global memory then, and the result is right."""
    K = 5888
    plain, direct = Config(8, 2, 1), Config(8, 2, 1, False)
    assert not staged(K, plain) and staged(4096, plain) and not staged(64, direct)
    check(case(2, K, 5, norm=norm))


def test_what_fits():
    assert gemv_fits(8, 64, BF16) and gemv_fits(1, 36, np.float32)
    assert not any(
        (
            gemv_fits(9, 64, BF16),
            gemv_fits(0, 64, BF16),
            gemv_fits(1, 48, BF16),
            gemv_fits(1, 6, np.float32),
        )
    )


def test_bad_input():
    x, delta, norm_w, w, *_ = case(2, 64, 10, norm=True, delta=BF16)
    with pytest.raises(ValueError, match=r"w has shape \(10, 64\), expected \(any, 32\)"):
        gemv(x[:, :32].copy(), w)
    with pytest.raises(ValueError, match=r"norm_w has shape \(3,\), expected \(64\)"):
        add_norm_gemv(x, delta, normal(1, 3), w, EPS)
    with pytest.raises(ValueError, match=r"delta has shape \(2, 9\), expected \(2, 64\)"):
        add_norm_gemv(x, normal(1, 2, 9), norm_w, w, EPS)
    with pytest.raises(ValueError, match="swiglu of 9 rows"):
        add_norm_gemv(x, delta, norm_w, w[:9].copy(), EPS, True)
    with pytest.raises(
        ValueError, match="9 rows of 64, the GPU supports 1 to 8 of a multiple of 32"
    ):
        run(case(9, 64, 10), to_kernel)
    args = [to_kernel(normal(i, n, 6)) for i, n in ((1, 2), (2, 10))]
    with pytest.raises(ValueError, match="2 rows of 6, the GPU supports 1 to 8 of a multiple of 4"):
        gemv(*args)
    with pytest.raises(ValueError, match="2 rows of 48"):
        run(case(2, 48, 10), to_kernel)
