"""Helpers of the scripts in this folder. test_ddp.py starts each of them with mpirun on several ranks."""

import gc
import sys
import time
from pathlib import Path

from mpi4py import MPI

from xtrain.config import TrainConfig
from xtrain.parallel.ddp import DataParallel
from xtrain.parallel.ranks import Ranks
from xtrain.parallel.watchdog import AbortOnError
from xtrain.training.run_log import RunLog
from xtrain.training.single_device import SingleDevice

RunLog.picture = lambda self: (
    None
)  # importing matplotlib takes as long as all the rest of a short run
WORLD = MPI.COMM_WORLD
TEXT = Path(__file__).resolve().parents[2] / "data" / "grammar.txt"
SHAPE = {"preset": "tiny", "dim": 64, "layers": 2}


def options(out, **more):
    defaults = {
        "data": str(TEXT), "out": str(out), "name": "run", "vocab_size": 320, "steps": 10, **SHAPE,
        "batch": 8, "seq_len": 16, "eval_batches": 1, "eval_every": 100, "sample_every": 100, "sample_tokens": 2,
        "save_every": 100, "warmup": 2, "lr": 1e-3, "device": "cpu", "bucket_mb": 0.05, "watchdog": 60.0,
        "precision": "fp32",
    }  # fmt: skip
    defaults["warmup"] = max(0, min(2, more.get("steps", 10) - 2))
    return TrainConfig(**{**defaults, **more})


def some_ranks(n):
    """Ranks of the first n processes, None on the others."""
    comm = WORLD.Split(0 if n > WORLD.rank else MPI.UNDEFINED)
    return Ranks(comm) if comm != MPI.COMM_NULL else None


def divided(ranks):
    """How a run of these ranks is divided among them, None: of a single process."""
    return DataParallel(ranks) if ranks is not None and ranks.world > 1 else SingleDevice()


def wait():
    """A barrier that sleeps, because there may be fewer cores than ranks."""
    request = WORLD.Ibarrier()
    while not request.Test():
        time.sleep(0.005)


def run_checks(checks, folder):
    """Run every check on every process. A failure on one ends all, with its traceback."""
    gc.freeze()  # every run collects garbage: without searching what was imported
    with AbortOnError(Ranks(WORLD), "check") as guard:
        for check in checks:
            started = time.perf_counter()
            own = Path(folder, check.__module__)
            own.mkdir(exist_ok=True)
            check(own)
            wait()
            if WORLD.rank == 0:
                print(f"ok {check.__name__} {time.perf_counter() - started:.1f} s", flush=True)
    sys.exit(guard.code)
