"""Typical mistakes, planted in the solutions of lesson 20: (exercise, old, new, words of the answer)."""

MISTAKES = [
    ("20.1", "best = float32(-math.inf)", "best = float32(0.0)", "begin with minus infinity"),
    ("20.1", "other_id < best_id", "other_id > best_id", "the LOWER id wins"),
    ("20.1", "    if lane == 0:\n", "    if True:\n", "One lane writes"),
    ("20.1", "range(first + lane, last, 32)", "range(first + lane, first + lane + 1)", "uses x_V["),
    ("20.1", "ids_S[cuda.blockIdx.x] = best_id", "ids_S[cuda.blockIdx.x] = best_id - first", "add where the segment begins"),
    ("20.2", "[:k] + first", "[:1] + first", "each must hand on k"),
    ("20.2", "[:k] + first", "[:k]", "add where it begins"),
    ("20.2", "np.argsort(-logits_V[kept], kind=\"stable\")", "np.argsort(logits_V[kept], kind=\"stable\")", "One of the best k is missing"),
    ("20.2", "return kept[order[:k]]", "return np.sort(kept[order[:k]])", "not the best first"),
    ("20.3", "/ temperature", "* temperature", "DIVIDED"),
    ("20.3", "np.cumsum(w) - w < top_p * w.sum()", "np.cumsum(w) < top_p * w.sum()", "the token that crosses p belongs"),
    ("20.3", "u * w.sum()", "u", "EXCEEDS u"),
    ("20.4", "range(10)", "range(9)", "there are ten"),
    ("20.4", "k0, k1 = (k0 + W0) & 0xFFFFFFFF, (k1 + W1) & 0xFFFFFFFF", "k0, k1 = k0, k1", "The key stays the same"),
    ("20.4", "b & 0xFFFFFFFF", "b", "& 0xFFFFFFFF"),
]  # fmt: skip
