"""The training step on one device. `parallel.ddp.DataParallel` divides it among ranks.

A Run is given one of the two. Where ranks have to communicate, `loop.train` and `Run.train_step`
call its methods, so the same step runs on one device and on many.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..config import ResolvedConfig
from ..device import Array
from ..formats.saved_runs import Saved
from ..kernels.cross_entropy import IGNORE
from ..nn.autograd import Tensor
from ..nn.model import Transformer
from ..nn.optim import OPTIMIZERS, AdamW, clip
from . import checkpoint
from .single_process import SINGLE_PROCESS, SingleProcess


class SingleDevice:
    """Every array is whole on this device and nothing is communicated. The base class of
    `DataParallel`."""

    ranks: SingleProcess = SINGLE_PROCESS
    sharded = False  # is the optimizer state divided among the ranks (ZeRO-1 and 3)?
    zero = 0  # the stage of ZeRO; with 3, all ranks run the same forward passes

    # ------------------------------------------------------------------------- the course of a run
    def begin(self, config: Any) -> None:
        """Check that all ranks have the same options, and choose this rank's GPU. Raises
        UserError."""

    def check_data(self, corpus: Any) -> None:
        """Raises UserError, on every rank, if the ranks do not read the same data."""

    def attach(self, config: ResolvedConfig, model: Transformer) -> None:
        """Prepare for the steps of this model. The Run calls it."""
        self.config = config
        self.model = model

    def watch(self, run: Any) -> contextlib.AbstractContextManager:
        """Return a context in which a run that makes no progress is ended."""
        return contextlib.nullcontext()

    def report_progress(self) -> None:
        """Tell the watchdog that the run makes progress."""

    def stop_watchdog(self) -> None:
        """Training is over: what follows may take long."""

    def close(self) -> None:
        """Release the communicator. No captured step may use it any more."""

    # ------------------------------------------------------------------------- in the step
    def inverse_target_count(self, targets: np.ndarray) -> np.ndarray:
        """Return 1 / number of targets in the batch of all ranks, (1,) float32; 0 without any."""
        (count,) = self.ranks.sum([float((targets != IGNORE).sum())])
        return np.array([1 / count if count else 0], np.float32)

    def backward(self, loss: Tensor, last: bool) -> None:
        """Run backward of one micro-batch. After the last one of a step the gradients are sums over
        all ranks."""
        loss.backward()

    def clip(self, optimizer: AdamW, max_norm: float) -> tuple[Array, Array]:
        """Return the gradient norm of the whole model, factor that clips it to max_norm; (1,)
        arrays on the device."""
        return clip(self.model, max_norm)

    def gather_norm_and_loss(self, norm: Array, loss: Array) -> tuple[Array, Array]:
        """Return all gradient norms and all losses that must be finite for the step to count.
        Called after `clip`."""
        return norm, loss

    def sum_load(self, load_LE: Array) -> None:
        """Replace the load of experts (ExpertBiases) by that of all ranks."""

    # ------------------------------------------------------------------------- between steps
    def check_identical(self, optimizer: AdamW, step: int) -> None:
        """Raises UserError, on every rank, if the ranks do not hold the same weights, bit for
        bit."""

    def sum_over_owners(self, values: list[float]) -> list[float]:
        """Add up sums over `optimizer.owned`, so that they cover the whole arena."""
        return values

    def timing(self, tokens_per_s: float) -> dict[str, Any]:
        """Return additional fields for a line of timing.jsonl."""
        return {}

    # ------------------------------------------------------------------------- optimizer state
    def make_optimizer(self, name: str, **options: Any) -> AdamW:
        """Return the optimizer, or its sharded form. name: a key of OPTIMIZERS.
        options: those of AdamW."""
        return OPTIMIZERS[name](self.model, **options)

    @contextlib.contextmanager
    def full_moments(self, optimizer: AdamW) -> Iterator[Any]:
        """Yield an object with m, v and ema of the whole arena and t, for a checkpoint; the weights
        are whole too."""
        yield optimizer

    def load(self, saved: Saved, optimizer: AdamW) -> None:
        """Fill the model and the optimizer from a checkpoint. Raises UserError."""
        checkpoint.load(saved, self.model, optimizer)
