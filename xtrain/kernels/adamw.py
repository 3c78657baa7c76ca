"""AdamW (Loshchilov & Hutter 2019) over the whole arena in one launch.   w, g, m, v: (n,)

    g  = factor grad                              the clip factor of grad_norm.py
    w  = w (1 - lr weight_decay)                  decoupled decay, on elements [0, n_decay) only
    m  = m + (1 - beta1) (g - m)                  running mean of g
    v  = beta2 v + (1 - beta2) g^2                running mean of g^2
    w  = w - lr / (1 - beta1^t)  m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

The order of operations is that of torch.optim.AdamW. m and v start at zero, so after t steps the
weights of their terms add up to only 1 - beta^t; dividing by it corrects that bias. 1 - beta^t is
computed on the host in float64: in float32 the subtraction would lose digits. The values that
change from step to step are passed in a device array, hyper = [lr, 1 - beta1^t, sqrt(1 - beta2^t)],
so a captured step can be replayed with new values.

A compiler may contract a*b + c into one instruction, with one rounding instead of two. Then the GPU
and the reference would differ, and so would two compilers. Every operation here rounds once and is
never contracted (the *_rn functions of libdevice), so the kernel equals its float32 reference bit
for bit.

A factor of NaN skips the step (see skip_nonfinite.py): w, m, v and the copy stay unchanged.

The same pass can write a bf16 copy of the new weights, which the next forward reads, and zero the
gradient, to which the next backward adds. Both must be written in any case, so this saves reading w
and g a second time.
Bytes moved: read w, g, m, v, write w, m, v: 28 per element; 2 more for the copy, 4 more for the
zeros.
"""

import functools
import math

import numpy as np

from ..device import Array
from .primitives.flat import BLOCK, CHUNK, GAP, QUAD, STRIDE, load, on_16_bytes, position, store
from .primitives.ptx import device, kernel
from .runtime.compiler import cuda, fadd_rn, fdiv_rn, float32, fmul_rn, fsqrt_rn, fsub_rn, int64
from .runtime.cost import declare_cost
from .runtime.launch import check, check_array, launch, on_host

TILE = STRIDE  # one chunk per thread: its four arrays keep enough bytes in flight


# ----------------------------------------------------------------------------- reference
def adamw_ref(
    w_n,
    g_n,
    m_n,
    v_n,
    factor_1,
    hyper_3,
    n_decay,
    beta1,
    beta2,
    eps,
    weight_decay,
    copy_n=None,
    zero_grad=False,
):
    """Update w, m and v in place, in their dtype.

    Writes the new w to copy if given; zeroes g if zero_grad.
    """
    if np.isnan(factor_1[0]):
        if zero_grad:
            g_n[...] = 0
        return
    number = w_n.dtype.type
    lr, correction1, root2 = hyper_3.astype(w_n.dtype)
    scaled_n = g_n * number(factor_1[0])
    w_n[:n_decay] *= 1 - lr * number(weight_decay)
    m_n += number(1 - beta1) * (scaled_n - m_n)
    v_n *= number(beta2)
    v_n += number(1 - beta2) * scaled_n * scaled_n
    w_n -= lr / correction1 * m_n / (np.sqrt(v_n) / root2 + number(eps))
    if copy_n is not None:
        copy_n[...] = w_n
    if zero_grad:
        g_n[...] = 0


def adamw_hyper(lr: float, beta1: float, beta2: float, step: int, dtype=np.float32) -> np.ndarray:
    """Return the values that change with the step: [lr, 1 - beta1^step, sqrt(1 - beta2^step)].

    step counts from 1. Raises ValueError for a smaller one.
    """
    check(step >= 1, f"adamw: step is {step}, the first step is 1")
    return np.array([lr, 1 - beta1**step, math.sqrt(1 - beta2**step)], dtype)


# ----------------------------------------------------------------------------- kernel
@device
def update(g, w, m, v, decay, rest1, beta2, rest2, rate, root2, eps):
    """Return the new w, m, v of one element. Every operation rounds once."""
    w = fmul_rn(w, decay)
    m = fadd_rn(m, fmul_rn(rest1, fsub_rn(g, m)))
    v = fadd_rn(fmul_rn(v, beta2), fmul_rn(fmul_rn(rest2, g), g))
    size = fadd_rn(fdiv_rn(fsqrt_rn(v), root2), eps)
    return fsub_rn(w, fdiv_rn(fmul_rn(rate, m), size)), m, v


@functools.cache
def make_adamw_kernel(with_copy, zero_grad):
    """Return one of four kernels: with or without the bf16 copy, and zeroing the gradient."""

    @kernel(BLOCK)
    def adamw_kernel(
        w_n,
        m_n,
        v_n,
        copy_n,
        g_n,
        factor_1,
        hyper_3,
        n_decay,
        rest1,
        beta2,
        rest2,
        eps,
        weight_decay,
        aligned,
    ):
        """Grid ceil(n / TILE), block BLOCK.

        rest1 = 1 - beta1, rest2 = 1 - beta2. copy_n is unused without a copy.
        """
        g = cuda.local.array(CHUNK, float32)
        w = cuda.local.array(CHUNK, float32)
        m = cuda.local.array(CHUNK, float32)
        v = cuda.local.array(CHUNK, float32)
        n = w_n.size
        i = int64(cuda.blockIdx.x) * TILE + cuda.threadIdx.x * QUAD
        vectorized = aligned and i + GAP + QUAD <= n
        load(g, g_n, i, GAP, n, vectorized)
        load(w, w_n, i, GAP, n, vectorized)
        load(m, m_n, i, GAP, n, vectorized)
        load(v, v_n, i, GAP, n, vectorized)
        factor = factor_1[0]
        lr = hyper_3[0]
        root2 = hyper_3[2]
        rate = fdiv_rn(lr, hyper_3[1])
        keep = fsub_rn(float32(1.0), fmul_rn(lr, weight_decay))
        for j in range(CHUNK):
            decay = keep if position(i, GAP, j) < n_decay else float32(1.0)  # w times 1 is w
            scaled = fmul_rn(g[j], factor)
            w[j], m[j], v[j] = update(
                scaled, w[j], m[j], v[j], decay, rest1, beta2, rest2, rate, root2, eps
            )
            g[j] = float32(0.0)
        # False for NaN. The test is here and not at the top, where all loads would wait for it.
        if factor == factor:
            store(w_n, i, GAP, n, w, vectorized)
            store(m_n, i, GAP, n, m, vectorized)
            store(v_n, i, GAP, n, v, vectorized)
            if with_copy:
                store(copy_n, i, GAP, n, w, vectorized)
        if zero_grad:
            store(g_n, i, GAP, n, g, vectorized)

    updated = ["w_n", "m_n", "v_n"]
    if zero_grad:
        updated.append("g_n")
    declare_cost(adamw_kernel, in_place=updated)
    return adamw_kernel


# ----------------------------------------------------------------------------- launcher
def adamw(
    w_n: Array,
    g_n: Array,
    m_n: Array,
    v_n: Array,
    factor_1: Array,
    hyper_3: Array,
    n_decay: int,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    copy_n: Array | None = None,
    zero_grad: bool = False,
) -> None:
    """Do one optimizer step, in place on w, m and v.

    w, g, m, v: (n,) float32.
    factor: (1,) float32, multiplies g: 1 for no clipping, NaN to skip the step.
    hyper: (3,) float32: adamw_hyper(...), on the device of w.
    n_decay: only elements [0, n_decay) of w decay.
    copy: (n,) bf16, becomes the new w, rounded.
    zero_grad: set g to zero.
    """
    n = w_n.size
    check_array("adamw", "w", w_n, (n,))
    check_array("adamw", "g", g_n, (n,))
    check_array("adamw", "m", m_n, (n,))
    check_array("adamw", "v", v_n, (n,))
    check_array("adamw", "factor", factor_1, (1,))
    check_array("adamw", "hyper", hyper_3, (3,))
    check(0 <= n_decay <= n, f"adamw: n_decay is {n_decay}, expected 0 to {n}")
    copy = w_n  # a kernel argument cannot be None
    if copy_n is not None:
        check_array("adamw", "copy", copy_n, (n,), ("bfloat16",))
        copy = copy_n
    arrays = (w_n, m_n, v_n, copy, g_n, factor_1, hyper_3)
    if on_host(*arrays):
        constants = (n_decay, beta1, beta2, eps, weight_decay)
        adamw_ref(w_n, g_n, m_n, v_n, factor_1, hyper_3, *constants, copy_n, zero_grad)
        return
    # 1 - beta in float64, then rounded: 1 - 0.999 in float32 would be wrong in the fifth digit
    rates = [np.float32(c) for c in (1 - beta1, beta2, 1 - beta2, eps, weight_decay)]
    adamw_kernel = make_adamw_kernel(copy_n is not None, bool(zero_grad))
    aligned = on_16_bytes(*arrays[:5])
    launch(adamw_kernel, -(-n // TILE), BLOCK, *arrays, n_decay, *rates, aligned)
