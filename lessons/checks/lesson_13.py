"""Exercises of lesson 13: FlashAttention."""

from collections import defaultdict

import numpy as np

from xtrain.kernels.attention.flash_attention import flash_attention_bwd_ref, flash_attention_ref

from .attempt import exercise
from .pieces import Pieces

D, TILE = 16, 32  # as in the lesson
SCALE = np.float32(0.3)  # not 1 / sqrt(D): a kernel must use the scale it receives


def walk(q, k, v, scale, tile, shrink_acc=True, shrink_total=True, top=-np.inf, S=None, sign=1, late=False):  # fmt: skip
    """-> acc, total, top of the online softmax, optionally with one of its steps left out"""
    total, acc = 0.0, np.zeros(v.shape[1])
    for first in range(0, S or len(k), tile):
        s = scale * (k[first : first + tile] @ q)
        new = max(top, s.max())
        shrink, weight = (
            np.exp(sign * (top - new)) if first else 0.0,
            np.exp(s - (top if late and first else new)),
        )
        total = total * (shrink if shrink_total else 1) + weight.sum()
        acc = acc * (shrink if shrink_acc else 1) + weight @ v[first : first + tile]
        top = new
    return acc, total, top


@exercise(
    "13.1", "attention_row",
    first_step="loop over the keys in steps of `tile`; which three values (a maximum, a sum, a vector) do you carry from tile to tile?",
    kernel=False,
)  # fmt: skip
def attention_row(e):
    fixed = (
        (4, 4, 0, 0),
        (12, 4, 0, 0),
        (10, 4, 0, 0),
        (9, 2, 400, 0),
        (9, 2, -400, 0),
        (9, 2, 0, 900),
        (9, 2, 0, -900),
    )
    for S, tile, shift, fall in e.cases(fixed, lambda rng: (*rng.integers((5, 2), (20, 6)), 0, 0)):
        q, k, v = (
            np.asarray(e.normal(*shape)).astype(np.float64) for shape in ((3,), (S, 3), (S, 3))
        )
        k += shift * q / (q @ q)  # all scores move up or down by this much times scale
        k -= fall * np.arange(S)[:, None] * q / (q @ q)
        scale = 2.0
        case = f"S = {S}, tile = {tile}" + (f", scores near {scale * shift:g}" if shift else "")
        case += ", scores that keep falling" * (fall > 0) + ", scores that keep rising" * (fall < 0)
        with np.errstate(all="ignore"):
            keys = Pieces(k, tile, "keys", "k_SD[first : first + tile]")
            values = Pieces(v, tile, "values", "v_SD[first : first + tile]")
            got = e.call(q, keys, values, scale, tile, case=case)
            e.need(isinstance(got, tuple) and len(got) == 2, "Return two values: o, lse.")
            acc, total, top = walk(q, k, v, scale, tile)
            plain = walk(q, k, v, scale, tile, shrink_acc=False)
            ratio = lambda acc, total, top: acc / total
            e.same("o", got[0], acc / total, {
                "The last, incomplete tile is missing.":
                    ratio(*walk(q, k, v, scale, tile, S=S // tile * tile)) if tile < S and S % tile else np.empty(0),
                "acc is not divided by the sum: divide once, at the end.": acc,
                "acc was not multiplied by exp(old maximum - new maximum): it was computed with the old maximum.": plain[0] / plain[1],
                "The sum was not multiplied by exp(old maximum - new maximum): it was computed with the old maximum.":
                    ratio(*walk(q, k, v, scale, tile, shrink_total=False)),
                "Neither the sum nor acc was multiplied by exp(old maximum - new maximum): both were computed with the old maximum.":
                    ratio(*walk(q, k, v, scale, tile, shrink_acc=False, shrink_total=False)),
                "Keys are missing: loop from key 0 to the last key.": lambda got: keys.asked < S,
                "The weights of a tile were computed with the old maximum: they are exp(s - new maximum).":
                    lambda o: not (shift or fall) and ((np.isnan(o).all() and np.isposinf(got[1])) or _same(o, ratio(*walk(q, k, v, scale, tile, late=True)))),
                "The factor is inverted: use exp(old maximum - new maximum), which is at most 1.":
                    lambda got: not (shift or fall) and (np.isnan(got).all() or _same(got, ratio(*walk(q, k, v, scale, tile, sign=-1)))),
                "The scores are not multiplied by scale.": ratio(*walk(q, k, v, 1.0, tile)),
                "exp(old maximum - new maximum) overflows: the running maximum never falls, so new = max(old, the tile's largest).":
                    lambda got: fall > 0 and not np.isfinite(got).all(),
                "exp overflows: later tiles have larger scores than the first. The running maximum grows with each tile: new = max(old, the tile's largest).":
                    lambda got: fall < 0 and not np.isfinite(got).all(),
                "exp overflows: subtract the running maximum before exp.": lambda got: shift > 0 and not np.isfinite(got).all(),
                "Every weight is 0, and 0 / 0 is NaN: the maximum must begin below every possible score, at -np.inf.":
                    lambda got: shift < 0 and not np.isfinite(got).all(),
            }, rtol=1e-6)  # fmt: skip
        e.same("lse", np.asarray(got[1], np.float64), np.float64(top + np.log(total)), {
            "That is the logarithm of the sum of exp(s - maximum): add the maximum.": np.float64(np.log(total)),
            "That is the maximum alone: add the logarithm of the sum of exp(s - maximum).": np.float64(top),
            "The maximum still has its initial value: end each iteration with old maximum = new maximum.": lambda got: np.isneginf(got),
        }, rtol=1e-6)  # fmt: skip
    S, tile = 100_000, 1000
    q, k, v = e.rng.normal(size=3), *e.rng.normal(size=(2, S, 3))
    keys = Pieces(k, tile, "keys", "k_SD[first : first + tile]")
    values = Pieces(v, tile, "values", "v_SD[first : first + tile]")
    got, peak = e.call_measured(q, keys, values, 1.0, tile, case=f"S = {S:,}, tile = {tile:,}")
    acc, total, _ = walk(q, k, v, 1.0, tile)
    e.same("o", got[0], acc / total, rtol=1e-6)
    e.need(
        peak < S * 8 / 2,
        f"The values are right, but {peak / 1e3:,.0f} kB were in use at once, and all {S:,} scores take {S * 8 / 1e3:,.0f} kB. Use the scores of a "
        "tile before you load the next: carry only a maximum, a sum and a vector from tile to tile.",
    )


def _same(got, want):
    return np.shape(got) == want.shape and np.allclose(got, want, 1e-6)


# ----------------------------------------------------------------------------- kernels
def heads(*arrays):
    return [np.asarray(x, np.float64)[None, :, None] for x in arrays]


def hidden_attention(q, k, v, scale, sees):
    """-> o (T, D) with a given mask instead of the causal one. sees: (T, T), True where a query sees a key"""
    s = np.where(sees, np.asarray(q, np.float64) @ np.asarray(k, np.float64).T * scale, -np.inf)
    with np.errstate(all="ignore"):
        p = np.exp(s - s.max(1, keepdims=True))
        return (p / p.sum(1, keepdims=True) @ np.asarray(v, np.float64)).astype(np.float32)


WALK = {
    "RaceError": "Each iteration needs two barriers: one before the loads, because another thread may still read the old tiles, and one "
    "after them, so that no thread reads a tile that is not loaded yet.",
    "UninitializedError": "The kernel reads an element that was never written: fill q and acc before the loop over tiles, and put cuda.syncthreads() "
    "between load_tile and the first read of the tile.",
    "DeadlockError": "All threads of the block must reach the barriers and load_tile, also those past the end: guard only the reads and "
    "writes of q and o with t < T, and do not return early.",
    "OutOfBoundsError": "Threads past the end have no query: read q_TD[t, d] and write o_TD[t, d] only if t < T.",
}  # fmt: skip


def tiles_read(e, trace, k, v, one_pass):
    """Wrong if keys or values are not read through the tiles, or more than once. one_pass: why once is enough"""
    for a in (k, v):
        name, readers = e.name(a), defaultdict(list)
        for x in trace.of(name, write=False):
            readers[x.block[0], x.index].append(x.thread)
        e.need(
            all(len(set(threads)) == 1 for threads in readers.values()),
            f"The values are right, but several threads of a block read the same element of {name} from global memory. Read it only with load_tile, "
            "once per block, and take the keys and values from the tiles in shared memory.",
        )
        e.need(
            all(len(threads) == 1 for threads in readers.values()),
            f"The values are right, but a block loads the same tile of {name} more than once: one pass over the tiles is enough. {one_pass}",
        )
        if any(index // D // TILE > block for block, index in readers):
            e.remark(
                "The loop also loads tiles of keys that all lie in the future of a block's last query. That is correct thanks to the mask, but nearly "
                "half of the work is for nothing: end the loop with the block's own tile."
            )


@exercise(
    "13.2", "flash_kernel",
    first_step="fill q and acc; then `for first in range(...)` over tiles: a barrier, load_tile(k, k_TD, first) and the same for v, a barrier, "
    "and a loop over the keys j of the tile.",
    allow=("load_tile",), hints=WALK, each=D,
)  # fmt: skip
def flash_kernel(e):
    for T, size in e.cases(((5, 2), (33, 2), (3, 350)), lambda rng: (rng.integers(6, 20), 2)):
        q, k, v = e.normal(T, D, scale=size), e.normal(T, D), e.normal(T, D)
        o, lse = e.blank(T, D), e.blank(T)
        large = size > 2
        case = f"T = {T}" + ", scores of several hundred" * large
        trace = e.run(-(-T // TILE), TILE, o, lse, q, k, v, SCALE, case=case, trace=True)
        want_o, want_lse = (
            x.reshape(lse.shape + (-1,)) for x in flash_attention_ref(*heads(q, k, v), float(SCALE))
        )
        causal, tiles, places = np.tri(T, dtype=bool), np.arange(T) // TILE, np.arange(T) % TILE
        unscaled, strict = (
            hidden_attention(q, k, v, 1.0, causal),
            hidden_attention(q, k, v, SCALE, np.tri(T, k=-1, dtype=bool)),
        )
        total = np.exp(want_lse[:, 0] - _tops(q, k))[:, None]
        e.same("o", o, want_o, {
            "exp overflows: the weight of a key is exp(s - new), with the new maximum; top is still the old one, far below.":
                lambda got: not large and np.isnan(got[0]).all() and np.isposinf(np.asarray(lse)[0]),
            "With scores of several hundred, exp(s) is infinite or 0. Subtract the running maximum before exp: new is the larger of top and s, and "
            "the weight is exp(s - new).": lambda got: large and not np.isfinite(got).all(),
            "There is no mask: every query saw all keys. Query t sees the keys up to t: first + j <= t.":
                lambda got: any(np.allclose(got, o, 1e-4, 1e-5) for o in _unmasked(q, k, v)),
            "A query also sees its own key: first + j <= t, not < t.": lambda got: np.allclose(got[1:], strict[1:], 1e-4, 1e-5),
            "The scores are not multiplied by scale.": unscaled,
            "acc is not divided by the sum: divide once, at the end.": want_o * total,
            "acc was not multiplied by exp(top - new): it was computed with the old maximum.": _unshrunk(q, k, v, True),
            "The sum was not multiplied by exp(top - new): it was computed with the old maximum.": _unshrunk(q, k, v, False),
            "Only the block's own tile was visited: a query also sees all earlier tiles.":
                hidden_attention(q, k, v, SCALE, causal & (tiles[:, None] == tiles)),
            "The mask compares positions within the tile, j and threadIdx.x. Compare the key's position in the whole sequence: first + j <= t.":
                hidden_attention(q, k, v, SCALE, (tiles[:, None] >= tiles) & (places[:, None] >= places)),
            "The mask compares t with j, a position within the tile. Compare the key's position in the whole sequence: first + j <= t.":
                _unmasked(q, k, v, lambda key: key % TILE <= np.arange(T)[:, None])[0],
            "The first query saw no key at all, and 0 / 0 is NaN: the loop must include the block's own tile, which begins at "
            "TILE * blockIdx.x.": lambda got: np.isnan(got[0]).all() and np.isneginf(np.asarray(lse)[0]) and e.wrote(o).all(),
        }, rtol=1e-2 if large else 1e-4, atol=1e-2 if large else 1e-5)  # fmt: skip
        e.same("lse", lse, want_lse[:, 0], {
            "That is the logarithm of the sum alone: add the maximum, top.": np.log(total[:, 0]),
            "That is the maximum alone: add the logarithm of the sum.": _tops(q, k),
        }, rtol=1e-4, atol=1e-5)  # fmt: skip
        tiles_read(
            e,
            trace,
            k,
            v,
            "When a larger score appears, rescale the sum and acc by exp(top - new).",
        )


def _unmasked(q, k, v, mask=lambda key: True):
    """Without the causal mask: all keys of the visited tiles, with and without the zeros past the end; and all keys"""
    T, wide = len(q), -(-len(q) // TILE) * TILE
    k, v = (np.pad(np.asarray(x, np.float64), ((0, wide - T), (0, 0))) for x in (k, v))
    key = np.arange(wide)
    visited, there = (np.arange(T)[:, None] // TILE >= key // TILE) & mask(key), key < T
    return [hidden_attention(q, k, v, SCALE, sees) for sees in (visited, visited & there, there)]


def _tops(q, k):
    s = np.asarray(q, np.float64) @ np.asarray(k, np.float64).T * SCALE
    return np.where(np.tri(len(s), dtype=bool), s, -np.inf).max(1)


def _unshrunk(q, k, v, acc):
    """The wrong result, one key at a time, if acc (or the sum) is never rescaled"""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    flags = {"shrink_acc": False} if acc else {"shrink_total": False}
    rows = [walk(q[t], k[: t + 1], v[: t + 1], float(SCALE), 1, **flags) for t in range(len(q))]
    return np.array([a / total for a, total, _ in rows])


@exercise(
    "13.3", "flash_dq_kernel",
    first_step="before the loop, compute delta, the sum of do_TD[t, d] * o_TD[t, d] over d. For each key: s = scale q . k, then p = exp(s - lse), dp, ds.",
    allow=("load_tile",), each=D, hints={**WALK, "OutOfBoundsError": "Threads past the end have no query: read q, do, o and lse, and write dq, only if t < T."},
)  # fmt: skip
def flash_dq_kernel(e):
    for T, size in e.cases(((5, 2), (35, 2), (3, 350)), lambda rng: (rng.integers(6, 20), 2)):
        q, k, v, do = e.normal(T, D, scale=size), *(e.normal(T, D) for _ in range(3))
        large = size > 2
        o, lse = flash_attention_ref(*heads(q, k, v), float(SCALE))
        given = heads(do, q, k, v) + [o]
        want = flash_attention_bwd_ref(*given, lse, float(SCALE))[0][0, :, 0]
        dq = e.blank(T, D)
        o_sim, lse_sim = e.normal(T, D), e.normal(T)
        o_sim[...], lse_sim[...] = o[0, :, 0], lse[0, 0]
        case = f"T = {T}" + ", scores of several hundred" * large
        trace = e.run(-(-T // TILE), TILE, dq, do, q, k, v, o_sim, lse_sim, SCALE, case=case, trace=True)  # fmt: skip
        s = np.asarray(q, np.float64) @ np.asarray(k, np.float64).T * SCALE
        lse_T1, causal = lse[0, 0][:, None], np.tri(T, dtype=bool)
        with np.errstate(all="ignore"):
            every = np.exp(s - lse_T1)
            raw, upside_down = (
                np.where(causal, np.exp(s), 0),
                np.where(causal, np.exp(s + lse_T1), 0),
            )
        p = np.where(causal, every, 0)
        dp = np.asarray(do, np.float64) @ np.asarray(v, np.float64).T
        delta = (p * dp).sum(1, keepdims=True)
        wide_k = np.asarray(k, np.float64) * SCALE
        do64, q64, k64, v64, o64 = (np.asarray(x, np.float64) for x in (do, q, k, v, o[0, :, 0]))
        ds = p * (dp - delta)
        at, t, place = np.arange(T) // TILE, np.arange(T), np.arange(T) % TILE
        other = lambda delta: p * (dp - delta[:, None]) @ wide_k
        e.same("dq", dq, want, {
            "With scores of several hundred, exp(s) and exp(lse) overflow: take one exp of the difference, p = exp(s - lse).":
                lambda got: large and not np.isfinite(got).all(),
            "The block's own tile is missing: the loop over tiles includes the one that begins at TILE * blockIdx.x.":
                lambda got: (got[:TILE] == 0).all(),
            "delta is missing: ds = p (dp - delta).": p * dp @ wide_k,
            "delta is outside the bracket: ds = p (dp - delta), not p dp - delta.": np.where(causal, p * dp - delta, 0) @ wide_k,
            "lse is missing: p = exp(s - lse).": lambda got: _close(got, raw * (dp - delta) @ wide_k),
            "The sign of lse is wrong: p = exp(s - lse).": lambda got: _close(got, upside_down * (dp - delta) @ wide_k),
            "The scale multiplies lse too: p = exp(scale q . k - lse).":
                lambda got: _close(got, np.where(causal, np.exp(np.minimum(s - SCALE * lse_T1, 700)), 0) * (dp - delta) @ wide_k),
            "dp is do . v: the keys were used instead of the values.": p * (do64 @ k64.T - delta) @ wide_k,
            "dp is do . v: the output was used instead of its gradient do.": p * (o64 @ v64.T - delta) @ wide_k,
            "dp is do . v: the query was used instead of do.": p * (q64 @ v64.T - delta) @ wide_k,
            "Add ds times the key, k[j, d], to dq, not ds times the query.": ds.sum(1, keepdims=True) * q64 * SCALE,
            "Only the last key is in dq: add up over the keys with +=.": np.diag(ds)[:, None] * wide_k,
            "A query also sees its own key: first + j <= t, not < t.": np.where(np.tri(T, k=-1, dtype=bool), ds, 0) @ wide_k,
            "Only the block's own tile was visited: a query also sees all earlier tiles.":
                np.where(at[:, None] == at, ds, 0) @ wide_k if T > TILE else np.empty(0),
            "The mask compares positions within the tile, j and threadIdx.x. Compare the key's position in the whole sequence: first + j <= t.":
                lambda got: T > TILE and _close(got, np.where((at[:, None] >= at) & (place[:, None] >= place), every, 0) * (dp - delta) @ wide_k),
            "The mask compares t with j, a position within the tile. Compare the key's position in the whole sequence: first + j <= t.":
                lambda got: T > TILE and _close(got, np.where((at[:, None] >= at) & (place <= t[:, None]), every, 0) * (dp - delta) @ wide_k),
            "delta was computed from do alone: it is the sum of do_TD[t, d] * o_TD[t, d] over d.": other(np.square(do64).sum(1)),
            "delta was computed from o alone: it is the sum of do_TD[t, d] * o_TD[t, d] over d.":
                lambda got: any(_close(got, other(x)) for x in (o64.sum(1), np.square(o64).sum(1))),
            "delta is the product of the last component only: add up over d with +=.": other(do64[:, -1] * o64[:, -1]),
            "The sign of delta is wrong: ds = p (dp - delta).": p * (dp + delta) @ wide_k,
            "p is missing: ds = p (dp - delta).": np.where(p > 0, dp - delta, 0) @ wide_k,
            "Add ds times the key, k[j, d], to dq, not ds times the value.":
                p * (dp - delta) @ np.asarray(v, np.float64) * SCALE,
            "The factor scale is missing at the end: s = scale q . k, so dq = scale ds k.": want / SCALE,
            "The factor scale is applied twice: apply it to the score before exp, and to dq once, at the end.": want * SCALE,
            "The scores are not multiplied by scale before exp.":
                lambda got: _close(got, np.where(p > 0, np.exp(s / SCALE - lse[0, 0][:, None]), 0) * (dp - delta) @ wide_k),
            "There is no mask: future keys were added. Query t sees the keys up to t: first + j <= t.":
                lambda got: _no_mask(got, every, dp, delta, wide_k),
            "delta was computed as do . v of one key, or as the sum of do. It is the sum of do_TD[t, d] * o_TD[t, d] over d.":
                p * (dp - np.asarray(do, np.float64).sum(1, keepdims=True)) @ wide_k,
        }, rtol=2e-2 if large else 1e-3, atol=2e-2 if large else 1e-4)  # fmt: skip
        tiles_read(e, trace, k, v, "p needs no second pass, because lse is given.")


def _close(got, value):
    """Equal up to the error from cancellation of large terms"""
    return np.abs(got - value).max() < 1e-3 * np.abs(value).max()


def _no_mask(got, every, dp, delta, wide_k):
    """The wrong result without a mask: all keys of the tiles that a block visits, or all keys"""
    T = len(got)
    visited = np.arange(T)[:, None] // TILE >= np.arange(T) // TILE
    ds = every * (dp - delta)
    return any(np.allclose(got, (ds * seen) @ wide_k, 1e-3, 1e-3) for seen in (visited, 1))
