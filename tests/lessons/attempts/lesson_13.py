"""Attempts at the exercises of lesson 13: see test_attempts.py."""


# %% 13.1 WRONG: later tiles have larger scores than the first
def attention_row(q_D, k_SD, v_SD, scale, tile):
    top, total, acc = None, 0.0, 0.0
    for i in range(0, len(k_SD), tile):
        s = scale * (k_SD[i : i + tile] @ q_D)
        if top is None:  # the maximum of the first tile only
            top = s.max()
        w = np.exp(s - top)
        total += w.sum()
        acc = acc + w @ v_SD[i : i + tile]
    return acc / total, top + np.log(total)


# %% 13.1 WRONG: all 100,000 scores take 800 kB
# one softmax over the scores of all slices
def attention_row(q_D, k_SD, v_SD, scale, tile):
    firsts = range(0, len(k_SD), tile)
    s = np.concatenate([scale * (k_SD[i : i + tile] @ q_D) for i in firsts])
    top = s.max()
    w = np.exp(s - top)
    o = sum(w[i : i + tile] @ v_SD[i : i + tile] for i in firsts)
    return o / w.sum(), top + np.log(w.sum())


# %% 13.1 WRONG: computed with the old maximum: they are exp(s - new maximum)
def attention_row(q_D, k_SD, v_SD, scale, tile):
    top, total, acc = -np.inf, 0.0, np.zeros(v_SD.shape[1])
    for i in range(0, k_SD.shape[0], tile):
        s = scale * (k_SD[i : i + tile] @ q_D)
        new = max(top, s.max())
        shrink, w = np.exp(top - new), np.exp(s - top)
        total = total * shrink + w.sum()
        acc = acc * shrink + w @ v_SD[i : i + tile]
        top = new
    return acc / total, top + np.log(total)


# %% 13.1 WRONG: computed with the old maximum: they are exp(s - new maximum)
# the same with a first tile that is treated apart
def attention_row(q_D, k_SD, v_SD, scale, tile):
    s = scale * (k_SD[:tile] @ q_D)
    top = s.max()
    total, acc = np.exp(s - top).sum(), np.exp(s - top) @ v_SD[:tile]
    for i in range(tile, k_SD.shape[0], tile):
        s = scale * (k_SD[i : i + tile] @ q_D)
        w = np.exp(s - top)
        new = max(top, s.max())
        total = total * np.exp(top - new) + w.sum()
        acc = acc * np.exp(top - new) + w @ v_SD[i : i + tile]
        top = new
    return acc / total, top + np.log(total)


# %% 13.1 WRONG: The factor is inverted
def attention_row(q_D, k_SD, v_SD, scale, tile):
    top, total, acc = -np.inf, 0.0, np.zeros(v_SD.shape[1])
    for i in range(0, k_SD.shape[0], tile):
        s = scale * (k_SD[i : i + tile] @ q_D)
        new = np.maximum(top, s.max())
        w = np.exp(s - new)
        total = total / np.exp(top - new) + w.sum()
        acc = acc / np.exp(top - new) + w @ v_SD[i : i + tile]
        top = new
    return acc / total, top + np.log(total)


# %% 13.1 RIGHT: every tile by itself, and the tiles are merged at the end
def attention_row(q_D, k_SD, v_SD, scale, tile):
    tops, totals, accs = [], [], []
    for i in range(0, len(k_SD), tile):
        s = scale * (k_SD[i : i + tile] @ q_D)
        w = np.exp(s - s.max())
        tops.append(s.max())
        totals.append(w.sum())
        accs.append(w @ v_SD[i : i + tile])
    share = np.exp(np.array(tops) - max(tops))
    total = share @ totals
    return share @ np.array(accs) / total, max(tops) + np.log(total)


# %% 13.1 RIGHT: the output is kept divided, and lse is carried instead of maximum and sum
def attention_row(q_D, k_SD, v_SD, scale, tile):
    o, lse = np.zeros(v_SD.shape[1]), -np.inf
    for i in range(0, len(k_SD), tile):
        s = scale * (k_SD[i : i + tile] @ q_D)
        mine = s.max() + np.log(np.exp(s - s.max()).sum())
        new = np.logaddexp(lse, mine)
        o = o * np.exp(lse - new) + np.exp(s - new) @ v_SD[i : i + tile]
        lse = new
    return o, lse


# %% 13.1 RIGHT: two passes, first for the maximum
def attention_row(q_D, k_SD, v_SD, scale, tile):
    top = -np.inf
    for i in range(0, len(k_SD), tile):
        top = max(top, (scale * (k_SD[i : i + tile] @ q_D)).max())
    total, acc = 0.0, 0.0
    for i in range(0, len(k_SD), tile):
        w = np.exp(scale * (k_SD[i : i + tile] @ q_D) - top)
        total += w.sum()
        acc = acc + w @ v_SD[i : i + tile]
    return acc / total, top + np.log(total)


# %% 13.2 WRONG: Subtract the running maximum before exp
# as the solution, but:
# -     top, total = LOWEST, float32(0.0)
# +     total = float32(0.0)
# -                 new = s if s > top else top
# -                 shrink, weight = math.exp(top - new), math.exp(s - new)
# -                 total = total * shrink + weight
# +                 w = math.exp(s)
# +                 total += w
# -                     acc[d] = acc[d] * shrink + weight * v[j, d]
# -                 top = new
# +                     acc[d] += w * v[j, d]
# -         lse_T[t] = top + math.log(total)
# +         lse_T[t] = math.log(total)


# %% 13.2 WRONG: Subtract the running maximum before exp
# as the solution, but:
# -     top, total = LOWEST, float32(0.0)
# +     top, total = float32(0.0), float32(0.0)
# -                 new = s if s > top else top
# +                 new = top


# %% 13.2 REMARK: tiles of keys that all lie in the future
# as the solution, but:
# -     for first in range(0, cuda.blockIdx.x * TILE + TILE, TILE):
# +     for first in range(0, T, TILE):


# %% 13.2 WRONG: several threads of a block read the same element of k_TD
# as the solution, but:
# -             if first + j <= t:
# +             if first + j <= t and t < T:
# -                     s += q[d] * k[j, d]
# +                     s += q[d] * k_TD[first + j, d]


# %% 13.2 WRONG: several threads of a block read the same element of v_TD
# as the solution, but:
# -             if first + j <= t:
# +             if first + j <= t and t < T:
# -                     acc[d] = acc[d] * shrink + weight * v[j, d]
# +                     acc[d] = acc[d] * shrink + weight * v_TD[first + j, d]


# %% 13.2 WRONG: loads the same tile of k_TD more than once
# as the solution, but:
# -         load_tile(k, k_TD, first)
# +         load_tile(k, k_TD, first)
# +         cuda.syncthreads()
# +         for j in range(TILE):
# +             if first + j <= t:
# +                 s = float32(0.0)
# +                 for d in range(D):
# +                     s += q[d] * k[j, d]
# +                 top = max(top, s * scale)
# +     for first in range(0, cuda.blockIdx.x * TILE + TILE, TILE):
# +         cuda.syncthreads()
# +         load_tile(k, k_TD, first)
# -                 new = s if s > top else top
# -                 shrink, weight = math.exp(top - new), math.exp(s - new)
# -                 total = total * shrink + weight
# +                 w = math.exp(s - top)
# +                 total += w
# -                     acc[d] = acc[d] * shrink + weight * v[j, d]
# -                 top = new
# +                     acc[d] += w * v[j, d]


# %% 13.2 RIGHT: rescales only when a larger score appears
# as the solution, but:
# -                 new = s if s > top else top
# -                 shrink, weight = math.exp(top - new), math.exp(s - new)
# -                 total = total * shrink + weight
# -                 for d in range(D):
# -                     acc[d] = acc[d] * shrink + weight * v[j, d]
# -                 top = new
# +                 if s > top:
# +                     shrink = math.exp(top - s)
# +                     total = total * shrink + float32(1.0)
# +                     for d in range(D):
# +                         acc[d] = acc[d] * shrink + v[j, d]
# +                     top = s
# +                 else:
# +                     w = math.exp(s - top)
# +                     total += w
# +                     for d in range(D):
# +                         acc[d] += w * v[j, d]


# %% 13.2 RIGHT: from the last tile back to the first
# as the solution, but:
# -     for first in range(0, cuda.blockIdx.x * TILE + TILE, TILE):
# +     for first in range(cuda.blockIdx.x * TILE, -1, -TILE):


# %% 13.3 WRONG: lse is missing: p = exp(s - lse)
# as the solution, but:
# -                 ds = math.exp(scale * s - lse) * (dp - delta)
# +                 ds = math.exp(scale * s) * (dp - delta)


# %% 13.3 WRONG: The sign of lse is wrong
# as the solution, but:
# -                 ds = math.exp(scale * s - lse) * (dp - delta)
# +                 ds = math.exp(scale * s + lse) * (dp - delta)


# %% 13.3 WRONG: The scale multiplies lse too
# as the solution, but:
# -                 ds = math.exp(scale * s - lse) * (dp - delta)
# +                 ds = math.exp(scale * (s - lse)) * (dp - delta)


# %% 13.3 WRONG: delta is outside the bracket
# as the solution, but:
# -                 ds = math.exp(scale * s - lse) * (dp - delta)
# +                 ds = math.exp(scale * s - lse) * dp - delta


# %% 13.3 WRONG: the keys were used instead of the values
# as the solution, but:
# -                     dp += do[d] * v[j, d]
# +                     dp += do[d] * k[j, d]


# %% 13.3 WRONG: the output was used instead of its gradient
# as the solution, but:
# -                     dp += do[d] * v[j, d]
# +                     dp += o_TD[t, d] * v[j, d]


# %% 13.3 WRONG: the query was used instead of do
# as the solution, but:
# -                     dp += do[d] * v[j, d]
# +                     dp += q[d] * v[j, d]


# %% 13.3 WRONG: not ds times the query
# as the solution, but:
# -                     acc[d] += ds * k[j, d]
# +                     acc[d] += ds * q[d]


# %% 13.3 WRONG: Only the last key is in dq
# as the solution, but:
# -                     acc[d] += ds * k[j, d]
# +                     acc[d] = ds * k[j, d]


# %% 13.3 WRONG: A query also sees its own key
# as the solution, but:
# -             if first + j <= t and t < T:
# +             if first + j < t and t < T:


# %% 13.3 WRONG: Only the block's own tile was visited
# as the solution, but:
# -     for first in range(0, cuda.blockIdx.x * TILE + TILE, TILE):
# +     for first in range(cuda.blockIdx.x * TILE, cuda.blockIdx.x * TILE + TILE, TILE):


# %% 13.3 WRONG: The block's own tile is missing
# as the solution, but:
# -     for first in range(0, cuda.blockIdx.x * TILE + TILE, TILE):
# +     for first in range(0, cuda.blockIdx.x * TILE, TILE):


# %% 13.3 WRONG: The mask compares positions within the tile
# as the solution, but:
# -             if first + j <= t and t < T:
# +             if j <= cuda.threadIdx.x and t < T:


# %% 13.3 WRONG: The mask compares t with j
# as the solution, but:
# -             if first + j <= t and t < T:
# +             if j <= t and t < T:


# %% 13.3 WRONG: delta was computed from do alone
# as the solution, but:
# -             delta += do[d] * o_TD[t, d]
# +             delta += do[d] * do[d]


# %% 13.3 WRONG: delta was computed from o alone
# as the solution, but:
# -             delta += do[d] * o_TD[t, d]
# +             delta += o_TD[t, d]


# %% 13.3 WRONG: delta is the product of the last component only
# as the solution, but:
# -             delta += do[d] * o_TD[t, d]
# +             delta = do[d] * o_TD[t, d]


# %% 13.3 WRONG: exp(s) and exp(lse) overflow
# as the solution, but:
# -                 ds = math.exp(scale * s - lse) * (dp - delta)
# +                 ds = math.exp(scale * s) / math.exp(lse) * (dp - delta)


# %% 13.3 WRONG: several threads of a block read the same element of k_TD
# as the solution, but:
# -                     s += q[d] * k[j, d]
# +                     s += q[d] * k_TD[first + j, d]


# %% 13.3 WRONG: several threads of a block read the same element of v_TD
# as the solution, but:
# -                     dp += do[d] * v[j, d]
# +                     dp += do[d] * v_TD[first + j, d]


# %% 13.3 REMARK: tiles of keys that all lie in the future
# as the solution, but:
# -     for first in range(0, cuda.blockIdx.x * TILE + TILE, TILE):
# +     for first in range(0, T, TILE):


# %% 13.3 WRONG: loads the same tile of k_TD more than once
# as the solution, but:
# -             delta += do[d] * o_TD[t, d]
# +             pass
# +     for first in range(0, cuda.blockIdx.x * TILE + TILE, TILE):
# +         cuda.syncthreads()
# +         load_tile(k, k_TD, first)
# +         load_tile(v, v_TD, first)
# +         cuda.syncthreads()
# +         for j in range(TILE):
# +             if first + j <= t and t < T:  # delta as the sum of p dp over the keys
# +                 s, dp = float32(0.0), float32(0.0)
# +                 for d in range(D):
# +                     s += q[d] * k[j, d]
# +                     dp += do[d] * v[j, d]
# +                 delta += math.exp(scale * s - lse) * dp


# %% 13.3 RIGHT: the scale goes into q, two sums are kept apart, and delta is subtracted at the end
@cuda.jit
def flash_dq_kernel(dq_TD, do_TD, q_TD, k_TD, v_TD, o_TD, lse_T, scale):
    k, v = cuda.shared.array((TILE, D), float32), cuda.shared.array((TILE, D), float32)
    with_dp, with_1 = cuda.local.array(D, float32), cuda.local.array(D, float32)
    T = q_TD.shape[0]
    t = cuda.blockIdx.x * TILE + cuda.threadIdx.x
    for d in range(D):
        with_dp[d] = float32(0.0)
        with_1[d] = float32(0.0)
    for first in range(0, (cuda.blockIdx.x + 1) * TILE, TILE):
        load_tile(k, k_TD, first)
        load_tile(v, v_TD, first)
        cuda.syncthreads()
        for j in range(TILE):
            if first + j <= t and t < T:
                s, dp = float32(0.0), float32(0.0)
                for d in range(D):
                    s += scale * q_TD[t, d] * k[j, d]
                    dp += do_TD[t, d] * v[j, d]
                p = math.exp(s - lse_T[t])
                for d in range(D):
                    with_dp[d] += p * dp * k[j, d]
                    with_1[d] += p * k[j, d]
        cuda.syncthreads()
    if t < T:
        delta = float32(0.0)
        for d in range(D):
            delta += do_TD[t, d] * o_TD[t, d]
        for d in range(D):
            dq_TD[t, d] = scale * (with_dp[d] - delta * with_1[d])
