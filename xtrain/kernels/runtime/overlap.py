"""Programmatic dependent launch: a kernel may start while the previous one of its stream runs.

Between two kernels of a stream a GPU idles for one to two microseconds: the last blocks finish,
caches are flushed, the next blocks are scheduled, and only then do they issue their first loads. A
decoding step has about a hundred kernels of five to ten microseconds, so a third of its time is
idle. A kernel launched here is scheduled as soon as the previous kernel has called let_next_start
(primitives/ptx.py). It loads its weights and then waits for its inputs with wait_for_previous. CUDA
graphs keep the attribute when they capture the launch.

Only the driver's cuLaunchKernelEx takes the attribute, and CuPy does not wrap it ("CUDA Driver
API", CUlaunchConfig).
"""

import functools
from collections.abc import Callable
from typing import Any

from ...device import cupy


@functools.cache
def _driver() -> tuple[Any, Any, Any]:
    """Return cuda.bindings.driver and two launch attributes.

    The first allows the overlap, the second is that of blocks that wait for each other.
    """
    from cuda.bindings import driver

    kinds = driver.CUlaunchAttributeID
    overlapping = driver.CUlaunchAttribute()
    waiting = driver.CUlaunchAttribute()
    value = driver.CUlaunchAttributeValue()
    overlapping.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    value.programmaticStreamSerializationAllowed = 1
    overlapping.value = value
    value = driver.CUlaunchAttributeValue()
    waiting.id = kinds.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
    value.cooperative = 1
    waiting.value = value
    return driver, overlapping, waiting


def launch_overlapping(
    function: int, grid: tuple, block: tuple, shared: int, stream: int, parameters: int
) -> None:
    """Launch the kernel with driver handle `function`; it may overlap with the previous kernel.

    grid, block: three ints each.
    shared: bytes of dynamic shared memory.
    stream: the driver's handle.
    parameters: address of the table of pointers to the kernel's parameters.
    Raises CuPy's CUDADriverError.
    """
    driver, overlapping, _ = _driver()
    _launch(driver, overlapping, function, grid, block, shared, stream, parameters)


def launch_resident(
    function: int, grid: tuple, block: tuple, shared: int, stream: int, parameters: int
) -> None:
    """Launch a kernel whose blocks wait for each other.

    The driver refuses it unless all of them run at the same time.
    """
    driver, _, waiting = _driver()
    _launch(driver, waiting, function, grid, block, shared, stream, parameters)


def overlapping(
    function: int, grid: tuple, block: tuple, shared: int, parameters: int
) -> Callable[[int], None]:
    """Return start(stream), which does launch_overlapping: for a launch that is repeated."""
    driver, attribute, _ = _driver()
    config = _config(driver, attribute, grid, block, shared)
    return lambda stream: _start(driver, config, function, stream, parameters)


def _launch(driver, attribute, function, grid, block, shared, stream, parameters):
    _start(driver, _config(driver, attribute, grid, block, shared), function, stream, parameters)


def _config(driver, attribute, grid, block, shared):
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = block
    config.sharedMemBytes = shared
    config.numAttrs = 1
    config.attrs = [attribute]
    return config


def _start(driver, config, function, stream, parameters):
    config.hStream = stream
    (status,) = driver.cuLaunchKernelEx(config, function, parameters, 0)
    if status:
        raise cupy().cuda.driver.CUDADriverError(int(status))
