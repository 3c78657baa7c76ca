"""A recording as a page of HTML: a slider over the steps of a block, its threads, its memory, and
the source next to them.

    recording = record(kernel, grid, block, *args)          # block (0, 0, 0); another: of=(1, 0, 0)
    recording.save("rmsnorm.html")

The page needs nothing else and loads nothing. stepper.html is its frame; this module computes what
it shows.
"""

import ast
import html
import itertools
import json
import linecache
import math
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from .errors import DeadlockError, RaceError, file_name
from .observers import READ, WRITE
from .recording import Event, Recording, Step
from .source import BLOCK_BARRIERS
from .unset import Unset

FRAME = Path(__file__).with_name("stepper.html")
HEIGHT = 720  # pixels in a notebook
WORDS = 32  # in a cell of addressed shared memory: 128 bytes, a row of a tile


class Stepper(Recording):
    """A recording that can be looked at. In a notebook it shows itself."""

    def page(self) -> str:
        """Return the page: HTML that needs nothing else."""
        data = json.dumps(compact(contents(self)), separators=(",", ":"))
        data = data.replace("<", "\\u003c")
        if self.launch:
            name = self.launch.name
        else:
            name = ""
        frame = FRAME.read_text(encoding="utf-8")
        return frame.replace("TITLE", html.escape(name), 1).replace("DATA", data, 1)

    def save(self, path: str | Path) -> Path:
        """Write the page to a file. -> the file"""
        path = Path(path)
        path.write_text(self.page(), encoding="utf-8")
        return path

    def __repr__(self) -> str:
        if self.launch:
            name = self.launch.name
        else:
            name = "nothing"
        times = {step.time for step in self.steps()}
        return f'<{name}, block {self.position}, {len(times)} steps: save("FILE.html") writes them as a page>'

    def _repr_html_(self) -> str:
        """Return the page in a frame, apart from the notebook's own styles and scripts."""
        return (
            f'<iframe srcdoc="{html.escape(self.page())}" title="the threads of a block, step by step" '
            f'style="width:100%;height:{HEIGHT}px;box-sizing:border-box;border:1px solid #8884;'
            'border-radius:6px"></iframe>'
        )


def contents(recording: Recording) -> dict[str, Any]:
    """Return what the page shows, as JSON has it."""
    steps = recording.steps()
    launch = recording.launch
    paths = [step.event.path for step in steps]
    error_sites: tuple = ()
    if recording.error:
        error_sites = recording.error.sites
    # the files of an error first: then both its lines are in sight
    places = [(s.file, s.line) for s in error_sites] + [place for path in paths for place in path]
    files = _files(dict.fromkeys(places))
    numbers = {file: i for i, (file, _) in enumerate(files)}
    lines = lambda path: [[numbers[file], line] for file, line in path if file in numbers]
    return {
        "kernel": launch.name if launch else "",
        "grid": ", ".join(map(str, launch.grid)) if launch else "",
        "position": ", ".join(map(str, recording.position)),
        "threads": len(recording.events),
        "block": [int(n) for n in launch.block] if launch else [0, 1, 1],
        "loops": sorted({name for _, parts in files for part in parts for name in _counters(part)}),
        "cut": recording.cut,
        "ended": recording.ended,
        "files": [{"title": file_name(file), "functions": parts} for file, parts in files],
        "arrays": [
            {"name": a.name, "kind": a.kind, "shape": a.shape, "size": a.itemsize, "count": math.prod(a.shape)}
            for a in recording.arrays
        ],
        "steps": [
            _step(step, lines(path)) | asynchronous
            for step, path, asynchronous in zip(steps, paths, _asynchronous(steps))
        ],
        "error": _error(recording, steps, lines),
    }  # fmt: skip


def compact(page: dict[str, Any]) -> dict[str, Any]:
    """Return the same in fewer bytes: [first, step, count] in a dict for numbers in equal steps,
    and no values of reads that find what is known of their elements. stepper.html undoes it."""
    last_values: dict[tuple[int, int], Any] = {}
    for step in page["steps"]:
        elements = [(step["a"], k) for k in step["e"]]
        values = step["v"]
        if (
            step["h"] == "read"
            and values
            and values == [last_values.get(e, last_values) for e in elements]
        ):
            del step["v"]
        elif len(values) == len(elements) and step["h"] != "atomic":
            last_values.update(zip(elements, values))
        for name in ("l", "e"):
            step[name] = _sequence(step[name])
    return page


def _sequence(numbers: list[int]) -> list[int] | dict[str, list[int]]:
    steps = {b - a for a, b in itertools.pairwise(numbers)}
    if len(numbers) > 3 and len(steps) == 1:
        return {"q": [numbers[0], steps.pop(), len(numbers)]}
    return numbers


def _variables(step: Step) -> list[list[Any]]:
    """Return [name, value] of the local variables that have changed; a list of values, None for a
    lane where it has not, if they differ."""
    names = dict.fromkeys(name for lane in step.changed for name in lane)
    changes: list[list[Any]] = []
    for name in names:
        values = [_variable(lane.get(name)) for lane in step.changed]
        if all(value == values[0] for value in values):
            changes.append([name, values[0]])
        else:
            changes.append([name, values])
    return changes


def _variable(value):
    if isinstance(value, list):
        return f"[{', '.join(str(_number(v)) for v in value)}]"
    return _number(value)


def _step(step: Step, path: list) -> dict[str, Any]:
    """t: time.
    w: warp.
    p: path.
    h: how.
    a: array.
    b: a barrier?
    l, e, v: thread, element and value of each access
    y: the local variables that have changed, see _variables"""
    lanes = []
    elements = []
    values = []
    for thread, some, written in step.lanes:
        some = [] if step.event.engine else some
        lanes += [thread] * max(1, len(some))
        elements += some
        values += [_number(v) for v in written]
    barrier = step.event.how in BLOCK_BARRIERS
    return dict(
        t=step.time, w=step.warp, p=path, h=step.event.how, a=step.event.array, b=barrier, l=lanes, e=elements, v=values,
        y=_variables(step),
    )  # fmt: skip


def _asynchronous(steps: list[Step]) -> list[dict[str, Any]]:
    """Return what the asynchronous engines (engines.py) do in each step.

    n: engine.
    r: the words of an access that begins here, [[first, end], ...].
    u: time of the step in which it ends, or -1.
    x: [time, words] of the accesses that end here, as they began.
    m: an mbarrier after the step: its byte, its phase, and the arrivals and bytes that the phase
    still expects.
    f: the phase that was waited for.
    """
    ends = {access: step.time for step in steps for access in step.event.ended}
    some = [step for step in steps if step.event.engine]
    begun = {step.event: [step.time, _runs(step.event.elements)] for step in some}
    # byte -> arrivals of a phase; phase, arrivals and bytes expected
    barriers: dict[int, list[int]] = {}
    all_facts = []
    for step in steps:
        event = step.event
        facts: dict[str, Any] = {}
        if event.engine and event.elements:
            facts |= {"n": event.engine, "r": begun[event][1], "u": ends.get(event, -1)}
        if event.ended:
            facts |= {"n": event.ended[0].engine, "x": [begun[access] for access in event.ended]}
        if event.mbarrier:
            byte, arrivals, nbytes = event.mbarrier
            state = barriers.setdefault(byte, [arrivals, 0, 0, 0])
            state[2] += arrivals
            state[3] += nbytes
            if event.phase is None and state[2] == state[3] == 0:
                state[1:3] = [state[1] + 1, state[0]]
            facts["m"] = [byte, *state[1:]]
        if event.phase is not None:
            facts["f"] = event.phase
        all_facts.append(facts)
    return all_facts


def _runs(words: list[int]) -> list[list[int]]:
    """Return [[first, end], ...] of consecutive words."""
    in_order = np.unique(words)
    cuts = np.flatnonzero(np.diff(in_order) != 1) + 1
    return [[int(run[0]), int(run[-1]) + 1] for run in np.split(in_order, cuts) if len(run)]


def _number(value):
    """Return a value with four digits, as JSON has numbers; text for what JSON has not."""
    if isinstance(value, Unset):
        return "not written"
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, (float, np.floating)):
        value = float(f"{float(value):.4g}")
        if math.isfinite(value):
            return value
        return str(value)
    if value is None:
        return None
    return str(value)


def _error(recording: Recording, steps: list[Step], lines) -> dict[str, Any] | None:
    """Return the error's text and lines, and where it shows: time, thread, cells, one sentence.
    time -1: nowhere."""
    error = recording.error
    if error is None:
        return None
    shown: dict[str, Any] = {
        "text": str(error),
        "lines": lines([(s.file, s.line) for s in error.sites]),
    }
    shown |= {
        "time": steps[-1].time if steps else -1,
        "thread": -1,
        "cells": [],
        "told": "the error shows here",
        "stuck": isinstance(error, DeadlockError),
    }
    thread = error.thread
    if thread is None or not recording.events[thread]:
        return shown
    event = recording.events[thread][-1]
    times = [s.time for s in steps for lane in s.lanes if lane[0] == thread]
    who = {"": f"thread {thread}", "TMA": f"the copy of thread {thread}", "wgmma": "the product"}
    shown |= {
        "time": times[-1],
        "thread": thread,
        "told": f"{who[event.engine]} causes the error here",
    }
    if event.array >= 0:
        if event.engine:
            wrong = {*event.elements}
        else:
            wrong = {event.elements[-1]}
        others = _others(steps, thread, event, wrong, error)
        if others:
            other, common = others[-1]
            shown["told"] += f"; the other access {_since(other)} step {other.time + 1}"
            wrong = common
        if recording.arrays[event.array].kind == "bytes":
            wrong = {k // WORDS * WORDS for k in wrong}
        shown["cells"] = [[event.array, k] for k in sorted(wrong)]
    return shown


def _since(step: Step) -> str:
    engine = step.event.engine
    how = {READ: "reads", WRITE: "writes"}.get(step.event.how)
    if engine:
        return f"({engine} {how}) began in"
    return "is in"


def _others(steps, thread, event: Event, wrong: set[int], error) -> list[tuple[Step, set[int]]]:
    """Return the steps in which others access elements of the error, at the other place that it
    names; and these elements."""
    places = {site for site in error.sites if site != event.site}
    if isinstance(error, RaceError):
        places = places or {event.site}
    accesses = []
    for step in steps:
        if step.event.array == event.array and step.event.site in places:
            lanes = (some for n, some, _ in step.lanes if n != thread or step.event.engine)
            common = wrong.intersection(set().union(*lanes))
            if common:
                accesses.append((step, common))
    return accesses


# ----------------------------------------------------------------------------- the source
def _files(places: Iterable[tuple[str, int]]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Return [(file, functions that contain one of the places)], in the order of the places."""
    lines: dict[str, list[int]] = {}
    for file, line in places:
        lines.setdefault(file, []).append(line)
    files = []
    for file, group in lines.items():
        text = linecache.getlines(file)
        spans = _functions(text)
        shown: set[tuple[int, int]] = set()
        for line in group:
            around = [span for span in spans if span[0] <= line <= span[1]]
            shown.add(min(around, default=(line, line), key=lambda span: span[1] - span[0]))
        outer = [
            s
            for s in sorted(shown)
            if not any(o != s and o[0] <= s[0] and s[1] <= o[1] for o in shown)
        ]
        parts = [
            {"first": first, "lines": [line.rstrip("\n") for line in text[first - 1 : end]]}
            for first, end in outer
        ]  # fmt: skip
        files.append((file, parts))
    return files


def _counters(part: dict[str, Any]) -> set[str]:
    """Return the variables of the for loops of a function."""
    try:
        tree = ast.parse(textwrap.dedent("\n".join(part["lines"])))
    except SyntaxError:
        return set()
    targets = [node.target for node in ast.walk(tree) if isinstance(node, ast.For)]
    return {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}


def _functions(text: list[str]) -> list[tuple[int, int]]:
    """Return (first line, last line) of every function, with its decorators."""
    try:
        tree = ast.parse("".join(text))
    except SyntaxError:
        return []
    return [
        (min([n.lineno, *(d.lineno for d in n.decorator_list)]), n.end_lineno or n.lineno)
        for n in ast.walk(tree)
        if isinstance(n, ast.FunctionDef)
    ]
