"""Write a model for other programs.

    python -m xtrain.export --model FOLDER --gguf FILE --type q8_0      a GGUF file, for llama.cpp and Ollama
    python -m xtrain.export --model ADAPTERS --merge FOLDER             LoRA adapters and their model as one model
    python -m xtrain.export --model FOLDER --folder OUT --dtype bfloat16     a Hugging Face folder in another dtype
    python -m xtrain.export --model FOLDER --folder OUT --calibrate TEXT     for serving with --weights int4

For transformers, vLLM and other programs that read Hugging Face folders no export is needed: every
checkpoint is one, in float32.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from .cli import command, command_line, print_text, say
from .data.text_files import read_text
from .data.tokenizer import Tokenizer
from .device import resolve_device
from .errors import UserError
from .formats.adapters import base_folder, is_adapter, source_of
from .formats.gguf_file import write
from .formats.gguf_tensors import file_of, shown
from .formats.huggingface import save, stored_dtype
from .formats.saved_runs import model_folder
from .nn.model import Transformer
from .nn.rounding import round_weights
from .options import parse

CALIBRATION_ROWS = 64


@dataclass(frozen=True)
class Options:
    """Write a model for other programs: give --gguf, --merge or --folder."""

    model: str  # a Hugging Face folder, a folder with LoRA adapters, or that of an xtrain run
    gguf: str = ""  # the file to write; an existing one is replaced when the new one is complete
    # the folder to write: the adapters in --model, added to the weights of the model that they
    # belong to
    merge: str = ""
    folder: str = ""  # the folder to write: the model, adapters merged, in --dtype
    # with --merge and --folder, of the weights; auto: that of the files, of adapters that of their
    # model
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    # with --merge and --folder: MODULE:FUNCTION, with which the model was changed
    change: str | None = None
    # with --merge and --folder: a text like those that the model will see; the matrices are rounded
    # for it to values of the codes below, so that the model loses less with --weights of that kind
    calibrate: str = ""
    weights: Literal["int4", "nf4"] | None = None  # with --calibrate; none: int4
    # with --gguf, of the matrices: f32 is exact, f16 rounds to 11 bits, q8_0 to 8 bits with a scale
    # for every 32 values
    type: Literal["f32", "f16", "q8_0"] = "f16"


def write_folder(
    folder: Path,
    out: Path,
    dtype: str = "auto",
    change: str | None = None,
    calibration: tuple[str, str] | None = None,
) -> str:
    """Write a model, with adapters added to it, as a Hugging Face folder. Return the dtype. Raises
    UserError.

    change: MODULE:FUNCTION, with which the model was changed.
    calibration: a text file, and the kind of codes to whose values the matrices are rounded.
    """
    base = base_folder(folder)
    if out.resolve() in (folder.resolve(), base.resolve()):
        raise UserError(f"{out} holds the model: give another folder")
    if dtype == "auto":
        dtype = stored_dtype(base)
    tokenizer = Tokenizer.load(source_of(folder, "tokenizer.json"), base)
    device = "cpu" if calibration is None else resolve_device("auto")
    model = Transformer.from_pretrained(folder, device, trainable=False, change=change)
    if calibration is not None:
        text, kind = calibration
        ids = calibration_tokens(Path(text), tokenizer, model.config.context)
        round_weights(model, ids, kind)
    save(model, out, tokenizer, dtype=dtype)
    return dtype


def calibration_tokens(path: Path, tokenizer: Tokenizer, context: int) -> np.ndarray:
    """Return up to 64 x 512 tokens of a text, in rows of at most the context that are spread over
    it. Raises UserError."""
    ids = tokenizer.encode("".join(read_text(path)))
    T = min(512, context)
    rows = len(ids) // T
    if rows == 0:
        raise UserError(f"{path} has {len(ids)} tokens: --calibrate needs at least {T}")
    chosen = np.linspace(0, rows - 1, min(CALIBRATION_ROWS, rows)).astype(int)
    return np.array(ids[: rows * T], np.int32).reshape(rows, T)[chosen]


@command("xtrain.export")
def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Return the exit code."""
    options = parse(Options, "python -m xtrain.export", None, arguments)
    outputs = [x for x in (options.gguf, options.merge, options.folder) if x]
    if len(outputs) != 1:
        raise UserError("give one of --gguf FILE, --merge FOLDER and --folder FOLDER")
    folder = model_folder(Path(options.model), say)
    if options.merge and not is_adapter(folder):
        raise UserError(
            f"{shown(folder)} holds no adapters, so there is nothing to merge: give the folder of "
            "adapters, or --folder"
        )
    if options.gguf and options.calibrate:
        raise UserError("--calibrate is for --merge and --folder: leave it out with --gguf")
    if options.weights and not options.calibrate:
        raise UserError(
            f"--weights {options.weights} is for --calibrate TEXT: give both, or leave it out and "
            "give it to `xtrain serve`, which rounds the matrices"
        )
    if not options.gguf:
        calibration = None
        if options.calibrate:
            calibration = options.calibrate, options.weights or "int4"
        out = Path(outputs[0])
        dtype = write_folder(folder, out, options.dtype, options.change, calibration)
        merged = ""
        if is_adapter(folder):
            merged = f" and {shown(base_folder(folder))}, merged"
        print_text(f"{outputs[0]}: {shown(folder)}{merged}, {dtype}")
        return 0
    if options.dtype != "auto":
        raise UserError("--dtype is for --merge and --folder: give --type for a GGUF file")
    path = Path(options.gguf)
    file = file_of(base_folder(folder) if is_adapter(folder) else folder)
    if file and path.exists() and path.samefile(file):
        what = "model of these adapters" if is_adapter(folder) else "model"
        raise UserError(f"{path} is the {what}: give another file")
    write(folder, path, options.type)
    print_text(f"{path}: {path.stat().st_size / 1e6:.1f} MB, {options.type}, from {shown(folder)}")
    return 0


if __name__ == "__main__":
    sys.exit(command_line(main))
