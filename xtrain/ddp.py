"""Train on several ranks:   mpirun -n 4 python -m xtrain.ddp [the options of xtrain.train]

This is the command `train` by another name: train, finetune, prefer and reinforce all run on the
ranks that mpirun or srun starts.

Every rank holds the whole model and computes its share of every batch. Loss and gradient are sums
over the tokens of the batch, so the gradients of the ranks add up to the gradient of the whole
batch. (--batch counts the sequences of all ranks.) Then every rank makes the same AdamW update, so
all stay identical, bit for bit. With --device gpu each rank uses one GPU, and copy engines or NCCL
communicate the gradients; on the CPU, ranks use NumPy and MPI.

    a laptop             mpirun -n 2 python -m xtrain.ddp
    four GPUs            mpirun -n 4 python -m xtrain.ddp --batch 128
    fine-tuning          mpirun -n 4 xtrain finetune --init FOLDER --data chats.jsonl
    several machines     mpirun -n 16 --hostfile hosts python -m xtrain.ddp
                         srun --mpi=pmix -n 16 python -m xtrain.ddp
                         (the folders --out and the cache must be visible on all of them)

Gradients travel in buckets, slices of the arena, while backward continues (parallel/ddp.py; lesson
15 builds up to it). ZeRO-1, --zero 1, the default, divides the optimizer state among the ranks
(parallel/zero.py); --zero 3 the layers, too, for models that do not fit on one GPU
(parallel/gathering.py).
"""

import importlib
import sys

from . import train
from .cli import command_line
from .config import TrainConfig
from .training_command import training_command


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code. `finetune`, `prefer` and `reinforce` may precede
    their options."""
    if arguments is None:
        arguments = sys.argv[1:]
    if arguments[:1] in (["finetune"], ["prefer"], ["reinforce"]):
        return importlib.import_module(f".{arguments[0]}", __package__).main(arguments[1:])
    return training_command("xtrain.ddp", TrainConfig, __doc__, train.run_command, arguments)


if __name__ == "__main__":
    sys.exit(command_line(main))
