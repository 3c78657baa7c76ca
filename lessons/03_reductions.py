# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 3 Reductions
#
# *About 75 minutes. You need [lesson 2](02_memory.ipynb).*
#
# **The question.** Every layer of a language model starts by dividing each row of its input by that
# row's root mean square. This needs a sum over the whole row. But the row is spread over hundreds
# of threads, and each thread sees only its own part. How do threads compute a sum together,
# quickly, and with the same bits every time?
#
# You will write a sum over a warp and a sum over a block, and use them for RMSNorm, the first real
# op of this course.

# %% tags=["install"]
# On Google Colab (a free T4 is enough) this fetches xtrain. Anywhere else it does nothing.
import os
import subprocess
import sys

if "google.colab" in sys.modules and not os.path.exists("setup.cfg"):
    clone = "git clone -q --depth 1 https://github.com/OWNER/xtrain xtrain"
    subprocess.run(f"{clone} && pip install -q -e './xtrain[gpu12]'", shell=True, check=True)
    os.chdir("xtrain")
    sys.path.insert(0, os.getcwd())

# %% tags=["imports"]
import math

import numpy as np
from numba import cuda, float32

from xtrain import lesson, simulator
from xtrain.kernels.primitives.reduce import block_sum, warp_sum
from xtrain.kernels.rmsnorm import rmsnorm_ref

FULL = 0xFFFFFFFF  # a mask of 32 ones: all lanes of a warp participate

# %% [markdown]
# ## RMSNorm by hand
#
# For a row x of C numbers and one weight w per column:
#
# $$r = \frac{1}{\sqrt{\frac{1}{C} \sum_{c} x_c^2 + \epsilon}} \qquad\qquad y_c = x_c \cdot r \cdot w_c$$
#
# r is the reciprocal of the row's *root mean square*; epsilon prevents a division by zero for a row
# of zeros. With B, T, C = 2, 3, 4 there are 6 rows of 4. The first two:

# %%
x = np.arange(1, 25, dtype=np.float32).reshape(2 * 3, 4)  # (B T, C): each row is independent
w = np.array([1, 1, 2, 2], np.float32)
for row in x[:2]:
    mean = float((row**2).mean())
    r = 1 / math.sqrt(mean)
    print(f"x {row}   squares {row**2}   mean {mean}   r {r:.4f}")
    print(f"y {(row * r * w).round(4)}")

# %% [markdown]
# The reference is two lines of NumPy. xtrain also runs it when there is no GPU:

# %%
lesson.source(rmsnorm_ref)
y, rstd = rmsnorm_ref(x, w, 1e-6)
print(y[:2].round(4))

# %% [markdown]
# ## A sum over 32 threads
#
# A sum by one thread takes n steps. With many threads, add in pairs: half of the threads add the
# other half's numbers to their own, then a quarter of the threads do the same, and so on. 32
# numbers need 5 steps.
#
# Within a warp, this needs no shared memory. A thread's index within its warp, 0 to 31, is its
# *lane*, and a **shuffle** passes register values between lanes: `cuda.shfl_xor_sync(FULL, v, 16)`
# gives each lane the `v` of the lane whose index differs in the bit of value 16. Lane 0 and lane 16
# exchange values, lane 1 and lane 17, and so on. If all lanes add the value they receive, then
# after the steps 16, 8, 4, 2, 1 **every** lane has the total. With 8 lanes and the steps 4, 2, 1:

# %%
lesson.figures.butterfly([3, 1, 4, 1, 5, 9, 2, 6], (4, 2, 1), "every lane ends with the sum, 31")

# %% [markdown]
# ## Exercise 3.1: the sum of a warp
#
# Each block has 32 threads, which is one warp. Block W sums the elements 32 W to 32 W + 31; the
# last block may have fewer. A shuffle is a collective: **all** lanes of the mask must call it,
# including those without an element. Which value must those lanes contribute to leave the sum
# correct?


# %% tags=["exercise"]
@cuda.jit
def warp_sums_kernel(sums_W, x_n):
    """sums[W] = the sum of x[32 W : 32 W + 32].   Grid ceil(n / 32), block 32."""
    lane = cuda.threadIdx.x
    i = cuda.blockIdx.x * 32 + lane
    # YOUR CODE


# %%
lesson.check("3.1", warp_sums_kernel)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `v = x_n[i] if i < x_n.size else float32(0.0)`
#
# </details>
# <details><summary>Hint 2</summary>
#
# `for step in (16, 8, 4, 2, 1):` works in a kernel. In the loop:
# `v += cuda.shfl_xor_sync(FULL, v, step)`.
#
# </details>


# %% tags=["solution"]
# Solution 3.1
@cuda.jit
def warp_sums_kernel_solution(sums_W, x_n):
    """sums[W] = the sum of x[32 W : 32 W + 32].   Grid ceil(n / 32), block 32."""
    lane = cuda.threadIdx.x
    i = cuda.blockIdx.x * 32 + lane
    v = x_n[i] if i < x_n.size else float32(0.0)
    for step in (16, 8, 4, 2, 1):
        v += cuda.shfl_xor_sync(FULL, v, step)
    if lane == 0:
        sums_W[cuda.blockIdx.x] = v


warp_sums_kernel = lesson.yours(warp_sums_kernel, warp_sums_kernel_solution)


# %% [markdown]
# ## The same numbers, a different sum
#
# Why not let every thread add its number to one memory location with an *atomic* addition (one that
# no other thread can interrupt)? Because every floating-point addition rounds, the order of the
# additions matters: (a + b) + c is not always a + (b + c).

# %%
numbers = np.array([1e8, 1.0, -1e8, 1.0], np.float32)
total = np.float32(0)
for v in numbers:
    total += v
print("left to right:", total)
print("in pairs:     ", (numbers[0] + numbers[2]) + (numbers[1] + numbers[3]))

values = (np.random.default_rng(0).standard_normal(10_000) + 1).astype(np.float32)
sums = {
    float(np.add.accumulate(np.random.default_rng(i).permutation(values))[-1]) for i in range(20)
}
print(
    f"20 orders of the same 10 000 numbers: {len(sums)} different sums, up to "
    f"{max(sums) - min(sums):.3f} apart"
)

# %% [markdown]
# Atomics add in whatever order the threads arrive. Two training runs would then differ in the last
# bits of every gradient, and after a thousand steps in everything. xtrain promises **same seed,
# same bits**, so sums are always computed in a fixed order. The butterfly is such an order. It is
# also *more accurate* than adding from left to right, because each number goes through 5 roundings
# instead of up to 31.
#
# ## From a warp to a block
#
# A row of 4096 columns needs more than 32 threads. The sum over a block takes four steps: each warp
# sums its own numbers with shuffles; one lane of each warp writes the result to shared memory; all
# threads wait at a barrier; then the same shuffles add the warps' sums. There are at most 32 of
# them, because a block has at most 1024 threads.
#
# From here on, you may use the library's `warp_sum`. It is what you have just written:

# %%
lesson.source(warp_sum)

# %% [markdown]
# ## Exercise 3.2: the sum of a block
#
# Use one block with any whole number of warps, for any n. Each thread first adds the elements tid,
# tid + blockDim.x, ... (the grid-stride loop of lesson 2, with a grid of one block).


# %% tags=["exercise"]
@cuda.jit
def block_sum_kernel(total_1, x_n):
    """total[0] = the sum of x.   Grid 1, block any multiple of 32."""
    partial = cuda.shared.array(32, float32)
    tid = cuda.threadIdx.x
    lane, warp = tid % 32, tid // 32
    # YOUR CODE


# %%
lesson.check("3.2", block_sum_kernel)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `if lane == 0: partial[warp] = v`, then a barrier, then each lane reads `partial[lane]`. Every
# warp does this, so every warp gets the total.
#
# </details>
# <details><summary>Hint 2</summary>
#
# The block has `cuda.blockDim.x // 32` warps. Lanes from that index on contribute 0.0.
#
# </details>


# %% tags=["solution"]
# Solution 3.2
@cuda.jit
def block_sum_kernel_solution(total_1, x_n):
    """total[0] = the sum of x.   Grid 1, block any multiple of 32."""
    partial = cuda.shared.array(32, float32)
    tid = cuda.threadIdx.x
    lane, warp = tid % 32, tid // 32
    acc = float32(0.0)
    for i in range(tid, x_n.size, cuda.blockDim.x):
        acc += x_n[i]
    v = warp_sum(acc)
    if lane == 0:
        partial[warp] = v
    cuda.syncthreads()
    v = partial[lane] if lane < cuda.blockDim.x // 32 else float32(0.0)
    v = warp_sum(v)
    if tid == 0:
        total_1[0] = v


block_sum_kernel = lesson.yours(block_sum_kernel, block_sum_kernel_solution)


# %% [markdown]
# The library has this as a device function (a function that kernels call and that can return a
# value), `block_sum(v, partial)`. Every thread gets the sum:

# %%
lesson.source(block_sum)

# %% [markdown]
# It has one more barrier than yours, at the beginning. Why? Because a kernel may call it twice:
# without that barrier, a fast warp could write its second sum to `partial` while a slow warp still
# reads the first. Remove it, and the simulator reports a race:


# %%
@cuda.jit(device=True)
def block_sum_one_barrier(v, partial):
    tid = cuda.threadIdx.x
    lane, warp = tid % 32, tid // 32
    v = warp_sum(v)
    if lane == 0:
        partial[warp] = v
    cuda.syncthreads()
    v = partial[lane] if lane < cuda.blockDim.x // 32 else float32(0.0)
    return warp_sum(v)


@cuda.jit
def twice_kernel(out_2, x_n):
    partial = cuda.shared.array(32, float32)
    v = x_n[cuda.threadIdx.x]
    first = block_sum_one_barrier(v, partial)
    second = block_sum_one_barrier(v * v, partial)
    if cuda.threadIdx.x == 0:
        out_2[0] = first
        out_2[1] = second


x_64 = simulator.sim(np.ones(64, np.float32))
lesson.report(simulator.run, twice_kernel, 1, 64, simulator.sim(np.zeros(2, np.float32)), x_64)

# %% [markdown]
# ## Exercise 3.3: RMSNorm
#
# Block n owns row n; thread tid owns the columns tid, tid + blockDim.x, ... The kernel passes over
# the row twice: first to sum the squares, then to multiply. `rstd_N[n]` is r, which is saved for
# the backward pass (lesson 5). You may call `block_sum`. Watch the types: a Python literal is a
# float64, and so is the quotient of two integers; `float32(1.0)` and `float32(C)` are float32.


# %% tags=["exercise"]
@cuda.jit
def rmsnorm_kernel(y_NC, rstd_N, x_NC, w_C, eps):
    """y = x r w with r = 1 / sqrt(mean(x^2) + eps), rstd = r.

    x, y: (N, C)   w: (C,)   rstd: (N,)   eps: float32
    Grid N, block a multiple of 32.
    """
    partial = cuda.shared.array(32, float32)
    n, tid = cuda.blockIdx.x, cuda.threadIdx.x
    C = x_NC.shape[1]
    # YOUR CODE


# %%
lesson.check("3.3", rmsnorm_kernel)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `acc = float32(0.0)`, then
# `for c in range(tid, C, cuda.blockDim.x): acc += x_NC[n, c] * x_NC[n, c]`.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `rstd = float32(1.0) / math.sqrt(block_sum(acc, partial) / float32(C) + eps)`. Every thread has
# this value. One of them writes `rstd_N[n]`.
#
# </details>


# %% tags=["solution"]
# Solution 3.3
@cuda.jit
def rmsnorm_kernel_solution(y_NC, rstd_N, x_NC, w_C, eps):
    """y = x r w with r = 1 / sqrt(mean(x^2) + eps), rstd = r.

    x, y: (N, C)   w: (C,)   rstd: (N,)   eps: float32
    Grid N, block a multiple of 32.
    """
    partial = cuda.shared.array(32, float32)
    n, tid = cuda.blockIdx.x, cuda.threadIdx.x
    C = x_NC.shape[1]
    acc = float32(0.0)
    for c in range(tid, C, cuda.blockDim.x):
        acc += x_NC[n, c] * x_NC[n, c]
    rstd = float32(1.0) / math.sqrt(block_sum(acc, partial) / float32(C) + eps)
    if tid == 0:
        rstd_N[n] = rstd
    for c in range(tid, C, cuda.blockDim.x):
        y_NC[n, c] = x_NC[n, c] * rstd * w_C[c]


rmsnorm_kernel = lesson.yours(rmsnorm_kernel, rmsnorm_kernel_solution)


# %% [markdown]
# How accurate is it? Compare its error with the error of the float32 reference, both measured
# against the reference in float64. All of xtrain's kernel tests use this criterion: **a kernel's
# error may be at most twice NumPy's error in the same type.**

# %%
N, C = 3, 300
rng = np.random.default_rng(1)
x32 = (rng.standard_normal((N, C)) + 0.3).astype(np.float32)
w32 = rng.standard_normal(C).astype(np.float32)
x_here, w_here = lesson.array(x32), lesson.array(w32)
y_here, rstd_here = lesson.empty(x_here, (N, C)), lesson.empty(x_here, N)
lesson.launch(rmsnorm_kernel, N, 64, y_here, rstd_here, x_here, w_here, np.float32(1e-6))
exact = rmsnorm_ref(x32.astype(np.float64), w32.astype(np.float64), 1e-6)[0]
kernel_error = np.abs(lesson.host(y_here) - exact).max()
numpy_error = np.abs(rmsnorm_ref(x32, w32, 1e-6)[0] - exact).max()
print("the kernel's error is below 1e-6:", bool(kernel_error < 1e-6))
print(
    "and at most twice NumPy's error:",
    bool(kernel_error <= 2 * numpy_error + 2e-7 * np.abs(exact).max()),
)

# %% [markdown]
# ## Measure
#
# By the reasoning of lesson 2, RMSNorm should take as long as a copy: read x once, write y once.
# The trace compares your kernel with the one that the library uses:

# %%
from xtrain.kernels import rmsnorm

C = 512
x_s = simulator.sim(rng.standard_normal((4, C)).astype(np.float32))
w_s = simulator.sim(np.ones(C, np.float32))
y_s, r_s = simulator.sim(np.zeros((4, C), np.float32)), simulator.sim(np.zeros(4, np.float32))
yours = lesson.traced(rmsnorm_kernel, 4, 128, y_s, r_s, x_s, w_s, np.float32(1e-6))
with lesson.tracing() as library:
    rmsnorm.rmsnorm_fwd(x_s, w_s, 1e-6)
print("            x: requests   bytes of x   barriers per row")
print(
    f"yours       {yours.traffic('x_NC').requests:11}   {yours.traffic('x_NC').moved:10,}   {2:16}"
)
print(f"in use      {library.traffic('x').requests:11}   {library.traffic('x').moved:10,}   {0:16}")

# %%
n_rows = 32768 if lesson.on_gpu() else 4
x_b = lesson.array(rng.standard_normal((n_rows, 768)).astype(np.float32))
w_b = lesson.array(np.ones(768, np.float32))
y_b, r_b = lesson.empty(x_b, (n_rows, 768)), lesson.empty(x_b, n_rows)
runs = {
    "yours": lambda: lesson.launch(
        rmsnorm_kernel, n_rows, 256, y_b, r_b, x_b, w_b, np.float32(1e-6)
    ),
    "in use": lambda: rmsnorm.rmsnorm_fwd(x_b, w_b, 1e-6),
}
times = lesson.measure(runs, nbytes=2 * 4 * n_rows * 768)

# %%
lesson.table(
    ["bench_kernels/rmsnorm_fwd/fp32"],
    {
        "two passes, ms": "naive_ms",
        "in use, ms": "ms",
        "copy, ms": "copy_ms",
        "copy / in use": "share",
    },
)

# %% [markdown]
# **The improvement of this lesson: keep the row in registers.** A thread has up to 255 registers,
# and a row of 768 numbers is 24 for each lane of a warp. So the kernel in use reads the row once,
# with 16-byte accesses, keeps it in registers between the sum and the product, and assigns each row
# to *one warp*, as long as the row fits. Then `warp_sum` is enough, and no barrier is needed.
#
# Is the second read the only cost? Reading x twice would explain a factor of 3 / 2, but the table
# shows almost 3, and most of the second reads even come from a cache. The rest has two causes: the
# requests are small, as in lesson 2, and a block that waits at a barrier has no requests in flight.
#
# ## The library's kernel

# %%
lesson.source(rmsnorm.make_fwd_kernel)

# %% [markdown]
# This function makes a kernel. Inside it `C` is a constant, so the loops are unrolled and `x_SE` is
# held in registers. `load`, `store` and `total` come from `kernels/primitives/rows.py`, which decides how many
# threads share a row. Apart from that, it is your kernel line by line.
#
# ## What did not help
#
# *A tree in shared memory*, as in older books: all threads write their number, then half of them
# add, a barrier, a quarter add, a barrier, and so on. The result is the same. The cost for a block
# of 128:


# %%
@cuda.jit
def tree_sum_kernel(total_1, x_n):
    """Grid 1, block 128."""
    tile = cuda.shared.array(128, float32)
    tid = cuda.threadIdx.x
    acc = float32(0.0)
    for i in range(tid, x_n.size, 128):
        acc += x_n[i]
    tile[tid] = acc
    half = 64
    while half > 0:
        cuda.syncthreads()
        if tid < half:
            tile[tid] += tile[tid + half]
        half //= 2
    if tid == 0:
        total_1[0] = tile[0]


x_1k, total = simulator.sim(np.ones(1000, np.float32)), simulator.sim(np.zeros(1, np.float32))
for name, kernel, barriers in (("tree", tree_sum_kernel, 7), ("shuffles", block_sum_kernel, 1)):
    trace = lesson.traced(kernel, 1, 128, total, x_1k)
    print(
        f"{name:9} sum {total[0]:g}, {len(trace.requests(kind='shared')):2} shared-memory "
        f"instructions, barriers: {barriers}"
    )

# %% [markdown]
# The tree, step by step: after each barrier half of the threads that were busy have nothing to do, and
# after two barriers whole warps only wait. Below it the library's RMSNorm, whose lanes exchange their
# sums in registers: a launcher is recorded by observing what it launches.

# %%
lesson.stepped(tree_sum_kernel, 1, 128, total, x_1k)

# %%
stepper = simulator.Stepper()
with simulator.observe(stepper):
    rmsnorm.rmsnorm_fwd(x_s, w_s, 1e-6)
stepper

# %% [markdown]
# ## More exercises
#
# 1. Write `block_max` in the same way. Which value do lanes without an element contribute?
# 2. Compute the mean *and* the variance of a row in one pass: two sums at once. What is the
#    smallest number of barriers?
# 3. Use `cuda.shfl_down_sync` in `warp_sums_kernel`. Which lanes have the correct sum at the end?
#
# <details><summary>Solutions</summary>
#
# 1: Minus infinity, `float32(-math.inf)`; compare `block_max` in `xtrain/kernels/primitives/reduce.py`.
#
# 2: As many as for one sum: write both sums of a warp next to each other into a shared array of
# shape (32, 2).
#
# 3: Only lane 0. At the upper end, the other lanes add values that have already been added, or
# their own again.
#
# </details>
#
# ## Sources
#
# - B. Zhang, R. Sennrich, *Root Mean Square Layer Normalization*, 2019.
# - M. Harris, *Optimizing Parallel Reduction in CUDA*, NVIDIA: the tree reduction, step by step.
# - J. Luitjens, *Faster Parallel Reductions on Kepler*, NVIDIA Developer Blog, 2014: shuffles.
# - N. Higham, *Accuracy and Stability of Numerical Algorithms*, chapter 4: the errors of different
#   summation orders.
