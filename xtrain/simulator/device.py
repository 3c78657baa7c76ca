"""The simulated GPU: its device, context, streams and events. Every operation is complete when the
call returns; streams.py reports what may not be complete then on a GPU."""

import asyncio
import contextlib
import itertools
import time
import warnings
from typing import NamedTuple

from . import device_array, streams
from .block import SHARED, STATIC_SHARED
from .device_array import DeviceArray, DeviceMemory, allocate, allocated
from .launch import MAX_GRID_YZ, MAX_THREADS, MAX_Z

COMPUTE_CAPABILITY = (9, 0)  # whose limits block.py checks
BLOCKS_PER_MULTIPROCESSOR = 32
MEMORY = 2**34  # bytes that the device claims to have


_handles = itertools.count(0x1000)


class CudaSupportError(RuntimeError):
    """What Numba raises if there is no GPU: never raised here."""


class MemoryInfo(NamedTuple):
    """Context.get_memory_info(), in bytes"""

    free: int
    total: int


class Stream:
    """cuda.stream()"""

    def __init__(self, handle: int, external: bool = False):
        self.handle, self.external = handle, external

    def __int__(self):
        return self.handle

    def __repr__(self):
        names = {0: "Default", 1: "Legacy default", 2: "Per-thread default"}
        if self.handle in names and not self.external:
            return f"<{names[self.handle]} CUDA stream on {CONTEXT}>"
        return f"<{'External ' if self.external else ''}CUDA stream {self.handle} on {CONTEXT}>"

    def synchronize(self):
        streams.host_waits(self)

    @contextlib.contextmanager
    def auto_synchronize(self):
        yield self
        self.synchronize()

    def add_callback(self, callback, arg=None):
        try:
            with streams.callback(self):
                callback(self, 0, arg)
        except Exception as error:
            warnings.warn(f"Exception in stream callback: {error}", stacklevel=2)

    def async_done(self):
        self.synchronize()
        future = asyncio.get_running_loop().create_future()
        future.set_result(self)
        return future


class Event:
    """cuda.event(). Its times are those of the simulator on the CPU."""

    def __init__(self, timing: bool = True):
        self.timing = timing
        self.time = None
        self.clock: dict = {}  # what precedes it: streams.py

    def record(self, stream=0):
        self.time = time.perf_counter()
        self.clock = streams.recorded(stream)

    def query(self) -> bool:
        self.synchronize()  # the program may know then that it has ended
        return True

    def wait(self, stream=0):
        streams.wait(stream, self.clock)

    def synchronize(self):
        streams.host_waits_for(self.clock)

    def elapsed_time(self, evtend) -> float:
        """Milliseconds between two recorded events."""
        if self.time is None or evtend.time is None:
            raise RuntimeError(
                "elapsed_time needs two recorded events: call record() on both first"
            )
        return (evtend.time - self.time) * 1000


class Device:
    """cuda.get_current_device(), cuda.gpus[0]. Attributes as on a GPU of compute capability 9.0,
    with few multiprocessors."""

    id = 0
    name = b"simulated GPU"
    uuid = "GPU-00000000-0000-0000-0000-000000000000"
    compute_capability = COMPUTE_CAPABILITY
    supports_float16 = True
    supports_bfloat16 = True
    COMPUTE_CAPABILITY_MAJOR, COMPUTE_CAPABILITY_MINOR = COMPUTE_CAPABILITY
    WARP_SIZE = 32
    MAX_THREADS_PER_BLOCK = MAX_BLOCK_DIM_X = MAX_BLOCK_DIM_Y = MAX_THREADS
    MAX_BLOCK_DIM_Z = MAX_Z
    MAX_GRID_DIM_X = 2**31 - 1
    MAX_GRID_DIM_Y = MAX_GRID_DIM_Z = MAX_GRID_YZ
    MAX_SHARED_MEMORY_PER_BLOCK = STATIC_SHARED
    MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = SHARED
    MAX_SHARED_MEMORY_PER_MULTIPROCESSOR = SHARED + 1024
    MULTIPROCESSOR_COUNT = 2  # kernels whose grid depends on it are then quick to simulate
    MAX_THREADS_PER_MULTI_PROCESSOR = 2048
    MAX_REGISTERS_PER_BLOCK = MAX_REGISTERS_PER_MULTIPROCESSOR = 65536
    TOTAL_CONSTANT_MEMORY = 65536
    CLOCK_RATE = MEMORY_CLOCK_RATE = 1_000_000  # kHz
    L2_CACHE_SIZE = 2**22
    ASYNC_ENGINE_COUNT = 1
    CAN_MAP_HOST_MEMORY = UNIFIED_ADDRESSING = MANAGED_MEMORY = CONCURRENT_KERNELS = 1
    KERNEL_EXEC_TIMEOUT = TCC_DRIVER = ECC_ENABLED = INTEGRATED = 0
    SINGLE_TO_DOUBLE_PRECISION_PERF_RATIO = 2
    PCI_DEVICE_ID = PCI_BUS_ID = PCI_DOMAIN_ID = 0

    def __enter__(self):
        return CONTEXT

    def __exit__(self, *error):
        pass

    def __repr__(self):
        return "<CUDA device 0 'simulated GPU'>"

    def get_primary_context(self):
        return CONTEXT

    def reset(self):
        pass

    release_primary_context = reset


class Context:
    """cuda.current_context()"""

    allocations: dict = {}
    deallocations: list = []
    modules: dict = {}

    device = property(lambda self: DEVICE)
    id = property(lambda self: DEVICE.id)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def __repr__(self):
        return "<CUDA context of device 0>"

    def synchronize(self):
        streams.host_waits_for_all()

    reset = synchronize

    def push(self):
        pass

    pop = prepare_for_use = push

    def get_memory_info(self):
        return MemoryInfo(free=max(MEMORY - allocated(), 0), total=MEMORY)

    def memalloc(self, bytesize: int):
        return DeviceMemory(allocate(bytesize))

    def memhostalloc(self, bytesize: int, mapped=False, portable=False, wc=False):
        return allocate(bytesize)

    def mempin(self, owner, pointer, size, mapped=False):
        return owner

    @contextlib.contextmanager
    def defer_cleanup(self):
        yield

    def create_stream(self):
        return Stream(next(_handles))

    def create_external_stream(self, ptr: int):
        return Stream(ptr, external=True)

    def get_default_stream(self):
        return Stream(0)

    def get_legacy_default_stream(self):
        return Stream(1)

    def get_per_thread_default_stream(self):
        return Stream(2)

    def create_event(self, timing: bool = True):
        return Event(timing)

    def can_access_peer(self, peer) -> bool:
        return False

    def get_max_potential_block_size(self, *args, **kwargs) -> tuple[int, int]:
        """Return (the grid that fills the device, the largest block)."""
        return DEVICE.MULTIPROCESSOR_COUNT, THREADS_PER_BLOCK

    def get_active_blocks_per_multiprocessor(self, func, blocksize, memsize, flags=None) -> int:
        return max(1, DEVICE.MAX_THREADS_PER_MULTI_PROCESSOR // blocksize)


THREADS_PER_BLOCK = 128  # of forall, if the program leaves the choice to Numba
DEVICE: Device = Device()
CONTEXT: Context = Context()


class Devices:
    """cuda.gpus, cuda.list_devices()"""

    lst = (DEVICE,)
    current = DEVICE

    def __getitem__(self, number):
        return self.lst[number]

    def __iter__(self):
        return iter(self.lst)

    def __len__(self):
        return len(self.lst)


DEVICES = Devices()


class Linker:
    """numba.cuda.cudadrv.driver.Linker, which programs ask whether code is optimized when it is
    linked."""

    lto = False

    @classmethod
    def new(cls, *args, **kwargs):
        return cls()


# ----------------------------------------------------------------------------- functions of numba.cuda
def current_context(devnum=None):
    """cuda.current_context"""
    return DEVICES[devnum or 0].get_primary_context()


def select_device(device_id):
    """cuda.select_device"""
    return DEVICES[device_id]


def get_current_device():
    """cuda.get_current_device"""
    return DEVICE


def list_devices():
    """cuda.list_devices"""
    return DEVICES


def require_context(function):
    """cuda.require_context: there always is one."""
    return function


def is_available():
    """cuda.is_available, cuda.is_supported_version, cuda.is_float16_supported,
    cuda.is_bfloat16_supported"""
    return True


def is_fp8_supported():
    """cuda.is_fp8_supported: 8-bit floats are not simulated."""
    return False


def cuda_error():
    """cuda.cuda_error"""


def nothing(*args, **kwargs):
    """cuda.profile_start, cuda.profile_stop"""


def synchronize():
    """cuda.synchronize, cuda.close"""
    CONTEXT.synchronize()


def detect():
    """cuda.detect"""
    print(
        "Found 1 CUDA devices\nid 0         simulated GPU                              [SUPPORTED]"
    )
    print("Summary:\n\t1/1 devices are supported")
    return True


def stream():
    """cuda.stream"""
    return CONTEXT.create_stream()


def external_stream(ptr):
    """cuda.external_stream"""
    return CONTEXT.create_external_stream(ptr)


def same_stream(stream):
    """numba-cuda's driver._to_core_stream"""
    return stream


def event_elapsed_time(evtstart, evtend):
    """cuda.event_elapsed_time"""
    return evtstart.elapsed_time(evtend)


@contextlib.contextmanager
def pinned(*arylist):
    """cuda.pinned"""
    yield


@contextlib.contextmanager
def mapped(*arylist, stream=0):
    """cuda.mapped: device arrays that share the memory of the given host arrays."""
    arrays = [DeviceArray.of(a, stream) for a in arylist]
    yield arrays[0] if len(arrays) == 1 else arrays


# name in numba.cuda -> what it is in the simulator
HOST_FUNCTIONS = {
    **{
        name: getattr(device_array, name)
        for name in (
            "as_cuda_array", "device_array", "device_array_like", "from_cuda_array_interface", "is_cuda_array", "managed_array",
            "mapped_array", "mapped_array_like", "pinned_array", "pinned_array_like", "to_device",
        )
    },
    **{
        name: globals()[name]
        for name in (
            "cuda_error", "current_context", "detect", "event_elapsed_time", "external_stream", "get_current_device", "is_available",
            "list_devices", "mapped", "pinned", "require_context", "select_device", "stream",
        )
    },
    **dict.fromkeys(("profile_start", "profile_stop"), nothing),
    **dict.fromkeys(("close", "synchronize"), synchronize),
    "_auto_device": device_array.auto_device,
    "default_stream": CONTEXT.get_default_stream,
    "defer_cleanup": CONTEXT.defer_cleanup,
    "event": Event,
    "gpus": DEVICES,
    "is_bfloat16_supported": is_available,
    "is_float16_supported": is_available,
    "is_fp8_supported": is_fp8_supported,
    "is_supported_version": is_available,
    "legacy_default_stream": CONTEXT.get_legacy_default_stream,
    "per_thread_default_stream": CONTEXT.get_per_thread_default_stream,
    "profiling": contextlib.nullcontext,
}  # fmt: skip
