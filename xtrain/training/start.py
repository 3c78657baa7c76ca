"""What a run decides before its first step: the device, the folder, the precision, the shape of the
model."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from .. import blas
from ..config import ModelConfig, ResolvedConfig, resolve
from ..data.sources import from_standard_input
from ..data.tokenizer import Tokenizer
from ..device import cache_folder, resolve_device
from ..errors import UserError
from ..formats.huggingface import dropout_of, read_config
from ..formats.saved_runs import Saved, model_folder
from ..nn.fp8 import check_tokens
from ..nn.model import Transformer, choose_precision
from ..nn.sharded_arena import Share
from ..run_options import RunOptions
from . import run_folder
from .option_changes import check_unchanged
from .run_folder import RunFolder
from .single_process import SingleProcess
from .trackers import check_installed

Warn = Callable[[str], None]


@dataclass(frozen=True)
class Start:
    """The decisions.

    config: every option has its value.
    name: --name as given.
    shape: of a new model, without its vocabulary.
    model: its shape, as far as it is known before the text is read: its vocabulary may become
        smaller.
    folder: where the run is written, and the checkpoint to resume from.
    tokenizer: the tokenizer.json to use, None to train one.
    device: "cpu" or "gpu".
    obstacle: why the precision is not bf16, if that would be the default.
    thread_watch: of the BLAS threads, if their number was measured.
    share: of the weights, that this rank keeps, with --zero 3.
    """

    config: ResolvedConfig
    name: str | None
    shape: dict[str, Any]
    model: ModelConfig
    folder: RunFolder
    tokenizer: str | None
    device: str
    obstacle: str
    thread_watch: blas.ThreadWatch | None
    share: Share | None = None

    @property
    def saved(self) -> Saved | None:
        """The checkpoint to resume from."""
        return self.folder.saved

    def shape_with(self, corpus: Any) -> ModelConfig:
        """Return the model's shape, with the vocabulary of the text if it is a new model."""
        if self.saved is not None or self.config.init is not None:
            return self.model
        return replace(self.model, vocab_size=corpus.vocab_size)


def decide(options: RunOptions, ranks: SingleProcess, reads_text: bool, warn: Warn) -> Start:
    """Decide how to run with these options. Raises UserError, on every rank.

    reads_text: is the data the text of --data?
    """
    device = resolve_device(options.device)
    with_init = replace(options, init=_folder_of_init(options, ranks, warn))
    config, shape = resolve(with_init, device == "gpu", ranks.world)
    ranks.on_rank_0(lambda: check_installed(config.log))
    folder = ranks.on_rank_0(lambda: run_folder.choose(config, options.name, warn))
    run_folder.check_seen(folder, ranks)
    if source := folder.saved.folder if folder.saved else config.init:
        run_folder.check_same_model(Path(source), ranks)
    run_folder.refuse_another_model(options, folder)
    config = run_folder.with_first_options(config, folder)
    model = _known_shape(config, shape, folder.saved)
    precision, obstacle = choose_precision(config.precision, device, model.head_dim)
    if precision == "fp8":
        check_tokens(config.micro_batch * config.seq_len)
    decided: dict[str, Any] = {"precision": precision}
    if folder.saved is not None and not folder.first_options:  # before a text is read
        _check_known_options(replace(config, **decided), folder.saved, ranks)
    thread_watch = None
    if device == "cpu":
        number = _blas_threads(config, model, folder.saved, ranks)
        measured = config.blas_threads is None and folder.saved is None and ranks.world == 1
        if measured and number is not None and not blas.in_environment():
            thread_watch = blas.ThreadWatch(number, *_products(config, model), blas.cores())
        decided["blas_threads"] = number
    tokenizer = None
    if reads_text:
        copied = lambda: from_standard_input(config.data, cache_folder())
        decided["data"] = ranks.on_rank_0(copied)
        tokenizer = folder.tokenizer(config.tokenizer)
        if folder.saved is not None and config.tokenizer not in (None, tokenizer):
            _tell_of_tokenizer(config.tokenizer, folder.saved, warn)
    config = replace(config, **decided)
    share = None
    if getattr(config, "zero", None) == 3 and ranks.world > 1:
        share = Share(ranks.rank, ranks.world)
    return Start(
        config, options.name, shape, model, folder, tokenizer, device, obstacle, thread_watch, share
    )


def _tell_of_tokenizer(given: str, saved: Saved, warn: Warn) -> None:
    """Warn if the file that --tokenizer named at the first start holds another one now."""
    with contextlib.suppress(UserError):  # it may be gone
        if Tokenizer.load(given).sha256 != saved.state["options"].get("tokenizer"):
            warn(
                f"{given} is not the tokenizer of the run any more: the run continues with that "
                f"of {saved.folder}"
            )


def _check_known_options(config: ResolvedConfig, saved: Saved, ranks: SingleProcess) -> None:
    """Raise UserError if options differ from the checkpoint's, as far as they are known without
    text and model."""
    then = saved.state["options"]
    now = {name: getattr(config, name) for name in config.resume_keys() if name in then}
    some = replace(saved, state=saved.state | {"options": {name: then[name] for name in now}})
    check_unchanged(some, now, config, ranks.world)


def _folder_of_init(options: RunOptions, ranks: SingleProcess, warn: Warn) -> str | None:
    """Return the folder of the weights that --init names."""
    if not options.init or options.resume:
        return options.init
    source = Path(options.init)
    init = ranks.on_rank_0(lambda: model_folder(source, warn))
    if dropout := ranks.on_rank_0(lambda: dropout_of(init)):
        warn(f"{dropout} of {init} is not applied: xtrain trains without dropout")
    return str(init)


def _known_shape(config: ResolvedConfig, shape: dict[str, Any], saved: Saved | None) -> ModelConfig:
    """Return the model's shape: see Start."""
    if saved is not None:
        return _saved_shape(saved)
    if config.init is not None:
        return read_config(Path(config.init))
    return ModelConfig(vocab_size=config.vocab_size, **shape)


def _saved_shape(saved: Saved) -> ModelConfig:
    names = {f.name for f in fields(ModelConfig)}
    return ModelConfig.from_dict({n: x for n, x in saved.state["options"].items() if n in names})


def _blas_threads(
    config: ResolvedConfig, model: ModelConfig, saved: Saved | None, ranks: SingleProcess
) -> int | None:
    """Return blas_threads on a CPU: on resuming those of the checkpoint, else blas.choose_threads,
    the fewest of all ranks."""
    number = config.blas_threads
    share = max(1, blas.cores() // ranks.local_world)
    if saved is None:
        made_on = {}
    else:
        made_on = saved.state["made_on"]
    if number is None and made_on.get("ranks") == ranks.world:
        before = made_on.get("blas_threads")
        if before is None and not blas.in_environment():
            before = share  # earlier versions took all cores, and did not record it
        number = None
        if type(before) is int and 0 < before <= blas.cores():
            number = before
    number = blas.choose_threads(number, *_products(config, model), share)
    numbers = ranks.gather(number)
    if None in numbers:
        return None
    return min(numbers)


def _products(config: ResolvedConfig, model: ModelConfig) -> tuple[int, int, int]:
    """Return rows, width and hidden width of the matrix products of a step."""
    return config.micro_batch * config.seq_len, model.dim, model.hidden_dim


# ----------------------------------------------------------------------------- the model
def make_model(start: Start, corpus: Any, world: int) -> Transformer:
    """Return the model of a run: new, from --init, or empty in the shape of the checkpoint that
    will fill it."""
    config = start.config
    options = (start.device, config.precision, config.recompute, world)
    change = config.change
    if config.init is not None and start.saved is None:
        vocab_size = corpus.vocab_size if getattr(corpus, "adds_tokens", False) else None
        model = Transformer.from_pretrained(
            config.init,
            start.device,
            config.precision,
            world=world,
            share=start.share,
            change=change,
            vocab_size=vocab_size,
        )
        model.recompute = config.recompute
    else:
        if config.init is None:
            shape = ModelConfig(vocab_size=corpus.vocab_size, **start.shape)
            model = Transformer(shape, config.seed, *options, share=start.share)
        else:
            assert start.saved is not None
            model = Transformer(_saved_shape(start.saved), None, *options, share=start.share)
        if change:
            model = model.changed(change)
    check_fit(model, config, corpus)
    if config.fp8_head:
        model.use_fp8_head()
    return model


def check_fit(model: Transformer, config: Any, corpus: Any) -> None:
    """Raise UserError if the model of --init does not fit the tokenizer or --seq-len."""
    if corpus.vocab_size > model.config.vocab_size:
        raise UserError(
            f"the tokenizer has {corpus.vocab_size} tokens, the model in {config.init} only "
            f"{model.config.vocab_size}: "
            f"give the model's own with --tokenizer {config.init}/tokenizer.json"
        )
    if config.seq_len > model.config.max_seq_len:
        raise UserError(
            f"--seq-len {config.seq_len} is longer than the model's max_seq_len "
            f"{model.config.max_seq_len}: choose a shorter one"
        )
