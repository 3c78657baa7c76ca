"""Attempts at the exercises of lesson 27: see test_attempts.py."""


# %% 27.1 RIGHT: every start of every stop string is tried
def next_text(held, new, stops):
    text = held + new
    cut = min(
        (i for i in range(len(text)) if any(text.startswith(s, i) for s in stops)), default=None
    )
    if cut is not None:
        return text[:cut], "", True
    starts = sorted({s[:n] for s in stops for n in range(1, len(s))}, key=len)
    n = max([len(x) for x in starts if text.endswith(x)] + [0])
    return text[: len(text) - n], text[len(text) - n :], False


# %% 27.2 RIGHT: a loop that takes one event after the other
def complete_events(data):
    found = []
    while b"\n\n" in data:
        event, _, data = data.partition(b"\n\n")
        for line in event.split(b"\n"):
            if line[:6] == b"data: ":
                found.append(str(line[6:], "utf-8"))
    return found, data
