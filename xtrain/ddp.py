"""Train on several ranks:   mpirun -n 4 python -m xtrain.ddp [the options of xtrain.train] [--dp ...] [--zero ...]

Every rank holds the whole model and takes its share of every batch: loss and gradient are sums over the tokens of the
batch, so the ranks' gradients add up to the gradient of the whole. (--batch counts the sequences of all ranks.) Then all
make the same AdamW step and stay the same, bit for bit. With GPUs a rank has one, and copy engines or NCCL move the
gradients; without, NumPy and MPI.

    a laptop             mpirun -n 2 python -m xtrain.ddp
    four GPUs            mpirun -n 4 python -m xtrain.ddp --batch 128
    several machines     mpirun -n 16 --hostfile hosts python -m xtrain.ddp      or     srun --mpi=pmix -n 16 python -m xtrain.ddp
                         (the folders --out and the cache must be visible on all of them)

How the gradients are added up, --dp, from the simplest to the fastest; each is a few lines below:

    none      not at all: every rank trains alone. Shows what computation costs by itself
    naive     after backward, parameter by parameter
    flat      after backward, all at once: the arena is one array
    overlap   each parameter as soon as backward has finished its gradient, while backward goes on
    bucket    the same in slices of the arena: few, large messages

ZeRO-1, --zero 1, divides the optimizer among the ranks: zero.py. It is the default with buckets.
"""

import contextlib
import io
import os
import sys

import tyro

from .cli import command_line
from .errors import UserError
from .parallel.ddp import ParallelConfig, train_parallel
from .parallel.ranks import connect
from .parallel.watchdog import AbortOnError
from .report import page
from .training.single_process import ALONE

# where launchers say which rank of its machine this is
LOCAL_RANK = ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")


def main(arguments: list[str] | None = None) -> int:
    """The command line. -> exit code: 0, or 2 when the user can mend something (said in one sentence on stderr)."""
    try:
        ranks = connect()
    except UserError as error:
        if all(os.environ.get(name, "0") == "0" for name in LOCAL_RANK):  # once per machine
            if {"-h", "--help"} & set(sys.argv[1:] if arguments is None else arguments):
                return _parse(arguments, ALONE)[1]
            print(f"xtrain.ddp: {error}", file=sys.stderr)
        return 2
    with AbortOnError(ranks, "xtrain.ddp") as guard:
        config, code = _parse(arguments, ranks)
        if config is None:
            return code
        train_parallel(config, ranks, guard=guard, write_report=page.finish)
    return guard.code


def _parse(arguments, ranks):
    """-> (config, 0), or (None, exit code) on every rank when one cannot read its options; it is said once."""
    config, code, said = None, 0, io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            config = tyro.cli(
                ParallelConfig, prog="python -m xtrain.ddp", description=__doc__, args=arguments
            )
        except SystemExit as stop:
            code = stop.code
    found = ranks.everybody((config is None, code, said.getvalue()))
    failed = next((f for f in found if f[0]), None)
    if failed is None:
        return config, 0
    if ranks.rank == 0:
        print(failed[2], end="", file=sys.stderr if failed[1] else sys.stdout)
    return None, failed[1]


if __name__ == "__main__":
    sys.exit(command_line(main))
