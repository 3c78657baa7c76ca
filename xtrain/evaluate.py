"""Evaluate a model:   python -m xtrain.evaluate --model FOLDER --tasks FILE [FILE ...] [--json results.json] ...

Perplexity and bits per byte of a text, accuracy on multiple choice and cloze, exact match of
generated answers. Files of HellaSwag, ARC, MMLU and GSM8K are read as they are published.
lessons/howto/evaluate.md has the formats.
"""

import sys

from .cli import command, command_line
from .evaluation.run import LESS_MEMORY, Options, evaluate
from .options import parse


@command("xtrain.evaluate", less_memory=LESS_MEMORY)
def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Return the exit code."""
    evaluate(parse(Options, "python -m xtrain.evaluate", __doc__, arguments))
    return 0


if __name__ == "__main__":
    sys.exit(command_line(main))
