"""Write a model for other programs.

    python -m xtrain.export --model FOLDER --gguf FILE --type q8_0      a GGUF file, for llama.cpp and Ollama
    python -m xtrain.export --model ADAPTERS --merge FOLDER             LoRA adapters and their model as one model

For transformers, vLLM and other programs that read Hugging Face folders no export is needed: every
checkpoint is one.
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
from .formats.saved_runs import model_folder
from .nn.model import Transformer
from .options import parse


@dataclass(frozen=True)
class Options:
    """Write a model for other programs: give --gguf or --merge."""

    model: str  # a Hugging Face folder, a folder with LoRA adapters, or that of an xtrain run
    gguf: str = ""  # the file to write; an existing one is replaced when the new one is complete
    # the folder to write: the adapters in --model, added to the weights of the model that they
    # belong to
    merge: str = ""
    change: str | None = None  # with --merge: MODULE:FUNCTION, with which the model was changed
    # with --gguf, of the matrices: f32 is exact, f16 rounds to 11 bits, q8_0 to 8 bits with a scale
    # for every 32 values
    type: Literal["f32", "f16", "q8_0"] = "f16"


def merge(folder: Path, out: Path, change: str | None = None) -> None:
    """Write the adapters in `folder`, added to their model, as a whole model. Raises UserError.

    change: MODULE:FUNCTION, with which the model was changed.
    """
    if not is_adapter(folder):
        raise UserError(
            f"{folder} has no adapter_config.json, so there is nothing to merge: give the folder "
            "of adapters"
        )
    if out.resolve() in (folder.resolve(), base_folder(folder).resolve()):
        raise UserError(f"{out} holds the adapters or their model: give another folder to --merge")
    tokenizer = Tokenizer.load(source_of(folder, "tokenizer.json"))
    model = Transformer.from_pretrained(folder, trainable=False, change=change)
    model.save_pretrained(out, tokenizer)


@command("xtrain.export")
def main(arguments: list[str] | None = None) -> int:
    """The command line. -> exit code."""
    options = parse(Options, "python -m xtrain.export", None, arguments)
    if bool(options.gguf) == bool(options.merge):
        raise UserError("give either --gguf FILE or --merge FOLDER")
    folder = model_folder(Path(options.model), say)
    if options.merge:
        merge(folder, Path(options.merge), options.change)
        print_text(f"{options.merge}: {folder} and {base_folder(folder)}, merged")
        return 0
    path = Path(options.gguf)
    write(folder, path, options.type)
    print_text(f"{path}: {path.stat().st_size / 1e6:.1f} MB, {options.type}, from {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(command_line(main))
