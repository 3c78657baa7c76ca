"""SwiGLU of gate and up in two arrays.   gate, up, y: n elements, any shape

swiglu.py is the same with both in one packed array; here each is the result of its own matrix
product, as in models whose layers keep two weights.

    forward    s = sigmoid(gate)        y = gate s up
    backward   dgate = dy up (s + gate s (1 - s))        dup = dy gate s

Saved: gate and up. Bytes moved, forward: read gate and up, write y. Backward: read dy, gate and
up, write dgate and dup.
"""

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
from .swiglu import sigmoid, silu_bwd_ref, silu_ref


# ----------------------------------------------------------------------------- reference
def silu_mul_ref(gate, up):
    """Return y = silu(gate) up."""
    return silu_ref(gate) * up


def silu_mul_bwd_ref(dy, gate, up):
    """Return dgate, dup."""
    return silu_bwd_ref(dy * up, gate), dy * silu_ref(gate)


# ----------------------------------------------------------------------------- kernels
@device
def silu_mul_fwd_chunks(y_n, gate_n, up_n, first, vectorized):
    """Set y on the thread's chunks."""
    gate = cuda.local.array((STEPS, CHUNK), float32)
    up = cuda.local.array((STEPS, CHUNK), float32)
    n = y_n.size
    for s in range(STEPS):
        load(gate[s], gate_n, first + s * STRIDE, GAP, n, vectorized)
        load(up[s], up_n, first + s * STRIDE, GAP, n, vectorized)
    for s in range(STEPS):
        for j in range(CHUNK):
            gate[s, j] = gate[s, j] * sigmoid(gate[s, j]) * up[s, j]
        store(y_n, first + s * STRIDE, GAP, n, gate[s], vectorized)


@kernel(BLOCK)
def silu_mul_fwd_kernel(y_n, gate_n, up_n, aligned):
    """Grid ceil(n / TILE), block BLOCK."""
    first = first_element()
    if can_vectorize(first, y_n.size, aligned):
        silu_mul_fwd_chunks(y_n, gate_n, up_n, first, True)
    else:
        silu_mul_fwd_chunks(y_n, gate_n, up_n, first, False)


@device
def silu_mul_bwd_chunks(dgate_n, dup_n, dy_n, gate_n, up_n, first, vectorized):
    """Set dgate and dup on the thread's chunks."""
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
            sig = sigmoid(gate[s, j])
            silu = gate[s, j] * sig
            gate[s, j] = d[s, j] * up[s, j] * (sig + silu * (float32(1.0) - sig))
            up[s, j] = d[s, j] * silu
        store(dgate_n, first + s * STRIDE, GAP, n, gate[s], vectorized)
        store(dup_n, first + s * STRIDE, GAP, n, up[s], vectorized)


@kernel(BLOCK)
def silu_mul_bwd_kernel(dgate_n, dup_n, dy_n, gate_n, up_n, aligned):
    """Grid ceil(n / TILE), block BLOCK."""
    first = first_element()
    if can_vectorize(first, dy_n.size, aligned):
        silu_mul_bwd_chunks(dgate_n, dup_n, dy_n, gate_n, up_n, first, True)
    else:
        silu_mul_bwd_chunks(dgate_n, dup_n, dy_n, gate_n, up_n, first, False)


# ----------------------------------------------------------------------------- launchers
def silu_mul_fwd(gate: Array, up: Array) -> Array:
    """Return y = silu(gate) up like gate; gate, up: any shape, both float32 or both bf16."""
    check_array("silu_mul", "gate", gate, gate.shape, FLOATS)
    check_array("silu_mul", "up", up, gate.shape, (dtype_name(gate.dtype),))
    if on_host(gate, up):
        return silu_mul_ref(wide(gate), wide(up)).astype(gate.dtype, copy=False)
    y = empty_like(gate)
    launch_flat(silu_mul_fwd_kernel, y, gate, up)
    return y


def silu_mul_bwd(dy: Array, gate: Array, up: Array) -> tuple[Array, Array]:
    """Return dgate and dup; dy, gate, up: same shape and dtype, float32 or bf16."""
    op = "silu_mul backward"
    check_array(op, "gate", gate, gate.shape, FLOATS)
    for name, x in (("up", up), ("dy", dy)):
        check_array(op, name, x, gate.shape, (dtype_name(gate.dtype),))
    if on_host(dy, gate, up):
        dgate, dup = silu_mul_bwd_ref(wide(dy), wide(gate), wide(up))
        return dgate.astype(gate.dtype, copy=False), dup.astype(gate.dtype, copy=False)
    dgate = empty_like(gate)
    dup = empty_like(gate)
    launch_flat(silu_mul_bwd_kernel, dgate, dup, dy, gate, up)
    return dgate, dup
