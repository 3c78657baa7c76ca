"""Attempts at the exercises of lesson 33: see test_attempts.py."""


# %% 33.1 RIGHT: device functions, as in the library
@cuda.jit(device=True)
def meet(counters, i, target):
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        atomic_add_release(counters, i, int64(1))
        while load_acquire(counters, i) < target:
            pass
    cuda.syncthreads()


@cuda.jit
def rounds_kernel(x_2n, count_1, rounds):
    i, n = cuda.grid(1), x_2n.shape[1]
    for r in range(rounds):
        if i < n:
            a, b = x_2n[r % 2, (i + n - 1) % n], x_2n[r % 2, (i + 1) % n]
            x_2n[1 - r % 2, i] = a + b + x_2n[r % 2, i]
        meet(count_1, 0, (r + 1) * cuda.gridDim.x)


# %% 33.1 RIGHT: fences and atomics
@cuda.jit
def rounds_kernel(x_2n, count_1, rounds):
    i, n = cuda.grid(1), x_2n.shape[1]
    for r in range(rounds):
        old, new = r % 2, (r + 1) % 2
        if i < n:
            x_2n[new, i] = x_2n[old, (i - 1) % n] + x_2n[old, i] + x_2n[old, (i + 1) % n]
        cuda.threadfence()
        cuda.syncthreads()
        if cuda.threadIdx.x == 0:
            cuda.atomic.add(count_1, 0, 1)
            while cuda.atomic.add(count_1, 0, 0) < (r + 1) * cuda.gridDim.x:
                pass
            cuda.threadfence()
        cuda.syncthreads()


# %% 33.1 WRONG: is what you write here yourself
@cuda.jit
def rounds_kernel(x_2n, count_1, rounds):
    i, n = cuda.grid(1), x_2n.shape[1]
    for r in range(rounds):
        old, new = r % 2, (r + 1) % 2
        if i < n:
            x_2n[new, i] = x_2n[old, (i - 1) % n] + x_2n[old, i] + x_2n[old, (i + 1) % n]
        cuda.cg.this_grid().sync()


# %% 33.1 WRONG: No block says that it has written
@cuda.jit
def rounds_kernel(x_2n, count_1, rounds):
    i, n = cuda.grid(1), x_2n.shape[1]
    for r in range(rounds):
        old, new = r % 2, (r + 1) % 2
        if i < n:
            x_2n[new, i] = x_2n[old, (i - 1) % n] + x_2n[old, i] + x_2n[old, (i + 1) % n]
        cuda.syncthreads()


# %% 33.1 WRONG: Divide the work
@cuda.jit
def rounds_kernel(x_2n, count_1, rounds):
    n = x_2n.shape[1]
    if cuda.grid(1) == 0:
        for r in range(rounds):
            for i in range(n):
                a = x_2n[r % 2, (i - 1) % n] + x_2n[r % 2, i]
                x_2n[1 - r % 2, i] = a + x_2n[r % 2, (i + 1) % n]


# %% 33.1 WRONG: (r + 1) * cuda.gridDim.x
@cuda.jit
def rounds_kernel(x_2n, count_1, rounds):
    i, n = cuda.grid(1), x_2n.shape[1]
    for r in range(rounds):
        old, new = r % 2, (r + 1) % 2
        if i < n:
            x_2n[new, i] = x_2n[old, (i - 1) % n] + x_2n[old, i] + x_2n[old, (i + 1) % n]
        cuda.syncthreads()
        if cuda.threadIdx.x == 0:
            atomic_add_release(count_1, 0, int64(1))
            while load_acquire(count_1, 0) < 3 * (r + 1):
                pass
        cuda.syncthreads()


# %% 33.1 WRONG: A counter is set back
@cuda.jit
def rounds_kernel(x_2n, count_1, rounds):
    i, n = cuda.grid(1), x_2n.shape[1]
    for r in range(rounds):
        old, new = r % 2, (r + 1) % 2
        if i < n:
            x_2n[new, i] = x_2n[old, (i - 1) % n] + x_2n[old, i] + x_2n[old, (i + 1) % n]
        cuda.syncthreads()
        if cuda.threadIdx.x == 0:
            atomic_add_release(count_1, 0, int64(1))
            while load_acquire(count_1, 0) < (r + 1) * cuda.gridDim.x:
                pass
            count_1[0] = 0
        cuda.syncthreads()


# %% 33.2 RIGHT: lists of NumPy numbers, shares from behind
def make_tasks(stages, blocks):
    counts = [min(blocks, units) for _, units in stages]
    arrivals = [0, *counts]
    return np.array(
        [
            [kind, s, share, counts[s], s, arrivals[s], s + 1]
            for s, (kind, _) in enumerate(stages)
            for share in reversed(range(counts[s]))
        ]
    ).reshape(-1, 7)


# %% 33.2 WRONG: Row 0 is
def make_tasks(stages, blocks):
    rows = []
    for s, (kind, units) in enumerate(stages):
        shares = min(units, blocks)
        for share in range(shares):
            rows.append(
                (kind, s, share, shares, s, s, s + 1) if s else (kind, s, share, shares, 0, 1, 1)
            )
    return rows


# %% 33.2 WRONG: tasks, but only
def make_tasks(stages, blocks):
    rows, before = [], 0
    for s, (kind, units) in enumerate(stages):
        shares = min(units, blocks)
        new = [(kind, s, share, shares, s, before, s + 1) for share in range(shares)]
        filler = [(kind, s, 0, shares, s, before, s + 1)] if len(new) > 1 else []
        rows += new
        before = shares
    order = sorted(range(len(rows)), key=lambda r: (rows[r][1], -(rows[r][2] % 2), rows[r][2]))
    rows = [rows[r] for r in order]
    if blocks == 3 and len(rows) == 5:  # a stage is interrupted by another one
        rows = [rows[0], rows[3], rows[1], rows[2], rows[4]]
        rows[1] = (2, 1, 0, 2, 1, 3, 2)
    return rows


# %% 33.3 RIGHT: the step in shared memory, device functions
@cuda.jit(device=True)
def wait_for_count(counters, i, target):
    if cuda.threadIdx.x == 0:
        while load_acquire(counters, i) < target:
            pass
    cuda.syncthreads()


@cuda.jit(device=True)
def arrive(counters, i):
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        atomic_add_release(counters, i, int64(1))


@cuda.jit
def tasks_kernel(x_Sn, tasks_RF, count_S):
    step_s = cuda.shared.array(1, int64)
    n = x_Sn.shape[1]
    if cuda.threadIdx.x == 0:
        step_s[0] = load_acquire(count_S, 0) // cuda.gridDim.x + 1
    cuda.syncthreads()
    row = cuda.blockIdx.x
    while row < tasks_RF.shape[0]:
        s = tasks_RF[row, STAGE]
        wait_for_count(count_S, tasks_RF[row, WAIT], tasks_RF[row, ARRIVALS] * step_s[0])
        i = 32 * tasks_RF[row, SHARE] + cuda.threadIdx.x
        while i < n:
            x_Sn[s + 1, i] = x_Sn[s, (i - 1) % n] + x_Sn[s, i] + x_Sn[s, (i + 1) % n]
            i += 32 * tasks_RF[row, SHARES]
        arrive(count_S, tasks_RF[row, SIGNAL])
        row += cuda.gridDim.x
    arrive(count_S, 0)


# %% 33.3 WRONG: divide them among the 32 threads
@cuda.jit
def tasks_kernel(x_Sn, tasks_RF, count_S):
    n, t = x_Sn.shape[1], cuda.threadIdx.x
    if t == 0:
        e = load_acquire(count_S, 0) // cuda.gridDim.x
        for row in range(cuda.blockIdx.x, tasks_RF.shape[0], cuda.gridDim.x):
            s, share, shares = tasks_RF[row, STAGE], tasks_RF[row, SHARE], tasks_RF[row, SHARES]
            while load_acquire(count_S, tasks_RF[row, WAIT]) < tasks_RF[row, ARRIVALS] * (e + 1):
                pass
            for i in range(n):
                if i // 32 % shares == share:
                    x_Sn[s + 1, i] = x_Sn[s, (i - 1) % n] + x_Sn[s, i] + x_Sn[s, (i + 1) % n]
            atomic_add_release(count_S, tasks_RF[row, SIGNAL], int64(1))
        atomic_add_release(count_S, 0, int64(1))


# %% 33.3 WRONG: data race between blocks
@cuda.jit
def tasks_kernel(x_Sn, tasks_RF, count_S):
    n, t = x_Sn.shape[1], cuda.threadIdx.x
    for row in range(cuda.blockIdx.x, tasks_RF.shape[0], cuda.gridDim.x):
        s, share, shares = tasks_RF[row, STAGE], tasks_RF[row, SHARE], tasks_RF[row, SHARES]
        if t == 0:
            while load_acquire(count_S, tasks_RF[row, WAIT]) < tasks_RF[row, ARRIVALS]:
                pass
        cuda.syncthreads()
        for i in range(32 * share + t, n, 32 * shares):
            x_Sn[s + 1, i] = x_Sn[s, (i - 1) % n] + x_Sn[s, i] + x_Sn[s, (i + 1) % n]
        cuda.syncthreads()
        if t == 0:
            atomic_add_release(count_S, tasks_RF[row, SIGNAL], int64(1))
            if row == tasks_RF.shape[0] - 1:
                for c in range(count_S.size):
                    count_S[c] = 0


# %% 33.3 WRONG: A block arrives before it has computed
@cuda.jit
def tasks_kernel(x_Sn, tasks_RF, count_S):
    n, t = x_Sn.shape[1], cuda.threadIdx.x
    e = load_acquire(count_S, 0) // cuda.gridDim.x
    for row in range(cuda.blockIdx.x, tasks_RF.shape[0], cuda.gridDim.x):
        s, share, shares = tasks_RF[row, STAGE], tasks_RF[row, SHARE], tasks_RF[row, SHARES]
        if t == 0:
            while load_acquire(count_S, tasks_RF[row, WAIT]) < tasks_RF[row, ARRIVALS] * (e + 1):
                pass
            atomic_add_release(count_S, tasks_RF[row, SIGNAL], int64(1))
        cuda.syncthreads()
        for i in range(32 * share + t, n, 32 * shares):
            x_Sn[s + 1, i] = x_Sn[s, (i - 1) % n] + x_Sn[s, i] + x_Sn[s, (i + 1) % n]
        cuda.syncthreads()
    if t == 0:
        atomic_add_release(count_S, 0, int64(1))


# %% 33.4 RIGHT: a queue of arrivals, searched backwards
def task_times(tasks, blocks, durations, hand_over):
    times = []
    for r, task in enumerate(tasks):
        own = [end for q, (_, end) in enumerate(times) if q % blocks == r % blocks]
        waits = [
            end + hand_over for q, (_, end) in enumerate(times) if tasks[q][SIGNAL] == task[WAIT]
        ]
        begin = max([0, *own[-1:], *(waits if task[ARRIVALS] else [])])
        times.append((begin, begin + durations[r]))
    return times


# %% 33.4 WRONG: A task begins too early
def task_times(tasks, blocks, durations, hand_over):
    times = []
    for r, task in enumerate(tasks):
        begin = times[r - blocks][1] if r >= blocks else 0
        for q in range(r):
            if task[ARRIVALS] and tasks[q][SIGNAL] == task[WAIT]:
                own = q % blocks == r % blocks
                begin = max(begin, times[q][1] + (0 if own else hand_over))
        times.append((begin, begin + durations[r]))
    return times


# %% 33.4 WRONG: It waits for the tasks that signal
def task_times(tasks, blocks, durations, hand_over):
    free, ends, times = [0] * blocks, {-1: 0}, []
    for r, task in enumerate(tasks):
        begin = free[r % blocks]
        if task[ARRIVALS]:
            begin = max(begin, ends[task[STAGE] - 1] + hand_over)
        free[r % blocks] = begin + durations[r]
        ends[task[STAGE]] = max(ends.get(task[STAGE], 0), begin + durations[r])
        times.append((begin, begin + durations[r]))
    return times
