"""Timing in CUDA graphs, operations and parallel compilation, for the benches of FlashAttention."""

import functools
import math
import multiprocessing
import os
from collections.abc import Callable, Iterable

import cupy as cp
import ml_dtypes
import numpy as np

from xtrain.kernels.attention import flash_attention as fa
from xtrain.kernels.attention import flash_attention_hopper as hopper
from xtrain.kernels.attention import flash_attention_hopper_bwd as hopper_bwd
from xtrain.kernels.attention.flash_attention_hopper_table import HopperTiles
from xtrain.kernels.attention.flash_attention_table import Tiles
from xtrain.kernels.runtime.compile import load_function
from xtrain.kernels.runtime.launch import numba_type

WORK = {"fwd": 1.0, "dq": 1.5, "dkdv": 2.0}  # matrix products, relative to the forward's
LOCAL_SIZE_BYTES = 3  # CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES
HOPPER_KERNELS = {  # kind -> function that makes the kernel, bytes of shared memory
    "fwd": (hopper.make_fwd_kernel, hopper.fwd_shared_bytes),
    "dq": (hopper_bwd.make_dq_kernel, hopper_bwd.dq_shared_bytes),
    "dkdv": (hopper_bwd.make_dkdv_kernel, hopper_bwd.dkdv_shared_bytes),
}


def operations(B, T, H, D, causal):
    """Return the floating-point operations of the forward: two products, half of them if causal."""
    return 4 * B * H * T * T * D / (2 if causal else 1)


# ----------------------------------------------------------------------------- timing
def capture(run, ms: float = 4.0):
    """Return (replay, calls) of a CUDA graph with as many calls of run() as fill `ms`."""
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        for _ in range(2):
            run()
        start, end = cp.cuda.Event(), cp.cuda.Event()
        start.record()
        run()
        end.record()
        end.synchronize()
        calls = max(1, min(100, math.ceil(ms / max(cp.cuda.get_elapsed_time(start, end), 1e-3))))
        stream.begin_capture()
        for _ in range(calls):
            run()
        graph = stream.end_capture()
    null = cp.cuda.Stream.null
    return lambda: graph.launch(null), calls


def replay_ms(replay, calls: int) -> float:
    """Return milliseconds per call of one replay."""
    start, end = cp.cuda.Event(), cp.cuda.Event()
    start.record(cp.cuda.Stream.null)
    replay()
    end.record(cp.cuda.Stream.null)
    end.synchronize()
    return cp.cuda.get_elapsed_time(start, end) / calls


def repeat_ms(run, turns: int = 5) -> float:
    """Return median milliseconds of run(), back to back in a CUDA graph.

    Without launch overhead, and with warm caches.
    """
    replay, calls = capture(run)
    replay()
    return float(np.median([replay_ms(replay, calls) for _ in range(turns)]))


def in_turns(contestants: dict, turns: int) -> dict:
    """Return {name: (median, p20, p80) milliseconds} of {name: (replay, calls)}, in turns."""
    times = {name: [] for name in contestants}
    for turn in range(turns + 1):
        for name, (replay, calls) in contestants.items():
            ms = replay_ms(replay, calls)
            if turn:  # the first one warms up
                times[name].append(ms)
    return {name: np.percentile(x, [50, 20, 80]) for name, x in times.items()}


# ----------------------------------------------------------------------------- compilation
def _compiled(compile_one):
    """Return the function of a task that returns (task, bytes of compile_one(task), error)."""

    @functools.wraps(compile_one)
    def caught(task):
        try:
            return task, compile_one(*task), ""
        except Exception as error:
            return task, 0, f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"

    return caught


def _local_bytes(kernel, shared: int, args: Iterable) -> int:
    """Compile a kernel for arguments like these and fill the kernel cache.

    Returns the bytes of local memory per thread (spills).
    """
    handle, _ = load_function(kernel, tuple(map(numba_type, args)), shared)
    return cp.cuda.driver.funcGetAttribute(LOCAL_SIZE_BYTES, handle)


@_compiled
def compile_mma_sync(kind: str, D: int, causal: bool, tiles: Tiles) -> int:
    """Compile a kernel of flash_attention_bf16*.py.

    Call it with one task (kind, D, causal, tiles).
    """
    kernel, shared = fa.make_kernel(kind, D, causal, tiles)
    sizes = [np.int32(1)] * (8 if kind == "dkdv" else 7) + [np.float32(1)]
    dtypes = {
        "fwd": (2, 4, 2, 2, 2, 4),
        "dq": (2, 4, 2, 2, 2, 2, 2, 4, 4),
        "dkdv": (2, 2, 2, 2, 2, 2, 4, 4, 4),
    }[kind]
    arrays = [cp.empty(1, ml_dtypes.bfloat16 if n == 2 else np.float32) for n in dtypes]
    return _local_bytes(kernel, shared, (*arrays, *sizes))


@_compiled
def compile_hopper(kind: str, D: int, causal: bool, tiles: HopperTiles) -> int:
    """Compile a kernel of flash_attention_hopper*.py.

    Call it with one task (kind, D, causal, tiles).
    """
    make, shared_bytes = HOPPER_KERNELS[kind]
    if kind == "dkdv":
        dtypes = (np.uint64, np.int32)
    else:
        dtypes = (np.uint64, np.float32, np.int32)
    arrays = [cp.empty(2, dtype) for dtype in dtypes]
    numbers = [np.int32(1)] * (7 if kind == "dq" else 6) + [np.float32(1)]
    return _local_bytes(make(D, causal, tiles), shared_bytes(D, tiles), (*arrays, *numbers))


def compile_all(tasks: Iterable[tuple[Callable, tuple]], jobs: int | None = None) -> dict:
    """Run (function, task) pairs in worker processes, by default one per core.

    Returns {task: (bytes of local memory, error)}.
    """
    with multiprocessing.get_context("spawn").Pool(jobs or os.cpu_count()) as pool:
        running = [pool.apply_async(compile_one, (task,)) for compile_one, task in tasks]
        done = [result.get() for result in running]
    return {task: (local, wrong) for task, local, wrong in done}


def report_compiled(compiled: dict) -> None:
    """Print the tasks that failed or spill registers."""
    for task, (local, wrong) in compiled.items():
        if local:
            print(task, f"{local} bytes of local memory", flush=True)
        elif wrong:
            print(task, wrong, flush=True)
