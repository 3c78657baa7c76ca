"""A folder that can be served: model, tokenizer, the tokens that end an answer, the chat template.

FOLDER is in the Hugging Face layout, or one of xtrain's runs, of which the newest checkpoint that is whole is taken.
"""

import functools
import sys
from dataclasses import dataclass
from pathlib import Path

from ..data.tokenizer import Tokenizer
from ..device import has_bf16, resolve_device
from ..errors import UserError
from ..formats import huggingface
from ..json_files import is_folder, read_json
from ..nn.model import Transformer
from ..training import checkpoint
from .chat_template import ChatTemplate


@dataclass(frozen=True)
class Pretrained:
    """What `load` found in a folder."""

    folder: Path
    model: Transformer
    tokenizer: Tokenizer
    stop: frozenset[int]  # tokens that end an answer, as in transformers

    @functools.cached_property
    def template(self) -> ChatTemplate | None:
        """Raises UserError."""
        return ChatTemplate.load(self.folder)


def load(folder: str | Path, device: str = "auto", precision: str = "auto") -> Pretrained:
    """device: "auto", "cpu" or "gpu"; precision: "auto" (bf16 on a GPU that has it), "fp32" or "bf16".

    The tokenizer is looked at first: it costs little, and no weights are read in vain. Raises UserError: one sentence.
    """
    if not str(folder):  # --model "$UNSET": Path("") would be the current folder
        raise UserError("the name of the model's folder is empty: give one")
    folder, device = model_folder(Path(folder)), resolve_device(device)
    if precision == "auto":
        precision = "bf16" if device == "gpu" and has_bf16() else "fp32"
    config = huggingface.read_config(folder)
    if not (folder / "tokenizer.json").is_file() and (folder / "tokenizer.model").is_file():
        raise UserError(
            f"{folder} has a tokenizer.model, but no tokenizer.json: make one with transformers.AutoTokenizer."
            "from_pretrained(folder).save_pretrained(folder), or take it from a newer release of the model"
        )
    tokenizer = Tokenizer.load(folder)
    if tokenizer.vocab_size > config.vocab_size:
        raise UserError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} tokens, the model only {config.vocab_size}: "
            "they do not belong together"
        )
    stop = stop_tokens(folder, tokenizer)
    model = Transformer.from_pretrained(folder, device, precision, trainable=False)
    return Pretrained(folder, model, tokenizer, stop)


def model_folder(folder: Path) -> Path:
    """The folder itself, or the newest good checkpoint of a run (passing over a damaged one is said). Raises UserError."""
    if not is_folder(folder):
        what = "is a file" if folder.exists() else "does not exist"
        raise UserError(
            f"{folder} {what}: give a Hugging Face folder on this machine (nothing is downloaded) or one of xtrain's runs"
        )
    if checkpoint.folders(folder):
        say = lambda sentence: print(sentence, file=sys.stderr)
        return checkpoint.newest(folder, say, "there is nothing to serve").folder
    config = folder / huggingface.CONFIG
    if config.is_file() and {"train", "model"} <= read_json(config).keys():
        raise UserError(f"{folder} is a run without a checkpoint: train it first")
    return folder


def stop_tokens(folder: Path, tokenizer: Tokenizer) -> frozenset[int]:
    """eos_token_id of generation_config.json, else of config.json (one or several), else the tokenizer's.

    Raises UserError where they ask for beam search.
    """
    for name in (huggingface.GENERATION, huggingface.CONFIG):
        content = read_json(folder / name) if (folder / name).is_file() else {}
        beams = content.get("num_beams")
        if beams not in (None, 1):
            raise UserError(
                f"{folder / name} asks for num_beams {beams!r}: xtrain has no beam search; set it to 1"
            )
        ids = huggingface.as_ids(content.get("eos_token_id"))
        if ids:
            return ids
    return frozenset([tokenizer.eot_id])
