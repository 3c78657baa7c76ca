"""Train on several ranks:   mpirun -n 4 python -m xtrain.ddp [finetune | reinforce] [the options of that command] [--dp ...]

Every rank holds the whole model and computes its share of every batch. Loss and gradient are sums over the tokens of the
batch, so the gradients of the ranks add up to the gradient of the whole batch. (--batch counts the sequences of all ranks.)
Then every rank makes the same AdamW update, so all stay identical, bit for bit. With --device gpu
each rank uses one GPU, and copy engines or NCCL communicate the gradients; on the CPU, ranks use NumPy and MPI.

    a laptop             mpirun -n 2 python -m xtrain.ddp
    four GPUs            mpirun -n 4 python -m xtrain.ddp --batch 128
    fine-tuning          mpirun -n 4 python -m xtrain.ddp finetune --init FOLDER --data chats.jsonl
    several machines     mpirun -n 16 --hostfile hosts python -m xtrain.ddp      or     srun --mpi=pmix -n 16 python -m xtrain.ddp
                         (the folders --out and the cache must be visible on all of them)

How gradients are summed over the ranks, --dp, from the simplest to the fastest (a few lines each in parallel/ddp.py):

    none      no communication: every rank trains alone, which shows the cost of the computation
    naive     after backward, parameter by parameter
    flat      after backward, all at once: the arena is one array
    overlap   each parameter as soon as its gradient is complete, while backward continues
    bucket    the same in slices of the arena: few, large messages

ZeRO-1, --zero 1, divides the optimizer state among the ranks (parallel/zero.py). It is the default with --dp bucket.
"""

import contextlib
import functools
import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .cli import command_line, refuse_once, say
from .errors import UserError
from .evaluation.during_training import evaluation
from .machine import first_on_machine
from .options import parse
from .parallel.ddp import ParallelConfig, train_parallel
from .parallel.ranks import connect
from .parallel.watchdog import AbortOnError
from .reinforcement.reinforce import ParallelReinforceConfig, reinforce_parallel
from .report import page
from .training.run_folder import parse_options
from .training.single_process import SINGLE_PROCESS, SingleProcess
from .tuning.finetune import ParallelFinetuneConfig, finetune_parallel


@dataclass(frozen=True)
class Job:
    """What several ranks can do together.  run(config, ranks, guard=, evaluation=, write_report=): does it."""

    program: str
    options: type[ParallelConfig]
    run: Callable[..., Any]


TRAINING = Job("python -m xtrain.ddp", ParallelConfig, train_parallel)
JOBS = {
    "finetune": Job("python -m xtrain.ddp finetune", ParallelFinetuneConfig, finetune_parallel),
    "reinforce": Job("python -m xtrain.ddp reinforce", ParallelReinforceConfig, reinforce_parallel),
}


def main(arguments: list[str] | None = None) -> int:
    """The command line. -> exit code: 0, or 2 if the user can fix the error (one sentence on stderr)."""
    job, arguments = job_of(sys.argv[1:] if arguments is None else arguments)
    if {"-h", "--help"} & set(arguments):  # without MPI
        return _parse(job, arguments, SINGLE_PROCESS)[1] if first_on_machine() else 0
    try:
        ranks = connect()
    except UserError as error:
        refuse_once(f"xtrain.ddp: {error}")
        return 2
    with AbortOnError(ranks, "xtrain.ddp") as guard:
        config, code = _parse(job, arguments, ranks)
        if config is None:
            return code
        job.run(config, ranks, guard=guard, evaluation=evaluation, write_report=page.finish)
    return guard.code


def job_of(arguments: list[str]) -> tuple[Job, list[str]]:
    """-> what the command line asks for, and its options"""
    job = JOBS.get(arguments[0] if arguments else "")
    return (TRAINING, arguments) if job is None else (job, arguments[1:])


def _parse(
    job: Job, arguments: list[str], ranks: SingleProcess
) -> tuple[ParallelConfig | None, int]:
    """-> (config, 0), or (None, exit code) on every rank if any cannot parse its options. Rank 0 prints the first error."""
    cli = functools.partial(parse, job.options, job.program, __doc__, arguments)
    config, code = _on_all(lambda: cli(None), ranks)  # before ranks wait for each other
    if config is not None and config.resume:
        config, code = _on_all(lambda: parse_options(cli, ranks), ranks)
    return config, code


def _on_all(
    parse: Callable[[], ParallelConfig], ranks: SingleProcess
) -> tuple[ParallelConfig | None, int]:
    config: ParallelConfig | None = None
    code: Any = 0
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            config = parse()
        except SystemExit as stop:
            code = stop.code
        except UserError as error:
            say(f"xtrain.ddp: {error}")
            code = 2
    found = ranks.gather((config is None, code, printed.getvalue()))
    failed = next((f for f in found if f[0]), None)
    if failed is None:
        if ranks.rank == 0:
            print(printed.getvalue(), end="", file=sys.stderr)  # warnings
        return config, 0
    if ranks.rank == 0:
        print(failed[2], end="", file=sys.stderr if failed[1] else sys.stdout)  # in tyro's colors
    return None, failed[1]


if __name__ == "__main__":
    sys.exit(command_line(main))
