"""Exercises of lesson 9: batches, and the queue between Python and the GPU."""

import numpy as np

from .attempt import exercise


def prefix_means(x, first):
    """first: (N,) the first row of the sum for each row n"""
    return np.array([x[f : n + 1].mean(0) for n, f in enumerate(first)])


@exercise(
    "9.1", "prefix_mean_kernel",
    first_step="which sequence is row n in, and at which row does that sequence begin?",
    hints={
        "OutOfBoundsError": "Rows run from the first row of the sequence to n inclusive; columns start at tid and advance by cuda.blockDim.x.",
        "RaceError": "Block n writes row n only, and thread tid writes the columns tid, tid + blockDim.x, ...",
    },
)  # fmt: skip
def prefix_mean_kernel(e):
    fixed = (2, 3, 4, 32), (3, 4, 40, 32), (4, 1, 3, 32), (1, 5, 7, 4)
    draw = lambda rng: (*rng.integers((2, 2, 3), (4, 6, 40)), 8 * rng.integers(1, 5))
    for B, T, C, block in e.cases(fixed, draw):
        x, y = e.normal(B * T, C), e.blank(B * T, C)
        e.run(B * T, block, y, x, T, case=f"{B} sequences of {T} tokens, {C} columns")
        x = np.asarray(x).astype(np.float64)
        n = np.arange(B * T)
        count = (n % T + 1)[:, None]
        want = prefix_means(x, n // T * T)
        sums = want * count
        whole = x.reshape(B, T, C).mean(1).repeat(T, 0)
        e.same("y", y, want, {
            "The mean includes earlier sequences, because it begins at row 0. Begin at the first row of n's own sequence, n // T * T.":
                prefix_means(x, 0 * n),
            "Every sequence gets means over rows of the FIRST sequence: n % T is the position in the sequence, not a row.":
                want[n % T],
            "The mean includes later tokens: it must end at row n.":
                lambda got: np.allclose(got, whole, 1e-4, 1e-4) or np.allclose(got, whole * T / count, 1e-4, 1e-4),
            "n // T is the NUMBER of the sequence. Its first row is n // T * T.": prefix_means(x, n // T),
            "n % T is the position in the sequence. The first row of the sequence is n - n % T, which is n // T * T.":
                lambda got: np.allclose(got, prefix_means(x, n % T) * ((n + 1 - n % T) / (n + 1 - np.minimum(n % T, n)))[:, None], 1e-4, 1e-4),
            "The sum was divided by n + 1. It has n % T + 1 rows.": sums / (n + 1)[:, None],
            "The count is one too small: there are n + 1 - first rows from `first` to n.":
                lambda got: T > 1 and e.wrote(y).all()
                and np.allclose(got[n % T > 0], (sums / np.maximum(count - 1, 1))[n % T > 0], 1e-4, 1e-4),
            "y was written with +=, but it holds NaN before you write: assign with =.":
                lambda got: e.wrote(y).all() and np.isnan(got).all(),
            "The sum of one column continues into the next: acc begins at 0 for every column.":
                lambda got: block < C and np.allclose(got[:, :block], want[:, :block], 1e-4, 1e-4) and e.wrote(y).all(),
            "The sum is right, but it was not divided by the number of rows.": sums,
            "The sum was divided by T. It has n % T + 1 rows.": sums / T,
            "Row n itself is missing: range(first, n) ends before n.":
                lambda got: np.allclose(got, (sums - x) / count, 1e-4, 1e-4)
                or (T > 1 and np.allclose(got[n % T > 0], ((sums - x) / np.maximum(count - 1, 1))[n % T > 0], 1e-4, 1e-4)),
            f"The columns from {block} on were never written: advance by cuda.blockDim.x.":
                lambda got: block < C and np.isnan(got[:, block:]).all() and not np.isnan(got[:, :block]).any(),
        }, rtol=1e-4, atol=1e-5)  # fmt: skip


@exercise(
    "9.2", "scores_kernel",
    first_step="blockIdx.z numbers the pairs (b, h): which b and which h is this? Then compute one element of s per thread.",
    hints={
        "OutOfBoundsError": "Use b, h = z // H, z % H with z = cuda.blockIdx.z. Guard both i and j, because T is not a multiple of 8. "
        "The axes of q and k are sequence, token, head, component: q_BTHD[b, i, h, d].",
        "RaceError": "Two threads write the same element of s. Each pair (b, h) has its own z: b = z // H, h = z % H. Compute i from the .y indices and j from .x.",
    },
)  # fmt: skip
def scores_kernel(e):
    fixed = (2, 5, 3, 4), (3, 9, 2, 6), (1, 8, 1, 1)
    for B, T, H, D in e.cases(fixed, lambda rng: rng.integers((1, 2, 1, 2), (4, 11, 4, 7))):
        q, k, s = e.normal(B, T, H, D), e.normal(B, T, H, D), e.blank(B, H, T, T)
        scale = np.float32(D**-0.5 + 0.1)
        tiles = -(-T // 8)
        case = f"B, T, H, D = {B}, {T}, {H}, {D}"
        trace = e.run((tiles, tiles, B * H), (8, 8), s, q, k, scale, case=case, trace=True)
        q, k = (np.asarray(a).astype(np.float64) for a in (q, k))
        wrote = e.wrote(s)
        plain = np.einsum("bihd,bjhd->bhij", q, k)
        last = np.einsum("bih,bjh->bhij", q[..., -1], k[..., -1]) * scale
        e.same("s", s, plain * scale, {
            "The scale is missing.": plain,
            "Query and key are swapped: i, from .y, is the query and the row of s; j, from .x, is the key.":
                plain.swapaxes(2, 3) * scale,
            "The scale was applied twice, for example inside the sum and again after it.": plain * scale**2,
            "Only the last product remains: accumulate with +=.": last,
            "Every head got the scores of head 0: h = z % H.": np.repeat(plain[:, :1], H, 1) * scale,
            "Every sequence got the scores of sequence 0: b = z // H.": np.repeat(plain[:1], B, 0) * scale,
            "The scores were divided by the scale: multiply by it.": plain / scale,
            "The last product is missing: d runs from 0 to D - 1, which is range(D).":
                lambda got: D > 1 and np.allclose(got, plain * scale - last, 1e-4, 1e-4),
            "There is no mask here: s holds all pairs of a query i and a key j.":
                lambda got: T > 1 and np.array_equal(wrote, np.broadcast_to(np.tri(T, dtype=bool), s.shape)),
            "Rows or columns of s were never written: i is cuda.blockIdx.y * 8 + cuda.threadIdx.y, j likewise with .x.":
                lambda got: T > 8 and not wrote.all() and wrote.any((2, 3)).all(),
            "Some pairs (b, h) were never written: b = z // H, h = z % H reaches all of them.":
                lambda got: wrote.any() and not wrote.any((2, 3)).all(),
        }, rtol=1e-4, atol=1e-5)  # fmt: skip
        e.need(
            T % 8 or trace.traffic(e.name(s), True).efficiency == 1,
            "The values are right, but the writes are not coalesced: neighbouring threads write to different rows of s. Compute the key j from the .x indices and the query i from the .y indices.",
        )


@exercise(
    "9.3", "queue_ends",
    first_step="when has kernel i been launched? When is the GPU free? A kernel begins at the later of the two times.",
    kernel=False,
)  # fmt: skip
def queue_ends(e):
    cases = {
        "kernels shorter than a launch": ([4, 4, 4], 10),
        "kernels longer than a launch": ([30, 30, 30], 10),
        "short and long ones": ([5, 40, 3, 2, 60, 1], 10),
        "a single kernel": ([7], 2),
        "no kernel": ([], 5),
    }
    draw = lambda rng: ("random times", (rng.integers(1, 30, 7), rng.integers(5, 15)))
    for case, (gpu, launch) in e.cases(cases.items(), draw, times=5):
        got = e.call(list(gpu), launch, case=f"{case}: gpu_us {gpu}, launch_us {launch}")
        e.need(got is not None, "The function returns nothing: return the list of ends.")
        e.need(
            np.ndim(got) == 1,
            f"Return a list with one end per kernel; got {got!r}.",
        )
        gpu, n = np.array(gpu, float), len(gpu)
        issued = launch * np.arange(1, n + 1)
        want, free = [], 0.0
        late, free_late = [], 0.0
        for i in range(n):
            free = max(free, issued[i]) + gpu[i]
            want.append(free)
            free_late = max(free_late, issued[i] - launch) + gpu[i]
            late.append(free_late)
        e.same("the list of ends", np.asarray(got, float), np.array(want), {
            "Your Python waits for each kernel before it launches the next. A launch does not wait: kernel i is launched at (i + 1) * launch_us, whatever the GPU is doing.":
                np.cumsum(gpu + launch) if n > 1 else np.empty(0),
            "Your kernels overlap: a kernel also waits for the end of the previous one.": issued + gpu,
            "Your GPU never waits for Python: kernel i cannot begin before (i + 1) * launch_us.": np.cumsum(gpu),
            "Your kernels begin when their launch BEGINS. A launch is complete launch_us later, at (i + 1) * launch_us.": np.array(late),
            "All your kernels are launched at the same time: kernel i is launched at (i + 1) * launch_us.":
                launch + np.cumsum(gpu) if n > 1 else np.empty(0),
            "These are the start times: return the ends.": np.array(want) - gpu,
        })  # fmt: skip
