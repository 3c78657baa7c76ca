"""Typical mistakes, planted in the solutions of lesson 16: (exercise, old, new, words of the answer)."""

MISTAKES = [
    ("16.1", "min(fits)", "fits[0]", "That is the first block that fits"),
    ("16.1", "min(fits)", "max(fits)", "That is the largest block"),
    ("16.1", "if s >= size]", "if s > size]", "A block of just that size"),
    ("16.1", "[(start + size, s - size)] if s > size else []", "[]", "What is left of the block is lost"),
    ("16.1", "[(start + size, s - size)] if s > size else []", "[(start + size, s - size)]", "A block of size 0"),
    ("16.1", "[(start + size, s - size)]", "[(start, s - size)]", "the rest begins at start + size"),
    ("16.1", "    if not fits:\n        return None, free\n", "", "ValueError"),
    ("16.1", "return start, [x", "return start, free or [x", "The block is still free"),
    ("16.1", "    s, start = min(fits)\n", "    s, start = min(fits)\n    free.remove((start, s))\n", "has changed"),
    ("16.2", "joined[-1][0] + joined[-1][1] == at", "False", "ends where this one begins"),
    ("16.2", "joined[-1][0] + joined[-1][1] == at", "at == start and joined[-1][0] + joined[-1][1] == at", "begins where this one ends"),
    ("16.2", "joined[-1][0] + joined[-1][1] == at", "at != start and joined[-1][0] + joined[-1][1] == at", "ends where this one begins"),
    ("16.2", "sorted([*free, (start, size)])", "[*free, (start, size)]", "order of start"),
    ("16.2", "sorted([*free, (start, size)])", "free", "The block is not in it"),
    ("16.3", "return sum(kept)", "return sum(kept) + sum(inputs)", "Inputs are only kept where"),
    ("16.3", "    if not again:\n        return sum(kept)\n", "", "nothing is forgotten"),
    ("16.3", "    if not again:\n", "    if True:\n", "only one layer at a time"),
    ("16.3", "inputs[: i + 1]", "inputs[:i]", "The layer's own input"),
    ("16.3", "inputs[: i + 1]", "inputs", "are gone when backward comes"),
    ("16.3", " + kept[i] for", " for", "The inputs alone"),
    ("16.3", "for i in range(len(kept))", "for i in [len(kept) - 1]", "the moment at the last layer"),
    ('16.1', 's, start = min(fits)', 'start, s = min(fits)', 'That is the size of a block'),
    ('16.2', 'joined[-1][0] + joined[-1][1] == at', 'joined[-1][0] + joined[-1][1] >= at - 1', 'memory that is in use'),
    ('16.2', 'joined.append((at, s))', 'joined.append([at, s])', 'Blocks are tuples'),
    ('16.3', 'sum(inputs[: i + 1]) + kept[i]', 'kept[i]', 'kept for backward are alive beside them'),
    ("16.2", "sorted([*free, (start, size)])", "[(start, size)]", "Memory is lost"),
    ("16.3", "        return sum(kept)\n", "        return None\n", "Nothing is returned"),
    ("16.2", "joined[-1][0] + joined[-1][1] == at", "joined[-1][0] + joined[-1][1] >= at - 3", "memory that is in use"),
]  # fmt: skip

UNTRUE = [  # what is not to be said of these
    ("16.1", "return start, [x", "return start + 100, [x", "is the front of the block"),
]  # fmt: skip
