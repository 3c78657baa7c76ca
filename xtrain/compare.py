"""Find where xtrain and transformers diverge on a model:   python -m xtrain.compare FOLDER

Loads a Hugging Face folder with xtrain and with transformers (fp32, eager attention), gives both
the same token ids and compares what every stage returns, in the order of the forward pass. A
mistake shows as the first stage whose difference jumps; the stages after it inherit the difference.

Exit code 0: they agree; 1: they diverge; 2: the folder or the options cannot be used.
"""

import sys

from .cli import command, command_line
from .console import PrintableConsole
from .inspect.compare import CompareConfig, run
from .options import parse


@command("xtrain.compare")
def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Return the exit code."""
    prog = "python -m xtrain.compare"
    config = parse(CompareConfig, prog, __doc__, arguments)
    if run(config, PrintableConsole(highlight=False)):
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(command_line(main))
