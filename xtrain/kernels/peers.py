"""Sums and copies of arrays that are in the memory of other GPUs, its peers.

y, x, a, b, ...: (n,)

    add_peers        y = y + a + b + ...       from left to right: the same arguments give the same
                                               bits
    copy_to_peers    a = x, b = x, ...

Loads and stores travel over NVLink or PCIe. One kernel for all peers keeps the link busy: with a
kernel per peer it would be idle from the last element of one to the first of the next. And y (or x)
is read once.
"""

import functools

import numpy as np

from ..device import Array
from .elementwise import check_two
from .primitives.flat import (
    BLOCK,
    CHUNK,
    GAP,
    QUAD,
    STEPS,
    STRIDE,
    TILE,
    can_vectorize,
    first_element,
    load,
    on_16_bytes,
    store,
)
from .primitives.ptx import device, kernel
from .runtime.compiler import cuda, float32, int64
from .runtime.cost import declare_cost
from .runtime.launch import FLOATS, check, check_array, launch, on_host

MOST = 7  # peers of one launch at most: those of a machine with 8 GPUs
# Blocks that copy. They fill the link, and most multiprocessors are free for another kernel.
COPYING = 64


# ----------------------------------------------------------------------------- references
def add_peers_ref(y_n, peers):
    """Add the peers to y in place, one after the other, in float32."""
    total_n = y_n.astype(np.float32)
    for x_n in peers:
        total_n += x_n.astype(np.float32)
    y_n[...] = total_n


def copy_to_peers_ref(peers, x_n):
    """Set every peer to x."""
    for y_n in peers:
        y_n[...] = x_n


# ----------------------------------------------------------------------------- kernels
@functools.cache
def make_add_peers_kernel(COUNT: int):
    """Return the kernel for COUNT peers, 1 to MOST."""
    CHUNKS = COUNT * STEPS

    @device
    def add_chunks(y_n, a_n, b_n, c_n, d_n, e_n, f_n, g_n, first, vectorized):
        """Add a, b, ... to y on the thread's chunks."""
        total = cuda.local.array((STEPS, CHUNK), float32)
        x = cuda.local.array((CHUNKS, CHUNK), float32)
        n = y_n.size
        for s in range(STEPS):  # all loads before the first addition, so that all are in flight
            i = first + s * STRIDE
            load(total[s], y_n, i, GAP, n, vectorized)
            load(x[s * COUNT], a_n, i, GAP, n, vectorized)
            if COUNT > 1:
                load(x[s * COUNT + 1], b_n, i, GAP, n, vectorized)
            if COUNT > 2:
                load(x[s * COUNT + 2], c_n, i, GAP, n, vectorized)
            if COUNT > 3:
                load(x[s * COUNT + 3], d_n, i, GAP, n, vectorized)
            if COUNT > 4:
                load(x[s * COUNT + 4], e_n, i, GAP, n, vectorized)
            if COUNT > 5:
                load(x[s * COUNT + 5], f_n, i, GAP, n, vectorized)
            if COUNT > 6:
                load(x[s * COUNT + 6], g_n, i, GAP, n, vectorized)
        for s in range(STEPS):
            for k in range(COUNT):
                for j in range(CHUNK):
                    total[s, j] += x[s * COUNT + k, j]
            store(y_n, first + s * STRIDE, GAP, n, total[s], vectorized)

    @kernel(BLOCK)
    def add_peers_kernel(y_n, a_n, b_n, c_n, d_n, e_n, f_n, g_n, aligned):
        """Grid ceil(n / TILE), block BLOCK. Of a to g the first COUNT are added."""
        first = first_element()
        if can_vectorize(first, y_n.size, aligned):
            add_chunks(y_n, a_n, b_n, c_n, d_n, e_n, f_n, g_n, first, True)
        else:
            add_chunks(y_n, a_n, b_n, c_n, d_n, e_n, f_n, g_n, first, False)

    declare_cost(add_peers_kernel, in_place=("y_n",))
    return add_peers_kernel


@functools.cache
def make_copy_to_peers_kernel(COUNT: int):
    """Return the kernel for COUNT peers, 1 to MOST."""

    @device
    def copy_chunks(a_n, b_n, c_n, d_n, e_n, f_n, g_n, x_n, first, vectorized):
        """Copy x to a, b, ... on the thread's chunks of a tile."""
        x = cuda.local.array((STEPS, CHUNK), float32)
        n = x_n.size
        for s in range(STEPS):
            load(x[s], x_n, first + s * STRIDE, GAP, n, vectorized)
        for s in range(STEPS):
            i = first + s * STRIDE
            store(a_n, i, GAP, n, x[s], vectorized)
            if COUNT > 1:
                store(b_n, i, GAP, n, x[s], vectorized)
            if COUNT > 2:
                store(c_n, i, GAP, n, x[s], vectorized)
            if COUNT > 3:
                store(d_n, i, GAP, n, x[s], vectorized)
            if COUNT > 4:
                store(e_n, i, GAP, n, x[s], vectorized)
            if COUNT > 5:
                store(f_n, i, GAP, n, x[s], vectorized)
            if COUNT > 6:
                store(g_n, i, GAP, n, x[s], vectorized)

    @kernel(BLOCK)
    def copy_to_peers_kernel(a_n, b_n, c_n, d_n, e_n, f_n, g_n, x_n, aligned):
        """Grid P, block BLOCK. Block p copies tiles p, p + P, ... to the first COUNT of a to g."""
        n = x_n.size
        for tile in range(int64(cuda.blockIdx.x) * TILE, n, int64(cuda.gridDim.x) * TILE):
            first = tile + cuda.threadIdx.x * QUAD
            if can_vectorize(first, n, aligned):
                copy_chunks(a_n, b_n, c_n, d_n, e_n, f_n, g_n, x_n, first, True)
            else:
                copy_chunks(a_n, b_n, c_n, d_n, e_n, f_n, g_n, x_n, first, False)

    return copy_to_peers_kernel


# ----------------------------------------------------------------------------- launchers
def add_peers(y_n: Array, peers: list[Array]) -> None:
    """Add each of the peers to y in turn, with one rounding to the dtype of y per MOST of them.

    All (n,), contiguous, float32 or all bf16. Raises ValueError or TypeError for others, and
    without a peer.
    """
    for group in _groups("add_peers", y_n, peers):
        if on_host(y_n, *group):
            add_peers_ref(y_n, group)
            continue
        add_kernel = make_add_peers_kernel(len(group))
        aligned = on_16_bytes(y_n, *group)
        launch(add_kernel, -(-y_n.size // TILE), BLOCK, y_n, *_padded(group), aligned)


def copy_to_peers(peers: list[Array], x_n: Array) -> None:
    """Write x to each of the peers, bit for bit; in bf16 a NaN becomes the usual one.

    All (n,), contiguous, float32 or all bf16. Raises ValueError or TypeError for others, and
    without a peer.
    """
    for group in _groups("copy_to_peers", x_n, peers):
        if on_host(x_n, *group):
            copy_to_peers_ref(group, x_n)
            continue
        copy_kernel = make_copy_to_peers_kernel(len(group))
        blocks = min(COPYING, -(-x_n.size // TILE))
        launch(copy_kernel, blocks, BLOCK, *_padded(group), x_n, on_16_bytes(x_n, *group))


def _groups(op, x_n, peers):
    """Return the peers in lists of at most MOST, checked."""
    check(len(peers) > 0, f"{op}: no peer was given")
    check_array(op, "x", x_n, (None,), FLOATS)
    for peer_n in peers:
        check_two(op, x_n, peer_n)
    return [peers[first : first + MOST] for first in range(0, len(peers), MOST)]


def _padded(group):
    """Return MOST arguments for a kernel, which does not use those beyond its COUNT."""
    return [*group, *group[:1] * (MOST - len(group))]
