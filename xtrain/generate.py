"""Continue texts:   python -m xtrain.generate --model FOLDER "prompt" ["another" ...] [--max-new-tokens 128] ...

Prints each prompt and the model's continuation; everything else goes to stderr. FOLDER: a Hugging
Face folder (Llama 2/3, Qwen3), or a run of xtrain.train. Its generation_config.json has the
defaults of sampling and the end tokens.
"""

import sys

from .cli import command, command_line
from .options import parse
from .serving.text_generation import LESS_MEMORY, Options, generate


@command("xtrain.generate", less_memory=LESS_MEMORY)
def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Return the exit code."""
    generate(parse(Options, "python -m xtrain.generate", __doc__, arguments))
    return 0


if __name__ == "__main__":
    sys.exit(command_line(main))
