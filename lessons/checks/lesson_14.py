"""Exercises of lesson 14: tensor cores."""

import ml_dtypes
import numpy as np

from .attempt import exercise

BF16 = ml_dtypes.bfloat16


def rounded(x):
    return np.asarray(x).astype(BF16).astype(np.float32)


@exercise(
    "14.1", "mma_kernel",
    first_step="fill fa[0] to fa[3] and fb[0], fb[1] according to the table above, and acc with zeros; then call mma_bf16(acc, fa, fb).",
    allow=("mma_bf16", "pack_bf16"),
    hints={
        "UninitializedError": "mma reads all registers of all lanes: fa[0] to fa[3], fb[0], fb[1], and acc. It adds to acc, so initialise acc with zeros.",
        "OutOfBoundsError": "a is (16, 16), b is (16, 8). A register of b holds two neighbouring ROWS of one column: b[row, g], b[row + 1, g].",
        "RaceError": "Two lanes write one element of c: register i belongs to row g + 8 * (i // 2), column 2 * t + i % 2.",
        "CollectiveError": "All lanes of the warp must execute mma: call it outside of any `if`.",
        "DeadlockError": "All lanes of the warp must execute mma: call it outside of any `if`.",
    },
)  # fmt: skip
def mma_kernel(e):
    for case in e.cases(("first numbers", "other numbers"), lambda rng: "random numbers"):
        a, b, c = e.normal(16, 16), e.normal(16, 8), e.blank(16, 8)
        e.run(1, 32, c, a, b, case=case)
        exact = np.asarray(a) @ np.asarray(b)
        a, b = rounded(a), rounded(b)
        want = a @ b
        quarters = a.copy()
        quarters[:8, 8:], quarters[8:, :8] = a[8:, :8], a[:8, 8:]
        pairs = np.arange(16) ^ 1
        apart = np.arange(16).reshape(2, 4, 2).T.ravel()
        g, t = np.divmod(np.arange(32), 4)
        crossed = np.empty_like(want)
        for i in range(4):
            crossed[g + 8 * (i % 2), 2 * t + i // 2] = want[g + 8 * (i // 2), 2 * t + i % 2]
        e.same("c", c, want, {
            "a[1] and a[2] are swapped: a[1] is 8 rows down, a[2] 8 columns to the right.": quarters @ b,
            "The two numbers in each register of a or of b are swapped: the first argument of pack_bf16, the lower half, is the left element of a "
            "or the upper element of b.": a @ b[pairs],
            "b[0] holds two neighbouring rows, 2t and 2t + 1; b[1] holds 2t + 8 and 2t + 9.": a @ b[apart],
            "c[1] and c[2] are swapped: c[1] is one column to the right, c[2] 8 rows down.": crossed,
            "b[0] and b[1] hold the same rows: b[1] is 8 rows down.": a @ b[np.arange(16) % 8],
            "These are products of the unrounded numbers: multiply with mma_bf16.": exact,
            "A register of fa or fb does not hold a pair of bf16 numbers: fill each with pack_bf16(x, y).":
                lambda got: np.isnan(got).any() and e.wrote(c).all(),
            "Both halves of a are the same: a[2] and a[3] are 8 columns to the right.": a[:, np.arange(16) % 8] @ b,
        }, rtol=1e-4, atol=1e-4)  # fmt: skip


@exercise(
    "14.2", "place",
    first_step="without a swizzle it is row * 64 + chunk * 8. What must happen to `chunk` so that it differs from row to row?",
    kernel=False,
)  # fmt: skip
def place(e):
    e.case("a tile of 16 rows, 8 chunks each")
    places = {}
    for row in range(16):
        for chunk in range(8):
            at = e.call(row, chunk)
            e.need(
                isinstance(at, (int, np.integer)),
                f"place({row}, {chunk}) is {at!r}: return an integer.",
            )
            e.need(
                at % 8 == 0,
                f"place({row}, {chunk}) is {at}: a chunk begins at a multiple of 8 elements (16 bytes).",
            )
            where = f"place({row}, {chunk}) is {at}"
            other = next((key for key, value in places.items() if value == at), None)
            e.need(
                other is None,
                f"{where}, and so is place{other}: two chunks have the same position.",
            )
            e.need(
                at // 64 == row,
                f"{where}, which is in row {at // 64}. Every chunk must stay in its row. "
                "(Padding, rows of more than 64 elements, would also work, but costs memory.)",
            )
            places[row, chunk] = int(at)
    for chunk in range(8):
        for first in (0, 8):
            groups = [places[row, chunk] // 8 % 8 for row in range(first, first + 8)]
            e.need(
                len(set(groups)) == 8,
                f"Chunk {chunk} of rows {first} to {first + 7} lies in bank groups {groups}: only {len(set(groups))} different ones, "
                f"so ldmatrix reads it in {max(groups.count(x) for x in groups)} passes instead of one.",
            )


@exercise(
    "14.3", "scores_kernel",
    first_step="copy four chunks of a and four of b per lane with cp_async16, then call cp_async_commit(), cp_async_wait(0), cuda.syncthreads().",
    allow=("mma_bf16", "ldmatrix", "cp_async16", "cp_async_commit", "cp_async_wait", "place64"),
    hints={
        "UninitializedError": "The kernel reads data that has not arrived yet. Copied data is visible after cp_async_commit(), cp_async_wait(0) and, because other "
        "lanes made most of the copies, cuda.syncthreads(). And copy all 16 rows of a and of b: 128 chunks each, four per lane.",
        "UninitializedError in local memory": "mma adds to acc, so initialise acc with zeros; and ldmatrix must fill fa and fb first.",
        "RaceError": "Other lanes made most of the copies: call cuda.syncthreads() between cp_async_wait(0) and the first ldmatrix. "
        "And let one lane copy each chunk.",
        "RaceError in global memory": "Each element of s must be written by one lane: acc[n, i] is s[row * 16 + column], with row = first + g + "
        "8 * (i // 2) and column = 8 * n + 2 * t + i % 2.",
        "OutOfBoundsError": "a has 64 elements per row, and this block's rows begin at row `first`; b has 16 rows; s has 16 elements per row.",
        "KernelError": "Use place64(row, chunk) for the position of a chunk, both for the copy and for the read.",
        "CollectiveError": "All lanes of the warp must execute ldmatrix and mma: call them outside of any `if`.",
        "DeadlockError": "All lanes of the warp must execute ldmatrix, mma and barriers: call them outside of any `if`.",
    },
)  # fmt: skip
def scores_kernel(e):
    for M in e.cases((16, 48), lambda rng: 16 * rng.integers(2, 4)):
        a, b, s = e.normal(M, 64, dtype=BF16), e.normal(16, 64, dtype=BF16), e.blank(M * 16)
        bits = [x.view(np.uint16).reshape(-1) for x in (a, b)]
        e.run(M // 16, 32, s, *bits, case=f"M = {M}")
        a, b = rounded(a), rounded(b)
        want = a @ b.T
        part = lambda columns: (a[:, :columns] @ b[:, :columns].T).ravel()
        slid = np.concatenate([np.arange(8 * k, 8 * k + 16) for k in range(4)])
        own = (a.reshape(-1, 16, 64) @ a.reshape(-1, 16, 64).transpose(0, 2, 1)).ravel()
        mixed = b.copy()  # the wrong result if b's four matrices are in the order of a's
        for k in range(4):
            left, right = slice(16 * k, 16 * k + 8), slice(16 * k + 8, 16 * k + 16)
            mixed[8:, left], mixed[:8, right] = b[:8, right], b[8:, left]
        e.same("s", s, want.ravel(), {
            "Not all columns were multiplied: four steps of two chunks each make 64.":
                lambda got: any(np.allclose(got, part(n), 1e-4, 1e-3) for n in (16, 32, 48)),
            "Step k uses chunks 2 k and 2 k + 1, not k and k + 1.": (a[:, slid] @ b[:, slid].T).ravel(),
            "The right operand was read from a's rows: those of b begin 16 * 64 elements later.": own,
            "Every step multiplied the first 16 columns: step k uses chunks 2 k and 2 k + 1.": 4 * part(16),
            "b's matrices must be in a different order from a's: (rows 0 to 7, chunk 2k), (0 to 7, 2k + 1), (8 to 15, 2k), (8 to 15, 2k + 1).":
                (a @ mixed.T).ravel(),
            "Columns 8 to 15 of s repeat columns 0 to 7: the second mma takes fb[1].": want[:, np.arange(16) % 8].ravel(),
            "Every block computed the first 16 rows of a: this block's rows begin at `first`.":
                want[np.arange(M) % 16].ravel() if M > 16 else np.empty(0),
            "Only the first block's rows of s were written: this block's rows begin at `first`.":
                lambda got: M > 16 and np.isnan(got[256:]).all(),
        }, rtol=1e-4, atol=1e-3)  # fmt: skip
