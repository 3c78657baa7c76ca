"""Exercises of lesson 17: prompts of unequal lengths."""

import numpy as np

from ..kernels.context_attention import context_attention_ref
from .attempt import exercise


def ints(like, *values):
    return np.array(values, np.int32).view(type(like))


@exercise(
    "17.1", "edges_kernel",
    first_step="lane a takes lengths[a], or 0 past the end. Then in steps 1, 2, 4, 8, 16 it adds what lane a - step holds, if there is such a lane.",
    hints={
        "CollectiveError": "A shuffle is for all 32 lanes, outside of any `if`: decide afterwards whether to add what came. And if the report "
        "speaks of int32 and int64: for Numba the sum of two int32 is an int64, so write v = int32(v + before).",
        "DeadlockError": "A shuffle is for all 32 lanes: it stands outside of any `if`. Decide afterwards whether to add what came.",
        "OutOfBoundsError": "There may be fewer than 32 lengths: lanes past the end bring 0, and write nothing.",
        "RaceError": "Each edge belongs to one lane: lane a writes edges[a + 1], and one lane writes edges[0].",
    },
)  # fmt: skip
def edges_kernel(e):
    like = e.normal(1)
    for lengths in ((3, 1, 2), (5,), tuple(range(1, 33)), (4, 0, 0, 7)):
        a = np.array(lengths)
        edges = e.blank(len(a) + 1, dtype=np.int32)
        e.run(
            1,
            32,
            edges,
            ints(like, *lengths),
            case=f"lengths {', '.join(map(str, lengths[:6]))}{', ...' if len(a) > 6 else ''}",
        )
        want = np.concatenate([[0], np.cumsum(a)]).astype(np.int32)
        wrapped = a.copy()
        for step in (1, 2, 4, 8, 16):
            padded = (
                np.concatenate([wrapped, np.zeros(32 - len(a), int)])
                if len(wrapped) < 32
                else wrapped
            )
            wrapped = padded + np.concatenate([padded[:step], padded[:-step]])
        e.same("edges", edges, want, {
            "edges[0] was never written: the first sequence begins at 0.": np.concatenate([[0x7F7F7F7F], want[1:]]),
            "edges[a + 1] holds length a alone: add up what the lanes before hold.": np.concatenate([[0], a]),
            "A lane below `step` has nobody `step` below it: the shuffle gives it its own value back, which must not be added.":
                np.concatenate([[0], wrapped[: len(a)]]),
            "Shifted by one: edges[a] is where sequence a BEGINS, so lane a writes edges[a + 1].":
                lambda got: np.array_equal(got[:-1], want[1:]),
        })  # fmt: skip


@exercise(
    "17.2", "remove_padding_kernel",
    first_step="block n is packed token n. Which sequence a has edges[a] <= n < edges[a + 1]? A loop over a finds it. Then t = n - edges[a].",
    hints={
        "OutOfBoundsError": "t is the position within its own sequence, n - edges[a]; and the search ends at the last a with edges[a] <= n.",
    },
)  # fmt: skip
def remove_padding_kernel(e):
    like = e.normal(1)
    for lengths in ((2, 3), (3, 1, 2), (1, 0, 4)):
        A, T, C = len(lengths), max(lengths), 5
        edges = np.concatenate([[0], np.cumsum(lengths)])
        N = int(edges[-1])
        x, y = e.normal(A, T, C), e.blank(N, C)
        e.run(N, 32, y, x, ints(like, *edges), case=f"lengths {', '.join(map(str, lengths))}")
        rows = np.asarray(x)
        want = np.concatenate([rows[a, :n] for a, n in enumerate(lengths)])
        flat = rows.reshape(A * T, C)[:N]
        e.same("y", y, want, {
            "That copies the first N rows of the padded array, padding and all: token n of sequence a is row (a, n - edges[a]).":
                flat if not np.array_equal(flat, want) else np.empty(0),
            "The first token of each sequence was taken for the last of the one before: a begins AT edges[a], so <= and not <.":
                lambda got: np.isnan(got).sum() == 0 and np.array_equal(got[0], want[0]),
        })  # fmt: skip


@exercise(
    "17.3", "context_attention",
    first_step="a loop over sequences: its queries are q[edges[a] : edges[a + 1]], and query i of it sees the first history[a] + i + 1 keys of its row.",
    kernel=False,
)  # fmt: skip
def context_attention(e):
    H, G, D, S, scale = 4, 2, 3, 9, 0.5
    for lengths, history, rows in (
        ((3,), (0,), (0,)),
        ((2, 3), (0, 0), (0, 1)),
        ((2, 1, 3), (4, 0, 2), (2, 0, 1)),
    ):
        edges = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        q = np.asarray(e.normal(int(edges[-1]), H, D))
        k, v = (np.asarray(e.normal(3, G, S, D)) for _ in range(2))
        history, rows = np.array(history, np.int32), np.array(rows, np.int32)
        for r, n in zip(rows, history + np.array(lengths)):
            if not history.any():
                k[r, :, n:] = v[r, :, n:] = np.nan  # nobody has written these
        case = f"lengths {list(lengths)}, history {list(map(int, history))}, rows {list(map(int, rows))}, 4 heads on 2 key heads"
        got = e.call(q, k, v, edges, history, rows, scale, case=case)
        e.need(got is not None, "It returns None: return o (N, H, D).")
        clean_k, clean_v = np.nan_to_num(k), np.nan_to_num(v)
        want = lambda q=q, history=history, rows=rows, k=clean_k, v=clean_v, scale=scale: (
            context_attention_ref(q, k, v, edges, history, rows, scale)
        )
        swapped = np.arange(H) % G
        order = np.argsort(swapped, kind="stable")
        mixed = np.empty_like(q)
        mixed[:, order] = context_attention_ref(
            q[:, order], clean_k, clean_v, edges, history, rows, scale
        )
        e.same("o", got, want(), {
            "It reads keys that nobody has written yet (they are NaN here): query i sees history + i + 1 keys, not the whole row.":
                lambda got: np.isnan(got).any(),
            "Query head h reads key head h // (H / G): heads 0 and 1 share key head 0.": mixed,
            "The scores were not scaled.": want(scale=1.0),
            "Sequence a reads row rows[a] of the cache, not row a.":
                want(rows=np.arange(len(rows))) if history.any() else np.empty(0),
            "History was left out: the first new token already has history[a] keys before it.":
                want(history=0 * history) if history.any() else np.empty(0),
        }, rtol=1e-4, atol=1e-5)  # fmt: skip
