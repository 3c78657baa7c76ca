"""Typical mistakes, planted in the solutions of lesson 23: (exercise, old, new, words of the answer)."""

MISTAKES = [
    ("23.1", "w1_FC[mine]", "w1_FC", "ValueError"),
    ("23.1", "silu(x_NC @ w1_FC[mine].T)", "(x_NC @ w1_FC[mine].T)", "silu is missing"),
    ("23.1", "mine = slice(r * part, (r + 1) * part)", "mine = slice(0, None)", "nothing is divided"),
    ("23.1", "@ w2_CF[:, mine].T", "@ w2_CF[:, ::-1][:, mine].T", "do not belong to the rows"),
    ("23.2", " + (1 + ahead) * layer_bytes", "", "its whole weights must be there"),
    ("23.2", "(1 + ahead)", "1", "they take memory, too"),
    ("23.2", "layers * layer_bytes // ranks", "layers * layer_bytes", "expected"),
    ("23.2", "    if ranks == 1:\n        return layers * layer_bytes\n", "", "nothing is gathered"),
    ("23.3", "done[i - stages] if i >= stages else 0", "0", "needs a free buffer"),
    ("23.3", "done[i - stages] if i >= stages else 0", "done[-1] if done else 0", "one after the other"),
    ("23.3", "    return done[-1]", "    return tiles * max(load, compute)", "cannot overlap anything"),
]  # fmt: skip
