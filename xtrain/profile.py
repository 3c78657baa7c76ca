"""Measure the time and memory of a training step, or plan its memory.

    python -m xtrain.profile [--preset NAME] [--precision fp32] [--no-graph]
                             [--trace FILE] [--picture FILE]
    python -m xtrain.profile --run runs/NAME     the same for a run's model; the tables are added
                                                 to its report.html
    python -m xtrain.profile --plan [--preset NAME] [--dim ... --layers ...] [--gpus 1,4,8]

The first form measures the parts of a step (synchronized before and after), the time of every
kernel compared with the limits of the GPU, the share of the time in which the GPU is busy, and the
memory in use next to the planned memory. --trace writes a file for ui.perfetto.dev, --picture a
chart of the memory over a step. On a CPU the table lists ops instead of kernels. Under `nsys
profile` one eager step has NVTX ranges per op and layer (package nvtx).

--plan needs no GPU and runs nothing: it computes the memory that a step of any model needs, and
which batch sizes fit (training/memory_plan.py).
"""

import sys

from .cli import command, command_line
from .inspect.profile import LESS_MEMORY, Options, profile
from .options import parse


@command("xtrain.profile", less_memory=LESS_MEMORY)
def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Return the exit code."""
    profile(parse(Options, "python -m xtrain.profile", __doc__, arguments))
    return 0


if __name__ == "__main__":
    sys.exit(command_line(main))
