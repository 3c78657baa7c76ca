"""The blocks of one launch in several processes: `run(..., processes=2)`.

The first block runs in this process. If it took long enough, each of `processes` children (os.fork)
runs a share of the others on its own copy of the memory, and tells which elements its blocks have
read and changed. If no child has read or changed what another one has changed, the order of the
blocks did not matter: the changes are written to the arrays of this process.

Otherwise the work of the children is dropped, and this process runs the blocks one after the other.
So it does if one of them has a finding, waits for another block, or copies asynchronously
(kernels/primitives/hopper.py), because such copies have no record in Memory. The results and the
findings are therefore always those of one process. A launch with a finding, or with an atomic on an
element that other blocks use, takes longer than in one process.

A child has no other threads. It runs the kernel and nothing else, so it needs no lock that one of
them may have held.
"""

import contextlib
import gc
import io
import os
import pickle
import signal
import warnings

import numpy as np

WORTH = 0.1  # seconds for the blocks after the first; a fork takes some milliseconds


def checked(processes: int) -> int:
    """Return the number itself. Raises ValueError unless blocks can run in so many processes."""
    if type(processes) is not int or processes < 1:
        raise ValueError(f"processes={processes!r} is not a positive integer")
    if processes > 1 and not hasattr(os, "fork"):
        raise ValueError(
            f"processes={processes} needs os.fork, which this system does not have: use processes=1"
        )
    return processes


def run_in_children(launch, positions: list) -> bool:
    """Run the blocks at these positions in launch.processes children. Returns False, and has
    changed nothing, if they must run in this process.
    """
    count = min(launch.processes, len(positions))
    children: list = []
    answers: list = []
    try:
        for i in range(count):
            children.append(_start(launch, positions[i::count]))
        for _, pipe in children:
            try:
                answer = pickle.load(pipe)
            except (EOFError, pickle.UnpicklingError):  # the child has died
                answer = None
            if answer is None:
                return False
            answers.append(answer)
    finally:
        for pid, pipe in children:
            pipe.close()
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    if not all(map(_independent, zip(*(accesses for accesses, _ in answers)))):
        return False
    for accesses, _ in answers:
        for memory, (read, changed, values) in zip(launch.memories, accesses):
            memory.past_reads.update(read.tolist())
            memory.bytes_up_to(changed)[changed] = values
            memory.past_writes.update(changed.tolist())
    for _, text in sorted(line for _, printed in answers for line in printed):
        print(text, end="")
    return True


def _start(launch, positions):
    """Fork a child that runs these blocks. Returns its id, and the pipe with its pickled answer:
    None if it gives up."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():  # of other threads
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        try:
            gc.freeze()  # objects of the program are not finalized here
            os.close(reading)
            with open(writing, "wb") as pipe:
                answer = None
                with contextlib.suppress(Exception):
                    answer = _run(launch, positions)
                pickle.dump(answer, pipe)
        finally:
            os._exit(0)
    os.close(writing)
    return pid, open(reading, "rb")


def _run(launch, positions):
    """In a child: run these blocks. Returns (reads, changed, values) of each memory, and (position,
    text) of what they print."""
    reads: list[set] = [set() for _ in launch.memories]
    changed: list[set] = [set() for _ in launch.memories]
    printed = []
    for at in positions:
        block = launch.block_at(at)
        with contextlib.redirect_stdout(io.StringIO()) as text:
            done = block.advance()
        if not done or launch.found or launch.copies:
            return None
        for memory, read, change in zip(launch.memories, reads, changed):
            read.update(memory.reads, memory.loads)
            change.update(memory.writes, memory.atomics)
            memory.end_of_block()
        if text.getvalue():
            printed.append((at, text.getvalue()))
    accesses = []
    for memory, read, change in zip(launch.memories, reads, changed):
        keys = _sorted(change)
        accesses.append((_sorted(read), keys, memory.bytes_up_to(keys)[keys]))
    return accesses, printed


def _sorted(keys: set) -> np.ndarray:
    return np.sort(np.fromiter(keys, np.int64, len(keys)))


def _independent(accesses) -> bool:
    """Has no child read or changed an element of this memory that another child has changed?"""
    every = np.concatenate([changed for _, changed, _ in accesses])
    if len(np.unique(every)) < len(every):
        return False
    for reads, changed, _ in accesses:
        others = np.setdiff1d(every, changed, assume_unique=True)
        if np.isin(others, reads).any():
            return False
    return True
