"""The kernels of the lessons at realistic sizes.

    python bench/bench_lessons.py [--only copy linear]

The kernels come from the lessons' cells (tags imports, exercise, solution, bench), so a number in a
lesson belongs to the code above it. Each result is checked against NumPy or CuPy before it is
timed. GB/s count the bytes that must move; TFLOP/s count 2 N O I. Times are medians inside CUDA
graphs, with the L2 cache flushed before each run: see _timing.py.
"""

import functools
from dataclasses import dataclass, field

import cupy as cp
import numpy as np
import tyro
from _cases import DTYPES, double, draw
from _timing import copy_ms, graph_ms, record

from xtrain import lesson
from xtrain.kernels import gemm, rmsnorm
from xtrain.kernels.runtime.launch import launch

FP32, BF16 = DTYPES["fp32"], DTYPES["bf16"]
# elements of a copy; rows and columns of a transpose
COPY = 1 << 24
SIDE = 4096
# input of the norms
ROWS = 32768
WIDTH = 768
PRODUCT = 2048  # N = O = I of the matrix products
TOLERANCE = 1e-5  # relative to the norm of the result; sums of 2048 float32 products


@dataclass
class Options:
    only: list[str] = field(default_factory=list)  # prefixes of names; default: all


@functools.cache
def code(number: str):
    """Return the cells of a lesson that define kernels, as a module."""
    path = lesson.lesson_file(number)
    text = lesson.tagged(
        path.read_text(encoding="utf-8"), "imports", "exercise", "solution", "bench"
    )
    return lesson.load(text, f"bench_of_{path.name}")


def measure(options, name, shape, run, result, want, nbytes=0, flops=0, dtype="fp32"):
    """Check the result, time run() and append one record.

    result: the array that run() fills, or None if run returns it.
    """
    if options.only and not name.startswith(tuple(options.only)):
        return
    got = run() if result is None else (run(), result)[1]
    want = want if want.dtype == np.float64 else double(want)
    error = float(cp.linalg.norm((double(got) - want).ravel()) / cp.linalg.norm(want.ravel()))
    assert error <= (TOLERANCE if dtype == "fp32" else 6e-3), f"{name}: error {error:.1e}"
    ms, p20, p80 = graph_ms(run)
    if flops:
        value = flops / ms / 1e9
        unit = "TFLOP/s"
    else:
        value = nbytes / ms / 1e6
        unit = "GB/s"
    fields = {"copy_ms": round(copy_ms(nbytes), 4)} if nbytes else {}
    spread = [round(float(p), 4) for p in (p20, p80)]
    record(
        "bench_lessons",
        name,
        shape=shape,
        dtype=dtype,
        ms=ms,
        value=value,
        unit=unit,
        p20_p80=spread,
        error=error,
        **fields,
    )


# ----------------------------------------------------------------------------- the cases
def blocks(options):
    a = draw(FP32, COPY)
    b = draw(FP32, COPY, seed=1)
    y = cp.empty_like(a)
    want = a + b
    for threads in (1, 8, 32, 48, 64, 128, 256, 1024):
        grid = -(-COPY // threads)
        run = lambda: launch(code("1").add_kernel, grid, threads, y, a, b)  # noqa: B023
        measure(options, f"add_block_{threads}", f"n={COPY}", run, y, want, nbytes=12 * COPY)


def copies(options):
    x = draw(FP32, COPY)
    module = code("2")
    y = cp.empty_like(x)
    cases = {
        "naive": (module.copy_naive_kernel, -(-COPY // 256)),
        "chunk": (module.copy_chunk_kernel, 1024),
        "grid_stride": (module.copy_kernel, 1024),
        "four": (module.copy4_kernel, -(-COPY // 1024)),
        "eight": (module.copy8_kernel, -(-COPY // 2048)),
    }
    for name, (kernel, grid) in cases.items():
        run = lambda: launch(kernel, grid, 256, y, x)  # noqa: B023
        measure(options, f"copy_{name}", f"n={COPY}", run, y, x, nbytes=8 * COPY)


def transposes(options):
    x = draw(FP32, SIDE, SIDE)
    module = code("2")
    y = cp.empty_like(x)
    grid = (SIDE // 16, SIDE // 16)
    for name, kernel in (
        ("naive", module.transpose_naive_kernel),
        ("tiled", module.transpose_kernel),
    ):
        run = lambda: launch(kernel, grid, (16, 16), y, x)  # noqa: B023
        measure(options, f"transpose_{name}", f"R=C={SIDE}", run, y, x.T, nbytes=2 * x.nbytes)


def norms(options):
    x = draw(FP32, ROWS, WIDTH)
    w = draw(FP32, WIDTH, seed=1)
    eps = np.float32(1e-6)
    y = cp.empty_like(x)
    rstd = cp.empty(ROWS, np.float32)
    want = rmsnorm.rmsnorm_ref(double(x), double(w), 1e-6)[0]
    shape = f"N={ROWS} C={WIDTH}"
    nbytes = 2 * x.nbytes
    yours = lambda: launch(code("3").rmsnorm_kernel, ROWS, 256, y, rstd, x, w, eps)
    measure(options, "rmsnorm_two_passes", shape, yours, y, want, nbytes=nbytes)
    in_use = lambda: rmsnorm.rmsnorm_fwd(x, w, 1e-6)[0]
    measure(options, "rmsnorm_in_use", shape, in_use, None, want, nbytes=nbytes)


def products(options):
    n = PRODUCT
    module = code("4")
    x = draw(FP32, n, n)
    w = draw(FP32, n, n, seed=1)
    y = cp.empty_like(x)
    want = double(x) @ double(w).T
    flops = 2 * n**3
    cases = {
        "one_per_thread": (module.linear_kernel, n // 8, 8),
        "tiled_8": (module.tiled_linear_kernel, n // 8, 8),
        "tiled_16": (module.make_tiled_kernel(16), n // 16, 16),
        "registers": (module.register_linear_kernel, n // 32, 8),
    }
    for name, (kernel, grid, side) in cases.items():
        run = lambda: launch(kernel, (grid, grid), (side, side), y, x, w)  # noqa: B023
        measure(options, f"linear_{name}", f"N=O=I={n}", run, y, want, flops=flops)
    measure(
        options,
        "linear_cublas",
        f"N=O=I={n}",
        lambda: gemm.linear_fwd(x, w),
        None,
        want,
        flops=flops,
    )
    half_x = draw(BF16, n, n)
    half_w = draw(BF16, n, n, seed=1)
    want = double(half_x) @ double(half_w).T
    run = lambda: gemm.linear_fwd(half_x, half_w)
    measure(options, "linear_cublas", f"N=O=I={n}", run, None, want, flops=flops, dtype="bf16")


def vocabularies(options):
    """Measure the head of dim384 with GPT-2's vocabulary, and rounded up to a multiple of 128."""
    N = 8192
    width = 384
    for V in (50257, 50304):
        x = draw(BF16, N, width)
        w = draw(BF16, V, width, seed=1)
        want = double(x) @ double(w).T
        run = lambda: gemm.linear_fwd(x, w)  # noqa: B023
        measure(
            options,
            f"lm_head_{V}",
            f"N={N} C={width}",
            run,
            None,
            want,
            flops=2 * N * V * width,
            dtype="bf16",
        )


def main():
    options = tyro.cli(Options, description=__doc__)
    for part in (blocks, copies, transposes, norms, products, vocabularies):
        part(options)


if __name__ == "__main__":
    main()
