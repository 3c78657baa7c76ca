"""Write a model as a GGUF file, for llama.cpp and Ollama:   python -m xtrain.export --model FOLDER --gguf FILE --type q8_0

For transformers, vLLM and other programs that read Hugging Face folders no export is needed: every checkpoint is one.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .cli import command, command_line, print_text, say
from .data.chat_template import template_source
from .formats.gguf_file import write
from .formats.saved_runs import model_folder
from .options import parse


@dataclass(frozen=True)
class Options:
    """Write a model as a GGUF file."""

    model: str  # a Hugging Face folder, or the folder of an xtrain run
    gguf: str  # the file to write; an existing one is replaced when the new one is complete
    # of the matrices: f32 is exact, f16 rounds to 11 bits, q8_0 to 8 bits with a scale for every 32 values
    type: Literal["f32", "f16", "q8_0"] = "f16"


@command("xtrain.export")
def main(arguments: list[str] | None = None) -> int:
    """The command line. -> exit code."""
    options = parse(Options, "python -m xtrain.export", None, arguments)
    folder, path = model_folder(Path(options.model), say), Path(options.gguf)
    write(folder, path, options.type, template_source(folder))
    print_text(f"{path}: {path.stat().st_size / 1e6:.1f} MB, {options.type}, from {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(command_line(main))
