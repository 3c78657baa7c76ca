"""Start a kernel that may begin while the one before it is still running (programmatic dependent launch).

Between two kernels of a stream a GPU idles for a microsecond or two: the last blocks end, caches are flushed, the next blocks
are placed, and only then are their first bytes asked for. In a decoding step of a hundred kernels of five to ten microseconds
that is a third of the time. A kernel launched here is placed as soon as the one before has said let_next_start (_ptx.py), asks
for its weights, and then waits for its inputs with wait_for_previous. A captured graph keeps this.

The attribute exists in the driver's cuLaunchKernelEx only, which CuPy does not wrap. "CUDA Driver API, CUlaunchConfig".
"""

import ctypes
import functools

from ...device import cupy

PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CUlaunchAttributeID


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int * 16)]


class _Config(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]


@functools.cache
def _driver():
    """-> cuLaunchKernelEx, the attribute"""
    function = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    function.argtypes = [ctypes.POINTER(_Config), *[ctypes.c_void_p] * 3]
    attribute = _Attribute(PROGRAMMATIC_STREAM_SERIALIZATION)
    attribute.value[0] = 1  # allowed
    return function, attribute


def launch_overlapping(
    function: int, grid: tuple, block: tuple, shared: int, stream: int, parameters: int
) -> None:
    """grid, block: three numbers each; parameters: address of the table of pointers. Raises CuPy's CUDADriverError."""
    start, attribute = _driver()
    config = _Config(grid, block, shared, stream, ctypes.pointer(attribute), 1)
    status = start(ctypes.byref(config), function, parameters, None)
    if status:
        raise cupy().cuda.driver.CUDADriverError(status)
