"""One block of a launch as it ran, instruction by instruction. stepper.py shows it.

The simulator runs the threads of a block one after the other. On a GPU the lanes of a warp execute
an instruction together; a lane that skips it is idle. `Recording.steps` restores that order: the
events of the lanes of a warp are merged so that equal positions in the source, in the same
iteration, meet. The run is divided into parts, which all warps begin at the same time: at barriers,
at waits for an mbarrier, and where an asynchronous copy or product ends, which is a step of no
lane. (How far warps run apart in a part, and when a copy ends, is the hardware's choice; the
picture shows one of many orders.)
"""

import ast
import functools
import inspect
import itertools
import linecache
import re
import sys
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from .arrays import Array, is_bits
from .errors import KernelError, Site
from .intrinsics import WARPGROUP
from .launch import Launch
from .memory import BASE
from .observers import ATOMIC, WRITE, Observer, width
from .source import BLOCK_BARRIERS
from .thread import Dim3

WAITS = "waits"  # a thread that did not leave a barrier or a warp function
# parts of a run
RUN = "run"
PRODUCT_ENDS = "product ends"
# The copy engine reads the tensor map, not the thread.
_COPY = re.compile(r"(?:\w+\.)*tma_(?:load|load_row|store)\(")
WARPS = WARPGROUP // 32
SHOWN = (np.generic, int, float, Array)  # types of local variables
MOST_LOCAL = 16  # elements of a local array
MOST_EVENTS = 100_000  # of a block: about as much as a page can hold


class Place(NamedTuple):
    """An array of a recording. bf16: the kernel sees its values as uint16."""

    name: str
    kind: str  # "global" | "shared" | "bytes": shared memory by address, in words of 4 bytes
    shape: tuple[int, ...]
    itemsize: int
    bf16: bool


@dataclass(eq=False)
class Event:
    """What one thread did at one position of the source: an access, or its part in a barrier or
    warp function.

    path: (file, line) of the calls that lead here, and of the position itself.
    how: READ, WRITE, ATOMIC, the name of the barrier or function, or WAITS.
    array: number in Recording.arrays, -1 for none.
    elements: flat indices; several for a 16-byte access.
    engine: "TMA" or "wgmma" if an asynchronous access begins here. The first lane of each warp has
    the elements of a product.
    ended: the asynchronous accesses that end here.
    mbarrier: its first byte, and by how much the arrivals and the bytes that it expects change.
    phase: the one waited for.
    changed: the local variables that have changed since the thread's last event, as they are before
    this one.
    """

    site: Site
    path: tuple[tuple[str, int], ...]
    how: str
    array: int = -1
    elements: list[int] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    engine: str = ""
    ended: list["Event"] = field(default_factory=list)
    mbarrier: tuple[int, int, int] | None = None
    phase: int | None = None
    part: int = 0  # of the run
    changed: dict[str, Any] = field(default_factory=dict)

    @property
    def alone(self) -> bool:
        """Is it a step of its own in each lane? A copy, a wait for one, or a change of an
        mbarrier."""
        changes = self.mbarrier is not None and self.phase is None
        return self.engine == "TMA" or bool(self.ended) or changes


class Step(NamedTuple):
    """An instruction of one warp. time: counts the steps of its warp, equal for all warps after a
    barrier.

    warp -1, without lanes: an asynchronous copy or product ends.
    """

    time: int
    warp: int
    event: Event  # of its first lane: site, path, how, array
    lanes: list[tuple[int, list[int], list[Any]]]  # (thread, elements, values)
    changed: list[dict[str, Any]] = []  # of each lane: its local variables, see Event


@dataclass
class _Block:
    """What is recorded of one block."""

    arrays: list[Place]
    events: list[list[Event]]
    endings: list[Event] = field(default_factory=list)  # of copies and products
    numbers: dict[Any, int] = field(default_factory=dict)
    known: list[dict[str, Any]] = field(default_factory=list)  # the local variables of each thread
    count: int = 0
    part: int = 0
    what: Any = None  # happens in this part of the run
    # warp -> the product that it begins now
    products: dict[int, Event] = field(default_factory=dict)
    # (engine, warp or thread that will wait) -> accesses in flight
    in_flight: dict[tuple, list[Event]] = field(default_factory=dict)

    def begin(self, what: Any = None) -> None:
        """Begin a new part of the run, unless the current one is of this kind."""
        if what is None or what != self.what:
            self.part = self.part + 1
            self.what = what

    def runs(self, first: int, end: int) -> bool:
        """Return True if one of these threads has an event in this part."""
        return any(some and some[-1].part == self.part for some in self.events[first:end])

    def changed(self, thread: Any, frames: list) -> dict[str, Any]:
        """Return the local variables of these functions that have other values than at the thread's
        last event."""
        seen = self.known[thread.index]
        changes = {}
        for depth, frame in enumerate(frames):
            inner = f"{frame.f_code.co_name}." if depth else ""
            for name, value in frame.f_locals.items():
                if name[0] == "_" or not isinstance(value, SHOWN):
                    continue
                if type(value) is Array:
                    if value.memory.kind != "local" or value.flat.size > MOST_LOCAL:
                        continue
                    value = value.flat.tolist()
                old = seen.get(inner + name)
                if old is value or (old == value and type(old) is type(value)):
                    continue
                if value != value and old is not None and old != old:  # NaN
                    continue
                seen[inner + name] = changes[inner + name] = value
        return changes

    def add(self, thread: Any, event: Event) -> None:
        """Append the thread's next event."""
        event.part = self.part
        self.events[thread.index].append(event)


class Recording(Observer):
    """The events of one block of one launch: the block `of`, or the one in which a KernelError
    happens."""

    def __init__(self, of: tuple[int, ...] = (0, 0, 0)):
        self.of = (*of, 0, 0)[:3]
        self.error: KernelError | None = None
        self.launch: Launch | None = None
        self.position = Dim3(*self.of)
        self.arrays: list[Place] = []
        self.events: list[list[Event]] = []  # of each thread
        self.endings: list[Event] = []  # of asynchronous copies and products
        self.ended: list[str] = []  # after an error: where each thread waits or has returned
        self.cut = False  # there were more than MOST_EVENTS
        self._blocks: dict[Any, _Block] = {}  # that have not ended, and the one that is kept
        self._kept: _Block | None = None
        self._found = False  # the block `of` has been recorded: only an error replaces it

    # ------------------------------------------------------------------------- what the simulator calls
    def begin(self, block: Any) -> None:
        if self.launch is not None and block.launch.repeats is self.launch:
            vars(self).update(vars(type(self)(self.of)))
        if self.launch is None:
            self.launch = block.launch
            self._parameters = parameters(block.launch)
        if block.launch is self.launch:
            now = _Block([], [[] for _ in block.threads])
            now.known = [{} for _ in block.threads]
            self._blocks[block] = now
            if not self._found:
                self._keep(block)

    def end(self, block: Any) -> None:
        self._blocks.pop(block, None)

    def _keep(self, block):
        """Let the recording be that of this block."""
        self.position = block.position
        self._kept = self._blocks[block]
        self.arrays = self._kept.arrays
        self.events = self._kept.events
        self.cut = False
        self.endings = self._kept.endings
        self._found = tuple(map(int, self.position)) == self.of

    def access(self, thread: Any, array: Array, k: int, site: Any, how: str, value: Any) -> None:
        now = self._blocks.get(thread.block)
        if now is None or array.memory.kind == "local" or _COPY.match(site.what) or self._full(now):
            return
        size = array.dtype.itemsize
        number, k = self._number(now, array, site, int(k), size)
        if number < 0:
            return
        if now.arrays[number].bf16 and how != ATOMIC:
            value = (np.uint32(int(value)) << np.uint32(16)).view(np.float32)
        now.begin(RUN)
        events = now.events[thread.index]
        last = events[-1] if events else None
        if (
            last is not None and last.site is site and last.how == how and last.array == number
            and last.elements[-1] + 1 == k and len(last.elements) < width(thread.instruction, size)
        ):  # fmt: skip
            last.elements.append(k)
            last.values.append(value)
        else:
            frames = _frames()
            path = (
                *((f.f_code.co_filename, f.f_lineno) for f in frames[:-1]),
                (site.file, site.line),
            )
            changed = now.changed(thread, frames)
            now.add(thread, Event(site, path, how, number, [k], [value], changed=changed))

    def meet(self, threads: Any, name: str, site: Any) -> None:
        now = self._blocks.get(threads[0].block)
        if now is None or self._full(now):
            return
        one_warp = threads[0].warp == threads[-1].warp
        if name in BLOCK_BARRIERS or not (one_warp or now.products):
            now.begin()
        elif one_warp and now.what != PRODUCT_ENDS:
            now.begin(RUN)
        for thread in threads:
            _add_meeting(now, thread, name)
        now.products.clear()

    def _full(self, block):
        block.count += 1
        full = block.count > MOST_EVENTS
        self.cut |= full and block is self._kept
        return full

    def failed(self, block: Any, error: KernelError) -> None:
        self.error = error
        if block not in self._blocks:  # of another launch
            return
        self._keep(block)
        now = self._blocks[block]
        for thread in block.threads:
            generator = thread.generator
            if thread.request and generator is not None and generator.gi_frame is not None:
                _add_meeting(now, thread, WAITS)
                self.ended.append(f"waits in {thread.request[1].what} at {thread.request[1]}")
            else:
                self.ended.append(f"has returned at {thread.left}" if thread.left else "")

    def _number(self, block, array, site, k, size):
        """Return the number of the array, and the flat index of the element in it."""
        if array.memory.kind == "shared":
            key: Any = id(array.memory), size
            name = site.what
            if key not in block.numbers:
                name = _name_in_kernel(array) or name
            place = Place(name, "shared", tuple(map(int, array.dims)), size, False)
        else:
            address = array.flat.__array_interface__["data"][0] + k * size
            holders = [p for p in self._parameters if p[0] <= address < p[1]]
            if not holders:  # constant memory
                return -1, 0
            low, _, place = holders[0]
            key = low
            k = (address - low) // place.itemsize
        if key not in block.numbers:
            block.numbers[key] = len(block.arrays)
            block.arrays.append(place)
        return block.numbers[key], k

    # ------------------------------------------------------------------------- asynchronous engines
    def touched(self, thread: Any, first: int, end: int, site: Any, how: str, engine: str) -> None:
        now = self._blocks.get(thread.block)
        if now is None:
            return
        words = range(first, end)
        if thread.warp in now.products:
            now.products[thread.warp].elements.extend(words)
            return
        if self._full(now):
            return
        number = now.numbers.setdefault("bytes", len(now.arrays))
        if number == len(now.arrays):
            size = len(thread.block.engines.bytes) // 4
            now.arrays.append(Place("shared memory", "bytes", (size,), 4, False))
        first = thread.index // WARPGROUP * WARPGROUP
        if engine != "wgmma":
            now.begin(RUN)
        elif not now.products and (now.what != RUN or now.runs(first, first + WARPGROUP)):
            now.begin()
        path = _waiting(thread, how).path if engine == "wgmma" else _path(site)
        values = [] if engine else [None] * len(words)
        event = Event(site, path, how, number, [*words], values, engine)
        now.add(thread, event)
        if engine == "wgmma":
            now.products[thread.warp] = event
            now.in_flight.setdefault((engine, thread.warp), []).append(event)
        elif engine:
            who = None if how == WRITE else thread
            now.in_flight.setdefault((engine, who), []).append(event)

    def completed(
        self, block: Any, engine: str, thread: Any, site: Any = None, barrier: Any = None
    ) -> None:
        now = self._blocks.get(block)
        who = thread.warp if engine == "wgmma" else thread
        begun = now and now.in_flight.get((engine, who))
        if not now or not begun:  # not recorded
            return
        access = begun.pop(0)
        if site:
            now.begin(RUN)
            now.add(thread, Event(site, _path(site), site.called, ended=[access]))
            return
        # The warps of a warpgroup wait one after the other for the parts of a product.
        if barrier or now.what != PRODUCT_ENDS:
            now.begin(None if barrier else PRODUCT_ENDS)
            how = f"{engine} ends"
            now.endings.append(Event(access.site, access.path, how, engine=engine, part=now.part))
        now.endings[-1].ended.append(access)
        if barrier:
            now.endings[-1].mbarrier = barrier.address - BASE, 0, -4 * len(access.elements)

    def signalled(self, thread: Any, barrier: Any, site: Any, arrivals: int, nbytes: int) -> None:
        now = self._blocks.get(thread.block)
        if now is None or self._full(now):
            return
        if arrivals > 0:  # mbarrier_init, which was recorded as a write
            now.events[thread.index].pop()
        now.begin(RUN)
        mbarrier = barrier.address - BASE, arrivals, nbytes
        now.add(thread, Event(site, _path(site), site.called, mbarrier=mbarrier))

    def waited(self, thread: Any, barrier: Any, site: Any, phase: int) -> None:
        now = self._blocks.get(thread.block)
        if now is None or self._full(now):
            return
        now.begin(site)
        event = _waiting(thread, site.called)
        event.mbarrier = (barrier.address - BASE, 0, 0)
        event.phase = phase
        now.add(thread, event)

    # ------------------------------------------------------------------------- in lockstep
    def steps(self) -> list[Step]:
        """Return the instructions of all warps, by time."""
        parts = [_parts(events) for events in self.events]
        warps = [parts[i : i + 32] for i in range(0, len(parts), 32)]
        endings = _parts(self.endings)
        steps = []
        time = 0
        for part in sorted({*endings}.union(*parts)):
            end = time
            for w, warp in enumerate(warps):
                merged = _merged([lane.get(part, []) for lane in warp])
                for n, (event, members) in enumerate(merged):
                    who = [(32 * w + lane, e.elements, e.values) for lane, e in members]
                    changed = [e.changed for _, e in members]
                    if event.alone:
                        for (_, e), one in zip(members, who):
                            steps.append(Step(time + n, w, e, [one], [e.changed]))
                    else:
                        steps.append(Step(time + n, w, event, who, changed))
                end = max(end, time + len(merged))
            for event in endings.get(part, ()):
                steps.append(Step(time, -1, event, []))
                end = max(end, time + 1)
            time = end
        return sorted(steps, key=lambda step: (step.time, step.warp))


# ----------------------------------------------------------------------------- merging the lanes of a warp
def _parts(events) -> dict[int, list[Event]]:
    """Return the events of each part of the run."""
    return {part: list(some) for part, some in itertools.groupby(events, lambda event: event.part)}


@functools.cache
def _loops_of(file: str) -> list[tuple[int, int]]:
    """Return (first line, last line) of every loop in a file, outer loops first."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return []
    loops = (n for n in ast.walk(tree) if isinstance(n, ast.For | ast.While))
    return sorted((n.lineno, -(n.end_lineno or n.lineno)) for n in loops)


@functools.cache
def _around(path: tuple[tuple[str, int], ...]) -> tuple:
    """Return the loops around a place, outer loops first: (calls that lead to the loop's function,
    its first line)."""
    loops = []
    for depth, (file, line) in enumerate(path):
        starts = [first for first, last in _loops_of(file) if first <= line <= -last]
        loops += [(path[:depth], first) for first in starts]
    return tuple(loops)


def _keyed(events):
    """Return [(key, event)]. Two lanes execute an instruction together if their keys are equal.

    A key is the position in the source, with the lines of the calls that lead there, and the number
    of the iteration of each loop around it. An iteration begins where a thread goes back in the
    source, or comes to a position for the second time.
    """
    keyed: list[tuple] = []
    turns: list[list] = []  # [loop, iteration], outer loops first
    used: set = set()
    before: tuple = ()
    for event in events:
        loops = _around(event.path)
        common = 0
        while common < min(len(loops), len(turns)) and turns[common][0] == loops[common]:
            common += 1
        if common and event.path < before[: len(event.path)]:  # longer: a function has returned
            turns[common - 1][1] += 1
        turns = turns[:common] + [[loop, 0] for loop in loops[common:]]
        key = _key(event, turns)
        if key in used and common:
            turns[common - 1][1] += 1
            turns[common:] = [[loop, 0] for loop in loops[common:]]
            key = _key(event, turns)
        while key in used:
            key = (*key[:-1], key[-1] + 1)
        used.add(key)
        before = event.path
        keyed.append((key, event))
    return keyed


def _key(event, turns):
    """Return a key, ordered as in a run of one thread. The last number counts events that are
    otherwise the same."""
    iterations = tuple((first, n) for (_, first), n in turns)
    at = event.site.column, event.how, event.array
    return iterations, tuple(line for _, line in event.path), at, 0


def _merged(lanes):
    """Return [(event, [(lane, its event)])] of the lanes of one warp, in an order that fits every
    lane.

    An instruction is next if no lane that executes it has another one to execute before.
    """
    keyed = [_keyed(events) for events in lanes]
    where = [{key: i for i, (key, _) in enumerate(lane)} for lane in keyed]
    at = [0] * len(lanes)
    instructions = []
    while True:
        heads: dict = {}
        for lane, (events, i) in enumerate(zip(keyed, at)):
            if i < len(events):
                heads.setdefault(events[i][0], []).append(lane)
        if not heads:
            return instructions
        free = [
            key for key, members in heads.items()
            if all(i <= at[lane] or lane in members for lane, places in enumerate(where) if (i := places.get(key, -1)) >= 0)
        ]  # fmt: skip
        key = min(free or heads)
        members = [(lane, keyed[lane][at[lane]][1]) for lane in heads[key]]
        instructions.append((members[0][1], members))
        for lane in heads[key]:
            at[lane] += 1


# ----------------------------------------------------------------------------- places
def _frames() -> list:
    """Return the kernel and the device functions that run now, the kernel first."""
    frame: Any = sys._getframe(2)
    frames: list = []
    while frame is not None:
        if frame.f_code.co_varnames[:1] == ("_t",):
            frames.append(frame)
        elif frames:
            break
        frame = frame.f_back
    return frames[::-1]


def _path(site):
    """Return the calls that lead to the access that is observed now, and its line."""
    frames = _frames()
    lines = ((f.f_code.co_filename, f.f_lineno) for f in frames[:-1])
    return (*lines, (site.file, site.line))


def _name_in_kernel(array):
    """Return the kernel's variable for this shared array, which a device function may call
    otherwise; None if there is none."""
    frame: Any = sys._getframe(2)
    name = None
    while frame is not None:
        if frame.f_code.co_varnames[:1] == ("_t",):
            for local, value in frame.f_locals.items():
                if type(value) is Array and value.memory is array.memory:
                    name = local
                    break
        frame = frame.f_back
    return name


def _add_meeting(block, thread, how):
    """Add the event of a thread that waits, or has waited until now. Of a product a first lane has
    it already, see `touched`."""
    event = _waiting(thread, how)
    generator = thread.generator
    frames = []
    while generator is not None:
        frames.append(generator.gi_frame)
        generator = generator.gi_yieldfrom
    event.changed = block.changed(thread, frames)
    first = thread.warp // WARPS * WARPS
    product = block.products.get(first)
    if product is None:
        block.add(thread, event)
    elif thread.lane or thread.warp not in block.products:
        words = []
        if not thread.lane:
            words = product.elements
        block.add(thread, replace(product, path=event.path, elements=words))


def _waiting(thread, how):
    """Return the event of a thread that waits, or has waited until now."""
    site = thread.request[1]
    generator = thread.generator
    lines = []
    while generator is not None:
        lines.append((generator.gi_code.co_filename, generator.gi_frame.f_lineno))
        generator = generator.gi_yieldfrom
    return Event(site, (*lines[:-1], (site.file, site.line)), how)


def parameters(launch):
    """Return (first byte, end, Place) of each array argument."""
    places = []
    names = list(inspect.signature(launch.translated.function).parameters)[1:]  # without the thread
    for name, argument, a in zip(names, launch.given, launch.args):
        if isinstance(a, Array):
            low = a.flat.__array_interface__["data"][0]
            shape = tuple(map(int, a.dims))
            bf16 = is_bits(argument)
            places.append(
                (low, low + a.flat.nbytes, Place(name, "global", shape, a.dtype.itemsize, bf16))
            )
    return places
