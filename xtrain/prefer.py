"""Train a model on preferences, with DPO, IPO, SimPO, ORPO or KTO.

    python -m xtrain.prefer --init FOLDER --data pairs.jsonl --loss dpo

Each line of the data has a "prompt", an answer that is "chosen" and one that is "rejected"; for kto
a "prompt", a "completion" and a "label", too. Prompts and answers are texts, or messages.
lessons/howto/prefer.md has more.
"""

import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from .cli import command_line
from .evaluation.during_training import evaluation
from .report import page
from .training.single_device import SingleDevice
from .training_command import training_command
from .tuning import prefer as preferring
from .tuning.prefer import PreferConfig


def prefer(
    config: PreferConfig, console: Console | None = None, parallel: SingleDevice | None = None
) -> Path:
    """Make a whole run, with its report, and return its folder. Raises UserError on anything that
    the user can fix.

    parallel: a DataParallel for several ranks, each of which must call this.
    """
    outside: dict[str, Any] = {"evaluation": evaluation, "write_report": page.finish}
    return preferring.prefer(config, console, parallel, **outside)


def run_command(config: PreferConfig, parallel: SingleDevice) -> None:
    """Make a run with the options of a command line, or show its texts."""
    if config.show:
        preferring.show_rows(config, parallel.ranks)
    else:
        prefer(config, parallel=parallel)


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return training_command("xtrain.prefer", PreferConfig, __doc__, run_command, arguments)


if __name__ == "__main__":
    sys.exit(command_line(main))
