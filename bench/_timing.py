"""Shared by all benches: timing on the GPU, and one JSON line per measurement.

A time is the median of several runs between CUDA events, after warm-up, together with p20 and p80.
`flush` overwrites the L2 cache before every run, so that a kernel reads its input from memory, as
in a training step.
"""

import contextlib
import ctypes
import datetime
import functools
import importlib.metadata
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import cupy as cp
import numpy as np

from xtrain.kernels.runtime.compiler import COMPILER

RESULTS = Path(__file__).parent / "results"
FLUSH_BYTES = 256 << 20  # four times an H200's L2 cache
LIBRARIES = ("numpy", "numba", "numba-cuda", "numba-cuda-mlir", "cupy-cuda13x", "nvmath-python")
LIBRARIES += ("torch",)


def gpu_ms(
    f: Callable[[], object], runs: int = 30, warmup: int = 5, flush: bool = True
) -> np.ndarray:
    """Return (median, p20, p80) milliseconds of f() on CuPy's current stream."""
    junk = cp.empty(FLUSH_BYTES, cp.uint8) if flush else None
    for _ in range(warmup):
        f()
    times = []
    for _ in range(runs):
        if flush:
            junk.fill(0)
        start = cp.cuda.Event()
        end = cp.cuda.Event()
        start.record()
        f()
        end.record()
        end.synchronize()
        times.append(cp.cuda.get_elapsed_time(start, end))
    return np.percentile(times, [50, 20, 80])


EXTERNAL = 1  # CU_EVENT_RECORD_EXTERNAL: an event that a graph records and that can still be timed


def graph_ms(f: Callable[[], object], runs: int = 20, torch=None) -> np.ndarray:
    """Return (median, p20, p80) milliseconds of f() without the host's launch overhead.

    One CUDA graph holds runs x [flush, event, f, event]; the times are those of its second replay.
    torch: the module, if f launches on PyTorch's current stream instead of CuPy's. f runs before
    the capture, so that its kernels are compiled.
    """
    junk = cp.empty(FLUSH_BYTES, cp.uint8)
    events = [cp.cuda.Event() for _ in range(2 * runs)]
    stream = cp.cuda.Stream(non_blocking=True)

    def record_event(i):
        code = ctypes.CDLL("libcuda.so.1").cuEventRecordWithFlags(
            ctypes.c_void_p(events[i].ptr), ctypes.c_void_p(stream.ptr), EXTERNAL
        )
        if code:
            raise RuntimeError(f"cuEventRecordWithFlags: CUDA error {code}")

    def all_runs():
        for i in range(runs):
            junk.fill(0)
            record_event(2 * i)
            f()
            record_event(2 * i + 1)

    cp.cuda.Device().synchronize()
    with stream:
        if torch is None:
            for _ in range(2):
                junk.fill(0)
                f()
            stream.synchronize()
            stream.begin_capture()
            all_runs()
            graph = stream.end_capture()
            replay = lambda: graph.launch(stream)
        else:
            outside = torch.cuda.ExternalStream(stream.ptr)
            with torch.cuda.stream(outside):
                for _ in range(3):
                    f()
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=outside, capture_error_mode="relaxed"):
                all_runs()
            replay = graph.replay
        for _ in range(2):
            if torch is None:
                replay()
            else:
                with torch.cuda.stream(outside):
                    replay()
            stream.synchronize()
    times = [cp.cuda.get_elapsed_time(events[2 * i], events[2 * i + 1]) for i in range(runs)]
    return np.percentile(times, [50, 20, 80])


@functools.cache
def copy_ms(nbytes: int) -> float:
    """Return milliseconds of a device-to-device copy that moves nbytes in total.

    In a graph or on a stream, whichever is faster.
    """
    copy = _copy(nbytes)
    return float(min(graph_ms(copy)[0], gpu_ms(copy)[0]))


def copy_bandwidth(nbytes: int) -> float:
    """Return bytes per second (read plus written) of a device-to-device copy of nbytes in total."""
    return nbytes / gpu_ms(_copy(nbytes))[0] * 1e3


def _copy(nbytes):
    source = cp.empty(nbytes // 2, cp.uint8)
    target = cp.empty(nbytes // 2, cp.uint8)
    current = cp.cuda.get_current_stream
    return lambda: target.data.copy_from_device_async(source.data, source.nbytes, current())


def versions() -> dict[str, str]:
    """Return the versions of the libraries that are installed, the driver and the CUDA runtime."""
    installed = {}
    for name in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    driver = cp.cuda.runtime.driverGetVersion()
    runtime = cp.cuda.runtime.runtimeGetVersion()
    return {**installed, "cuda_driver": str(driver), "cuda_runtime": str(runtime)}


def _commit() -> str:
    if os.environ.get("XTRAIN_COMMIT"):  # for a checkout without history
        return os.environ["XTRAIN_COMMIT"]
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown"


def record(
    bench: str, name: str, *, shape: str, dtype: str, ms: float, value: float, unit: str, **more
) -> dict:
    """Append one line to results/<bench>.jsonl, print it, and return it.

    more: peer, peer_value, peak_gb and other fields.
    """
    line = {
        "bench": bench,
        "name": name,
        "shape": shape,
        "dtype": dtype,
        "ms": round(float(ms), 4),
        "value": round(float(value), 2),
        "unit": unit,
        "peer": None,
        "peer_value": None,
        "ratio": None,
        "peak_gb": None,
        **more,
    }
    if line["peer_value"]:
        line["ratio"] = round(float(value) / float(line["peer_value"]), 4)
        line["peer_value"] = round(float(line["peer_value"]), 2)
    properties = cp.cuda.runtime.getDeviceProperties(cp.cuda.Device().id)
    line |= {"gpu": properties["name"].decode(), "versions": versions(), "commit": _commit()}
    line["compiler"] = COMPILER  # of the kernels: numba or mlir
    line["date"] = datetime.date.today().isoformat()
    folder = Path(os.environ.get("XTRAIN_RESULTS", RESULTS))
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{bench}.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    ratio = ""
    if line["ratio"]:
        ratio = f"   {line['ratio']:.2f} x {line['peer']} ({line['peer_value']:,.0f})"
    print(f"{bench} {name} {shape} {dtype}: {ms:.3f} ms, {value:,.0f} {unit}{ratio}", flush=True)
    return line
