"""The options of reinforcement learning."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np

from ..errors import UserError
from ..json_files import listed
from ..kernels.decoding.sampling import Sampling
from ..run_options import RESUME_KEYS, need_positive
from ..tuning.finetune import AdapterOptions
from .surrogate import Algorithm

KEYS: tuple[str, ...] = (
    "task",
    "algorithm",
    "group",
    "updates",
    "clip_ratio",
    "clip_ratio_high",
    "mask_truncated",
    "dynamic_sampling",
    "kl",
    "max_new_tokens",
    "exact",
    "scale_rewards",
)
KEYS += ("temperature", "top_p", "top_k", "min_p", "logprobs_of")
KEYS += ("reward_weights", "environment", "max_turns", "stop_strings", "off_policy")
# options that an algorithm decides, and their values if it does not
OF_ALGORITHM: dict[str, Any] = {
    "clip_ratio": 0.2,
    "clip_ratio_high": None,
    "mask_truncated": False,
    "dynamic_sampling": 1,
}


@dataclass(frozen=True)
class ReinforceConfig(AdapterOptions):
    """One run of reinforcement learning, of the model in --init."""

    data: tuple[str, ...] = ()
    """.jsonl files, with "prompt" or "messages" in every line, and what the task reads"""
    # the function that rewards completions, MODULE:FUNCTION; the rewards of several are added
    task: tuple[str, ...] | str = ()
    reward_weights: tuple[float, ...] = ()  # one for each --task; none: 1
    # the function that answers a turn of the model, MODULE:FUNCTION; none: a completion is one turn
    environment: str | None = None
    max_turns: int = 8  # of the model in a conversation with an --environment
    group: int = 8  # completions per prompt
    # per completion, at most, with those of an --environment
    max_new_tokens: int = 64
    stop_strings: tuple[str, ...] = ()  # texts that end a completion, or a turn
    temperature: float = 1.0  # of rollouts, more than 0
    top_p: float = 1.0  # rollouts: draw among the fewest tokens that have this share together
    top_k: int = 0  # rollouts: draw among the most likely so many tokens; 0: all
    # rollouts: draw among tokens with at least this share of the most likely one's probability
    min_p: float = 0.0
    # whose log-probabilities training computes: of the distribution that tokens are drawn from
    # (temperature and truncation, renormalised over the kept tokens), or of the model at
    # temperature 1 over all tokens
    logprobs_of: Literal["sampled", "model"] = "sampled"
    batch: int | None = 64  # completions per step
    steps: int | None = 200  # of rollouts, rewards and updates
    updates: int = 1  # optimizer steps with the completions of a step
    lr: float | None = 1e-6  # peak learning rate
    warmup: int | None = 0  # steps of linear warm-up
    # grpo, grpo_paper, dr_grpo, bnpo, dapo, gspo, cispo, rloo, reinforce++, or MODULE:NAME, an
    # Algorithm of yours (lessons/howto/reinforce.md)
    algorithm: str = "grpo"
    # a token's probability ratio may differ from 1 by this in the direction of its advantage;
    # beyond, it has no gradient; none: that of the algorithm, mostly 0.2
    clip_ratio: float | None = None
    # the same above 1, where it differs; none: that of the algorithm, mostly --clip-ratio
    clip_ratio_high: float | None = None
    kl: float = 0.0  # weight of the KL divergence to the reference; 0: no reference
    reference: str | None = None  # folder of the reference; none: --init
    # divide advantages by the standard deviation of their group; not for dr_grpo, rloo,
    # reinforce++
    scale_rewards: bool = True
    # no loss for completions that --max-new-tokens ended; none: that of the algorithm, true for
    # dapo
    mask_truncated: bool | None = None
    # draw completions of further prompts in place of groups of equal rewards, at most so many
    # batches in a step; none: that of the algorithm, 1, with dapo 3
    dynamic_sampling: int | None = None
    # batch-invariant mode: log-probabilities of rollouts and training have the same bits; without
    # it, the drift is measured
    exact: bool = True
    # steps that the weights that draw are behind those that are updated: 1 draws the completions of
    # the next step before an update. The ratio corrects for it, and is not exactly 1
    off_policy: Literal[0, 1] = 0
    rollout_batch: int = 64  # sequences that are generated at the same time
    # steps between those whose completions are all written to rollouts.jsonl; 0: none; none: a
    # hundredth of all steps
    rollouts_every: int | None = None
    # seconds that a call of the task or the environment may take; 0: no limit
    reward_timeout: float = 600.0
    # a call that fails or takes too long: stop, with a checkpoint of the last step, or skip the
    # completions
    reward_errors: Literal["stop", "skip"] = "stop"
    eval_batches: int = 8  # validation: at most so many times the prompts of a step
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """dtype of activations and matrix products; auto: bf16 on a GPU that supports it, else fp32"""

    # samples are answers to a held-out prompt
    sample_prompt: ClassVar[str] = ""  # type: ignore[misc]
    fp8_head: ClassVar[bool] = False
    # a step cannot be captured in a CUDA graph, because the loss is computed on the host
    graph: ClassVar[bool] = False
    HINTS: ClassVar[dict[str, str]] = {
        "sample-prompt": "samples are answers to held-out prompts: give --val-data",
        "seq-len": "the longest prompt and --max-new-tokens decide it: leave it out",
    }

    def default_name(self, gpu: bool) -> str:
        """Return the name of the run's folder if no --name is given."""
        return "reinforce"

    def resume_keys(self) -> tuple[str, ...]:
        """Return those of training and KEYS."""
        return (*RESUME_KEYS, "weights", *KEYS)

    def may_change(self) -> set[str]:
        """Return those of training, and the reference."""
        return super().may_change() | {"reference"}

    def validate(self) -> None:
        """Raises UserError on a value out of range."""
        super().validate()
        if self.precision == "fp8":  # from Python
            raise UserError(
                "--precision fp8 is not supported here, where log-probabilities are compared: "
                "choose bf16"
            )
        if not (self.init or self.resume):
            raise UserError("there is no model to train: give its folder with --init")
        if not self.data:
            raise UserError("there are no prompts: give .jsonl files with --data")
        if self.rollouts_every is not None and self.rollouts_every < 0:
            raise UserError(
                f"--rollouts-every must be 0 for none, or more, got {self.rollouts_every}"
            )
        for name in ("group", "max_new_tokens", "max_turns", "updates", "rollout_batch"):
            least = 2 if name == "group" else 1
            if getattr(self, name) < least:
                raise UserError(
                    f"--{name.replace('_', '-')} must be at least {least}, got "
                    f"{getattr(self, name)}"
                )
        n = len(self.tasks)
        if len(self.each_weight) != n or not (np.abs(self.each_weight) <= 1e6).all():
            weights = " ".join(map(str, self.each_weight))
            raise UserError(
                f"--reward-weights must be {n} numbers up to 1e6, one for each --task, got {weights}"
            )
        if "" in self.stop_strings:
            raise UserError("a text of --stop-strings is empty: give at least one character")
        if self.temperature == 0:
            raise UserError(
                "--temperature 0 draws the same completion again and again, from which nothing is "
                "learned: give more than 0"
            )
        try:
            self.sampling()
        except ValueError as error:
            raise UserError(f"--{str(error).replace('_', '-', 1)}") from None
        truncates = self.logprobs_of == "sampled" and self.sampling().truncates
        if self.off_policy and truncates:
            raise UserError(
                "--off-policy 1 cannot keep the tokens of --top-p, --top-k and --min-p until the "
                "next step: leave these out, or give --logprobs-of model"
            )
        if self.clip_ratio is not None and not 0 < self.clip_ratio < 1:
            raise UserError(f"--clip-ratio must be between 0 and 1, got {self.clip_ratio}")
        if self.clip_ratio_high is not None and not 0 < self.clip_ratio_high < float("inf"):
            raise UserError(
                f"--clip-ratio-high must be a positive number, got {self.clip_ratio_high}"
            )
        need_positive(self, ("dynamic_sampling",))
        if not 0 <= self.reward_timeout < float("inf"):
            raise UserError(
                f"--reward-timeout must be a number of seconds, 0 for no limit, got "
                f"{self.reward_timeout}"
            )
        if not 0 <= self.kl < float("inf"):
            raise UserError(f"--kl must be a number and not negative, got {self.kl}")
        if self.reference and not self.kl and not self.resume:
            raise UserError("--reference needs --kl: give its weight, or neither")

    def with_algorithm(self, algorithm: Algorithm) -> "ReinforceConfig":
        """Return the config with every option that the algorithm decides."""
        unknown = algorithm.options.keys() - OF_ALGORITHM.keys()
        if unknown:
            raise UserError(
                f"--algorithm {self.algorithm} sets {listed(sorted(unknown))}: it may set "
                f"{listed(list(OF_ALGORITHM))}"
            )
        given = {name: getattr(self, name) for name in OF_ALGORITHM}
        options = OF_ALGORITHM | algorithm.options
        options |= {name: value for name, value in given.items() if value is not None}
        config = replace(self, **options)
        config.validate()
        return config

    @property
    def tasks(self) -> tuple[str, ...]:
        """The names of the reward functions."""
        return (self.task,) if isinstance(self.task, str) else self.task or ("",)

    @property
    def task_option(self) -> Any:
        """The option as checkpoints have it: one name is no list."""
        return self.tasks[0] if len(self.tasks) == 1 else self.tasks

    @property
    def each_weight(self) -> tuple[float, ...]:
        """The weight of each of `tasks`."""
        return self.reward_weights or (1.0,) * len(self.tasks)

    def sampling(self) -> Sampling:
        """Return how rollouts are drawn. Raises ValueError for a value out of range."""
        return Sampling(self.temperature, self.top_k, self.top_p, self.min_p)


@dataclass(frozen=True)
class PreparedConfig(ReinforceConfig):
    """A ReinforceConfig with what the prompts and the algorithm decide."""

    seq_len: int = 0  # tokens of the longest prompt and of --max-new-tokens
    clip_ratio: float = 0.2
    mask_truncated: bool = False
    dynamic_sampling: int = 1

    @property
    def clip_range(self) -> tuple[float, float]:
        """How far the ratio may differ from 1, below and above."""
        if self.clip_ratio_high is None:
            return self.clip_ratio, self.clip_ratio
        return self.clip_ratio, self.clip_ratio_high
