"""Chat with a model:   python -m xtrain.chat --model FOLDER [--system TEXT] [--temperature 0.7] ...

The conversation stays in the KV cache: a turn computes only your text and the answer. The
conversation is written with the model's chat template; a model without one continues your text as
it is.

    /reset      start again       /exit, or the end of input      leave        Ctrl-C      stop this answer
"""

import sys

from .cli import command, command_line
from .options import parse
from .serving.conversation import Options, chat
from .serving.text_generation import LESS_MEMORY


@command("xtrain.chat", less_memory=LESS_MEMORY)
def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Return the exit code."""
    chat(parse(Options, "python -m xtrain.chat", __doc__, arguments))
    return 0


if __name__ == "__main__":
    sys.exit(command_line(main))
