"""One training run: model, optimizer and data, the training step, and the state that a checkpoint
holds."""

import functools
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from .. import blas
from ..config import ResolvedConfig
from ..data.batches import Batch
from ..data.dataset import Corpus
from ..device import Array, HostCopies, device_name, free_cached, to_device, to_numpy
from ..errors import UserError
from ..formats.saved_runs import Saved
from ..kernels.cross_entropy import IGNORE
from ..kernels.elementwise import add_fwd
from ..kernels.grad_norm import sum_of_squares
from ..kernels.runtime.launch import Specialization, compile_noted, note_launches, zeros
from ..kernels.skip_nonfinite import skip_unless_finite
from ..nn.arena import Arena
from ..nn.autograd import Tensor, no_grad
from ..nn.cuda_graph import Graphed
from ..nn.expert_bias import ExpertBiases
from ..nn.model import Transformer
from ..nn.optim import COSINE, AdamW, Decay, learning_rate
from ..nn.router_losses import RouterLosses
from . import checkpoint
from .checkpoint import Snapshot
from .expert_loads import expert_loads
from .nonfinite import first_nonfinite
from .option_changes import check_unchanged
from .phase_timer import NoPhaseTimer
from .single_device import SingleDevice


def is_own(function: Any) -> bool:
    """Return whether a class or function is xtrain's, not a user's."""
    return getattr(function, "__module__", "").split(".")[0] == __name__.split(".")[0]


def each_array(batch: Any, function: Callable[[Any], Any]) -> Any:
    """Return the batch, a NamedTuple, with the results of the function in place of its arrays."""
    return type(batch)(*(None if array is None else function(array) for array in batch))


class StepAbandoned(UserError):
    """A step that cannot be made. The run is in the state after the step before, on every rank: it
    is saved, then the run ends with this error.

    interrupted: there is no error, the run was to stop.
    """

    def __init__(self, message: str, interrupted: bool = False):
        super().__init__(message)
        self.interrupted = interrupted


@dataclass(frozen=True)
class StepResult:
    """The results of one step. loss (this rank's share) and grad_norm: (1,) arrays that are still
    on the device."""

    step: int  # counts from 1
    loss: Array
    grad_norm: Array
    lr: float
    extra: dict[str, float] = field(default_factory=dict)  # further numbers, on the host
    rollouts: list[dict[str, Any]] = field(default_factory=list)  # lines of rollouts.jsonl
    fp8_counts: Array | None = None  # Fp8Scales.last_counts_K, a copy that is still on the device


class Run:
    """Model, optimizer and data of one training run, and the training step.

    Derive from it to change the model, `make_optimizer`, `learning_rate`, `next_batch`, `validate`
    or `sample` (lessons/howto/change_the_model.md).

    parallel: how the steps are divided among the ranks: a SingleDevice, the default, or a
    DataParallel.
    done: steps so far.
    metric: what --patience is about, without --best.
    val_loss: (step, loss) of the last validation, or of what --best names; smaller is better.
    ended: why the run ends before its last step; "" if it does not.
    expert_loads: of the last validation, tokens by layer and expert: expert_loads.py.
    skipped: skipped steps, as far as the host has read the numbers.
    """

    command = "train"  # the command that can continue the run
    metric = "val_loss"

    def __init__(
        self,
        config: ResolvedConfig,
        model: Transformer,
        corpus: Corpus,
        parallel: SingleDevice | None = None,
    ):
        c = config
        self.config = config
        self.model = model
        self.corpus = corpus
        self.parallel = parallel or SingleDevice()
        if not any(parameter.requires_grad for _, parameter in model.storage()):
            raise UserError(
                "no parameter of the model is trained, because requires_grad is False for all of "
                "them: leave at least one as it is"
            )
        self.parallel.attach(config, model)
        self.ranks = ranks = self.parallel.ranks
        self.expert_biases = ExpertBiases(model, config.expert_bias_rate)
        self.optimizer = self.make_optimizer()
        self.loader = corpus.loader(c.batch, c.seq_len, c.seed, ranks.rank, ranks.world)
        self.done = 0
        self.val_loss: tuple[int, float] | None = None
        self.expert_loads: dict[str, list[int]] = {}
        self.ended = ""
        # skipped steps in a row: counted on the device, and the value that the host has read
        self.skips_in_a_row = zeros(model.arena.grads, 1, np.int32)
        self.skips_in_a_row_read = 0
        self.skipped = 0
        self.host_copies = HostCopies()
        self.phase_timer = NoPhaseTimer()
        self.overdue: Callable[[], bool] = lambda: False  # StopRequest.overdue, in a Loop
        captured = c.graph and model.device != "cpu"
        if captured:
            self.on_device = capture(self.train_step, model.arena)
        else:
            self.on_device = self.eagerly
        self.to_compile = model.device == "gpu" and ranks.world == 1 and self.is_stateless()

    @property
    def program(self) -> str:
        """The command line that continues the run, without its options."""
        launcher = ""
        if self.ranks.world > 1:
            launcher = f"mpirun -n {self.ranks.world} "
        return f"{launcher}python -m xtrain.{self.command}"

    def make_optimizer(self) -> AdamW:
        """Return AdamW or Muon with the options of this run."""
        c = self.config
        options: dict[str, Any] = dict(
            lr=c.lr,
            betas=(c.beta1, c.beta2),
            eps=c.eps,
            weight_decay=c.weight_decay,
            ema_decay=c.ema,
        )
        return self.parallel.make_optimizer(c.optimizer, **options)

    # ------------------------------------------------------------------------- one step
    def step(self) -> StepResult:
        """Make one optimizer step: batch, learning rate, `train_step` on the device. No value is
        read back."""
        self.parallel.report_progress()
        self.phase_timer.begin("data")
        batch = self.next_batch()
        if self.to_compile:
            compile_noted(self.noted_step(batch))
            self.to_compile = False
        loss, norm = self.update(batch)
        self.phase_timer.end()
        self.done += 1
        self.parallel.check_identical(self.optimizer, self.done)
        fp8 = self.model.fp8
        if fp8 is None:
            counts = None
        else:
            counts = fp8.last_counts_K.copy()
        return StepResult(self.done, loss, norm, self.optimizer.lr, fp8_counts=counts)

    def update(self, batch: Any) -> tuple[Array, Array]:
        """Update the weights once. batch: see `next_batch`.  -> as `train_step`"""
        inv_count = self.parallel.inverse_target_count(batch.targets)
        self.phase_timer.begin("step")
        self.optimizer.lr = self.learning_rate()
        hyper = self.optimizer.advance()
        return self.on_device(hyper, inv_count, batch)  # eager, or a CUDA graph

    @np.errstate(all="ignore")  # steps that are not finite are expected, and skipped below
    def train_step(self, hyper: Array, inv_count: Array, batch: Any) -> tuple[Array, Array]:
        """Run the part of a step that runs on the device. It reads no value back, so a CUDA graph
        can capture it.

        hyper: AdamW.advance().
        inv_count: 1 / number of targets of the whole batch, (1,).
        batch: see `next_batch`. -> this rank's share of the loss, gradient norm of the whole model;
        (1,)
        """
        self.model.zero_grad()
        self.expert_biases.begin_step()
        losses = []
        for part, last in self.micro_batches(batch):
            self.phase_timer.begin("forward")
            loss, whole_loss = self.loss_and_terms(part, inv_count, batch)
            self.phase_timer.begin("backward")
            # after the last: gradients are sums over all ranks
            self.parallel.backward(whole_loss, last)
            losses.append(loss.data.reshape(1))
        total = functools.reduce(add_fwd, losses)
        self.phase_timer.begin("optimizer")
        norm, factor = self.parallel.clip(self.optimizer, self.config.clip)
        norms_and_losses = self.parallel.gather_norm_and_loss(norm, total)
        skip_unless_finite(factor, self.skips_in_a_row, *norms_and_losses, self.config.max_skips)
        self.optimizer.apply(hyper, factor)
        self.expert_biases.move(self.parallel.sum_load, factor)
        return total, norm

    def loss_and_terms(self, part: Any, inv_count: Array, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the loss of a micro-batch, which is logged; and with what the routers of a mixture
        of experts add to it, in the micro-batch's share of the batch of all ranks."""
        routers = RouterLosses(self.config.balance_loss, self.config.router_z_loss)
        with routers.collected():
            loss = self.loss(part, inv_count)
        self.expert_biases.count(routers)
        if not routers.terms:
            return loss, loss
        share_1 = zeros(self.skips_in_a_row, 1, np.float32)
        share_1.fill(part.ids.shape[0] / batch.ids.shape[0] / self.ranks.world)
        return loss, routers.added_to(loss, share_1)

    def noted_step(self, batch: Any) -> dict[tuple, Specialization]:
        """Return what a step with this batch launches and has not been compiled. Its kernels do not
        run; only gradients change.

        Compiled together these kernels take about as long as the slowest of them. Otherwise each is
        compiled when it runs first.
        """
        # a launch that must happen: inside, the copy would count as written
        self.model.arena.refresh()
        hyper = np.zeros(self.optimizer.hyper_size, np.float32)
        inv_count = np.ones(1, np.float32)
        fp8 = self.model.fp8
        ready = fp8 is not None and fp8.ready
        with note_launches() as launches:
            self.eagerly(hyper, inv_count, batch)
        if fp8 is not None:
            fp8.ready = ready
        free_cached(self.model.device)
        return launches

    def is_stateless(self) -> bool:
        """Return whether a forward pass is known to change nothing: true of xtrain's classes,
        unknown of a user's."""
        parts = (self, self.optimizer, *(module for _, module in self.model.modules()))
        return all(is_own(type(part)) for part in parts)

    @property
    def document_tokens(self) -> float:
        """The mean over all tokens of the length of their document, for the FLOPs of attention."""
        return self.config.seq_len

    @property
    def step_tokens(self) -> int:
        """The tokens of a step, of all ranks."""
        return self.config.batch * self.config.seq_len

    def loss(self, batch: Any, inv_count: Array | None = None) -> Tensor:
        """Return the loss of a micro-batch.

        batch: some rows of `next_batch`.
        inv_count: as in `train_step`; None: of these rows.
        """
        return self.model.loss(batch.ids, batch.targets, inv_count, batch.starts)

    def micro_batches(self, batch: Any) -> Iterator[tuple[Any, bool]]:
        """Yield (a micro-batch of the batch, is it the last one?)."""
        n = batch.ids.shape[0]
        for start in range(0, n, self.config.micro_batch):
            end = start + self.config.micro_batch
            yield each_array(batch, itemgetter(slice(start, end))), end >= n

    def eagerly(self, hyper: np.ndarray, inv_count: np.ndarray, batch: Any) -> tuple[Array, Array]:
        """Run `train_step` kernel by kernel."""
        move = lambda x: to_device(x, self.model.device)
        return self.train_step(move(hyper), move(inv_count), each_array(batch, move))

    def learning_rate(self) -> float:
        """Return the learning rate of the next step; self.done steps have been made."""
        c = self.config
        decay = COSINE
        if c.schedule == "wsd":
            decay = Decay(c.decay_fraction, c.decay_shape)
        return learning_rate(self.done, c.steps, c.lr, c.warmup, c.min_lr_ratio, decay)

    def next_batch(self) -> Any:
        """Return this rank's rows of the next batch.

        A derived class may return another NamedTuple, of `ids`, `targets` and more arrays of as
        many rows, if its `loss` reads them.
        """
        return Batch(*self.loader.next_batch())

    # ------------------------------------------------------------------------- measurements
    def layer_norms(self) -> dict[str, float]:
        """Return the gradient norms of the last step before clipping: embedding, each layer, last
        norm, head, other modules."""
        squares = self._layer_squares()
        sums = self.parallel.sum_over_owners(list(squares.values()))
        return {name: float(np.sqrt(x)) for name, x in zip(squares, sums)}

    def _layer_squares(self) -> dict[str, float]:
        sums: dict[str, float] = {}
        for prefix, p in self.model.storage():
            name = _group(prefix + next(iter(p.parts)))
            sums.setdefault(name, 0.0)
            for start, end, first in self.optimizer.owned_at():
                a = max(start, p.offset)
                b = min(end, p.offset + p.size)
                if a < b:
                    gradient = self.optimizer.gradients(a, b, first + a - start)
                    sums[name] += float(to_numpy(sum_of_squares(gradient))[0])
        return sums

    @no_grad()
    def validate(self) -> tuple[float, float]:
        """Return (mean loss in nats per token, bits per byte) over the fixed validation batches.

        Of a mixture of experts, also set expert_loads.
        """
        with expert_loads(self.model.config) as loads:
            own_sums, fewer_passes, a_row = self._validate()
        if self.parallel.zero == 3:  # the other ranks need this one for as many passes as they make
            for _ in range(fewer_passes):
                self.parallel.report_progress()
                self.loss(a_row)
        nats, tokens, lengths = self.ranks.sum(own_sums)
        self.val_loss = self.done, nats / tokens
        names = list(loads)
        sums = self.ranks.sum(np.array([loads[name] for name in names], float).reshape(-1).tolist())
        rows = np.array(sums, int).reshape(len(names), -1).tolist() if names else []
        self.expert_loads = dict(zip(names, rows))
        return nats / tokens, nats / np.log(2) / max(lengths, 1)

    def _validate(self):
        """Return [nats, tokens, their bytes] of this rank's rows, by how many forward passes they are
        fewer than those of a rank with all rows, and a row."""
        c = self.config
        ranks = self.ranks
        nats = 0.0
        tokens = 0.0
        lengths = 0.0
        fewer_passes = 0
        share = c.batch // ranks.world
        own_rows = slice(share * ranks.rank, share * (ranks.rank + 1))
        for arrays in self.corpus.val_batches(c.eval_batches, c.batch, c.seq_len):
            batch = Batch(*arrays)
            a_row = each_array(batch, itemgetter(slice(1)))
            fewer_passes += share // c.micro_batch
            # the last batch may have fewer rows
            for part, _ in self.micro_batches(each_array(batch, itemgetter(own_rows))):
                self.parallel.report_progress()
                counted = part.targets[part.targets != IGNORE]
                if not counted.size:
                    continue
                fewer_passes -= 1
                nats += self.loss(part).item() * counted.size
                tokens += counted.size
                lengths += int(self.corpus.token_lengths[counted].sum())
        return [nats, tokens, lengths], fewer_passes, a_row

    def report_validation(self, log: Any) -> None:
        """Validate, and log the result. log: RunLog or NullRunLog."""
        loss, bpb = self.validate()
        log.validation(self.done, loss, bpb, self.corpus.bigram_bpb)
        if self.expert_loads:
            log.layers(self.done, self.expert_loads)

    def sample(self) -> str:
        """Return the prompt continued with temperature 0.8, top-k 50; if that fails, the reason:
        training continues."""
        c = self.config
        tokenizer = self.corpus.tokenizer
        longest = self.model.config.max_seq_len
        try:
            prompt = tokenizer.encode_prompt(c.sample_prompt)[: longest - 1] or [tokenizer.eot_id]
            new = min(c.sample_tokens, longest - len(prompt))
            ids = self.model.generate(np.array(prompt), new, temperature=0.8, top_k=50, seed=c.seed)
            return tokenizer.decode(ids.tolist())
        except UserError as error:
            return f"(no sample: {error})"

    # ------------------------------------------------------------------------- saving and resuming
    def resume_options(self) -> dict[str, Any]:
        """Return the options that determine the numbers: a resumed run must have the same values,
        unless --allow-change names them."""
        options = {name: getattr(self.config, name) for name in self.config.resume_keys()}
        options["precision"] = self.model.precision
        options["data"] = self.corpus.sha256
        options["tokenizer"] = self.corpus.tokenizer.sha256
        options |= self.model.config.to_dict()
        if self.model.variation:
            options["variation"] = self.model.variation
        return options

    def made_on(self) -> dict[str, Any]:
        """Return the hardware and ranks of the run, on a CPU also its BLAS threads. If they change,
        the last bits may differ."""
        on_cpu = {}
        if self.model.device == "cpu":
            on_cpu = {"blas_threads": blas.threads()}
        return {
            **on_cpu,
            "device": device_name(self.model.device),
            "ranks": self.ranks.world,
            "zero": self.parallel.zero,
        }

    def save(self, folder: Path) -> Path | None:
        """Write a checkpoint now. -> its folder, None on a rank that does not write."""
        snapshot = self.snapshot({})
        if snapshot is None:
            return None
        return checkpoint.write(folder, snapshot)

    def snapshot(self, log_lengths: dict[str, int]) -> Snapshot | None:
        """Copy the state after the last step to host memory, on rank 0; every rank must call this.

        log_lengths: {file name: bytes}, to which a run that resumes from here cuts the files back.
        """
        self.parallel.report_progress()
        with self.parallel.full_moments(self.optimizer) as moments:
            if self.ranks.rank > 0:
                return None
            state = self._state(log_lengths)
            tokenizer = self.corpus.tokenizer
            return checkpoint.snapshot(self.model, moments, state, tokenizer, self.host_copies)

    def _state(self, log_lengths):
        """Return the contents of state.json."""
        step, loss = self.val_loss or (None, np.nan)
        return {
            "step": self.done,
            "loader": self.loader.state_dict(),
            "options": self.resume_options(),
            "made_on": self.made_on(),
            "logs": log_lengths,
            "row": self.skips_in_a_row_read,
            "skipped": self.skipped,
            "val_loss": loss if step == self.done and np.isfinite(loss) else None,
            "metric": self.config.best,
        }

    def resume(self, saved: Saved, warn: Callable[[str], None] = lambda sentence: None) -> None:
        """Continue from a checkpoint. Raises UserError if an option differs that must stay the
        same."""
        made_on = saved.state["made_on"]
        changed = check_unchanged(saved, self.resume_options(), self.config, self.ranks.world)
        self.parallel.load(saved, self.optimizer)
        if changed.keys() & {"data", "tokenizer", "seq_len", "seed"}:
            warn(
                "the text or its division into sequences has changed: reading restarts at its "
                "beginning"
            )
        else:
            self.loader.load_state_dict(saved.state["loader"])
        self.done = saved.step
        # max_skips may be smaller than in the run that was saved
        self.skips_in_a_row_read = min(saved.state["row"], self.config.max_skips - 1)
        self.skipped = saved.state.get("skipped", 0)
        self.skips_in_a_row.fill(self.skips_in_a_row_read)
        moved = [
            f"{name} was {made_on.get(name)}, is {value}"
            for name, value in self.made_on().items()
            if made_on.get(name, value if name == "blas_threads" else None) != value
        ]
        if moved:
            warn(f"{', '.join(moved)}: the last digits may differ")

    # ------------------------------------------------------------------------- the end
    def explain(self, step: int) -> str:
        """After max_skips skipped steps: repeat the forward and backward of `step`, op by op.

        -> where the first non-finite value appeared. Every rank must call it; all get the same
        answer.
        """
        self.on_device = self.eagerly  # frees the memory of a captured step
        gc.collect()
        self.loader.position -= (self.done - step + 1) * self.loader.B
        batch = self.next_batch()
        move = lambda x: to_device(x, self.model.device)
        inv_count = move(self.parallel.inverse_target_count(batch.targets))
        batch = each_array(batch, move)
        places = self.ranks.gather(
            first_nonfinite(self.model, lambda: self._gradients(inv_count, batch))
        )
        for rank, where in enumerate(places):
            if where is not None:
                if len(places) == 1:
                    return where
                return f"rank {rank}: {where}"
        everywhere = " on every rank"
        if len(places) == 1:
            everywhere = ""
        return (
            f"every result is finite{everywhere} when the step is repeated: the gradient norm is "
            "too large, or the error is not reproducible"
        )

    @np.errstate(all="ignore")
    def _gradients(self, inv_count, batch):
        """Run forward and backward of `train_step`, without communication."""
        self.model.zero_grad()
        for part, _ in self.micro_batches(batch):
            self.parallel.backward(self.loss(part, inv_count), last=False)

    def close(self) -> None:
        """Release the captured steps, then the communicator that they use."""
        self.on_device = self.eagerly
        gc.collect()
        self.parallel.close()


def capture(
    train_step: Callable[..., tuple[Array, ...]], arena: Arena
) -> Callable[..., tuple[Array, ...]]:
    """Return train_step as CUDA graphs, one for each kind and shape of batch.

    Its results are copied, because the next replay overwrites them.
    """

    def step_of(kind, names, hyper, inv_count, *arrays):
        return train_step(hyper, inv_count, kind(**dict(zip(names, arrays))))

    graphed = Graphed(step_of, arena)

    def replay(hyper: Array, inv_count: Array, batch: Any) -> tuple[Array, ...]:
        arrays = {name: x for name, x in batch._asdict().items() if x is not None}
        variant = (type(batch), tuple(arrays))
        results = graphed(hyper, inv_count, *arrays.values(), variant=variant)
        return tuple(x.copy() for x in results)

    return replay


def _group(name):
    """Return the group of a parameter by its Hugging Face name: "model.layers.3.mlp.up_proj.weight"
    -> "layer 3"."""
    words = name.split(".")
    if "layers" in words:
        return f"layer {words[words.index('layers') + 1]}"
    groups = {"embed_tokens": "embedding", "norm": "last norm", "lm_head": "head"}
    return groups.get(words[-2] if words[1:] else "", "other")
