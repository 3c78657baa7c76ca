"""The compiler of the kernels: numba-cuda, or numba-cuda-mlir, its successor.

    from .runtime.compiler import cuda, float32, int64      # as `from numba import ...`

Both have the same kernel language. XTRAIN_COMPILER chooses: numba, mlir, or auto (the default):
numba-cuda if it is installed, else numba-cuda-mlir if that is, else Numba, whose kernels run in the
simulator. What differs between the
two is here, in compile.py, in launch.py, in mlir_changes.py and in primitives/llvm_code.py and
primitives/mlir_code.py. known_issues.md says what is known about mlir.
"""

import importlib
import importlib.util
import os
from typing import Any

from ...errors import UserError

PACKAGES = {"numba": "numba", "mlir": "numba_cuda_mlir"}


def choose(setting: str) -> str:
    """Return "numba" or "mlir" for a value of XTRAIN_COMPILER.

    Raises UserError for an unknown value, or if mlir is not installed.
    """
    if setting not in ("auto", *PACKAGES):
        raise UserError(f"XTRAIN_COMPILER is {setting!r}: set it to numba, mlir or auto")
    installed = lambda package: importlib.util.find_spec(package) is not None
    if setting == "mlir" and not installed("numba_cuda_mlir"):
        raise UserError("XTRAIN_COMPILER is mlir: install it with pip install numba-cuda-mlir")
    if setting != "auto":
        return setting
    only_mlir = installed("numba_cuda_mlir") and not installed("numba_cuda")
    return "mlir" if only_mlir else "numba"


COMPILER = choose(os.environ.get("XTRAIN_COMPILER") or "auto")
_numpy_support = {"numba": "numba.np", "mlir": "numba_cuda_mlir.numba_cuda.np"}[COMPILER]
cuda: Any = importlib.import_module(f"{PACKAGES[COMPILER]}.cuda")
types: Any = importlib.import_module(f"{PACKAGES[COMPILER]}.types")
from_dtype = importlib.import_module(f"{_numpy_support}.numpy_support").from_dtype

boolean = types.boolean
float32 = types.float32
int8 = types.int8
int32 = types.int32
int64 = types.int64
uint8 = types.uint8
uint16 = types.uint16
uint32 = types.uint32
uint64 = types.uint64

# the functions of CUDA's libdevice that kernels use
_libdevice: Any = importlib.import_module(f"{PACKAGES[COMPILER]}.cuda.libdevice")
fadd_rn = _libdevice.fadd_rn
fsub_rn = _libdevice.fsub_rn
fmul_rn = _libdevice.fmul_rn
fdiv_rn = _libdevice.fdiv_rn
fsqrt_rn = _libdevice.fsqrt_rn
rsqrtf = _libdevice.rsqrtf
fast_fdividef = _libdevice.fast_fdividef
float_as_int = _libdevice.float_as_int
int_as_float = _libdevice.int_as_float
