"""Typical mistakes, planted in the solutions of lesson 22: (exercise, old, new, words of the answer)."""

MISTAKES = [
    ("22.1", "first = 8 + n", "first = n", "from byte 8 + n"),
    ("22.1", '        if name == "__metadata__":\n            continue\n', "", "is not a tensor"),
    ("22.1", ".reshape(about[\"shape\"])", "", "the header says"),
    ("22.1", "KINDS[about[\"dtype\"]]", "np.float32", "the type of a tensor is KINDS"),
    ("22.2", "(0, 2, 1, 3)", "(0, 1, 2, 3)", "This is w itself"),
    ("22.2", "reshape(H, -1, 2, C)", "reshape(H, 2, -1, C)", "the opposite direction"),
    ("22.2", "w_OC.reshape(H, -1, 2, C)", "w_OC.reshape(1, -1, 2, C)", "The heads were mixed"),
    ("22.3", " / np.abs(theirs[name]).max()", "", "relative to the largest value"),
    ("22.3", "if not difference <= tolerance:", "if difference > tolerance:", "A NaN counts as a difference"),
    ("22.3", "            return name\n", "            found = name\n    return locals().get('found')\n", "the FIRST stage"),
    ('22.2', 'w_OC.reshape(H, -1, 2, C)', 'w_OC.reshape(-1, 2, H, C).transpose(2, 0, 1, 3)', 'expected'),
    ('22.3', 'np.abs(theirs[name]).max()', 'theirs[name].max()', 'the largest magnitude'),
    ('22.3', 'np.abs(theirs[name]).max()', 'np.abs(theirs[name])[1, 2]', 'not to each value'),
    ("22.1", "    tensors = {}\n    for name, about in json.loads(data[8 : 8 + n]).items():\n        if name == \"__metadata__\":\n            continue\n        begin, end = about[\"data_offsets\"]\n        raw = data[first + begin : first + end]\n", "    tensors, here = {}, first\n    for name, about in json.loads(data[8 : 8 + n]).items():\n        if name == \"__metadata__\":\n            continue\n        begin, end = about[\"data_offsets\"]\n        raw = data[here : here + end - begin]\n        here += end - begin\n", "data_offsets count"),
    ("22.3", "in theirs:", "in sorted(theirs):", "later stages inherit its difference"),
    ("22.3", "np.abs(ours[name] - theirs[name]).max()", "np.abs(ours[name] - theirs[name]).mean()", "The LARGEST difference"),
]  # fmt: skip
