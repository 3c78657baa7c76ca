"""Fine-tune a model on conversations:   python -m xtrain.finetune --init FOLDER --data chats.jsonl

Each line of the data has "messages" as OpenAI and Hugging Face write them, "prompt" and "completion", or "text". Trained are
the assistant's turns, the completion, or everything. lessons/howto/finetune.md describes it.

    several GPUs         mpirun -n 4 python -m xtrain.ddp finetune --init FOLDER --data chats.jsonl
"""

import functools
import sys
from pathlib import Path

from rich.console import Console

from .cli import command, command_line
from .evaluation.during_training import evaluation
from .options import parse
from .report import page
from .training.run_folder import parse_options
from .tuning import finetune as tuning
from .tuning.finetune import FinetuneConfig


def finetune(config: FinetuneConfig, console: Console | None = None) -> Path:
    """A whole run, with its report. -> its folder. Raises UserError on anything that the user can fix."""
    return tuning.finetune(config, console, evaluation=evaluation, write_report=page.finish)


@command(
    "xtrain.finetune",
    interrupted="interrupted; the last checkpoint is intact",
    on_ranks="python -m xtrain.ddp finetune",
)
def main(arguments: list[str] | None = None) -> int:
    """The command line. -> exit code."""
    cli = functools.partial(parse, FinetuneConfig, "python -m xtrain.finetune", __doc__, arguments)
    finetune(parse_options(cli))
    return 0


if __name__ == "__main__":
    sys.exit(command_line(main))
