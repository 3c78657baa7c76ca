"""The kernel table: when each kernel runs, for which op, and how close it comes to the GPU's limits.

    record    one eager step with observers: the launches, each with op, layer, bytes, operations
    time      CUPTI (package cupti-python) reports start and end of every kernel, also inside a
              CUDA graph; without CUPTI, CUDA events around each launch of an eager step
    match     a step always launches the same kernels in the same order, so the lists are aligned

The cost of a launch is declared next to each kernel (kernels/runtime/cost.py): the bytes that it
must move, and its operations, where a multiply-add counts as two.
"""

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..device import cupy
from ..kernels.cast import BFLOAT16
from ..kernels.fp8 import Slot, fp8
from ..kernels.fp8_gemm import fp8_matmul
from ..kernels.gemm import matmul
from ..kernels.runtime.launch import LaunchEvent, observe_launches
from ..nn.observers import Op, OpObserver, observe_ops


@dataclass(frozen=True)
class Launch:
    """A kernel, or a product by cuBLAS, in the order of a step. nbytes, flops: None if unknown."""

    name: str
    op: str
    way: str
    layer: str
    nbytes: int | None
    flops: float | None


@dataclass(frozen=True)
class Timed:
    """One activity of the GPU. start, end: nanoseconds. launch: None if xtrain did not launch it
    (CuPy's fills and copies)."""

    name: str
    start: int
    end: int
    launch: Launch | None = None


# ----------------------------------------------------------------------------- record
class Recorder:
    """Records the launches of steps.

    launches: in order.
    events: with events=True, the two CUDA events around each launch; timed() reads them.
    """

    def __init__(self, events: bool = False):
        self.launches: list[Launch] = []
        self.events: list[tuple[Any, Any]] | None = [] if events else None
        self.open_ops = [Op("", "", "")]  # the last one is running

    def __call__(self, step: Callable[[], Any], observer: OpObserver | None = None) -> None:
        """Run step() and record it.

        observer: also receives every op and layer (observe_ops)
        """
        with contextlib.ExitStack() as stack:
            if observer is not None:
                stack.enter_context(observe_ops(observer))
            stack.enter_context(observe_ops(self._during))
            stack.enter_context(observe_launches(self._record))
            step()

    @contextlib.contextmanager
    def _during(self, op: Op) -> Iterator[None]:
        self.open_ops.append(op)
        try:
            yield
        finally:
            self.open_ops.pop()

    def _record(self, event: LaunchEvent, start: Callable[[], None]) -> None:
        op = self.open_ops[-1]
        cost = event.cost()
        launch = Launch(event.name, op.name, op.way, op.layer, cost.nbytes, cost.flops)
        self.launches.append(launch)
        if self.events is None:
            start()
            return
        before = cupy().cuda.Event()
        after = cupy().cuda.Event()
        before.record()
        start()
        after.record()
        self.events.append((before, after))

    def timed(self) -> list[Timed]:
        """Return the launches and their times, recorded with events.

        An event takes some microseconds of GPU time, too.
        """
        if self.events is None:
            raise ValueError("this Recorder has no times: make it with events=True")
        cupy().cuda.Device().synchronize()
        first = self.events[0][0]
        since = lambda event: int(1e6 * cupy().cuda.get_elapsed_time(first, event))
        return [
            Timed(launch.name, since(a), since(b), launch)
            for launch, (a, b) in zip(self.launches, self.events)
        ]


# ----------------------------------------------------------------------------- time
class NoTimes(Exception):
    """CUPTI cannot be used. The message is the reason."""


def cupti_times(run: Callable[[], Any]) -> list[Timed]:
    """Call run() under CUPTI and return all activities of the GPU during it, sorted by start.

    Raises NoTimes.
    """
    try:
        from cupti import cupti
    except ImportError as error:  # cupti-python itself, or a package that it needs
        raise NoTimes(f"{error} (pip install cupti-python)") from None
    except (OSError, RuntimeError) as error:
        raise NoTimes(f"cupti-python does not find its library ({error})") from None
    timed: list[Timed] = []
    kinds = cupti.ActivityKind
    watched = (kinds.CONCURRENT_KERNEL, kinds.MEMCPY, kinds.MEMSET)
    names = {kinds.MEMCPY: "copy", kinds.MEMSET: "memset"}

    def completed(activities):  # CUPTI owns the records: copy the fields
        for a in activities:
            timed.append(Timed(names.get(a.kind) or short_name(a.name), a.start, a.end))

    try:
        cupti.activity_register_callbacks(lambda: (8 << 20, 0), completed)
        for kind in watched:
            cupti.activity_enable(kind)
    except cupti.cuptiError as error:  # for example under nsys, which uses CUPTI itself
        raise NoTimes(f"CUPTI is not available ({error})") from None
    try:
        run()
        cupy().cuda.Device().synchronize()
    finally:
        cupti.activity_flush_all(1)
        for kind in watched:
            cupti.activity_disable(kind)
    return sorted(timed, key=lambda t: t.start)


def short_name(mangled: str) -> str:
    """Return the function name in a mangled kernel name.

    Example: _ZN6xtrain...18rmsnorm_fwd_kernelB2v1...
    """
    if not mangled.startswith("_Z"):
        return mangled
    encoded = mangled[3 if mangled.startswith("_ZN") else 2 :]
    name = mangled
    while match := re.match(r"(\d+)", encoded):
        length = int(match[1])
        encoded = encoded[match.end() :]
        name, encoded = encoded[:length], encoded[length:]
        if name in ("Kernel", "Kernel2") and encoded.startswith("I"):
            encoded = encoded[1:]  # CUTLASS: the name is the template argument
    return name


# ----------------------------------------------------------------------------- match
def match(times: list[Timed], launches: list[Launch]) -> list[Timed]:
    """Give each time its launch.

    launches: of one step
    times: of one or several steps, in order
    """
    ours = {launch.name for launch in launches}
    i = 0
    out: list[Timed] = []
    for t in times:
        if t.name in ours:
            while launches[i % len(launches)].name != t.name:  # skip a product without a record
                i += 1
        elif not (_may_be_product(t.name) and launches[i % len(launches)].name[:7] == "product"):
            out.append(t)
            continue
        out.append(replace(t, launch=launches[i % len(launches)]))
        i += 1
    return out


def _may_be_product(name):
    return not name.startswith(("copy", "memset", "cupy_", "splitKreduce"))


@dataclass
class Row:
    """One line of the table: all launches of one name and op, per step. ns: nanoseconds."""

    name: str
    op: str
    calls: float
    ns: float
    nbytes: float | None
    flops: float | None


def rows(times: list[Timed], steps: int) -> list[Row]:
    """Sum the times by kernel and op, per step, longest first.

    steps: how many steps `times` covers
    """
    table: dict[tuple, Row] = {}
    for t in times:
        launch = t.launch or Launch(t.name, "", "", "", None, None)
        op = f"{launch.op} {launch.way}".strip()
        row = table.setdefault((launch.name, op), Row(launch.name, op, 0, 0, 0, 0.0))
        row.calls = row.calls + 1
        row.ns = row.ns + t.end - t.start
        if launch.nbytes is None:
            row.nbytes = None
        else:
            row.nbytes = (row.nbytes or 0) + launch.nbytes
        if launch.flops is None:
            row.flops = None
        else:
            row.flops = (row.flops or 0.0) + launch.flops
    for row in table.values():
        row.ns, row.calls = row.ns / steps, row.calls / steps
        row.nbytes = row.nbytes and row.nbytes / steps
        row.flops = row.flops and row.flops / steps
    return sorted(table.values(), key=lambda row: -row.ns)


def without_first_step(times: list[Timed], launches: list[Launch]) -> list[Timed]:
    """Drop the times before the second step's first launch.

    The first step under CUPTI waits for its setup.
    """
    starts = [i for i, t in enumerate(times) if t.launch is launches[0]]
    return times[starts[1] :]


def busy_share(times: list[Timed]) -> float:
    """Return the share of the time from first to last in which at least one kernel ran."""
    busy = 0
    until = times[0].start
    for t in times:
        busy += max(0, t.end - max(t.start, until))
        until = max(until, t.end)
    return busy / (until - times[0].start)


# ----------------------------------------------------------------------------- limits and trace
def limits(precision: str) -> tuple[float, float]:
    """Measure the card: bytes per second of a copy on the device, and operations per second.

    Read plus written bytes; a product of 8192^3; each the best of ten runs. A kernel whose data is
    still in the L2 cache can exceed the copy's rate.
    """
    cp = cupy()
    a, b = (cp.empty(1 << 28, np.uint8) for _ in range(2))
    copy = _seconds(
        lambda: b.data.copy_from_device_async(a.data, a.nbytes, cp.cuda.get_current_stream())
    )
    numbers = np.random.default_rng(0).standard_normal((2048, 8192), np.float32)
    # not zeros, which would be faster: power depends on how many bits change
    numbers = np.tile(numbers, (4, 1))
    x = cp.asarray(numbers if precision == "fp32" else numbers.astype(BFLOAT16))
    y = cp.empty_like(x)
    if precision == "fp8":
        ones = cp.ones(1, np.float32)
        bits = cp.zeros(1, np.int32)
        codes = fp8(x, Slot(ones, bits, cp.zeros(2, np.int64), "e4m3"))
        product = _seconds(lambda: fp8_matmul(y, codes.rows, codes.rows))
    else:
        product = _seconds(lambda: matmul(y, x, x))
    return 2 * a.nbytes / copy, 2 * 8192**3 / product


def _seconds(f):
    times = []
    for _ in range(12):
        start = cupy().cuda.Event()
        end = cupy().cuda.Event()
        start.record()
        f()
        end.record()
        end.synchronize()
        times.append(cupy().cuda.get_elapsed_time(start, end) / 1e3)
    return min(times[2:])


def chrome_trace(times: list[Timed]) -> dict[str, Any]:
    """Return a trace for ui.perfetto.dev and chrome://tracing: kernels, their ops and layers."""
    tracks = {"layers": 1, "ops": 2, "kernels": 3}
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "tid": tid, "name": "thread_name", "args": {"name": name}}
        for name, tid in tracks.items()
    ]
    zero = times[0].start if times else 0
    open_spans: dict[str, dict[str, Any]] = {}

    def span(track, name, t, args):
        event = {
            "ph": "X",
            "pid": 0,
            "tid": tracks[track],
            "name": name,
            "ts": (t.start - zero) / 1e3,
            "dur": (t.end - t.start) / 1e3,
            "args": args,
        }
        events.append(event)
        return event

    for t in times:
        launch = t.launch
        facts = {}
        if launch is not None:
            facts = {"bytes": launch.nbytes, "operations": launch.flops}
        span("kernels", t.name, t, facts | ({"launch": launch.name} if launch else {}))
        for track in ("layers", "ops"):
            owner = ""
            if launch is not None:
                if track == "layers":
                    owner = launch.layer
                else:
                    owner = launch.op
            name = ""
            if launch is not None and owner:
                name = f"{owner} {launch.way}"
            last = open_spans.get(track)
            if last is not None and last["name"] == name:
                last["dur"] = (t.end - zero) / 1e3 - last["ts"]
            elif name:
                open_spans[track] = span(track, name, t, {})
            elif launch is not None:
                open_spans.pop(track, None)
    return {"traceEvents": events, "displayTimeUnit": "ns"}
