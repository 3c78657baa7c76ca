"""Load a folder for serving: model, tokenizer, the tokens that end an answer, and the chat
template.

The folder is in the Hugging Face layout, or it is the folder of an xtrain run, whose newest valid
checkpoint is used.
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..cli import say
from ..data.chat_template import ChatTemplate
from ..data.tokenizer import Tokenizer
from ..device import resolve_device
from ..errors import UserError
from ..formats import huggingface
from ..formats.adapters import source_of
from ..formats.saved_runs import model_folder
from ..json_files import read_json
from ..nn.model import Transformer, choose_precision

TOKENIZER = "tokenizer.json"


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model of a command."""

    model: str  # a Hugging Face folder, or the folder of an xtrain run
    change: str | None = None  # MODULE:FUNCTION, with which the model was changed for its training
    device: Literal["auto", "cpu", "gpu"] = "auto"  # auto: the GPU if there is one
    precision: Literal["auto", "fp32", "bf16"] = "auto"  # auto: bf16 on a GPU that supports it

    def load(self) -> "Pretrained":
        """Load the model and what belongs to it. Raises UserError."""
        return load(self.model, self.device, self.precision, self.change)


@dataclass(frozen=True)
class Texts:
    """What a folder says about text, as returned by `load_texts`: everything but the model."""

    folder: Path
    tokenizer: Tokenizer
    stop: frozenset[int]  # tokens that end an answer, as in transformers

    @functools.cached_property
    def template(self) -> ChatTemplate | None:
        """Return the chat template; None if the folder has none. Raises UserError if it cannot be
        read."""
        return ChatTemplate.load(source_of(self.folder, TOKENIZER))

    @property
    def chat_stop(self) -> frozenset[int]:
        """Tokens that end an answer in a chat: also the tokenizer's, if there is a template."""
        eos = self.tokenizer.eos_token_id
        return self.stop | ({eos} if self.template and eos is not None else set())


@dataclass(frozen=True)
class Pretrained(Texts):
    """The contents of a folder, as returned by `load`."""

    model: Transformer


def load(
    folder: str | Path,
    device: str = "auto",
    precision: Literal["auto", "fp32", "bf16"] = "auto",
    change: str | None = None,
) -> Pretrained:
    """Load model, tokenizer and stop tokens from a Hugging Face folder or from an xtrain run.

    folder: its name, the `model` of ModelOptions, which describes the other arguments, too.
    The tokenizer is checked before the weights are read.
    Raises UserError if anything is missing, damaged or not supported.
    """
    if not str(folder):  # --model "$UNSET": Path("") would be the current folder
        raise UserError("the name of the model's folder is empty: give one")
    folder = model_folder(Path(folder), say)
    device = resolve_device(device)
    config = huggingface.read_config(folder)
    chosen, obstacle = choose_precision(precision, device, config.head_dim)
    if obstacle and device == "gpu":
        say(f"precision fp32: {obstacle}")
    texts = load_texts(folder)
    if texts.tokenizer.vocab_size > config.vocab_size:
        raise UserError(
            f"{folder}: the tokenizer has {texts.tokenizer.vocab_size} tokens, the model only "
            f"{config.vocab_size}: use the tokenizer that belongs to the model"
        )
    model = Transformer.from_pretrained(folder, device, chosen, trainable=False, change=change)
    return Pretrained(folder, texts.tokenizer, texts.stop, model)


def load_texts(folder: Path) -> Texts:
    """Load tokenizer and stop tokens of a Hugging Face folder. Raises UserError if anything is
    missing or damaged."""
    texts = source_of(folder, TOKENIZER)
    tokenizer = Tokenizer.load(texts)
    return Texts(folder, tokenizer, stop_tokens(folder, tokenizer))


def stop_tokens(folder: Path, tokenizer: Tokenizer) -> frozenset[int]:
    """Return the ids that end an answer: eos_token_id of generation_config.json, else of
    config.json, else of the tokenizer.

    Without any, only the limit of tokens ends an answer.
    """
    for name in (huggingface.GENERATION, huggingface.CONFIG):
        path = source_of(folder, name) / name
        content = read_json(path) if path.is_file() else {}
        ids = huggingface.as_ids(content.get("eos_token_id"))
        if ids:
            return ids
    return frozenset([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])
