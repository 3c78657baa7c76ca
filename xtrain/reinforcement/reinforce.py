"""Reinforcement learning: the rollouts, the step, and the run.

A step has three parts. The engine (serving/engine.py) draws completions with the model that is
trained: the same object, the same memory, in the same process; with an --environment in several
turns (episodes.py). The task rewards them (rewards.py). Then come --updates optimizer steps over
them, with the loss of the --algorithm (surrogate.py, grpo.py).

With --exact, rollouts and training compute in batch-invariant mode: both give the same bits for the
log-probability of a token. So the ratio of the first update is exactly 1 and the KL between the two
exactly 0. Every step checks this. Without it, metrics.jsonl shows how far the two drift apart:
ratio_error, rollout_kl.

Tokens are drawn at --temperature among those that --min-p, --top-k and --top-p keep. --logprobs-of
says whose log-probabilities the ratio, the clipping and the KL are about, in rollouts and training
alike, so the ratio of the first update is exactly 1 with both:

sampled   of the distribution p' that was drawn from: softmax(logits / temperature) over the kept
          tokens alone. An update then is a policy gradient of p'. The kept tokens of a position are
          those at the weights that drew, a constant of the step: a later update and the reference
          are renormalised over the same tokens, so that no drawn token gets the probability 0.
          (kernels/decoding/kept_tokens.py has the maths.)
model     of softmax(logits): the model at temperature 1, without truncation. The tokens do not come
          from it, so the gradient of its expected reward is biased by what sampling changed.

TRL (1.16) is between the two: it divides the logits by the temperature, but normalises over the
whole vocabulary; top-p, top-k and min-p only change how completions are drawn. With vLLM the
log-probabilities of the rollouts are those after truncation, and importance sampling corrects for
the difference.

Random numbers of a completion follow from the seed, the number of its prompt in the run, its number
in the group, and that of its turn. So a resumed run draws the same completions.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from ..cli import say
from ..device import Array, to_device, to_numpy
from ..errors import FunctionError, UserError
from ..formats.saved_runs import Saved, model_folder
from ..kernels.cross_entropy import IGNORE
from ..kernels.decoding.sampling import UNCHANGED
from ..kernels.runtime.invariance import batch_invariant
from ..kernels.runtime.launch import empty
from ..nn import functional as F
from ..nn.autograd import Tensor, no_grad
from ..nn.model import Transformer
from ..serving.engine import Engine
from ..training.checkpoint import Snapshot
from ..training.run import Run, StepAbandoned, StepResult, each_array
from ..training.single_device import SingleDevice
from ..tuning.finetune import digest_of, train_from
from ..tuning.rows import rows_of
from .algorithms import find_algorithm
from .calls import CallError, Interrupted, Limits
from .environment import Environment, Turns
from .episodes import NotANumber, Player
from .options import ReinforceConfig
from .prompts import Prompt
from .rewards import Group, Task, names_of, reward
from .rollouts import Drawn, Rollouts
from .start import prepare
from .surrogate import Rewarded, Surrogate, surrogate

LOGGED_STEPS = 100  # in rollouts.jsonl over a run, about


class ReinforceRun(Run):
    """A Run whose batches are rollouts of its own model.

    corpus: Prompts, with the task.  reference: the frozen model, or None.
    """

    corpus: Any
    config: Any
    loader: Any
    command = "reinforce"
    metric = "val_reward"

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        c = self.config
        device = self.model.device
        self.algorithm = find_algorithm(c.algorithm)
        self.tasks = [Task(name) for name in c.tasks]
        self.stop = self.corpus.stop
        self.failures: list[str] = []  # of the tasks and the environment, in this step
        max_batch = min(c.rollout_batch, c.batch // self.ranks.world)
        # of the log-probabilities
        self.sampling = c.sampling() if c.logprobs_of == "sampled" else UNCHANGED
        self.engine = Engine(
            self.model,
            max_batch,
            c.seq_len,
            batch_invariant=c.exact,
            logprobs_of="model" if self.sampling == UNCHANGED else "sampled",
        )
        turns = Turns(self.corpus.tokenizer, self.corpus.template, self.stop)
        environment = None
        if c.environment:
            turns.check((*self.corpus.train, *self.corpus.val))
            environment = Environment(c.environment)
        self.player = Player(
            self.engine, turns, c.stop_strings, c.max_new_tokens, c.max_turns, environment
        )
        self.reference: Transformer | None = None
        if c.kl:
            folder = model_folder(Path(c.reference or c.init), say)
            self.reference = Transformer.from_pretrained(
                folder, device, c.precision, trainable=False, change=c.change
            )
            self.reference_sha256 = digest_of(self.reference)
        self.measured: list[Surrogate] = []
        self.current: Drawn | None = None  # of the step that is made
        self.pending: Drawn | None = None  # with --off-policy: of the next one
        self.pending_of_ranks: list[Any] = []

    @property
    def step_tokens(self) -> int:
        return self.current.tokens if self.current is not None else 0

    def resume_options(self) -> dict[str, Any]:
        adapter = dict(self.model.adapter or {})
        adapter.pop("base_model_name_or_path", None)
        reference = {}
        if self.reference:
            reference = {"reference": self.reference_sha256}
        own = {"stop": sorted(self.stop), "task": self.config.task_option}
        return super().resume_options() | own | adapter | reference

    def snapshot(self, log_lengths: dict[str, int]) -> Snapshot | None:
        pending = self.pending.to_json() if self.pending is not None else None
        self.pending_of_ranks = self.ranks.gather(pending)
        return super().snapshot(log_lengths)

    def _state(self, log_lengths: dict[str, int]) -> dict[str, Any]:
        state = super()._state(log_lengths)
        if self.pending is not None:
            state["pending"] = self.pending_of_ranks
        return state

    def resume(self, saved: Saved, warn: Callable[[str], None] = lambda sentence: None) -> None:
        super().resume(saved, warn)
        pending = saved.state.get("pending")
        if pending is None or not self.config.off_policy:
            return
        if len(pending) != self.ranks.world:
            raise UserError(
                f"cannot resume {saved.folder}: with --off-policy the completions of the next step "
                f"are those of {len(pending)} ranks: use as many"
            )
        self.pending = Drawn.from_json(pending[self.ranks.rank])

    # ------------------------------------------------------------------------- rollouts
    @property
    def limits(self) -> Limits:
        """Of a call of the user's functions."""
        return Limits(self.config.reward_timeout, self.overdue)

    def failed(self, error: CallError) -> None:
        """Note the error of a call. Raises it if it must end the run."""
        if self.config.reward_errors == "stop":
            raise error
        if str(error) not in self.failures:
            say(f"warning: {error}; its completions are skipped")
        self.failures.append(str(error))

    def rewarded(
        self,
        prompts: list[Prompt],
        failed: Callable[[CallError], None],
        step: int,
        n: int = 1,
        **options: Any,
    ) -> list[Group]:
        """Return n episodes of each prompt, and their rewards. Raises calls.Interrupted, and
        UserError if logits are NaN.

        failed: is told about errors of calls; it may raise.
        step: of the run, for the reward functions.
        options: as of Player.play.
        """
        try:
            episodes = self.player.play(prompts, self.limits, failed, n, **options)
        except NotANumber:
            raise UserError(
                f"the model's logits are NaN after step {self.done}: resume from an earlier "
                "checkpoint with a smaller --lr (--resume --allow-change lr)"
            ) from None
        groups = [Group(x, episodes[i * n : (i + 1) * n]) for i, x in enumerate(prompts)]
        reward(groups, self.tasks, self.config.each_weight, step, self.limits, failed)
        return groups

    @contextlib.contextmanager
    def on_every_rank(self) -> Iterator[None]:
        """Raise StepAbandoned on every rank if calls fail inside on one of them."""
        self.parallel.report_progress()
        problem = None
        try:
            yield
        except Interrupted:
            problem = ("the run was to stop while rewards were computed", True)
        except CallError as error:
            problem = (str(error), False)
        problems = [x for x in self.ranks.gather(problem) if x]
        if problems:
            raise StepAbandoned(*problems[0])

    def next_batch(self) -> Rollouts:
        """Draw completions and reward them; with --off-policy also those of the next step. Raises
        StepAbandoned; the next call draws the same."""
        if self.pending is None:
            self.pending = self.rollouts(self.done + 1)
        drawn = self.pending
        ahead = None
        if self.config.off_policy and self.done + 1 < self.config.steps:
            ahead = self.rollouts(self.done + 2)
        self.current = drawn
        self.pending = ahead
        return drawn.batch

    def rollouts(self, step: int) -> Drawn:
        """Draw completions of a step and reward them. With --dynamic-sampling, groups of equal
        rewards are replaced by those of the next prompts."""
        c = self.config
        groups = self.draw(step)
        drawn_groups = list(groups)
        for _ in range(c.dynamic_sampling - 1):
            equal = [i for i, group in enumerate(groups) if group.is_equal]
            if not self.ranks.any(bool(equal)):
                break
            more = self.draw(step)
            drawn_groups += more
            for i, group in zip(equal, [x for x in more if not x.is_equal]):
                groups[i] = group
        numbers = self.numbers_of(drawn_groups, step)
        rewards = np.array([x.rewards for x in groups])
        episodes = [episode for x in groups for episode in x.episodes]
        examples = [[x.example()] for x in episodes]
        ids, targets, _ = rows_of(examples, max(len(x.ids) - 1 for (x,) in examples))
        drawn = np.array([x.drawn_row(ids.shape[1]) for x in episodes])
        for i, x in enumerate(episodes):
            truncated = c.mask_truncated and x.reason != "stop"
            if truncated or np.isnan(rewards.flat[i]):
                targets[i] = IGNORE
        batch = self.with_constants(Rollouts(ids, targets, drawn))
        batch = self.with_advantages(batch, rewards)
        lines = self.logged(groups, batch, step)
        return Drawn(batch, self.done, ids.size * self.ranks.world, numbers, lines)

    def draw(self, step: int) -> list[Group]:
        """Draw completions of the next prompts, and reward them. step: that trains them."""
        c, loader = self.config, self.loader
        first = loader.position + loader.rank * (loader.B // loader.world)
        prompts = [self.corpus.train[loader.order(e)[w]] for e, w in loader.next_windows()]
        self.failures = []
        with self.on_every_rank():
            return self.rewarded(
                prompts,
                self.failed,
                step,
                c.group,
                seed=lambda i, *turn: seed_of(c.seed, first + i, *turn),
                logprobs=0,
                **vars(c.sampling()),
            )

    def numbers_of(self, groups: list[Group], step: int) -> dict[str, float]:
        """Return the numbers of everything that was drawn in this step, on all ranks. Raises
        StepAbandoned if there is no reward."""
        c = self.config
        episodes = [episode for x in groups for episode in x.episodes]
        rewards = [x.rewards[np.isfinite(x.rewards)] for x in groups]
        sums = [
            np.concatenate(rewards).sum(),
            sum(x.n_drawn for x in episodes),
            sum(x.is_equal for x in groups),
            sum(own.std() for own in rewards if own.size),
            sum(x.reason != "stop" for x in episodes),
            -sum(logprob for x in episodes for logprob in x.logprobs),
            len(episodes),
            sum(own.size for own in rewards),
            sum(x.turns for x in episodes),
        ]
        total, tokens, equal, deviations, truncated, entropy, n, rewarded, turns = self.ranks.sum(
            [float(x) for x in sums]
        )
        if not rewarded:
            names = ", ".join(c.tasks)
            why = f"the task {names} returned None for all: return a number for some of them"
            if self.failures:
                why = self.failures[-1]
            raise StepAbandoned(f"step {step}: no completion has a reward: {why}")
        numbers = {
            "reward": total / rewarded,
            "reward_std": deviations * c.group / n,
            "completion_tokens": tokens / n,
            "truncated": truncated / n,
            "entropy": entropy / tokens,
            "equal_groups": equal * c.group / n,
        }
        if rewarded < n:
            numbers["without_reward"] = 1 - rewarded / n
        if c.dynamic_sampling > 1:
            numbers["drawn"] = n
        if c.environment:
            numbers["turns"] = turns / n
        of_tasks = np.concatenate([x.of_tasks for x in groups], axis=1)
        for name, own in zip(names_of(c.tasks), of_tasks):
            total, count = self.ranks.sum([float(np.nansum(own)), float(np.isfinite(own).sum())])
            if len(c.tasks) > 1 and count:
                numbers[f"rewards/{name}"] = total / count
        return numbers

    def logged(self, groups: list[Group], batch: Rollouts, step: int) -> list[dict[str, Any]]:
        """Return the lines of rollouts.jsonl for this step, of all ranks, if it is one of those
        that are logged. batch: their rows."""
        every = self.config.rollouts_every
        if every is None:
            every = max(1, self.config.steps // LOGGED_STEPS)
        if not every or (step % every and step not in (1, self.config.steps)):
            return []
        first = (batch.targets != IGNORE).argmax(1)
        advantages = iter(batch.advantages[np.arange(len(first)), first].tolist())
        lines = [
            {"step": step, "prompt": self.corpus.tokenizer.decode(group.prompt.ids)}
            | line
            | {"advantage": next(advantages)}
            for group in groups
            for line in group.lines(names_of(self.config.tasks))
        ]
        return [line for lines in self.ranks.gather(lines) for line in lines]

    def with_advantages(self, batch: Rollouts, rewards: np.ndarray) -> Rollouts:
        """Compute advantages and weights, on all ranks together. rewards: (prompts, group)."""
        c = self.config
        counted = batch.targets != IGNORE
        penalty = np.zeros(counted.shape)
        if self.algorithm.kl == "reward" and batch.reference is not None:
            difference = batch.drawn.astype(np.float64) - batch.reference
            penalty = np.where(counted, c.kl * difference, 0)
        shape = (*rewards.shape, -1)
        sum_ranks = lambda x: self.ranks.sum([x])[0]
        step = Rewarded(
            rewards,
            counted.reshape(shape),
            penalty.reshape(shape),
            c.scale_rewards,
            c.max_new_tokens,
            sum_ranks,
        )
        of_tokens = np.reshape(self.algorithm.advantages(step), shape)
        advantages = np.zeros(counted.shape, np.float32)
        advantages[...] = np.broadcast_to(of_tokens, step.counted.shape).reshape(counted.shape)
        weights = np.asarray(self.algorithm.weights(step), np.float32).ravel()
        return batch._replace(advantages=advantages, weights=weights)

    def with_constants(self, batch: Rollouts) -> Rollouts:
        """Compute what stays the same in all updates of a step: the kept tokens, and the
        log-probabilities of the reference."""
        reference = self.reference
        if self.sampling.truncates and (reference or self.config.updates > 1):
            kept = lambda x: self.model.kept_tokens(x.ids, x.targets, self.sampling)
            batch = batch._replace(kept=self.without_gradient(kept, batch))
        if reference is None:
            return batch
        logprobs = lambda x: reference.logprobs(x.ids, x.targets, None, self.sampling, x.kept).data
        return batch._replace(reference=self.without_gradient(logprobs, batch))

    def without_gradient(self, compute: Callable[[Rollouts], Array], batch: Rollouts) -> np.ndarray:
        """Return the results of a function of micro-batches, for all rows."""
        with no_grad(), batch_invariant(self.config.exact):
            parts = [to_numpy(compute(part)) for part, _ in self.micro_batches(batch)]
        return np.concatenate(parts)

    # ------------------------------------------------------------------------- one step
    def step(self) -> StepResult:
        """Rollouts, rewards, updates. Raises UserError if the task fails, or if --exact does not
        hold."""
        pending = self.pending
        try:
            return self.make_step()
        except (FunctionError, StepAbandoned):
            self.pending = pending
            raise

    def make_step(self) -> StepResult:
        """Make a step, which the caller takes back if it fails."""
        self.parallel.report_progress()
        self.phase_timer.begin("data")
        batch = self.next_batch()
        losses = []
        norms = []
        numbers = {}
        clipped = tokens = 0.0
        for i in range(self.config.updates):
            self.measured = []
            # an update counts as one of max_skips only with the step that it belongs to
            self.skips_in_a_row.fill(self.skips_in_a_row_read)
            try:
                loss, norm = self.update(batch)
            except FunctionError as error:
                if i:  # the step has changed the weights: there is nothing to save
                    raise UserError(str(error)) from error
                raise
            losses.append(float(to_numpy(loss)[0]))
            norms.append(float(to_numpy(norm)[0]))
            if i == 0:
                numbers = self.first_update()
            clipped += sum(x.clipped for x in self.measured)
            tokens += sum(x.tokens for x in self.measured)
        self.phase_timer.end()
        self.done += 1
        self.parallel.check_identical(self.optimizer, self.done)
        clipped, tokens = self.ranks.sum([clipped, tokens])
        drawn = self.current
        assert drawn is not None
        extra = {**drawn.numbers, **numbers, "clipped": clipped / max(tokens, 1)}
        mean = [np.array([np.mean(x)], np.float32) for x in (losses, norms)]
        return StepResult(self.done, mean[0], mean[1], self.optimizer.lr, extra, drawn.lines)

    @property
    def is_exact(self) -> bool:
        """Must the first update have the log-probabilities of the rollouts? They are of the same
        weights, without --off-policy."""
        drawn = self.current
        return self.config.exact and drawn is not None and drawn.weights_of == self.done

    def first_update(self) -> dict[str, float]:
        """Return how far rollouts and training are apart, and the KL to the reference. Raises
        UserError if --exact does not hold."""
        error = max(self.ranks.gather(max(x.ratio_error for x in self.measured)))
        sums = [
            sum(getattr(x, name) for x in self.measured)
            for name in ("kl", "tokens", "reference_kl")
        ]
        kl, tokens, reference_kl = self.ranks.sum(sums)
        if self.is_exact and (error or kl) and np.isfinite(error):
            raise UserError(
                f"step {self.done + 1}: training computes other log-probabilities than the "
                f"rollouts had (ratio off by {error:.3g}), so "
                "the model or the machine is not batch-invariant: use --no-exact"
            )
        tokens = max(tokens, 1)  # none if --mask-truncated leaves no completion
        numbers = {"ratio_error": error, "rollout_kl": kl / tokens}
        if self.reference is None:
            return numbers
        return {**numbers, "reference_kl": reference_kl / tokens}

    def train_step(self, hyper: Array, inv_count: Array, batch: Rollouts) -> tuple[Array, Array]:
        with batch_invariant(self.config.exact):
            return super().train_step(hyper, inv_count, batch)

    def loss(self, batch: Rollouts, inv_count: Array) -> Tensor:  # type: ignore[override]
        """Return the loss of some rows of `next_batch`."""
        entropies = None
        if self.algorithm.entropies:
            entropies = empty(batch.drawn, batch.drawn.shape, np.float32)
        constants = (None, self.sampling, batch.kept, entropies)
        logprobs = self.model.logprobs(batch.ids, batch.targets, *constants)
        host = each_array(batch._replace(kept=None), to_numpy)
        result = surrogate(
            self.algorithm.objective,
            to_numpy(logprobs.data),
            host.drawn,
            host.advantages,
            host.targets != IGNORE,
            host.weights,
            self.config.clip_range,
            self.config.kl if self.algorithm.kl == "loss" else 0.0,
            host.reference,
            None if entropies is None else to_numpy(entropies),
        )
        self.measured.append(result)
        gradient = to_device(result.dlogprobs, self.model.device)
        return F.with_gradient(logprobs, result.loss, gradient)

    # ------------------------------------------------------------------------- measurements
    def report_validation(self, log: Any) -> None:
        """Log the mean reward of the most likely completions of prompts that are held out. The
        best checkpoint has the largest."""
        c, r = self.config, self.ranks
        prompts = self.corpus.val[: c.eval_batches * (c.batch // c.group)]
        mine = prompts[r.rank :: r.world]
        with self.on_every_rank():
            groups = self.rewarded(mine, self.failed, self.done)
        rewards = np.array([x.rewards for x in groups])
        total, n = r.sum([float(np.nansum(rewards)), float(np.isfinite(rewards).sum())])
        reward = float("nan")  # of no completion
        sentence = "no validation reward: no completion has one"
        if n:
            reward = total / n
            sentence = f"validation reward {reward:.4f}, of {n:.0f} prompts at temperature 0"
        self.val_loss = self.done, -reward
        log.measured(self.done, {"val_reward": reward}, sentence)

    def sample(self) -> str:
        """Return the most likely completion of the first prompt that is held out, and its
        reward."""
        prompt = self.corpus.val[0]

        def failed(error: CallError) -> None:
            raise error

        try:  # on one rank; training continues
            (group,) = self.rewarded([prompt], failed, self.done)
        except (CallError, Interrupted) as error:
            return f"{self.corpus.tokenizer.decode(prompt.ids)}\nno reward: {error}"
        text = self.corpus.tokenizer.decode(group.episodes[0].tokens)
        reward = group.rewards[0]
        return f"{text}\n" + ("no reward" if np.isnan(reward) else f"reward {reward:g}")


def seed_of(seed: int, *numbers: int) -> int:
    """Return the seed of the rollouts of the run's prompt of this number, whose completions get
    random streams of it by Engine.stream; or of prompt, completion and later turn."""
    return int(np.random.default_rng([seed % 2**64, *numbers]).integers(2**63))


# ----------------------------------------------------------------------------- a whole run
def reinforce(
    config: ReinforceConfig,
    console: Console | None = None,
    parallel: SingleDevice | None = None,
    **outside: Any,
) -> Path:
    """Make a whole run, with checkpoints and its report, and return its folder. Raises UserError.

    Several ranks draw, reward and train their shares of the prompts.
    parallel, outside: as of training.loop.train.
    """
    parallel = parallel or SingleDevice()
    prepared, corpus = prepare(config, parallel.ranks)
    return train_from(prepared, console, parallel, ReinforceRun, corpus=corpus, **outside)
