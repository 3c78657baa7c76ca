"""Typical mistakes, planted in the solutions of lesson 16: (exercise, old, new, words of the answer)."""

MISTAKES = [
    ("16.1", "min(fits)", "fits[0]", "That is the first block that fits"),
    ("16.1", "min(fits)", "max(fits)", "That is the largest block"),
    ("16.1", "if s >= size]", "if s > size]", "A block of exactly that size"),
    ("16.1", "[(start + size, s - size)] if s > size else []", "[]", "The remainder of the block is lost"),
    ("16.1", "[(start + size, s - size)] if s > size else []", "[(start + size, s - size)]", "Leave out a block of size 0"),
    ("16.1", "[(start + size, s - size)]", "[(start, s - size)]", "the remainder begins at start + size"),
    ("16.1", "    if not fits:\n        return None, free\n", "", "ValueError"),
    ("16.1", "return start, [x", "return start, free or [x", "The block is still free"),
    ("16.1", "    s, start = min(fits)\n", "    s, start = min(fits)\n    free.remove((start, s))\n", "has changed"),
    ("16.2", "joined[-1][0] + joined[-1][1] == at", "False", "ends where this one begins"),
    ("16.2", "joined[-1][0] + joined[-1][1] == at", "at == start and joined[-1][0] + joined[-1][1] == at", "begins where this one ends"),
    ("16.2", "joined[-1][0] + joined[-1][1] == at", "at != start and joined[-1][0] + joined[-1][1] == at", "ends where this one begins"),
    ("16.2", "sorted([*free, (start, size)])", "[*free, (start, size)]", "sorted by start"),
    ("16.2", "sorted([*free, (start, size)])", "free", "The returned block is missing"),
    ("16.3", "return sum(kept)", "return sum(kept) + sum(inputs)", "Inputs are saved only where"),
    ("16.3", "    if not recompute:\n        return sum(kept)\n", "", "nothing is discarded"),
    ("16.3", "    if not recompute:\n", "    if True:\n", "only one layer at a time"),
    ("16.3", "inputs[: i + 1]", "inputs[:i]", "The layer's own input"),
    ("16.3", "inputs[: i + 1]", "inputs", "are already freed when backward reaches"),
    ("16.3", " + kept[i] for", " for", "the inputs alone"),
    ("16.3", "for i in range(len(kept))", "for i in [len(kept) - 1]", "the number at the last layer"),
    ('16.1', 's, start = min(fits)', 'start, s = min(fits)', 'That is the size of a block'),
    ('16.2', 'joined[-1][0] + joined[-1][1] == at', 'joined[-1][0] + joined[-1][1] >= at - 1', 'memory that is in use'),
    ('16.2', 'joined.append((at, s))', 'joined.append([at, s])', 'Blocks are tuples'),
    ('16.3', 'sum(inputs[: i + 1]) + kept[i]', 'kept[i]', 'saved for backward are alive as well'),
    ("16.2", "sorted([*free, (start, size)])", "[(start, size)]", "Memory is lost"),
    ("16.3", "        return sum(kept)\n", "        return None\n", "The function returns nothing"),
    ("16.2", "joined[-1][0] + joined[-1][1] == at", "joined[-1][0] + joined[-1][1] >= at - 3", "memory that is in use"),
]  # fmt: skip

UNTRUE = [  # words that must not appear in these answers
    ("16.1", "return start, [x", "return start + 100, [x", "Take the front of the block"),
]  # fmt: skip
