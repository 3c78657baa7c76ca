"""One training run: model, optimizer and data, the step, and the state that a checkpoint holds."""

import functools
import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ..config import MATTERS, SHAPES, TrainConfig
from ..data.dataset import Corpus
from ..device import Array, HostCopies, device_name, to_device, to_numpy
from ..errors import UserError
from ..kernels.cross_entropy import count_targets
from ..kernels.elementwise import add_fwd
from ..kernels.grad_norm import sum_of_squares
from ..kernels.runtime.launch import zeros
from ..kernels.skip_nonfinite import skip_unless_finite
from ..nn.autograd import Tensor, no_grad
from ..nn.cuda_graph import Graphed
from ..nn.model import Transformer
from ..nn.optim import AdamW, clip, learning_rate
from . import checkpoint
from .checkpoint import Saved, Snapshot
from .nonfinite import first_nonfinite
from .phase_timer import off
from .single_process import ALONE, Alone


class Run:
    """Model, optimizer and data of one training run, and the training step. (With several ranks: ParallelRun in ddp.py.)"""

    def __init__(
        self, config: TrainConfig, model: Transformer, corpus: Corpus, ranks: Alone = ALONE
    ):
        self.config, self.model, self.corpus, self.ranks = config, model, corpus, ranks
        c = config
        self.optimizer = self.make_optimizer()
        self.loader = corpus.loader(c.batch, c.seq_len, c.seed, ranks.rank, ranks.world)
        self.done = 0  # steps
        self.row = zeros(model.arena.grads, 1, np.int32)  # steps skipped in a row, on the device
        self.row_seen = self.skipped = 0  # the same and all that were skipped, as far as read
        self.val_loss: tuple[int, float] | None = None  # the last validation: step, loss
        self.copies = HostCopies()
        self.beat = lambda: None  # tells a watchdog that all is well
        self.rest = lambda: None  # tells it that no more steps will come
        self.clock = off  # see clock.py
        if model.device == "cpu":
            self.on_device = self.compute
        elif config.graph:
            graphed = Graphed(self.compute, model.arena)
            self.on_device = lambda *inputs: [
                x.copy() for x in graphed(*inputs)
            ]  # the next step overwrites x
        else:
            on = model.device
            self.on_device = lambda *inputs: self.compute(*(to_device(x, on) for x in inputs))

    def make_optimizer(self) -> AdamW:
        c = self.config
        return AdamW(self.model, c.lr, (c.beta1, c.beta2), c.eps, c.weight_decay)

    def step(self) -> tuple[Any, Any, float]:
        """One optimizer step. -> loss and gradient norm, (1,) arrays still on the device; learning rate."""
        optimizer = self.optimizer
        self.clock("data")
        ids, targets, *more = self.next_batch()
        self.clock("step")
        optimizer.lr = self.learning_rate()
        loss, norm = self.on_device(ids, targets, optimizer.advance(), *more)
        self.clock(None)
        self.done += 1
        return loss, norm, optimizer.lr

    def learning_rate(self) -> float:
        """Of the next step; self.done steps have been made."""
        c = self.config
        return learning_rate(self.done, c.steps, c.lr, c.warmup, c.min_lr_ratio)

    def next_batch(self) -> tuple[np.ndarray, ...]:
        """-> ids, targets (batch, T); and with several ranks 1 / number of targets that all have together."""
        return self.loader.next_batch()

    def compute(
        self, ids: Array, targets: Array, hyper: Array, inv_count: Array | None = None
    ) -> tuple[Array, Array]:
        """The part of a step that runs on the device: arrays in, arrays out, no look at a value."""
        loss = self.gradients(self.backward, ids, targets, inv_count)
        self.clock("optimizer")
        norm, factor = self.clip()
        skip_unless_finite(factor, self.row, *self.of_all(norm, loss), self.config.max_skips)
        self.optimizer.apply(hyper, factor)
        return loss, norm

    @np.errstate(all="ignore")  # what is not finite is looked for on purpose, on every device
    def gradients(
        self, backward: Callable, ids: Array, targets: Array, inv_count: Array | None = None
    ) -> Array:
        """Forward and backward(loss, is it the last?) of each micro-batch. -> loss (1,)"""
        c, model, losses = self.config, self.model, []
        if inv_count is None:  # of the whole batch: micro-batches add up to its mean
            inv_count = count_targets(targets.reshape(-1))
        model.zero_grad()
        for i in range(0, ids.shape[0], c.micro_batch):
            part = slice(i, i + c.micro_batch)
            self.clock("forward")
            loss = model.loss(ids[part], targets[part], inv_count)
            self.clock("backward")
            backward(loss, i + c.micro_batch >= ids.shape[0])
            losses.append(loss.data.reshape(1))
        return functools.reduce(add_fwd, losses)

    def backward(self, loss: Tensor, last: bool) -> None:
        loss.backward()

    def clip(self) -> tuple[Array, Array]:
        return clip(self.model, self.config.clip)

    def of_all(self, norm: Array, loss: Array) -> tuple[Array, Array]:
        """The gradient norms and losses that decide whether the step counts: with several ranks, of all of them."""
        return norm, loss

    def timing(self, speed: float) -> dict[str, Any]:
        """More numbers for timing.jsonl."""
        return {}

    def layer_norms(self) -> dict[str, float]:
        """Gradient norms of the last step, before clipping: embedding, each layer, the last norm, head, other modules."""
        return {name: float(np.sqrt(x)) for name, x in self.layer_squares().items()}

    def layer_squares(self) -> dict[str, float]:
        sums: dict[str, float] = {}
        for prefix, p in self.model.storage():
            name = _group(prefix + next(iter(p.parts)))
            sums.setdefault(name, 0.0)
            for start, end in self.optimizer.owned:
                a, b = max(start, p.offset), min(end, p.offset + p.size)
                if a < b:
                    sums[name] += float(to_numpy(sum_of_squares(self.model.arena.grads[a:b]))[0])
        return sums

    @no_grad()
    def validate(self) -> tuple[float, float]:
        """-> (mean loss in nats per token, bits per byte) over the fixed validation batches."""
        c, ranks, nats, tokens, lengths = self.config, self.ranks, 0.0, 0, 0
        share = c.batch // ranks.world
        for all_ids, all_targets in self.corpus.val_batches(c.eval_batches, c.batch, c.seq_len):
            for i in range(share * ranks.rank, share * (ranks.rank + 1), c.micro_batch):
                self.beat()
                ids, targets = all_ids[i : i + c.micro_batch], all_targets[i : i + c.micro_batch]
                if not targets.size:  # the last batch may have fewer rows
                    continue
                nats += self.model.loss(ids, targets).item() * targets.size
                tokens += targets.size
                lengths += int(self.corpus.token_lengths[targets].sum())
        nats, tokens, lengths = ranks.total([nats, tokens, lengths])
        self.val_loss = self.done, nats / tokens
        return nats / tokens, nats / np.log(2) / max(lengths, 1)

    def sample(self) -> str:
        """The prompt, continued with temperature 0.8 from the 50 most likely tokens."""
        c, tokenizer = self.config, self.corpus.tokenizer
        prompt = tokenizer.encode(c.sample_prompt)[: self.model.config.max_seq_len - 1] or [
            tokenizer.eot_id
        ]
        new = min(c.sample_tokens, self.model.config.max_seq_len - len(prompt))
        ids = self.model.generate(np.array(prompt), new, temperature=0.8, top_k=50, seed=c.seed)
        return tokenizer.decode(ids.tolist())

    # ------------------------------------------------------------------------- saving and going on
    def matters(self) -> dict[str, Any]:
        """What decides the numbers, and so must not change when a run goes on."""
        options = {
            name: getattr(self.config, name, "fp32") for name in MATTERS
        }  # grad_comm: ddp.py
        text = {"data": self.corpus.sha256, "tokenizer": self.corpus.tokenizer.sha256}
        variation = {"variation": self.model.variation} if self.model.variation else {}
        return {**options, **text, **self.model.config.to_dict(), **variation}

    def save(self, folder: Path) -> Path | None:
        """Write a checkpoint at once. -> its folder, None on a rank that does not write."""
        snapshot = self.snapshot({})
        return None if snapshot is None else checkpoint.write(folder, snapshot)

    def snapshot(self, logs: dict[str, int]) -> Snapshot | None:
        """The state after the last step, for a checkpoint. logs: lengths of files that must be cut back to go on from it."""
        return self.take(self.optimizer, logs)

    def take(self, optimizer: Any, logs: dict[str, int]) -> Snapshot:
        """optimizer: anything with the moments m and v of the whole arena, and t."""
        step, loss = self.val_loss or (None, None)
        state = {
            "step": self.done,
            "loader": self.loader.state_dict(),
            "options": self.matters(),
            "made_on": self.place(),
            "logs": logs,
            "row": self.row_seen,
            "skipped": self.skipped,
            "val_loss": loss if step == self.done and np.isfinite(loss) else None,
        }
        return checkpoint.take(self.model, optimizer, state, self.corpus.tokenizer, self.copies)

    def place(self) -> dict[str, Any]:
        """On anything else than this the bits may differ, though not the mathematics."""
        return {
            "device": device_name(self.model.device),
            "ranks": self.ranks.world,
            "zero": int(getattr(self.config, "sharded", 0)),
        }

    def resume(self, saved: Saved, say: Callable[[str], None] = lambda sentence: None) -> None:
        """Continue from a checkpoint. Raises UserError when something that matters is different and not allowed to be."""
        same_ranks = saved.state["made_on"]["ranks"] == self.ranks.world
        allowed = {name.replace("-", "_") for name in self.config.allow_change}
        changed = changes(saved.state["options"], self.matters(), same_ranks)
        if 1 in (
            saved.state["made_on"]["ranks"],
            self.ranks.world,
        ):  # gradients do not travel there
            changed.pop("grad_comm", None)
        if refused := [text for name, text in changed.items() if name not in allowed]:
            advice = "use the options it was started with"
            if not changed.keys() & set(SHAPES):  # no option makes its weights fit another shape
                advice += f", or say what may differ: --allow-change {' '.join(changed)}"
            raise UserError(f"cannot resume {saved.folder}: {'; '.join(refused)}: {advice}")
        self.load(saved)
        if changed.keys() & {"data", "tokenizer", "seq_len", "seed"}:
            say("the text, or how it is cut, has changed: it is read from its start")
        else:
            self.loader.load_state_dict(saved.state["loader"])
        self.done = saved.step
        self.row_seen = min(saved.state["row"], self.config.max_skips - 1)  # which may be less now
        self.skipped = saved.state["skipped"]
        self.row.fill(self.row_seen)
        here, there = self.place(), saved.state["made_on"]
        if moved := [
            f"{k} was {there.get(k)}, is {v}" for k, v in here.items() if there.get(k) != v
        ]:
            say(f"{', '.join(moved)}: the last digits may differ")

    def load(self, saved: Saved) -> None:
        checkpoint.load(saved, self.model, self.optimizer)

    def explain(self, step: int) -> str:
        """After max_skips bad steps: do the last of them again, eagerly and op by op. -> where it went wrong first."""
        self.on_device = None  # the memory of a captured step is needed now
        gc.collect()
        self.loader.position -= (self.done - step + 1) * self.config.batch
        batch = [to_device(x, self.model.device) for x in self.next_batch()]
        again = lambda: self.gradients(lambda loss, last: self.backward(loss, False), *batch)
        found = self.ranks.everybody(first_nonfinite(self.model, again))
        for rank, place in enumerate(found):
            if place is not None:
                return place if len(found) == 1 else f"rank {rank}: {place}"
        what = (
            "the result of every op is finite" if len(found) == 1 else "it is finite on every rank"
        )
        return f"{what} when the step is done again: the norm is too large, or the fault does not repeat"


def _group(name):
    """Of a parameter by its Hugging Face name: "model.layers.3.mlp.up_proj.weight" -> "layer 3"."""
    words = name.split(".")
    if "layers" in words:
        return f"layer {words[words.index('layers') + 1]}"
    groups = {"embed_tokens": "embedding", "norm": "last norm", "lm_head": "head"}
    return groups.get(words[-2] if words[1:] else "", "other")


def changes(then: dict[str, Any], now: dict[str, Any], same_ranks: bool) -> dict[str, str]:
    """{name: what is different} between two Run.matters()."""
    then = json.loads(json.dumps(then))
    now = json.loads(json.dumps(now))
    different = {
        name: f"{name} was {then.get(name)}, is {now.get(name)}"
        for name in dict.fromkeys([*then, *now])
        if then.get(name) != now.get(name)
    }
    for name, what in (("data", "text"), ("tokenizer", "tokenizer")):
        if name in different:
            was, is_ = (str(x.get(name))[:16] for x in (then, now))
            different[name] = f"the {what} is not the same (sha256 was {was}, is {is_})"
    if not same_ranks:  # then each has another share
        different.pop("micro_batch", None)
    if "seq_len" in different:
        different.pop("max_seq_len", None)  # follows it
    return different
