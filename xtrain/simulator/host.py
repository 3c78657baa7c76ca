"""Put the simulator in the place of the GPU: `with simulate(): ...`, `@simulate()`, `pytest
--simulate-cuda`, `python -m`.

While `simulate` is active, the functions and methods of numba.cuda (and of numba_cuda_mlir.cuda if
it is installed) that need a driver are replaced by those of the simulator, and `exec` keeps the
source of generated kernels: REPLACED below is the whole list. This is the only place in the project
that replaces functions of another module, because code under test calls numba.cuda by its own names
and must not be changed. Activate it before the code under test is imported: a name that was
imported before (`from numba.cuda import to_device`) still refers to Numba's function. Kernels may
be decorated before or after.
"""

import builtins
import contextlib
import threading
import warnings

from . import device, device_array, dispatch, frontends, settings, streams
from .errors import reported_kinds
from .orders import orders_of
from .processes import checked


def _replaced(frontend) -> dict:
    """object -> {name: what takes its place}"""
    dispatcher = frontend.parts.dispatcher
    cudadrv = frontend.parts.cudadrv
    replaced = {
        dispatcher.CUDADispatcher: {
            "compile": dispatch.compile,
            "compile_device": dispatch.compile_device,
            "enable_caching": dispatch.enable_caching,
        },
        dispatcher._LaunchConfiguration: {"__call__": dispatch.launch},
        dispatcher.ForAll: {"__call__": dispatch.forall},
        dispatcher: {"get_current_device": device.get_current_device},
        **{cuda: device.HOST_FUNCTIONS for cuda in frontend.modules},
        cudadrv.devicearray: {
            "DeviceNDArray": device_array.DeviceArray,
            "DeviceRecord": device_array.DeviceArray,
            "auto_device": device_array.auto_device,
            "from_array_like": device_array.from_array_like,
            "from_record_like": device_array.from_record_like,
        },
        cudadrv.devices: {
            "get_context": device.current_context,
            "gpus": device.DEVICES,
            "require_context": device.require_context,
            "reset": device.nothing,
        },
        cudadrv.driver: {
            "Linker": device.Linker,
            "_to_core_stream": device.same_stream,
            "event_elapsed_time": device.event_elapsed_time,
        },
        dispatcher.config: {
            "CUDA_LOW_OCCUPANCY_WARNINGS": 0,
            "CUDA_WARN_ON_IMPLICIT_COPY": 0,
        },  # about speed
    }
    if frontend.descriptor is not None:  # numba-cuda-mlir's
        replaced[frontend.descriptor.MLIRDispatcher] = {
            "compile": dispatch.compile,
            "compile_device": dispatch.compile,
            "configure": dispatch.configure,
            "enable_caching": dispatch.enable_caching,
        }
        replaced[frontend.descriptor._ForAll] = {"__call__": dispatch.forall}
    return replaced


frontends.remove_starters()
frontends.load_all()  # the code under test imports either, and later
REPLACED: dict = {
    builtins: {"exec": dispatch.exec_with_source},  # so that generated kernels have a source
}
for _frontend in frontends.known():
    if _frontend.package != frontends.OWN:
        REPLACED |= _replaced(_frontend)

# Names that some packages lack, or some versions of them.
OPTIONAL = {"_auto_device", "_to_core_stream", "is_bfloat16_supported", "is_fp8_supported"}

_lock = threading.Lock()
_depth = 0
_originals: list = []  # (object, name, what it was)


def start():
    """Replace numba.cuda's host functions. Calls nest: the last `stop` restores them."""
    global _depth
    with _lock:
        _depth += 1
        if _depth == 1:
            for owner, names in REPLACED.items():
                for name, new in names.items():
                    if name in vars(owner):
                        _originals.append((owner, name, vars(owner)[name]))
                        setattr(owner, name, new)
                    elif name not in OPTIONAL:
                        _warn_of_missing(owner, name)


def _warn_of_missing(owner, name):
    where = getattr(owner, "__module__", owner.__name__)
    warnings.warn(
        f"{where}: {owner.__name__} has no {name}, which the simulator replaces: a program that "
        "uses it under another name may need a GPU; install a version of the package that has it",
        RuntimeWarning,
        stacklevel=3,
    )


def stop():
    """Undo one `start`."""
    global _depth
    with _lock:
        _depth -= 1
        if _depth == 0:
            while _originals:
                setattr(*_originals.pop())
            streams.reset()


@contextlib.contextmanager
def simulate(allow=(), enable=(), raised=(), processes=1, schedules=1, seed=None):
    """Run every launch of a Numba CUDA kernel in the simulator, as a context manager or a
    decorator.

        with simulate():
            kernel[blocks, threads](cuda.to_device(x), y)

        @simulate()
        def test_kernel(): ...

    allow, enable, raised: kinds of findings, as for `run`, added to those of a `simulate` around
    this one.
    processes, schedules, seed: as for `run`. All hold for the thread of the host that calls `simulate`; those of the
    main thread also for the others.

    Launches raise a KernelError for what a GPU would not report. Raises
    RuntimeError if Numba's own simulator is in use.
    """
    reported_kinds((*allow, *raised), enable)  # raises ValueError for an unknown one
    orders_of(schedules, seed)
    before = settings.current()
    now = settings.Settings(
        allow=(*before.allow, *allow),
        enable=(*before.enable, *enable),
        raised=(*before.raised, *raised),
        processes=checked(processes),
        schedules=schedules,
        seed=seed,
        tracks_unwritten="unwritten_global" in reported_kinds((*before.allow, *allow)),
    )
    start()
    try:
        with settings.using(now):
            yield
    finally:
        stop()
