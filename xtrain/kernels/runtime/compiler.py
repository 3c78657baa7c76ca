"""The compiler of the kernels: numba-cuda, or numba-cuda-mlir, its successor, or none.

    from .runtime.compiler import cuda, float32, int64      # as `from numba import ...`

Both have the same kernel language. XTRAIN_COMPILER chooses: numba, mlir, or auto (the default):
numba-cuda if it is installed, else numba-cuda-mlir if that is, else Numba, whose kernels run in the
simulator. Without any of them, as in a browser, the simulator's own `cuda` takes their place, and
COMPILER is "none". What differs between the two is here, in compile.py, in launch.py, in
mlir_changes.py and in primitives/llvm_code.py and primitives/mlir_code.py (no_code.py without a
compiler). known_issues.md says what is known about mlir.
"""

import importlib
import os
from typing import Any

from ...errors import UserError
from ...simulator import frontends

PACKAGES = {"numba": "numba", "mlir": "numba_cuda_mlir"}


def choose(setting: str) -> str:
    """Return "numba", "mlir" or "none" for a value of XTRAIN_COMPILER.

    Raises UserError for an unknown value, or if mlir is not installed.
    """
    if setting not in ("auto", *PACKAGES):
        raise UserError(f"XTRAIN_COMPILER is {setting!r}: set it to numba, mlir or auto")
    installed = frontends.installed
    if setting == "mlir" and not installed("numba_cuda_mlir"):
        raise UserError("XTRAIN_COMPILER is mlir: install it with pip install numba-cuda-mlir")
    if setting != "auto":
        return setting
    only_mlir = installed("numba_cuda_mlir") and not installed("numba_cuda")
    if only_mlir:
        return "mlir"
    return "numba" if installed("numba") else "none"


COMPILER = choose(os.environ.get("XTRAIN_COMPILER") or "auto")
_MODULES = {  # where each has cuda, its types, from_dtype
    "numba": ("numba.cuda", "numba.types", "numba.np.numpy_support"),
    "mlir": (
        "numba_cuda_mlir.cuda",
        "numba_cuda_mlir.types",
        "numba_cuda_mlir.numba_cuda.np.numpy_support",
    ),
    "none": (
        "xtrain.simulator.own_cuda",
        "xtrain.simulator.own_types",
        "xtrain.simulator.own_types",
    ),
}
cuda: Any
types: Any
_libdevice: Any
cuda, types, _dtypes = map(importlib.import_module, _MODULES[COMPILER])
from_dtype = _dtypes.from_dtype

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
if COMPILER == "none":
    _libdevice = cuda.libdevice
else:
    _libdevice = importlib.import_module(f"{cuda.__name__}.libdevice")
fadd_rn = _libdevice.fadd_rn
fsub_rn = _libdevice.fsub_rn
fmul_rn = _libdevice.fmul_rn
fdiv_rn = _libdevice.fdiv_rn
fsqrt_rn = _libdevice.fsqrt_rn
rsqrtf = _libdevice.rsqrtf
fast_fdividef = _libdevice.fast_fdividef
float_as_int = _libdevice.float_as_int
int_as_float = _libdevice.int_as_float
