"""Where do time and memory of a training step go?

    python -m xtrain.profile [--preset NAME] [--precision bf16] [--no-graph] [--trace FILE] [--picture FILE]
    python -m xtrain.profile --run runs/NAME          the same of a run's model; the tables go onto its report.html
    python -m xtrain.profile --plan [--preset NAME] [--dim ... --layers ...] [--gpus 1,4,8]

The first measures: the parts of a step (from an idle GPU to an idle GPU), every kernel with its share
of the step and of the card's limits, how much of the time the GPU is busy; next to it planned and
real memory. --trace writes a file for ui.perfetto.dev, --picture one of the memory over a step. On a
CPU the table lists ops instead of kernels.
Under `nsys profile` one eager step carries NVTX ranges per op and layer (package nvtx).

The second needs no GPU and runs nothing: what a step of any model takes, and what fits
(training/memory_plan.py).
"""

import sys

import tyro

from .cli import command, command_line
from .inspect.profile import LESS_MEMORY, Options, profile


@command("xtrain.profile", less_memory=LESS_MEMORY)
def main(arguments: list[str] | None = None) -> int:
    """The command line. -> exit code."""
    profile(tyro.cli(Options, prog="python -m xtrain.profile", description=__doc__, args=arguments))
    return 0


if __name__ == "__main__":
    sys.exit(command_line(main))
