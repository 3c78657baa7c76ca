"""Typical mistakes, planted in the solutions of lesson 33: (exercise, old, new, words of the answer)."""

SUM = "x_2n[old, (i - 1) % n] + x_2n[old, i] + x_2n[old, (i + 1) % n]"
WROTE = "        cuda.syncthreads()  # all threads have written\n"
WAITED = "        cuda.syncthreads()  # thread 0 has waited\n"
ADD = "atomic_add_release(count_1, 0, int64(1))"
WAIT = "while load_acquire(count_1, 0) < (r + 1) * cuda.gridDim.x:"
IF = "        if cuda.threadIdx.x == 0:\n            atomic"
ROW = "rows.append((kind, s, share, shares, s, before, s + 1))"
SHARES = "min(units, blocks)"
LOOP = "range(cuda.blockIdx.x, tasks_RF.shape[0], cuda.gridDim.x)"
STEP = "e = load_acquire(count_S, 0) // cuda.gridDim.x"
SIGNAL = "atomic_add_release(count_S, tasks_RF[row, SIGNAL], int64(1))"
LAST = (
    "    if t == 0:\n        atomic_add_release(count_S, 0, int64(1))  # this block has finished\n"
)
OWN = "range(32 * share + t, n, 32 * shares)"
BEGIN = "begin = max(begin, done[task[WAIT]] + hand_over)"
POLL = "        if t == 0:\n            while load_acquire(count_S, tasks_RF[row, WAIT]) < tasks_RF[row, ARRIVALS] * (e + 1):\n                pass\n"
POLLED = """        while True:  # in every thread
            seen = load_acquire(count_S, tasks_RF[row, WAIT])
            if seen >= tasks_RF[row, ARRIVALS] * (e + 1):
                break
"""

MISTAKES = [
    ("33.1", ADD, "cuda.atomic.add(count_1, 0, 1)", "it releases nothing"),
    ("33.1", ADD, "count_1[0] += 1", "No block says that it has written"),
    ("33.1", "load_acquire(count_1, 0)", "count_1[0]", "A plain read of a counter orders nothing"),
    ("33.1", f"            {WAIT}\n                pass\n", "", "none of them waits"),
    ("33.1", WROTE, "", "arrives before the other threads of its block have written"),
    ("33.1", WAITED, "", "Only thread 0 waits"),
    ("33.1", IF, "        if True:\n            atomic", "In round r (from 0) every block arrives once"),
    ("33.1", f"{IF}{ADD[6:]}\n", f"        {ADD}\n        if cuda.threadIdx.x == 0:\n", "Every thread arrives"),
    ("33.1", "< (r + 1) * cuda.gridDim.x", "!= (r + 1) * cuda.gridDim.x", "wait while it is less"),
    ("33.1", "< (r + 1) * cuda.gridDim.x", "< cuda.gridDim.x", "until the count is (r + 1) * cuda.gridDim.x"),
    ("33.1", "< (r + 1) * cuda.gridDim.x", "< r * cuda.gridDim.x", "until the count is (r + 1) * cuda.gridDim.x"),
    ("33.1", "< (r + 1) * cuda.gridDim.x", "<= (r + 1) * cuda.gridDim.x", "A wait never ends"),
    ("33.1", f"            {ADD}\n", "", "none arrives"),
    ("33.1", "(i + 1) % n", "i + 1", "wrap around"),
    ("33.1", "for r in range(rounds)", "for r in range(rounds - 1)", "The last round is missing"),
    ("33.1", "for r in range(rounds)", "for r in range(rounds + 1)", "a round too many"),
    ("33.1", SUM, "x_2n[old, (i - 1) % n] + x_2n[old, (i + 1) % n]", "The element itself is missing"),
    ("33.1", SUM, "x_2n[old, i] + x_2n[old, (i + 1) % n]", "The left neighbour is missing"),
    ("33.1", SUM, "x_2n[old, (i - 1) % n] + x_2n[old, i]", "The right neighbour is missing"),
    ("33.1", "old, new = r % 2, (r + 1) % 2", "old, new = (r + 1) % 2, r % 2", "expected"),
    ("33.1", "old, new = r % 2, (r + 1) % 2", "old, new = r, r + 1", "x has two rows"),
    ("33.1", "    for r in range(rounds)", "    if i >= n:\n        return\n    for r in range(rounds)", "Threads that have returned reach no barrier"),
    ("33.2", SHARES, "units", "more than there are blocks"),
    ("33.2", SHARES, "blocks", "cannot have more tasks than units"),
    ("33.2", SHARES, "1", "One block would do all"),
    ("33.2", SHARES, "max(1, min(units, blocks) - 1)", "It is min(units, blocks)"),
    ("33.2", "share, shares, s, before", "share, units, s, before", "not of its units"),
    ("33.2", "share, shares, s, before", "share + 1, shares, s, before", "each once"),
    ("33.2", "shares, s, before, s + 1", "shares, s + 1, before, s + 1", "waits for ever"),
    ("33.2", "shares, s, before, s + 1", "shares, s - 1, before, s + 1", "Stage s waits at counter s"),
    ("33.2", "shares, s, before, s + 1", "shares, s, before, s", "signals counter s + 1"),
    ("33.2", "shares, s, before, s + 1", "shares, s, shares, s + 1", "0 arrivals"),
    ("33.2", "shares, s, before, s + 1", "shares, s, shares if s else 0, s + 1", "not as many as its own stage has"),
    ("33.2", "shares, s, before, s + 1", "shares, s, 1 if s else 0, s + 1", "One arrival alone"),
    ("33.2", "shares, s, before, s + 1", "shares, s, blocks if s else 0, s + 1", "Not every block"),
    ("33.2", "before = shares", "before = units", "not units"),
    ("33.2", "before = shares", "before += shares", "not those of all stages before"),
    ("33.2", "(kind, s, share", "(s, s, share", "The kind of stage"),
    ("33.2", "return rows", "return rows[::-1]", "It waits for tasks in later rows"),
    ("33.2", "return rows", "pass", "Nothing is returned"),
    ("33.2", ROW, "rows.append((kind, share, shares))", "seven numbers"),
    ("33.2", "return rows", "stages.clear()\n    return rows", "`stages` was changed"),
    ("33.3", STEP, "e = 0", "did not wait until all before it had arrived"),
    ("33.3", STEP, "e = load_acquire(count_S, 0)", "A wait never ends"),
    ("33.3", STEP, "e = count_S[0] // cuda.gridDim.x", "e = load_acquire(count_S, 0)"),
    ("33.3", "* (e + 1)", "* e", "A task did not wait until all before it had arrived. A task waits at counter tasks_RF[row, WAIT]"),
    ("33.3", LAST, "", "Every block arrives at counter 0 once"),
    ("33.3", LAST, LAST.replace("count_S, 0, int64(1)", "count_S, 0, int64(2)"), "Every block arrives at counter 0 once"),
    ("33.3", SIGNAL, "cuda.atomic.add(count_S, tasks_RF[row, SIGNAL], 1)", "it releases nothing"),
    ("33.3", SIGNAL, SIGNAL.replace("SIGNAL", "WAIT"), "counter tasks_RF[row, SIGNAL]"),
    ("33.3", "        cuda.syncthreads()  # thread 0 has waited\n", "", "Only thread 0 waits"),
    ("33.3", "        cuda.syncthreads()  # all threads have written\n", "", "arrives before the other threads"),
    ("33.3", OWN, "range(32 * share + t, min(n, 32 * share + 32))", "Threads of a block compute the same elements"),
    ("33.3", LOOP, "range(cuda.blockIdx.x, min(tasks_RF.shape[0], cuda.blockIdx.x + 1))", "Some elements were not written"),
    ("33.3", LOOP, "range(cuda.gridDim.x - 1 - cuda.blockIdx.x, tasks_RF.shape[0], cuda.gridDim.x)", "row r belongs to block"),
    ("33.3", OWN, "range(32 * share, n, 32 * shares)", "Threads of a block compute the same elements"),
    ("33.3", "(i + 1) % n", "i + 1", "wrap around"),
    ("33.3", "x_Sn[s, i] + ", "", "The element itself is missing"),
    ("33.3", LAST, LAST.replace("t == 0", "t == 0 and cuda.blockIdx.x < tasks_RF.shape[0]"), "also if it has none"),
    ("33.3", f"        if t == 0:\n            {SIGNAL}", f"        {SIGNAL}", "Every thread arrives"),
    ("33.3", STEP, f"{STEP}\n    if cuda.grid(1) == 0:\n        count_S[1] = 0", "A counter is set back"),
    ("33.4", BEGIN, "begin = done[task[WAIT]] + hand_over", "the later of two times"),
    ("33.4", BEGIN, "pass", "No task waits"),
    ("33.4", BEGIN, "begin = max(begin, done[task[WAIT]])", "The hand-over is missing"),
    ("33.4", "        if task[ARRIVALS]:\n            begin = max(begin, done[task[WAIT]] + hand_over)", "        begin = max(begin, done.get(task[WAIT], 0) + hand_over)", "no hand-over either"),
    ("33.4", "        if task[ARRIVALS]:\n    ", "", "may have no entry"),
    ("33.4", "max(done.get(task[SIGNAL], 0), end)", "end", "keep the latest end for each counter"),
    ("33.4", "max(done.get(task[SIGNAL], 0), end)", "min(done.get(task[SIGNAL], end), end)", "the last one does"),
    ("33.4", "row % blocks", "task[SHARE] % blocks", "as if the share said which block"),
    ("33.4", "row % blocks", "0", "One block does everything"),
    ("33.4", "(begin, end)", "(begin, durations[row])", "pairs are (begin, end)"),
    ("33.4", BEGIN, "begin = max(begin, done[task[WAIT]]) + hand_over", "the last arrival alone"),
    ("33.4", "row % blocks", "row // blocks % blocks", "not r // blocks"),
    ("33.4", "row % blocks", "free.index(min(free))", "although another one is free"),
    ("33.4", "return times", "return sorted(times)", "in another order"),
    ("33.4", BEGIN, f"{BEGIN} + 1", "later than necessary"),
]  # fmt: skip

RIGHT = [  # unusual but correct
    ("33.1", WROTE, "        cuda.threadfence()\n" + WROTE),
    ("33.1", "if cuda.threadIdx.x == 0:", "if cuda.threadIdx.x == 0 and r < rounds - 1:"),
    ("33.2", "range(shares)", "range(shares - 1, -1, -1)"),
    ("33.3", "if t == 0:\n            while", "if True:\n            while"),
    ("33.3", STEP, f"e = int64(0)\n    if t == 0:\n        {STEP}"),
    ("33.4", "        if task[ARRIVALS]:\n", "        if task[ARRIVALS] > 0:\n"),
    ("33.1", "    for r in range(rounds):", "    # instead of this_grid().sync()\n    for r in range(rounds):"),
    ("33.3", POLL, POLLED),
    ("33.3", "cuda.syncthreads()", "cuda.syncwarp()"),  # the block is one warp
]  # fmt: skip
