"""Continue texts:   python -m xtrain.generate --model FOLDER "prompt" ["another" ...] [--max-new-tokens 128] ...

Prints each prompt and what the model adds to it; everything else goes to stderr. FOLDER: Hugging Face's layout (Llama 2/3,
Qwen3), or a run of xtrain.train. Of its generation_config.json the tokens that end a text are used, and nothing else.
"""

import sys

import tyro

from .cli import command, command_line
from .serving.text_generation import LESS_MEMORY, Options, generate


@command("xtrain.generate", less_memory=LESS_MEMORY)
def main(arguments: list[str] | None = None) -> int:
    """The command line. -> exit code."""
    prog = "python -m xtrain.generate"
    generate(tyro.cli(Options, prog=prog, description=__doc__, args=arguments))
    return 0


if __name__ == "__main__":
    sys.exit(command_line(main))
