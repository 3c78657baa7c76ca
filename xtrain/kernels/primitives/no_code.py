"""Intrinsics without a compiler: names that kernels call and that the simulator runs.

In the place of llvm_code.py and mlir_code.py where neither Numba nor numba-cuda-mlir is installed.
"""

import functools

__all__ = ["Code", "function_maker"]


class Code:
    """What generates no code."""

    generator = None


class function_maker:
    """Make an intrinsic of a typing function. Only a kernel can call it."""

    def __init__(self, typing):
        functools.update_wrapper(self, typing)

    def __call__(self, *args):
        raise TypeError(f"{self.__name__} can be used in a kernel only")
