"""What a thread does in place of allocating and launching, while it records launches."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from ...device import Array


class Number:
    """A float argument of a launcher, while launches are recorded: each repetition has its own.

    Only a kernel may get it. Anything else raises TypeError, because it would be done once only.
    """

    __eq__ = None  # type: ignore[assignment]

    def __init__(self, n: int):
        self.n = n

    def __bool__(self) -> bool:
        raise TypeError("the number has no value while launches are recorded")


class _Instead(threading.local):
    """What this thread calls instead.

    allocate(shape, dtype): of CuPy's empty.
    launch(kernel, grid, block, args, shared, overlap, resident): of launching.
    product(c, a, b, ...): of a product by cuBLAS; the arguments of gemm.cublas_product.
    derive(make, addresses, n, dtype): of make(addresses), an array of n elements that depends on
        addresses of arrays and on the stream.
    """

    allocate: Callable[[Any, np.dtype], Array] | None = None
    launch: Callable[..., None] | None = None
    product: Callable[..., None] | None = None
    derive: Callable[[Callable, list[int], int, np.dtype], Array] | None = None


instead = _Instead()
