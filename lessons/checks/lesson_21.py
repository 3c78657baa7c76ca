"""Exercises of lesson 21: continuous batching and chat."""

import numpy as np

from .attempt import exercise


def starts_of(lengths, slots, pause=0):
    """First come, first served. -> the first step of every request. pause: idle steps of a slot after each request"""
    free_at, starts = [0] * slots, []
    for n in lengths:
        slot = int(np.argmin(free_at))
        starts.append(free_at[slot])
        free_at[slot] += n + pause
    return np.array(starts, float)


def static_starts(lengths, slots):
    """The next batch starts when the whole previous batch has ended."""
    starts, now = [], 0
    for first in range(0, len(lengths), slots):
        group = lengths[first : first + slots]
        starts += [now] * len(group)
        now += max(group)
    return np.array(starts, float)


def round_robin(lengths, slots):
    free_at, starts = [0] * slots, []
    for i, n in enumerate(lengths):
        starts.append(free_at[i % slots])
        free_at[i % slots] += n
    return np.array(starts, float)


@exercise(
    "21.1", "schedule",
    first_step="for every slot, keep the step from which it is free. Which slot does the next request get, and when does it start?",
    kernel=False,
)  # fmt: skip
def schedule(e):
    fixed = (
        ([3, 9, 2, 5, 1], 2),
        ([4, 4, 4], 3),
        ([2, 3], 4),
        ([5, 1, 1, 1, 1, 7, 2], 3),
        ([2, 2, 2], 1),
        ([], 2),
    )
    draw = lambda rng: (rng.integers(1, 10, 9), rng.integers(2, 5))
    for lengths, slots in e.cases(fixed, draw, times=5):
        got = e.call(list(lengths), slots, case=f"lengths {lengths}, {slots} slots")
        e.need(
            isinstance(got, (list, tuple))
            and len(got) == len(lengths)
            and all(np.shape(p) == (2,) for p in got),
            "Return a list with one pair (first step, slot) per request.",
        )
        starts, chosen = np.array([p[0] for p in got], float), [int(p[1]) for p in got]
        want = starts_of(lengths, slots)
        early = np.array(lengths) - 1
        e.need(
            all(0 <= r < slots for r in chosen),
            f"There are {slots} slots, 0 to {slots - 1}; the plan uses slot {next((r for r in chosen if not 0 <= r < slots), 0)}. "
            "A pair is (first step, slot).",
        )
        e.need(
            not lengths or not np.array_equal(starts, want + lengths),
            "These are the steps in which the slots become free again: a pair holds the step in which the request STARTS.",
        )
        e.need(
            np.array_equal(starts, want)
            or not np.array_equal(starts, starts_of(sorted(lengths), slots)),
            "The requests were reordered: serve them first come, first served, in the order of `lengths`.",
        )
        for i in range(len(lengths)):
            for j in range(i):
                apart = starts[i] >= starts[j] + lengths[j] or starts[j] >= starts[i] + lengths[i]
                e.need(
                    chosen[i] != chosen[j] or apart,
                    f"Requests {j} and {i} are in slot {chosen[i]} at the same time. Request {j} needs steps {starts[j]:g} to "
                    f"{starts[j] + early[j]:g}, so the slot is free from step {starts[j] + lengths[j]:g}.",
                )
        alone = (np.cumsum(lengths) - lengths).astype(float)
        e.same("the first steps", starts, want, {
            "This serves one request at a time: all slots can be used in parallel.": alone if slots > 1 else np.empty(0),
            "This is static batching: requests wait until the whole batch has ended. Reuse a free slot in the next step.":
                static_starts(lengths, slots),
            "Request i gets slot i % slots (round robin). Take the slot that becomes free first.": round_robin(lengths, slots),
            "Slots are idle for one step: a slot is free in the step right after the last step of its request.":
                starts_of(lengths, slots, pause=1),
            "A request starts too early: serve first come, first served, and only in a free slot.": lambda got: (got < want).any(),
        })  # fmt: skip


@exercise(
    "21.2", "advance_kernel",
    first_step="which entry does this thread own, and does the entry have a slot? If so, add 1 to both counters of the entry.",
    hints={
        "OutOfBoundsError": "There are slots_B.size entries; threads past the last one must do nothing.",
        "RaceError": "Thread b owns entry b: b = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x. (A slot says where in the cache an entry's "
        "keys are; it is not an index into lengths or step.)",
    },
)  # fmt: skip
def advance_kernel(e):
    fixed = (32, 32), (40, 16), (3, 32)
    for B, block in e.cases(fixed, lambda rng: (rng.integers(33, 90), 8 * rng.integers(1, 5))):
        rng = e.rng if e.drawn else np.random.default_rng(B)
        arrays = [e.blank(B, dtype=np.int32) for _ in range(3)]
        lengths, step, slots = arrays
        lengths[:], step[:] = rng.integers(5, 90, B), rng.integers(1, 5, B)
        slots[:] = np.where(rng.random(B) < 0.4, -1, rng.permutation(B))
        slots[0], slots[1] = 0, -1  # slot 0 is a valid slot; entry 1 is idle
        before = [np.asarray(a).astype(np.float64) for a in arrays]
        e.run(-(-B // block), block, lengths, step, slots, case=f"{B} entries, some of them idle")
        used = before[2] >= 0
        e.same("slots", np.asarray(slots).astype(float), before[2], {}, rtol=0, atol=0)
        for name, got, old in (("lengths", lengths, before[0]), ("step", step, before[1])):
            e.same(name, np.asarray(got).astype(float), old + used, {
                "Idle entries were advanced too: an entry whose slot is -1 must not change.": old + 1,
                "It is unchanged: add 1 to both lengths and step.": old,
                "Slot 0 is a valid slot: only -1 means idle, so the condition is slots_B[b] >= 0.": old + (before[2] > 0),
            }, rtol=0, atol=0)  # fmt: skip


@exercise(
    "21.3", "reusable",
    first_step="compare the two lists token by token up to the first difference. And what if the whole prompt is cached already?",
    hints={"IndexError": "One of the lists may end before they differ: stop there."},
    kernel=False,
)  # fmt: skip
def reusable(e):
    cases = {
        "the next turn of a chat": ([1, 2, 3, 4], [1, 2, 3, 4, 5, 6], 4),
        "a different first token": ([1, 2, 3], [9, 2, 3, 4], 0),
        "different in the middle, equal after that": ([1, 2, 3, 4, 5], [1, 2, 9, 4, 5, 6], 2),
        "the prompt is shorter than the cached tokens": ([1, 2, 3, 4, 5], [1, 2, 7], 2),
        "the same prompt again": ([1, 2, 3], [1, 2, 3], 2),
        "the prompt is a prefix of the cached tokens": ([1, 2, 3, 4, 5], [1, 2, 3], 2),
        "nothing is cached": ([], [1, 2], 0),
    }

    def draw(rng):
        cached, prompt = (rng.integers(0, 9, n).tolist() for n in rng.integers(2, 9, 2))
        n = int(rng.integers(0, min(len(cached), len(prompt))))
        prompt[:n] = cached[:n]
        same = next(
            (i for i, (a, b) in enumerate(zip(cached, prompt)) if a != b),
            min(len(cached), len(prompt)),
        )
        return "random tokens", (cached, prompt, min(same, len(prompt) - 1))

    for case, (cached, prompt, want) in e.cases(cases.items(), draw, times=5):
        got = e.call(list(cached), list(prompt), case=f"{case}: cached {cached}, prompt {prompt}")
        e.need(got is not None and np.ndim(got) == 0, f"Return one number; got {got!r}.")
        places = sum(a == b for a, b in zip(cached, prompt))
        e.same("the number of tokens", float(got), float(want), {
            "Nothing would be left to compute. But the next token comes from the logits of the LAST prompt token, which must be "
            "computed: return at most len(prompt) - 1.": float(len(prompt)),
            "Equal tokens after a difference are counted too. A key depends on all tokens before it: stop at the first difference.":
                float(places) if places != want else np.empty(0),
            "A partial match is useful too: the tokens up to the first difference can be reused.": 0.0 if want else np.empty(0),
            "All cached tokens were counted: compare them with the prompt.": float(len(cached)),
            "One too few: the last token is computed again only when the whole prompt is cached.": float(want - 1),
        }, rtol=0, atol=0)  # fmt: skip


@exercise(
    "21.4", "whole_characters",
    first_step="Python has a decoder for input in pieces, codecs.getincrementaldecoder('utf-8'): what does it do with half a character?",
    hints={"UnicodeDecodeError": "A model may generate bytes that are not valid UTF-8: create the decoder with errors='replace'."},
    kernel=False,
)  # fmt: skip
def whole_characters(e):
    cases = {
        "plain letters": (b"abc", "abc", b""),
        "half a character at the end": ("aé".encode()[:-1], "a", b"\xc3"),
        "a whole character": ("é".encode(), "é", b""),
        "three of the four bytes of an emoji": (
            b"ok " + "🙂".encode()[:3],
            "ok ",
            "🙂".encode()[:3],
        ),
        "no bytes": (b"", "", b""),
        "a byte that never begins a character": (b"a\xffb", "a\ufffdb", b""),
        "half a character, then a letter": (b"\xc3a", "\ufffda", b""),
        "a byte that never begins a character, at the end": (b"a\xff", "a\ufffd", b""),
        "a byte that only continues a character, at the end": (b"a\x80", "a\ufffd", b""),
        "the start of a character, then one that never is": (b"\xe2\xff", "\ufffd\ufffd", b""),
    }

    def draw(rng):
        pieces = [
            b"a",
            "é".encode(),
            "€".encode(),
            "🙂".encode(),
            b"\xff",
            b"\x80",
            "🙂".encode()[:2],
        ]
        data = b"".join(pieces[i] for i in rng.integers(len(pieces), size=6))
        data = data[: len(data) - int(rng.integers(0, 3))]
        # the longest end that the start of a character may be: it becomes valid with some more bytes
        more = (
            [b"\x80" * n for n in (1, 2, 3)]
            + [b"\x90" + b"\x80" * n for n in (0, 1, 2)]
            + [b"\xa0\x80", b"\xa0"]
        )

        def begins(end):
            return any(_is_character(end + m) for m in more)

        n = next((n for n in (3, 2, 1) if begins(data[len(data) - n :])), 0)
        text, rest = data[: len(data) - n].decode(errors="replace"), data[len(data) - n :]
        return "random bytes", (data, text, rest)

    for case, (data, text, rest) in e.cases(cases.items(), draw, times=25):
        got = e.call(data, case=f"{case}: {data!r}")
        e.need(
            isinstance(got, tuple) and len(got) == 2,
            "Return two values: the text, and the bytes that are held back.",
        )
        e.need(
            isinstance(got[0], str) and isinstance(got[1], (bytes, bytearray)),
            f"Return a str and bytes; got {type(got[0]).__name__} and {type(got[1]).__name__}.",
        )
        shown = f"Expected {text!r} and {rest!r}, got {got[0]!r} and {bytes(got[1])!r}."
        if (got[0], bytes(got[1])) == (text, rest):
            continue
        if rest and "\ufffd" in got[0]:
            why = "Half a character became U+FFFD, although its other half may still arrive: hold those bytes back."
        elif "\ufffd" in text and "\ufffd" not in got[0] and not got[1]:
            why = "Bytes that can never become a character were dropped silently: replace them by U+FFFD (errors='replace')."
        elif got[1] and not rest and "\ufffd" not in text:
            why = "Whole characters are held back: hold back only the bytes of an unfinished one."
        elif got[1] and not rest:
            why = "Bytes that can never become part of a character are held back: the text would stop here forever."
        elif rest and not got[1]:
            why = "The bytes of the unfinished character are lost: return them, so that they can precede the bytes of the next token."
        else:
            why = "Return every whole character immediately."
        raise e.wrong(f"{shown}\n{why}")


def _is_character(data) -> bool:
    try:
        return len(data.decode()) == 1
    except UnicodeDecodeError:
        return False
