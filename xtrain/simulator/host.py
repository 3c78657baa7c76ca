"""Put the simulator in the place of the GPU: `with simulate(): ...`, `@simulate()`, `pytest --simulate-cuda`, `python -m`.

While `simulate` is active, the functions and methods of numba.cuda that need a driver are replaced by those of the simulator,
and `exec` keeps the source of generated kernels: REPLACED below is the whole list. This is the only place in the project that
replaces functions of another module, because code under test calls numba.cuda by its own names and must not be changed.
Activate it before the code under test is imported: a name that was imported before (`from numba.cuda import to_device`) still
refers to Numba's function. Kernels may be decorated before or after.
"""

import builtins
import contextlib
import threading

from numba.core import config

if getattr(config, "ENABLE_CUDASIM", False):
    raise RuntimeError(
        "NUMBA_ENABLE_CUDASIM is set, so Numba's own simulator has taken the place of numba.cuda: unset it"
    )

import numba.cuda
import numba.cuda.cudadrv.devicearray
import numba.cuda.cudadrv.devices
import numba.cuda.cudadrv.driver
import numba.cuda.dispatcher

from . import device, device_array, dispatch
from .processes import checked

_context = device.CONTEXT

REPLACED = {
    numba.cuda.dispatcher.CUDADispatcher: {
        "compile": dispatch.compile,
        "compile_device": dispatch.compile_device,
        "enable_caching": dispatch.enable_caching,
    },
    numba.cuda.dispatcher._LaunchConfiguration: {"__call__": dispatch.launch},
    numba.cuda.dispatcher.ForAll: {"__call__": dispatch.forall},
    numba.cuda.dispatcher: {"get_current_device": device.get_current_device},
    builtins: {"exec": dispatch.exec_with_source},  # so that generated kernels have a source
    numba.cuda: {
        **{
            name: getattr(device_array, name)
            for name in (
                "as_cuda_array", "device_array", "device_array_like", "from_cuda_array_interface", "is_cuda_array", "managed_array",
                "mapped_array", "mapped_array_like", "pinned_array", "pinned_array_like", "to_device",
            )
        },
        **{
            name: getattr(device, name)
            for name in (
                "cuda_error", "current_context", "detect", "event_elapsed_time", "external_stream", "get_current_device", "is_available",
                "list_devices", "mapped", "pinned", "require_context", "select_device", "stream",
            )
        },
        **dict.fromkeys(("close", "profile_start", "profile_stop", "synchronize"), device.nothing),
        "_auto_device": device_array.auto_device,
        "default_stream": _context.get_default_stream,
        "defer_cleanup": _context.defer_cleanup,
        "event": device.Event,
        "gpus": device.DEVICES,
        "is_supported_version": device.is_available,
        "legacy_default_stream": _context.get_legacy_default_stream,
        "per_thread_default_stream": _context.get_per_thread_default_stream,
        "profiling": contextlib.nullcontext,
    },
    numba.cuda.cudadrv.devicearray: {
        "DeviceNDArray": device_array.DeviceArray,
        "DeviceRecord": device_array.DeviceArray,
        "auto_device": device_array.auto_device,
        "from_array_like": device_array.from_array_like,
        "from_record_like": device_array.from_record_like,
    },
    numba.cuda.cudadrv.devices: {
        "get_context": device.current_context,
        "gpus": device.DEVICES,
        "require_context": device.require_context,
        "reset": device.nothing,
    },
    numba.cuda.cudadrv.driver: {
        "Linker": device.Linker,
        "_to_core_stream": device.same_stream,
        "event_elapsed_time": device.event_elapsed_time,
    },
    numba.cuda.dispatcher.config: {"CUDA_LOW_OCCUPANCY_WARNINGS": 0, "CUDA_WARN_ON_IMPLICIT_COPY": 0},  # about speed
}  # fmt: skip

_lock, _depth = threading.Lock(), 0
_originals: list = []  # (object, name, what it was)


def start():
    """Replace numba.cuda's host functions. Calls nest: the last `stop` restores them."""
    global _depth
    with _lock:
        _depth += 1
        if _depth == 1:
            for owner, names in REPLACED.items():
                for name, new in names.items():
                    if hasattr(owner, name):  # Numba and numba-cuda do not have all of them
                        _originals.append((owner, name, vars(owner)[name]))
                        setattr(owner, name, new)


def stop():
    """Undo one `start`."""
    global _depth
    with _lock:
        _depth -= 1
        if _depth == 0:
            while _originals:
                setattr(*_originals.pop())


@contextlib.contextmanager
def simulate(processes=1):
    """Run every launch of a Numba CUDA kernel in the simulator, as a context manager or a decorator.

        with simulate():
            kernel[blocks, threads](cuda.to_device(x), y)

        @simulate()
        def test_kernel(): ...

    Launches raise a KernelError for what a GPU would not report. processes: as for `run`.
    Raises RuntimeError if Numba's own simulator is in use.
    """
    before, now = dispatch.processes, checked(processes)
    start()
    dispatch.processes = now
    try:
        yield
    finally:
        dispatch.processes = before
        stop()
