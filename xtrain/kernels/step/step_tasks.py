"""A decoding step as a table of tasks, for one kernel whose resident blocks do all of them (step_kernel.py).

    stage     one product, or attention, of one layer; its tasks are shares of the work: share 0, 1, ... of `shares`
    task      kind, layer, share, shares, wait, arrivals, signal: a row of the table
              wait until `arrivals` tasks have signalled counter `wait`; compute; signal counter `signal`

    EMBED -> L x [ QKV -> ATTEND -> OUT -> GATE_UP -> DOWN ] -> HEAD       stage s waits for counter s and signals s + 1

Block p of P computes rows p, p + P, ... of the table, in this order. A task waits only for tasks in earlier rows (`check_tasks`).
So of all unfinished tasks, the one in the earliest row never waits for long: all that it waits for is done, and its block has
done its own earlier rows. If all blocks run at the same time, a deadlock is impossible; the launch refuses more blocks.

Counters are int64 and never reset, because a CUDA graph that replays the step has no place for it: in step number e a task
waits for (e + 1) arrivals. Counter 0 counts the blocks that have finished, so e = counter 0 // P at the start of a block, which
has not counted itself yet.
"""

from dataclasses import dataclass

import numpy as np

EMBED, QKV, ATTEND, OUT, GATE_UP, DOWN, HEAD = range(7)  # kinds
KIND, LAYER, SHARE, SHARES, WAIT, ARRIVALS, SIGNAL = range(7)  # columns of the table
FIELDS = 8  # numbers of a row: 32 bytes
SPACING = 16  # of the counters: each in a cache line of its own


@dataclass(frozen=True)
class Stage:
    """units: parts into which the stage's work can be divided, at most."""

    kind: int
    layer: int
    units: int


def make_stages(L: int, units: dict[int, int]) -> list[Stage]:
    """-> the stages of a step in order. units: by kind"""
    layer = (QKV, ATTEND, OUT, GATE_UP, DOWN)
    kinds = [(EMBED, 0), *((kind, i) for i in range(L) for kind in layer), (HEAD, L)]
    return [Stage(kind, i, units[kind]) for kind, i in kinds]


def make_tasks(stages: list[Stage], blocks: int) -> np.ndarray:
    """-> the table, int32 (tasks, FIELDS), for so many blocks"""
    rows, before = [], 0
    for s, stage in enumerate(stages):
        shares = min(stage.units, blocks)
        for share in range(shares):
            rows.append((stage.kind, stage.layer, share, shares, s, before, s + 1, 0))
        before = shares
    tasks = np.array(rows, np.int32)
    check_tasks(tasks)
    return tasks


def check_tasks(tasks: np.ndarray) -> None:
    """Raise ValueError unless each task waits for all tasks that signal its counter, and all of them are in earlier rows."""
    signals = tasks[:, SIGNAL]
    for row, task in enumerate(tasks):
        all_of_them = int((signals == task[WAIT]).sum())
        earlier = int((signals[:row] == task[WAIT]).sum())
        if not all_of_them == earlier == task[ARRIVALS]:
            raise ValueError(
                f"task {row} waits for {task[ARRIVALS]} arrivals at counter {task[WAIT]}: {earlier} earlier tasks signal it, "
                f"{all_of_them} in all"
            )


def counters_size(stages: list[Stage]) -> int:
    """-> elements of the array of counters"""
    return SPACING * (len(stages) + 1)
