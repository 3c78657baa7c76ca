"""When did which kernel run, for which op, and how near is it to what the card can do?

    record    one eager step under watch.py: the sequence of launches, each with its op, its layer,
              its bytes, its operations
    time      CUPTI (the package cupti-python) notes start and end of every kernel, also of those
              inside a CUDA graph; without it, CUDA events around each launch of an eager step
    match     a step always starts the same kernels in the same order, so the two lists are laid
              side by side

Bytes are those a kernel must move: each array once, those that it reads and overwrites twice. Operations count a
multiply-add as two, a causal attention as half of the square.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..device import cupy
from ..kernels.cast import BFLOAT16
from ..kernels.gemm import matmul
from ..kernels.primitives.tensor_maps import tensors_of
from ..nn.model import Transformer
from ..nn.observers import watch_launches, watch_ops

IN_PLACE = {  # which of a kernel's arrays are read and overwritten
    "adamw_kernel": (0, 1, 2),
    "cross_entropy_kernel": (1,),
    "scale_into_kernel": (0,),
    "swiglu_bwd_again_kernel": (1,),
    "causal_softmax_fwd_warp_kernel": (0,),
    "causal_softmax_fwd_row_kernel": (0,),
    "causal_softmax_fwd_kernel": (0,),
    "causal_softmax_bwd_warp_kernel": (0,),
    "causal_softmax_bwd_row_kernel": (0,),
    "causal_softmax_bwd_kernel": (0,),
}
DEPENDS_ON_IDS = ("embedding_sort_kernel", "embedding_bwd_kernel", "embedding_join_kernel")
ATTENTION = {  # how many products of T x S x D per head; which argument has (B T H D) elements
    "flash_attention_fwd_kernel": (2, 0),
    "flash_attention_dq_kernel": (3, 0),
    "flash_attention_dkdv_kernel": (4, 2),
    "flash_attention_whole_kernel": (5, 0),
}
ATTENTION_BY_MAPS = {  # the same of kernels whose first argument are tensor maps of Q, K, ...
    "flash_attention_hopper_fwd_kernel": 2,
    "flash_attention_hopper_dq_kernel": 3,
    "flash_attention_hopper_dkdv_kernel": 4,
}
# of these arguments, parts of packed arrays, a kernel touches as many bytes as of those others together
PARTS = {
    "flash_attention_fwd_kernel": {4: (3,)},  # v: as of k
    "flash_attention_dq_kernel": {5: (4,)},
    "flash_attention_dkdv_kernel": {1: (0,), 5: (0,)},  # dv and v: as of dk
    "flash_attention_whole_kernel": {2: (1,), 6: (1,)},
    "qk_norm_rope_fwd_kernel": {3: (0, 1)},  # qkv: as of q and k
    "qk_norm_rope_bwd_kernel": {0: (2, 3), 4: (2, 3)},  # dqkv and qkv: as of dq and dk
}


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
    """Something that the GPU did. start, end: nanoseconds. launch: None for what is not ours (CuPy's fills and copies)."""

    name: str
    start: int
    end: int
    launch: Launch | None = None


# ----------------------------------------------------------------------------- record
class Recorder:
    """Watches steps. launches: in order. With `events`, each is timed by two CUDA events: timed()."""

    def __init__(self, events: bool = False):
        self.launches, self.scope, self.events = [], [("", "", "")], [] if events else None

    def __call__(
        self, model: Transformer, step: Callable[[], Any], note: Callable | None = None
    ) -> None:
        """Run step() and take notes. note: also told about every op and layer (watch_ops)."""
        self.outer = note
        with watch_ops(model, self._note), watch_launches(self._kernel, self._product):
            step()

    def _note(self, op, way, layer):
        return _Scope(self.scope, (op, way, layer), self.outer)

    def _kernel(self, start, kernel, args):
        name = kernel.py_func.__name__
        self._launch(start, name, _kernel_bytes(name, kernel, args), _attention_flops(name, args))

    def _product(self, start, c, a, b):
        batch = c.shape[0] if c.ndim == 3 else 1
        K = round((a.size * b.size / (c.size * batch)) ** 0.5)  # (M K) (K N) / (M N) = K^2
        name = f"product {batch} x {c.shape[-2]} x {c.shape[-1]} x {K}"
        name = name.replace("product 1 x", "product")
        self._launch(start, name, a.nbytes + b.nbytes + c.nbytes, 2.0 * c.size * K)

    def _launch(self, start, name, nbytes, flops):
        self.launches.append(Launch(name, *self.scope[-1], nbytes, flops))
        if self.events is None:
            start()
            return
        pair = [cupy().cuda.Event() for _ in range(2)]
        pair[0].record()
        start()
        pair[1].record()
        self.events.append(pair)

    def timed(self) -> list[Timed]:
        """With events: what was launched, one after the other. (An event costs the GPU some microseconds too.)"""
        cupy().cuda.Device().synchronize()
        first = self.events[0][0]
        since = lambda event: int(1e6 * cupy().cuda.get_elapsed_time(first, event))
        return [
            Timed(launch.name, since(a), since(b), launch)
            for launch, (a, b) in zip(self.launches, self.events)
        ]


class _Scope:
    """Enters an op in the recorder's list, and in the caller's note."""

    def __init__(self, scope, what, outer):
        self.scope, self.what = scope, what
        self.outer = outer(*what) if outer else None

    def __enter__(self):
        self.scope.append(self.what)
        if self.outer:
            self.outer.__enter__()

    def __exit__(self, *error):
        self.scope.pop()
        if self.outer:
            self.outer.__exit__(*error)


def _kernel_bytes(name, kernel, args):
    arrays = [a for a in args if not isinstance(a, np.generic)]
    if name in DEPENDS_ON_IDS:
        return None
    if name == "embedding_fwd_kernel":  # of the table only the rows that occur
        return 2 * arrays[0].nbytes + arrays[1].nbytes
    once = {a.data.ptr: a.nbytes for a in arrays}
    if name in ATTENTION_BY_MAPS:
        return sum(once.values()) + sum(nbytes for _, nbytes in tensors_of(arrays[0]))
    for i, others in PARTS.get(name, {}).items():
        once[arrays[i].data.ptr] = sum(arrays[j].nbytes for j in others)
    twice = list(IN_PLACE.get(name, ()))
    if name == "adamw_kernel" and _constants(kernel).get("zero_grad"):
        twice.append(4)
    if name == "rmsnorm_bwd_kernel" and _constants(kernel).get("again"):
        twice.append(2)
    if name == "add_kernel" and arrays[0].data.ptr == arrays[1].data.ptr:
        twice.append(0)
    return sum(once.values()) + sum(arrays[i].nbytes for i in twice)


def _constants(kernel):
    function = kernel.py_func
    cells = function.__closure__ or ()
    return {n: c.cell_contents for n, c in zip(function.__code__.co_freevars, cells)}


def _attention_flops(name, args):
    if name in ATTENTION_BY_MAPS:
        (D, H, T, B), (_, _, S, _) = (dims for dims, _ in tensors_of(args[0])[:2])
        return ATTENTION_BY_MAPS[name] * 2.0 * B * H * T * S * D * (0.5 if T == S else 1.0)
    if name not in ATTENTION:
        return None
    products, wide = ATTENTION[name]
    T, S = [int(a) for a in args if isinstance(a, np.integer)][:2]
    return products * 2.0 * args[wide].size * S * (0.5 if T == S else 1.0)


# ----------------------------------------------------------------------------- time
class NoTimes(Exception):
    """CUPTI cannot be used; the message says why."""


def cupti_times(run: Callable[[], Any]) -> list[Timed]:
    """run() with CUPTI watching -> everything that the GPU did meanwhile, by start. Raises NoTimes."""
    try:
        from cupti import cupti
    except ImportError as error:  # itself, or what it needs
        raise NoTimes(f"{error} (pip install cupti-python)") from None
    except (OSError, RuntimeError) as error:
        raise NoTimes(f"cupti-python does not find its library ({error})") from None
    found, kinds = [], cupti.ActivityKind
    watched = (kinds.CONCURRENT_KERNEL, kinds.MEMCPY, kinds.MEMSET)
    names = {kinds.MEMCPY: "copy", kinds.MEMSET: "memset"}

    def completed(activities):  # the records are CUPTI's: copy what is needed
        for a in activities:
            found.append(Timed(names.get(a.kind) or short_name(a.name), a.start, a.end))

    try:
        cupti.activity_register_callbacks(lambda: (8 << 20, 0), completed)
        for kind in watched:
            cupti.activity_enable(kind)
    except cupti.cuptiError as error:  # nsys, for one, is a user of CUPTI itself
        raise NoTimes(f"CUPTI is not to be had ({error})") from None
    try:
        run()
        cupy().cuda.Device().synchronize()
    finally:
        cupti.activity_flush_all(1)
        for kind in watched:
            cupti.activity_disable(kind)
    return sorted(found, key=lambda t: t.start)


def short_name(mangled: str) -> str:
    """The name of a kernel's function out of what the compiler made of it: _ZN6xtrain...18rmsnorm_fwd_kernelB2v1..."""
    if not mangled.startswith("_Z"):
        return mangled
    rest, name = mangled[3 if mangled.startswith("_ZN") else 2 :], mangled
    while match := re.match(r"(\d+)", rest):
        length, rest = int(match[1]), rest[match.end() :]
        name, rest = rest[:length], rest[length:]
        if name in ("Kernel", "Kernel2") and rest.startswith(
            "I"
        ):  # CUTLASS: its name is the argument
            rest = rest[1:]
    return name


# ----------------------------------------------------------------------------- match
def match(times: list[Timed], launches: list[Launch]) -> list[Timed]:
    """The same times, each with its launch. launches: of one step; times: of one or several, in order."""
    ours, i, out = {launch.name for launch in launches}, 0, []
    for t in times:
        if t.name in ours:
            while launches[i % len(launches)].name != t.name:  # a product that has left no trace
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
    """One line of the table: all launches of one name and way."""

    name: str
    op: str
    calls: int
    ns: int
    nbytes: int | None
    flops: float | None


def rows(times: list[Timed], steps: int) -> list[Row]:
    """Per step, longest first."""
    table: dict[tuple, Row] = {}
    for t in times:
        launch = t.launch or Launch(t.name, "", "", "", None, None)
        op = f"{launch.op} {launch.way}".strip()
        row = table.setdefault((launch.name, op), Row(launch.name, op, 0, 0, 0, 0.0))
        row.calls, row.ns = row.calls + 1, row.ns + t.end - t.start
        row.nbytes = None if launch.nbytes is None else row.nbytes + launch.nbytes
        row.flops = None if launch.flops is None else row.flops + launch.flops
    for row in table.values():
        row.ns, row.calls = row.ns / steps, row.calls / steps
        row.nbytes = row.nbytes and row.nbytes / steps
        row.flops = row.flops and row.flops / steps
    return sorted(table.values(), key=lambda row: -row.ns)


def without_first_step(times: list[Timed], launches: list[Launch]) -> list[Timed]:
    """From the second step's first launch on. (The first step after CUPTI has begun waits for it.)"""
    starts = [i for i, t in enumerate(times) if t.launch is launches[0]]
    return times[starts[1] :]


def busy_share(times: list[Timed]) -> float:
    """Of the time from the first start to the last end: the share in which at least one kernel ran."""
    busy, until = 0, times[0].start
    for t in times:
        busy += max(0, t.end - max(t.start, until))
        until = max(until, t.end)
    return busy / (until - times[0].start)


# ----------------------------------------------------------------------------- limits and trace
def limits(precision: str) -> tuple[float, float]:
    """-> (bytes per second of a copy on the device, read plus written; operations per second of an
    8192^3 product), each the best of ten. A kernel whose data still lies in the cache moves more than
    the copy, which does not fit there."""
    cp = cupy()
    a, b = (cp.empty(1 << 28, np.uint8) for _ in range(2))
    copy = _seconds(
        lambda: b.data.copy_from_device_async(a.data, a.nbytes, cp.cuda.get_current_stream())
    )
    numbers = np.random.default_rng(0).standard_normal((2048, 8192), np.float32)
    numbers = np.tile(
        numbers, (4, 1)
    )  # zeros would be faster: the power limit counts changing bits
    x = cp.asarray(numbers.astype(BFLOAT16) if precision == "bf16" else numbers)
    y = cp.empty_like(x)
    product = _seconds(lambda: matmul(y, x, x))
    return 2 * a.nbytes / copy, 2 * 8192**3 / product


def _seconds(f, runs=10):
    times = []
    for _ in range(runs + 2):
        start, end = cupy().cuda.Event(), cupy().cuda.Event()
        start.record()
        f()
        end.record()
        end.synchronize()
        times.append(cupy().cuda.get_elapsed_time(start, end) / 1e3)
    return min(times[2:])


def chrome_trace(times: list[Timed]) -> dict[str, Any]:
    """For ui.perfetto.dev and chrome://tracing: kernels, and above them the ops and layers that they belong to."""
    tracks = {"layers": 1, "ops": 2, "kernels": 3}
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "tid": tid, "name": "thread_name", "args": {"name": name}}
        for name, tid in tracks.items()
    ]
    zero = times[0].start if times else 0
    open_spans: dict[str, dict[str, Any]] = {}

    def span(track, name, t, args):
        event = {
            "ph": "X", "pid": 0, "tid": tracks[track], "name": name, "ts": (t.start - zero) / 1e3,
            "dur": (t.end - t.start) / 1e3, "args": args,
        }  # fmt: skip
        events.append(event)
        return event

    for t in times:
        launch = t.launch
        known = {} if launch is None else {"bytes": launch.nbytes, "operations": launch.flops}
        span("kernels", t.name, t, known | ({"launch": launch.name} if launch else {}))
        for track in ("layers", "ops"):
            place = launch and (launch.layer if track == "layers" else launch.op)
            name = f"{place} {launch.way}" if place else ""
            last = open_spans.get(track)
            if last is not None and last["name"] == name:
                last["dur"] = (t.end - zero) / 1e3 - last["ts"]
            elif name:
                open_spans[track] = span(track, name, t, {})
            elif launch is not None:
                open_spans.pop(track, None)
    return {"traceEvents": events, "displayTimeUnit": "ns"}
