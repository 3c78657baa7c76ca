"""Attempts at the exercises of lesson 10: see test_attempts.py."""


# %% 10.1 RIGHT: by the clock, with an empty queue before and after
def time_us(machine, run, repeats):
    run()
    times = []
    for _ in range(repeats):
        machine.synchronize()
        begin = machine.record()
        run()
        end = machine.record()
        machine.synchronize()
        times.append(machine.elapsed_us(begin, end))
    return sorted(times)[len(times) // 2]


# %% 10.2 RIGHT: counts the kernels that run after every start and end
def busy_share(spans):
    moments = sorted([(a, 1) for a, _ in spans] + [(b, -1) for _, b in spans])
    busy, running = 0, 0
    for (now, change), (then, _) in zip(moments, moments[1:]):
        running += change
        busy += (then - now) * (running > 0)
    return busy / (moments[-1][0] - moments[0][0])


# %% 10.2 WRONG: counted twice
def busy_share(spans):
    first = min(a for a, _ in spans)
    last = max(b for _, b in spans)
    return sum(b - a for a, b in spans) / (last - first)


# %% 10.3 WRONG: Divide the work
@cuda.jit
def sgd_kernel(w_n, g_n, lr_1):
    if cuda.threadIdx.x == 0:
        first = cuda.blockIdx.x * cuda.blockDim.x
        for i in range(first, min(first + cuda.blockDim.x, w_n.size)):
            w_n[i] -= lr_1[0] * g_n[i]


# %% 10.3 RIGHT: a fused multiply and add
@cuda.jit
def sgd_kernel(w_n, g_n, lr_1):
    i = cuda.grid(1)
    if i < w_n.size:
        w_n[i] = cuda.fma(-lr_1[0], g_n[i], w_n[i])


# %% 10.3 WRONG: read it from there in every run
# as the attempt above, but:
# -         w_n[i] = cuda.fma(-lr_1[0], g_n[i], w_n[i])
# +         w_n[i] -= 0.5 * g_n[i]
