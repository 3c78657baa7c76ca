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
# # 7 The model
#
# *About 75 minutes. You need [lesson 6](06_autograd.ipynb).*
#
# **The question.** What is a Llama, exactly? A diagram is not enough. This lesson gives every
# operation from token ids to the loss, small enough to compute by hand, and equal to the standard
# implementations to five digits.
#
# You know RMSNorm and linear layers. Five parts are new: the embedding, positions (RoPE), attention
# with its softmax, SwiGLU, and the cross-entropy loss. You will write three of them, then put
# everything together in forty lines of NumPy and compare.

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

from xtrain import lesson
from xtrain.kernels.primitives.reduce import block_max, block_sum

# %% [markdown]
# ## The model in one picture
#
# B sequences of T tokens are N = B T rows. Each row carries C numbers through the model, the
# *residual stream*. Each of the L blocks reads it twice and adds to it twice:
#
# ```text
# ids (B, T) -> embedding -> h (N, C)
#     L times:   h += attention(norm(h))      the only place where tokens interact
#                h += mlp(norm(h))            every token by itself (mlp: multi-layer perceptron)
# norm -> head -> logits (N, V) -> cross-entropy with the next tokens
# ```
#
# The same with every operation and the shape of its result. The green line is the residual stream,
# the boxes to its right are what a block computes from it and adds to it. H query heads and G
# key/value heads have D numbers each; F is the width of the MLP.

# %%
lesson.figures.stack(
    [
        ("ids", "(B, T)", False),
        ("embedding", "h (N, C)", False),
        ("RMSNorm", "(N, C)", True),
        ("q, k, v projections", "(N, H D), 2 (N, G D)", True),
        ("RoPE on q and k", "(B, T, H or G, D)", True),
        ("causal attention", "(B, T, H, D)", True),
        ("output projection", "(N, C)", True),
        ("h", "(N, C)", False),
        ("RMSNorm", "(N, C)", True),
        ("gate, up projections", "2 (N, F)", True),
        ("SwiGLU", "(N, F)", True),
        ("down projection", "(N, C)", True),
        ("h", "(N, C)", False),
        ("RMSNorm", "(N, C)", False),
        ("head", "logits (N, V)", False),
        ("cross-entropy", "one number", False),
    ],
    "N = B T rows through L blocks",
    repeat=(2, 12, "L times"),
)

# %% [markdown]
# The **embedding** is a table with one row per token of the vocabulary, and the op is a lookup:
# `h[n] = w[ids[n]]`. Its backward pass adds the gradient of every position to the row of its token
# (rule 1 of lesson 6: a row that is used several times accumulates all its gradients).
#
# ## Positions: RoPE
#
# Attention works on H *heads*, vectors of D numbers that a linear layer computes from each token:
# an array (N, H, D). It compares tokens by dot products, which do not depend on the order of the
# tokens. RoPE (*rotary position embedding*) encodes the position as a *rotation*. A head of D
# numbers is seen as R = D / 2 planes, and in plane r the token at position t is rotated by the
# angle $t f_r$, where $f_r = 10000^{-r / R}$. Planes with high frequencies distinguish close
# positions, planes with low frequencies distant ones. Plane r consists of element r of the lower
# half and element r of the upper half:
#
# $$y_r = x_r \cos(t f_r) - x_{r+R} \sin(t f_r) \qquad y_{r+R} = x_{r+R} \cos(t f_r) + x_r \sin(t f_r)$$
#
# Why rotate? Because the dot product of two rotated vectors depends only on the *difference* of the
# angles, that is, on the distance between the two tokens. By hand, with one plane and f = 0.5:


# %%
def rotate(v, angle):
    c, s = math.cos(angle), math.sin(angle)
    return np.array([v[0] * c - v[1] * s, v[1] * c + v[0] * s])


q, k, f = np.array([1.0, 2.0]), np.array([3.0, -1.0]), 0.5
for i, j in ((0, 3), (5, 8), (100, 103), (0, 4)):
    print(f"query at {i:3}, key at {j:3}: dot product {rotate(q, i * f) @ rotate(k, j * f):.4f}")

# %% [markdown]
# The first three agree: the query and the key are three positions apart each time.
#
# ## Exercise 7.1: RoPE
#
# Use one thread per plane. Sequences are stored one after another with T tokens each, so row n is
# at position n % T. `cos_TR[t, r]` and `sin_TR[t, r]` are tables.


# %% tags=["exercise"]
@cuda.jit
def rope_kernel(y_NHD, x_NHD, cos_TR, sin_TR, T):
    """Rotate plane r of head h of token n.   x, y: (N, H, D)   cos, sin: (T, R) with R = D / 2

    Grid (N, H), block R. Row n is at position n % T.
    """
    n, h, r = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x
    R = cos_TR.shape[1]
    # YOUR CODE


# %%
lesson.check("7.1", rope_kernel)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `a, b = x_NHD[n, h, r], x_NHD[n, h, r + R]` and `t = n % T`; `c, s = cos_TR[t, r], sin_TR[t, r]`.
#
# </details>


# %% tags=["solution"]
# Solution 7.1
@cuda.jit
def rope_kernel_solution(y_NHD, x_NHD, cos_TR, sin_TR, T):
    """Rotate plane r of head h of token n.   x, y: (N, H, D)   cos, sin: (T, R) with R = D / 2

    Grid (N, H), block R. Row n is at position n % T.
    """
    n, h, r = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x
    R = cos_TR.shape[1]
    t = n % T
    a, b = x_NHD[n, h, r], x_NHD[n, h, r + R]
    c, s = cos_TR[t, r], sin_TR[t, r]
    y_NHD[n, h, r] = a * c - b * s
    y_NHD[n, h, r + R] = b * c + a * s


rope_kernel = lesson.yours(rope_kernel, rope_kernel_solution)


# %% [markdown]
# The backward pass needs no new kernel. A rotation preserves lengths, so the transpose of a
# rotation is the inverse rotation: $dx$ is dy rotated by $-t f_r$.
#
# ## Attention
#
# For each head, each token computes a query, a key and a value. It looks at all tokens up to and
# including itself, weights them by how well their keys match its query, and takes the weighted mean
# of their values:
#
# $$s_{ts} = \frac{q_t \cdot k_s}{\sqrt{D}} \qquad p_{ts} = \frac{e^{s_{ts}}}{\sum_{j \le t} e^{s_{tj}}} \qquad o_t = \sum_{s \le t} p_{ts} \, v_s$$
#
# "Up to and including itself" is the *causal mask*: a model that can see the next token has nothing
# to predict. The products are those of lesson 4. The softmax by hand, for T = 3:

# %%
scores = np.array([[0.0, 9.0, 9.0], [1.0, 1.0, 9.0], [2.0, 1.0, 0.0]])
for t, row in enumerate(scores):
    seen = np.exp(row[: t + 1])
    print(
        f"row {t}: exp {seen.round(3)}, sum {seen.sum():.3f}, p "
        f"{np.append(seen / seen.sum(), np.zeros(2 - t)).round(3)}"
    )

# %% [markdown]
# There is one pitfall: in float32, exp(89) is infinite. But numerator and denominator can both be
# divided by $e^m$ without changing p. If m is the largest score of the row, no exponent is above 0,
# and at least one is exactly 0.
#
# ## Exercise 7.2: causal softmax
#
# Block t handles row t, with three passes over the visible keys: the maximum, the sum, the result.
# Write zeros for the masked keys. You may call `block_max(v, partial)` and `block_sum(v, partial)`.


# %% tags=["exercise"]
@cuda.jit
def causal_softmax_kernel(p_TS, s_TS, scale):
    """p[t] = softmax(scale s[t, : t + 1]), zeros from t + 1 on.   p, s: (T, S) with S = T

    Grid T, block a multiple of 32.
    """
    partial = cuda.shared.array(32, float32)
    t, tid = cuda.blockIdx.x, cuda.threadIdx.x
    S = s_TS.shape[1]
    # YOUR CODE


# %%
lesson.check("7.2", causal_softmax_kernel)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# For the maximum, start from `top = float32(-math.inf)` and compare: `v = scale * s_TS[t, s]`,
# `top = v if v > top else top`. Then `top = block_max(top, partial)`.
#
# </details>
# <details><summary>Hint 2</summary>
#
# The masked part: `for s in range(t + 1 + tid, S, cuda.blockDim.x): p_TS[t, s] = float32(0.0)`.
#
# </details>


# %% tags=["solution"]
# Solution 7.2
@cuda.jit
def causal_softmax_kernel_solution(p_TS, s_TS, scale):
    """p[t] = softmax(scale s[t, : t + 1]), zeros from t + 1 on.   p, s: (T, S) with S = T

    Grid T, block a multiple of 32.
    """
    partial = cuda.shared.array(32, float32)
    t, tid = cuda.blockIdx.x, cuda.threadIdx.x
    S = s_TS.shape[1]
    visible = t + 1
    top = float32(-math.inf)
    for s in range(tid, visible, cuda.blockDim.x):
        v = scale * s_TS[t, s]
        top = v if v > top else top
    top = block_max(top, partial)
    total = float32(0.0)
    for s in range(tid, visible, cuda.blockDim.x):
        total += math.exp(scale * s_TS[t, s] - top)
    total = block_sum(total, partial)
    for s in range(tid, visible, cuda.blockDim.x):
        p_TS[t, s] = math.exp(scale * s_TS[t, s] - top) / total
    for s in range(visible + tid, S, cuda.blockDim.x):
        p_TS[t, s] = float32(0.0)


causal_softmax_kernel = lesson.yours(causal_softmax_kernel, causal_softmax_kernel_solution)


# %% [markdown]
# ## SwiGLU
#
# The MLP projects each token from C to F numbers, twice, and uses one of the results (gate) to
# control how much of the other (up) passes: $y = \text{silu}(\text{gate}) \cdot \text{up}$ with
# $\text{silu}(g) = g / (1 + e^{-g})$. A gate far below zero closes, one far above zero opens.

# %%
gate = np.array([-6.0, -1, 0, 1, 6])
print("gate      ", gate)
print("silu(gate)", (gate / (1 + np.exp(-gate))).round(3))

# %% [markdown]
# ## The loss
#
# The head gives each row V logits. The *cross-entropy* is minus the logarithm of the probability
# that the softmax gives to the token that actually came next:
#
# $$\text{loss}_n = -\log p_{n, \text{target}} = \log \sum_v e^{x_{nv}} - x_{n, \text{target}} \qquad \frac{\partial \text{loss}_n}{\partial x_{nv}} = p_{nv} - [v = \text{target}]$$
#
# where the bracket is 1 for the target and 0 for all others. The gradient is easy to read: the
# predicted probabilities minus the true ones. Use the second form of the loss for the computation:
# the probability of an unlikely token may round to 0, and log 0 is minus infinity. By hand for
# V = 3, target 2:

# %%
x = np.array([1.0, 2.0, 3.0])
p = np.exp(x) / np.exp(x).sum()
print(
    "p",
    p.round(3),
    "  loss",
    round(float(-np.log(p[2])), 3),
    "  gradient",
    (p - [0, 0, 1]).round(3),
)

# %% [markdown]
# An untrained model has a loss of about ln V: 10.8 for a vocabulary of 50257. Remember this: the
# first loss of every training run must be near ln V.
#
# ## Exercise 7.3: cross-entropy
#
# Write it in NumPy, with the loss and its gradient in one function. The loss is the *mean* over the
# rows that count. Rows with target -100 (padding, the user's part of a chat) do not count.


# %% tags=["exercise"]
def cross_entropy(logits_NV, targets_N):
    """-> mean loss (a number), its gradient (N, V).

    logits: (N, V) floats   targets: (N,) integers
    Rows with target -100 are excluded from the mean; their gradient is 0.
    """
    # YOUR CODE


# %%
lesson.check("7.3", cross_entropy)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `counted = targets_N != -100`. For the lookup, use a valid target in the other rows:
# `np.where(counted, targets_N, 0)`. `x[np.arange(N), target]` picks one logit per row.
#
# </details>


# %% tags=["solution"]
# Solution 7.3
def cross_entropy_solution(logits_NV, targets_N):
    """-> mean loss (a number), its gradient (N, V).

    logits: (N, V) floats   targets: (N,) integers
    Rows with target -100 are excluded from the mean; their gradient is 0.
    """
    counted = targets_N != -100
    n, target_N = np.arange(len(targets_N)), np.where(counted, targets_N, 0)
    x_NV = logits_NV - logits_NV.max(1, keepdims=True)
    p_NV = np.exp(x_NV)
    sum_N = p_NV.sum(1)
    loss_N = np.log(sum_N) - x_NV[n, target_N]
    p_NV /= sum_N[:, None]
    p_NV[n, target_N] -= 1
    return loss_N[counted].mean(), p_NV * counted[:, None] / counted.sum()


cross_entropy = lesson.yours(cross_entropy, cross_entropy_solution)


# %% [markdown]
# ## Everything together
#
# The whole model is forty lines. The weights have their Hugging Face names. Two query heads share
# one key/value head (*grouped-query attention*, lesson 18). The weights come from a small xtrain
# model. (`qk_norm`: Qwen3 has two more norms, one for each query head and one for each key head,
# before RoPE. Llama does not.)

# %%
import xtrain
from xtrain.kernels.rmsnorm import rmsnorm_ref
from xtrain.kernels.rope import rope_ref, rope_tables

config = xtrain.ModelConfig(
    vocab_size=50,
    dim=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=8,
    hidden_dim=48,
    max_seq_len=16,
    qk_norm=False,
)
model = xtrain.Transformer(config, seed=0, device="cpu")
weights = {name: np.array(p.data) for name, p in model.named_parameters()}
for name in list(weights)[:8]:
    print(f"{name:44} {weights[name].shape}")


# %%
def attention(q_THD, k_TGD, v_TGD):
    """One sequence. Query head h reads key/value head h // (H / G)."""
    T, H, D = q_THD.shape
    out = np.empty_like(q_THD)
    for h in range(H):
        g = h // (H // k_TGD.shape[1])
        s = q_THD[:, h] @ k_TGD[:, g].T / math.sqrt(D)
        s = np.where(np.tri(T, dtype=bool), s, -np.inf)
        p = np.exp(s - s.max(1, keepdims=True))
        out[:, h] = p / p.sum(1, keepdims=True) @ v_TGD[:, g]
    return out.reshape(T, H * D)


def forward(w, ids_BT, c):
    """-> {stage: its output (B, T, ...)}, with the stage names of xtrain.inspect.compare."""
    B, T = ids_BT.shape
    H, G, D, eps = c.n_heads, c.n_kv_heads, c.head_dim, c.norm_eps
    cos, sin = rope_tables(D, T, c.rope_theta)
    positions = np.tile(np.arange(T), B)
    norm = lambda x, name: rmsnorm_ref(x, w[name + ".weight"], eps)[0]
    linear = lambda x, name: x @ w[name + ".weight"].T
    h = w["model.embed_tokens.weight"][ids_BT.reshape(-1)]
    stages = {"embedding": h}
    for i in range(c.n_layers):
        at_layer = f"model.layers.{i}."
        x = norm(h, at_layer + "input_layernorm")
        q, k, v = (linear(x, at_layer + f"self_attn.{p}_proj").reshape(B * T, -1, D) for p in "qkv")
        q, k = rope_ref(q, cos, sin, positions), rope_ref(k, cos, sin, positions)
        o = np.concatenate(
            [attention(q[b : b + T], k[b : b + T], v[b : b + T]) for b in range(0, B * T, T)]
        )
        o = linear(o, at_layer + "self_attn.o_proj")
        stages[f"layer {i} attention"] = o
        h = h + o
        x = norm(h, at_layer + "post_attention_layernorm")
        gate, up = linear(x, at_layer + "mlp.gate_proj"), linear(x, at_layer + "mlp.up_proj")
        h = h + linear(gate / (1 + np.exp(-gate)) * up, at_layer + "mlp.down_proj")
        stages[f"layer {i} output"] = h
    stages["final norm"] = norm(h, "model.norm")
    stages["logits"] = linear(stages["final norm"], "lm_head")
    return {name: a.reshape(B, T, -1) for name, a in stages.items()}


ids = np.random.default_rng(0).integers(0, 50, (2, 9))
mine = forward(weights, ids[:, :-1], config)
loss, _ = cross_entropy(mine["logits"].reshape(-1, 50), ids[:, 1:].reshape(-1))
print(f"loss {loss:.4f}, ln 50 = {math.log(50):.4f}")

# %% [markdown]
# Is it the same model as xtrain's? Compare stage by stage. A mistake shows up as the first stage
# whose difference jumps. This is how to find *where* two implementations diverge.

# %%
from xtrain.inspect.compare import stages

theirs = stages(model, ids[:, :-1])
for name, a in mine.items():
    relative = np.abs(a - theirs[name]).max() / np.abs(theirs[name]).max()
    print(f"{name:20} {'agrees' if relative < 1e-5 else f'DIFFERS by {relative:.1e}'}")

# %% [markdown]
# Now plant a typical mistake: RoPE that pairs neighbouring elements, as some papers write it.


# %%
def paired(x, cos, sin, positions):
    y, (a, b) = x.copy(), (x[..., 0::2], x[..., 1::2])
    c, s = cos[positions][:, None], sin[positions][:, None]
    y[..., 0::2], y[..., 1::2] = a * c - b * s, b * c + a * s
    return y


right, rope_ref = rope_ref, paired
wrong = forward(weights, ids[:, :-1], config)
rope_ref = right
for name, a in wrong.items():
    relative = np.abs(a - theirs[name]).max() / np.abs(theirs[name]).max()
    print(f"{name:20} {'agrees' if relative < 1e-5 else 'DIFFERS'}")

# %% [markdown]
# The logits would still look reasonable, and so would the loss: a model *trained* with paired
# planes is as good as any other. It is just not a Llama. The next cell compares with PyTorch, op by
# op (if PyTorch is installed):

# %%
try:
    import torch
    import torch.nn.functional as TF
except ImportError:
    print("PyTorch is not installed: pip install torch, then run this cell again")
else:
    from xtrain.kernels import rmsnorm, softmax, swiglu

    rng = np.random.default_rng(1)
    a, w, s = (rng.standard_normal(n).astype(np.float32) for n in ((6, 16), 16, (1, 5, 5)))
    t = lambda x: torch.tensor(x)
    targets = np.array([1, 2, 3, 0, 5, 4])
    logits = a.copy()
    pairs = {
        "rmsnorm": (rmsnorm.rmsnorm_fwd(a, w, 1e-6)[0], TF.rms_norm(t(a), (16,), t(w), 1e-6)),
        "swiglu": (swiglu.swiglu_fwd(a), TF.silu(t(a[:, :8])) * t(a[:, 8:])),
        "causal softmax": (
            softmax.causal_softmax_fwd(s.copy(), 5, 1.0),
            (t(s) + torch.full((5, 5), -torch.inf).triu(1)).softmax(-1),
        ),
        "cross-entropy": (
            np.float32(cross_entropy(logits, targets)[0]),
            TF.cross_entropy(t(a), t(targets)),
        ),
    }
    for name, (ours, torchs) in pairs.items():
        print(f"{name:16} agrees: {np.allclose(ours, torchs.numpy(), rtol=1e-5, atol=1e-6)}")

# %% [markdown]
# For whole models with real weights, `python -m xtrain.compare FOLDER` does this comparison against
# Hugging Face's transformers, stage by stage (lesson 22).
#
# ## Measure, and one improvement
#
# Written with array operations, a causal softmax is: scale, mask, maximum, subtract, exp, sum,
# divide. Each of them reads an array of B H T S scores from memory, and most of them write one. One
# kernel reads each row once and writes it once. The same holds for cross-entropy, where the gain is
# larger: loss *and* gradient need the same exp, and the gradient can overwrite the logits. For
# N = 32768 rows of 50304 logits:

# %%
n, v = 32768, 50304
once = 4 * n * v / 1e9
print(f"the logits take {once:.1f} GB in float32")
print(f"one kernel: read and write once, {2 * once:.1f} GB moved")
lesson.table(
    [
        "bench_kernels/softmax_fwd/fp32",
        "bench_kernels/cross_entropy_both/fp32",
        "bench_kernels/rope_fwd/fp32",
    ],
    {
        "xtrain, ms": "ms",
        "copy, ms": "copy_ms",
        "PyTorch, ms": "torch_eager_ms",
        "torch.compile, ms": "torch_compile_ms",
    },
)

# %% [markdown]
# **Fusing ops that share data** makes each of these three several times faster than running op by op. PyTorch's
# compiler gets most of this gain too, and least of it for cross-entropy, because forward and backward remain two
# kernels there.
#
# If you have a GPU, time your own softmax against the library's:

# %%
T = 1024 if lesson.on_gpu() else 8
rng = np.random.default_rng(2)
scores = lesson.array(rng.standard_normal((T, T)).astype(np.float32))
p = lesson.empty(scores, (T, T))
from xtrain.kernels import softmax

runs = {
    "yours": lambda: lesson.launch(causal_softmax_kernel, T, 256, p, scores, np.float32(0.125)),
    "in use (in place)": lambda: softmax.causal_softmax_fwd(scores.reshape(1, T, T), T, 0.125),
}
times = lesson.measure(runs, nbytes=6 * T * T)  # half of the scores are read, all of p is written

# %% [markdown]
# ## The library's kernel
#
# This is the softmax for long rows, the one closest to yours. It finds the maximum and the sum in
# *one* pass: when a larger score appears, the running sum is multiplied by exp(old maximum - new
# maximum). Lesson 13 builds FlashAttention on this line. (`fmul_rn` is a product that is rounded
# separately: lesson 8.)

# %%
lesson.source(softmax.online_softmax)
lesson.source(softmax.causal_softmax_fwd_kernel)

# %% [markdown]
# And the model. It is your `forward`, with packed weights. Additions, norms and SwiGLU are computed
# where they are read, so one op adds, normalises and multiplies (nn/deferred.py):

# %%
from xtrain.nn import model as xmodel

lesson.source(xmodel.Attention.attend)
lesson.source(xmodel.Block)

# %% [markdown]
# ## What did not help
#
# *A mask as an array.* Most code adds a (T, T) array of zeros and minus infinities (`attention`
# above uses a boolean one). This reads as many bytes again as the scores, for something that a
# comparison decides: s <= t. If the mask is instead the end of the loop, *half of the work
# disappears* too.
#
# *exp without subtracting the maximum.* This saves one pass, and works until one score exceeds 88:

# %%
with np.errstate(over="ignore", invalid="ignore"):
    big = np.array([90.0, 89.0], np.float32)
    print(
        "without:",
        np.exp(big) / np.exp(big).sum(),
        "  with:",
        (np.exp(big - 90) / np.exp(big - 90).sum()).round(3),
    )

# %% [markdown]
# ## More exercises
#
# 1. Rotate the result of 7.1 back with your kernel, by passing it `-sin`. How accurately do you
#    recover x?
# 2. Write the backward pass of causal softmax:
#    $ds_c = \text{scale} \cdot p_c (dp_c - \sum_j dp_j p_j)$. Check it with `gradient_error` from
#    lesson 5.
# 3. How many parameters does the model above have in its embedding, in its head, and in one block?
#    Which part grows with the vocabulary?
#
# <details><summary>Solutions</summary>
#
# 1: Up to rounding, about 1e-7 relative: the second rotation is the inverse of the first.
#
# 2: `dot = (dp * p).sum(-1, keepdims=True)`, `ds = scale * p * (dp - dot)`; the mask needs no
# special treatment, because p is 0 there.
#
# 3: 50 · 32 = 1600 each; a block has 32 · 32 (q) + 2 · 16 · 32 (k, v) + 32 · 32 (o) + 3 · 48 · 32 +
# 2 · 32 = 7744. For a vocabulary of 50257 and width 384 the two tables are 38.6 of 66.9 million.
#
# </details>
#
# ## Sources
#
# - A. Vaswani et al., *Attention Is All You Need*, 2017.
# - J. Su et al., *RoFormer: Enhanced Transformer with Rotary Position Embedding*, 2021.
# - N. Shazeer, *GLU Variants Improve Transformer*, 2020.
# - H. Touvron et al., *LLaMA*, 2023; the Qwen team, *Qwen3*, 2025.
# - M. Milakov, N. Gimelshein, *Online normalizer calculation for softmax*, 2018.
