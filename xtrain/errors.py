"""The error that a user can fix, and how running out of memory is told."""

import contextlib
import traceback
from pathlib import Path

# CuPy's OutOfMemoryError is a MemoryError, NumPy's as well. The driver, cuBLAS and NCCL have words of their own.
SIGNS = ("out of memory", "MemoryAllocation", "OUT_OF_MEMORY", "ALLOC_FAILED")
PLACES = ("launch.py", "device.py", "out_of_memory.py")  # they only pass the wish on


class UserError(ValueError):
    """Bad input. The message is one sentence that says what to do; a command line prints it and exits with 2."""


def ran_out(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in SIGNS)
    )


def wanted(error: BaseException) -> str:
    """ "out of memory: Unable to allocate 3.0 GiB for an array ... (in swiglu_fwd, kernels/swiglu.py, layer 3)" """
    said = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    here = Path(__file__).parent
    places, backward, layer = [], False, ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        path = Path(frame.f_code.co_filename)
        if here not in path.parents or path.name in PLACES:
            continue
        name = frame.f_code.co_name
        backward |= path.name == "autograd.py" and name == "backward"
        layer = _layer(frame.f_locals) or layer
        places.append(f"{name}, {path.relative_to(here)} line {line}")
    where = [*places[-1:], "backward" if backward else "", "" if backward else layer]
    return f"out of memory: {said} (in {', '.join(filter(None, where))})"


def _layer(variables):
    """Of a frame in model.py that goes through the layers: which one it is at."""
    layers = getattr(getattr(variables.get("self"), "layers", None), "index", None)
    with contextlib.suppress(ValueError, TypeError):
        return f"layer {layers(variables['layer'])}" if layers and "layer" in variables else ""
    return ""
