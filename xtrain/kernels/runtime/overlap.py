"""Programmatic dependent launch: a kernel may start while the previous kernel of its stream is still running.

Between two kernels of a stream a GPU idles for one to two microseconds: the last blocks finish, caches are flushed, the next
blocks are scheduled, and only then do they issue their first loads. A decoding step has about a hundred kernels of five to
ten microseconds, so a third of its time is idle. A kernel launched here is scheduled as soon as the previous kernel has
called let_next_start (primitives/ptx.py). It loads its weights and then waits for its inputs with wait_for_previous. CUDA
graphs keep the attribute when they capture the launch.

Only the driver's cuLaunchKernelEx takes the attribute, and CuPy does not wrap it ("CUDA Driver API", CUlaunchConfig).
"""

# ctypes and not cuda.bindings: a launch fills one struct and makes one call. cuda.bindings would set
# the properties of a CUlaunchConfig one by one and build a CUresult enum on each launch.
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
    """-> cuLaunchKernelEx, the launch attribute that allows the overlap"""
    function = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    function.argtypes = [ctypes.POINTER(_Config), *[ctypes.c_void_p] * 3]
    attribute = _Attribute(PROGRAMMATIC_STREAM_SERIALIZATION)
    attribute.value[0] = 1  # CUlaunchAttributeValue.programmaticStreamSerializationAllowed
    return function, attribute


def launch_overlapping(
    function: int, grid: tuple, block: tuple, shared: int, stream: int, parameters: int
) -> None:
    """Launch the kernel with driver handle `function` on `stream`; it may overlap with the previous kernel.

    grid, block: three ints each. shared: bytes of dynamic shared memory. stream: the driver's handle.
    parameters: address of the table of pointers to the kernel's parameters. Raises CuPy's CUDADriverError.
    """
    launch_kernel, attribute = _driver()
    config = _Config(grid, block, shared, stream, ctypes.pointer(attribute), 1)
    status = launch_kernel(ctypes.byref(config), function, parameters, None)
    if status:
        raise cupy().cuda.driver.CUDADriverError(status)
