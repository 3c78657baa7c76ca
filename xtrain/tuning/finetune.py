"""Fine-tuning a model on conversations: the options, the data as a Run reads them, and the run."""

import hashlib
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, cast

import numpy as np
from rich.console import Console

from ..cli import print_text, say
from ..data.sources import from_standard_input
from ..data.tokenizer import Tokenizer
from ..device import Array, cache_folder, to_numpy
from ..errors import UserError
from ..formats.adapters import base_folder, check_writable, is_adapter, source_of
from ..formats.gguf_tensors import file_of
from ..formats.huggingface import as_ids, read_config
from ..formats.manifest import tensor_checksum
from ..formats.saved_runs import folders, model_folder
from ..formats.texts import TOKENIZER
from ..kernels.decoding.logprobs import MAX_TOP
from ..kernels.fp8 import TILE
from ..nn.autograd import Tensor, no_grad
from ..nn.draft_heads import HeadedTransformer
from ..nn.lora import AdaptedTransformer, Lora
from ..nn.model import Transformer
from ..nn.quantized import quantize_onto
from ..run_options import (
    RESUME_KEYS,
    ExpertOptions,
    OptimizerOptions,
    ParallelOptions,
    RowOptions,
    need_positive,
)
from ..training import loop, run_folder
from ..training.run import Run
from ..training.single_device import SingleDevice
from ..training.single_process import SingleProcess
from ..training.start import Start, check_fit
from .corpus import Conversations, read_conversations

UNIT = 64  # tokens: sequences are padded to a multiple; in fp8 to one of kernels.fp8.TILE
PACKED_ROW = 2048  # tokens
EXAMPLES = 16  # per optimizer step
SAMPLE_TOKENS = 200
MAX_HEADS = 16


@dataclass(frozen=True)
class AdapterOptions(ParallelOptions, ExpertOptions, OptimizerOptions):
    """What fine-tuning and reinforcement learning share: a model in --init, all of whose weights or
    adapters are trained."""

    # rank of LoRA adapters on the frozen model; 0: train all weights. If --init holds adapters of
    # this rank, they are trained further
    lora: int = 0
    # the adapters' product is multiplied by this / rank; none: twice the rank, or that of the
    # adapters in --init
    lora_alpha: float | None = None
    # all, or some of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, embed_tokens, lm_head
    lora_targets: tuple[str, ...] = ("all",)
    # matrices with another rank, as NAME=RANK; NAME: a regular expression of the end of their names,
    # such as k_proj=4 or 'layers\.0\..*=8'
    lora_rank_pattern: tuple[str, ...] = ()
    lora_alpha_pattern: tuple[str, ...] = ()  # matrices with another alpha, as NAME=ALPHA
    lora_rslora: bool = False  # multiply by alpha / sqrt(rank) in place of alpha / rank
    lora_dora: bool = False  # DoRA: train the norm of each row of the matrices apart
    # with --lora, of the frozen model's matrices: int8, fp8 in one byte per weight, int4, nf4 in four
    # bits (QLoRA); full: as --precision says
    weights: Literal["full", "int8", "fp8", "int4", "nf4"] = "full"
    # biases that are trained: none, all, or those of the matrices with adapters
    lora_bias: Literal["none", "all", "lora_only"] = "none"
    # what is trained whole: embed_tokens, lm_head, or ends of the names of norms
    lora_modules_to_save: tuple[str, ...] = ()
    # pissa: the adapters begin with the largest singular values of the matrices
    lora_init: Literal["default", "pissa"] = "default"
    # the run is written to OUT/NAME; none: the name of the command
    name: str | None = None
    # a chat template in place of the model's, which is saved with the run: a file, or chatml, llama3,
    # phi3, gemma, deepseek-r1 or plain (xtrain/tuning/templates.py)
    chat_template: str | None = None
    # values that the chat template reads, as JSON, such as '{"enable_thinking": false}'
    chat_template_kwargs: str | None = None
    # .jsonl files to validate on; none: a share of --data
    val_data: tuple[str, ...] = ()
    val_share: float = 0.05  # of --data, held out without --val-data
    # steps between validations; 0: no validation; none: a tenth of all steps
    eval_every: int | None = None
    # steps between generated samples; 0: no samples; none: only at the end
    sample_every: int | None = None
    # steps between checkpoints; 0: only the one at the end; none: a third of all steps
    save_every: int | None = None
    weight_decay: float = 0.0  # decoupled weight decay of matrices; norms have none
    balance_loss: float = 0.0  # weight of the loss that balances the experts of a mixture; 0: none
    router_z_loss: float = 0.0  # weight of a loss that keeps the router's logits small; 0: none

    answers: ClassVar[bool] = True

    def validate(self) -> None:
        """Raise UserError on a value out of range."""
        super().validate()
        if self.lora < 0:
            raise UserError(f"--lora must be a positive rank, or 0 for none, got {self.lora}")
        given = [x.name for x in fields(AdapterOptions) if x.name.startswith("lora_")]
        given = [name for name in given if getattr(self, name) != getattr(AdapterOptions, name)]
        if given and not self.lora:
            raise UserError(f"--{given[0].replace('_', '-')} needs --lora: give its rank")
        if not self.lora and self.weights != "full":
            raise UserError(f"--weights {self.weights} needs --lora: give a rank")
        if self.lora:
            self.adapters("")
        if self.lora and self.precision == "fp8":
            raise UserError("--precision fp8 is not supported with --lora: choose bf16")
        if not 0 < self.val_share < 1:
            raise UserError(f"--val-share must be between 0 and 1, got {self.val_share}")

    def intervals(self, steps: int) -> dict[str, int]:
        """Return the steps between validations, samples and checkpoints, of a run of so many
        steps."""
        defaults = {
            "eval_every": max(1, -(-steps // 10)),
            "sample_every": steps,
            "save_every": max(1, -(-steps // 3)),
        }
        return {x: n if getattr(self, x) is None else getattr(self, x) for x, n in defaults.items()}

    def adapters(self, base: str, folder: Path | None = None) -> Lora:
        """Return what --lora and the options that begin with it say. Raises UserError.

        base: the model's folder.
        folder: of adapters that are trained further, which decide what no option says.
        """
        lora = Lora(self.lora, 2.0 * self.lora)
        if folder is not None:
            lora = Lora.read(folder)
            if self.lora_init not in ("default", lora.init):  # it would change the frozen model
                raise UserError(
                    f"{folder} holds adapters that did not begin as {self.lora_init}: leave out "
                    "--lora-init, or merge them with `xtrain export --merge` and train new ones"
                )
        options: dict[str, Any] = {
            "targets": self.lora_targets if self.lora_targets != ("all",) else None,
            "alpha": self.lora_alpha,
            "rank_pattern": pattern_of("--lora-rank-pattern", self.lora_rank_pattern, int) or None,
            "alpha_pattern": pattern_of("--lora-alpha-pattern", self.lora_alpha_pattern, float)
            or None,
            "rslora": self.lora_rslora or None,
            "dora": self.lora_dora or None,
            "bias": self.lora_bias if self.lora_bias != "none" else None,
            "modules_to_save": self.lora_modules_to_save or None,
            "init": self.lora_init if self.lora_init != "default" else None,
        }
        given = {name: value for name, value in options.items() if value is not None}
        if set(given.get("targets", lora.targets)) != set(lora.targets):
            given["modules"] = frozenset()
        return replace(lora, r=self.lora, base=base, **given)


def pattern_of(option: str, given: tuple[str, ...], kind: type) -> dict[str, Any]:
    """Return {NAME: number} of texts NAME=NUMBER. Raises UserError. kind: int or float."""
    pattern = {}
    for text in given:
        name, _, number = text.rpartition("=")
        try:
            pattern[name] = kind(number)
        except ValueError:
            name = ""
        if not name:
            raise UserError(f"{option} {text!r} must be NAME=NUMBER, such as k_proj=8")
    return pattern


@dataclass(frozen=True)
class ExampleOptions(AdapterOptions):
    """What training on the examples of .jsonl files has."""

    # a record that cannot be used: stop, or leave it out and count it
    bad_records: Literal["stop", "skip"] = "stop"
    # print so many examples, with what is trained in colour, and end
    show: int = 0
    epochs: float = 3.0  # how often each example is read, without --steps
    # examples that are longer than --seq-len: leave them out, cut them, or stop
    too_long: Literal["skip", "cut", "error"] = "skip"
    steps: int | None = None  # optimizer steps; none: those of --epochs
    warmup: int | None = None  # steps of linear warm-up; none: a thirtieth of all steps
    # tokens of an example; none: the longest that the model accepts and the data have, rounded up
    seq_len: int | None = None
    # the user's message of the generated samples; none: the first example that is held out
    sample_prompt: str = ""
    sample_tokens: int = SAMPLE_TOKENS  # at most, per sample

    @property
    def default_lr(self) -> float:
        """The peak learning rate without --lr."""
        if self.lora:
            return 2e-4
        return 1e-5

    def validate(self) -> None:
        """Raise UserError on a value out of range."""
        super().validate()
        need_positive(self, ("seq_len", "sample_tokens"))
        if not (self.init or self.resume):
            raise UserError("there is no model to fine-tune: give its folder with --init")
        if not self.data:
            raise UserError("there is nothing to train on: give .jsonl files with --data")
        if self.show < 0:
            raise UserError(f"--show must be a number of examples, got {self.show}")
        if not 0 < self.epochs < 1e6:
            raise UserError(f"--epochs must be a positive number, got {self.epochs}")


@dataclass(frozen=True)
class FinetuneConfig(ExampleOptions, RowOptions):
    """One fine-tuning of the model in --init."""

    data: tuple[str, ...] = ()
    """.jsonl, .parquet or .arrow files, or folders of them: conversations, prompts with completions, or
    texts (lessons/howto/finetune.md)"""
    # how often an epoch has the examples of each path in --data, such as 2 0.5; none: once
    mix: tuple[float, ...] = ()
    # of a conversation: train all answers, the last one, or each one in an example of its own, which
    # ends there: as the template shows a conversation when the model answers
    train_answers: Literal["all", "last", "each"] = "all"
    # several examples in a row of --seq-len tokens, instead of one and padding. Attention stays in
    # the example
    pack: bool = False
    # rows per optimizer step, summed over all ranks; none: 16, with --pack as many as hold about 16
    # examples
    batch: int | None = None
    # peak learning rate; none: 1e-5, with --lora 2e-4, with --draft-heads 1e-3
    lr: float | None = None
    # tokens per row; none: the longest example that the model accepts and the data have, rounded
    # up, with --pack 2048 if the model accepts it
    seq_len: int | None = None
    # distillation: folder of a model with the same tokenizer, whose most likely tokens are learned
    # with their probabilities
    teacher: str | None = None
    teacher_weight: float = 0.5  # of the KL to the teacher in the loss; the rest: cross-entropy
    teacher_top_k: int = MAX_TOP  # the most likely tokens of the teacher; all others count as one
    # forward: of the teacher to the model, which covers all that the teacher may say; reverse: of
    # the model to the teacher, which leaves out what the teacher would not say
    teacher_kl: Literal["forward", "reverse"] = "forward"
    # train so many heads on the frozen model, which guess tokens ahead for --speculate and --draft;
    # 0: train the model
    draft_heads: int = 0

    @property
    def default_lr(self) -> float:
        """The peak learning rate without --lr."""
        if self.draft_heads:
            return 1e-3
        return super().default_lr

    def default_name(self, gpu: bool) -> str:
        """Return the name of the run's folder if no --name is given."""
        return "finetune"

    def resume_keys(self) -> tuple[str, ...]:
        """Return those of training, and of the teacher."""
        return (*RESUME_KEYS, "weights", "teacher_weight", "teacher_top_k", "teacher_kl")

    def may_change(self) -> set[str]:
        """Return those of training, and the teacher."""
        return super().may_change() | {"teacher"}

    def validate(self) -> None:
        """Raise UserError on a value out of range."""
        super().validate()
        if self.mix and len(self.mix) != len(self.data):
            raise UserError(
                f"--mix has {len(self.mix)} weights for {len(self.data)} paths in --data: give one "
                "for each"
            )
        if not all(0 <= weight <= 1000 for weight in self.mix):
            raise UserError(f"--mix must be numbers from 0 to 1000, got {self.mix}")
        if not 0 <= self.draft_heads <= MAX_HEADS:
            raise UserError(
                f"--draft-heads must be a whole number from 0 to {MAX_HEADS}, got "
                f"{self.draft_heads}"
            )
        if self.draft_heads and self.lora:
            raise UserError("--draft-heads and --lora cannot be combined: train one of them")
        if self.draft_heads and self.precision == "fp8":
            raise UserError("--precision fp8 is not supported with --draft-heads: choose bf16")
        if self.draft_heads and self.teacher:
            raise UserError("--draft-heads and --teacher cannot be combined: train one of them")
        if self.teacher and self.precision == "fp8":
            raise UserError("--precision fp8 is not supported with --teacher: choose bf16")
        if not 0 <= self.teacher_weight <= 1:
            raise UserError(f"--teacher-weight must be from 0 to 1, got {self.teacher_weight}")
        if not 0 < self.teacher_top_k <= MAX_TOP:
            raise UserError(
                f"--teacher-top-k must be from 1 to {MAX_TOP}, got {self.teacher_top_k}"
            )


Config = TypeVar("Config", bound=ExampleOptions)


def filled(config: Config, corpus: Conversations, context: int, world: int) -> Config:
    """Return the config with every option that the data decide. context: the model's."""
    c = config
    longest = corpus.seq_len
    if corpus.pack:
        longest = max(longest, min(PACKED_ROW, corpus.train_tokens))
    if c.precision == "fp8":
        unit = TILE
    else:
        unit = UNIT
    seq_len = c.seq_len or min(-(-longest // unit) * unit, context)
    rows = len(corpus.rows(corpus.train, seq_len, c.seed))
    rows_of_16 = max(1, round(EXAMPLES * rows / len(corpus.train)))
    batch = c.batch or -(-rows_of_16 // world) * world
    steps = c.steps or max(1, math.ceil(c.epochs * rows / batch))
    lr = c.lr or c.default_lr
    warmup = c.warmup
    if warmup is None:
        warmup = min(steps // 30, max(0, steps - 2))
    decided: dict[str, Any] = c.intervals(steps)
    return replace(c, seq_len=seq_len, batch=batch, steps=steps, lr=lr, warmup=warmup, **decided)


class FinetuneRun(Run):
    """A Run on examples, which samples as a chat."""

    corpus: Any
    command = "finetune"

    def __init__(self, config: Any, model: Any, corpus: Any, *parallel: Any):
        super().__init__(config, model, corpus, *parallel)
        end_tokens = as_ids(model.special_tokens.get("eos_token_id"))
        if not corpus.stop <= end_tokens:  # of a base model, which does not know the end of a turn
            stop = sorted(end_tokens | corpus.stop)
            model.special_tokens = model.special_tokens | {"eos_token_id": stop}
            model.generation = model.generation or {}
        self.teacher: Transformer | None = None
        if getattr(config, "teacher", None):
            self.teacher = read_teacher(config, model, corpus.tokenizer)

    def loss(self, batch: Any, inv_count: Array | None = None) -> Tensor:
        """Return the loss of a micro-batch, with the KL to a teacher; in validation, where there is
        no inv_count, the cross-entropy alone."""
        if self.teacher is None or inv_count is None:
            return super().loss(batch, inv_count)
        c: Any = self.config
        rows = batch.ids, batch.targets
        with no_grad():
            teacher = self.teacher.top_logprobs(*rows, batch.starts, c.teacher_top_k)
        options = c.teacher_weight, c.teacher_kl == "reverse"
        return self.model.distillation_loss(*rows, inv_count, batch.starts, teacher, *options)

    @property
    def document_tokens(self) -> float:
        if not self.corpus.pack:
            return super().document_tokens
        squares = sum((len(x.ids) - 1) ** 2 for x in self.corpus.train)
        return squares / (self.loader.windows * self.config.seq_len)

    def resume_options(self) -> dict[str, Any]:
        """With --pack: the examples share rows. With --lora, --draft-heads: what is trained."""
        options: dict[str, Any] = {"pack": True} if self.corpus.pack else {}
        if heads := getattr(self.model, "draft_heads", None):
            options["draft_heads"] = len(heads.heads)
        if lora := getattr(self.model, "lora", None):
            targets = sorted(lora.targets)
            options |= {"lora": lora.r, "lora_alpha": lora.alpha, "lora_targets": targets}
            options |= lora.extensions
        if self.teacher is not None:
            options["teacher"] = digest_of(self.teacher)
        return super().resume_options() | options

    def sample(self) -> str:
        """Return the answer to --sample-prompt, or to the first example that is held out; if that
        fails, the reason."""
        c = self.config
        corpus = self.corpus
        tokenizer = self.corpus.tokenizer
        context = self.model.config.max_seq_len
        try:
            prompt = corpus.val[0].prompt.tolist()
            if c.sample_prompt and corpus.template:
                messages = [{"role": "user", "content": c.sample_prompt}]
                prompt = tokenizer.encode(corpus.template.render(messages))
            elif c.sample_prompt:
                prompt = tokenizer.encode_prompt(c.sample_prompt)
            prompt = prompt[: context - 1] or [tokenizer.eot_id]
            new = min(c.sample_tokens, context - len(prompt))
            sampling = dict(temperature=0.8, top_k=50, seed=c.seed, stop=corpus.stop)
            return tokenizer.decode(self.model.generate(np.array(prompt), new, **sampling))
        except UserError as error:
            return f"(no sample: {error})"


def read_teacher(config: Any, model: Transformer, tokenizer: Tokenizer) -> Transformer:
    """Return the model of --teacher, frozen. Raises UserError if it does not fit the one that is
    trained."""
    folder = model_folder(Path(config.teacher), say)
    teacher = Transformer.from_pretrained(folder, model.device, config.precision, trainable=False)
    own = Tokenizer.load(source_of(folder, TOKENIZER), base_folder(folder))
    if own.sha256 != tokenizer.sha256 or teacher.config.vocab_size != model.config.vocab_size:
        raise UserError(
            f"--teacher {config.teacher} has another tokenizer than the model: choose a teacher "
            "with the same one"
        )
    if teacher.config.max_seq_len < config.seq_len:
        raise UserError(
            f"--teacher {config.teacher} reads {teacher.config.max_seq_len} tokens, fewer than "
            f"--seq-len {config.seq_len}: give that many at most"
        )
    return teacher


def digest_of(model: Transformer) -> str:
    """Return SHA-256 of the names and weights of a model, in the precision that it has here."""
    sums = {name: tensor_checksum(to_numpy(x.data)) for name, x in model.named_parameters()}
    return hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()


def finetune(
    config: FinetuneConfig,
    console: Console | None = None,
    parallel: SingleDevice | None = None,
    **outside: Any,
) -> Path:
    """Make a whole fine-tuning, with checkpoints and its report, and return the run's folder.
    Raises UserError.

    parallel, outside: as of training.loop.train.
    """
    parallel = parallel or SingleDevice()
    config, corpus = prepare(config, parallel.ranks)
    if config.draft_heads:
        outside["make_model"] = with_draft_heads
    return train_from(config, console, parallel, FinetuneRun, corpus=corpus, **outside)


def train_from(
    config: AdapterOptions,
    console: Console | None,
    parallel: SingleDevice,
    make_run: Callable[..., Run],
    **more: Any,
) -> Path:
    """Call training.loop.train for all weights of --init, or for adapters."""
    if config.lora:
        more["make_model"] = adapted
    return loop.train(config, console, parallel, make_run, **more)


def adapted(start: Start, corpus: Any, world: int) -> AdaptedTransformer:
    """Return the frozen model of --init with adapters: new ones, which a checkpoint then fills, or
    those in --init. Raises UserError."""
    config: Any = start.config
    source = Path(config.init)
    if start.saved:
        source = start.saved.folder
    folder = base_folder(source)
    adapters = source if is_adapter(source) else None
    base = str(file_of(folder) or folder.resolve())
    lora = config.adapters(base, adapters)
    if adapters is not None and not start.saved:
        check_further(adapters, lora)
    check_writable(folder)
    where = (start.device, config.precision)
    if config.weights != "full":
        where = ("cpu", "fp32")
    loaded = AdaptedTransformer.from_pretrained(
        folder, *where, trainable=False, change=config.change
    )
    model = cast(AdaptedTransformer, loaded)
    if config.weights != "full":
        quantize_onto(model, config.weights, start.device, config.precision)
    model.recompute = config.recompute
    check_fit(model, config, corpus)
    model.adapt(lora, config.seed, world)
    if adapters is None:  # files of others may have patterns that fit nothing
        model.check_patterns(lora.ranks)
    if adapters is not None and not start.saved:
        model.load_weights(adapters)
    return model


def check_further(adapters: Path, lora: Lora) -> None:
    """Raise UserError if the options ask for other tensors than those in a folder of adapters."""
    there = Lora.read(adapters)
    instead = "or merge them with `xtrain export --merge` and train new ones"
    if there.r != lora.r:
        raise UserError(
            f"{adapters} holds adapters of rank {there.r}: give that to --lora to train them "
            f"further, {instead}"
        )
    for name in ("targets", "rank_pattern", "dora", "bias", "modules_to_save"):
        before = getattr(there, name)
        now = getattr(lora, name)
        if isinstance(before, tuple):  # their order does not matter
            before = set(before)
            now = set(now)
        if before != now:
            option = f"--lora-{name.replace('_', '-')}"
            raise UserError(
                f"{adapters} holds adapters with another {option}: leave the option out to train "
                f"them further, {instead}"
            )


def with_draft_heads(start: Start, corpus: Any, world: int) -> HeadedTransformer:
    """Return the frozen model of --init with new draft heads, which a checkpoint then fills. Raises
    UserError."""
    config: Any = start.config
    folder = base_folder(start.saved.folder) if start.saved else Path(config.init)
    if is_adapter(folder):
        raise UserError(
            f"{folder} holds adapters: write the whole model with `xtrain export --merge` first, "
            "and train heads for that"
        )
    loaded = HeadedTransformer.from_pretrained(
        folder, start.device, config.precision, trainable=False, change=config.change
    )
    model = cast(HeadedTransformer, loaded)
    check_fit(model, config, corpus)
    model.add_heads(config.draft_heads, str(folder.resolve()), world)
    return model


def model_source(config: AdapterOptions, ranks: SingleProcess) -> tuple[Any, Path]:
    """Return the config with its data in files, and the folder of the model: a run may continue
    when --init is gone.

    Raises UserError, on every rank.
    """
    copied = ranks.on_rank_0(lambda: from_standard_input(config.data, cache_folder()))

    def source() -> Path:
        run = run_folder.to_resume(config)
        if config.resume and folders(run):
            return model_folder(run, say)
        return model_folder(Path(config.init or ""), say)

    return replace(config, data=copied), ranks.on_rank_0(source)


def prepare(
    config: Config,
    ranks: SingleProcess,
    read: Callable[[Any, Path, int], Conversations] = read_conversations,
) -> tuple[Config, Conversations]:
    """Return the config with every option that the data decide, and the data. Raises UserError, on
    every rank.

    read: gets the config, the model's folder and its context.
    """
    config.validate()
    config, folder = model_source(config, ranks)
    context = read_config(folder).max_seq_len
    if config.seq_len and config.seq_len > context:
        raise UserError(
            f"--seq-len {config.seq_len} is longer than the model's max_seq_len {context}: choose "
            "a shorter one"
        )
    corpus = ranks.rank_0_first(lambda: read(config, folder, context))
    command = f"xtrain.{config.default_name(False)}"
    if corpus.is_new_template and ranks.rank == 0:
        shown = corpus.template.render([{"role": "user", "content": "..."}])
        say(
            f"{command}: the model has no chat template: it gets the default one, which is "
            f"saved with it as chat_template.jinja, {shown!r}"
        )
    if ranks.rank == 0:
        for sentence in (corpus.describe(), *corpus.reasons):
            say(f"{command}: {sentence}")
    return filled(config, corpus, context, ranks.world), corpus


def show_examples(
    config: Config,
    ranks: SingleProcess,
    read: Callable[[Any, Path, int], Conversations] = read_conversations,
) -> None:
    """Print the first --show examples. What is trained is green, or between ⟦ and ⟧ if standard
    output is no terminal. read: see `prepare`. Raises UserError."""
    _, corpus = prepare(config, ranks, read)
    if ranks.rank == 0:
        for x in corpus.train[: config.show]:
            print_text(x.shown(corpus.tokenizer, sys.stdout.isatty()))
