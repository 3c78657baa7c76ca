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
# # 45 fp8 in a kernel: codes in both orientations
#
# *About 75 minutes. You need [lesson 34](34_fp8.ipynb) and [lesson 14](14_tensor_cores.ipynb).*
#
# **The question.** Lesson 34 rounds matrices to one byte in NumPy. In a training step a kernel has to do it, for every
# matrix that a product reads, and the product must become faster by more than that costs. How does a kernel round without
# `frexp`, and why does each matrix need its codes twice?
#
# You will write the two halves of the kernel that writes codes: rounding in the bits of a float, and the transposed copy
# that Hopper's products need.

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
import numpy as np
from numba import cuda, float32, int32, uint8
from numba.cuda.libdevice import float_as_int

from xtrain import lesson

# fraction bits, exponent of the smallest normal number, largest number
FORMATS = {
    "e4m3": (3, -6, 448.0),
    "e5m2": (2, -14, 57344.0),
    "bf16": (7, -126, float(np.uint32(0x7F7F0000).view(np.float32))),
}

# %% [markdown]
# The rounding of exercise 34.1, to compare with, on the four numbers of its first lines:


# %%
def round_to(v, fraction, least, most):
    """v: float32 of any shape -> the nearest numbers of a format, same shape, float."""
    a = np.minimum(np.abs(v), most)
    _, e = np.frexp(np.maximum(a, 2.0**least))  # 2^(e - 1) <= a < 2^e
    step = np.ldexp(np.float32(1), e - 1 - fraction)
    return np.copysign(np.rint(a / step) * step, v)


print(round_to(np.array([0.3, 1.06, 3.3, 500.0], np.float32), *FORMATS["e4m3"]))

# %% [markdown]
# ## Rounding in a kernel
#
# A kernel has no `frexp`, and needs none: a float32 *is* an exponent and a fraction. `float_as_int(a)` shows its bits: 8 of exponent, with 127 added, and 23 of
# fraction. To keep 2 bits of fraction, as in e5m2, drop the 21 lowest. Rounded to the nearest, halves to even:
#
# - add one less than half of what is dropped, `0xFFFFF`, plus the lowest bit that is kept: then a half carries only if that bit is 1;
# - shift right by 21. A carry out of the fraction raises the exponent by one, as it should;
# - the exponent of float32 counts from -127, that of e5m2 from -15. Subtract the difference, 112, at the exponent's place: `112 << 2`.
#
# Below $2^{-14}$ the steps stay $2^{-16}$, and there is a trick: a float32 from 128 to 256 has steps of $128 \cdot 2^{-23} = 2^{-16}$. So the *addition* of 128
# rounds a to a multiple of $2^{-16}$, halves to even, and the lowest bits of the sum count the multiples. Here is e5m2 as a whole:


# %% tags=["exercise"]
@cuda.jit(device=True)
def e5m2_code(v):
    """-> the code of the e5m2 number nearest to v: 0 to 255. Beyond the largest number: that one.
    NaN: 0x7F."""
    if v != v:
        return int32(0x7F)
    a = min(abs(v), float32(57344.0))
    if a < float32(2.0**-14):
        code = float_as_int(a + float32(128.0)) - float_as_int(float32(128.0))
    else:
        bits = float_as_int(a)
        code = ((bits + 0xFFFFF + ((bits >> 21) & 1)) >> 21) - (112 << 2)
    return int32(code | 0x80 if v < float32(0.0) else code)


# %% [markdown]
# A kernel that writes codes has two more duties, because it is the only one that sees the numbers. It notes the **largest** |x|, for the scale of the next step. Bits of floats that are not negative are in the
# order of the floats, so `cuda.atomic.max` on the *bits*, an int32, does it: a GPU has no atomic maximum of floats. The result is the same in any order. And it **counts** what went wrong: numbers that saturated, and numbers that were infinite or NaN.
#
# An infinite number must not saturate: 448 looks healthy, and would hide that the training has broken down. It becomes NaN, which the loss shows.
# (`e5m2_code` alone does saturate it: a kernel has to ask for infinity before it rounds.)
#
# ## Exercise 45.1: codes of e4m3


# %% tags=["exercise"]
@cuda.jit
def encode_kernel(codes_n, largest_1, counts_2, x_n, scale_1):
    """codes[i] = the e4m3 code of the number nearest to x[i] / scale[0], halves to even.

    Grid ceil(n / 64), block 64: a thread per number. x, scale: float32, scale > 0.
    codes: uint8, the sign in the highest bit. Beyond 448: the code of 448, 0x7E, with x's sign. NaN
    and both infinities: 0x7F.
    largest: (1,) int32, 0 at first: the bits of the largest |x[i]|; those of infinity or of a NaN
    if an x[i] is not finite.
    counts: (2,) int64, add to them: how many x[i] are finite with |x[i] / scale| > 448; how many
    are not finite.
    """
    # YOUR CODE


# %%
lesson.check("45.1", encode_kernel)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# e4m3 keeps 3 bits, so 20 are dropped, and its exponent counts from -7: `120 << 3`. Below $2^{-6}$ its steps are $2^{-9}$, which are the steps of a float32
# from $2^{14}$ on.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `abs(x_n[i]) < float32(np.inf)` is false for infinity and for NaN. Ask x itself: x / scale may overflow where x is finite. Counts: `cuda.atomic.add(counts_2, 0, 1)`.
#
# </details>


# %% tags=["solution"]
# Solution 45.1
@cuda.jit
def encode_kernel_solution(codes_n, largest_1, counts_2, x_n, scale_1):
    """codes[i] = the e4m3 code of the number nearest to x[i] / scale[0], halves to even.

    Grid ceil(n / 64), block 64: a thread per number. x, scale: float32, scale > 0.
    codes: uint8, the sign in the highest bit. Beyond 448: the code of 448, 0x7E, with x's sign. NaN
    and both infinities: 0x7F.
    largest: (1,) int32, 0 at first: the bits of the largest |x[i]|; those of infinity or of a NaN
    if an x[i] is not finite.
    counts: (2,) int64, add to them: how many x[i] are finite with |x[i] / scale| > 448; how many
    are not finite.
    """
    i = cuda.grid(1)
    if i < x_n.size:
        size = abs(x_n[i])
        a = abs(x_n[i] / scale_1[0])
        code = 0x7F
        if size < float32(np.inf):
            if a > float32(448.0):
                a = float32(448.0)
                cuda.atomic.add(counts_2, 0, 1)
            if a < float32(2.0**-6):
                code = float_as_int(a + float32(16384.0)) - float_as_int(float32(16384.0))
            else:
                bits = float_as_int(a)
                code = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
            if x_n[i] < float32(0.0):
                code = code | 0x80
        else:
            size = float32(np.inf)
            cuda.atomic.add(counts_2, 1, 1)
        codes_n[i] = code
        cuda.atomic.max(largest_1, 0, float_as_int(size))


encode_kernel = lesson.yours(encode_kernel, encode_kernel_solution)


# %% [markdown]
# The example from above: the last maximum was 7, so the scale is 14 / 448. Then comes a 20, and an infinity:

# %%
x_n = lesson.array(np.array([3, -0.4, 7, 20, np.inf], np.float32))
scale_1 = lesson.array(np.array([2 * 7 / 448], np.float32))
codes_n = lesson.array(np.zeros(5, np.uint8))
largest_1 = lesson.array(np.zeros(1, np.int32))
counts_2 = lesson.array(np.zeros(2, np.int64))
lesson.launch(encode_kernel, 1, 64, codes_n, largest_1, counts_2, x_n, scale_1)
print("codes  ", *(f"{c:#04x}" for c in lesson.host(codes_n)))
print("largest", lesson.host(largest_1).view(np.float32)[0], "- so the scale stays")
print("saturated, not finite:", *lesson.host(counts_2))

# %% [markdown]
# On a GPU that has fp8 the rounding is one instruction for two numbers, `cvt.rn.satfinite.e4m3x2.f32`. Yours runs on every GPU.
#
# ## Three products and a transposed copy
#
# A layer $y = x\,w^T$ has three products in a step. A tensor core reads a register of 32 bits from each operand: two neighbouring bf16 numbers, or four of
# fp8. Neighbouring along which axis? Along the one that is *summed*, K. If a matrix lies in memory with K contiguous ("K-major"), such registers are
# loaded as they are. For bf16, Hopper's instruction can transpose a tile on its way (wgmma, of [lesson 23](23_hopper.ipynb), has a flag for it, and `ldmatrix`, of [lesson 14](14_tensor_cores.ipynb), has `.trans`). Both move units of two bytes. **For fp8 there is neither**:
# one byte is not a unit that they can move. So each operand must lie in memory with the summed axis last:
#
# | product | summed over | reads | which is |
# |---|---|---|---|
# | y (N, O) = x w^T | I | x (N, I), w (O, I) | as they lie |
# | dx (N, I) = dy w | O | dy (N, O), w^T (I, O) | w transposed |
# | dw (O, I) = dy^T x | N | dy^T (O, N), x^T (I, N) | both transposed |
#
# Every matrix is needed twice, as codes and as transposed codes:

# %%
places = {
    "x": (0, 0.5), "w": (0, 2.5), "dy": (0, 4.5),
    "codes of x": (1, 0), "codes of x^T": (1, 1), "codes of w": (1, 2), "codes of w^T": (1, 3),
    "codes of dy": (1, 4), "codes of dy^T": (1, 5),
    "y = x w^T": (2.1, 1), "dx = dy w": (2.1, 3), "dw = dy^T x": (2.1, 5),
}  # fmt: skip
edges = [(x, f"codes of {x}{turned}") for x in ("x", "w", "dy") for turned in ("", "^T")]
edges += [("codes of x", "y = x w^T"), ("codes of w", "y = x w^T"), ("codes of dy", "dx = dy w")]
edges += [("codes of w^T", "dx = dy w"), ("codes of dy^T", "dw = dy^T x")]
edges += [("codes of x^T", "dw = dy^T x")]
lesson.figures.graph(places, edges, "three matrices, six of codes, three products")

# %% [markdown]
# The transposed copy comes from the same kernel. A second one would read the matrix once more. But a warp that has 32 neighbours of a *row* has 32 numbers of different rows of the
# transpose, N bytes apart: 32 sectors for 32 bytes ([lesson 2](02_memory.ipynb)). So a block takes a **tile** of 32 x 32 codes through shared memory: it writes rows into it, waits, and
# reads columns from it.
#
# Mind the banks. A column of a tile with rows of 32 bytes lies in 4 of the 32 banks. With rows of 36 bytes, 9 words, the words of a column are in 32 different banks.
#
# ## Exercise 45.2: both orientations


# %% tags=["exercise"]
@cuda.jit
def both_kernel(codes_NK, codes_KN, x_NK, scale_1):
    """codes[n, k] = e5m2_code(x[n, k] / scale[0]), and the same transposed: codes_KN[k, n].

    Grid (ceil(K / 32), ceil(N / 32)), block (32, 8): block (i, j) has the tile of columns from 32 i
    and rows from 32 j on, a thread 4 of its rows. x, float32, is read once.
    A warp (32 threads of one threadIdx.y) reads and writes 32 neighbours in each of the three
    arrays.
    """
    # YOUR CODE


# %%
lesson.check("45.2", both_kernel)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `tile = cuda.shared.array((32, 36), uint8)`. `for r in range(cuda.threadIdx.y, 32, 8)` goes through the rows of the tile, with threadIdx.x as column. Then a barrier,
# which all threads reach, and the same loop over the columns.
#
# </details>
# <details><summary>Hint 2</summary>
#
# In the second loop, threadIdx.x is the *row* of the tile: `codes_KN[k0 + c, n0 + x] = tile[x, c]`. Its bounds are k0 + c < K and n0 + x < N.
#
# </details>


# %% tags=["solution"]
# Solution 45.2
@cuda.jit
def both_kernel_solution(codes_NK, codes_KN, x_NK, scale_1):
    """codes[n, k] = e5m2_code(x[n, k] / scale[0]), and the same transposed: codes_KN[k, n].

    Grid (ceil(K / 32), ceil(N / 32)), block (32, 8): block (i, j) has the tile of columns from 32 i
    and rows from 32 j on, a thread 4 of its rows. x, float32, is read once.
    A warp (32 threads of one threadIdx.y) reads and writes 32 neighbours in each of the three
    arrays.
    """
    tile = cuda.shared.array((32, 36), uint8)
    N, K = x_NK.shape
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    k0, n0 = cuda.blockIdx.x * 32, cuda.blockIdx.y * 32
    for r in range(y, 32, 8):
        if n0 + r < N and k0 + x < K:
            code = e5m2_code(x_NK[n0 + r, k0 + x] / scale_1[0])
            codes_NK[n0 + r, k0 + x] = code
            tile[r, x] = code
    cuda.syncthreads()  # the tile is complete
    for c in range(y, 32, 8):
        if k0 + c < K and n0 + x < N:
            codes_KN[k0 + c, n0 + x] = tile[x, c]


both_kernel = lesson.yours(both_kernel, both_kernel_solution)


# %% [markdown]
# ## Measure: what a warp does
#
# In both halves, in the simulator: sectors per instruction, and passes of an access to the tile.

# %%
from xtrain.simulator import sim

x = sim(np.random.default_rng(5).normal(size=(32, 64)).astype(np.float32))
codes = sim(np.zeros((32, 64), np.uint8)), sim(np.zeros((64, 32), np.uint8))
trace = lesson.traced(both_kernel, (2, 1), (32, 8), *codes, x, sim(np.ones(1, np.float32)))
for name in ("x_NK", "codes_NK", "codes_KN"):
    t = trace.traffic(name)
    print(f"{name:9} {t.sectors / t.requests:.0f} sectors, {t.efficiency:.0%} of their bytes used")
print("tile      passes:", max(trace.bank_conflicts()))

# %% [markdown]
# The library's kernel has tiles of 128 x 128, and moves 16 bytes per access: 16 neighbouring *codes of a column* have to be in one thread's registers. It reads words of 4 codes, and transposes
# 4 x 4 codes at a time with byte permutations.
#
# ## How many bits does a sum have?
#
# A product of two e4m3 numbers has 8 significant bits, and a sum of thousands of them needs many more. One would expect float32. But Hopper's tensor cores add fp8 products with
# about 14 bits (DeepSeek-AI 2024 found it in training). xtrain's test measured an error of $3.4 \cdot 10^{-4}$ of the largest sum on an H100, with 1,040 terms. A simple
# model of such a sum: after every 32 terms, which are one instruction, it is rounded to 14 bits. You have the function for that:

# %%
rng = np.random.default_rng(4)
a, b = (round_to(rng.normal(size=(64, 16384)).astype(np.float32), *FORMATS["e4m3"]) for _ in "ab")


def summed(K, bits, piece=32):
    """The sums over the first K terms, rounded to so many bits after each piece."""
    total = np.zeros((64, 64), np.float32)
    for k in range(0, K, piece):
        part = a[:, k : k + piece] @ b[:, k : k + piece].T
        total = round_to(total + part, bits - 1, -126, FORMATS["bf16"][2])
    return total


print("terms     error of sums of 14 bits, relative to the largest     of 24 bits")
for K in (1024, 4096, 16384):
    true = a[:, :K].astype(np.float64) @ b[:, :K].T.astype(np.float64)
    errors = [np.abs(summed(K, bits) - true).max() / np.abs(true).max() for bits in (14, 24)]
    print(f"{K:6,} {errors[0]:43.0e} {'below 1e-6' if errors[1] < 1e-6 else '':>24}")

# %% [markdown]
# The errors of the model have the size of the one that was measured. They grow slowly with the number of terms, and are
# small next to the errors of the numbers themselves: if both factors of every term are off by 2.6 %, in any direction,
# a typical sum is off by about 4 %. (Sums whose terms all have one sign suffer more: they grow, and each new term loses
# its lower bits. DeepSeek adds the partial sums of 128 terms in float32, by ordinary instructions. xtrain does not, and
# cuBLASLt's "fast accumulation", which is coarser still, is off.)
#
# ## What is in fp8, and what stays
#
# | in fp8 | in bf16 | in float32 |
# |---|---|---|
# | the three products of every matrix of the blocks: QKV, output, gate and up, down | attention's own products, embedding, head, the outputs y and dx | master weights, the residual stream, AdamW's state, weight gradients, norms' statistics, softmax, the loss |
#
# The head stays by default, because its errors go into the loss with no layer after them (`--fp8-head` moves it, in chunks, with e4m3 for its gradient). Attention stays because its products are inside a kernel of its own, and the exponentials of softmax turn an absolute error of a score into a relative error of a probability.
# How much of the arithmetic is left for fp8? Operations per token, 6 per weight and $6 L H D T$ for causal attention:

# %%
shapes = {  # layers, width, width of Q, of K and V, of the MLP, vocabulary, tokens of a sequence
    "gpt124m, T = 1024": (12, 768, 768, 768, 2048, 50304, 1024),
    "Qwen3-0.6B, T = 2048": (28, 1024, 2048, 1024, 3072, 151936, 2048),
    "TinyLlama-1.1B, T = 2048": (22, 2048, 2048, 256, 5632, 32000, 2048),
}
print("                           blocks   head   attention   if fp8 halves the blocks")
for name, (L, C, Q, KV, F, vocabulary, T) in shapes.items():
    blocks = L * C * (2 * Q + 2 * KV + 3 * F)
    head = C * vocabulary
    attention = L * Q * T
    total = blocks + head + attention
    share = [100 * part / total for part in (blocks, head, attention)]
    print(f"{name:25} {share[0]:6.0f} % {share[1]:4.0f} % {share[2]:9.0f} %", end="")
    print(f" {total / (total - blocks / 2):13.2f} times as fast")

# %% [markdown]
# ## The improvement: fewer bytes
#
# That is more than a step can gain, since it counts only arithmetic. And the codes have to be written: per number 2 bytes are read (bf16) and 2 written (codes, both ways). How wide must a layer be for that to pay?
# For a given number of tokens the operations grow with the *square* of the width, and the codes in proportion to it. By the data sheet of an H100 (989 TFLOP/s in bf16, 1,979 in fp8, 3.35 TB/s), a square layer and 16,384 tokens:

# %%
print("width   saved by fp8, µs   writing codes, µs")
widths = (256, 512, 768, 1024, 2048, 4096)
tokens = 16384
saved = [3 * 2 * tokens * C * C * (1 / 989e6 - 1 / 1979e6) for C in widths]
codes = [(2 * tokens * C + C * C) * 4 / 3.35e6 for C in widths]
for C, s, c in zip(widths, saved, codes):
    print(f"{C:5} {s:18.0f} {c:19.0f}")
times = {"saved by the products": saved, "writing codes": codes}
figure = lesson.figures.curves(widths, times, "width of the layer", "microseconds")
figure.axes[0].minorticks_off()
figure.axes[0].set_xticks(widths, widths)
figure

# %% [markdown]
# Below a width of about 800 fp8 would be *slower*, if it were done like this. (Real products reach less than the data sheet, so they have more to save.) The library saves bytes in two ways:
#
# - **Fusion.** A matrix that only products read is never written in bf16. The kernel that computes SwiGLU rounds its values in registers: it reads gate and up, and writes codes in both orientations. SwiGLU's backward pass, the norms and, with `--fp8-head`, the gradient of the loss do the same.
# - **One pass.** Delayed scaling, with the maximum and the counts in the same kernel that writes both orientations. And backward reads the codes of $x^T$ that forward has written: half of bf16's bytes of saved activations.
#
# What was measured on a GPU, and what was not, is in the [known issues](known_issues.md).
#
# ## The library's kernel
#
# Four numbers (45.1), and the kernel: 45.1 and 45.2 in one, for four sources of values. It also keeps the scale's state (lesson 34).

# %%
from xtrain.kernels import fp8
from xtrain.kernels.cast import BFLOAT16
from xtrain.kernels.primitives import codes as conversions
from xtrain.nn import fp8 as training

lesson.source(fp8.make_encode4)
lesson.source(fp8.make_fp8_kernel)

# %% [markdown]
# The rounding (45.1) is the hardware's, and the 4 x 4 transposes are byte permutations:

# %%
lesson.source(conversions._codes4)
lesson.source(conversions.transpose_codes)

# %% [markdown]
# A layer with its three products. `rows` are the codes, `columns` the transposed ones: compare with the table above.

# %%
lesson.source(training._product)
lesson.source(training._input_gradient)
lesson.source(training._weight_gradient)
lesson.source(training.Fp8Linear)

# %% [markdown]
# Do they agree with yours? The library's kernel runs in the simulator, on one tile of 128 x 128:

# %%
x = rng.normal(size=(128, 128)).astype(np.float32)
x[5, 6] = 1000.0  # saturates
x_bf16 = np.asarray(round_to(x, *FORMATS["bf16"]), np.float32)
state = [sim(s) for s in (np.ones(1, np.float32), np.zeros(1, np.int32), np.zeros(2, np.int64))]
theirs = fp8.fp8(sim(x_bf16.astype(BFLOAT16)), fp8.Slot(*state, "e4m3"))
x_n = lesson.array(x_bf16.ravel())
scale_1 = lesson.array(np.ones(1, np.float32))
codes_n = lesson.array(np.zeros(x.size, np.uint8))
largest_1 = lesson.array(np.zeros(1, np.int32))
counts_2 = lesson.array(np.zeros(2, np.int64))
lesson.launch(encode_kernel, x.size // 64, 64, codes_n, largest_1, counts_2, x_n, scale_1)
mine = lesson.host(codes_n).reshape(128, 128)
print("codes:     ", np.array_equal(np.asarray(theirs.codes_NK), mine))
print("transposed:", np.array_equal(np.asarray(theirs.codes_KN), mine.T))
print(
    "largest:   ", np.asarray(state[1]).view(np.float32)[0], "saturated:", *np.asarray(state[2])[:1]
)
print("numbers:   ", np.array_equal(fp8.decode(theirs.rows), round_to(x_bf16, *FORMATS["e4m3"])))

# %% [markdown]
# ## What did not help
#
# *Weight gradients in bf16.* Then $x^T$ and $dy^T$ need no codes, but a third of the arithmetic stays as slow as it was.
#
# *A second kernel that transposes the codes.* It reads and writes every byte once more, and a launch for every matrix is
# added. The tile in shared memory costs neither.
#
# ## More exercises
#
# 1. In 45.2 x is float32. If it were bf16, how many bytes per number would each of the two stages move, and how long is the access of a warp?
# 2. Three matrices of a layer need codes in both orientations: y reads two of the six, dx two, dw two. Which of the six are
#    not needed by a layer whose weights are frozen and whose input needs no gradient?
#
# <details><summary>Solutions</summary>
#
# 1: It reads 2 bytes and writes 1 + 1. A warp reads 64 neighbouring bytes and writes 32: one sector. That is why the
# library's threads read 16 bytes each. 2: Only y is computed, so the transposed ones and both of dy: four of the six.
#
# </details>
#
# ## Sources
#
# - DeepSeek-AI, *DeepSeek-V3 Technical Report*, 2024: scales of 1 x 128 numbers, and sums of about 14 bits on Hopper.
# - NVIDIA, *PTX ISA*: `cvt`, `mma` and `wgmma` for .e4m3 and .e5m2; which operands can be transposed.
