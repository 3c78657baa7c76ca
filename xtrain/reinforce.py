"""Train a model on rewards, with GRPO:   python -m xtrain.reinforce --init FOLDER --data prompts.jsonl --task MODULE:FUNCTION

Each line of the data has a "prompt", or "messages" up to the answer. The function gets such a line and the texts of several
completions, and returns one number for each: reward(record, completions) -> list of floats. lessons/howto/reinforce.md has more.
"""

import functools
import sys
from pathlib import Path

from rich.console import Console

from .cli import command, command_line
from .evaluation.during_training import evaluation
from .options import parse
from .reinforcement import reinforce as reinforcement
from .reinforcement.reinforce import ReinforceConfig
from .report import page
from .training.run_folder import parse_options


def reinforce(config: ReinforceConfig, console: Console | None = None) -> Path:
    """A whole run, with its report. -> its folder. Raises UserError on anything that the user can fix."""
    return reinforcement.reinforce(config, console, evaluation=evaluation, write_report=page.finish)


@command(
    "xtrain.reinforce",
    interrupted="interrupted; the last checkpoint is intact",
    on_ranks="python -m xtrain.ddp reinforce",
)
def main(arguments: list[str] | None = None) -> int:
    """The command line. -> exit code."""
    cli = functools.partial(
        parse, ReinforceConfig, "python -m xtrain.reinforce", __doc__, arguments
    )
    reinforce(parse_options(cli))
    return 0


if __name__ == "__main__":
    sys.exit(command_line(main))
