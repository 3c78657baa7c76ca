"""Load a folder for serving: the model, and what it says about texts (formats/texts.py).

The folder is in the Hugging Face layout, or it is the folder of an xtrain run, whose newest valid
checkpoint is used.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..cli import say
from ..device import resolve_device
from ..errors import UserError
from ..formats import huggingface
from ..formats.gguf_tensors import shown
from ..formats.saved_runs import model_folder
from ..formats.texts import Texts, load_texts
from ..nn.draft_heads import DraftHeads
from ..nn.model import Precision, Transformer, choose_precision
from .draft_heads import is_heads, load_heads


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
class Pretrained(Texts):
    """The contents of a folder, as returned by `load`."""

    model: Transformer

    def draft(self, folder: str | None) -> Transformer | DraftHeads | None:
        """Load a smaller model that drafts for this one, or heads of it; None without a folder.
        Raises UserError if its tokens are others, or the heads do not fit."""
        if folder is None:
            return None
        model_or_heads = model_folder(Path(folder), say)
        if is_heads(model_or_heads):
            return load_heads(model_or_heads, self.model)
        precision: Precision = "fp32" if self.model.branch_dtype is None else "bf16"
        other = load(folder, self.model.device, precision)
        if other.tokenizer.token_bytes != self.tokenizer.token_bytes:
            raise UserError(
                f"{folder} has another tokenizer than {shown(self.folder)}: choose a smaller model of the "
                "same family"
            )
        return other.model


def load(
    folder: str | Path,
    device: str = "auto",
    precision: Precision = "auto",
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
            f"{shown(folder)}: the tokenizer has {texts.tokenizer.vocab_size} tokens, the model only "
            f"{config.vocab_size}: use the tokenizer that belongs to the model"
        )
    model = Transformer.from_pretrained(folder, device, chosen, trainable=False, change=change)
    return Pretrained(folder, texts.tokenizer, texts.stop, texts.template, model)
