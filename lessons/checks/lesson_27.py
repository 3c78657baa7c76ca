"""Exercises of lesson 27: stop strings in pieces, server-sent events."""

import copy
from dataclasses import dataclass, field

import numpy as np

from .attempt import Wrong, exercise


@dataclass(frozen=True)
class Raised:
    """A result: an exception of this name. wrong: what its author is told, if there is one."""

    name: str
    wrong: Wrong | None = field(default=None, compare=False)


def outcome(function, arguments):
    try:
        return function(*arguments)
    except Exception as error:
        return Raised(type(error).__name__)


def copied(argument):
    """Containers and arrays are copied: an attempt may change what it gets, and the right answer needs it as it was."""
    return copy.deepcopy(argument) if isinstance(argument, (list, dict, np.ndarray)) else argument


def judged(e, cases, read, right, mistakes, other, unchanged=None):
    """Run all cases. Raises Wrong for the first one whose result is not right.

    cases: [(description, arguments)].  read: checks and converts what the attempt returned.
    mistakes: {message: function, or several}. A message is chosen if a function does the same as the attempt in all cases: with
    two mistakes at once none is chosen, but none is untrue.  other: (arguments, wanted, got) -> the message in that case
    unchanged: the name of the first argument, which the attempt must not change
    """
    got = []
    changed_in = None
    for where, arguments in cases:
        copies = [copied(a) for a in arguments]
        try:
            got.append(read(e.call(*copies, case=where)))
            if unchanged and changed_in is None and not np.array_equal(copies[0], arguments[0]):
                changed_in = where
        except Wrong as wrong:
            error = wrong.__context__  # of the attempt; None: something else is wrong with it
            if error is None or isinstance(error, TimeoutError):
                raise
            got.append(Raised(type(error).__name__, wrong))
    for (where, arguments), mine in zip(cases, got):
        want = right(*arguments)
        if mine == want:
            continue
        e.where = where
        same = lambda f: all(outcome(f, a) == x for (_, a), x in zip(cases, got))
        known = (
            text for text, functions in mistakes.items()
            if any(map(same, functions if isinstance(functions, tuple) else (functions,)))
        )  # fmt: skip
        why = next(known, None)
        if isinstance(mine, Raised):
            raise mine.wrong if why is None else e.wrong(f"{mine.name}.\n{why}")
        shown = f"Expected {want!r}, got {mine!r}."
        raise e.wrong(f"{shown}\n{why or other(arguments, want, mine)}")
    if unchanged and changed_in is not None:
        e.where = changed_in
        raise e.wrong(f"The result is right, but {unchanged} was changed: work on a copy.")


# ----------------------------------------------------------------------------- 27.1
def released(held, new, stops, first=min, where=str.find, keep=None):
    """The right answer. first: chooses among the places of stop strings.  keep: (text, stops) -> characters held back"""
    text = held + new
    found = [where(text, s) for s in stops if s in text]
    if found:
        return text[: first(found)], "", True
    n = (keep or longest)(text, stops)
    return text[: len(text) - n], text[len(text) - n :], False


def sizes(text, stops):
    """Lengths of the ends of `text` that are the start of a stop string, longest first."""
    return [n for n in range(len(text), 0, -1) if any(s.startswith(text[-n:]) for s in stops)]


def longest(text, stops):
    return max(sizes(text, stops), default=0)


def ends_after(held, new, stops):
    text = held + new
    ends = [(text.find(s), text.find(s) + len(s)) for s in stops if s in text]
    return (text[: min(ends)[1]], "", True) if ends else released(held, new, stops)


def keeps_the_rest(held, new, stops):
    text = held + new
    found = [(text.find(s), len(s)) for s in stops if s in text]
    if not found:
        return released(held, new, stops)
    at, n = min(found)
    return text[:at], text[at + n :], True


def only_new(held, new, stops):
    """Looks for complete stop strings in the new text only."""
    found = [new.find(s) for s in stops if s in new]
    if found:
        return held + new[: min(found)], "", True
    n = longest(new, stops)
    return held + new[: len(new) - n], new[len(new) - n :], False


def loses_held(held, new, stops):
    shown, rest, stopped = released(held, new, stops)
    return shown[len(held) :], rest, stopped


def loses_all_held(held, new, stops):
    shown, rest, stopped = released(held, new, stops)
    return (shown, rest, stopped) if rest or stopped else (new, "", False)


def new_then_both(held, new, stops):
    """The same, but holds back an end of both."""
    found = [len(held) + new.find(s) for s in stops if s in new]
    if found:
        return (held + new)[: min(found)], "", True
    n = longest(held + new, stops)
    return (held + new)[: len(held + new) - n], (held + new)[len(held + new) - n :], False


def whole_first(held, new, stops):
    """The text that remains is shown with what is held back."""
    shown, rest, stopped = released(held, new, stops)
    return shown + rest, rest, stopped


def from_first(text, stops):
    """Everything is held back from the first character that a stop string begins with."""
    places = [text.find(s[0]) for s in stops if s[0] in text]
    return len(text) - min(places) if places else 0


BEFORE = "The stop string itself is not part of the text: end before it."
AFTER = 'What follows a stop string is dropped, it is not held back: held must be "".'

STOPPED = {
    "Text that cannot become a stop string is held back: show what is certain at once.": (
        lambda h, n, s: released(h, n, s) if released(h, n, s)[2] else ("", h + n, False),
        lambda h, n, s: released(h, n, s) if any(released(h, n, s)[1:]) else ("", h + n, False),
    ),
    "A stop string may begin in an earlier piece: look for it in held + new.": (only_new, new_then_both),
    "The end of the text may be the start of a stop string that the next piece completes: hold that end back.":
        lambda h, n, s: released(h, n, s, keep=lambda *_: 0),
    "What was held back is lost here: when it does not become a stop string, it is shown too.": (loses_held, loses_all_held),
    "What is held back is shown as well, and would be shown again with the next piece.": whole_first,
    BEFORE: ends_after,
    AFTER: keeps_the_rest,
    "Of several stop strings the one that begins first in the TEXT ends it, not the first of the list.":
        lambda h, n, s: released(h, n, s, first=lambda found: found[0]),
    "Of several stop strings the one that begins first in the text ends it, not the last.": lambda h, n, s: released(h, n, s, first=max),
    "A stop string may be in the text twice: the first one ends it.": lambda h, n, s: released(h, n, s, where=str.rfind),
    "Too much is held back: only an end of the text that is the START of a stop string, not always as many characters as one has.":
        lambda h, n, s: released(h, n, s, keep=lambda t, s: min(len(t), max(map(len, s), default=1) - 1)),
    "Too much is held back: only the END of the text can become a stop string, not a place in the middle.":
        lambda h, n, s: released(h, n, s, keep=from_first),
    "Too little is held back: of several ends that start a stop string, the LONGEST must be held back.":
        lambda h, n, s: released(h, n, s, keep=lambda t, s: min(sizes(t, s), default=0)),
    "Too little is held back: more than one character may be the start of a stop string.":
        lambda h, n, s: released(h, n, s, keep=lambda t, s: 1 if 1 in sizes(t, s) else 0),
    "There may be several stop strings: the end may be the start of any of them, not only of the first.":
        lambda h, n, s: released(h, n, s, keep=lambda t, s: longest(t, s[:1])),
    "There may be several stop strings: look for all of them, not only for the first.": lambda h, n, s: released(h, n, s[:1]),
    "The third value says whether a stop string is complete: it is the wrong way round.":
        lambda h, n, s: (*released(h, n, s)[:2], not released(h, n, s)[2]),
    "stopped is never True: return True when a stop string is complete.": lambda h, n, s: (*released(h, n, s)[:2], False),
}  # fmt: skip


def why_stopped(arguments, want, got):
    text = "".join(arguments[:2])
    if want[2] and not got[2]:
        return "A stop string is complete in held + new, and stopped is False."
    if got[2] and not want[2]:
        return "No stop string is complete in held + new, but stopped is True."
    if want[2] and got[0] == want[0]:
        return AFTER
    if want[2] and any(got[0].endswith(s) for s in arguments[2]):
        return BEFORE
    if want[2]:
        return "The text ends before the stop string that begins first in held + new."
    if got[0] + got[1] != text:
        return "shown + held must be held + new as long as there is no stop string: characters were lost, added or changed."
    if len(got[1]) > len(want[1]):
        return "Too much is held back: only the longest end of the text that is the start of a stop string."
    return "Too little is held back: this end may become a stop string with the next piece."


@exercise(
    "27.1", "next_text",
    first_step="put held and new together. Is a stop string in it? If not: which end of it is the start of one?",
    hints={
        "ValueError": "stops may be an empty list, and then nothing is ever held back. min and max take default=...",
        "IndexError": "Text and list may be empty: held, new and stops.",
        "TypeError": "held, new and the stop strings are str, stops is a list. str.startswith takes a tuple, not a list.",
    },
    kernel=False,
)  # fmt: skip
def next_text(e):
    fixed = [
        ("", "plain text", ["</>"]), ("", "a <", ["</>"]), ("<", " b", ["</>"]), ("<", "/", ["</>"]), ("</", ">", ["</>"]),
        ("", "Tea.</>more", ["</>"]), ("", "one</>two</>", ["</>"]), ("Us", "e", ["User:"]), ("Use", "ful", ["User:"]),
        ("", "", ["</>"]), ("<", "", ["</>"]), ("", "anything <", []), ("", "", []), ("a", "a", ["aab"]), ("aa", "a", ["aab"]),
        ("", "x STOP y END", ["END", "STOP"]), ("", "x END y STOP", ["END", "STOP"]), ("", "so ST", ["END", "STOP"]),
        ("", "2 < 3 and 4", ["</>"]), ("\n", "\nUser", ["\n\n"]), ("", "ends with €", ["€🙂"]), ("€", "🙂!", ["€🙂"]),
        ("", "END", ["END"]), ("", "a<<", ["<</>"]),
    ]  # fmt: skip
    cases = [(f"held {h!r}, new {n!r}, stops {s!r}", (h, n, s)) for h, n, s in fixed]
    rng = e.rng
    draw = lambda least: "".join(rng.choice(list("ab<"), rng.integers(least, 4)))
    for n in (3, *rng.integers(4, size=11)):  # whole texts, in random pieces
        stops, held = [draw(1) + "b" for _ in range(n)], ""
        cases += [
            (f"held '', new {s[0]!r}, stops {stops!r}", ("", s[0], stops)) for s in stops[-1:]
        ]
        for _ in range(8):
            piece = draw(0)
            cases.append((f"held {held!r}, new {piece!r}, stops {stops!r}", (held, piece, stops)))
            _, held, stopped = released(held, piece, stops)
            if stopped:
                break

    def read(result):
        shown, rest, stopped = e.several(result, "shown", "held", "stopped")
        e.need(
            isinstance(shown, str) and isinstance(rest, str),
            f"shown and held are texts (str), got {type(shown).__name__} and {type(rest).__name__}.",
        )
        e.need(
            isinstance(stopped, (bool, np.bool_, int)) and stopped in (0, 1),
            f"stopped must be True or False, got {stopped!r}.",
        )
        return shown, rest, bool(stopped)

    judged(e, cases, read, released, STOPPED, why_stopped)


# ----------------------------------------------------------------------------- 27.2
def events(data, keep=lambda line: line.startswith(b"data: "), payload=lambda line: line[6:].decode()):  # fmt: skip
    """The right answer. keep: which lines count.  payload: line -> payload"""
    *whole, rest = data.split(b"\n\n")
    lines = [line for event in whole for line in event.split(b"\n")]
    return [payload(line) for line in lines if keep(line)], rest


def decoded_first(errors):
    def mistake(data):
        found, rest = events(data.decode("utf-8", errors).encode())
        return found, rest

    return mistake


def at_lines(data):
    *lines, rest = data.split(b"\n")
    return [x[6:].decode() for x in lines if x.startswith(b"data: ")], rest


def first_only(data):
    event, end, rest = data.partition(b"\n\n")
    return events(event + end) if not end else (events(event + end)[0], rest)


def with_the_rest(data):
    return events(data + b"\n\n")[0], b""


def first_line_only(data):
    *whole, rest = data.split(b"\n\n")
    return [x[6:].decode() for x in whole if x.startswith(b"data: ")], rest


def unicode_lines(data):
    *whole, rest = data.split(b"\n\n")
    lines = [line for event in whole for line in event.decode().splitlines()]
    return [x[6:] for x in lines if x.startswith("data: ")], rest


def last_is_lost(data):
    found, rest = events(data)
    return (found[:-1] if not rest else found), rest


EVENTS = {
    "The start of the next event is lost: return the bytes after the last complete event as rest.":
        lambda d: (events(d)[0], b""),
    "An event is complete at the EMPTY line. Before that its bytes belong to the rest.": with_the_rest,
    "An event is complete at its empty line, two newlines, not at the first newline.": at_lines,
    "There may be several events in the data: return the payloads of all.": first_only,
    "\"data: \" is the name of the field, not a part of the payload: cut the first six characters off.":
        lambda d: events(d, payload=bytes.decode),
    "Only the start of the line is the name of the field: \"data: \" inside a payload belongs to the text.":
        lambda d: events(d, payload=lambda x: x.replace(b"data: ", b"").decode()),
    "lstrip, rstrip and strip take a set of characters, not a word: payloads lose letters. Cut the first six characters off.":
        lambda d: events(d, payload=lambda x: x.decode().lstrip("atd: ")),
    "Spaces of the payload are lost: only the one space after the colon belongs to the field's name.":
        lambda d: events(d, payload=lambda x: x[6:].decode().strip()),
    "Spaces at the start of a payload are lost: only the one space after the colon belongs to the field's name. ":
        lambda d: events(d, payload=lambda x: x[5:].decode().lstrip()),
    "The space after the colon belongs to the name of the field, \"data: \".": lambda d: events(d, payload=lambda x: x[5:].decode()),
    "An empty payload is a payload, too: \"data: \" with nothing after it.": lambda d: events(d, keep=lambda x: x.startswith(b"data: ") and len(x) > 6),
    "Lines that do not begin with \"data: \", such as comments, have no payload.": lambda d: events(d, keep=lambda x: True),
    "A line counts if it BEGINS with \"data: \": a comment may contain it.":
        lambda d: events(d, keep=lambda x: b"data: " in x, payload=lambda x: x.split(b"data: ", 1)[1].decode()),
    "An event may begin with another line, such as a comment: look at each line of it.": first_line_only,
    "\"[DONE]\" is a payload like the others: the caller decides what it means.":
        lambda d: ([p for p in events(d)[0] if p != "[DONE]"], events(d)[1]),
    "str.splitlines also splits at characters such as U+2028, which may be part of a payload: split at \"\\n\".": unicode_lines,
    "The data were decoded before they were cut, and half a character at the end became U+FFFD: cut the bytes first.": decoded_first("replace"),
    "The data were decoded before they were cut, and half a character at the end was dropped: cut the bytes first.": decoded_first("ignore"),
    "The last complete event is missing: when the data end with an empty line, nothing is left over.": last_is_lost,
}  # fmt: skip


def why_events(arguments, want, got):
    data = arguments[0]
    if got[1] != want[1]:
        if not data.endswith(got[1]):
            return "rest must be the end of data, byte for byte: cut the bytes first, and decode only what is complete."
        longer = len(got[1]) > len(want[1])
        return (
            "Bytes of a complete event are still in the rest: they would be read twice."
            if longer
            else "Bytes after the last empty line are missing in the rest: their event is not complete."
        )
    if len(got[0]) != len(want[0]):
        return f"There are {len(want[0])} complete events with a payload, {len(got[0])} payloads were returned."
    return "A payload is what follows the first six bytes of its line, decoded as UTF-8."


@exercise(
    "27.2", "complete_events",
    first_step="where does a complete event end? data.split(b\"\\n\\n\") cuts there; the last part is not complete.",
    hints={
        "UnicodeDecodeError": "The data may end inside a character: cut the bytes first, and decode only what is complete.",
        "TypeError": "data is bytes, so what it is split at or compared with is bytes, too: b\"data: \".",
        "IndexError": "Data, payload and rest may be empty, and an event may have no payload.",
        "ValueError": "Is there an event, a line \"data: \", a rest? Data and payload may be empty.",
    },
    kernel=False,
)  # fmt: skip
def complete_events(e):
    word = "é€🙂"
    fixed = [
        b"data: one\n\n", b"data: one\n\ndata: two\n\n", b"data: one\n\ndata: tw", b"data: one", b"data: one\n", b"", b"data: one\n\nda",
        f"data: {word}\n\n".encode(), f"data: a\n\ndata: {word}".encode()[:-2], f"data: {word}".encode()[:-1], b": ping\n\n",
        b": ping\n\ndata: one\n\n: pi", b": ping\ndata: one\n\n", b": not data: x\n\ndata: y\n\n", b"data: the word data: twice\n\n",
        b"data: \n\ndata: after an empty one\n\n", b"data:  two spaces \n\n", b"data: atad\n\n", b"data: [DONE]\n\n",
        "data: a\u2028b\n\n".encode(), b'data: {"content":"\\n\\n"}\n\n', b"event: done\ndata: one\nid: 7\n\ndata: ",
    ]  # fmt: skip
    rng = e.rng
    for n in (5, *rng.integers(1, 6, 11)):
        texts = ["".join(rng.choice(list("ab :€🙂é,data"), rng.integers(12))) for _ in range(n)]
        lines = [f"data: {x}" if n == 5 or rng.random() < 0.8 else f": {x}" for x in texts]
        data = "".join(line + "\n\n" for line in lines).encode()
        fixed += [data, data[: rng.integers(len(data))]]

    def read(result):
        payloads, rest = e.several(result, "payloads", "rest")
        e.need(
            isinstance(payloads, (list, tuple)),
            f"payloads must be a list of str, got {type(payloads).__name__}.",
        )
        other = next((p for p in payloads if not isinstance(p, str)), "")
        e.need(
            not isinstance(other, (bytes, bytearray)),
            "Payloads are texts: decode the bytes of each complete event.",
        )
        e.need(
            isinstance(other, str),
            f"Payloads are texts (str), got {type(other).__name__}: the caller decides what they mean.",
        )
        e.need(
            isinstance(rest, (bytes, bytearray, memoryview)),
            f"rest must be bytes, got {type(rest).__name__}: it may end inside a character, and half a character is not text yet.",
        )
        return list(payloads), bytes(rest)

    judged(e, [(f"data {x!r}", (x,)) for x in fixed], read, events, EVENTS, why_events)
