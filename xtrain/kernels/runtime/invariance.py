"""Batch invariance: the bits of a row do not depend on how many other rows are computed with it.

A matrix product of another shape adds in another order, so the same token has other last bits alone than in a batch. In

    with batch_invariant():
        logits = model(ids)

products are computed for a fixed number of rows at a time (kernels/gemm.py), and attention adds keys in a fixed order. Training,
prefill and decoding then give the same bits for the same token. Everything else computes rows one by one anyway.
"""

import contextlib
import threading
from collections.abc import Iterator


class _Mode(threading.local):
    on = False


_mode = _Mode()


@contextlib.contextmanager
def batch_invariant(on: bool = True) -> Iterator[None]:
    """Inside, this thread's forward passes are batch-invariant. on=False: nothing changes."""
    before = _mode.on
    _mode.on = before or on
    try:
        yield
    finally:
        _mode.on = before


def is_batch_invariant() -> bool:
    """True inside `batch_invariant`."""
    return _mode.on
