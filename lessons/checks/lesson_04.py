"""Exercises of lesson 4: matrix products."""

import numpy as np

from .attempt import exercise

SHAPES = ((8, 8, 8), (5, 7, 11), (16, 24, 8), (1, 3, 2))  # N, O, I


def product(x, w):
    return np.asarray(x).astype(np.float64) @ np.asarray(w).astype(np.float64).T


@exercise(
    "4.1", "linear_kernel",
    first_step="which row n and which column o belong to this thread? Then loop over i and add up the products in a local variable.",
    hints={
        "OutOfBoundsError": "Use row n with x_NI[n, i] and column o with w_OI[o, i]: the weight has one row per output. "
        "And both n and o need a guard.",
        "RaceError": "Two threads own the same element of y: n comes from the .y parts of blockIdx and threadIdx, o from the .x parts.",
    },
)  # fmt: skip
def linear_kernel(e):
    for N, O, I in e.cases(SHAPES, lambda rng: rng.integers(2, 20, 3)):
        x, w, y = e.normal(N, I), e.normal(O, I), e.blank(N, O)
        case = f"x ({N}, {I}), w ({O}, {I})"
        trace = e.run((-(-O // 8), -(-N // 8)), (8, 8), y, x, w, case=case, trace=True)
        x64, w64 = np.asarray(x).astype(np.float64), np.asarray(w).astype(np.float64)
        square = O == I
        e.same("y", y, product(x, w), {
            "That is x w and not x w^T: the sum runs over the LAST index of w, w_OI[o, i].":
                x64 @ w64 if square else np.empty(0),
            "Only the last product is left: add up with +=.": np.outer(x64[:, -1], w64[:, -1]),
            "Only the first product is there: the loop must cover all i.": np.outer(x64[:, 0], w64[:, 0]),
            "The last product is missing: i goes from 0 to x_NI.shape[1] - 1, which is range(x_NI.shape[1]).":
                product(x64[:, :-1], w64[:, :-1]),
            "The sum runs over i, so its length is x_NI.shape[1], not the number of rows or outputs.":
                lambda got: any(np.allclose(got, product(x64[:, :k], w64[:, :k]), 1e-4) for k in (N, O)),
            "That is y^T: row n comes first, y_NO[n, o].": product(x, w).T,
            "Part of y was never written: the .x parts of the grid count the columns o, its .y parts the rows n.":
                lambda got: max(N, O) > 8 and not e.wrote(y).all(),
            "y was written with += : it holds NaN before you write it. Add up in a local variable and write it once.":
                lambda got: e.wrote(y).all() and np.isnan(got).all(),
        }, rtol=1e-4, atol=1e-5)  # fmt: skip
        e.need(
            len(trace.of(e.name(y))) == N * O,
            "The values are correct, but y is read and written in memory in every iteration of the loop: "
            "add up in a variable, and write once at the end.",
        )


@exercise(
    "4.2", "tiled_linear_kernel",
    first_step="for each step of 8 columns: every thread loads ONE element of x and ONE of w into the tiles; barrier; 8 products; barrier.",
    hints={
        "RaceError": "Each step needs two barriers: one after the tiles are loaded, before any thread reads them; one after the products, "
        "before any thread loads the next tiles.",
        "UninitializedError": "An element of a tile is read that was never written. Either the barrier after loading is missing, or a tile "
        "extends past the edge: then the thread must write 0.0 there, which leaves the sum unchanged.",
        "DeadlockError": "All threads must reach every barrier, including those whose n or o is outside: they help with loading. Guard only "
        "the memory accesses.",
        "OutOfBoundsError": "A tile may extend past the edge in n, in o and in i. Load 0.0 where any of the two indices is outside; "
        "and write y only inside.",
    },
)  # fmt: skip
def tiled_linear_kernel(e):
    fixed = (8, 8, 16), (5, 7, 11), (16, 16, 16), (1, 3, 2), (3, 9, 8)
    for N, O, I in e.cases(fixed, lambda rng: rng.integers(2, 20, 3)):
        x, w, y = e.normal(N, I), e.normal(O, I), e.blank(N, O)
        grid = -(-O // 8), -(-N // 8)
        case = f"x ({N}, {I}), w ({O}, {I})"
        trace = e.run(grid, (8, 8), y, x, w, case=case, trace=True)
        first = product(np.asarray(x)[:, :8], np.asarray(w)[:, :8])
        last = (I - 1) // 8 * 8
        turns = lambda step: [
            (np.asarray(x)[:, k : k + 8], np.asarray(w)[:, k : k + 8]) for k in range(0, I, step)
        ]
        e.same("y", y, product(x, w), {
            "Only the first 8 columns were multiplied: there are ceil(I / 8) steps.": first if I > 8 else np.empty(0),
            "Only the last tile is in the sum: set the accumulator to 0 once, before the loop over tiles.":
                product(np.asarray(x)[:, last:], np.asarray(w)[:, last:]) if I > 8 else np.empty(0),
            "Neighbouring tiles overlap: the loop over i must advance in steps of 8.": sum(product(*t) for t in turns(1)),
            "The indices of the tile of w are swapped: output tx is the ROW tx of the tile, w_tile[tx, j].":
                sum(a @ b for a, b in turns(8)) if O == 8 and I % 8 == 0 else np.empty(0),
            "All columns of y are the same: column tx of y needs row tx of the tile, w_tile[tx, j].":
                lambda got: O > 1 and np.allclose(got, got[:, :1], 1e-4),
            "y was written with += : it holds NaN before you write it.": lambda got: e.wrote(y).all() and np.isnan(got).all(),
        }, rtol=1e-4, atol=1e-5)  # fmt: skip
        if (N, O, I) == (16, 16, 16):
            for a, rows in ((x, N), (w, O)):
                name = e.name(a)
                reads = len(trace.of(name))
                e.need(
                    reads <= 2 * rows * I,
                    f"The values are correct, but {name} is read {reads} times, {reads // (rows * I)} times per element. "
                    "A block needs each element once: read memory only to fill the tiles, and multiply from the tiles.",
                )
                t = trace.traffic(name)
                e.need(
                    t.efficiency > 0.9,
                    f"The values are correct, but reading {name} uses only {t.efficiency:.0%} of the bytes moved: neighbouring threads "
                    "(tx) must load neighbouring columns i, for w as well.",
                )


@exercise(
    "4.3", "linear_by_blas",
    first_step="read by columns, the memory of y (N, O) is a matrix (O, N), which is y^T = w x^T. So which operand comes first?",
    kernel=False, allow=(),
)  # fmt: skip
def linear_by_blas(e):
    calls = []

    def gemm(trans_a, trans_b, m, n, k, a, lda, b, ldb, c, ldc):
        calls.append((trans_a, trans_b, m, n, k, lda, ldb, ldc))
        for name, array in (("a", a), ("b", b), ("c", c)):
            e.need(
                any(np.shares_memory(array, own) for own in (x, w, y)),
                f"{name} is a copy: pass x, w and y themselves. A flag tells BLAS to read one of them transposed.",
            )
        blas(e, trans_a, trans_b, m, n, k, a, lda, b, ldb, c, ldc)

    fixed = (2, 4, 3), (5, 5, 5), (7, 2, 9), (1, 6, 4)
    for N, O, I in e.cases(fixed, lambda rng: rng.integers(2, 9, 3)):
        x, w = np.asarray(e.normal(N, I)), np.asarray(e.normal(O, I))
        y = np.full((N, O), np.nan, np.float32)
        calls.clear()
        e.case(f"N = {N}, O = {O}, I = {I}")
        e.call(gemm, y, x, w)
        want = product(x, w)
        e.same("y", y, want, {
            "gemm was never called.": lambda got: not calls,
            "That is x w, not x w^T: look at the transposes.": (x @ w) if O == I else np.empty(0),
            "That is x^T w^T or its transpose: look at the transposes.":
                lambda got: N == O == I and (np.allclose(got, x.T @ w.T, 1e-4) or np.allclose(got, w @ x, 1e-4)
                                             or np.allclose(got, x.T @ w, 1e-4) or np.allclose(got, (x.T @ w).T, 1e-4)),
        }, rtol=1e-4, atol=1e-5)  # fmt: skip
        e.need(
            len(calls) == 1,
            f"y is correct, but gemm was called {len(calls)} times: one call is enough.",
        )


def blas(e, trans_a, trans_b, m, n, k, a, lda, b, ldb, c, ldc):
    """What BLAS does, with its errors explained."""
    e.need(
        all(flag in (True, False) for flag in (trans_a, trans_b)),
        f"trans_a and trans_b must be True or False, not {trans_a!r} and {trans_b!r}.",
    )
    rows = {"a": k if trans_a else m, "b": n if trans_b else k, "c": m}
    columns = {"a": m if trans_a else k, "b": k if trans_b else n, "c": n}
    for name, array, lead in (("a", a, lda), ("b", b, ldb), ("c", c, ldc)):
        e.need(
            array.flags.c_contiguous,
            f"{name} is a transposed view: pass the array itself to gemm and set the flag.",
        )
        high, wide = array.shape
        e.need(
            lead == wide,
            f"ld{name} is {lead}, but {name} is stored in rows of {wide} numbers: the leading dimension is the distance "
            f"from one row to the next, {wide}."
            + " (BLAS sees y^T. So it has to compute y^T = w x^T: the operands swap places.)"
            * (name == "c"),
        )
        e.need(
            (rows[name], columns[name]) == (wide, high),
            f"With these flags and m, n, k = {m}, {n}, {k}, gemm expects {name} to be a matrix of {rows[name]} rows and "
            f"{columns[name]} columns. But BLAS reads by columns, so it sees the {high} x {wide} array that you pass as "
            f"{wide} x {high}. (m and n are the rows and columns of the result as BLAS sees it, that is, of y^T.)",
        )
    a_, b_ = a.T, b.T  # as BLAS sees them
    c.T[...] = (a_.T if trans_a else a_) @ (b_.T if trans_b else b_)
