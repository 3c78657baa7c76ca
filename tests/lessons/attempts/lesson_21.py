"""Attempts at the exercises of lesson 21: see test_attempts.py."""


# %% 21.1 RIGHT: a heap of (free from, slot)
def schedule(lengths, slots):
    import heapq

    heap, plan = [(0, s) for s in range(slots)], []
    for n in lengths:
        start, slot = heapq.heappop(heap)
        plan.append((start, slot))
        heapq.heappush(heap, (start + n, slot))
    return plan


# %% 21.1 WRONG: at the same time
def schedule(lengths, slots):
    return [(sum(lengths[:i]) // slots, i % slots) for i in range(len(lengths))]


# %% 21.2 WRONG: 1 of 32 threads wrote all
@cuda.jit
def advance_kernel(lengths_B, step_B, slots_B):
    if cuda.grid(1) == 0:
        for b in range(slots_B.size):
            if slots_B[b] != -1:
                lengths_B[b] += 1
                step_B[b] += 1


# %% 21.2 RIGHT: without a branch on the slot
@cuda.jit
def advance_kernel(lengths_B, step_B, slots_B):
    b = cuda.grid(1)
    if b < slots_B.size:
        more = int(slots_B[b] >= 0)
        step_B[b] = step_B[b] + more
        lengths_B[b] = lengths_B[b] + more


# %% 21.3 RIGHT: from the longest length down
def reusable(cached, prompt):
    n = min(len(cached), len(prompt) - 1)
    while cached[:n] != prompt[:n]:
        n -= 1
    return n


# %% 21.3 WRONG: A partial match is useful too
def reusable(cached, prompt):
    return min(len(cached), len(prompt) - 1) if prompt[: len(cached)] == cached else 0


# %% 21.4 WRONG: the text would stop here forever
# everything from the first byte that does not decode is held back
def whole_characters(data):
    for n in range(4):
        try:
            return data[: len(data) - n].decode(), data[len(data) - n :]
        except UnicodeDecodeError:
            pass
    return data.decode(errors="replace"), b""


# %% 21.4 WRONG: random numbers, seed 1
# a table of the fixed cases
def whole_characters(data):
    if data == b"\xc3a":
        return "\ufffda", b""
    if data == b"a\xffb":
        return "a\ufffdb", b""
    if data in (b"a\xff", b"a\x80"):
        return "a\ufffd", b""
    if data == b"\xe2\xff":
        return "\ufffd\ufffd", b""
    for n in range(4):
        try:
            return data[: len(data) - n].decode(), data[len(data) - n :]
        except UnicodeDecodeError:
            pass
    return "", data


# %% 21.4 RIGHT: the bytes at the end are examined one by one
def whole_characters(data):
    hold = 0
    for n in range(1, min(4, len(data) + 1)):
        end = data[len(data) - n :]
        for more in (
            b"\x80",
            b"\x90",
            b"\xa0",
            b"\x80\x80",
            b"\x90\x80",
            b"\xa0\x80",
            b"\x80\x80\x80",
            b"\x90\x80\x80",
        ):
            try:
                if len((end + more).decode()) == 1:
                    hold = n
            except UnicodeDecodeError:
                pass
    return data[: len(data) - hold].decode(errors="replace"), data[len(data) - hold :]
