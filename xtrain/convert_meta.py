"""Meta's own Llama checkpoints into the Hugging Face layout:   python -m xtrain.convert_meta SOURCE TARGET"""

import sys
from pathlib import Path

import tyro

from .cli import command, command_line
from .formats.meta import BESIDE, GENERATION, Options, convert


@command("xtrain.convert_meta")
def main(arguments: list[str] | None = None) -> int:
    """The command line. -> exit code: 0, or 2 when the user can mend something (said in one sentence on stderr)."""
    options = tyro.cli(Options, prog="python -m xtrain.convert_meta", args=arguments)
    config = convert(options)
    print(
        f"{options.target}: {config.n_layers} layers, dim {config.dim}, vocabulary {config.vocab_size}, "
        f"context {config.max_seq_len}, RoPE scaling {config.rope_scaling or 'none'}"
    )
    if not (Path(options.target) / "tokenizer.json").is_file():
        print(
            "it has no tokenizer.json yet: copy it from the Hugging Face release of the same model, with the files "
            f"{', '.join(BESIDE)} and {GENERATION} that are there (tokens that end an answer, chat template)"
        )
    return 0


if __name__ == "__main__":
    sys.exit(command_line(main))
