"""Exercises of lesson 33: blocks that wait at a counter, a table of tasks, the kernel that works through it, its timeline."""

import re

import numpy as np

from xtrain.simulator import sim

from .attempt import exercise
from .lesson_30 import whole
from .reading import divergent_barrier
from .waiting import compares_equal, events, sets_back

LARGE = 20_000_000  # beyond 2^24, where float32 rounds
KIND, STAGE, SHARE, SHARES, WAIT, ARRIVALS, SIGNAL = range(7)
COLUMNS = "(kind, stage, share, shares, wait, arrivals, signal)"
ALLOW = ("load_acquire", "atomic_add_release")


def barrier_between(names, a, b):
    """Is there a barrier between the last a before the first b, and this b? Events repeat. True if one is missing."""
    twice = [*names, *names]
    if a not in names or b not in names:
        return True
    start = names.index(a)
    end = twice.index(b, start + 1)
    last = max(i for i in range(start, end) if twice[i] == a)
    return "barrier" in twice[last:end]


SET_BACK = "A counter is set back, while another block may still be waiting at it: it is never reset, the target grows instead."


def order_of(e, target):
    """Hints for the ways in which blocks can fail to wait for each other. target: what to wait for, for the author."""
    found = e.read(events)
    names = [name for name, _ in found]
    adds = [inside for name, inside in found if name in ("add", "atomic")]
    arrival = next((n for n in names if n in ("add", "atomic")), "add")
    looks = "acquire" if "acquire" in names else "atomic"
    race = f"A block reads what another has not written yet, or overwrites what another still reads. {target}"
    if not adds:
        race = "No block says that it has written: after a barrier, thread 0 adds 1 to the counter with atomic_add_release(counter, i, int64(1))."
    elif "acquire" not in names and names.count("atomic") + names.count("add") < 2:
        race = (
            "A plain read of a counter orders nothing, and the compiler may read only once: read it with load_acquire(counter, i)."
            if "while" in e.source
            else "Blocks arrive, but none of them waits: while load_acquire(counter, i) < target: pass, in thread 0."
        )
    elif e.read(sets_back):
        race = SET_BACK
    elif "fence" not in names and (
        "add" not in names or (arrival == "atomic" and looks == "acquire")
    ):
        race = (
            "cuda.atomic.add counts, but it releases nothing: another block may see the count before the elements. Use "
            "atomic_add_release(counter, i, int64(1))."
        )
    elif not all(adds):
        race = "Every thread arrives, so the count is reached before all blocks have arrived: thread 0 adds 1 for its block."
    elif "write" in names and names.index(arrival) < names.index("write"):
        race = "A block arrives before it has computed: first the elements, then a barrier, then the arrival."
    elif not barrier_between(names, "write", arrival):
        race = "Thread 0 arrives before the other threads of its block have written: cuda.syncthreads() before it adds."
    elif looks == "acquire" and not barrier_between(names, "acquire", "write"):
        race = "Only thread 0 waits, the others of its block run ahead: cuda.syncthreads() after the wait."
    dead = f"A wait never ends: its target is not reached. {target}"
    if divergent_barrier(e.source):
        dead = f"There is a barrier that not all threads reach:\n    {divergent_barrier(e.source)}\nMove it out of there."
    elif re.search(r"^\s+return\s*$", e.source, re.M):
        dead = "Threads that have returned reach no barrier. Threads past the end take part: put only the computation into an `if`."
    elif not adds:
        dead = "A block waits, but none arrives: thread 0 adds 1 to the counter with atomic_add_release, and then waits."
    elif e.read(sets_back):
        dead = SET_BACK
    elif e.read(compares_equal):
        dead = "A fast block may already have arrived for the next round, so the count may be larger than the target: wait while it is less, `<`."
    return {
        "RaceError between blocks": race,
        "RaceError": race,
        "DeadlockError": dead,
        "UninitializedError": race,
    }


def late(hints, default):
    """What to say when values are wrong because a block did not wait. hints: of order_of."""
    race = hints["RaceError between blocks"]
    return race if race.startswith(("Every thread arrives", SET_BACK)) else default


def no_grid_sync(e):
    e.need(
        "this_grid" not in e.code,
        "this_grid().sync() makes all blocks wait for each other, and is what you write here yourself: a counter, an arrival, a wait.",
    )


def spread(x):
    """One round, in the type of x."""
    return np.roll(x, 1) + x + np.roll(x, -1)


EDGE = (
    "The neighbours of the first and of the last element wrap around: indices (i - 1) % n and (i + 1) % n. Threads past the end own no element. "
    "x has two rows, r % 2 and (r + 1) % 2, and there is one counter, count[0]."
)


@exercise(
    "33.1", "rounds_kernel",
    first_step="a loop over r with the body of one_round_kernel, and after it a barrier. Then thread 0 arrives and waits.",
    hints={"OutOfBoundsError": EDGE, "CollectiveError": "All threads must reach cuda.syncthreads()."},
    allow=ALLOW,
)  # fmt: skip
def rounds_kernel(e):
    no_grid_sync(e)
    fixed = (64, 2), (80, 4), (20, 3), (33, 5), (96, 1), (40, 0), (70, 3, LARGE)
    target = "In round r (from 0) every block arrives once, after it has written, and waits until the count is (r + 1) * cuda.gridDim.x."
    hints = order_of(e, target)
    for n, rounds, *large in e.cases(fixed, lambda rng: (rng.integers(65, 150), rng.integers(2, 6))):  # fmt: skip
        first = np.asarray(whole(e, n, -LARGE, LARGE) if large else whole(e, n, -50, 50))
        x = e.blank(2, n, dtype=np.int32)
        x[0] = first
        count, grid = sim(np.zeros(1, np.int64)), -(-n // 32)
        e.run(grid, 32, x, count, np.int64(rounds), case=f"n = {n}, {rounds} rounds" + ", large numbers" * len(large), hints=hints)  # fmt: skip
        states = [first.astype(np.int64)]
        for _ in range(rounds + 1):
            states.append(spread(states[-1]))
        unwritten = np.full(n, 0x7F7F7F7F)

        def rows(rounds, step=spread, first=first):
            """Both rows after so many rounds."""
            x = [first.astype(np.int64), unwritten]
            for r in range(rounds):
                x[(r + 1) % 2] = step(x[r % 2])
            return np.array(x)

        want = rows(rounds)
        e.same("x", np.asarray(x), want, {
            "The numbers are rounded: they were added as floats. They are int32.":
                lambda got, large=large, want=want: large and np.allclose(got, want, 1e-6, 100),
            "The last round is missing: rounds are r = 0, 1, ..., rounds - 1.": rows(max(rounds - 1, 0)),
            "There is a round too many: r = 0, 1, ..., rounds - 1.": rows(rounds + 1),
            "The element itself is missing in the sum.": rows(rounds, lambda y: np.roll(y, 1) + np.roll(y, -1)),
            "The right neighbour is missing in the sum.": rows(rounds, lambda y: np.roll(y, 1) + y),
            "The left neighbour is missing in the sum.": rows(rounds, lambda y: np.roll(y, -1) + y),
            "Round r reads row r % 2 and writes row (r + 1) % 2.": lambda got, first=first: rounds == 1 and (got[0] != first).any(),
            late(hints, f"A block did not wait until all had written. {target}"): lambda got, rounds=rounds: grid > 1 and rounds > 1,
        }, rtol=0, atol=0)  # fmt: skip


# ----------------------------------------------------------------------------- tables
def table(stages, blocks):
    """stages: [(kind, units), ...] -> the rows of 33.2"""
    rows, before = [], 0
    for s, (kind, units) in enumerate(stages):
        shares = min(units, blocks)
        rows += [(kind, s, share, shares, s, before, s + 1) for share in range(shares)]
        before = shares
    return rows


@exercise(
    "33.2", "make_tasks",
    first_step="for s, (kind, units) in enumerate(stages): shares = min(units, blocks), and one row for each share.",
    hints={"ValueError": "A stage is a pair (kind, units): for s, (kind, units) in enumerate(stages).",
           "TypeError": "stages is a list of pairs (kind, units), blocks is a number."},
    kernel=False,
)  # fmt: skip
def make_tasks(e):
    fixed = (
        ([(0, 1)], 1),
        ([(1, 3), (2, 2)], 3),
        ([(1, 3), (2, 5), (3, 1)], 3),
        ([(4, 7), (5, 2), (4, 7), (5, 2)], 4),
        ([(0, 1), (1, 40), (2, 3), (1, 40)], 8),
        ([(6, 5), (3, 4), (1, 1)], 1),
        ([], 2),
    )

    def draw(rng):
        stages = [
            tuple(map(int, row))
            for row in rng.integers((0, 1), (7, 12), (int(rng.integers(4, 8)), 2))
        ]
        return stages, int(rng.integers(2, 9))

    for case in e.cases(fixed, draw, times=3):
        stages, blocks = [tuple(s) for s in case[0]], case[1]
        given = list(stages)
        got = e.call(given, blocks, case=f"stages {stages}, {blocks} blocks")
        e.need(given == stages, "`stages` was changed: only read it, the caller may need it again.")
        e.need(got is not None, "Nothing is returned: end with `return` and the list of rows.")
        try:
            rows = np.array([tuple(row) for row in got], np.float64).reshape(len(got), 7)
        except (TypeError, ValueError):
            raise e.wrong(f"Return a list of rows of seven numbers, {COLUMNS}.") from None
        e.need(
            (rows == np.floor(rows)).all(),
            "There is a number that is not whole in a row: divide with //.",
        )
        rows = rows.astype(int)
        _judge_table(e, rows, stages, blocks)


def _judge_table(e, rows, stages, blocks):
    shown = lambda row: f"Row {row} is {tuple(rows[row].tolist())}, {COLUMNS}."
    stray = [r for r in range(len(rows)) if not 0 <= rows[r, STAGE] < len(stages)]
    e.need(
        not stray,
        stray
        and f"{shown(stray[0])} Stages are numbered from 0, and the last is {len(stages) - 1}.",
    )
    shares = [min(units, blocks) for _, units in stages]
    for s, (kind, units) in enumerate(stages):
        mine = [r for r in range(len(rows)) if rows[r, STAGE] == s]
        n, want = len(mine), shares[s]
        if n != want:
            why = f"Stage {s} has {units} units; for {blocks} blocks it has {n} tasks, expected {want}.\n"
            if n == units > blocks:
                why += "One task per unit is more than there are blocks: a task does several units, share, share + shares, ..."
            elif n == blocks > units:
                why += "A stage cannot have more tasks than units: some would have nothing to do."
            elif n == 0:
                why += "The stage is missing."
            elif n == 1:
                why += "One block would do all of it. Divide the work: min(units, blocks) tasks."
            else:
                why += "It is min(units, blocks)."
            raise e.wrong(why)
        for r in mine:
            row = rows[r]
            before = shares[s - 1] if s else 0
            e.need(row[KIND] == kind, f"{shown(r)} The kind of stage {s} is {kind}.")
            e.need(row[SHARES] == want, f"{shown(r)} `shares` is the number of the stage's tasks, {want}"
                   + (", not of its units." if row[SHARES] == units else "."))  # fmt: skip
            if row[WAIT] != s:
                why = (
                    "A stage that waits at the counter that it signals itself waits for ever."
                    if row[WAIT] == s + 1
                    else "Stage s waits at counter s."
                )
                raise e.wrong(f"{shown(r)} {why}")
            e.need(row[SIGNAL] == s + 1, f"{shown(r)} Stage s signals counter s + 1.")
            if row[ARRIVALS] != before:
                why = f"It waits for all tasks of stage {s - 1}: {before} arrivals"
                if s == 0:
                    why = "The first stage waits for nothing: 0 arrivals"
                elif row[ARRIVALS] == blocks > before:
                    why += ". Not every block has a task in that stage"
                elif row[ARRIVALS] == want:
                    why += ", not as many as its own stage has"
                elif row[ARRIVALS] == stages[s - 1][1]:
                    why += ". Tasks arrive, not units"
                elif row[ARRIVALS] == 1:
                    why += ". One arrival alone does not say that the others have finished"
                elif row[ARRIVALS] == sum(shares[:s]):
                    why += ". Only those that signal counter `wait` count, not those of all stages before"
                raise e.wrong(f"{shown(r)} {why}.")
        order = sorted(int(rows[r, SHARE]) for r in mine)
        e.need(
            order == list(range(want)),
            f"The shares of stage {s} are {order}, expected 0 to {want - 1}, each once.",
        )
        busy = {r % blocks for r in mine}
        late = [
            r for r in mine if s and max(np.flatnonzero(rows[:, STAGE] == s - 1), default=-1) > r
        ]
        if late:
            raise e.wrong(
                f"{shown(late[0])} It waits for tasks in later rows: all rows of stage {s - 1} come before those of stage {s}."
            )
        e.need(
            len(busy) == want,
            f"Stage {s} has {want} tasks, but only {len(busy)} blocks do them: row r belongs to block r % {blocks}.",
        )


# ----------------------------------------------------------------------------- the kernel
@exercise(
    "33.3", "tasks_kernel",
    first_step="e = load_acquire(count_S, 0) // cuda.gridDim.x. Then a loop over the block's rows: wait, barrier, compute, barrier, arrive.",
    hints={"OutOfBoundsError": "Indices of elements wrap around, (i - 1) % n and (i + 1) % n. A task of stage s reads row s of x and writes row s + 1; the columns of the "
           "table are KIND, STAGE, ..., SIGNAL."},
    allow=ALLOW,
)  # fmt: skip
def tasks_kernel(e):
    no_grid_sync(e)
    fixed = (
        (64, 2, (2, 2)),
        (80, 3, (3, 1, 2)),
        (100, 2, (4, 1, 4, 2)),
        (33, 1, (2, 1)),
        (20, 3, (1, 3)),
        (20, 3, (1, 1)),  # block 2 has no rows
        (90, 4, (2, 3, 4)),
    )
    draw = lambda rng: (rng.integers(40, 120), rng.integers(2, 5), rng.integers(1, 5, 4))
    for n, blocks, units in e.cases(fixed, draw):
        rows, S = table([(0, int(u)) for u in units], blocks), len(units)
        tasks, count = sim(np.array(rows, np.int32)), sim(np.zeros(S + 1, np.int64))
        arrived = np.array([blocks, *(min(int(u), blocks) for u in units)])
        for launch in range(3):
            target = (
                "A task waits at counter tasks_RF[row, WAIT] until it is tasks_RF[row, ARRIVALS] * (e + 1), e = load_acquire(count_S, 0) // "
                "cuda.gridDim.x at the start, and then arrives at counter tasks_RF[row, SIGNAL]."
            )
            if launch:
                target = (
                    f"The counters still have the arrivals of the launches before, counter 0 is {int(np.asarray(count)[0])}. "
                    + target
                )
            x = e.blank(S + 1, n, dtype=np.int32)
            x[0] = np.asarray(whole(e, n, -50, 50))
            want = np.zeros((S + 1, n), np.int64)
            want[0] = x[0]
            for s in range(S):
                want[s + 1] = spread(want[s])
            hints = order_of(e, target) | {
                "RaceError": "Threads of a block compute the same elements, or overwrite what others read: thread t has i = 32 share + t, and on in steps of "
                "32 shares; and there is a barrier after the wait and one before the arrival."
                + " Counters are read with load_acquire: e = load_acquire(count_S, 0) // cuda.gridDim.x."
                * ("count_S[" in e.source)
            }
            case = f"n = {n}, units {tuple(units)}, {blocks} blocks, launch {launch}"
            e.run(blocks, 32, x, tasks, count, case=case, hints=hints)
            e.launched = ()  # the work of each task is looked at below
            wrote = [e.wrote(x[s + 1]).all() for s in range(S)]
            e.same("x", np.asarray(x), want, {
                "Row 0 of x is the input: a task of stage s writes row s + 1.": lambda got, want=want: (got[0] != want[0]).any(),
                "Some elements were not written: thread t owns i = 32 share + t, and on in steps of 32 shares, while i < n.":
                    lambda got, wrote=wrote: not all(wrote),
                "The element itself is missing in the sum.": lambda got, want=want: np.array_equal(got[1], want[1] - want[0]),
                late(hints, f"A task did not wait until all before it had arrived. {target}"): lambda got, wrote=wrote: all(wrote) and ((got == 0x7F7F7F7F) | (got > 1 << 24) | (got < -(1 << 24))).any(),
                "A neighbour is missing in the sum.": lambda got, want=want: np.array_equal(got[1], np.roll(want[0], 1) + want[0]) or np.array_equal(got[1], np.roll(want[0], -1) + want[0]),
            }, rtol=0, atol=0)  # fmt: skip
            for row, task in enumerate(rows):
                s, share, shares = task[STAGE], task[SHARE], task[SHARES]
                own = [i for i in range(n) if i // 32 % shares == share]
                writers = {e.writer(x, s + 1, i) for i in own}
                by = {block for (block, *_), _ in writers}
                e.need(
                    by <= {row % blocks},
                    f"The values are right, but elements of row {row} of the table were computed by block {min(by - {row % blocks}, default=0)}: row r belongs to block r % "
                    f"{blocks}, and a task has the elements 32 share + t, in steps of 32 shares.",
                )
                e.need(
                    len(writers) == min(32, len(own)),
                    f"The values are right, but {len(writers)} threads computed the {len(own)} elements of row {row} of the table: divide them among the "
                    "32 threads of the block.",
                )
            now, due = np.asarray(count), arrived * (launch + 1)
            e.same("count", now, due, {
                "Every block arrives at counter 0 once, when it has done all of its rows, also if it has none.": lambda got, due=due: got[0] != due[0] and np.array_equal(got[1:], due[1:]),
                "The counters were set back. They continue from launch to launch: another block may still be waiting at one.": lambda got, due=due: (got < due).any() and launch,
                "A task arrives once, at counter tasks_RF[row, SIGNAL].": lambda got: True,
            }, rtol=0, atol=0)  # fmt: skip


# ----------------------------------------------------------------------------- times
def plan(tasks, blocks, durations, hand_over, free_block=True, waits=True, every=False, which=max, owner=None, after=False):  # fmt: skip
    """The pairs of 33.4, or those of a mistake."""
    free, done, out = [0] * blocks, {}, []
    for r, task in enumerate(tasks):
        b = owner(r, task, free) if owner else r % blocks
        begin = free[b] if free_block else 0
        before = done.get(task[WAIT], [0])
        if waits and task[ARRIVALS]:
            begin = max(begin, which(before) + hand_over * (not after)) + hand_over * after
        elif every:
            begin += hand_over
        end = begin + durations[r]
        free[b] = end
        done.setdefault(task[SIGNAL], []).append(end)
        out.append((begin, end))
    return np.array(out, float).reshape(-1, 2)


@exercise(
    "33.4", "task_times",
    first_step="free = [0] * blocks and done = {}. For each row: begin, end; then free of its block and done of its counter change.",
    hints={"KeyError": "A task that waits for 0 arrivals waits for no task: counter `wait` may have no entry.",
           "IndexError": "Row r belongs to block r % blocks."},
    kernel=False,
)  # fmt: skip
def task_times(e):
    stages = lambda *units: [(0, u) for u in units]
    # two stages wait for the first one, and the last waits for the second of them only
    branches = [(0, 0, 0, 2, 0, 0, 1), (0, 0, 1, 2, 0, 0, 1), (1, 1, 0, 1, 1, 2, 2), (2, 2, 0, 1, 1, 2, 3), (3, 3, 0, 1, 3, 1, 4)]  # fmt: skip
    three = [(0, 0, share, 3, 0, 0, 1) for share in range(3)]  # more tasks than blocks
    fixed = (
        (table(stages(1), 1), 1, [3], 2),
        (three, 2, [5, 1, 2], 0),
        (table(stages(2, 2), 2), 2, [3, 1, 2, 2], 1),
        (table(stages(3, 1, 3), 3), 3, [5, 1, 2, 4, 1, 6, 1], 2),
        (table(stages(2, 2, 2), 1), 1, [2, 3, 4], 0),
        (table(stages(1, 3, 2, 4), 4), 4, [2, 1, 7, 1, 3, 3, 1, 1, 9, 2], 1),
        (branches, 2, [4, 2, 9, 1, 3], 1),
        ([], 2, [], 1),
    )

    def draw(rng):
        blocks = int(rng.integers(2, 6))
        rows = table(stages(*map(int, rng.integers(1, 7, 5))), blocks)
        return (
            rows,
            blocks,
            [int(d) for d in rng.integers(1, 20, len(rows))],
            int(rng.integers(1, 5)),
        )

    for case in e.cases(fixed, draw, times=3):
        rows, blocks, durations, hand_over = case
        rows = [tuple(row) for row in rows]
        given = list(rows), blocks, list(durations), hand_over
        got = e.call(
            *given,
            case=f"{len(rows)} tasks, {blocks} blocks, durations {list(durations)}, hand-over {hand_over}",
        )
        e.need(got is not None, "Nothing is returned: end with `return` and a list of pairs.")
        try:
            times = np.array([tuple(p) for p in got], float).reshape(len(got), 2)
        except (TypeError, ValueError):
            raise e.wrong("Return a list with a pair (begin, end) for each row.") from None
        e.need(
            len(got) == len(rows), f"There are {len(got)} pairs, expected one per row: {len(rows)}."
        )
        need = plan(*case)
        e.need((times == need).all() or sorted(times.tolist()) != sorted(need.tolist()),
               "The pairs are right, but in another order: one for each row of the table, in the order of the rows.")  # fmt: skip
        length = times[:, 1] - times[:, 0]
        e.need(np.allclose(length, np.array(durations, float)),
               "A task has another duration than was given: pairs are (begin, end), end = begin + durations[row].")  # fmt: skip
        other = lambda case=case, **change: plan(*case, **change)
        e.same("times", times, need, {
            "A task begins although its block still does another: it begins at the later of two times.": other(free_block=False),
            "No task waits: a task with arrivals begins `hand_over` after the last task that signals its counter.": other(waits=False),
            "The hand-over is missing.": plan(rows, blocks, durations, 0) if hand_over else np.empty(0),
            "A task that waits for 0 arrivals has no hand-over either.": other(every=True),
            "The first arrival does not end the wait, the last one does: keep the latest end for each counter.": other(which=min),
            "The task that ends last is not always the one in the last row: keep the latest end for each counter.": other(which=lambda ends: ends[-1]),
            "Row r belongs to block r % blocks; this is as if the share said which block.": other(owner=lambda r, task, free: task[SHARE] % blocks),
            "Row r belongs to block r % blocks, not r // blocks.": other(owner=lambda r, task, free: r // blocks % blocks),
            "A task waits for its own block, row r for block r % blocks, although another one is free.": other(owner=lambda r, task, free: free.index(min(free))),
            "One block does everything here: each block has a time at which it is free.": other(owner=lambda r, task, free: 0) if blocks > 1 else np.empty(0),
            "The hand-over is added to the end of the last arrival alone: begin at the later of that and of the time at which the block is free.": other(after=True),
            "A stage waits for the stage before it here. It waits for the tasks that signal counter `wait`, whichever they are.":
                lambda got, rows=rows: rows == branches,
            "A task begins too early: the hand-over counts for every task that waits, also if its own block was the last to arrive.":
                lambda got, need=need: (got <= need + 1e-9).all(),
            "Everything begins later than necessary.": lambda got, need=need: (got >= need - 1e-9).all(),
        })  # fmt: skip
