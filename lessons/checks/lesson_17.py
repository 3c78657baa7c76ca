"""Exercises of lesson 17: prompts of different lengths."""

import numpy as np

from xtrain.kernels.attention.context_attention import context_attention_ref

from .attempt import exercise


def ints(like, *values):
    return np.array(values, np.int32).view(type(like))


def stepped(lengths, steps, least=0):
    """Running sums in which lane a adds the value of lane a - step, provided a - step >= least."""
    v = np.array(lengths)
    for step in steps:
        v = v + np.array([v[a - step] if a - step >= least else 0 for a in range(len(v))])
    return v


def skipping(lengths):
    return stepped(lengths, (1, 2, 4, 8, 16), least=1)


@exercise(
    "17.1", "edges_kernel",
    first_step="lane a loads lengths[a], or 0 past the end. Then, for steps 1, 2, 4, 8, 16, it adds the value of lane a - step, if that lane exists.",
    hints={
        "CollectiveError": "All 32 lanes must execute the shuffle, outside any `if`: decide afterwards whether to add the result.",
        "DeadlockError": "All 32 lanes must execute the shuffle, outside any `if`: decide afterwards whether to add the result.",
        "OutOfBoundsError": "There may be fewer than 32 lengths: lanes past the end contribute 0 and write nothing.",
        "RaceError": "Each edge belongs to one lane: lane a writes edges[a + 1], and one lane writes edges[0].",
    },
)  # fmt: skip
def edges_kernel(e):
    like = e.normal(1)
    fixed = (3, 1, 2), (5,), tuple(range(1, 33)), (4, 0, 0, 7), (0, 0, 3, 0)
    for lengths in e.cases(fixed, lambda rng: tuple(rng.integers(0, 20, rng.integers(8, 30)))):
        a = np.array(lengths)
        edges, given = e.blank(len(a) + 1, dtype=np.int32), ints(like, *lengths)
        case = f"lengths {', '.join(map(str, lengths[:6]))}{', ...' if len(a) > 6 else ''}"
        trace = e.run(1, 32, edges, given, case=case, trace=True)
        reads = len(trace.requests(e.name(given)))
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
            "edges[a + 1] holds length a alone: add the values of the lanes below.": np.concatenate([[0], a]),
            "For lanes 0 to step - 1 no lane is `step` below: the shuffle returns their own value, which must not be added.":
                np.concatenate([[0], wrapped[: len(a)]]),
            "A step is missing: after steps 1, 2, 4, 8 a lane holds the sum of only 16 lanes. Five steps are needed; the last is 16.":
                np.concatenate([[0], [a[max(0, i - 15) : i + 1].sum() for i in range(len(a))]]),
            "Lane `step` must also add: lane 0 is `step` below it. So the condition is a >= step.": np.concatenate([[0], skipping(a)]),
            "The steps are 1, 2, 4, 8, 16: each is twice the previous one.": np.concatenate([[0], stepped(a, (1, 2, 3, 4, 5))]),
            "Shifted by one: edges[a] is where sequence a BEGINS, so lane a writes edges[a + 1].":
                lambda got: np.array_equal(got[:-1], want[1:]),
        })  # fmt: skip
        e.need(
            reads <= 2,
            f"The edges are right, but the warp reads lengths {reads} times. Each lane loads its own element, all in one access; "
            "shuffles then add them up.",
        )


@exercise(
    "17.2", "remove_padding_kernel",
    first_step="block n handles packed token n. Which sequence a has edges[a] <= n < edges[a + 1]? A loop over a finds it. Then t = n - edges[a].",
    hints={
        "OutOfBoundsError": "t is the position within sequence a, n - edges[a]; the search ends at the last a with edges[a] <= n; and "
        "a thread handles the columns from threadIdx.x to C in steps of 32.",
    },
)  # fmt: skip
def remove_padding_kernel(e):
    like = e.normal(1)
    fixed = ((2, 3), 5), ((3, 1, 2), 40), ((1, 0, 4), 5), ((0, 2, 0, 0, 1, 0), 3)
    draw = lambda rng: (tuple(rng.integers(0, 5, 6)) + (2,), rng.integers(3, 70))
    for lengths, C in e.cases(fixed, draw):
        A, T = len(lengths), max(lengths)
        edges = np.concatenate([[0], np.cumsum(lengths)])
        N = int(edges[-1])
        x, y = e.normal(A, T, C), e.blank(N, C)
        e.run(N, 32, y, x, ints(like, *edges), case=f"lengths {', '.join(map(str, lengths))}")
        rows = np.asarray(x)
        want = np.concatenate([rows[a, :n] for a, n in enumerate(lengths)])
        flat = rows.reshape(A * T, C)[:N]
        e.same("y", y, want, {
            "This copies the first N rows of the padded array, including the padding: packed token n of sequence a is row (a, n - edges[a]).":
                flat if not np.array_equal(flat, want) else np.empty(0),
            "The first token of each sequence was assigned to the previous one: sequence a begins AT edges[a], so use <= and not <.":
                lambda got: _rows_from(got, rows, edges, [np.searchsorted(edges[1:], n) for n in range(N)]),
            "A sequence may be empty: it begins at n but owns no token. The sequence of token n is the LAST a with edges[a] <= n.":
                lambda got: 0 in lengths and _rows_from(got, rows, edges, [np.searchsorted(edges, n, "right") - 1 if n not in edges
                                                                           else list(edges).index(n) for n in range(N)]),
            "Only the first 32 columns were copied: each thread continues in steps of 32.":
                lambda got: C > 32 and np.array_equal(got[:, :32], want[:, :32]) and np.isnan(got[:, 32:]).all(),
        })  # fmt: skip


def _rows_from(got, rows, edges, sequences):
    """True if packed row n is the row of sequence sequences[n], wherever that row exists."""
    at = [(n, a, n - edges[a]) for n, a in enumerate(sequences) if n - edges[a] < rows.shape[1]]
    return all(np.array_equal(got[n], rows[a, t]) for n, a, t in at)


def seen(q, k, v, edges, rows, scale, sees):
    """context_attention in which query i of sequence a attends to the first sees(a, i) keys."""
    H, G, o = q.shape[1], k.shape[1], np.full_like(q, np.nan)
    for a, row in enumerate(rows):
        for h in range(H):
            group, of = h // (H // G), slice(edges[a], edges[a + 1])
            n = [sees(a, i) for i in range(edges[a + 1] - edges[a])]
            s = q[of, h] @ k[row, group].T * scale
            p = np.where(
                np.arange(k.shape[2]) < np.array(n)[:, None], np.exp(s - s.max(1, keepdims=True)), 0
            )
            with np.errstate(all="ignore"):
                o[of, h] = p @ v[row, group] / (p.sum(1, keepdims=True))
    return o


@exercise(
    "17.3", "context_attention",
    first_step="loop over the sequences: the queries of sequence a are q[edges[a] : edges[a + 1]], and its query i attends to the first history[a] + i + 1 keys of its cache row.",
    kernel=False,
)  # fmt: skip
def context_attention(e):
    H, G, D, S, scale = 4, 2, 3, 9, 0.5
    fixed = (
        ((3,), (0,), (0,), 1.0),
        ((2, 3), (0, 0), (0, 1), 1.0),
        ((2, 1, 3), (4, 0, 2), (2, 0, 1), 1.0),
        ((2, 0, 3), (1, 3, 2), (1, 0, 2), 1.0),
        ((2, 3), (2, 1), (0, 1), 400.0),
    )
    draw = lambda rng: (
        *map(tuple, rng.integers((1, 0), (5, 5), (3, 2)).T),
        tuple(rng.permutation(3)),
        1.0,
    )
    for lengths, history, rows, size in e.cases(fixed, draw):
        edges = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        q = np.asarray(e.normal(int(edges[-1]), H, D, scale=size))
        k, v = (np.asarray(e.normal(3, G, S, D)) for _ in range(2))
        history, rows = np.array(history, np.int32), np.array(rows, np.int32)
        for r, n in zip(rows, history + np.array(lengths)):
            if not history.any():
                k[r, :, n:] = v[r, :, n:] = np.nan  # not written yet
        case = f"lengths {list(lengths)}, history {list(map(int, history))}, rows {list(map(int, rows))}, 4 query heads, 2 key/value heads"
        case += ", large scores" * (size > 1)
        got = e.call(q, k, v, edges, history, rows, scale, case=case)
        e.need(got is not None, "Nothing is returned: return o (N, H, D).")
        clean_k, clean_v = np.nan_to_num(k), np.nan_to_num(v)
        want = lambda q=q, history=history, rows=rows, k=clean_k, v=clean_v, scale=scale: (
            context_attention_ref(q, k, v, edges, history, rows[:, None], scale)
        )
        swapped = np.arange(H) % G
        order = np.argsort(swapped, kind="stable")
        mixed = np.empty_like(q)
        mixed[:, order] = context_attention_ref(
            q[:, order], clean_k, clean_v, edges, history, rows[:, None], scale
        )
        given = (q, clean_k, clean_v, edges, rows, scale)
        late = seen(*given, lambda a, i, past=history: past[a] + i)
        e.same("o", got, want(), {
            "exp overflows: subtract the largest score of each query first.": lambda got: size > 1 and not np.isfinite(got).all(),
            "A query also attends to itself: query i attends to history + i + 1 keys; here it attends to one fewer.":
                lambda got: _close_where(got, late, np.isfinite(late)),
            "Every query attends to all keys of its prompt, including later ones: query i attends to history + i + 1 keys.":
                seen(*given, lambda a, i, past=history, edges=edges: past[a] + edges[a + 1] - edges[a]),
            "This reads keys that have not been written yet (they are NaN here): query i attends to history + i + 1 keys, not to the whole row.":
                lambda got: not history.any() and np.isnan(got).any(),
            "Query head h uses key/value head h // (H / G): heads 0 and 1 share key/value head 0.": mixed,
            "The scores are not scaled: multiply them by scale.": want(scale=1.0),
            "The sum of the softmax runs over the keys of ONE query: sum(-1, keepdims=True).":
                lambda got, lengths=lengths: _proportional(got, want(), lengths),
            "Sequence a must read row rows[a] of the cache, not row a.":
                want(rows=np.arange(len(rows))) if history.any() else np.empty(0),
            "The history is ignored: the first new token already has history[a] keys before it.":
                want(history=0 * history) if history.any() else np.empty(0),
        }, rtol=1e-4, atol=1e-5)  # fmt: skip


def _close_where(got, want, where):
    return where.any() and not where.all() and np.allclose(got[where], want[where], 1e-4, 1e-5)


def _proportional(got, want, lengths):
    """True if each row is right up to a positive factor of at most 1 (rounding aside)."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    factor = (got * want).sum(-1, keepdims=True) / (want * want).sum(-1, keepdims=True)
    return (
        max(lengths) > 1
        and np.allclose(got, factor * want, 1e-3, 1e-5)
        and (factor > 0).all()
        and (factor < 1.001).all()
    )
