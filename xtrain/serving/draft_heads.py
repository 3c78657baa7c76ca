"""Heads on the model that draft tokens for speculative decoding (nn/draft_heads.py, speculation.py).

    rows of a step    ... x y    y -> z drawn      h: the model's output for y, before its head
    next step         drafts z -> d1 d2 d3         from h by heads 1, 2, 3, all at once

A head does not know z, nor the drafts before its own, so it is less often right than a draft model. But
it needs neither a cache nor a pass for each token: the outputs of the newest step are kept by slot
(Runner.hidden), and one product with the model's head gives the logits of all drafts. Each is drawn by
the sequence's own rules and the random numbers of its place, as plain decoding would draw there.
"""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..device import Array, to_device
from ..errors import UserError
from ..formats.adapters import ADAPTER_CONFIG, DRAFT_HEADS, is_adapter, read_adapters
from ..json_files import read_json
from ..kernels.runtime.launch import empty
from ..nn.draft_heads import DraftHeads
from ..nn.model import Transformer
from ..nn.tensor import Tensor
from .decode_batch import DecodeBatch
from .in_flight import to_host_later
from .requests import Request
from .speculation import Rate, Timing, count_accepted
from .work import graph_size


@dataclass
class Drafted:
    """What has been drafted for a sequence.

    start: tokens of the answer then.
    rates: how often the token of each head was accepted, those before it being right.
    """

    rates: list[Rate]
    start: int = 0
    draft: list[int] = field(default_factory=list)


class HeadsDrafter:
    """Drafts with heads on the model of `runner`, which keeps its outputs from now on."""

    def __init__(self, heads: DraftHeads, runner: Any):
        self.heads = heads
        self.runner = runner
        self.K = len(heads.heads)
        self.timing = Timing()
        self.batch = DecodeBatch(self.K * runner.max_batch, 1, runner.model.device)
        runner.keep_outputs()
        runner.drafter = self

    def seconds(self, n: int) -> float:
        """Return the time of a draft: all heads compute, however many tokens are taken."""
        return self.timing.seconds or 0.0

    def prepare(self, requests: list[Request]) -> None:
        pass

    def chances(self, request: Request, n: int) -> list[float]:
        out: list[float] = []
        p = 1.0
        for rate in self._state(request).rates[:n]:
            p *= rate.value
            out.append(p)
        return out

    def draft(self, requests: list[Request], lengths: list[int]) -> list[list[int]]:
        start = time.perf_counter()
        chosen = [request for request, n in zip(requests, lengths) if n]
        b = graph_size(max([request.slot for request in chosen]) + 1, self.runner.max_batch)
        with self.runner.mode():
            ids = self._draw(chosen, b)
            self.runner.arrival()()
        self.timing.note(time.perf_counter() - start)
        drafts: list[list[int]] = []
        for request, n in zip(requests, lengths):
            drawn = [int(ids[k * b + request.slot]) for k in range(n)]
            valid = drawn.index(-1) if -1 in drawn else n  # where the logits are NaN
            drafts.append(drawn[:valid])
            self._note(request, drafts[-1])
        return drafts

    def logits(self, b: int) -> tuple[Array]:
        """Compute the logits of all heads for the first b slots, (K b, P): what a CUDA graph
        records."""
        hidden = self.runner.hidden
        h_NC = empty(hidden, (self.K * b, hidden.shape[1]))
        bits = f"u{hidden.dtype.itemsize}"  # CuPy's copies may not have bf16
        for k, part in enumerate(self.heads(Tensor(hidden[:b]))):
            h_NC[k * b : (k + 1) * b].view(bits)[...] = part.data.view(bits)
        return (self.runner.model.logits(Tensor(h_NC)).data,)

    def every_shape(self) -> None:
        """Compute logits of every size, for note_launches: the results mean nothing."""
        ids = to_device(np.zeros(1, np.int32), self.runner.model.device)
        for b in self.runner.batch_sizes():
            (logits,) = self.logits(b)
            self.runner.sample(logits[:1], ids, self.batch.first(1), False, False, False)
        for slots in ([0], slice(1)):  # CuPy compiles when it runs
            self.runner.keep_rows(slots, self.runner.hidden, [0])

    def _draw(self, requests: list[Request], b: int) -> np.ndarray:
        """Launch heads and sampling. Return the ids (K b,), head by head, which arrive later."""
        batch = self.batch
        slots_batch = self.runner.batch
        slots_batch.write(requests)
        slots = np.array([request.slot for request in requests])
        numbers = np.array([len(request.completion) for request in requests])
        for k in range(self.K):
            rows = (k * b + slots).tolist()
            for name in DecodeBatch.OPTIONS:
                batch.host[name][rows] = slots_batch.host[name][slots]
            batch.write_counters(rows, [0] * len(rows), (numbers + k).tolist())
        batch.upload(tables=0)
        (logits,) = self.runner.run_part(self.logits, b)
        ids = to_device(np.zeros(self.K * b, np.int32), self.runner.model.device)
        self.runner.sample(logits, ids, batch.first(self.K * b), False, False, False)
        return to_host_later(ids)

    def _note(self, request: Request, draft: list[int]) -> None:
        state = self._state(request)
        state.start = len(request.completion)
        state.draft = draft

    def _state(self, request: Request) -> Drafted:
        """Return what has been drafted, with the rates of what has arrived since."""
        state = request.history
        if state is None:
            state = request.history = Drafted([Rate() for _ in range(self.K)])
        if state.draft and len(request.completion) > state.start:
            n = count_accepted(state.draft, request.completion[state.start :])
            for rate, right in zip(state.rates, [True] * n + [False]):
                rate.note(right)
            state.draft = []
        return state


def is_heads(folder: Path) -> bool:
    """Return True if the folder holds draft heads."""
    if not is_adapter(folder):
        return False
    return read_json(folder / ADAPTER_CONFIG).get("peft_type") == DRAFT_HEADS


def load_heads(folder: Path, model: Transformer) -> DraftHeads:
    """Read the heads in a folder for a model. Raises UserError if they do not fit it."""
    stored = read_adapters(folder)
    dim = model.config.dim
    wrong = [x.shape for x in stored.values() if x.shape != (dim, dim)]
    if wrong or not stored:
        raise UserError(
            f"{folder} holds draft heads of the shapes {wrong}, the model is {dim} wide: give heads "
            "that were trained on this model"
        )
    heads = DraftHeads(dim, len(stored))
    heads.arena = heads.make_arena(
        model.device, None, model.branch_dtype is not None, trainable=False
    )
    for name, tensor in heads.named_parameters():
        tensor.data = to_device(stored[name].read_finite(tensor.dtype), model.device)
    return heads
