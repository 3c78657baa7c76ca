"""Typical mistakes, planted in the solutions of lesson 18: (exercise, old, new, words of the answer)."""

MISTAKES = [
    ("18.1", "row, p = rows_N[n], positions_N[n]", "row, p = n, positions_N[n]", "A token without a place is left out"),
    ("18.1", "if row >= 0 and p >= 0 and p < cache_RGSD.shape[2]:", "if True:", "only if rows[n] >= 0"),
    ("18.1", "range(cuda.threadIdx.x, new_NGD.shape[2], 32)", "range(1)", "thread d begins at channel d"),
    ("18.1", "cache_RGSD[row, g, p, d]", "cache_RGSD[row, p, g, d]", "row, head, position, channel"),
    ("18.1", "g = cuda.blockIdx.y", "g = 0", "does head g = blockIdx.y"),
    ("18.2", "[:, :length]", "", "only the first `length` keys"),
    ("18.2", "h // (H // G)", "h % G", "neighbours share one"),
    ("18.2", "h // (H // G)", "0", "All query heads read key head 0"),
    ("18.2", " * scale", "", "not scaled"),
    ("18.2", "p / p.sum()", "p", "do not sum to 1"),
    ("18.3", "2 * L", "L", "Keys AND values"),
    ("18.3", "2 * L", "2", "Each layer has"),
    ("18.3", "* G *", "* H *", "not query heads"),
    ("18.3", "free // one", "free / one", "round down"),
    ("18.3", "* size", "", "more than one byte"),
    ('18.1', 'p < cache_RGSD.shape[2]', 'p <= cache_RGSD.shape[2]', '0 <= positions[n] < S'),
    ('18.1', 'row >= 0 and p >= 0', 'row > 0 and p > 0', 'Row 0 and position 0 are places, too'),
    ('18.1', 'range(cuda.threadIdx.x, new_NGD.shape[2], 32)', 'range(cuda.threadIdx.x, min(32, new_NGD.shape[2]), 32)', 'in steps of 32'),
    ('18.2', 'p = np.exp(s - s.max())', 'p = np.exp(s)', 'exp overflows'),
    ('18.3', 'free // one', '-(-free // one)', 'does not fit as a whole'),
]  # fmt: skip
