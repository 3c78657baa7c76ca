"""Launches in several orders of blocks, warps and lanes: `run(..., schedules=8)`, `pytest
--simulate-cuda --cuda-schedules 8`.

In the usual order, blocks and threads run by their numbers, each up to where it waits. In the order
of a seed

- blocks begin, and the threads of a block run, in a random order;
- a thread may stop before an atomic, and before the first test of a loop that waits, until no other
  thread of its block can run, or until other blocks have run. A thread stops at most PAUSES times,
  so that what waits forever is still noticed.

So two blocks that take two locks in opposite orders each hold one of them, and an atomic read and
the atomic write that follows it are separated by those of other threads. One seed gives one order,
so a finding can be repeated: it names its seed. Findings that the usual order has, too, come from
it. Every order starts from the same memory, and what the usual order leaves there remains. A result
that differs is the finding `order_dependent`.
"""

import contextlib
import io
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from .errors import KernelError, Reported, reported_kinds
from .launch import Launch, previous
from .schedules import Schedule


class Orders(NamedTuple):
    """Which orders a launch runs in. usual: of the launch itself; None: by the numbers. seeds: of
    those that run in addition."""

    usual: Schedule | None
    seeds: range

    def reported(self, allow, enable) -> Reported:
        """Return the kinds of findings to report."""
        if self.seeds:
            reported = reported_kinds(allow, (*enable, "order_dependent"))
        else:
            reported = reported_kinds(allow, enable)
        reported.asked = frozenset(enable) & reported
        return reported

    def run(self, launch: Launch, make: Callable[[Schedule | None], Launch]) -> None:
        """Run a launch in all orders. make: a new launch of the same. Reports and raises as the
        launch does."""
        before = _Memory(launch)
        runs = []
        for seed in self.seeds:
            other = make(Schedule(seed))
            other.observers = ()
            with contextlib.redirect_stdout(io.StringIO()):  # it prints once
                findings = other.findings()
            runs.append(_Run(seed, findings, before.values()))
            before.restore()
            if not launch.collects and runs[-1].failed:
                break
        launch.run()
        known = {(finding.kind, finding.sites) for finding in launch.found.values()}
        for run in runs:
            for finding in run.findings:
                if (finding.kind, finding.sites) not in known:
                    known.add((finding.kind, finding.sites))
                    if launch.observers and finding.severity == "error":
                        before.restore()
                        _observe(launch, make(Schedule(run.seed)))
                    told = _with_seed(finding, run.seed)
                    launch.report(finding.kind, finding.sites, lambda told=told: told)
        _compare(launch, before, [run for run in runs if not run.failed])


def orders_of(schedules: int, seed: int | None) -> Orders:
    """Return the orders that `run` is asked for. Raises ValueError for numbers that are not
    positive."""
    if type(schedules) is not int or schedules < 1:
        raise ValueError(f"schedules={schedules!r} is not a positive integer")
    if seed is None:
        return Orders(None, range(1, schedules))
    if type(seed) is not int or seed < 0:
        raise ValueError(f"seed={seed!r} is not a number of at least 0")
    return Orders(Schedule(seed), range(0))


class _Run(NamedTuple):
    seed: int
    findings: list[KernelError]
    values: list[np.ndarray]

    @property
    def failed(self) -> bool:
        return any(finding.severity == "error" for finding in self.findings)


class _Memory:
    """The memory that a launch may change, as it is now."""

    def __init__(self, launch):
        copied = {id(a) for _, a in launch.records}  # they stand for records
        arrays = [a for a in launch.given_arrays() if a.flags.writeable and id(a) not in copied]
        self.arrays = [(a, a.copy()) for a in arrays]
        records = [record for record, _ in launch.records if record.flags.writeable]
        self.records = [(record, record.copy()) for record in records]
        unwritten = [m.unwritten for m in launch.memories if m.unwritten is not None]
        self.bits = [(u.bits, u.bits.copy()) for u in unwritten]
        self.previous = launch.previous

    def restore(self) -> None:
        for a, before in (*self.arrays, *self.bits):
            a[...] = before
        for record, before in self.records:
            for name in record.dtype.names:
                record[name] = before[name]
        previous.last = self.previous

    def values(self) -> list[np.ndarray]:
        """Copies of the arrays as they are now."""
        return [a.copy() for a, _ in self.arrays]


def _observe(launch, again):
    """Run a launch again, so that observers see the finding."""
    again.repeats = launch
    with contextlib.suppress(KernelError), contextlib.redirect_stdout(io.StringIO()):
        again.run()


def _with_seed(finding, seed):
    """Return the finding, which says how to repeat it."""
    finding.args = (
        f"{finding}\n    in another order of blocks and warps, which seed {seed} repeats: "
        f"pytest --cuda-seed {seed}, simulate(seed={seed}) or run(..., seed={seed})",
    )
    return finding


def _compare(launch, memory, runs):
    """Report each array whose values depend on the order."""
    for number, (array, _) in enumerate(memory.arrays):
        for run in runs:
            other = run.values[number]
            elements = _changed(array, other)
            if len(elements):
                _report(launch, array, other, elements, run.seed)
                break


def _changed(a, b) -> np.ndarray:
    """Return the flat indices of the elements that differ in their bits."""
    flat = [np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in (a, b)]
    rows = [x.reshape(a.size, x.size // max(a.size, 1)) for x in flat]
    return np.flatnonzero((rows[0] != rows[1]).any(axis=1))


def _report(launch, array, other, elements, seed):
    index = tuple(map(int, np.unravel_index(int(elements[0]), array.shape)))
    name, sites = launch.last_change(array, index)
    text = (
        f"result that depends on the order of threads in {launch.name}: "
        f"{name}[{', '.join(map(str, index))}] is {array[index]} in the usual order and "
        f"{other[index]} in another one; {len(elements)} of {array.size} elements differ"
    )
    if sites:
        text += f"; last changed at {sites[0]}"
    finding = _with_seed(KernelError(text, sites, "order_dependent"), seed)
    launch.report("order_dependent", sites, lambda: finding)
