"""Matrix products against float64, in every layout; linear against PyTorch."""

import itertools
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from checks import GPU, assert_as_good, normal, pairwise, rng, to_host

from xtrain.device import to_device
from xtrain.kernels import gemm
from xtrain.kernels.cast import BFLOAT16
from xtrain.kernels.gemm import linear_bwd_w, linear_bwd_x, linear_fwd, matmul
from xtrain.kernels.runtime.invariance import batch_invariant

FLAGS = list(itertools.product((False, True), (False, True)))
SIZES = [(1, 1, 1), (3, 5, 4), (33, 17, 65), (1, 64, 8)] + ([(257, 1000, 129)] if GPU else [])


def put(array):
    """On the GPU if there is one, else NumPy: the simulator has no cuBLAS."""
    return to_device(np.array(array, order="C"), "gpu" if GPU else "cpu")


def operands(M, K, N, trans_a, trans_b, batch=()):
    a = normal(1, *batch, *((K, M) if trans_a else (M, K)))
    b = normal(2, *batch, *((N, K) if trans_b else (K, N)))
    return a, b


def exact(a, b, trans_a, trans_b, dtype=np.float64):
    a, b = (x.astype(dtype).swapaxes(-1, -2) if t else x.astype(dtype) for x, t in ((a, trans_a), (b, trans_b)))  # fmt: skip
    return np.matmul(a, b)


def tolerance(K):
    """The rounding error of a sum of K products in another order than that of NumPy, relative to the largest result."""
    return 1.2e-7 * (2 + K**0.5)


@pairwise(
    {
        "M, K, N": SIZES,
        "trans_a, trans_b": FLAGS,
        "batch": [(), (1,), (6,)],
        "alpha": [1.0, -0.25],
        "accumulate": [False, True],
    }
)
def test_against_float64(M, K, N, trans_a, trans_b, batch, alpha, accumulate):
    a, b = operands(M, K, N, trans_a, trans_b, batch)
    before = normal(3, *batch, M, N)
    out = put(before)
    options = dict(trans_a=trans_a, trans_b=trans_b, alpha=alpha, accumulate=accumulate)
    assert matmul(out, put(a), put(b), **options) is out
    want, reference = (
        d(alpha) * exact(a, b, trans_a, trans_b, d) + (before.astype(d) if accumulate else 0)
        for d in (np.float64, np.float32)
    )
    assert_as_good(out, want, reference, floor=tolerance(K))


@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("trans_a, trans_b", FLAGS)
def test_the_same_bits_twice(trans_a, trans_b, batch):
    a, b = map(put, operands(100, 300, 50, trans_a, trans_b, batch))
    results = []
    for _ in range(2):
        out = put(normal(3, *batch, 100, 50))
        matmul(out, a, b, trans_a=trans_a, trans_b=trans_b, accumulate=True)
        results.append(to_host(out))
    assert np.array_equal(*results)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("M, K, N", [(0, 3, 4), (3, 0, 4), (3, 4, 0), (0, 0, 0)])
def test_empty(M, K, N, batch, accumulate):
    """An empty sum is 0: without accumulate, the output is overwritten in this case too."""
    a, b, before = np.ones((*batch, M, K)), np.ones((*batch, K, N)), np.full((*batch, M, N), 7.0)
    out = put(before.astype(np.float32))
    matmul(out, put(a.astype(np.float32)), put(b.astype(np.float32)), accumulate=accumulate)
    assert np.all(to_host(out) == (7 if accumulate else 0))


# ----------------------------------------------------------------------------- views
def test_columns_of_a_packed_array():
    """Rows need not be adjacent: q, k and v are column slices of one array and are not copied."""
    N, C, parts = 9, 6, (slice(0, 8), slice(8, 12), slice(12, 16))
    packed, x = normal(1, N, 16), normal(2, N, C)
    there, x_there = put(packed), put(x)
    for part in parts:
        width = part.stop - part.start
        out = put(np.zeros((C, width), np.float32))
        matmul(out, x_there, there[:, part], trans_a=True)
        assert_as_good(out, exact(x, packed[:, part], True, False), x.T @ packed[:, part])
        out = put(np.zeros((width, C), np.float32))
        matmul(out, there[:, part], x_there, trans_a=True)
        assert_as_good(out, exact(packed[:, part], x, True, False), packed[:, part].T @ x)


def test_rows_of_a_packed_weight_and_an_output_that_is_a_view():
    w, x = normal(1, 12, 5), normal(2, 7, 5)
    out = put(np.full((7, 20), 9, np.float32))
    matmul(out[:, 4:12], put(x), put(w)[2:10], trans_b=True)
    got = to_host(out)
    assert_as_good(got[:, 4:12], exact(x, w[2:10], False, True), x @ w[2:10].T)
    assert (got[:, :4] == 9).all() and (got[:, 12:] == 9).all()


def test_a_batch_that_is_strided():
    a, b = normal(1, 6, 4, 5), normal(2, 3, 5, 2)
    out = put(np.zeros((6, 4, 2), np.float32))
    matmul(out[1::2], put(a)[::2], put(b))
    assert_as_good(to_host(out)[1::2], exact(a[::2], b, False, False), a[::2] @ b)
    assert not to_host(out)[::2].any()


def test_one_column_may_have_any_stride():
    a, b = normal(1, 4, 3), normal(2, 1, 5)
    out = put(np.zeros((4, 5), np.float32))
    matmul(out, put(a)[:, 1:2], put(b))
    np.testing.assert_allclose(to_host(out), a[:, 1:2] * b, rtol=1e-6)


# ----------------------------------------------------------------------------- refusals
def zeros(*shape):
    return put(np.zeros(shape, np.float32))


@pytest.mark.parametrize(
    "out, a, b, message",
    [
        ((2, 4), (2, 3), (5, 4), r"\(2, 3\) times op\(b\) \(5, 4\) does not give \(2, 4\)"),
        ((2, 5), (2, 3), (3, 4), r"does not give \(2, 5\)"),
        ((2, 2, 4), (2, 2, 3), (3, 3, 4), "does not give"),
        ((2, 2, 4), (2, 2, 3), (3, 4), "does not give"),
        ((2, 4), (2, 2, 3), (2, 3, 4), "does not give"),
        ((4,), (3,), (3, 4), r"expected 2 or 3 axes, got shape \(3,\)"),
        ((1, 1, 2, 4), (1, 1, 2, 3), (1, 1, 3, 4), "expected 2 or 3 axes"),
    ],
)
def test_wrong_shapes(out, a, b, message):
    with pytest.raises(ValueError, match=message):
        matmul(zeros(*out), zeros(*a), zeros(*b))


def test_transposed_shapes_are_named_as_they_are_used():
    with pytest.raises(ValueError, match=r"op\(a\) \(3, 2\) times op\(b\) \(4, 3\)"):
        matmul(zeros(3, 3), zeros(2, 3), zeros(3, 4), trans_a=True, trans_b=True)


@pytest.mark.parametrize("which", ["out", "a", "b"])
@pytest.mark.parametrize(
    "view, message",
    [
        (lambda x: x[:, ::2], "rows .* are not contiguous"),
        (lambda x: x[:, :4].T, "rows .* are not contiguous"),
        (lambda x: x[::-1, :4], "rows .* overlap or run backwards"),
    ],
)
def test_rows_that_cublas_cannot_walk(which, view, message):
    arrays = {name: zeros(4, 4) for name in ("out", "a", "b")}
    arrays[which] = view(zeros(4, 8))
    with pytest.raises(ValueError, match=message):
        matmul(**arrays)


@pytest.mark.gpu
def test_other_dtypes_are_refused():
    with pytest.raises(TypeError, match="float16 times float32 into float32 is not supported"):
        matmul(zeros(2, 2), zeros(2, 2).astype(np.float16), zeros(2, 2))
    with pytest.raises(TypeError, match="on one device"):
        matmul(zeros(2, 2), np.zeros((2, 2), np.float32), zeros(2, 2))


def test_only_float64_gets_a_hint_about_its_origin():
    given = {name: np.zeros((2, 2), name) for name in ("float32", "float64")}
    given["bfloat16"] = given["float32"].astype(BFLOAT16)
    for a, b, hint in (
        ("float32", "bfloat16", "cast one of them with astype or functional.cast"),
        ("float32", "float64", "float64 comes from NumPy scalars such as"),
        ("float64", "bfloat16", "float64 comes from NumPy scalars such as"),
    ):
        said = rf"{a} times {b} into float32 is not supported \({hint}"
        with pytest.raises(TypeError, match=said):
            matmul(given["float32"], given[a], given[b])


# ----------------------------------------------------------------------------- linear
@pytest.mark.parametrize("N, I, O", [(1, 1, 1), (7, 5, 3), (33, 64, 96)])
def test_linear_against_pytorch(N, I, O):  # noqa: E741
    x, w, dy, dw0 = normal(1, N, I), normal(2, O, I), normal(3, N, O), normal(4, O, I)
    tx, tw = (torch.tensor(a, requires_grad=True) for a in (x, w))
    ty = torch.nn.functional.linear(tx, tw)
    ty.backward(torch.tensor(dy))
    dw = put(dw0)
    linear_bwd_w(put(dy), put(x), dw)
    close = dict(rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(to_host(linear_fwd(put(x), put(w))), ty.detach().numpy(), **close)
    np.testing.assert_allclose(to_host(linear_bwd_x(put(dy), put(w))), tx.grad.numpy(), **close)
    np.testing.assert_allclose(to_host(dw), tw.grad.numpy() + dw0, **close)


def test_linear_without_rows():
    dw = put(np.ones((3, 2), np.float32))
    linear_bwd_w(zeros(0, 3), zeros(0, 2), dw)
    assert linear_fwd(zeros(0, 2), zeros(3, 2)).shape == (0, 3)
    assert linear_bwd_x(zeros(0, 3), zeros(3, 2)).shape == (0, 2) and (to_host(dw) == 1).all()


def test_linear_bad_shapes():
    with pytest.raises(ValueError, match="does not give"):
        linear_fwd(zeros(4, 3), zeros(5, 2))


def test_only_products_with_few_tiles_get_a_workspace():
    """With many tiles cuBLAS would use the workspace for a counter, with a memset before every product."""
    for m, n, batch in ((8192, 3072, 1), (8192, 384, 1), (1, 128 * 132, 1), (100, 100, 132)):
        assert gemm.workspace_bytes(m, n, batch, 132) == 0, (m, n, batch)
    for m, n, batch in (
        (384, 384, 1),
        (2048, 384, 1),
        (1, 1, 1),
        (128, 128 * 131, 1),
        (64, 64, 131),
    ):
        assert gemm.workspace_bytes(m, n, batch, 132) == gemm.WORKSPACE, (m, n, batch)


class Products:
    """A GPU whose products are only noted: the workspace that each stream has used. local.stream: the current one."""

    def __init__(self, patch):
        self.local, self.used, self.made, self.handles = threading.local(), {}, [], []
        gpu = SimpleNamespace(
            get_current_stream=lambda: SimpleNamespace(ptr=self.local.stream),
            runtime=SimpleNamespace(getDevice=lambda: 0),
            Device=lambda _: SimpleNamespace(attributes={"MultiProcessorCount": 132}),
        )
        pool = SimpleNamespace(malloc=lambda size: self.new(self.made, size))
        cupy = SimpleNamespace(cuda=gpu, get_default_memory_pool=lambda: pool)
        cublas = SimpleNamespace(
            create=lambda: self.new(self.handles, "handle"),
            set_stream=lambda handle, stream: setattr(self, "stream", stream),
            set_workspace=lambda handle, at, size: self.used.setdefault(self.stream, set()).add(at),
            gemm_ex=lambda *_: None,
        )
        patch.setattr(gemm, "cupy", lambda: cupy)
        patch.setattr(gemm, "_contexts", {})
        patch.setitem(sys.modules, "nvmath.bindings", SimpleNamespace(cublas=cublas))

    def new(self, made, what):
        time.sleep(0.01)  # other threads run now
        made.append(what)
        return SimpleNamespace(ptr=len(made))

    def product(self, stream):
        self.local.stream = stream
        x = SimpleNamespace(dtype=np.dtype(np.float32), strides=(64, 4), itemsize=4, shape=(16, 16), ndim=2,
                            data=SimpleNamespace(ptr=1))  # fmt: skip
        gemm.cublas_product(x, x, x, False, False, 16, 16, 16, 1.0, False)


def test_products_of_two_streams_do_not_share_a_workspace(monkeypatch):
    """They may run at the same time. Those of one stream do, in any thread."""
    gpu = Products(monkeypatch)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(gpu.product, [0, 1, 2, 3] * 8))
    assert len(gpu.handles) == 1 and gpu.made == [gemm.WORKSPACE] * 4
    assert sorted(map(sorted, gpu.used.values())) == [[1], [2], [3], [4]]
    gemm.release_workspace(2)
    assert sorted(gemm._contexts[0].workspaces) == [0, 1, 3]


@pytest.mark.gpu
def test_products_of_two_streams_at_the_same_time():
    """Few tiles and a long sum, so blocks share it (split-K); the same bits as alone."""
    import cupy

    a, b = put(normal(1, 64, 16384)), put(normal(2, 16384, 64))
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(4)]
    cupy.cuda.Device().synchronize()

    def products(stream):
        found = []
        with stream:
            for _ in range(300):
                found.append(matmul(cupy.empty((64, 64), np.float32), a, b))
            stream.synchronize()
        return found

    expected = products(streams[0])[0]
    with ThreadPoolExecutor(4) as threads:
        for found in threads.map(products, streams):
            assert all((x == expected).all() for x in found)


# ----------------------------------------------------------------------------- batch-invariant mode
@pytest.mark.skipif(GPU, reason="of the BLAS on the CPU")
@pytest.mark.parametrize("I", [1, 7, 64, 100, 333, 1000])
@pytest.mark.parametrize("O", [1, 2, 5, 12, 61, 200, 1030])
def test_rows_of_a_product_on_the_cpu(O, I):  # noqa: E741
    w, x = (np.float32(rng(i, n).standard_normal((n, I))) for i, n in ((1, O), (2, 70)))
    for b in (None, normal(3, O)):
        with batch_invariant():
            whole = linear_fwd(x, w, b_O=b)
            for rows in (slice(0, 1), slice(69, 70), slice(3, 20), slice(13, 62)):
                assert np.array_equal(linear_fwd(x[rows], w, b_O=b), whole[rows])
        expected = x @ w.T if b is None else x @ w.T + b
        np.testing.assert_allclose(whole, expected, rtol=1e-5, atol=1e-4)


def test_rows_that_a_blas_computes_alike_are_found(monkeypatch):
    """A BLAS that adds the rows after the last whole tile in another order."""
    matmul = np.matmul
    for tile, expected in ((12, 12), (4, 16), (5, 4)):

        def divided(a, b, tile=tile):
            rows, whole = [matmul(row[None], b) for row in a], len(a) // tile * tile
            rows[whole:] = [matmul(row[None, ::-1].copy(), b[::-1].copy()) for row in a[whole:]]
            return np.concatenate(rows)

        monkeypatch.setattr(gemm.np, "matmul", divided)
        sizes = gemm._exact_rows_cpu.__wrapped__(30, 1000, "float32")
        assert sizes[-1] == expected and all(n % tile == 0 for n in sizes[:-1])
        monkeypatch.undo()


WEIGHTS = [
    (12, 40), (768, 768), (50304, 768), (2048, 5632), (1024, 1024), (4096, 1024), (6144, 1024), (1024, 3072), (151936, 1024),
    (4096, 4096), (24576, 4096), (4096, 12288),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(
    "dtype, out", [(np.float32, np.float32), (BFLOAT16, BFLOAT16), (BFLOAT16, np.float32)]
)
@pytest.mark.parametrize("O, I", WEIGHTS)
def test_rows_of_a_product_on_a_gpu(O, I, dtype, out):  # noqa: E741
    """In whole tiles of rows, in a padded one, in their middle and at their ends."""
    w, x = (put(normal(i, n, I).astype(dtype)) for i, n in ((1, O), (2, 600)))
    for b in (None, put(normal(3, O))):
        run = lambda rows: to_host(linear_fwd(rows, w, out, b))  # noqa: B023
        with batch_invariant():
            whole = run(x)
            for rows in (
                slice(0, 1),
                slice(599, 600),
                slice(3, 20),
                slice(130, 386),
                slice(255, 570),
            ):
                assert np.array_equal(run(x[rows].copy()), whole[rows]), rows
