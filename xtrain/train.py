"""Train a language model:   python -m xtrain.train [--preset NAME] [--data FILE_OR_FOLDER] ...

The training step (batch, forward, loss, backward, clip, AdamW) is `Run.step` and `Run.train_step` in training/run.py. The
rest of a run (text, validation, samples, checkpoints, stopping early) is in training/loop.py.
"""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from .cli import command, command_line
from .config import TrainConfig
from .evaluation.during_training import evaluation
from .options import parse
from .report import page
from .training import loop
from .training.run import Run
from .training.run_folder import parse_options


def train(
    config: TrainConfig, console: Console | None = None, make_run: Callable[..., Run] = Run
) -> Path:
    """A whole run, with its report. -> its folder. Raises UserError on anything that the user can fix.

    make_run: a class derived from Run, with another model, optimizer, schedule, data or evaluation
    (lessons/howto/change_the_model.md).
    """
    more: dict[str, Any] = {"evaluation": evaluation, "write_report": page.finish}
    return loop.train(config, console, make_run=make_run, **more)


@command("xtrain.train", interrupted="interrupted; the last checkpoint is intact")
def main(arguments: list[str] | None = None) -> int:
    """The command line. -> exit code."""
    cli = functools.partial(parse, TrainConfig, "python -m xtrain.train", __doc__, arguments)
    train(parse_options(cli))
    return 0


if __name__ == "__main__":
    sys.exit(command_line(main))
