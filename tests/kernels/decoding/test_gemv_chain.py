"""gemv_chain.py: the bits of the separate ops, for every fused form and every division of the work."""

import functools

import ml_dtypes
import numpy as np
import pytest
from checks import (
    GPU,
    assert_as_good,
    normal,
    planted_bugs,
    same_bytes,
    sentinels,
    to_host,
    to_kernel,
    with_planted_bug,
)

from xtrain.kernels import gemm
from xtrain.kernels.decoding import gemv_chain as file
from xtrain.kernels.decoding import gemv_chain_parts as parts
from xtrain.kernels.decoding.gemv_chain import (
    chain_add_norm_gemv,
    chain_fits,
    chain_gemv,
    choose,
    gemv_chain_ref,
)
from xtrain.kernels.decoding.gemv_chain_parts import Config
from xtrain.kernels.primitives.ptx import kernel, load1, store1
from xtrain.kernels.primitives.tensor_cores import mma_bf16, pack_bf16
from xtrain.kernels.residual import residual_rmsnorm_fwd
from xtrain.kernels.rmsnorm import rmsnorm_fwd
from xtrain.kernels.runtime.compiler import cuda, float32, uint32
from xtrain.kernels.runtime.invariance import batch_invariant
from xtrain.kernels.runtime.launch import launch
from xtrain.kernels.swiglu import swiglu_fwd
from xtrain.simulator import KernelError

BF16 = ml_dtypes.bfloat16
EPS = 1e-6
SHARED = 227 << 10


def case(N, K, rows, norm=False, delta=False, swiglu=False, dtype=BF16):
    """-> x, delta, norm_w, w, swiglu, dtype"""
    rows = rows * (2 if swiglu else 1)
    return (
        normal(1, N, K).astype(np.float32 if norm else BF16),
        normal(4, N, K).astype(BF16) if delta else None,
        normal(3, K) if norm else None,
        (normal(2, rows, K) * K**-0.5).astype(BF16),
        swiglu,
        dtype,
    )


def put_all(args, put):
    return tuple(put(a) if isinstance(a, np.ndarray) else a for a in args)


def run(args, put=to_kernel, ready=False):
    """-> h, y on the host"""
    x, delta, norm_w, w, swiglu, dtype = put_all(args, put)
    if norm_w is None:
        return None, to_host(chain_gemv(x, w, dtype, ready))
    h_y = chain_add_norm_gemv(x, delta, norm_w, w, EPS, swiglu, ready, dtype)
    return tuple(map(to_host, h_y))


@kernel(32)
def chain_naive_kernel(y, x, w, N, F, K, reverse):
    """Grid ceil(F / 16), one warp per tile. All arrays flat. Operands are read element by element.

    reverse: add the groups of 16 columns in the opposite order.
    """
    g = cuda.threadIdx.x >> 2
    t = cuda.threadIdx.x & 3
    fa = cuda.local.array(4, uint32)
    fb = cuda.local.array(2, uint32)
    s = cuda.local.array(4, float32)
    n = min(g, N - 1)
    for i in range(4):
        s[i] = float32(0.0)
    for i in range(0, K, 16):
        k = (K - 16 - i if reverse else i) + 2 * t
        for r in range(4):
            at = min(cuda.blockIdx.x * 16 + g + 8 * (r & 1), F - 1) * K + k + 8 * (r >> 1)
            fa[r] = pack_bf16(load1(w, at), load1(w, at + 1))
        for r in range(2):
            at = n * K + k + 8 * r
            fb[r] = pack_bf16(load1(x, at), load1(x, at + 1))
        mma_bf16(s, fa, fb)
    for i in range(4):
        o = cuda.blockIdx.x * 16 + g + 8 * (i >> 1)
        n = 2 * t + (i & 1)
        if n < N and o < F:
            store1(y, n * F + o, s[i])


def chain_naive(x, w, reverse=False):
    """x w^T (N, F), float32, by chain_naive_kernel."""
    N, K = x.shape
    F = w.shape[0]
    y = to_kernel(np.zeros((N, F), np.float32))
    arrays = [a.reshape(-1) for a in (y, x, w)]
    launch(chain_naive_kernel, -(-F // 16), 32, *arrays, N, F, K, reverse)
    return y


def product(x, w, dtype):
    """x w^T in batch-invariant mode; without cuBLAS, what it computes."""
    if GPU:
        return gemm.linear_fwd(x, w, dtype)
    return to_kernel(to_host(chain_naive(x, w)).astype(dtype))


def separate(args):
    """-> h, y on the host: the ops of a training step, one after the other"""
    x, delta, norm_w, w, swiglu, dtype = put_all(args, to_kernel)
    with batch_invariant():
        h = x
        if delta is not None:
            h, x, _ = residual_rmsnorm_fwd(x, delta, norm_w, EPS)
        elif norm_w is not None:
            x, _ = rmsnorm_fwd(x, norm_w, EPS, BF16)
        y = product(x, w, dtype)
        y = swiglu_fwd(y) if swiglu else y
    return to_host(h), to_host(y)


def check_bits(args):
    (h, y), (h_separate, y_separate) = run(args), separate(args)
    assert y.dtype == args[-1] and y.shape == y_separate.shape
    different = np.argwhere(y.astype(np.float32) != y_separate.astype(np.float32))
    assert same_bytes(y, y_separate), f"{len(different)} of {y.size} differ: {different[:5]}"
    assert h is None or same_bytes(h, h_separate)


FORMS = [
    dict(),
    dict(dtype=np.float32),
    dict(norm=True),
    dict(norm=True, delta=True),
    dict(norm=True, swiglu=True),
    dict(norm=True, delta=True, swiglu=True),
    dict(norm=True, delta=True, swiglu=True, dtype=np.float32),
    dict(norm=True, delta=True, dtype=np.float32),
]
SHAPES = [(3, 160, 24), (1, 64, 24), (8, 128, 40)]
# where the widths of pieces and norms change: 256, 128, 64 and 32 columns, one and several warps
GPU_SHAPES = [
    (1, 1024, 4096), (8, 1024, 1000), (5, 576, 1536), (8, 2048, 2056), (2, 3072, 1024), (3, 4096, 6144),
    (8, 8192, 2048), (8, 1056, 300), (1, 12288, 4096), (4, 1024, 50304),
]  # fmt: skip


@pytest.mark.parametrize("i", range(len(FORMS)))
def test_the_bits_of_the_separate_ops(i):
    check_bits(case(*SHAPES[i % len(SHAPES)], **FORMS[i]))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_bits_of_the_separate_ops_in_the_shapes_of_models(form, shape):
    check_bits(case(*shape, **form))


@pytest.mark.parametrize("N, K, delta", [(8, 160, False), (8, 1056, True), (4, 2080, False)])
def test_the_order_of_the_sum_of_squares(N, K, delta):
    """In the separate op a row of 1056 columns has two warps, of 2080 three; here 8 warps share all rows.

    The rows of w are unit vectors, so y shows the normalized x, in bf16. The norm weight is chosen so that many
    elements are about half way between two numbers of bf16: a different last bit of rstd rounds some the other way.
    """
    columns = np.arange(0, K, K // 16)
    x, added, norm_w, *_ = case(N, K, 1, norm=True, delta=delta)
    w = np.zeros((len(columns), K), BF16)
    w[np.arange(len(columns)), columns] = 1
    args = lambda: (x, added, norm_w, w, False, BF16)
    h = x if added is None else x + added.astype(np.float32)
    rstd = 1 / np.sqrt((h.astype(np.float64) ** 2).mean(1) + EPS)
    n = np.arange(len(columns)) % N
    norm_w[columns] = (1.5 + 2.0**-8) / (h[n, columns] * rstd[n])
    check_bits(args())
    rounded = lambda rstd: (h[:, columns] * (rstd[:, None] * norm_w[columns])).astype(BF16)
    rstd = rstd.astype(np.float32)
    assert not same_bytes(rounded(rstd), rounded(np.nextafter(rstd, np.float32(9))))


def test_the_order_of_a_product_decides_its_bits():
    x, _, _, w, *_ = case(8, 288, 40)
    y = to_host(chain_naive(*put_all((x, w), to_kernel)))
    assert same_bytes(run((x, None, None, w, False, np.float32))[1], y)
    assert not same_bytes(to_host(chain_naive(*put_all((x, w), to_kernel), reverse=True)), y)


@pytest.mark.parametrize("i", [1, 5, 6])
def test_as_accurate_as_the_reference(i):
    args = case(3, 96, 21, **FORMS[i])
    x, delta, norm_w, w, swiglu, _ = args
    x, w, norm_w, delta = (a if a is None else a.astype(np.float64) for a in (x, w, norm_w, delta))
    exact = gemv_chain_ref(x, w, norm_w, EPS, delta, swiglu)
    floor = 4e-6 if norm_w is None else 6e-3  # of a number rounded to bf16 before the product
    h, y = run(args)
    h_host, y_host = run(args, np.array)
    assert_as_good(y, exact[1], y_host, floor=floor, scale=1.0)
    assert y.dtype == y_host.dtype and (h is None or same_bytes(h, h_host))


@pytest.mark.long
@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize("config", [Config(1, 32, 3), Config(2, 64, 3), Config(4, 32, 5)], ids=str)
def test_every_division_of_the_work_gives_the_same_bits(monkeypatch, config, swiglu):
    """Also with several tiles per warp, some without a last one."""
    args = case(2, 128, 70, norm=True, delta=True, swiglu=swiglu)
    together = run(args)
    monkeypatch.setattr(file, "MULTIPROCESSORS", 2)
    monkeypatch.setattr(file, "choose", lambda *shape: config)
    assert all(map(same_bytes, run(args, ready=True), together))


def test_a_row_does_not_depend_on_the_others():
    args = case(8, 96, 20, norm=True, delta=True)
    h, y = run(args)
    for rows in (slice(1), slice(3), slice(None, None, -1)):
        some = run((args[0][rows].copy(), args[1][rows].copy(), *args[2:]), ready=True)
        assert same_bytes(some[1], y[rows].copy()) and same_bytes(some[0], h[rows].copy())


def test_nothing_outside_the_output_and_the_same_bits_twice(monkeypatch):
    args = case(3, 96, 21, norm=True, delta=True)
    with sentinels(monkeypatch):
        first = run(args)
    assert all(map(same_bytes, first, run(args)))


@functools.cache
def without_a_bug(norm):
    run_small(norm)


def run_small(norm):
    check_bits(case(2, 256, 20, norm=norm, delta=norm))


@planted_bugs
@pytest.mark.parametrize(
    "maker, old, new, norm",
    [
        ("make_product", "cuda.syncthreads()  # x and the first", "pass  # x and the first", False),
        ("make_product", "cuda.syncthreads()  # the next piece", "pass  # the next piece", False),
        ("make_product", "cp_async_wait(AFTER_NEXT)", "pass", False),
        ("make_product", "cp_async_wait(AFTER_FIRST)", "pass", False),
        ("make_product", "AFTER_NEXT = STAGES - 2", "AFTER_NEXT = STAGES - 1", False),
        ("make_product", "copy_piece(smem, this_piece,", "copy_piece(smem, piece,", False),
        ("make_stage_norm", "cuda.syncthreads()  # all sums", "pass  # all sums", True),
        ("make_stage_norm", "rstd * w_SE[s, j]", "w_SE[s, j]", True),
        ("make_finish", "rounded(s[0, i])", "s[1, i]", True),
    ],
)
def test_planted_bugs_are_found(maker, old, new, norm):
    """By the simulator, or by other bits."""
    without_a_bug(norm)
    modules = [parts, file]
    with with_planted_bug(modules, maker, old, new), pytest.raises((KernelError, AssertionError)):
        run_small(norm)


def test_the_products_of_a_decoder():
    kinds = [(1024, 4096, False), (2048, 1024, False), (1024, 3072, True), (3072, 1024, False)]
    kinds += [(1024, 151936, False), (576, 1536, True), (8192, 2048, False)]
    assert [choose(8, *kind, SHARED) for kind in kinds] == [
        Config(chains=2, columns=256, stages=4),
        Config(chains=1, columns=256, stages=8),
        Config(chains=2, columns=128, stages=4),
        Config(chains=1, columns=256, stages=8),
        Config(chains=4, columns=128, stages=4),
        Config(chains=1, columns=64, stages=9),
        Config(chains=1, columns=256, stages=8),
    ]


def test_what_fits():
    of = lambda N, K, w=BF16: put_all((np.zeros((N, K), BF16), np.zeros((32, K), w)), to_kernel)
    assert chain_fits(*of(8, 64)) and chain_fits(*of(1, 96))
    assert not any(
        (
            chain_fits(*of(9, 64)),
            chain_fits(*of(0, 64)),
            chain_fits(*of(1, 48)),
            chain_fits(*of(1, 64, w=np.float32)),
            chain_fits(np.zeros((1, 64), BF16), np.zeros((32, 64), BF16)),
        )
    )
    assert choose(1, 14336, 4096, False, SHARED) and choose(8, 11008, 4096, False, SHARED)
    assert choose(8, 14336, 4096, False, SHARED) is None
    for N, K in ((8, 1024), (8, 11008), (1, 14336)):
        for F, swiglu in ((1024, False), (4096, True), (152000, False)):
            config = choose(N, K, F, swiglu, SHARED)
            sums = 4 * file.MAX_ROWS * file.MAX_WARPS
            assert file.shared_bytes(N, K, 2 if swiglu else 1, config) + sums <= SHARED


def test_bad_input():
    x, delta, norm_w, w, *_ = case(2, 64, 10, norm=True, delta=True)
    with pytest.raises(TypeError, match="x is float32, expected bfloat16"):
        chain_gemv(x, w)
    with pytest.raises(ValueError, match=r"w has shape \(10, 64\), expected \(any, 32\)"):
        chain_gemv(x[:, :32].astype(BF16), w)
    with pytest.raises(ValueError, match=r"norm_w has shape \(3,\), expected \(64\)"):
        chain_add_norm_gemv(x, delta, normal(1, 3), w, EPS)
    with pytest.raises(TypeError, match="delta is float32, expected bfloat16"):
        chain_add_norm_gemv(x, x, norm_w, w, EPS)
    with pytest.raises(ValueError, match="swiglu of 9 rows"):
        chain_add_norm_gemv(x, delta, norm_w, w[:9].copy(), EPS, True)
    for N, K in ((9, 64), (2, 48)):
        with pytest.raises(ValueError, match=f"{N} rows of {K}, the GPU supports 1 to 8 of a"):
            run(case(N, K, 10))
