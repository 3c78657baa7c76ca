"""One rank fails in the middle of a run.   mpirun -n N python faults.py FOLDER FAULT RANK PLACE

FAULT: raise, exit, leave (os._exit), kill, hang (in Python), stuck (in an MPI call), frozen (holding Python's lock),
stopped (SIGSTOP).
PLACE: step (between steps), collective (after this rank has started one; the others wait in it), or one that is not in
a step: options, text, validation, checkpoint, report.
"""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
from common import SHAPE, WORLD, options

from xtrain.ddp import main as ddp_main
from xtrain.parallel import command, heartbeats
from xtrain.parallel.collectives import HostCollectives
from xtrain.parallel.ddp import DataParallel
from xtrain.training import loop
from xtrain.training.run import Run

AT_STEP = 3
OUTSIDE = {  # place -> what a rank calls there
    "options": (command, "_parse"),
    "text": (DataParallel, "check_data"),
    "validation": (Run, "validate"),
    "checkpoint": (Run, "snapshot"),
    "report": (loop, "print_summary"),
}


def fail(folder, fault, place):
    while (
        place not in OUTSIDE and not (folder / "run" / "checkpoints" / "step-000002").exists()
    ):  # it is written meanwhile
        time.sleep(0.01)
    (folder / "failed_at").write_text(str(time.time()))
    if fault == "raise":
        raise ZeroDivisionError("injected")
    if fault == "exit":
        sys.exit(0)
    if fault == "leave":
        os._exit(0)
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "hang":
        time.sleep(1000)
    if fault == "stuck":
        WORLD.Recv(np.empty(1), source=WORLD.rank, tag=99)
    if fault == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "frozen":
        ctypes.PyDLL(None).sleep(1000)
    raise AssertionError(fault)


def inject(folder, fault, rank, place):
    if WORLD.rank != rank:
        return
    step, join = Run.step, HostCollectives.join
    run = None

    def failing_step(self):
        nonlocal run
        run = self
        if place == "step" and self.done == AT_STEP:
            fail(folder, fault, place)
        return step(self)

    def failing_join(self):
        if place == "collective" and run.done == AT_STEP:
            fail(folder, fault, place)
        join(self)

    Run.step, HostCollectives.join = failing_step, failing_join
    if place in OUTSIDE:
        owner, name = OUTSIDE[place]
        setattr(owner, name, lambda *given, **named: fail(folder, fault, place))


if __name__ == "__main__":
    folder, fault, rank, place = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
    inject(folder, fault, rank, place)
    waits = fault in ("hang", "stuck", "frozen")  # for the watchdog
    heartbeats.SHORTEST = 3.0
    heartbeats.SHARE = 0.01
    steps = 3 if place == "report" else 1000
    o = options(folder, steps=steps, save_every=2, watchdog=1.0 if waits else 60.0)
    names = (
        *SHAPE,
        "out",
        "name",
        "vocab_size",
        "steps",
        "batch",
        "seq_len",
        "save_every",
        "watchdog",
    )
    arguments = [
        f"--{n.replace('_', '-')}={getattr(o, n)}" for n in (*names, "eval_batches", "device")
    ]
    sys.exit(ddp_main(["--data", *o.data, *arguments]))
