"""A recording as a page of HTML: a slider over the steps of a block, its threads, its memory, and the source next to them.

    recording = record(kernel, grid, block, *args)          # block (0, 0, 0); another: of=(1, 0, 0)
    recording.save("rmsnorm.html")

The page needs nothing else and loads nothing. stepper.html is its frame; this module computes what it shows.
"""

import ast
import html
import json
import linecache
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from .block import BLOCK_BARRIERS
from .errors import Site, file_name
from .recording import Event, Recording, Step

FRAME = Path(__file__).with_name("stepper.html")
HEIGHT = 720  # pixels in a notebook


class Stepper(Recording):
    """A recording that can be looked at. In a notebook it shows itself."""

    def page(self) -> str:
        """The page: HTML that needs nothing else."""
        data = json.dumps(contents(self), separators=(",", ":")).replace("<", "\\u003c")
        name = self.launch.name if self.launch else ""
        frame = FRAME.read_text(encoding="utf-8")
        return frame.replace("TITLE", html.escape(name), 1).replace("DATA", data, 1)

    def save(self, path: str | Path) -> Path:
        """Write the page to a file. -> the file"""
        path = Path(path)
        path.write_text(self.page(), encoding="utf-8")
        return path

    def __repr__(self) -> str:
        name = self.launch.name if self.launch else "nothing"
        times = {step.time for step in self.steps()}
        return f'<{name}, block {self.position}, {len(times)} steps: save("FILE.html") writes them as a page>'

    def _repr_html_(self) -> str:
        """The page in a frame, apart from the notebook's own styles and scripts."""
        return (
            f'<iframe srcdoc="{html.escape(self.page())}" title="the threads of a block, step by step" '
            f'style="width:100%;height:{HEIGHT}px;box-sizing:border-box;border:1px solid #8884;border-radius:6px"></iframe>'
        )


def contents(recording: Recording) -> dict[str, Any]:
    """What the page shows, as JSON has it."""
    steps, launch = recording.steps(), recording.launch
    paths = [step.event.path for step in steps]
    error_sites = recording.error.sites if recording.error else ()
    places = [place for path in paths for place in path] + [(s.file, s.line) for s in error_sites]
    files = _files(dict.fromkeys(places))
    numbers = {file: i for i, (file, _) in enumerate(files)}
    lines = lambda path: [[numbers[file], line] for file, line in path if file in numbers]
    return {
        "kernel": launch.name if launch else "",
        "grid": ", ".join(map(str, launch.grid)) if launch else "",
        "position": ", ".join(map(str, recording.position)),
        "threads": len(recording.events),
        "cut": recording.cut,
        "engines": recording.engines,
        "ended": recording.ended,
        "files": [{"title": file_name(file), "functions": parts} for file, parts in files],
        "arrays": [
            {"name": a.name, "kind": a.kind, "shape": a.shape, "size": a.itemsize, "count": math.prod(a.shape)}
            for a in recording.arrays
        ],
        "steps": [_step(step, lines(path)) for step, path in zip(steps, paths)],
        "error": _error(recording, steps, lines),
    }  # fmt: skip


def _step(step: Step, path: list) -> dict[str, Any]:
    """t: time.  w: warp.  p: path.  h: how.  a: array.  b: a barrier?  l, e, v: thread, element and value of each access"""
    lanes, elements, values = [], [], []
    for thread, some, found in step.lanes:
        lanes += [thread] * max(1, len(some))
        elements += some
        values += [_number(v) for v in found]
    barrier = step.event.how in BLOCK_BARRIERS
    return dict(
        t=step.time, w=step.warp, p=path, h=step.event.how, a=step.event.array, b=barrier, l=lanes, e=elements, v=values,
    )  # fmt: skip


def _number(value):
    """A value with four digits, as JSON has numbers; text for what JSON has not."""
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, (float, np.floating)):
        value = float(f"{float(value):.4g}")
        return value if math.isfinite(value) else str(value)
    return None if value is None else str(value)


def _error(recording: Recording, steps: list[Step], lines) -> dict[str, Any] | None:
    """The error's text and lines, and where it shows: time, thread, cells, one sentence. time -1: nowhere."""
    error = recording.error
    if error is None:
        return None
    found: dict[str, Any] = {
        "text": str(error),
        "lines": lines([(s.file, s.line) for s in error.sites]),
    }
    found |= {
        "time": steps[-1].time if steps else -1,
        "thread": -1,
        "cells": [],
        "told": "the error shows here",
    }
    thread = error.thread
    if thread is None or not recording.events[thread]:
        return found
    event = recording.events[thread][-1]
    times = [s.time for s in steps for lane in s.lanes if lane[0] == thread]
    found |= {"time": times[-1], "thread": thread, "told": f"thread {thread} causes the error here"}
    if event.array >= 0:
        k = event.elements[-1]
        found["cells"] = [[event.array, k]]
        others = _others(recording, steps, thread, event, k, error.sites)
        if others:
            found["told"] += f"; the other access is in step {others[-1] + 1}"
    return found


def _others(recording, steps, thread, event: Event, k: int, sites: tuple[Site, ...]) -> list[int]:
    """The times at which other threads access the element of the error, at the other place that it names."""
    places = {site for site in sites if site != event.site} or {event.site}
    return [
        step.time for step in steps
        if step.event.array == event.array and step.event.site in places
        and any(lane[0] != thread and k in lane[1] for lane in step.lanes)
    ]  # fmt: skip


# ----------------------------------------------------------------------------- the source
def _files(places: Iterable[tuple[str, int]]) -> list[tuple[str, list[dict[str, Any]]]]:
    """[(file, functions that contain one of the places)], in the order of the places: the kernel's file first"""
    lines: dict[str, list[int]] = {}
    for file, line in places:
        lines.setdefault(file, []).append(line)
    found = []
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
        found.append((file, parts))
    return found


def _functions(text: list[str]) -> list[tuple[int, int]]:
    """(first line, last line) of every function, with its decorators."""
    try:
        tree = ast.parse("".join(text))
    except SyntaxError:
        return []
    return [
        (min([n.lineno, *(d.lineno for d in n.decorator_list)]), n.end_lineno or n.lineno)
        for n in ast.walk(tree)
        if isinstance(n, ast.FunctionDef)
    ]
