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
# # 5 Backward by hand, and how to check it
#
# *About 60 minutes. You need [lesson 3](03_reductions.ipynb) and the chain rule.*
#
# **The question.** Training asks: how much does the loss change if this weight changes a little?
# Even xtrain's smallest GPU model has 67 million weights, so each step needs 67 million such
# numbers. We derive formulas for them by hand, and derivations by hand contain mistakes. How do you
# find a single wrong number among 67 million?
#
# You will derive two backward passes, write a check that finds every mistake in them, and write one
# of them as a kernel.

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
from xtrain.kernels.primitives.reduce import block_sum
from xtrain.kernels.rmsnorm import rmsnorm_bwd_ref, rmsnorm_ref

# %% [markdown]
# ## What a backward pass computes
#
# The loss L is one number. Write dx for the gradient of L with respect to x: an array **with the
# shape of x** that says how L changes with each element. An op `y = f(x)` never sees the loss. Its
# backward pass receives dy and must return dx. By the chain rule
#
# $$dx_i = \sum_j dy_j \, \frac{\partial y_j}{\partial x_i}$$
#
# and that is all a backward pass computes. The full table of derivatives (the Jacobian) is never
# built: for a matrix product of 4096 x 4096 it would have more than $10^{14}$ entries. Instead,
# derive a short formula.
#
# ## A linear layer, by hand
#
# $y_{no} = \sum_i x_{ni} w_{oi}$. Where does $x_{ni}$ appear? In row n of y, in every column o,
# with the factor $w_{oi}$. So
#
# $$dx_{ni} = \sum_o dy_{no} \, w_{oi} \qquad\qquad dw_{oi} = \sum_n dy_{no} \, x_{ni}$$
#
# These are again two matrix products. With numbers, for N, I, O = 2, 3, 4:

# %%
x = np.array([[1.0, 2, 3], [4, 5, 6]])
w = np.array([[1.0, 0, 0], [0, 1, 0], [1, 1, 1], [0.5, -1, 0.5]])
dy = np.array([[1.0, 0, 2, 0], [0, 0, 1, 4]])
print(
    "dx[0, 1] = sum over o of dy[0, o] w[o, 1] =",
    " + ".join(f"{dy[0, o]:g}*{w[o, 1]:g}" for o in range(4)),
    "=",
    dy[0] @ w[:, 1],
)
print(
    "dw[3, 2] = sum over n of dy[n, 3] x[n, 2] =",
    " + ".join(f"{dy[n, 3]:g}*{x[n, 2]:g}" for n in range(2)),
    "=",
    dy[:, 3] @ x[:, 2],
)

# %% [markdown]
# ## Exercise 5.1: a linear layer
#
# Write it in one line of NumPy. The shapes almost determine it.


# %% tags=["exercise"]
def linear_bwd(dy_NO, x_NI, w_OI):
    """-> dx (N, I), dw (O, I), for y = x w^T.   dy: (N, O)   x: (N, I)   w: (O, I)"""
    # YOUR CODE


# %%
lesson.check("5.1", linear_bwd)

# %% [markdown]
# <details><summary>Hint</summary>
#
# dx (N, I) from dy (N, O) and w (O, I): the axis that disappears is O. dw (O, I) from dy (N, O) and
# x (N, I): the axis that disappears is N, the first axis of both, so one of them must be
# transposed.
#
# </details>


# %% tags=["solution"]
# Solution 5.1
def linear_bwd_solution(dy_NO, x_NI, w_OI):
    """-> dx (N, I), dw (O, I), for y = x w^T.   dy: (N, O)   x: (N, I)   w: (O, I)"""
    return dy_NO @ w_OI, dy_NO.T @ x_NI


linear_bwd = lesson.yours(linear_bwd, linear_bwd_solution)


# %% [markdown]
# ## RMSNorm, by hand
#
# $y_c = x_c \, r \, w_c$ with $r = (\frac{1}{C} \sum_c x_c^2 + \epsilon)^{-1/2}$. Introduce two
# short names, $\hat{x} = x r$ and $g = dy \, w$ (element by element). The gradient of w is easy:
# $y = \hat{x} w$, and every row contributes,
#
# $$dw_c = \sum_n dy_{nc} \, \hat{x}_{nc}$$
#
# The gradient of x is harder, because x appears twice: as the factor $x_c$, *and inside r*, which
# depends on every x of the row. First, how r changes with one x:
#
# $$\frac{\partial r}{\partial x_c} = -\frac{1}{2} \left( \frac{1}{C} \sum x^2 + \epsilon \right)^{-3/2} \frac{2 x_c}{C} = -\frac{r^3 x_c}{C}$$
#
# Then combine both paths. The factor $x_c$ contributes $r g_c$. The path through r contributes
# $\sum_j g_j x_j$ times the derivative of r:
#
# $$dx_c = r g_c - \frac{r^3 x_c}{C} \sum_j g_j x_j = r \left( g_c - \hat{x}_c \cdot \frac{1}{C} \sum_j g_j \hat{x}_j \right)$$
#
# The last step, which pairs each r with an x, is the important one: the backward pass needs only
# $\hat{x}$, one mean per row, and r, which the forward pass has saved. On one row of B, T, C = 2,
# 3, 4:

# %%
row, w_row, dy_row = np.array([1.0, 2, 3, 4]), np.array([1.0, 1, 2, 2]), np.array([1.0, 0, 0, -1])
r = 1 / math.sqrt((row**2).mean())
xhat, g = row * r, dy_row * w_row
mean = (g * xhat).mean()
print(f"r {r:.4f}   xhat {xhat.round(4)}   g {g}   mean of g xhat {mean:.4f}")
print("first term  r g             ", (r * g).round(4))
print("second term r xhat mean     ", (r * xhat * mean).round(4))
print("dx                          ", (r * (g - xhat * mean)).round(4))

# %% [markdown]
# Can we see that this is correct? One property helps: y does not change when the whole row is
# multiplied by a number, because RMSNorm divides it out again (except for epsilon). Moving along x
# itself therefore changes nothing, so dx must be orthogonal to x:

# %%
print("dx . x is 0:", abs((r * (g - xhat * mean)) @ row) < 1e-12)

# %% [markdown]
# ## Exercise 5.2: RMSNorm


# %% tags=["exercise"]
def rmsnorm_bwd(dy_NC, x_NC, w_C, rstd_N):
    """-> dx (N, C), dw (C,), for y = x rstd w with rstd = 1 / sqrt(mean(x^2) + eps).

    dy, x: (N, C)   w: (C,)   rstd: (N,)
    """
    # YOUR CODE


# %%
lesson.check("5.2", rmsnorm_bwd)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `xhat_NC = x_NC * rstd_N[:, None]`, `g_NC = dy_NC * w_C`, and `mean_N = (g_NC * xhat_NC).mean(1)`.
# The rest is the formula.
#
# </details>


# %% tags=["solution"]
# Solution 5.2
def rmsnorm_bwd_solution(dy_NC, x_NC, w_C, rstd_N):
    """-> dx (N, C), dw (C,), for y = x rstd w with rstd = 1 / sqrt(mean(x^2) + eps).

    dy, x: (N, C)   w: (C,)   rstd: (N,)
    """
    xhat_NC = x_NC * rstd_N[:, None]
    g_NC = dy_NC * w_C
    mean_N = (g_NC * xhat_NC).mean(1)
    dx_NC = rstd_N[:, None] * (g_NC - xhat_NC * mean_N[:, None])
    return dx_NC, (dy_NC * xhat_NC).sum(0)


rmsnorm_bwd = lesson.yours(rmsnorm_bwd, rmsnorm_bwd_solution)


# %% [markdown]
# ## Check against finite differences
#
# A derivative is a limit of differences, so differences can check it: change x a little and see how
# the loss changes. Three choices decide whether this works.
#
# **Two-sided differences.** $(f(x + e) - f(x)) / e$ has an error of about $e$;
# $(f(x + e) - f(x - e)) / 2e$ has an error of only about $e^2$.
#
# **A step that is not too small.** Subtracting two nearly equal numbers loses digits: the rounding
# error grows as 1 / e, while the error of the formula shrinks.
#
# **float64.** In float32 there is no good step. The next cell shows all three for $f = \sin$ at 1:

# %%
steps = [10.0**-k for k in range(1, 13)]


def error_of(step, both, kind):
    at = kind(1.0)
    step = kind(step)
    f = lambda v: kind(math.sin(v))  # rounded once, to float32 or float64
    slope = (f(at + step) - f(at - step)) / (2 * step) if both else (f(at + step) - f(at)) / step
    return max(abs(float(slope) - math.cos(1.0)), 1e-17)


print("step   one-sided, float64  two-sided, float64  two-sided, float32")
for step in steps[:9]:
    errors = [
        error_of(step, both, kind)
        for both, kind in ((False, np.float64), (True, np.float64), (True, np.float32))
    ]
    print(
        f"1e-{round(-math.log10(step)):02}"
        + "".join(f"{10 ** round(math.log10(v)):20.0e}" for v in errors)
    )

# %%
lesson.figures.curves(
    steps,
    {
        "one-sided, float64": [error_of(s, False, np.float64) for s in steps],
        "two-sided, float64": [error_of(s, True, np.float64) for s in steps],
        "two-sided, float32": [error_of(s, True, np.float32) for s in steps],
    },
    "step",
    "error of the derivative",
    "two opposing errors: the formula's (right) and rounding's (left)",
)

# %% [markdown]
# In float64, two-sided differences with a step of $10^{-5}$ give ten correct digits. In float32
# they give five at best, for a single sine; a real op adds thousands of roundings of its own to f,
# and a real mistake may be hidden by them. This gives the rule: **finite differences check the
# reference, in float64; the reference checks the kernel, in float32.** Finite differences are never
# applied to a kernel.
#
# ## One number for all derivatives
#
# Checking 67 million derivatives one by one would take 134 million forward passes. Instead, move
# all inputs at once along a random direction v:
#
# $$\frac{f(x + e v) - f(x - e v)}{2 e} \approx \sum_i \frac{\partial f}{\partial x_i} v_i = \langle dx, v \rangle$$
#
# This takes **two** forward passes, whatever the size. If any element of dx is wrong, the
# right-hand side is wrong, unless the error happens to be orthogonal to v, which practically never
# happens for a random v.
#
# ## Exercise 5.3: the check
#
# Return the *relative* error, so that one tolerance works for functions of any scale: the
# difference of the two slopes divided by the larger of the two.


# %% tags=["exercise"]
def gradient_error(f, x, gradient, v, step):
    """Relative error of `gradient` along v, as one number.

    f: array -> float   x, gradient, v: float64 arrays of one shape   step: float
    """
    # YOUR CODE


# %%
lesson.check("5.3", gradient_error)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `numeric = (f(x + step * v) - f(x - step * v)) / (2 * step)`, `analytic = (gradient * v).sum()`;
# then divide `abs(numeric - analytic)` by `max(abs(numeric), abs(analytic))`.
#
# </details>


# %% tags=["solution"]
# Solution 5.3
def gradient_error_solution(f, x, gradient, v, step):
    """Relative error of `gradient` along v, as one number.

    f: array -> float   x, gradient, v: float64 arrays of one shape   step: float
    """
    numeric = (f(x + step * v) - f(x - step * v)) / (2 * step)
    analytic = (gradient * v).sum()
    return abs(numeric - analytic) / max(abs(numeric), abs(analytic))


gradient_error = lesson.yours(gradient_error, gradient_error_solution)


# %% [markdown]
# The output of an op is an array, not a number. So turn it into a number: the sum of all outputs,
# each multiplied by the corresponding element of a random dy. The gradient of this number is
# exactly what the backward pass returns for that dy. The next cell checks your RMSNorm backward,
# and the same formula with typical mistakes:

# %%
rng = np.random.default_rng(0)
N, C = 3, 5
x, w, dy, v = (rng.standard_normal(s) + 0.3 for s in ((N, C), C, (N, C), (N, C)))
rstd = rmsnorm_ref(x, w, 1e-2)[1]
f = lambda x: float((rmsnorm_ref(x, w, 1e-2)[0] * dy).sum())
g, xhat = dy * w, x * rstd[:, None]
right = rmsnorm_bwd(dy, x, w, rstd)[0]
one_wrong = right.copy()
one_wrong[1, 2] *= 1.001
candidates = {
    "yours": right,
    "r treated as a constant": rstd[:, None] * g,
    "sum instead of mean": rstd[:, None] * (g - xhat * (g * xhat).sum(1, keepdims=True)),
    "mean over the wrong axis": rstd[:, None] * (g - xhat * (g * xhat).mean(0)),
    "one element wrong by 0.1 %": one_wrong,
}
for name, dx in candidates.items():
    error = gradient_error(f, x, dx, v, 1e-5)
    print(
        f"{name:32} {'correct' if error < 1e-6 else 'WRONG':7}   error "
        f"{'below 1e-6' if error < 1e-6 else f'{error:.1e}'}"
    )

# %% [markdown]
# ## Let a program choose the shapes
#
# "Mean over the wrong axis" is found only for some shapes: not, for example, with N = C = 1. If you
# try to list all such cases yourself, you will miss one. `hypothesis` draws shapes, finds one that
# fails, and *shrinks* it to the smallest. Here it is applied to the wrong axis. (The package comes
# with `pip install -e '.[docs]'` and `'.[test]'`; if it is missing, the cell installs it.)

# %%
import importlib.util

if importlib.util.find_spec("hypothesis") is None:
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "hypothesis"], check=True)

from hypothesis import given, settings, strategies

sizes = strategies.sampled_from([1, 2, 3, 5, 17])


def find(backward):
    """-> the smallest shape for which this backward of RMSNorm is wrong, or None."""

    @settings(
        max_examples=60, derandomize=True, database=None, deadline=None, report_multiple_bugs=False
    )
    @given(sizes, sizes)
    def explore(N, C):
        x, w, dy, v = (
            np.random.default_rng([N, C, i]).standard_normal(s) + 0.3
            for i, s in enumerate(((N, C), C, (N, C), (N, C)))
        )
        rstd = rmsnorm_ref(x, w, 1e-2)[1]
        f = lambda x: float((rmsnorm_ref(x, w, 1e-2)[0] * dy).sum())
        if gradient_error(f, x, backward(dy, x, w, rstd), v, 1e-5) > 1e-6:
            failures.append((N, C))
            raise AssertionError

    failures = []
    try:
        explore()
    except AssertionError:
        return failures[-1]


def wrong_axis(dy, x, w, rstd):
    xhat, g = x * rstd[:, None], dy * w
    return rstd[:, None] * (g - xhat * (g * xhat).mean(0))


print("the solution:  ", find(lambda *a: rmsnorm_bwd(*a)[0]))
print("the wrong axis:", find(wrong_axis))

# %% [markdown]
# `None` means that no failure was found. For the wrong axis, the smallest failing shape (N, C)
# shows where to look: with one row and one column both means are the same, and one more of either
# is enough to tell them apart.
#
# xtrain does this for every op and for whole models: `python -m xtrain.gradcheck`.
#
# ## Exercise 5.4: the kernel
#
# Write dx of RMSNorm, with block n for row n. It is similar to the forward kernel of lesson 3: one
# sum over the row, then one line per element. (dw is a sum over *rows*, which belong to different
# blocks. More about this below.)


# %% tags=["exercise"]
@cuda.jit
def rmsnorm_bwd_dx_kernel(dx_NC, dy_NC, x_NC, w_C, rstd_N):
    """dx = r (g - xhat mean(g xhat)) with g = dy w, xhat = x r, r = rstd.   dx, dy, x: (N, C)

    w: (C,)   rstd: (N,)   Grid N, block a multiple of 32.
    """
    partial = cuda.shared.array(32, float32)
    n, tid = cuda.blockIdx.x, cuda.threadIdx.x
    C = x_NC.shape[1]
    # YOUR CODE


# %%
lesson.check("5.4", rmsnorm_bwd_dx_kernel)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `acc += dy_NC[n, c] * w_C[c] * x_NC[n, c] * rstd` in a loop over the thread's columns;
# `mean = block_sum(acc, partial) / float32(C)`; a second loop writes dx.
#
# </details>


# %% tags=["solution"]
# Solution 5.4
@cuda.jit
def rmsnorm_bwd_dx_kernel_solution(dx_NC, dy_NC, x_NC, w_C, rstd_N):
    """dx = r (g - xhat mean(g xhat)) with g = dy w, xhat = x r, r = rstd.   dx, dy, x: (N, C)

    w: (C,)   rstd: (N,)   Grid N, block a multiple of 32.
    """
    partial = cuda.shared.array(32, float32)
    n, tid = cuda.blockIdx.x, cuda.threadIdx.x
    C = x_NC.shape[1]
    rstd = rstd_N[n]
    acc = float32(0.0)
    for c in range(tid, C, cuda.blockDim.x):
        acc += dy_NC[n, c] * w_C[c] * x_NC[n, c] * rstd
    mean = block_sum(acc, partial) / float32(C)
    for c in range(tid, C, cuda.blockDim.x):
        dx_NC[n, c] = rstd * (dy_NC[n, c] * w_C[c] - x_NC[n, c] * rstd * mean)


rmsnorm_bwd_dx_kernel = lesson.yours(rmsnorm_bwd_dx_kernel, rmsnorm_bwd_dx_kernel_solution)


# %% [markdown]
# ## Measure, and one improvement
#
# dw needs the same dy and x. A second kernel for it, with one thread per column, would read both
# again. Compare the bytes that two kernels move with the bytes that the library's single kernel
# moves:


# %% tags=["bench"]
@cuda.jit
def rmsnorm_bwd_dw_kernel(dw_C, dy_NC, x_NC, rstd_N):
    """dw += sum over rows of dy xhat.   Grid ceil(C / block). Thread c owns column c."""
    c = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if c < dw_C.size:
        acc = float32(0.0)
        for n in range(rstd_N.size):
            acc += dy_NC[n, c] * x_NC[n, c] * rstd_N[n]
        dw_C[c] += acc


# %%
from xtrain.kernels import rmsnorm

N, C = 16, 256
x_s, dy_s = (
    simulator.sim((rng.standard_normal((N, C)) + 0.3).astype(np.float32)) for _ in range(2)
)
w_s = simulator.sim(rng.standard_normal(C).astype(np.float32))
rstd_s = simulator.sim(rmsnorm_ref(np.asarray(x_s), np.asarray(w_s), 1e-6)[1])
dx_s, dw_s = simulator.sim(np.zeros((N, C), np.float32)), simulator.sim(np.zeros(C, np.float32))
with lesson.tracing() as two:
    simulator.run(rmsnorm_bwd_dx_kernel, N, 128, dx_s, dy_s, x_s, w_s, rstd_s)
    simulator.run(rmsnorm_bwd_dw_kernel, C // 64, 64, dw_s, dy_s, x_s, rstd_s)
dw_one = simulator.sim(np.zeros(C, np.float32))
with lesson.tracing() as one:
    dx_one = rmsnorm.rmsnorm_bwd(dy_s, x_s, w_s, rstd_s, dw_one)
size = 4 * N * C
for name, trace in (("two kernels", two), ("the library's", one)):
    big = sum(trace.traffic(a).moved for a in ("dy_NC", "x_NC", "dx_NC", "dy", "x", "dx"))
    print(f"{name:14} dy, x and dx move {big / size:.0f} times the bytes of x")
print(
    "the same dx:",
    np.allclose(dx_s, dx_one, atol=1e-5),
    " the same dw:",
    np.allclose(dw_s, dw_one, atol=1e-4),
)

# %% [markdown]
# The two kernels move seven times the bytes of x: the dx kernel reads dy and x in each of its two
# loops and writes dx, and the dw kernel reads both once more. **The improvement:** do everything in
# one pass. Load a row of dy and x into registers once; compute the mean, dx and the row's
# contribution to dw from them. The minimum is 3: read dy, read x, write dx. (It is 5 here, because
# the kernel prefetches one row ahead, and after its last row it loads that row again. In this small
# example every warp has only one row. With thousands of rows it is 3.)
#
# The dw contributions of different blocks must be added. Atomics would add them in whatever order
# the blocks finish, which gives a different sum in every run (lesson 3). Instead, each block sums
# its own rows and writes one row of partial sums, and a second, small kernel adds these *in order*.
# Measured:

# %%
lesson.table(
    ["bench_kernels/rmsnorm_bwd/fp32", "bench_kernels/rmsnorm_bwd/bf16"],
    {"ms": "ms", "copy of 3 N C, ms": "copy_ms", "copy / kernel": "share", "GB/s": "value"},
)

# %%
n_rows = 32768 if lesson.on_gpu() else 4
x_b, dy_b = (lesson.array(rng.standard_normal((n_rows, 768)).astype(np.float32)) for _ in range(2))
w_b, rstd_b = lesson.array(np.ones(768, np.float32)), lesson.array(np.ones(n_rows, np.float32))
dx_b, dw_b = lesson.empty(x_b, (n_rows, 768)), lesson.zeros(x_b, 768)


def two_kernels():
    lesson.launch(rmsnorm_bwd_dx_kernel, n_rows, 256, dx_b, dy_b, x_b, w_b, rstd_b)
    lesson.launch(rmsnorm_bwd_dw_kernel, 12, 64, dw_b, dy_b, x_b, rstd_b)


runs = {
    "two kernels": two_kernels,
    "in use": lambda: rmsnorm.rmsnorm_bwd(dy_b, x_b, w_b, rstd_b, dw_b),
}
times = lesson.measure(runs, nbytes=3 * 4 * n_rows * 768)

# %% [markdown]
# ## The library's kernel
#
# The reference, which is what you have written:

# %%
lesson.source(rmsnorm_bwd_ref)

# %% [markdown]
# The kernel in use. Between `while n < N` and `store` is your 5.4, and dw accumulates in `dw_SE`;
# the rest prefetches the next row while the current one is processed.

# %%
lesson.source(rmsnorm.make_bwd_kernel)

# %% [markdown]
# And your 5.3, for any function of any number of arrays:

# %%
from xtrain.inspect import gradcheck

lesson.source(gradcheck.check)

# %% [markdown]
# ## What did not help
#
# *Saving xhat.* The forward pass could save $\hat{x}$ for the backward pass instead of recomputing
# it. This would take N C numbers of memory per norm and save one multiplication per element, in a
# kernel that waits for memory anyway. xtrain saves only r, one number per row:

# %%
tokens, width, norms = 32 * 256, 384, 2 * 12 + 1
print(
    f"xhat of all norms of dim384: {tokens * width * norms * 4 / 1e6:.0f} MB; r: "
    f"{tokens * norms * 4 / 1e6:.2f} MB"
)

# %% [markdown]
# *Checking kernels with finite differences in float32.* The figure above shows why: with five
# correct digits at best, a tolerance loose enough to pass a correct kernel also passes a wrong one.
#
# ## More exercises
#
# 1. Derive the backward pass of `y = a * b` (element by element) and of `y = sum(x)`, and check
#    both with 5.3.
# 2. The softmax of a row is $p_c = e^{x_c} / \sum_j e^{x_j}$. Show that
#    $dx_c = p_c (dp_c - \sum_j dp_j p_j)$, and check it.
# 3. Where is the derivative of `max(x, 0)` undefined, and what does the check report if an x is
#    within one step of that point?
#
# <details><summary>Solutions</summary>
#
# 1: da = dy b, db = dy a; every element of dx is dy.
#
# 2: $\partial p_j / \partial x_c = p_j ([j = c] - p_c)$; multiply by $dp_j$ and sum over j. In
# code: `p * (dp - (dp * p).sum(-1, keepdims=True))`.
#
# 3: At 0. The two sides then have different slopes, and the difference is a mixture of both, so the
# check reports an error. Draw x away from 0, or use a smaller step.
#
# </details>
#
# ## Sources
#
# - A. Griewank, A. Walther, *Evaluating Derivatives*: the chain rule as a program.
# - HIPS/autograd, `check_grads`: directional checks.
# - D. MacIver et al., *Hypothesis*: drawing and shrinking examples.
# - B. Zhang, R. Sennrich, *Root Mean Square Layer Normalization*, 2019.
