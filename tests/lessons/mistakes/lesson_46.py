"""Typical mistakes, planted in the solutions of lesson 46: (exercise, old, new, words of the answer)."""

SORT = 'np.argsort(-logits_NE, axis=1, kind="stable")[:, :K]'
ROUND = "-(-c // TILE) * TILE"
WANTED = "p < expert_P.size and expert_P[p] == e"
PADDING = "    for m in range(slot + lane, first_E[e + 1], 32):\n        pairs_M[m] = -1\n"
GRADIENT = "p * (q - pq.sum(1, keepdims=True))"

MISTAKES = [
    ("46.1", SORT, 'np.argsort(logits_NE, axis=1, kind="stable")[:, ::-1][:, :K]', "puts the higher one first"),
    ("46.1", ', kind="stable"', "", "only a stable sort"),
    ("46.1", "-logits_NE", "logits_NE", "K SMALLEST"),
    ("46.1", "[:, :K]", "[:, K - 1 :: -1]", "in rising order"),
    ("46.1", " - chosen_NK[:, :1]", "", "exp of a large logit"),
    ("46.1", "weights_NK.sum(1, keepdims=True)", "np.exp(logits_NE - chosen_NK[:, :1]).sum(1, keepdims=True)", "among ALL experts"),
    ("46.1", "- chosen_NK[:, :1]", "- chosen_NK.max()", "largest of ALL rows"),
    ("46.1", "weights_NK.sum(1, keepdims=True)", "weights_NK.sum(0)", "sum is that of a column"),
    ("46.1", "return experts_NK, weights_NK", "return weights_NK, experts_NK", "experts first"),
    ("46.1", "return experts_NK, weights_NK", "return experts_NK", "One thing is returned"),
    ("46.1", "weights_NK = np.exp(chosen_NK - chosen_NK[:, :1])", "weights_NK = chosen_NK", "logits over their sum"),
    ("46.2", ROUND, "c", "Nothing is padded"),
    ("46.2", ROUND, "(c // TILE + 1) * TILE", "a whole tile of padding too many"),
    ("46.2", ROUND, "-(-max(c, 1) // TILE) * TILE", "it has 0 slots"),
    ("46.2", ROUND, "c // TILE * TILE", "round"),
    ("46.2", ROUND, "-(-c / TILE) * TILE", "whole"),
    ("46.2", "[-1] * first[E]", "[0] * first[E]", "0 is a pair"),
    ("46.2", "list(first)", "first", "count up in a copy"),
    ("46.2", "pairs[free[e]] = p", "pairs[p] = free[e]", "Pair p, in order"),
    ("46.2", "pairs[free[e]] = p", "pairs[free[e]] = e", "These are the experts"),
    ("46.2", "pairs[free[e]] = p", "pairs[free[e]] = p // 2", "These are the tokens"),
    ("46.2", "return pairs, first", "return first, pairs", "pairs first, then first"),
    ("46.2", "return pairs, first", "return pairs, first[:-1]", "The end is missing"),
    ("46.3", PADDING, "", "Padding is missing"),
    ("46.3", PADDING, "    if slot + lane < first_E[e + 1]:\n        pairs_M[slot + lane] = -1\n", "more than 32 slots"),
    ("46.3", "range(0, expert_P.size, 32)", "range(0, expert_P.size // 32 * 32, 32)", "fewer than 32 are left"),
    ("46.3", "pairs_M[m] = -1", "pairs_M[m] = 0", "Padding is -1"),
    ("46.3", "(1 << lane) - 1", "(2 << lane) - 1", "LOWER lanes"),
    ("46.3", "] = p", "] = lane", "The lane was written"),
    ("46.3", "] = p", "] = e", "The expert was written"),
    ("46.3", WANTED, "expert_P[p] == e", "A lane past the end has no pair"),
    ("46.3", "        slot += cuda.popc(mine)\n", "", "number of ALL lanes"),
    ("46.3", "range(0, expert_P.size, 32)", "range(0, min(32, expert_P.size), 32)", "Only the first 32"),
    ("46.3", "lane, first_E[e + 1], 32", "lane, first_E[e + 1] + 1, 32", "block"),
    ("46.4", GRADIENT, "np.broadcast_to(q, p.shape)", "with respect to the probabilities"),
    ("46.4", GRADIENT, "p * q", "The sum over j is missing"),
    ("46.4", GRADIENT, "q - pq.sum(1, keepdims=True)", "The factor p is missing"),
    ("46.4", "E * counts_E", "counts_E", "The factor E"),
    ("46.4", "N**2", "N / counts_E.sum()", "not by their sum"),
    ("46.4", "N**2", "N", "1 / N is missing once"),
    ("46.4", " - logits_NE.max(1, keepdims=True)", "", "exp of a large logit"),
    ("46.4", "logits_NE.max(1, keepdims=True)", "logits_NE.max()", "largest of ALL rows"),
    ("46.4", "E * counts_E", "E * np.bincount(logits_NE.argmax(1), minlength=E)", "by their largest logit"),
    ("46.4", "pq.sum(1, keepdims=True)", "pq.sum()", "All of B is subtracted"),
    ("46.4", "pq.sum(1, keepdims=True)", "pq.sum(0)", "along axis 0"),
    ("46.4", GRADIENT, "-" + GRADIENT, "opposite sign"),
    ("46.4", "return pq.sum(), ", "return ", "One thing is returned"),
    ("46.4", "return pq.sum(), ", "return pq.sum(1), ", "B must be one number"),
]  # fmt: skip

RIGHT = [
    ("46.1", SORT, "np.array([sorted(range(len(row)), key=lambda e: -row[e])[:K] for row in logits_NE])"),
    ("46.2", ROUND, "(c + TILE - 1) // TILE * TILE"),
    ("46.3", "slot += cuda.popc(mine)", "slot = cuda.popc(mine) + slot"),
    ("46.4", GRADIENT, "pq - p * pq.sum(1)[:, None]"),
]  # fmt: skip
