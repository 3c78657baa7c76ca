"""Exercises of lesson 21: continuous batching and chat."""

import numpy as np

from .attempt import exercise


def starts_of(lengths, rows, pause=0):
    """First come, first served. -> the first step of every request. pause: steps that a row stands empty after one"""
    free_at, starts = [0] * rows, []
    for n in lengths:
        row = int(np.argmin(free_at))
        starts.append(free_at[row])
        free_at[row] += n + pause
    return np.array(starts, float)


def static_starts(lengths, rows):
    """Everybody waits until the whole batch has ended."""
    starts, now = [], 0
    for first in range(0, len(lengths), rows):
        group = lengths[first : first + rows]
        starts += [now] * len(group)
        now += max(group)
    return np.array(starts, float)


def round_robin(lengths, rows):
    free_at, starts = [0] * rows, []
    for i, n in enumerate(lengths):
        starts.append(free_at[i % rows])
        free_at[i % rows] += n
    return np.array(starts, float)


@exercise(
    "21.1", "schedule",
    first_step="keep for every row the step from which on it is free. Which row does the next request get, and from when on?",
    kernel=False,
)  # fmt: skip
def schedule(e):
    for lengths, rows in (
        ([3, 9, 2, 5, 1], 2),
        ([4, 4, 4], 3),
        ([2, 3], 4),
        ([5, 1, 1, 1, 1, 7, 2], 3),
        ([2, 2, 2], 1),
    ):
        got = e.call(list(lengths), rows, case=f"lengths {lengths}, {rows} rows")
        e.need(
            isinstance(got, (list, tuple))
            and len(got) == len(lengths)
            and all(np.shape(p) == (2,) for p in got),
            "Return a list with one pair (first step, row) for each request.",
        )
        starts, chosen = np.array([p[0] for p in got], float), [int(p[1]) for p in got]
        want = starts_of(lengths, rows)
        early = np.array(lengths) - 1
        e.need(
            all(0 <= r < rows for r in chosen),
            f"There are {rows} rows, 0 to {rows - 1}; the plan uses row {next((r for r in chosen if not 0 <= r < rows), 0)}. "
            "A pair is (first step, row).",
        )
        e.need(
            not np.array_equal(starts, want + lengths),
            "Those are the steps in which the rows become free again: the pair holds the step in which the request BEGINS.",
        )
        e.need(
            lengths == sorted(lengths)
            or not np.array_equal(starts, starts_of(sorted(lengths), rows)),
            "The requests were taken in another order: first come, first served, in the order of `lengths`.",
        )
        for i in range(len(lengths)):
            for j in range(i):
                apart = starts[i] >= starts[j] + lengths[j] or starts[j] >= starts[i] + lengths[i]
                e.need(
                    chosen[i] != chosen[j] or apart,
                    f"Requests {j} and {i} are in row {chosen[i]} at the same time. Request {j} needs the steps {starts[j]:g} to "
                    f"{starts[j] + early[j]:g}, so the row is free from step {starts[j] + lengths[j]:g} on.",
                )
        alone = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(float)
        e.same("the first steps", starts, want, {
            "That is one request at a time: all rows work side by side.": alone if rows > 1 else np.empty(0),
            "That is static batching: everybody waits until the whole batch has ended. A row that is free is taken in the next step.":
                static_starts(lengths, rows),
            "The rows take turns, request i gets row i % rows. Take the row that is free first.": round_robin(lengths, rows),
            "Rows stand empty for a step: a row is free in the step right after the last one of its request.":
                starts_of(lengths, rows, pause=1),
            "A request begins before its turn: first come, first served.": lambda got: (got < want).any(),
        })  # fmt: skip


@exercise(
    "21.2", "advance_kernel",
    first_step="which lane is this thread's, and is anybody in it? Then both counters of that lane grow by one.",
    hints={
        "OutOfBoundsError": "There are rows_B.size lanes; threads past the last do nothing.",
        "RaceError": "Thread b owns lane b: b = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x. (A row says where in the cache a lane's "
        "keys are; it is no index of lengths or step.)",
    },
)  # fmt: skip
def advance_kernel(e):
    for B, block in ((32, 32), (40, 16), (3, 32)):
        rng = np.random.default_rng(B)
        arrays = [e.blank(B, dtype=np.int32) for _ in range(3)]
        lengths, step, rows = arrays
        lengths[:], step[:] = rng.integers(5, 90, B), rng.integers(1, 5, B)
        rows[:] = np.where(rng.random(B) < 0.4, -1, rng.permutation(B))
        rows[0], rows[1] = 0, -1  # row 0 is a row; lane 1 is idle
        before = [np.asarray(a).astype(np.float64) for a in arrays]
        e.run(-(-B // block), block, lengths, step, rows, case=f"{B} lanes, some of them idle")
        used = before[2] >= 0
        e.same("rows", np.asarray(rows).astype(float), before[2], {}, rtol=0, atol=0)
        for name, got, old in (("lengths", lengths, before[0]), ("step", step, before[1])):
            e.same(name, np.asarray(got).astype(float), old + used, {
                "Idle lanes were counted too: a lane whose row is -1 stands still.": old + 1,
                "It is unchanged: both lengths and step grow by one.": old,
                "Row 0 is a row like the others: idle is -1, so ask for rows_B[b] >= 0.": old + (before[2] > 0),
            }, rtol=0, atol=0)  # fmt: skip


@exercise(
    "21.3", "reusable",
    first_step="walk along both lists as long as their tokens are equal. And what if the whole prompt is there already?",
    hints={"IndexError": "One of the two lists may end before they differ: stop there."},
    kernel=False,
)  # fmt: skip
def reusable(e):
    cases = {
        "the next turn of a chat": ([1, 2, 3, 4], [1, 2, 3, 4, 5, 6], 4),
        "another beginning": ([1, 2, 3], [9, 2, 3, 4], 0),
        "different in the middle, equal later": ([1, 2, 3, 4, 5], [1, 2, 9, 4, 5, 6], 2),
        "the prompt is shorter than what is held": ([1, 2, 3, 4, 5], [1, 2, 7], 2),
        "the very same prompt again": ([1, 2, 3], [1, 2, 3], 2),
        "the prompt is the beginning of what is held": ([1, 2, 3, 4, 5], [1, 2, 3], 2),
        "nothing is held": ([], [1, 2], 0),
    }
    for case, (held, prompt, want) in cases.items():
        got = e.call(list(held), list(prompt), case=f"{case}: held {held}, prompt {prompt}")
        e.need(got is not None and np.ndim(got) == 0, f"Return one number; got {got!r}.")
        places = sum(a == b for a, b in zip(held, prompt))
        e.same("the number of tokens", float(got), float(want), {
            "Nothing would be left to compute. But the next token comes from the logits of the LAST prompt token, so that one must be "
            "computed: at most len(prompt) - 1.": float(len(prompt)),
            "Equal tokens behind a difference are counted too. A key depends on all tokens before it: stop at the first difference.":
                float(places) if places != want else np.empty(0),
            "What agrees in part is of use, too: the tokens up to the first difference can stay.": 0.0 if want else np.empty(0),
            "All that is held was counted: compare it with the prompt.": float(len(held)),
            "One too few: only when the whole prompt is held must its last token be computed again.": float(want - 1),
        }, rtol=0, atol=0)  # fmt: skip


@exercise(
    "21.4", "whole_characters",
    first_step="Python has a decoder that is fed piece by piece, codecs.getincrementaldecoder('utf-8'): what does it do with half a character?",
    hints={"UnicodeDecodeError": "A model may write bytes that are no text: the decoder takes errors='replace'."},
    kernel=False,
)  # fmt: skip
def whole_characters(e):
    cases = {
        "plain letters": (b"abc", "abc", b""),
        "half of a character at the end": ("aé".encode()[:-1], "a", b"\xc3"),
        "the whole character": ("é".encode(), "é", b""),
        "three of the four bytes of an emoji": (
            b"ok " + "🙂".encode()[:3],
            "ok ",
            "🙂".encode()[:3],
        ),
        "nothing": (b"", "", b""),
        "a byte that never begins a character": (b"a\xffb", "a\ufffdb", b""),
        "half a character, and then a letter": (b"\xc3a", "\ufffda", b""),
    }
    for case, (data, text, rest) in cases.items():
        got = e.call(data, case=f"{case}: {data!r}")
        e.need(
            isinstance(got, tuple) and len(got) == 2,
            "Return two things: text, and the bytes that are left.",
        )
        e.need(
            isinstance(got[0], str) and isinstance(got[1], (bytes, bytearray)),
            f"Return a str and bytes; got {type(got[0]).__name__} and {type(got[1]).__name__}.",
        )
        shown = f"Expected {text!r} and {rest!r}, got {got[0]!r} and {bytes(got[1])!r}."
        if (got[0], bytes(got[1])) == (text, rest):
            continue
        if rest and "\ufffd" in got[0]:
            why = "Half a character was given out as U+FFFD, though its other half may still come: hold those bytes back."
        elif "\ufffd" in text and "\ufffd" not in got[0] and not got[1]:
            why = "Bytes that can never become a character were dropped without a trace: put U+FFFD in their place (errors 'replace')."
        elif got[1] and not rest and "\ufffd" not in text:
            why = "Whole characters are held back: only the beginning of an unfinished one is."
        elif got[1] and not rest:
            why = "Bytes are held back that can never become part of a character: the text would stop here for ever."
        elif rest and not got[1]:
            why = "The bytes of the unfinished character are lost: return them, they belong in front of the next token's."
        else:
            why = "Every whole character is given out at once."
        raise e.wrong(f"{shown}\n{why}")
