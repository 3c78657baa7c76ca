"""Talk with a model:   python -m xtrain.chat --model FOLDER [--system TEXT] [--temperature 0.7] ...

The conversation so far stays in the KV cache: a turn computes what you typed and the answer, nothing twice. Written as the
model's chat template wants it; a model without one is given your text as it is, and continues it.

    /reset      begin anew        /exit, or the end of input      leave        Ctrl-C      end this answer
"""

import sys

import tyro

from .cli import command, command_line
from .serving.conversation import Options, chat
from .serving.text_generation import LESS_MEMORY


@command("xtrain.chat", less_memory=LESS_MEMORY)
def main(arguments: list[str] | None = None) -> int:
    """The command line. -> exit code."""
    chat(tyro.cli(Options, prog="python -m xtrain.chat", description=__doc__, args=arguments))
    return 0


if __name__ == "__main__":
    sys.exit(command_line(main))
