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
# # 6 An autograd in 300 lines
#
# *About 60 minutes. You need [lesson 5](05_backward.ipynb).*
#
# **The question.** A transformer of 12 layers runs about 150 ops in its forward pass. Each has a
# backward pass like those you derived in lesson 5. They must be called in the right order, each
# with the right gradient. Writing that order by hand is not practical, because it changes with
# every change to the model. How can the program find the order by itself?
#
# It records what it does as it runs. You will write an engine of some twenty lines that
# differentiates any such program, then read the real one.

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
import itertools

import numpy as np

from xtrain import lesson

# %% [markdown]
# ## One example by hand
#
# $z = x \cdot y + x$ with x = 3, y = 2. As a program this is two ops, and x is used twice:

# %%
lesson.figures.graph(
    {"x = 3": (0, 0), "y = 2": (0, 1), "p = x y": (1, 0.5), "z = p + x": (2, 0)},
    [("x = 3", "p = x y"), ("y = 2", "p = x y"), ("p = x y", "z = p + x"), ("x = 3", "z = p + x")],
    "the forward pass follows the arrows; the backward pass goes against them",
)

# %% [markdown]
# Now the backward pass, with numbers. Start with dz = 1.
#
# | op, last first | incoming gradient | gradients passed to its inputs |
# |---|---|---|
# | z = p + x | dz = 1 | dp = 1, and dx gets 1 |
# | p = x y | dp = 1 | dx gets dp y = 2 **more**, dy = dp x = 3 |
#
# So dx = 1 + 2 = 3 and dy = 3. Check: $\partial z / \partial x = y + 1 = 3$. This example contains
# the two rules of the whole engine:
#
# 1. **If a tensor is used more than once, its gradients are added.** (Change x a little, and both
#    uses change.)
# 2. **A tensor's gradient is passed on only after every op that used the tensor has contributed to
#    it.** If p had been used again later, dp would not have been complete.
#
# ## The recorded graph
#
# A tensor is an array that remembers how it was made. It has a list of pairs: (an input tensor, a
# function from the gradient of the result to the gradient of that input). It also has a number that
# says when it was made. This is the whole class:

# %% tags=["imports"]
clock = itertools.count()


class Tensor:
    """An array, its gradient, and its parents: pairs (tensor, function from dy to its gradient)."""

    def __init__(self, data, parents=()):
        self.data, self.parents, self.grad = np.asarray(data, np.float64), list(parents), None
        self.order = next(clock)  # later tensors have larger numbers

    shape = property(lambda self: self.data.shape)


# %% [markdown]
# An op computes its result and records its parents at the same time. Addition:


# %% tags=["imports"]
def add(a, b):
    return Tensor(a.data + b.data, [(a, lambda dy: dy), (b, lambda dy: dy)])


# %% [markdown]
# The functions are closures: they keep references to the arrays they need for the backward pass
# (none, in this case). This is what "define by run" means: the graph consists of the ops that ran.
# An `if` or a `for` in the model needs no special treatment, because only the ops that were
# executed are recorded.
#
# ## Exercise 6.1: multiply


# %% tags=["exercise"]
def multiply(a, b):
    """a b, element by element; a and b are Tensors of the same shape."""
    # YOUR CODE


# %%
lesson.check("6.1", multiply)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Copy `add`. The gradient of a is `dy * b.data`.
#
# </details>


# %% tags=["solution"]
# Solution 6.1
def multiply_solution(a, b):
    """a b, element by element; a and b are Tensors of the same shape."""
    return Tensor(a.data * b.data, [(a, lambda dy: dy * b.data), (b, lambda dy: dy * a.data)])


multiply = lesson.yours(multiply, multiply_solution)


# %% [markdown]
# ## Exercise 6.2: an op that broadcasts
#
# `x + b` where x is (N, C) and b is (C,): NumPy broadcasts b to every row. What is the gradient of
# something that is used N times?


# %% tags=["exercise"]
def add_bias(x, b):
    """x (N, C) + b (C,)."""
    # YOUR CODE


# %%
lesson.check("6.2", add_bias)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Apply rule 1 above N times: the rows of dy are added up, `dy.sum(0)`.
#
# </details>


# %% tags=["solution"]
# Solution 6.2
def add_bias_solution(x, b):
    """x (N, C) + b (C,)."""
    return Tensor(x.data + b.data, [(x, lambda dy: dy), (b, lambda dy: dy.sum(0))])


add_bias = lesson.yours(add_bias, add_bias_solution)


# %% [markdown]
# A broadcast in the forward pass becomes a sum in the backward pass, and vice versa: the gradient
# of a sum is a broadcast. This pair is everywhere. A weight that is used by all tokens accumulates
# a gradient from all of them.
#
# ## Exercise 6.3: the engine
#
# `backward(root)` sets `root.grad` to ones and passes gradients on until every tensor has been
# processed. Rule 2 decides the order. Because every tensor is made after its parents, **newest
# first** is always a correct order: every op that used a tensor made a newer one.


# %% tags=["exercise"]
def backward(root):
    """Set .grad of every tensor that root depends on to d sum(root) / d tensor."""
    # YOUR CODE


# %%
lesson.check("6.3", backward)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Keep a list of tensors to process, at first `[root]`. In a loop: remove the one with the largest
# `order`, call the function of each of its parents with its `grad`, add the result to the parent's
# `grad`, and put the parent on the list.
#
# </details>
# <details><summary>Hint 2</summary>
#
# A tensor that is used twice must not be on the list twice. Keep a set of `id(tensor)`. And `grad`
# is None at first.
#
# </details>


# %% tags=["solution"]
# Solution 6.3
def backward_solution(root):
    """Set .grad of every tensor that root depends on to d sum(root) / d tensor."""
    root.grad = np.ones_like(root.data)
    todo, seen = [root], {id(root)}
    while todo:
        newest = max(todo, key=lambda t: t.order)
        todo.remove(newest)
        for parent, function in newest.parents:
            contribution = function(newest.grad)
            parent.grad = contribution if parent.grad is None else parent.grad + contribution
            if id(parent) not in seen:
                seen.add(id(parent))
                todo.append(parent)


backward = lesson.yours(backward, backward_solution)


# %%
x, y = Tensor(3.0), Tensor(2.0)
z = add(multiply(x, y), x)
backward(z)
print("dx", x.grad, " dy", y.grad)

# %% [markdown]
# ## Train a network
#
# With three more ops, the engine trains a network on a problem that no straight line can separate:
# exclusive or.


# %%
def linear(x, w):
    """x w^T; the backward pass is that of lesson 5."""
    return Tensor(x.data @ w.data.T, [(x, lambda dy: dy @ w.data), (w, lambda dy: dy.T @ x.data)])


def tanh(x):
    y = np.tanh(x.data)
    return Tensor(y, [(x, lambda dy: dy * (1 - y * y))])


def mean_square(x):
    return Tensor((x.data**2).mean(), [(x, lambda dy: dy * 2 * x.data / x.data.size)])


points = Tensor([[0, 0], [0, 1], [1, 0], [1, 1]])
wanted = np.array([[0.0], [1], [1], [0]])
rng = np.random.default_rng(0)
weights = [
    Tensor(rng.standard_normal((8, 2))),
    Tensor(np.zeros(8)),
    Tensor(rng.standard_normal((1, 8)) * 0.5),
    Tensor(np.zeros(1)),
]

for step in range(401):
    w1, b1, w2, b2 = weights
    out = add_bias(linear(tanh(add_bias(linear(points, w1), b1)), w2), b2)
    loss = mean_square(add(out, Tensor(-wanted)))
    for t in weights:
        t.grad = None
    backward(loss)
    for t in weights:
        t.data -= 0.3 * t.grad
    if step % 100 == 0:
        print(f"step {step:3}   loss {loss.data:.3f}")
print("answers:", out.data.ravel().round(1) + 0.0)

# %% [markdown]
# We never wrote a backward pass for this network. Is its gradient correct? Apply the check of
# lesson 5 to the weights of the first layer:


# %%
def loss_of(w1_data):
    hidden = tanh(add_bias(linear(points, Tensor(w1_data)), weights[1]))
    return float(
        mean_square(add(add_bias(linear(hidden, weights[2]), weights[3]), Tensor(-wanted))).data
    )


w1 = Tensor(weights[0].data)
check = mean_square(
    add(
        add_bias(linear(tanh(add_bias(linear(points, w1), weights[1])), weights[2]), weights[3]),
        Tensor(-wanted),
    )
)
backward(check)
v = rng.standard_normal(w1.shape)
numeric = (loss_of(w1.data + 1e-5 * v) - loss_of(w1.data - 1e-5 * v)) / 2e-5
print("relative error below 1e-6:", bool(abs(numeric - (w1.grad * v).sum()) < 1e-6 * abs(numeric)))

# %% [markdown]
# ## Measure: the memory that the graph holds
#
# Each closure holds the arrays that it needs, so the graph keeps them alive until the backward
# pass. These saved activations fill the memory of a GPU in training, and xtrain's engine counts
# them. Here is one layer of a transformer, on 256 tokens of width 64: a linear layer to 384 numbers
# per token; SwiGLU (lesson 7), which makes 192 numbers out of its two halves, *gate* and *up*; and
# a linear layer back to 64. xtrain computes SwiGLU when its result is first read (nn/deferred.py),
# so it can be an op of its own, or a part of the linear layer that reads it:

# %%
from xtrain.nn import functional as F
from xtrain.nn.autograd import Tensor as XTensor
from xtrain.training.memory_plan import saved_bytes

N, C, hidden = 256, 64, 192
tokens = XTensor(rng.standard_normal((N, C)).astype(np.float32), requires_grad=True)
up = XTensor(rng.standard_normal((2 * hidden, C)).astype(np.float32), requires_grad=True)
down = XTensor(rng.standard_normal((C, hidden)).astype(np.float32), requires_grad=True)
gated = F.swiglu(F.linear(tokens, up))
gated.read()  # SwiGLU is computed here, by an op of its own
plain = F.linear(gated, down)
together = F.linear(F.swiglu(F.linear(tokens, up)), down)  # here by the product that reads it
row = 4 * N
for name, out in (("swiglu, then linear", plain), ("both in one op", together)):
    print(f"{name:20} keeps {saved_bytes(out) // row:4} numbers per token")

# %% [markdown]
# The first version keeps gate and up (384 numbers per token) for the backward pass of SwiGLU, and
# SwiGLU's result (192) for that of the last layer. **The improvement: do not save what is cheap to
# recompute.** The result follows from gate and up with a few multiplications, so the fused op
# recomputes it in its backward pass. It keeps a third less, and the gradients are bitwise equal:

# %%
dy = rng.standard_normal((N, C)).astype(np.float32)
gradients = []
for out in (plain, together):
    tokens.grad = up.grad = down.grad = None
    out.backward(dy)
    gradients.append([t.grad.copy() for t in (tokens, up, down)])
print("bitwise equal:", all(np.array_equal(a, b) for a, b in zip(*gradients)))

# %% [markdown]
# What about time? Recording the graph costs a few microseconds of Python per op. For a small model
# on a fast GPU, this is more than the arithmetic. The solution is not a faster engine: the whole
# step is captured once as a CUDA graph and replayed without any Python (lesson 10). Measured:

# %%
lesson.table(
    ["bench_history/bf16 eager/bf16", "bench_history/bf16/bf16"],
    {"ms per step": "ms", "tokens per second": "value"},
)

# %% [markdown]
# The first line is the engine running op by op (*eager*), the second is the same step as a CUDA
# graph.
#
# ## The library's kernel
#
# There is no kernel here, but there is an engine. First, an op. Instead of closures, xtrain has a
# class with two functions on arrays. What is saved is therefore explicit (`ctx.save`) and can be
# freed and counted:

# %%
lesson.source(F.SiLU)
lesson.source(F.Linear)

# %% [markdown]
# The loop is the one you wrote: newest first (with a heap instead of `max`), add to the gradient if
# there is one already, and continue with the parents.

# %%
from xtrain.nn import autograd

lesson.source(autograd.backward)

# %% [markdown]
# It does three things that yours does not:
#
# - **Parameter gradients accumulate in place.** In `Linear.backward`, `ctx.grad_target` returns the
#   memory of the parameter's own `.grad`. The first gradient of a step is written there, over the
#   one of the step before; `add` is True for all later ones, and the matrix product *adds*. The
#   largest arrays need no second buffer and are not filled with zeros first, and gradient
#   accumulation over several micro-batches costs nothing extra. (`xtrain/nn/tensor.py` has the
#   rule, in twenty lines.)
# - **Memory is freed early.** What an op has saved is released right after its backward pass, so
#   memory use shrinks during the backward pass.
# - **In-place changes are detected.** If a saved array is changed before the backward pass, the
#   result would be silently wrong:

# %%
x = XTensor(np.ones((2, 2), np.float32), requires_grad=True)
y = F.silu(x)
x.data[0, 0] = 5.0
try:
    y.backward(np.ones((2, 2), np.float32))
except RuntimeError as error:
    print(error)

# %%
import inspect

lines = len(inspect.getsource(autograd).splitlines())
print(f"xtrain/nn/autograd.py has fewer than 300 lines: {lines < 300}")

# %% [markdown]
# ## What did not help
#
# *Recursion.* The shortest engine calls itself for every parent. It is correct, and useless: it
# visits every *path* through the graph instead of every tensor. With residual connections, where
# each layer uses its input twice, the number of paths doubles with each layer:


# %%
def recursive(t, dy, calls):
    calls[0] += 1
    for parent, function in t.parents:
        recursive(parent, function(dy), calls)


for layers in (2, 4, 8, 16):
    x = Tensor(1.0)
    out = x
    for _ in range(layers):
        out = add(out, out)
    calls = [0]
    recursive(out, np.ones(()), calls)
    print(f"{layers:2} layers: {calls[0]:7,} calls; newest first needs {layers + 1}")

# %% [markdown]
# *Keeping the gradients of all tensors*, as yours does in `.grad`: convenient for inspection, but
# it takes as much memory again as the activations. xtrain keeps only the gradients of leaves.
#
# ## More exercises
#
# 1. Write `relu(x)` and `total(x)` (the sum of all elements) for your engine, and check both with
#    finite differences.
# 2. What does your engine do if `backward` is called twice on the same root? What does xtrain do?
# 3. Write `no_grad()`: inside it, ops record nothing. Where would you check the flag?
#
# <details><summary>Solutions</summary>
#
# 1: `Tensor(np.maximum(x.data, 0), [(x, lambda dy: dy * (x.data > 0))])` and
# `Tensor(x.data.sum(), [(x, lambda dy: dy * np.ones_like(x.data))])`.
#
# 2: Yours gives wrong numbers. The second call adds to the gradients of the intermediate tensors
# and passes on the sum: in z = x y + x, dx becomes 8, not 6. xtrain keeps no intermediate
# gradients, and raises an error, because the saved arrays have been freed.
#
# 3: For yours, `Tensor.__init__` is enough (parents become empty). xtrain checks the flag in
# `Context`, so nothing is saved either.
#
# </details>
#
# ## Sources
#
# - R. Wengert, *A simple automatic derivative evaluation program*, 1964: the list of recorded
#   operations.
# - D. Maclaurin, D. Duvenaud, M. Johnson, *Autograd: effortless gradients in NumPy*, 2015.
# - A. Paszke et al., *Automatic differentiation in PyTorch*, 2017: define-by-run, in-place checks.
