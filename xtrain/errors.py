"""UserError, the error that a user can fix; and how to recognize and describe an out-of-memory
error."""

import contextlib
import traceback
from pathlib import Path
from typing import Any

# The out-of-memory errors of CuPy and NumPy are MemoryErrors. The driver, cuBLAS and NCCL raise
# RuntimeErrors with one of these texts.
OUT_OF_MEMORY_TEXTS = ("out of memory", "MemoryAllocation", "OUT_OF_MEMORY", "ALLOC_FAILED")
# files that allocate on behalf of a caller: the description names the caller instead
ALLOCATORS = ("launch.py", "device.py", "out_of_memory.py")


INTERRUPTED_EARLY = "interrupted before training began"


class UserError(ValueError):
    """Bad input. The message is one sentence: what is wrong and what to do. A command prints it and
    exits with 2."""


class FunctionError(UserError):
    """A user's function that has failed during a run, which is saved before it ends."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return True for an out-of-memory error of Python, NumPy, CuPy, the driver, cuBLAS or NCCL."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in OUT_OF_MEMORY_TEXTS)
    )


def describe_out_of_memory(error: BaseException) -> str:
    """Return what was being allocated, and where:

    "out of memory: Unable to allocate 3.0 GiB for an array ... (in swiglu_fwd, kernels/swiglu.py,
    layer 3)"
    """
    message = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    package = Path(__file__).parent
    callers = []
    backward = False
    layer = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        path = Path(frame.f_code.co_filename)
        if package not in path.parents or path.name in ALLOCATORS:
            continue
        name = frame.f_code.co_name
        backward |= path.name == "autograd.py" and name == "backward"
        layer = _layer(frame.f_locals) or layer
        callers.append(f"{name}, {path.relative_to(package)} line {line}")
    where = [*callers[-1:], "backward" if backward else "", "" if backward else layer]
    return f"out of memory: {message} (in {', '.join(filter(None, where))})"


def _layer(variables: dict[str, Any]) -> str:
    """Return the current layer, from the local variables of the frame in model.py that loops over
    the layers."""
    layers = getattr(getattr(variables.get("self"), "layers", None), "index", None)
    with contextlib.suppress(ValueError, TypeError):
        if layers and "layer" in variables:
            return f"layer {layers(variables['layer'])}"
        return ""
    return ""
