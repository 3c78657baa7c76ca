"""Typical mistakes, planted in the solutions of lesson 20: (exercise, old, new, words of the answer)."""

MISTAKES = [
    ("20.1", "best = float32(-math.inf)", "best = float32(0.0)", "start with minus infinity"),
    ("20.1", "other_id < best_id", "other_id > best_id", "the LOWER id wins"),
    ("20.1", "    if lane == 0:\n", "    if True:\n", "Only one lane writes"),
    ("20.1", "range(first + lane, last, 32)", "range(first + lane, first + lane + 1)", "a lane has two"),
    ("20.1", "ids_S[cuda.blockIdx.x] = best_id", "ids_S[cuda.blockIdx.x] = best_id - first", "add the start of the segment"),
    ("20.2", "[:k] + first", "[:1] + first", "each segment must pass on k"),
    ("20.2", "[:k] + first", "[:k]", "add the start of the segment"),
    ("20.2", "np.argsort(-logits_V[kept], kind=\"stable\")", "np.argsort(logits_V[kept], kind=\"stable\")", "smallest of all candidates"),
    ("20.2", "return kept[order[:k]]", "return np.sort(kept[order[:k]])", "not sorted: return the best first"),
    ("20.3", "/ temperature", "* temperature", "DIVIDED"),
    ("20.3", "np.cumsum(w) - w < top_p * w.sum()", "np.cumsum(w) < top_p * w.sum()", "the token that crosses p belongs"),
    ("20.3", "u * w.sum()", "u", "EXCEEDS u"),
    ("20.4", "range(10)", "range(9)", "Philox has ten"),
    ("20.4", "k0, k1 = (k0 + W0) & 0xFFFFFFFF, (k1 + W1) & 0xFFFFFFFF", "k0, k1 = k0, k1", "The key stays the same"),
    ("20.4", "b & 0xFFFFFFFF", "b", "& 0xFFFFFFFF"),
    ('20.1', '(16, 8, 4, 2, 1)', '(8, 4, 2, 1)', 'Only half of the lanes'),
    ('20.1', 'best, best_id = other, other_id', 'best = other', 'The id does not move with its value'),
    ('20.2', '[:k] + first', '[: -(-k * segment // len(logits_V))] + first', 'each segment must pass on k'),
    ('20.2', 'return kept[order[:k]]', 'return order[:k]', 'indices into the list of candidates'),
    ('20.2', 'return kept[order[:k]]', 'return logits_V[kept[order[:k]]]', 'return their ids'),
    ('20.3', 'u * w.sum()', 'u * 1.0 * np.exp(logits_V - logits_V.max()).sum()', 'a share of the weights that are KEPT'),
    ('20.4', 'M0 * c0', 'M1 * c0', 'It returns'),
    ("20.1", "    for i in range(first + lane, last, 32):\n", "    for i in range(first, last):\n", "times over"),
    ("20.1", "    for i in range(first + lane, last, 32):\n        if ", "    for i in range(first, last):\n        if lane == 0 and ", "1 of 32 threads"),
    ("20.2", "    kept = []\n", "    return np.argsort(-logits_V, kind='stable')[:k]\n", "All 10 logits at once"),
    ("20.1", "x_V[i] > best", "x_V[i] >= best", "the LOWER id wins"),
    ("20.2", "    kept = []\n", "    return sorted(range(len(logits_V)), key=lambda i: -logits_V[i])[:k]\n", "one by one"),
    ("20.2", "    kept = []\n", "    return np.argsort([-x for x in logits_V], kind='stable')[:k]\n", "one by one"),
    ("20.1", "or (other == best and other_id < best_id)", "", "the LOWER id wins"),
    ("20.3", 'side="right"', 'side="left"', "does not EXCEED u"),
    ("20.3", "if k:", "if k > 1:", "only the best token stays"),
    ("20.4", "range(10)", "range(11)", "These are eleven rounds"),
    ("20.4", "c0, c1, c2, c3 = counter", "c0, c1, c2, c3 = np.array(counter, np.int64)", "A word is int64: compute with Python's integers"),
]  # fmt: skip

UNTRUE = [  # words that the answer must not contain
    ("20.1", "ids_S[cuda.blockIdx.x] = best_id", "ids_S[cuda.blockIdx.x] = int32(lane)", "The id does not move with its value"),
    ("20.2", "return kept[order[:k]]", "return kept[order[-k:]]", "each segment must pass on k"),
]  # fmt: skip

RIGHT = [  # unusual but correct
    ("20.2", "-logits_V[kept]", "[-logits_V[i] for i in kept]"),
    ("20.4", "return c0, c1, c2, c3", "return [c0, c1, c2, c3]"),
    ("20.1", "range(first + lane, last, 32)", "range(first + 4 * lane, min(first + 4 * lane + 4, last))"),
    ("20.4", "return c0, c1, c2, c3", "return tuple(np.array([c0, c1, c2, c3], np.uint64))"),
    ('20.4', 'return c0, c1, c2, c3', 'return tuple(np.uint32(c) for c in (c0, c1, c2, c3))'),
]  # fmt: skip
