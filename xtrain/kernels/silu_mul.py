"""SwiGLU and GeGLU of gate and up in two arrays.   gate, up, y: n elements, any shape

swiglu.py is the same with both in one packed array; here each is the result of its own matrix
product, as in models whose layers keep two weights.

    forward    s = sigmoid(gate)        y = gate s up
    backward   dgate = dy up (s + gate s (1 - s))        dup = dy gate s

GeGLU has the s of GELU and its derivative, which swiglu.py explains.
Saved: gate and up. Bytes moved, forward: read gate and up, write y. Backward: read dy, gate and
up, write dgate and dup.
"""

import functools

from ..device import Array
from .primitives.flat import (
    BLOCK,
    CHUNK,
    GAP,
    STEPS,
    STRIDE,
    can_vectorize,
    first_element,
    launch_flat,
    load,
    store,
)
from .primitives.ptx import device, kernel
from .runtime.compiler import cuda, float32
from .runtime.launch import FLOATS, check_array, dtype_name, empty_like, on_host, wide
from .swiglu import GELU_A, GELU_B, gate_ref, gelu_sigmoid, sigmoid


# ----------------------------------------------------------------------------- reference
def silu_mul_ref(gate, up, gelu=False):
    """Return y = silu(gate) up; or gelu(gate) up."""
    y = gate_ref(gate, gelu)
    y *= gate
    y *= up
    return y


def silu_mul_bwd_ref(dy, gate, up, gelu=False):
    """Return dgate, dup."""
    s = gate_ref(gate, gelu)
    silu = gate * s
    change = silu * (1 - s)
    if gelu:
        change *= GELU_A + 3 * GELU_B * gate * gate
    change += s  # silu'(gate)
    return dy * up * change, dy * silu


# ----------------------------------------------------------------------------- kernels
@functools.cache
def make_silu_mul_fwd_kernel(gelu=False):
    """Return the forward kernel. gelu: GeGLU."""
    factor = gelu_sigmoid if gelu else sigmoid

    @device
    def chunks(y_n, gate_n, up_n, first, vectorized):
        """Set y on the thread's chunks."""
        gate = cuda.local.array((STEPS, CHUNK), float32)
        up = cuda.local.array((STEPS, CHUNK), float32)
        n = y_n.size
        for s in range(STEPS):
            load(gate[s], gate_n, first + s * STRIDE, GAP, n, vectorized)
            load(up[s], up_n, first + s * STRIDE, GAP, n, vectorized)
        for s in range(STEPS):
            for j in range(CHUNK):
                gate[s, j] = gate[s, j] * factor(gate[s, j]) * up[s, j]
            store(y_n, first + s * STRIDE, GAP, n, gate[s], vectorized)

    @kernel(BLOCK)
    def silu_mul_fwd_kernel(y_n, gate_n, up_n, aligned):
        """Grid ceil(n / TILE), block BLOCK."""
        first = first_element()
        if can_vectorize(first, y_n.size, aligned):
            chunks(y_n, gate_n, up_n, first, True)
        else:
            chunks(y_n, gate_n, up_n, first, False)

    return silu_mul_fwd_kernel


@functools.cache
def make_silu_mul_bwd_kernel(gelu=False):
    """Return the backward kernel. gelu: GeGLU."""
    factor = gelu_sigmoid if gelu else sigmoid

    @device
    def chunks(dgate_n, dup_n, dy_n, gate_n, up_n, first, vectorized):
        """Set both gradients on the thread's chunks."""
        gate = cuda.local.array((STEPS, CHUNK), float32)
        up = cuda.local.array((STEPS, CHUNK), float32)
        d = cuda.local.array((STEPS, CHUNK), float32)
        n = dy_n.size
        for s in range(STEPS):
            load(gate[s], gate_n, first + s * STRIDE, GAP, n, vectorized)
            load(up[s], up_n, first + s * STRIDE, GAP, n, vectorized)
            load(d[s], dy_n, first + s * STRIDE, GAP, n, vectorized)
        for s in range(STEPS):
            for j in range(CHUNK):
                sig = factor(gate[s, j])
                silu = gate[s, j] * sig
                change = silu * (float32(1.0) - sig)
                if gelu:
                    change *= float32(GELU_A) + float32(3 * GELU_B) * gate[s, j] * gate[s, j]
                gate[s, j] = d[s, j] * up[s, j] * (sig + change)
                up[s, j] = d[s, j] * silu
            store(dgate_n, first + s * STRIDE, GAP, n, gate[s], vectorized)
            store(dup_n, first + s * STRIDE, GAP, n, up[s], vectorized)

    @kernel(BLOCK)
    def silu_mul_bwd_kernel(dgate_n, dup_n, dy_n, gate_n, up_n, aligned):
        """Grid ceil(n / TILE), block BLOCK."""
        first = first_element()
        if can_vectorize(first, dy_n.size, aligned):
            chunks(dgate_n, dup_n, dy_n, gate_n, up_n, first, True)
        else:
            chunks(dgate_n, dup_n, dy_n, gate_n, up_n, first, False)

    return silu_mul_bwd_kernel


# ----------------------------------------------------------------------------- launchers
def silu_mul_fwd(gate: Array, up: Array, gelu: bool = False) -> Array:
    """Return y = silu(gate) up like gate; gate, up: any shape, both float32 or both bf16.

    gelu: GeGLU.
    """
    check_array("silu_mul", "gate", gate, gate.shape, FLOATS)
    check_array("silu_mul", "up", up, gate.shape, (dtype_name(gate.dtype),))
    if on_host(gate, up):
        return silu_mul_ref(wide(gate), wide(up), gelu).astype(gate.dtype, copy=False)
    y = empty_like(gate)
    launch_flat(make_silu_mul_fwd_kernel(bool(gelu)), y, gate, up)
    return y


def silu_mul_bwd(dy: Array, gate: Array, up: Array, gelu: bool = False) -> tuple[Array, Array]:
    """Return dgate and dup; dy, gate, up: same shape and dtype, float32 or bf16. gelu: GeGLU."""
    op = "silu_mul backward"
    check_array(op, "gate", gate, gate.shape, FLOATS)
    for name, x in (("up", up), ("dy", dy)):
        check_array(op, name, x, gate.shape, (dtype_name(gate.dtype),))
    if on_host(dy, gate, up):
        dgate, dup = silu_mul_bwd_ref(wide(dy), wide(gate), wide(up), gelu)
        return dgate.astype(gate.dtype, copy=False), dup.astype(gate.dtype, copy=False)
    dgate = empty_like(gate)
    dup = empty_like(gate)
    launch_flat(make_silu_mul_bwd_kernel(bool(gelu)), dgate, dup, dy, gate, up)
    return dgate, dup
