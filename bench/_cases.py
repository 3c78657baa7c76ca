"""The cases of bench_kernels.py: their dataclasses, and helpers that the cases share.

To add a kernel, write a function in one of the _cases_ files: arrays, a Case, `@case`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import cupy as cp
import ml_dtypes
import numpy as np

from xtrain.kernels import cast

# tokens of a batch, width, MLP width, vocabulary
N = 32768
C = 768
F = 2048
V = 50304
# heads of one layer, their width, positions
H = 12
D = 64
T = 1024
PARAMETERS = 150_000_000
DTYPES = {"fp32": np.dtype(np.float32), "bf16": np.dtype(ml_dtypes.bfloat16)}


@dataclass
class Peer:
    """The same op in PyTorch: f of the inputs as tensors; with dy, its backward.

    eager: another f for the eager column.
    """

    f: Callable
    inputs: tuple
    dy: tuple | None = None
    eager: Callable | None = None


@dataclass
class Case:
    """One measurement of a kernel."""

    nbytes: int  # read and written
    run: Callable[[], object]  # the launcher of xtrain
    got: Callable[[], tuple] | None = None  # -> the outputs to check; None: those of run
    want: Callable[[], tuple] | None = None  # -> the same from the reference, in float64
    peer: Peer | None = None
    naive: Callable[[], object] | None = None
    shape: str = f"N={N} C={C}"


CASES: dict[str, Callable[[np.dtype], Case]] = {}


def case(f):
    """Add a function (dtype) -> Case to CASES."""
    CASES[f.__name__] = f
    return f


def draw(dtype, *shape, seed=0, scale=1.0):
    """Return random numbers with mean 0.1 on the GPU.

    Generated in float32 slice by slice, so that a large array fits.
    """
    generator = cp.random.RandomState(seed)
    x = cp.empty(shape, dtype)
    flat = x.reshape(-1)
    step = 1 << 28
    for i in range(0, flat.size, step):
        part = generator.standard_normal(min(step, flat.size - i), dtype=np.float32)
        part *= np.float32(scale)
        part += np.float32(0.1 * scale)
        flat[i : i + step] = converted(part, dtype)
    return x


def converted(x, dtype):
    """Return x in another dtype, float32 or bf16."""
    return cast.cast_fwd(x, dtype)


def double(x):
    """Return a float64 copy, for the reference."""
    return cast.cast_fwd(x, np.float32).astype(np.float64)


def tensor(x):
    """Return the same memory as a PyTorch tensor."""
    import torch

    if x.dtype == DTYPES["bf16"]:
        return torch.from_dlpack(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_dlpack(x)


def torch_type(dtype):
    """Return PyTorch's name of a NumPy dtype."""
    import torch

    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[np.dtype(dtype).name]


def functional():
    """Return torch.nn.functional, imported only when PyTorch is timed."""
    import torch

    return torch.nn.functional


def size(*arrays) -> int:
    """Return the bytes of all arrays."""
    return sum(a.nbytes for a in arrays)
