"""Fine-tuning a model on conversations: the options, the data as a Run reads them, and the run."""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import Console

from ..cli import say
from ..config import Preset, TrainConfig
from ..data.chat_template import ChatTemplate
from ..data.tokenizer import Tokenizer
from ..errors import UserError
from ..formats.huggingface import read_config
from ..formats.saved_runs import folders, model_folder
from ..training import loop, run_folder
from ..training.run import Run
from .examples import Example, digest, read_examples
from .rows import RowLoader, rows_of

UNIT = 64  # tokens: sequences are padded to a multiple
SAMPLE_TOKENS = 200


@dataclass(frozen=True)
class FinetuneConfig(TrainConfig):
    """One fine-tuning. Options about the shape of the model or its tokenizer do not apply: --init has both."""

    preset: str = "finetune"  # the name of the run's folder, if no --name is given
    # .jsonl files, with "messages", "prompt" and "completion", or "text" in every line
    data: tuple[str, ...] = ()  # type: ignore[assignment]
    # .jsonl files to validate on; none: a share of --data
    val_data: tuple[str, ...] = ()
    val_share: float = 0.05  # of the examples in --data, held out without --val-data
    epochs: float = 3.0  # how often each example is read, without --steps
    # examples that are longer than --seq-len: leave them out, cut them, or stop
    too_long: Literal["skip", "cut", "error"] = "skip"
    batch: int | None = 16  # examples per optimizer step
    lr: float | None = 1e-5  # peak learning rate
    weight_decay: float = 0.0  # decoupled weight decay of matrices; norms have none
    # tokens per example; none: the longest that the model accepts and the data have, rounded up
    seq_len: int | None = None
    # the user's message of the generated samples; none: the first example that is held out
    sample_prompt: str = ""
    sample_tokens: int = SAMPLE_TOKENS  # at most, per sample

    def presets(self) -> dict[str, Preset]:
        """Only one, without a shape: --init has it."""
        return {"finetune": Preset({}, {})}

    def validate(self) -> None:
        """Raises UserError on a value out of range."""
        super().validate()
        if not (self.init or self.resume):
            raise UserError("there is no model to fine-tune: give its folder with --init")
        if not self.data:
            raise UserError("there is nothing to train on: give .jsonl files with --data")
        if not 0 < self.val_share < 1:
            raise UserError(f"--val-share must be between 0 and 1, got {self.val_share}")
        if not 0 < self.epochs < 1e6:
            raise UserError(f"--epochs must be a positive number, got {self.epochs}")


class Conversations:
    """Examples with the interface of a data.dataset.Corpus.

    train, val: the examples.  skipped: those left out, because they are too long.  seq_len: T of the longest in use.
    """

    split, bigram_bpb = "documents", None

    def __init__(
        self, name: str, files: int, train: list[Example], val: list[Example], skipped: int,
        tokenizer: Tokenizer, template: ChatTemplate | None,
    ):  # fmt: skip
        self.name, self.files, self.skipped, self.tokenizer = name, files, skipped, tokenizer
        self.train, self.val, self.template = train, val, template
        self.documents = len(train) + len(val)
        self.vocab_size, self.token_lengths = tokenizer.vocab_size, tokenizer.token_lengths
        self.train_tokens, self.val_tokens = (sum(len(x.ids) for x in xs) for xs in (train, val))
        ids = (x.ids for x in (*train, *val))
        self.bytes = int(sum(self.token_lengths[x].sum() for x in ids))
        self.sha256 = digest([*train, *val])

    @property
    def seq_len(self) -> int:
        return max(len(x.ids) - 1 for x in (*self.train, *self.val))

    def loader(self, B: int, T: int, seed: int = 0, rank: int = 0, world: int = 1) -> RowLoader:
        """Endless shuffled batches of B examples, padded to T tokens. With several ranks, each reads its share of the rows."""
        return RowLoader(self.train, B, T, seed, rank, world)

    def val_batches(self, n: int, B: int, T: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """At most n batches of examples that are held out, always the same: ids and targets (B, longest of the batch)."""
        wanted = min(n * B, len(self.val))
        chosen = [self.val[i * len(self.val) // wanted].cut(T) for i in range(wanted)]
        groups = [chosen[i : i + B] for i in range(0, wanted, B)]
        return [
            rows_of([[x] for x in group], max(len(x.ids) - 1 for x in group))[:2]
            for group in groups
        ]

    @cached_property
    def stop(self) -> frozenset[int]:
        """The special tokens that are trained: what ends an answer."""
        found: set[int] = set()
        for x in self.train[:100]:
            found |= set(x.ids[x.trained].tolist())
        return frozenset(found & (self.tokenizer.special_ids | {self.tokenizer.eos_token_id}))


def read_conversations(config: FinetuneConfig, source: Path, context: int) -> Conversations:
    """Read --data and --val-data. source: the folder of tokenizer and template.  context: the model's. Raises UserError."""
    c, tokenizer = config, Tokenizer.load(source)
    template = ChatTemplate.load(source)
    limit = min(c.seq_len or context, context)
    longer = 0

    def read(files: tuple[str, ...]) -> list[Example]:
        nonlocal longer
        found = []
        for x in read_examples(files, tokenizer, template):
            if len(x.ids) - 1 > limit:
                longer += 1
                if c.too_long == "error":
                    raise UserError(
                        f"{x.where} has {len(x.ids)} tokens, more than --seq-len {limit}: shorten it, or give --too-long skip or cut"
                    )
                x = x.cut(limit)
                if c.too_long == "skip" or not x.trained[1:].any():  # nothing to train is left
                    continue
            found.append(x)
        if not found:
            raise UserError(
                f"{', '.join(files)}: no example is left, all {longer} are longer than {limit} tokens: give a larger --seq-len, or "
                "--too-long cut"
            )
        return found

    examples, val = read(c.data), read(c.val_data) if c.val_data else []
    if not val:  # the same examples for every seed
        if len(examples) < 2:
            raise UserError(
                "one example cannot be trained on and held out: give more, or --val-data"
            )
        n = min(max(1, round(c.val_share * len(examples))), len(examples) - 1)
        held = set(np.random.default_rng(0).permutation(len(examples))[:n].tolist())
        val = [x for i, x in enumerate(examples) if i in held]
        examples = [x for i, x in enumerate(examples) if i not in held]
    if longer:
        what = "cut or left out" if c.too_long == "cut" else "left out"
        say(f"xtrain.finetune: {longer} examples are longer than {limit} tokens and were {what}")
    name = ", ".join(Path(file).name for file in c.data)
    files = len(c.data) + len(c.val_data)
    return Conversations(name, files, examples, val, longer, tokenizer, template)


def filled(config: FinetuneConfig, corpus: Conversations, context: int) -> FinetuneConfig:
    """The config with every option that the data decide."""
    c = config
    seq_len = c.seq_len or min(-(-corpus.seq_len // UNIT) * UNIT, context)
    steps = c.steps or max(1, math.ceil(c.epochs * len(corpus.train) / (c.batch or 1)))
    each = max(1, -(-steps // 10))
    return replace(
        c, seq_len=seq_len, steps=steps, eval_every=c.eval_every or each,
        warmup=min(steps // 30, max(0, steps - 2)) if c.warmup is None else c.warmup,
        sample_every=c.sample_every or steps, save_every=c.save_every or max(1, -(-steps // 3)),
    )  # fmt: skip


class FinetuneRun(Run):
    """A Run on examples, which samples as a chat."""

    program = "python -m xtrain.finetune"
    corpus: Any

    def sample(self) -> str:
        """The answer to --sample-prompt, or to the first example that is held out; if that fails, the reason."""
        c, corpus, tokenizer = self.config, self.corpus, self.corpus.tokenizer
        context = self.model.config.max_seq_len
        try:
            prompt = corpus.val[0].prompt.tolist()
            if c.sample_prompt and corpus.template:
                messages = [{"role": "user", "content": c.sample_prompt}]
                prompt = tokenizer.encode(corpus.template.render(messages))
            elif c.sample_prompt:
                prompt = tokenizer.encode(c.sample_prompt, special=True)
            prompt = prompt[: context - 1] or [tokenizer.eot_id]
            new = min(c.sample_tokens, context - len(prompt))
            ids = self.model.generate(np.array(prompt), new, temperature=0.8, top_k=50, seed=c.seed)
            answer = ids.tolist()[len(prompt) :]
            end = next((i + 1 for i, x in enumerate(answer) if x in corpus.stop), len(answer))
            return tokenizer.decode([*prompt, *answer[:end]])
        except UserError as error:
            return f"(no sample: {error})"


def finetune(config: FinetuneConfig, console: Console | None = None, *, write_report: Any) -> Path:
    """A whole fine-tuning, with checkpoints and its report. -> the run's folder. Raises UserError.

    write_report: see training.loop.train.
    """
    config.validate()
    for option in ("tokenizer", "vocab_size"):
        if getattr(config, option) is not None and not config.resume:
            raise UserError(
                f"--{option.replace('_', '-')} does not apply: leave it out, the model in --init has a tokenizer"
            )
    run = run_folder.to_resume(config)
    resumes = config.resume and bool(folders(run))  # then the model may be gone from --init
    source = model_folder(run if resumes else Path(config.init or ""), say)
    context = read_config(source).max_seq_len
    if config.seq_len and config.seq_len > context:
        raise UserError(
            f"--seq-len {config.seq_len} is longer than the model's max_seq_len {context}: choose a shorter one"
        )
    corpus = read_conversations(config, source, context)
    config = filled(config, corpus, context)
    return loop.train(
        config, console, make_run=FinetuneRun, corpus=corpus, write_report=write_report
    )
