"""Exercises of lesson 18: the KV cache and grouped-query attention."""

import numpy as np

from xtrain.kernels.decoding.kv_cache import kv_cache_bytes

from .attempt import exercise


def ints(like, values):
    return np.array(values, np.int32).view(type(like))


@exercise(
    "18.1", "append_kernel", each=3,  # of 32 threads and up to 69 channels; blocks of tokens without a place are idle
    first_step="block (n, g) copies head g of token n; thread d copies one channel, to row rows[n], head g, position positions[n].",
    hints={
        "OutOfBoundsError": "Skip a token without a valid row and position: write only if rows[n] >= 0 and 0 <= positions[n] < S. "
        "The cache is (R, G, S, D): row, head, position, channel.",
        "RaceError": "Two threads write the same element. Block (n, g) handles head g = blockIdx.y, thread d starts at channel d; "
        "row and position come from rows[n] AND positions[n].",
    },
)  # fmt: skip
def append_kernel(e):
    like = e.normal(1)
    fixed = (
        ((0,), (5,), 3),
        ((1, 0, 1), (0, 3, 1), 40),
        ((0, -1, 1, 0, 1), (1, 2, 4, 0, -1), 3),
    )

    def draw(rng):
        places = rng.permutation([(r, p) for r in range(-1, 2) for p in range(-1, 5)])[:9]
        return tuple(places[:, 0]), tuple(places[:, 1]), rng.integers(3, 70)

    for rows, positions, D in e.cases(fixed, draw):
        N, R, G, S = len(rows), 2, 2, 4 if -1 in rows or e.drawn else 6
        cache, new = e.blank(R, G, S, D), e.normal(N, G, D)
        case = f"rows {', '.join(map(str, rows))}, positions {', '.join(map(str, positions))}, capacity {S}"
        e.run((N, G), 32, cache, new, ints(like, rows), ints(like, positions), case=case)
        want, other, first = (np.full((R, G, S, D), np.nan, np.float32) for _ in range(3))
        for n, (r, p) in enumerate(zip(rows, positions)):
            if r >= 0 and 0 <= p < S:
                want[r, :, p] = np.asarray(new)[n]
                first[r, 0, p] = np.asarray(new)[n, 0]
            if n < R:
                other[n, :, p % S] = np.asarray(new)[n]
        wrote, places = e.wrote(cache).any(-1), ~np.isnan(want).any(-1)
        zero = (np.arange(R)[:, None, None] == 0) | (np.arange(S) == 0)  # row 0 or position 0
        e.same("cache", cache, want, {
            "Nothing was written. Row 0 and position 0 are valid too: rows[n] >= 0 and 0 <= positions[n] < S.":
                lambda got: np.isnan(got).all(),
            "Token n was written to row n: its row is rows[n].": other,
            "Only head 0 was written: block (n, g) handles head g = blockIdx.y.": first,
            "Only the first 32 channels were copied: each thread continues in steps of 32.":
                lambda got: D > 32 and np.array_equal(got[..., :32], want[..., :32], True) and np.isnan(got[..., 32:]).all(),
            "A valid token was skipped. Row 0 and position 0 are valid too: rows[n] >= 0 and 0 <= positions[n] < S.":
                lambda got: (places & zero & ~wrote).any() and not (places & ~zero & ~wrote).any(),
            "All channels of a head must be copied: d = 0 .. D - 1.":
                lambda got: np.array_equal(wrote, places) and np.isnan(got).sum() > np.isnan(want).sum(),
        })  # fmt: skip


@exercise(
    "18.2", "decode_attention",
    first_step="for each query head: the scores with the first `length` keys of its key/value head, a softmax, the weighted sum of the values.",
    kernel=False,
)  # fmt: skip
def decode_attention(e):
    scale = 0.4
    fixed = (
        (2, 2, 4, 6, 4, 1.0),
        (2, 2, 3, 5, 1, 1.0),
        (6, 2, 4, 8, 7, 1.0),
        (2, 2, 4, 6, 4, 100.0),
    )

    def draw(rng):
        G, each, D, S = rng.integers((1, 2, 2, 5), (4, 4, 6, 9))
        return G * each, G, D, S, rng.integers(2, S + 1), 1.0

    for H, G, D, S, length, large in e.cases(fixed, draw):
        q = np.asarray(e.normal(H, D, scale=large))
        k, v = (np.asarray(e.normal(G, S, D, scale=2.0)).copy() for _ in range(2))
        k[:, length:] = v[:, length:] = np.nan
        got = e.call(
            q,
            k,
            v,
            length,
            scale,
            case=f"{H} query heads, {G} key/value heads, {length} of {S} positions filled"
            + (", large scores" if large > 1 else ""),
        )
        e.need(got is not None, "Nothing is returned: return o (H, D).")

        def attend(head, scale=scale, k=k, v=v, n=length, q=q, H=H, whole=True):
            out = np.zeros_like(q)
            for h in range(H):
                s = k[head(h), :n] @ q[h] * scale
                p = np.exp(s - s.max())
                out[h] = p / (p.sum() if whole else 1) @ v[head(h), :n]
            return out

        def across():
            s = np.stack([k[h // (H // G), :length] @ q[h] * scale for h in range(H)])
            p = np.exp(s - s.max(0))
            return np.stack([w @ v[h // (H // G), :length] for h, w in enumerate(p / p.sum(0))])

        e.same("o", got, attend(lambda h: h // (H // G)), {
            "exp overflows: subtract the largest score before exp.": lambda got: large > 1 and not np.isfinite(got).all(),
            "Here the softmax runs over the heads: it must run over the keys of one head.": across(),
            "This reads positions that have not been filled (they are NaN): use only the first `length` keys and values.":
                lambda got: np.isnan(got).any(),
            "Query head h uses key/value head h // (H / G): neighbouring heads share one.": attend(lambda h: h % G),
            "All query heads read key/value head 0: query head h uses key/value head h // (H / G).": attend(lambda h: 0),
            "The newest key is missing: the token itself is among the first `length`.":
                attend(lambda h: h // (H // G), n=length - 1) if length > 1 else np.empty(0),
            "The scores are not scaled: multiply them by scale.": attend(lambda h: h // (H // G), scale=1.0),
            "The weights do not sum to 1: divide by the sum of the exponentials.":
                attend(lambda h: h // (H // G), whole=False) if length > 1 else np.empty(0),
        }, rtol=1e-4, atol=1e-5)  # fmt: skip


@exercise(
    "18.3", "largest_batch",
    first_step="count the bytes of ONE sequence: keys and values, in every layer, for every key/value head and every position, D numbers.",
    kernel=False,
)  # fmt: skip
def largest_batch(e):
    fixed = (
        (12, 12, 12, 64, 1024, 4, 10**9),
        (32, 32, 8, 128, 8192, 2, 64 * 10**9),
        (2, 4, 4, 8, 16, 4, 100),
    )

    def draw(rng):
        L, H, G, D, S = rng.integers((2, 9, 2, 16, 100), (40, 33, 9, 129, 5000))
        return L, H, G, D, S, 2, rng.integers(10**9, 10**11)

    for L, H, G, D, S, size, free in e.cases(fixed, draw, times=5):
        got = e.call(
            L,
            H,
            G,
            D,
            S,
            size,
            free,
            case=f"{L} layers, {H} query and {G} key/value heads of {D}, {S} tokens, {size} bytes per number, {free:,} bytes free",
        )
        one = kv_cache_bytes(L, 1, G, S, D, {4: np.float32, 2: np.float16}[size])
        want = free // one
        if got == want:
            continue
        e.need(got is not None and np.ndim(got) == 0, "Return one integer.")
        say = f"It returns {got}; expected {want}."
        if got == free // (one // 2):
            say += " Keys AND values are stored: twice as much."
        elif got == free // (one // L):
            say += " Each layer has its own keys and values."
        elif got == free // (one // G * H):
            say += " The cache holds key/value heads, not query heads: that is the saving of grouped-query attention."
        elif got == free // (one // size):
            say += " A number takes more than one byte."
        elif got == want + 1:
            say += " The last sequence does not fit completely: round down, with //."
        elif np.isclose(float(got), free / one):
            say += " Only whole sequences count: round down, with //."
        raise e.wrong(say)
