"""Train a language model:   python -m xtrain.train [--preset NAME] [--data FILE_OR_FOLDER] ...

    several GPUs         mpirun -n 4 python -m xtrain.ddp [the same options]     see xtrain.ddp

The training step (batch, forward, loss, backward, clip, AdamW) is `Run.step` and `Run.train_step`
in training/run.py. The rest of a run (text, validation, samples, checkpoints, stopping early) is in
training/loop.py.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from .cli import command_line
from .config import TrainConfig
from .evaluation.during_training import evaluation
from .report import page
from .training import loop
from .training.run import Run
from .training.single_device import SingleDevice
from .training_command import training_command


def train(
    config: TrainConfig,
    console: Console | None = None,
    make_run: Callable[..., Run] = Run,
    parallel: SingleDevice | None = None,
) -> Path:
    """Make a whole run, with its report, and return its folder. Raises UserError on anything that
    the user can fix.

    make_run: a class derived from Run, with another model, optimizer, schedule, data or evaluation
        (lessons/howto/change_the_model.md).
    parallel: a DataParallel for several ranks, each of which must call this.
    """
    outside: dict[str, Any] = {"evaluation": evaluation, "write_report": page.finish}
    return loop.train(config, console, parallel, make_run, **outside)


def run_command(config: TrainConfig, parallel: SingleDevice) -> Path:
    """Make a run with the options of a command line."""
    return train(config, parallel=parallel)


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return training_command("xtrain.train", TrainConfig, __doc__, run_command, arguments)


if __name__ == "__main__":
    sys.exit(command_line(main))
