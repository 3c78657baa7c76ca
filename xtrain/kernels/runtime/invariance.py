"""Batch invariance: the bits of a row do not depend on how many other rows are computed with it.

A matrix product of another shape adds in another order, so the same token has other last bits alone
than in a batch. In

    with xtrain.batch_invariant():
        logits = model(ids)  # or loss = model.loss(ids, targets), with or without no_grad

the bits of a row depend only on the tokens of its sequence up to it. What is fixed:

    products    x w^T without split-K. Where a check of this machine has shown that a row's bits do
                not depend on the number of rows, all at once; elsewhere a fixed number of rows at a
                time (kernels/gemm.py, kernels/row_bits.py). Few rows in decoding: a kernel with the
                same chain of tensor-core instructions (kernels/decoding/gemv_chain.py)
    attention   tiles of keys begin at multiples of their size, are added in one order, and have the
                same size in training, prefill and decoding (flash_attention.py,
                context_attention.py, exact_decode_attention.py in kernels/attention/)
    all others  compute rows one by one anyway; the variants for few rows that add in another order
                (residual.py, decoding/gemv.py) are not used

Training, prefill and decoding then give the same bits for the same token, whatever the batch, the
padding, the blocks of the cache, and the places where a prompt is cut.
`Engine(batch_invariant=True)` runs in this mode. So the log-probabilities with which it has drawn a
sequence are those that training computes for it, bit for bit: a ratio of the two is exactly 1 for
the same weights, as reinforcement learning assumes.

This holds for one machine and one build of the libraries, the same model (in bf16 `trainable=False`
reads the embedding in bf16, a trainable model in float32), and
- on the CPU for the same number of BLAS threads, and for models of at most 8192 channels;
- with dynamic RoPE scaling for sequences up to the trained length: a longer one turns all angles in
  training, but cannot turn those that are in a KV cache;
- for modules of your own if they compute rows one by one, or with the ops of nn/functional.py.

Gradients are those of the same forward and as accurate as without the mode. Their bits depend on
the batch, over which they are sums. Backward may run inside or outside.
"""

import contextlib
import threading
from collections.abc import Iterator


class _Mode(threading.local):
    on = False


_mode = _Mode()


@contextlib.contextmanager
def batch_invariant(on: bool = True) -> Iterator[None]:
    """Make this thread's forward passes batch-invariant: a row's bits depend on its sequence alone.

    For training passes whose log-probabilities must be those of `Engine(batch_invariant=True)`.
    on=False: nothing changes.
    """
    with invariance(_mode.on or on):
        yield


@contextlib.contextmanager
def invariance(on: bool) -> Iterator[None]:
    """Inside, this thread's forward passes are batch-invariant, or not, whatever is set outside."""
    before = _mode.on
    _mode.on = on
    try:
        yield
    finally:
        _mode.on = before


def is_batch_invariant() -> bool:
    """Return True inside `batch_invariant`."""
    return _mode.on
