"""Train a model on rewards, with GRPO.

    python -m xtrain.reinforce --init FOLDER --data prompts.jsonl --task MODULE:FUNCTION

Each line of the data has a "prompt", or "messages" up to the answer. The function gets such a line
and the texts of several completions, and returns one number for each: reward(record, completions)
-> list of floats. lessons/howto/reinforce.md has more.
"""

import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from .cli import command_line
from .evaluation.during_training import evaluation
from .reinforcement import reinforce as reinforcement
from .reinforcement.reinforce import ReinforceConfig
from .report import page
from .training.single_device import SingleDevice
from .training_command import training_command


def reinforce(
    config: ReinforceConfig, console: Console | None = None, parallel: SingleDevice | None = None
) -> Path:
    """Make a whole run, with its report, and return its folder. Raises UserError on anything that
    the user can fix.

    parallel: a DataParallel for several ranks, each of which must call this.
    """
    outside: dict[str, Any] = {"evaluation": evaluation, "write_report": page.finish}
    return reinforcement.reinforce(config, console, parallel, **outside)


def run_command(config: ReinforceConfig, parallel: SingleDevice) -> Path:
    """Make a run with the options of a command line."""
    return reinforce(config, parallel=parallel)


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return training_command("xtrain.reinforce", ReinforceConfig, __doc__, run_command, arguments)


if __name__ == "__main__":
    sys.exit(command_line(main))
