"""Convert Meta's Llama checkpoints to the Hugging Face layout:   python -m xtrain.convert_meta SOURCE TARGET"""

import sys
from pathlib import Path

from .cli import command, command_line, print_text
from .data.tokenizer import COMPANION_FILES
from .formats.huggingface import GENERATION
from .formats.meta import Options, convert
from .options import parse


@command("xtrain.convert_meta")
def main(arguments: list[str] | None = None) -> int:
    """-> exit code: 0, or 2 after a UserError, whose message goes to stderr."""
    options = parse(Options, "python -m xtrain.convert_meta", None, arguments)
    config = convert(options)
    print_text(
        f"{options.target}: {config.n_layers} layers, dim {config.dim}, vocabulary {config.vocab_size}, "
        f"context {config.max_seq_len}, RoPE scaling {config.rope_scaling or 'none'}"
    )
    if not (Path(options.target) / "tokenizer.json").is_file():
        print_text(
            "it has no tokenizer.json yet: copy it from the Hugging Face release of the same model, together with "
            f"{', '.join(COMPANION_FILES)} and {GENERATION} if they exist (stop tokens, chat template)"
        )
    return 0


if __name__ == "__main__":
    sys.exit(command_line(main))
