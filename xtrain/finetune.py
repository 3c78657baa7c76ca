"""Fine-tune a model on conversations:   python -m xtrain.finetune --init FOLDER --data chats.jsonl

Each line of the data has "messages" as OpenAI and Hugging Face write them, "prompt" and
"completion", or "text". Trained are the assistant's turns, the completion, or everything.
lessons/howto/finetune.md describes it.

    several GPUs         mpirun -n 4 python -m xtrain.finetune --init FOLDER --data chats.jsonl
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
from .tuning import finetune as tuning
from .tuning.finetune import FinetuneConfig


def finetune(
    config: FinetuneConfig, console: Console | None = None, parallel: SingleDevice | None = None
) -> Path:
    """Make a whole run, with its report, and return its folder. Raises UserError on anything that
    the user can fix.

    parallel: a DataParallel for several ranks, each of which must call this.
    """
    outside: dict[str, Any] = {"evaluation": evaluation, "write_report": page.finish}
    return tuning.finetune(config, console, parallel, **outside)


def run_command(config: FinetuneConfig, parallel: SingleDevice) -> None:
    """Make a run with the options of a command line, or show its examples."""
    if config.show:
        tuning.show_examples(config, parallel.ranks)
    else:
        finetune(config, parallel=parallel)


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return training_command("xtrain.finetune", FinetuneConfig, __doc__, run_command, arguments)


if __name__ == "__main__":
    sys.exit(command_line(main))
