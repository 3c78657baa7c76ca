"""What a thread does in place of allocating and launching, while it records launches."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from ...device import Array


class _Instead(threading.local):
    """What this thread calls instead.

    allocate(shape, dtype): of CuPy's empty.
    launch(kernel, grid, block, args, shared, overlap, resident): of launching.
    derive(make, addresses, n, dtype): of make(addresses), an array of n elements that depends on
        addresses of arrays and on the stream.
    """

    allocate: Callable[[Any, np.dtype], Array] | None = None
    launch: Callable[..., None] | None = None
    derive: Callable[[Callable, list[int], int, np.dtype], Array] | None = None


instead = _Instead()
