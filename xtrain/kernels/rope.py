"""Rotary position embedding (Su et al. 2021).   x, y: (N, H, D)   cos, sin: (P, R), R = D / 2

A head is R planes; plane r is the pair (x_r, x_{r+R}), from the two halves of the head as in
Hugging Face. At position p it is rotated by the angle a = p f_r with f_r = theta^(-2r / D). Planes
with a high frequency distinguish near positions, those with a low frequency distant ones.

    forward    y_r     = x_r cos a - x_{r+R} sin a
               y_{r+R} = x_{r+R} cos a + x_r sin a
    backward   a rotation M(a) is orthogonal: the transpose of its Jacobian is its inverse, so
               dx = M(a)^T dy = M(-a) dy, the same kernel with -sin. Only the tables are saved.

M(a)^T M(b) = M(b - a), so the product of a query with a key depends only on their distance.
Row n has position n % T (sequences of T tokens, one after another) or positions_N[n].
x and y are float32 or bf16; the tables and the arithmetic are float32.
Bytes moved: read x, write y; the tables stay in cache.

Scaling for contexts longer than the model was trained on, with the keys of Hugging Face's configs
(rope_type, in older configs type). S0 is the trained length, S the longest sequence:
    linear     f / factor (Chen et al. 2023)
    dynamic    theta grows with S:  theta (factor S / S0 - (factor - 1))^(D / (D - 2))
    llama3     f for planes of high frequency, f / factor for those of low frequency, interpolated
               between
"""

import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..device import Array
from .primitives.flat import on_16_bytes
from .primitives.heads import NAN, HeadKernel, head_plan, make_head_ops
from .primitives.ptx import kernel, load1, store1
from .primitives.words import elements_per_vector
from .runtime.compiler import cuda, float32, int64, uint32
from .runtime.launch import (
    FLOATS,
    check,
    check_array,
    check_ids,
    empty,
    empty_like,
    launch,
    on_host,
    wide,
)

# Threads, approximately. The plain kernel: as many whole heads as fit, one thread per plane.
BLOCK = 256


# ----------------------------------------------------------------------------- tables
def rope_frequencies(
    head_dim: int,
    theta: float,
    scaling: Mapping[str, Any] | None = None,
    seq_len: int | None = None,
    max_seq_len: int | None = None,
) -> np.ndarray:
    """Return f (R,) float64, in radians per position. The arguments are those of rope_tables.

    Raises ValueError for an unknown scaling type, and for dynamic scaling without max_seq_len.
    """
    scaling = scaling or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "dynamic" and head_dim > 2:  # with one plane f is 1 for any theta
        if max_seq_len is None:
            raise ValueError("rope: dynamic scaling needs max_seq_len")
        stretch = scaling["factor"] * max(seq_len or 0, max_seq_len) / max_seq_len
        theta = theta * (stretch - (scaling["factor"] - 1)) ** (head_dim / (head_dim - 2))
    f_R = 1.0 / theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if kind == "linear":
        return f_R / scaling["factor"]
    if kind == "llama3":
        return _llama3(f_R, scaling, max_seq_len)
    if kind == "yarn":
        return _yarn(f_R, head_dim, theta, scaling)
    check(kind in ("default", "dynamic"), f"rope: scaling type {kind!r} is not supported")
    return f_R


def _llama3(f_R, scaling, max_seq_len):
    factor = scaling["factor"]
    low = scaling["low_freq_factor"]
    high = scaling["high_freq_factor"]
    trained = scaling.get("original_max_position_embeddings", max_seq_len)
    turns_R = trained * f_R / (2 * math.pi)  # of each plane within the trained length
    keep_R = (turns_R - low) / (high - low)  # 0: slow plane, divide by factor; 1: fast plane, keep
    blend_R = (1 - keep_R) * f_R / factor + keep_R * f_R
    return np.where(turns_R < low, f_R / factor, np.where(turns_R > high, f_R, blend_R))


def _yarn(f_R, head_dim, theta, scaling):
    """Return the frequencies of YaRN (Peng et al. 2023).

    Planes that turn less than beta_slow times within the trained length are slowed down by the
    factor, those that turn more than beta_fast times are kept, and between the two the share
    changes linearly with the plane.
    """
    trained = scaling["original_max_position_embeddings"]

    def plane(turns):
        """Return the plane that turns so often."""
        return head_dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first = max(math.floor(plane(scaling["beta_fast"])), 0)
    last = min(math.ceil(plane(scaling["beta_slow"])), head_dim - 1)
    slow_R = (np.arange(len(f_R)) - first) / (last - first if last != first else 0.001)
    slow_R = np.clip(slow_R, 0, 1)
    return slow_R * f_R / scaling["factor"] + (1 - slow_R) * f_R


def rope_tables(
    head_dim: int,
    length: int,
    theta: float,
    scaling: Mapping[str, Any] | None = None,
    seq_len: int | None = None,
    max_seq_len: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return cos, sin (P, R) float32 for positions 0 .. length - 1.

    They are computed in float64 and rounded once.
    scaling: as in Hugging Face's config; with YaRN both are multiplied by its attention_factor.
    seq_len: the longest sequence to be run; only dynamic scaling uses it.
    max_seq_len: the length that the model was trained for (max_position_embeddings; None: length);
        dynamic and llama3 scaling use it.
    Raises ValueError for an odd head_dim or an unknown scaling type.
    """
    check(head_dim % 2 == 0, f"rope: head_dim {head_dim} is odd, planes are pairs")
    f_R = rope_frequencies(head_dim, theta, scaling, seq_len, max_seq_len or length)
    angle_PR = np.arange(length, dtype=np.float64)[:, None] * f_R
    size = (scaling or {}).get("attention_factor", 1.0)  # YaRN's: scores grow by its square
    cos_PR = size * np.cos(angle_PR)
    sin_PR = size * np.sin(angle_PR)
    return cos_PR.astype(np.float32), sin_PR.astype(np.float32)


# ----------------------------------------------------------------------------- reference
def rope_ref(x_NHD, cos_PR, sin_PR, positions_N, sign=1, out=None):
    """Return y (N, H, D) = x [cos cos] + [x2 x1] [-sin sin].

    sign -1: the inverse, which is also the backward.
    """
    R = cos_PR.shape[1]
    cos_NR = cos_PR[positions_N]
    sin_NR = sign * sin_PR[positions_N]
    swapped_NHD = np.concatenate([x_NHD[..., R:], x_NHD[..., :R]], -1)
    swapped_NHD *= np.concatenate([-sin_NR, sin_NR], 1)[:, None]
    y_NHD = np.multiply(x_NHD, np.concatenate([cos_NR, cos_NR], 1)[:, None], out=out)
    y_NHD += swapped_NHD
    return y_NHD


# ----------------------------------------------------------------------------- kernels
@cuda.jit(device=True)
def cycle(n, T):
    """Return n % T for n, T < 2^32: a 64-bit division takes three times as long."""
    return int64(uint32(n) % uint32(T))


@cuda.jit(device=True)
def position_of(n, positions_N, T, P):
    """Return the position of row n < 2^32: n % T, or positions_N[n] if T is 0.

    -1 if it is outside the P rows of the tables.
    """
    if T > 0:
        return cycle(n, T)
    p = int64(positions_N[n])
    return p if p >= 0 and p < P else int64(-1)


@cuda.jit(device=True)
def angle(cos_PR, sin_PR, p, r):
    """Return cos, sin of plane r at position p; NaN where p is -1."""
    if p >= 0:
        return cos_PR[p, r], sin_PR[p, r]
    return NAN, NAN


@cuda.jit
def rope_plane_kernel(y, x, cos_PR, sin_PR, positions_N, H, T, sign):
    """Grid (N, ceil(H / heads)), block (R, heads). A thread rotates plane r of one head of token n.

    x, y: flat. sign: 1 rotates forward, -1 back. For heads of any width.
    """
    n = int64(cuda.blockIdx.x)
    r = cuda.threadIdx.x
    h = cuda.blockIdx.y * cuda.blockDim.y + cuda.threadIdx.y
    R = cos_PR.shape[1]
    if h < H:
        p = position_of(n, positions_N, T, cos_PR.shape[0])
        c, s = angle(cos_PR, sin_PR, p, r)
        s *= sign
        i = (n * H + h) * (2 * R) + r
        x1, x2 = load1(x, i), load1(x, i + R)
        store1(y, i, x1 * c - x2 * s)
        store1(y, i + R, x2 * c + x1 * s)


@functools.cache
def make_rope_kernel(H, D, vec, forward):
    """Return the kernel in use: 16 bytes at a time, S threads per head, see primitives/heads.py.

    None if the shape does not fit.
    """
    plan = head_plan(H, D, vec, BLOCK)
    if plan is None:
        return None
    ops = make_head_ops(H, D, vec, plan)
    token_head_plane = ops.token_head_plane
    load_angles = ops.load_angles
    load_words = ops.load_words
    unpack = ops.unpack
    pack = ops.pack
    store_words = ops.store_words
    rotate = ops.rotate if forward else ops.rotate_back
    R = D // 2
    TOKENS = plan.tokens

    @kernel(plan.THREADS)
    def rope_kernel(y, x, cos_PR, sin_PR, positions_N, N, T):
        """Grid (ceil(N / TOKENS), head_blocks), block THREADS. All arrays flat."""
        token, h, r = token_head_plane()
        n = int64(cuda.blockIdx.x) * TOKENS + token
        if n < N and h < H:
            cos = cuda.local.array(vec, float32)
            sin = cuda.local.array(vec, float32)
            x_2E = cuda.local.array((2, vec), float32)
            x_2W = cuda.local.array((2, 4), uint32)
            load_words(x_2W, x, (n * H + h) * D + r)
            p = position_of(n, positions_N, T, cos_PR.shape[0] // R)
            load_angles(cos, sin, cos_PR, sin_PR, p, r)
            unpack(x_2E, x_2W, x)
            rotate(x_2E, cos, sin)
            pack(x_2W, x_2E, y)
            store_words(y, (n * H + h) * D + r, x_2W)

    return HeadKernel(rope_kernel, plan)


# ----------------------------------------------------------------------------- launchers
def rope_fwd(
    x_NHD: Array,
    cos_PR: Array,
    sin_PR: Array,
    positions_N: Array | None = None,
    T: int | None = None,
) -> Array:
    """Return y with the shape and dtype of x (N, H, D), float32 or bf16, contiguous.

    cos, sin: (P, D / 2) float32.
    positions: row n has position positions_N[n], or n % T without positions (default of T: N).
    A position outside the tables raises ValueError on the CPU; on a GPU, where the check would have
    to synchronize, y of that row is NaN.
    """
    return _rotate("rope", x_NHD, cos_PR, sin_PR, positions_N, T, 1)


def rope_bwd(
    dy_NHD: Array,
    cos_PR: Array,
    sin_PR: Array,
    positions_N: Array | None = None,
    T: int | None = None,
) -> Array:
    """Return dx (N, H, D): dy rotated back. It is also the inverse of rope_fwd.

    Arguments as there.
    """
    return _rotate("rope backward", dy_NHD, cos_PR, sin_PR, positions_N, T, -1)


def _rotate(op, x_NHD, cos_PR, sin_PR, positions_N, T, sign):
    check_array(op, "x", x_NHD, (None, None, None), FLOATS)
    N, H, D = x_NHD.shape
    check_tables(op, cos_PR, sin_PR, D)
    positions, T = positions_for(op, x_NHD, cos_PR, positions_N, T)
    if on_host(x_NHD, cos_PR, sin_PR, positions):
        y_NHD = rope_ref(wide(x_NHD), cos_PR, sin_PR, positions, sign)
        return y_NHD.astype(x_NHD.dtype, copy=False)
    y_NHD = empty_like(x_NHD)
    R = D // 2
    check(0 < R <= BLOCK, f"{op}: head width {D} is not in 2 to {2 * BLOCK}")
    flat = y_NHD.reshape(-1), x_NHD.reshape(-1)
    tables = cos_PR.reshape(-1), sin_PR.reshape(-1)
    vectorized = make_rope_kernel(H, D, elements_per_vector(x_NHD), sign > 0)
    if vectorized is not None and on_16_bytes(*flat, *tables):
        plan = vectorized.plan
        grid = (-(-N // plan.tokens), plan.head_blocks)
        launch(vectorized.kernel, grid, plan.THREADS, *flat, *tables, positions, N, T)
    else:
        heads = max(1, min(H, BLOCK // R))
        grid = (N, -(-H // heads))
        block = (R, heads)
        arrays = (*flat, cos_PR, sin_PR, positions)
        launch(rope_plane_kernel, grid, block, *arrays, H, T, np.float32(sign))
    return y_NHD


def check_tables(op: str, cos_PR: Array, sin_PR: Array, D: int) -> None:
    """Raise ValueError or TypeError unless cos and sin are (P, D / 2) float32 and D is even."""
    check(D % 2 == 0, f"{op}: head width {D} is odd, planes are pairs")
    check_array(op, "cos", cos_PR, (None, D // 2))
    check_array(op, "sin", sin_PR, cos_PR.shape)


def positions_for(op, x, cos_PR, positions_N, T) -> tuple[Array, int]:
    """Return positions, T as the reference and the kernels take them.

    T = 0: the kernel reads positions. Raises ValueError if T or, on the CPU, a position is not in
    the tables of cos_PR.shape[0] rows.
    """
    N = x.shape[0]
    P = cos_PR.shape[0]
    if positions_N is None:
        if T is None:
            T = N
        check(0 < T <= P or N == 0, f"{op}: T = {T} positions, the tables hold {P}")
        if on_host(x):
            return np.arange(N) % max(T, 1), T
        return empty(x, 1, np.int64), T  # a kernel argument cannot be None
    check(positions_N.shape == (N,), f"{op}: positions {positions_N.shape}, expected ({N},)")
    check_ids(op, "positions", positions_N)
    if on_host(positions_N) and N:
        low = positions_N.min()
        high = positions_N.max()
        inside = low >= 0 and high < P
        check(inside, f"{op}: positions {low} to {high}, the tables hold 0 to {P - 1}")
    return positions_N, 0
