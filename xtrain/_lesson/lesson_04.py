"""Exercises of lesson 4: matrix products."""

import numpy as np

from .attempt import exercise

SHAPES = ((8, 8, 8), (5, 7, 11), (16, 24, 8), (1, 3, 2))  # N, O, I


def product(x, w):
    return np.asarray(x).astype(np.float64) @ np.asarray(w).astype(np.float64).T


@exercise(
    "4.1", "linear_kernel",
    first_step="which row n and which column o is this thread's? Then a loop over i, adding up products in a variable of its own.",
    hints={
        "OutOfBoundsError": "Row n goes with x_NI[n, i], column o with w_OI[o, i]: the weight has one row per output. "
        "And both n and o need a guard.",
        "RaceError": "Two threads own one element of y: n comes from the y parts of blockIdx and threadIdx, o from the x parts.",
    },
)  # fmt: skip
def linear_kernel(e):
    for N, O, I in SHAPES:
        x, w, y = e.normal(N, I), e.normal(O, I), e.blank(N, O)
        e.run((-(-O // 8), -(-N // 8)), (8, 8), y, x, w, case=f"x ({N}, {I}), w ({O}, {I})")
        x64, w64 = np.asarray(x).astype(np.float64), np.asarray(w).astype(np.float64)
        square = O == I
        e.same("y", y, product(x, w), {
            "That is x w and not x w^T: the index of the sum is the LAST one of w, w_OI[o, i].":
                x64 @ w64 if square else np.empty(0),
            "Only the last product is there: add up with +=.": np.outer(x64[:, -1], w64[:, -1]),
            "Only the first product is there: the loop goes over all of i.": np.outer(x64[:, 0], w64[:, 0]),
            "y was written with += : it holds NaN before. Add up in a variable of the thread and write it once.":
                lambda got: np.isnan(got).all(),
        }, rtol=1e-4, atol=1e-5)  # fmt: skip


@exercise(
    "4.2", "tiled_linear_kernel",
    first_step="for each stretch of 8 columns: every thread loads ONE element of x and ONE of w into the tiles; wait; 8 products; wait.",
    hints={
        "RaceError": "Two barriers per turn: one after the tiles are loaded, before anybody reads them; one after the products, before "
        "anybody loads the next tiles.",
        "UninitializedError": "A place in a tile is read that was never written. Either the barrier after loading is missing, or a tile hangs "
        "over the edge: then the thread must write 0.0 there, which changes no sum.",
        "DeadlockError": "All threads come to every barrier, also those whose n or o lies outside: they help loading. Guard the accesses "
        "to memory alone.",
        "OutOfBoundsError": "A tile may hang over the edge in n, in o and in i. Load 0.0 where any of the two indices is outside; "
        "and write y only inside.",
    },
)  # fmt: skip
def tiled_linear_kernel(e):
    for N, O, I in ((8, 8, 16), (5, 7, 11), (16, 16, 32), (1, 3, 2)):
        x, w, y = e.normal(N, I), e.normal(O, I), e.blank(N, O)
        grid = -(-O // 8), -(-N // 8)
        case = f"x ({N}, {I}), w ({O}, {I})"
        trace = e.run(grid, (8, 8), y, x, w, case=case, trace=True)
        first = product(np.asarray(x)[:, :8], np.asarray(w)[:, :8])
        last = (I - 1) // 8 * 8
        e.same("y", y, product(x, w), {
            "Only the first 8 columns were multiplied: there are ceil(I / 8) turns.": first if I > 8 else np.empty(0),
            "Only the last tile is in the sum: the accumulator is set to 0 once, before the loop over tiles.":
                product(np.asarray(x)[:, last:], np.asarray(w)[:, last:]) if I > 8 else np.empty(0),
            "y was written with += : it holds NaN before.": lambda got: np.isnan(got).all(),
        }, rtol=1e-4, atol=1e-5)  # fmt: skip
        if (N, O, I) == (16, 16, 32):
            for name, rows in (("x_NI", N), ("w_OI", O)):
                reads = len(trace.of(name))
                e.need(
                    reads <= 2 * rows * I,
                    f"The values are right, but {name} is read {reads} times, {reads // (rows * I)} times each element. "
                    "A block needs each element once: read memory only to fill the tiles, and multiply from the tiles.",
                )
                t = trace.traffic(name)
                e.need(
                    t.efficiency > 0.9,
                    f"The values are right, but reading {name} uses {t.efficiency:.0%} of the bytes moved: neighbouring threads "
                    "(tx) must load neighbouring columns i, for w too.",
                )


@exercise(
    "4.3", "linear_by_blas",
    first_step="read as columns, the memory of y (N, O) is a matrix (O, N), which is y^T = w x^T. So which operand comes first?",
    kernel=False, allow=(),
)  # fmt: skip
def linear_by_blas(e):
    calls = []

    def gemm(trans_a, trans_b, m, n, k, a, lda, b, ldb, c, ldc):
        calls.append((trans_a, trans_b, m, n, k, lda, ldb, ldc))
        blas(e, trans_a, trans_b, m, n, k, a, lda, b, ldb, c, ldc)

    for N, O, I in ((2, 4, 3), (5, 5, 5), (7, 2, 9)):
        x, w = np.asarray(e.normal(N, I)), np.asarray(e.normal(O, I))
        y = np.full((N, O), np.nan, np.float32)
        e.case(f"N = {N}, O = {O}, I = {I}")
        e.call(gemm, y, x, w)
        want = product(x, w)
        e.same("y", y, want, {
            "gemm was never called.": lambda got: not calls,
            "That is the product, but laid out by columns: y^T came out. Swap the operands, so that BLAS computes y^T = w x^T.":
                want.T.reshape(N, O),
            "That is x w, not x w^T: look at the transposes.": (x @ w) if O == I else np.empty(0),
            "That is x^T w^T or its transpose: look at the transposes.":
                lambda got: N == O == I and (np.allclose(got, x.T @ w.T, 1e-4) or np.allclose(got, w @ x, 1e-4)
                                             or np.allclose(got, x.T @ w, 1e-4) or np.allclose(got, (x.T @ w).T, 1e-4)),
        }, rtol=1e-4, atol=1e-5)  # fmt: skip


def blas(e, trans_a, trans_b, m, n, k, a, lda, b, ldb, c, ldc):
    """What BLAS does, with its complaints in words."""
    rows = {"a": k if trans_a else m, "b": n if trans_b else k, "c": m}
    columns = {"a": m if trans_a else k, "b": k if trans_b else n, "c": n}
    for name, array, lead in (("a", a, lda), ("b", b, ldb), ("c", c, ldc)):
        e.need(
            lead >= rows[name],
            f"ld{name} is {lead}, but {name} has columns of {rows[name]} elements: the leading dimension is the way from one "
            f"column to the next, at least {rows[name]}. For a row-major array it is the length of its rows.",
        )
        need = (columns[name] - 1) * lead + rows[name]
        e.need(
            need <= array.size,
            f"With these numbers gemm would touch {need} elements of {name}, which has {array.size}: "
            "m and n are the rows and columns of the result AS BLAS SEES IT, that is of y^T.",
        )
    view = lambda array, r, cols, lead: np.lib.stride_tricks.as_strided(
        array.reshape(-1), (r, cols), (4, 4 * lead)
    )
    a_, b_ = view(a, rows["a"], columns["a"], lda), view(b, rows["b"], columns["b"], ldb)
    view(c, m, n, ldc)[...] = (a_.T if trans_a else a_) @ (b_.T if trans_b else b_)
