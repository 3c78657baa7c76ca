"""Typical mistakes, planted in the solutions of lesson 27: (exercise, old, new, words of the answer)."""

FOUND = "found = [text.find(s) for s in stops if s in text]"
FIRST = 'return text[: min(found)], "", True'
LOOP = "for n in range(len(text), 0, -1):"
SOME = "any(s.startswith(text[-n:]) for s in stops)"
HOLD = "return text[:-n], text[-n:], False"
PARTS = '*events, rest = data.split(b"\\n\\n")'
LINES = 'lines = [line for event in events for line in event.split(b"\\n")]'
PAYLOADS = 'return [line[6:].decode() for line in lines if line.startswith(b"data: ")], rest'

MISTAKES = [
    ("27.1", FOUND, "found = [len(held) + new.find(s) for s in stops if s in new]", "look for it in held + new"),
    ("27.1", LOOP, "for n in ():", "hold that end back"),
    ("27.1", 'return text, "", False', 'return new, "", False', "is lost here"),
    ("27.1", FIRST, 'at = min(found)\n        return text[: at + len(next(s for s in stops if text.startswith(s, at)))], "", True', "not part of the text"),
    ("27.1", FIRST, 'at = min(found)\n        return text[:at], text[at + len(next(s for s in stops if text.startswith(s, at))) :], True', "it is not held back"),
    ("27.1", "min(found)", "found[0]", "begins first in the TEXT"),
    ("27.1", "min(found)", "max(found)", "not the last"),
    ("27.1", "text.find(s)", "text.rfind(s)", "twice"),
    ("27.1", LOOP, "for n in [min(len(text), max(map(len, stops), default=1) - 1)]:\n        if not n:\n            break\n        return text[:-n], text[-n:], False\n    " + LOOP, "START of a stop string"),
    ("27.1", "range(len(text), 0, -1)", "range(1, len(text) + 1)", "the LONGEST"),
    ("27.1", "range(len(text), 0, -1)", "range(min(len(text), 1), 0, -1)", "more than one character"),
    ("27.1", SOME, "any(s.startswith(text[-n:]) for s in stops[:1])", "any of them, not only of the first"),
    ("27.1", "text = held + new", "text, stops = held + new, stops[:1]", "look for all of them"),
    ("27.1", HOLD, "return text, text[-n:], False", "shown as well"),
    ("27.1", '"", True', '"", False', "never True"),
    ("27.1", "True", "None", "must be True or False"),
    ("27.1", "text = held + new", "text = held + new\n    longest = max(len(s) for s in stops)", "may be an empty list"),
    ("27.1", HOLD, "return text[:-n], text[-n:]", "2 things are returned"),
    ("27.1", 'return text, "", False', 'return "", text, False', "show what is certain at once"),
    ("27.1", LOOP, "for n in [len(text) - min((text.find(s[0]) for s in stops if s[0] in text), default=len(text))]:\n        if not n:\n            break\n        return text[:-n], text[-n:], False\n    " + LOOP, "not a place in the middle"),
    ("27.1", LOOP, "if len(stops) > 2:\n        return text, '', False\n    " + LOOP, "With held"),  # only random cases have that
    ("27.2", LINES, LINES + "\n    lines = lines if len(lines) < 5 else []", "payloads were returned"),  # the same
    ("27.2", PAYLOADS, PAYLOADS.removesuffix("rest") + 'b""', "next event is lost"),
    ("27.2", PARTS, 'events, rest = data.split(b"\\n\\n"), b""', "EMPTY line"),
    ("27.2", PARTS, '*events, rest = data.split(b"\\n")', "not at the first newline"),
    ("27.2", PARTS, 'event, end, rest = data.partition(b"\\n\\n")\n    events = [event] if end else []\n    rest = rest if end else data', "return the payloads of all"),
    ("27.2", "line[6:]", "line", "cut the first six characters"),
    ("27.2", "line[6:]", 'line.replace(b"data: ", b"")', "inside a payload"),
    ("27.2", "line[6:]", 'line.lstrip(b"data: ")', "not a word"),
    ("27.2", "line[6:]", "line[6:].strip()", "Spaces of the payload"),
    ("27.2", "line[6:]", "line[5:]", "belongs to the name"),
    ("27.2", 'line.startswith(b"data: ")', 'line.startswith(b"data: ") and line[6:]', "An empty payload"),
    ("27.2", ' if line.startswith(b"data: ")', "", "such as comments"),
    ("27.2", LINES, "lines = events", "another line, such as a comment"),
    ("27.2", 'if line.startswith(b"data: ")', 'if line.startswith(b"data: ") and b"[DONE]" not in line', "a payload like the others"),
    ("27.2", PARTS, 'text = data.decode("utf-8", "replace").encode()\n    *events, rest = text.split(b"\\n\\n")', "became U+FFFD"),
    ("27.2", PARTS, 'text = data.decode("utf-8", "ignore").encode()\n    *events, rest = text.split(b"\\n\\n")', "was dropped"),
    ("27.2", PARTS, 'text = data.decode().encode()\n    *events, rest = text.split(b"\\n\\n")', "cut the bytes first"),
    ("27.2", LINES, 'lines = [line.encode() for event in events for line in event.decode().splitlines()]', "U+2028"),
    ("27.2", ".decode() for", " for", "Payloads are texts: decode"),
    ("27.2", "line[6:].decode()", "len(line)", "got int"),
    ("27.2", PARTS, "data = data.decode(errors='ignore')[:-1].encode()\n    " + PARTS, "byte for byte"),  # two mistakes
    ("27.2", PAYLOADS, PAYLOADS + ".decode('utf-8', 'replace')", "rest must be bytes"),
    ("27.2", 'data.split(b"\\n\\n")', 'data.split("\\n\\n")', "what it is split at"),
]  # fmt: skip

UNTRUE = [
    ("27.1", 'return text, "", False', 'return new, "", False', "The stop string itself"),
    ("27.1", "min(found)", "found[0]", "twice"),
]  # fmt: skip

RIGHT = [
    ("27.1", LOOP, "for n in range(min(len(text), max(map(len, stops), default=0)), 0, -1):"),
    ("27.1", SOME, "any(text.endswith(s[:n]) and len(s) >= n for s in stops)"),
    ("27.1", "min(found)", "sorted(found)[0]"),
    ("27.1", "True", "1"),
    ("27.2", PARTS, 'cut = data.rfind(b"\\n\\n") + 2\n    cut = cut if cut > 1 else 0\n    events, rest = data[:cut].split(b"\\n\\n"), data[cut:]'),
    ("27.2", PARTS, '*events, rest = bytearray(data).split(b"\\n\\n")'),
    ("27.2", "line[6:]", 'line.split(b"data: ", 1)[1]'),
]  # fmt: skip
