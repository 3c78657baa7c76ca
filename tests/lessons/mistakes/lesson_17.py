"""Typical mistakes, planted in the solutions of lesson 17: (exercise, old, new, words of the answer)."""

MISTAKES = [
    ("17.1", "        if a >= step:\n            v = int32(v + before)", "        v = int32(v + before)", "must not be added"),
    ("17.1", "    if a == 0:\n        edges_E[0] = 0\n", "", "edges[0] was never written"),
    ("17.1", "edges_E[a + 1] = v", "edges_E[a] = v", "Shifted by one"),
    ("17.1", "    for step in (1, 2, 4, 8, 16):\n        before", "    for step in ():\n        before", "holds length a alone"),
    ("17.1", "lengths_A[a] if a < lengths_A.size else int32(0)", "lengths_A[a]", "lanes past the end contribute 0"),
    ("17.2", "edges_E[a + 1] <= n", "edges_E[a + 1] < n", "a begins AT edges[a]"),
    ("17.2", "x_ATC[a, t, c]", "x_ATC[n // x_ATC.shape[1], n % x_ATC.shape[1], c]", "including the padding"),
    ("17.2", "t = n - edges_E[a]", "t = n", "t is the position within sequence a"),
    ("17.3", "h // (H // G)", "h % G", "share key/value head 0"),
    ("17.3", "past + i + 1", "S", "keys that have not been written"),
    ("17.3", "past + i + 1", "i + 1", "The history is ignored"),
    ("17.3", "row = rows_A[a]", "row = a", "not row a"),
    ("17.3", "* scale", "", "not scaled"),
    ('17.1', '(1, 2, 4, 8, 16)', '(1, 2, 4, 8)', 'A step is missing'),
    ('17.1', '(1, 2, 4, 8, 16)', '(1, 2, 3, 4, 5)', 'each is twice the previous one'),
    ('17.1', 'if a >= step', 'if a > step', 'So the condition is a >= step'),
    ('17.3', 'past + i + 1', 'past + i', 'An empty array has no maximum'),
    ('17.3', 'past + i + 1', 'past + edges_E[a + 1] - edges_E[a]', 'including later ones'),
    ("17.1", "    v = lengths_A[a] if a < lengths_A.size else int32(0)\n    for step in (1, 2, 4, 8, 16):\n        before = cuda.shfl_up_sync(FULL, v, step)\n        if a >= step:\n            v = int32(v + before)\n", "    v = int32(0)\n    if a < lengths_A.size:\n        for i in range(a + 1):\n            v = int32(v + lengths_A[i])\n", "the warp reads lengths 3 times"),
]  # fmt: skip

UNTRUE = [  # words that the answer must not contain
    ("17.3", "p = np.exp(s - s.max())", "p = np.exp(s - s.max()) / (past != 2)", "have not been written yet"),
]  # fmt: skip
