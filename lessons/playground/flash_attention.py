"""FlashAttention in miniature: a thread per query, one pass over the keys, no row of scores."""

import math

import numpy as np

from xtrain.simulator import cuda, types

D = 4


@cuda.jit
def attention(out, q, k, v):
    t = cuda.threadIdx.x
    best = types.float32(-math.inf)  # the largest score so far
    total = types.float32(0)  # the sum of exp(score - best)
    mean = cuda.local.array(D, types.float32)
    for d in range(D):
        mean[d] = 0
    for s in range(t + 1):  # causal: no later keys
        score = types.float32(0)
        for d in range(D):
            score += q[t, d] * k[s, d] / math.sqrt(types.float32(D))
        larger = max(best, score)
        old = math.exp(best - larger)  # rescales what was summed before
        new = math.exp(score - larger)
        total = total * old + new
        for d in range(D):
            mean[d] = mean[d] * old + new * v[s, d]
        best = larger
    for d in range(D):
        out[t, d] = mean[d] / total


q, k, v = np.random.default_rng(0).standard_normal((3, 32, D)).astype(np.float32)
out = np.zeros_like(q)
attention[1, 32](out, q, k, v)
weights = np.exp(q @ k.T / math.sqrt(D)) * np.tri(32)
np.testing.assert_allclose(out, weights / weights.sum(1, keepdims=True) @ v, rtol=1e-4, atol=1e-6)
print("32 queries, causal: correct")
