"""Write a model for other programs.

    python -m xtrain.export --model FOLDER --gguf FILE --type q8_0      a GGUF file, for llama.cpp and Ollama
    python -m xtrain.export --model ADAPTERS --merge FOLDER             LoRA adapters and their model as one model
    python -m xtrain.export --model FOLDER --folder OUT --dtype bfloat16     a Hugging Face folder in another dtype

For transformers, vLLM and other programs that read Hugging Face folders no export is needed: every
checkpoint is one, in float32.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .cli import command, command_line, print_text, say
from .data.tokenizer import Tokenizer
from .errors import UserError
from .formats.adapters import base_folder, is_adapter, source_of
from .formats.gguf_file import write
from .formats.huggingface import save, stored_dtype
from .formats.saved_runs import model_folder
from .nn.model import Transformer
from .options import parse


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
    # with --gguf, of the matrices: f32 is exact, f16 rounds to 11 bits, q8_0 to 8 bits with a scale
    # for every 32 values
    type: Literal["f32", "f16", "q8_0"] = "f16"


def write_folder(folder: Path, out: Path, dtype: str = "auto", change: str | None = None) -> str:
    """Write a model, with adapters added to it, as a Hugging Face folder. Return the dtype. Raises
    UserError.

    change: MODULE:FUNCTION, with which the model was changed.
    """
    base = base_folder(folder)
    if out.resolve() in (folder.resolve(), base.resolve()):
        raise UserError(f"{out} holds the model: give another folder")
    if dtype == "auto":
        dtype = stored_dtype(base)
    tokenizer = Tokenizer.load(source_of(folder, "tokenizer.json"))
    model = Transformer.from_pretrained(folder, trainable=False, change=change)
    save(model, out, tokenizer, dtype=dtype)
    return dtype


@command("xtrain.export")
def main(arguments: list[str] | None = None) -> int:
    """The command line. -> exit code."""
    options = parse(Options, "python -m xtrain.export", None, arguments)
    outputs = [x for x in (options.gguf, options.merge, options.folder) if x]
    if len(outputs) != 1:
        raise UserError("give one of --gguf FILE, --merge FOLDER and --folder FOLDER")
    folder = model_folder(Path(options.model), say)
    if options.merge and not is_adapter(folder):
        raise UserError(
            f"{folder} has no adapter_config.json, so there is nothing to merge: give the folder "
            "of adapters, or --folder"
        )
    if not options.gguf:
        dtype = write_folder(folder, Path(outputs[0]), options.dtype, options.change)
        merged = ""
        if is_adapter(folder):
            merged = f" and {base_folder(folder)}, merged"
        print_text(f"{outputs[0]}: {folder}{merged}, {dtype}")
        return 0
    if options.dtype != "auto":
        raise UserError("--dtype is for --merge and --folder: give --type for a GGUF file")
    path = Path(options.gguf)
    write(folder, path, options.type)
    print_text(f"{path}: {path.stat().st_size / 1e6:.1f} MB, {options.type}, from {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(command_line(main))
