"""Kernels with type annotations and defaults. The annotations are strings here and name types that do not exist."""

from __future__ import annotations

from functools import partial

import numpy as np
from numba import cuda, float32, int32

from xtrain.simulator import run

SIZE = 3


@cuda.jit(device=True)
def scaled(v: NoSuchType, by: float = SIZE, /, *, plus: int32 = SIZE) -> np.float32:  # noqa: F821
    return float32(v * by + plus)


@cuda.jit
def annotated(o: np.ndarray, x: list[NoSuchType], SIZE: int = SIZE) -> None:  # noqa: F821
    i: int = cuda.grid(1)
    acc: float32
    s: cuda.shared.array = cuda.shared.array(8, float32)
    s[i]: float32 = x[i]
    cuda.syncthreads()

    def twice(v: Missing = 1) -> Missing:  # noqa: F821
        w: Missing = v + v  # noqa: F821
        return w

    acc = s[7 - i]
    o[i] = twice(acc) + scaled(x[i]) + scaled(x[i], 1, plus=0) + SIZE


def test_annotations_are_ignored():
    x, o = np.arange(8, dtype=np.float32), np.zeros(8, np.float32)
    run(annotated, 1, 8, o, x)
    assert (o == 2 * x[::-1] + (3 * x + 3) + x + 3).all()
    run(annotated, 1, 8, o, x, 5)
    assert (o == 2 * x[::-1] + (3 * x + 3) + x + 5).all()


def with_evaluated_annotations(kind):
    """Annotations that are objects, not strings, on a kernel that a decorator of the caller made."""
    compiled = partial(cuda.jit, fastmath=True)()

    def kernel(o: kind, n: "not a name"):  # noqa: F722
        for i in range(n):
            o[i] = i

    kernel.__annotations__["o"] = kind
    return compiled(kernel)


def test_annotations_that_are_objects():
    o = np.zeros(4)
    run(with_evaluated_annotations(np.ndarray), 1, 1, o, 4)
    assert o.tolist() == [0, 1, 2, 3]
