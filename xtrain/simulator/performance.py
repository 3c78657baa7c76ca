"""Findings about speed, off by default: `enable={"bank_conflict", "uncoalesced", "divergent_warp",
"float64", "order_dependent"}`.

An instruction is a position in the source: the n-th access of a lane there belongs to the n-th
accesses of the other lanes of its warp, as in the hardware if they take the same path. Each line is
one finding, with the factor over the whole launch:

bank_conflict     passes over the banks of shared memory / passes that the bytes need
uncoalesced       32-byte sectors of global memory / sectors that the bytes need, without caches
divergent_warp    warps that execute the line / warps that its active threads would fill. Not
                  counted is one lane per warp, as where lane 0 writes the sum of its warp
float64           a float64 value is stored to an array of narrower floats
order_dependent   an atomic that adds floats of several threads to one element, and rounds
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np

from .errors import KernelError, where
from .observers import ATOMIC, WRITE, Observer, width

BANKS = 32
SECTOR = 32  # bytes: the unit in which memory and caches of NVIDIA GPUs transfer data
LEAST = 1.5  # a smaller factor is not a finding
KINDS = {"bank_conflict", "uncoalesced", "divergent_warp", "float64", "order_dependent"}


def passes(words: Iterable[int]) -> int:
    """Return the passes that an access of a warp to these 4-byte words of shared memory takes."""
    banks = defaultdict(set)
    for word in words:
        banks[word % BANKS].add(word)
    return max(map(len, banks.values()), default=0)


def sectors(first_bytes: Iterable[int]) -> int:
    """Return the 32-byte sectors of an access of a warp to elements that begin at these bytes."""
    return len({byte // SECTOR for byte in first_bytes})


class _Line:
    """What is known of one instruction in one launch."""

    def __init__(self):
        self.taken = 0  # passes, sectors or warps
        self.needed = 0

    @property
    def factor(self) -> float:
        return self.taken / max(self.needed, 1)


class Performance(Observer):
    """Counts in one launch what the kinds that are reported ask for."""

    def __init__(self, kinds):
        self.kinds = KINDS & kinds
        self.turns: dict = defaultdict(int)  # (block, thread, instruction) -> elements so far
        # block -> (instruction, turn) -> warp -> [(lane, byte)]
        self.groups: dict = {}
        self.lines: dict = defaultdict(_Line)  # (kind, site) -> _Line
        self.stores: dict = {}  # site -> (thread, dtype)
        self.sums: dict = {}  # (memory, element) -> [first thread, has a sum been rounded?]
        self.ordered: dict = {}  # site -> (thread, array, first thread)

    def begin(self, block: Any) -> None:
        self.groups[block] = defaultdict(lambda: defaultdict(list))

    def access(self, thread: Any, array: Any, k: int, site: Any, how: str, value: Any) -> None:
        size = array.dtype.itemsize
        if how == WRITE and isinstance(value, np.float64) and array.dtype.kind in "fV" and size < 8:
            self.stores.setdefault(site, (thread, array.dtype))
        if array.memory.kind == "local" or how == ATOMIC:
            return
        # from the first byte of the memory, which a GPU aligns
        byte = (array.bias + k * array.stride) * array.memory.granule
        instruction = site, how, array.memory.kind, size
        which = thread.block, thread.index, instruction
        turn = self.turns[which] // width(thread.instruction, size)
        self.turns[which] += 1
        self.groups[thread.block][instruction, turn][thread.warp].append((thread.lane, byte))

    def added(self, thread: Any, array: Any, k: int, site: Any, old: Any, value: Any) -> None:
        if array.dtype.kind != "f":
            return
        state = self.sums.setdefault((array.memory, array.bias + k * array.stride), [thread, False])
        state[1] = state[1] or _rounds(old, value)
        if state[1] and state[0] is not thread:
            self.ordered.setdefault(site, (thread, state[0]))

    def end(self, block: Any) -> None:
        """Count the instructions of a block."""
        for ((site, _, memory, size), _), warps in self.groups.pop(block).items():
            active = 0
            for accesses in warps.values():
                active += len({lane for lane, _ in accesses})
                self._count(memory, site, size, {byte for _, byte in accesses})
            if active > len(warps):
                line = self.lines["divergent_warp", site]
                line.taken += len(warps)
                line.needed += math.ceil(active / 32)
        for which in [which for which in self.turns if which[0] is block]:
            del self.turns[which]

    def _count(self, memory, site, size, first_bytes):
        if memory == "shared":
            words = {w for b in first_bytes for w in range(b // 4, (b + size - 1) // 4 + 1)}
            line = self.lines["bank_conflict", site]
            line.taken += passes(words)
            line.needed += math.ceil(len(words) / BANKS)
        else:
            line = self.lines["uncoalesced", site]
            line.taken += sectors(first_bytes)
            line.needed += math.ceil(len(first_bytes) * size / SECTOR)

    def finished(self, launch: Any) -> None:
        """Report the findings: the largest factors first."""
        divergent = set()  # lines: all accesses of one have the same threads
        for (kind, site), line in sorted(self.lines.items(), key=lambda pair: -pair[1].factor):
            known = kind == "divergent_warp" and (site.file, site.line) in divergent
            if line.factor >= LEAST and kind in self.kinds and not known:
                if kind == "divergent_warp":
                    divergent.add((site.file, site.line))
                _report(launch, kind, site, _TEXTS[kind].format(what=site.what, line=line))
        for site, (thread, dtype) in self.stores.items():
            text = (
                f"float64 arithmetic {where(thread, site)}: a float64 value is stored to "
                f"{site.what}, an array of {dtype}, at {site}: a GPU computes float64 at 1/2 to "
                "1/64 of the speed of float32; write float32(...) around constants, integers and "
                "arguments of the expression"
            )
            _report(launch, "float64", site, text)
        for site, (thread, first) in self.ordered.items():
            text = (
                f"sum that depends on the order of threads {where(thread, site)}: {first} and "
                f"{thread} add to one element of {site.what} at {site}, and the sum is rounded: "
                "its last bits differ from run to run; add in a fixed order, or integers"
            )
            _report(launch, "order_dependent", site, text)


_TEXTS = {
    "bank_conflict": "bank conflicts in {what}: {line.taken} passes over the banks of shared memory where "
    "{line.needed} would do, {line.factor:.1f} x: let the lanes of a warp access consecutive words, "
    "or make each row one element longer",
    "uncoalesced": "uncoalesced accesses to {what}: {line.taken} sectors of 32 bytes where {line.needed} "
    "would do, {line.factor:.1f} x: let the lanes of a warp access consecutive elements",
    "divergent_warp": "divergent warps at {what}: {line.taken} warps execute the line for threads that would "
    "fill {line.needed}, {line.factor:.1f} x: let whole warps take the same branch",
}


def _report(launch, kind, site, text):
    if kind in ("bank_conflict", "uncoalesced", "divergent_warp"):
        text = f"{launch.name}, at {site}: {text}"
    launch.report(kind, (site,), lambda: KernelError(text, (site,), kind))


def _rounds(a, b) -> bool:
    """Is the sum of two floats inexact? (TwoSum, Knuth)"""
    a = type(b)(a)
    total = a + b
    part = total - a
    return bool((a - (total - part)) + (b - part) != 0)
