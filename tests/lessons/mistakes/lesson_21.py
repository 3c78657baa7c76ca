"""Typical mistakes, planted in the solutions of lesson 21: (exercise, old, new, words of the answer)."""

MISTAKES = [
    ("21.1", "free_at[slot] = start + n", "free_at[slot] = start + n - 1", "at the same time"),
    ("21.1", "free_at[slot] = start + n", "free_at[slot] = start + n + 1", "are idle for one step"),
    ("21.1", "slot = free_at.index(min(free_at))", "slot = len(plan) % slots", "(round robin)"),
    ("21.1", "free_at[slot] = start + n", "free_at = [start + n] * slots", "one request at a time"),
    (
        "21.1", "        slot = free_at.index(min(free_at))\n        start = free_at[slot]",
        "        slot = len(plan) % slots\n        if slot == 0:\n            free_at = [max(free_at)] * slots\n        start = free_at[slot]",
        "static batching",
    ),
    ("21.2", " and slots_B[b] >= 0", "", "Idle entries were advanced too"),
    ("21.2", " and slots_B[b] >= 0", " and slots_B[b] > 0", "Slot 0 is a valid slot"),
    ("21.2", "        step_B[b] += 1\n", "", "both lengths and step"),
    ("21.2", "b < slots_B.size and ", "", "threads past the last"),
    ("21.3", "min(n, len(prompt) - 1)", "n", "which must be computed"),
    ("21.3", "            break\n", "            continue\n", "stop at the first difference"),
    ("21.3", "return min(n, len(prompt) - 1)", "return len(cached)", "compare them with the prompt"),
    ("21.3", "min(n, len(prompt) - 1)", "max(n - 1, 0)", "One too few"),
    ("21.4", "return decoder.decode(data), decoder.getstate()[0]", 'return data.decode("utf-8", "replace"), b""', "hold those bytes back"),
    ("21.4", '("replace")', '("ignore")', "dropped silently"),
    ("21.4", "return decoder.decode(data), decoder.getstate()[0]", "return decoder.decode(data), b''", "are lost"),
    (
        "21.4", "    decoder = codecs", "    try:\n        return data.decode(), b''\n    except UnicodeDecodeError as error:\n"
        "        return data[: error.start].decode(), data[error.start :]\n    decoder = codecs", "forever",
    ),
    ('21.3', '    n = 0\n', '    if cached != prompt[: len(cached)]:\n        return 0\n    n = 0\n', 'A partial match'),
    ("21.2", "cuda.blockDim.x", "32", "expected"),
]  # fmt: skip

UNTRUE = [  # words that the answer must not contain
    ("21.1", "free_at[slot] = start + n", "free_at[slot] = start + n + 2", "Slots are idle for one step"),
]  # fmt: skip
