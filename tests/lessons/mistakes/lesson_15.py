"""Typical mistakes, planted in the solutions of lesson 15: (exercise, old, new, words of the answer)."""

MISTAKES = [
    ("15.1", "total(valid.sum())", "valid.sum()", "Without it, a rank does not know"),
    ("15.1", "total(valid.sum())", "total(valid.size)", "that are not NaN"),
    ("15.1", "x_NI[valid] / count", "x_NI[valid] / valid.sum()", "The share is of the WHOLE batch"),
    ("15.1", "x_NI[valid] / count", "x_NI[valid]", "not divided by the number of targets"),
    ("15.1", "2 * error", "error", "The factor 2"),
    ("15.1", "error = x_NI[valid] @ w_I - t_N[valid]", "error = x_NI @ w_I - t_N\n    return 2 * error @ x_NI / count", "The share is NaN"),
    ("15.2", "    yield\n", "    if False:\n        yield\n", "were copied before they were summed"),
    ("15.2", "    yield\n", "", "The function has no `yield`"),
    ("15.2", "    yield\n", "    yield\n    return\n", "Only this rank's own part is a sum"),
    ("15.2", "    yield\n", "    if me:\n        yield\n", "never reaches"),
    ("15.2", "own_n[mine] += read(rank, mine.start, mine.stop)", "own_n[mine] += read(rank, mine.start, mine.stop) / world", "expected"),
    (
        "15.2", "        own_n[mine] += read(rank, mine.start, mine.stop)\n    yield\n",
        "        total = own_n.copy() if rank == others[0] else total\n        total += read(rank, 0, own_n.size)\n    yield\n"
        "    own_n[...] = total\n    return\n", "does not have the same bits",
    ),
    (
        "15.2", "        own_n[mine] += read(rank, mine.start, mine.stop)\n    yield\n",
        "        pass\n    total = np.zeros_like(own_n)\n    for rank in range(world):\n        total += read(rank, 0, own_n.size)\n    yield\n"
        "    own_n[...] = total\n    return\n", "one part",
    ),
    ("15.3", "left[name] -= 1", "left[name] = 0", "it is final after the second"),
    ("15.3", "all(left[n] == 0 for n in inside)", "any(left[n] == 0 for n in inside)", "all of them must be final"),
    ("15.3", "if p < b and a < q", "if a <= p and q <= b", "lies only partly in a bucket"),
    ("15.3", "if p < b and a < q", "if a <= p < b", "not only to the one where it begins"),
    ("15.3", "        gone.update(ready)\n", "", "Report each bucket once"),
    ('15.1', 'x_NI[valid] @ w_I - t_N[valid]', 'x_NI @ w_I - np.nan_to_num(t_N)\n    return 2 * error @ x_NI / count', 'is treated as if its target were 0'),
    ('15.1', '2 * error', '-2 * error', 'The sign is wrong'),
    ('15.3', 'if p < b and a < q', 'if p <= b and a <= q', 'only touches'),
    ('15.3', 'ready.append(i)', 'ready.append((a, b))', 'identify a bucket by its number'),
    ('15.2', '    for rank in others:\n        own_n[mine]', '    for rank in range(world):\n        own_n[mine]', 'in the sum twice'),
    ("15.2", "own_n[theirs] = read", "own_n[theirs] += read", "do not add them to this rank's own"),
    ("15.3", "p < b and a < q", "a <= p < b or a < q <= b", "expected [[], [0, 1, 2]]"),
]  # fmt: skip

UNTRUE = [  # words that must not appear in these answers
    ("15.1", "2 * error", "4 * error", "The share is of the WHOLE batch"),
    ("15.2", "    yield\n    for rank in others:\n        theirs = part(own_n.size, world, rank)\n        own_n[theirs] = read(rank, theirs.start, theirs.stop)\n", "    own_n[mine] *= 0.5\n    yield\n", "in that rank's part"),
]  # fmt: skip

RIGHT = [  # unusual, but correct
    ("15.1", "count = total(valid.sum())", "count = total(np.array([valid.sum()]))"),
]  # fmt: skip
