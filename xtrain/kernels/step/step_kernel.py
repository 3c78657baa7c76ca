"""A decoding step in one kernel: from the ids of up to 8 tokens to their logits, without a kernel boundary in between.

    ids: (N,)    h: (N, C), the residual stream, twice    delta: (N, C)    qkv: (N, P)    o: (N, H D)    act: (N, F)
    logits: (N, V)

    EMBED      h0 = E[ids],  delta = 0
    QKV        h1 = h0 + delta      qkv = norm(h1) Wqkv^T + b                    gemv.py
    ATTEND     QK-norm, RoPE, append to the cache, o = attention                 attention/decode_attention.py
    OUT        delta = o Wo^T
    GATE_UP    h0 = h1 + delta      act = silu(gate) up,  gate, up of norm(h0)
    DOWN       delta = act Wdown^T
    HEAD       h1 = h0 + delta      logits = norm(h1) Whead^T

A layer of a small model takes a few microseconds, and as much time again passes at the boundaries of its five kernels: the last
blocks finish, memory is flushed, new blocks start, and only then the next loads are issued. Here the blocks stay. Each computes
its tasks one after the other (step_tasks.py has the table and the reason why there is no deadlock) and waits at counters in
global memory. Before it waits it has issued the loads of its first weights, or has prefetched them and the keys, so memory is not
idle while it waits. (To prefetch the weights of the next task as well, into the L2 cache, changed nothing on an H100.) Even so, a
wait takes about 2 microseconds there, as long as what the separate kernels, which overlap, lose at a boundary (known_issues.md).

Order in memory: a block's threads write, meet at a barrier, and thread 0 adds to the counter with release semantics
(`arrive`). Thread 0 of another block observes the sum with an acquiring load, and a barrier hands that on to its threads
(`wait_for_count`). This is transitive, so a buffer that was read two stages ago may be overwritten.

The arithmetic is that of the separate kernels, whose device functions are called here: the bits are those of gemv.py and
decode_attention.py with the same configuration. Nothing depends on which block is faster.

Not included: sampling; more than 8 tokens; quantized weights; windows; layers without RoPE.
"""

import dataclasses
import functools
from dataclasses import dataclass

import numpy as np

from ...device import Array, to_device
from ...simulator import SimArray
from ..attention.decode_attention import choose as choose_attention
from ..attention.decode_attention import heads_of, make_attend_items, shared_sizes
from ..attention.decode_attention_parts import splits_of
from ..decoding.gemv import make_multiply_row
from ..decoding.gemv_tensor_cores import (
    CHUNK,
    MAX_ROWS,
    TILE,
    Config,
    Variant,
    make_product,
    shared_bytes,
    sums_size,
)
from ..primitives.ptx import (
    atomic_add_release,
    device,
    kernel,
    load1,
    load_acquire,
    prefetch,
    store1,
)
from ..primitives.tensor_maps import upload
from ..runtime.compiler import cuda, float32, int32, int64, types, uint16, uint32
from ..runtime.launch import check, empty, launch, resident_blocks
from . import step_tasks as tasks_of
from .step_tasks import (
    ARRIVALS,
    ATTEND,
    DOWN,
    EMBED,
    FIELDS,
    GATE_UP,
    HEAD,
    KIND,
    LAYER,
    OUT,
    QKV,
    SHARE,
    SHARES,
    SIGNAL,
    SPACING,
    WAIT,
)

CHUNKS = 8  # of weights in flight per warp, on tensor cores; with SwiGLU half, of two matrices
MOST_STAGED = 64 << 10  # bytes of x in shared memory; the rest of 99 KB is for sums and attention
MOST_FIXED = 48 << 10  # bytes of shared memory that a kernel may declare, on every GPU
NAN = np.float32(np.nan)
# Columns of the table of offsets: where a layer's matrices and small weights begin. Its last row is the head's.
W_QKV, W_OUT, W_GATE_UP, W_DOWN, NORM_1, NORM_2, Q_NORM, K_NORM, BIAS = range(9)
OFFSETS = 9


@dataclass(frozen=True)
class StepShape:
    """Everything that the kernel is compiled for. The names are those of the file's docstring."""

    N: int
    C: int
    H: int
    G: int
    D: int
    F: int
    V: int  # rows of the head
    L: int
    S: int  # tokens of a block of the cache
    half: bool  # bf16: matrices, cache and all activations but h
    qk_norm: bool
    bias: bool  # of the QKV product
    warps: int = 8  # of a block: as many as in the separate float32 kernels

    @property
    def block(self) -> int:
        """Threads of a block."""
        return 32 * self.warps

    @property
    def P(self) -> int:
        """Columns of qkv."""
        return (self.H + 2 * self.G) * self.D

    @property
    def attention(self):
        """The configuration of the separate kernel, with this kernel's blocks."""
        chosen = choose_attention(self.D, self.H // self.G, self.half, self.N * self.G)
        return dataclasses.replace(chosen, warps=self.warps, blocks=1)

    def product(self, kind: int) -> tuple[int, int, Variant, Config]:
        """-> K, columns of y, variant and configuration of a product"""
        K, columns = {
            QKV: (self.C, self.P), OUT: (self.H * self.D, self.C), GATE_UP: (self.C, self.F),
            DOWN: (self.F, self.C), HEAD: (self.C, self.V),
        }[kind]  # fmt: skip
        normed, swiglu = kind in (QKV, GATE_UP, HEAD), kind == GATE_UP
        each = -(-(K // CHUNK) // self.warps)
        config = Config(self.warps, max(1, min(CHUNKS // 2 if swiglu else CHUNKS, each)), 1)
        variant = Variant(
            norm=normed, add=normed, half=not normed, swiglu=swiglu, bias=kind == QKV and self.bias,
            overlap=False, ready=False, once=False, staged=shared_bytes(MAX_ROWS, K) <= MOST_STAGED,
        )  # fmt: skip
        return K, columns, variant, config

    @property
    def unit(self) -> int:
        """Rows of weights of which a block computes the products together."""
        return TILE if self.half else self.warps

    def units(self, splits: int) -> dict[int, int]:
        """-> into how many parts each kind of stage can be divided. splits: of a row's keys, at most"""
        products = {k: -(-self.product(k)[1] // self.unit) for k in (QKV, OUT, GATE_UP, DOWN, HEAD)}
        embed = -(-self.N * self.C // self.block)
        return {EMBED: embed, ATTEND: self.N * self.G * splits, **products}

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory."""
        staged = [
            self.product(k)[0] for k in (QKV, OUT, GATE_UP, DOWN, HEAD) if self.product(k)[2].staged
        ]
        return max((shared_bytes(self.N, K) for K in staged), default=0) if self.half else 0

    @property
    def sums(self) -> int:
        """Floats of shared memory for the sums of a product."""
        return max(sums_size(*self.product(k)[2:]) for k in (QKV, GATE_UP)) if self.half else 1

    @property
    def fixed_shared(self) -> int:
        """Bytes of the shared memory that the kernel declares."""
        a = shared_sizes(self.D, self.H // self.G, self.half, self.attention)
        rows = 2 * (a.rows + self.N + 1) + self.warps + 1
        numbers = a.acc + a.weights + rows + self.sums + self.warps * MAX_ROWS
        nbytes = (2 if self.half else 4) * a.queries + 4 * numbers + 8
        return -(-nbytes // 16) * 16


def obstacle(N: int, C: int, F: int, Q: int, half: bool) -> str:
    """Why there is no kernel for N tokens and these widths; "" if there is. Q: H D"""
    unit = CHUNK if half else 4
    if not 0 < N <= MAX_ROWS:
        return f"{N} tokens, at most {MAX_ROWS} are supported"
    wrong = [n for n in (C, F, Q) if n % unit]
    return f"a product of {wrong[0]} columns, expected a multiple of {unit}" if wrong else ""


def no_room(shape: StepShape, most: int) -> str:
    """Why a block has too little shared memory; "" if it has enough. most: bytes that a block may use on this GPU"""
    c, fixed = shape, shape.fixed_shared
    if fixed > MOST_FIXED:
        return f"{c.H // c.G} heads of {c.D} share a key head: {fixed} bytes of shared memory, at most {MOST_FIXED} are possible"
    if fixed + c.shared > most:
        return f"{fixed + c.shared} bytes of shared memory for {c.N} tokens, this GPU has {most}"
    return ""


# ----------------------------------------------------------------------------- waiting
@device
def wait_for_count(counters, i, target):
    """The block waits until counter i has reached the target; then it sees what those who signalled it had written."""
    if cuda.threadIdx.x == 0:
        while load_acquire(counters, i) < target:
            pass
    cuda.syncthreads()


@device
def arrive(counters, i):
    """The block signals counter i: what it has written is visible to those who observe this."""
    cuda.syncthreads()  # all threads have written
    if cuda.threadIdx.x == 0:
        atomic_add_release(counters, i, int64(1))


# ----------------------------------------------------------------------------- tasks
def make_plain_task(N, K, F, variant, WARPS):
    """-> multiply(y, h, x, delta, w, norm_w, b, sums, squares_s, x_s, share, shares, eps, counters, i, target): a share of a
    product without tensor cores. F: columns of y"""
    SWIGLU, LINE = variant.swiglu, 32
    multiply_row = make_multiply_row(N, K, variant.norm, variant.add, SWIGLU, variant.bias, False)

    @device
    def multiply(
        y, h, x, delta, w, norm_w, b, sums, squares_s, x_s, share, shares, eps, counters, i, target
    ):
        first = share * WARPS + (cuda.threadIdx.x >> 5)
        if first < F:
            for k in range(LINE * (cuda.threadIdx.x & 31), K, 32 * LINE):
                prefetch(w, first * K + k)
                if SWIGLU:
                    prefetch(w, (F + first) * K + k)
        wait_for_count(counters, i, target)
        for o in range(first, F, shares * WARPS):
            multiply_row(y, h, x, delta, w, norm_w, norm_w, b, o, F, eps)

    return multiply


def make_tensor_task(N, K, F, variant, config):
    """-> multiply: as in make_plain_task, on tensor cores"""
    U, M = config.chunks, 2 if variant.swiglu else 1
    load_first, product = make_product(K, variant, config)

    @device
    def multiply(
        y, h, x, delta, w, norm_w, b, sums, squares_s, x_s, share, shares, eps, counters, i, target
    ):
        words, scales = cuda.local.array((U, M, 2, 4), uint32), cuda.local.array(M, float32)
        load_first(words, scales, w, norm_w, share, F)  # there are no scales
        wait_for_count(counters, i, target)
        product(
            y, h, x, delta, w, norm_w, norm_w, b, words, scales, sums, squares_s, x_s, share, shares, N, F, eps
        )  # fmt: skip

    return multiply


def make_embed(N, C, BLOCK):
    """-> embed(h, delta, embedding, ids, V, share, shares): rows of the table, NaN for an id outside; delta becomes 0"""

    @device
    def embed(h, delta, embedding, ids, V, share, shares):
        for j in range(share * BLOCK + cuda.threadIdx.x, N * C, shares * BLOCK):
            v = int64(ids[j // C])
            inside = v >= 0 and v < V
            value = load1(embedding, (v if inside else int64(0)) * C + j % C)
            h[j] = value if inside else NAN
            store1(delta, j, float32(0.0))

    return embed


# ----------------------------------------------------------------------------- the kernel
@functools.cache
def make_step_kernel(shape: StepShape):
    """-> the kernel. Launch with shape.block threads and shape.shared bytes of shared memory, all blocks resident."""
    N, C, F, V, P, G, D, S = shape.N, shape.C, shape.F, shape.V, shape.P, shape.G, shape.D, shape.S
    Q, GROUP, half = shape.H * shape.D, shape.H // shape.G, shape.half
    WARPS, BLOCK = shape.warps, shape.block

    def make(kind):
        K, columns, variant, config = shape.product(kind)
        if half:
            return make_tensor_task(N, K, columns, variant, config)
        return make_plain_task(N, K, columns, variant, WARPS)

    multiply_qkv, multiply_out, multiply_gate_up = make(QKV), make(OUT), make(GATE_UP)
    multiply_down, multiply_head = make(DOWN), make(HEAD)
    embed = make_embed(N, C, BLOCK)
    count_items, prefetch_tables, attend_items = make_attend_items(
        D, S, GROUP, half, shape.qk_norm, shape.attention, 0, wait_for_count
    )
    sizes = shared_sizes(D, GROUP, half, shape.attention)
    QUERIES, SIZE, ROWS, WEIGHTS = sizes.queries, sizes.acc, sizes.rows, sizes.weights
    SUMS, SQUARES, STARTS = shape.sums, WARPS * MAX_ROWS, N + 1
    element = types.uint16 if half else float32
    NC = N * C

    @kernel(BLOCK, 1)
    def step_kernel(
        logits, h, qkv, o, act, delta, partial, m_partial, l_partial, merge_counters, counters, kv, ids, lengths,
        tables, embedding, weights, small, cos, sin, tasks, offsets, M, R, splits, eps, scale,
    ):  # fmt: skip
        """Grid: as many blocks as the table `tasks` is for, all resident; block BLOCK. All arrays flat, h (2, N, C).

        partial, m_partial, l_partial, merge_counters: see decode_attention.py. kv (L, 2, R, G, S, D). weights: all matrices;
        small: all norm weights and biases; offsets (L + 1, OFFSETS): where those of a layer begin.
        """
        q_s = cuda.shared.array(QUERIES, element, alignment=16)
        acc_s = cuda.shared.array(SIZE, float32, alignment=16)
        weight_s = cuda.shared.array(WEIGHTS, float32)
        m_s, l_s = cuda.shared.array(ROWS, float32), cuda.shared.array(ROWS, float32)
        first_s = cuda.shared.array(STARTS, int32)
        t_s = cuda.shared.array(STARTS, int32)
        sums_s, last_s = cuda.shared.array(WARPS, int32), cuda.shared.array(1, int32)
        sums, squares_s = cuda.shared.array(SUMS, float32), cuda.shared.array(SQUARES, float32)
        start_s = cuda.shared.array(1, int64)
        x_s = cuda.shared.array(0, uint16)
        blocks = int64(cuda.gridDim.x)
        if cuda.threadIdx.x == 0:
            start_s[0] = load_acquire(counters, 0) // blocks
        prefetch_tables(tables, N * M)
        count_items(first_s, t_s, sums_s, lengths, N, M * S)  # ends with a barrier
        step, items, half_cache = start_s[0] + 1, int64(first_s[N]) * G, R * (G * S * D)
        h0, h1 = h[:NC], h[NC:]
        for row in range(cuda.blockIdx.x, tasks.size // FIELDS, blocks):
            at = row * FIELDS
            kind, layer = tasks[at + KIND], int64(tasks[at + LAYER])
            share, shares = int64(tasks[at + SHARE]), int64(tasks[at + SHARES])
            wait, target = int64(tasks[at + WAIT]) * SPACING, tasks[at + ARRIVALS] * step
            signal = int64(tasks[at + SIGNAL]) * SPACING
            here = layer * OFFSETS
            if kind == EMBED:
                embed(h0, delta, embedding, ids, V, share, shares)
            elif kind == QKV:
                w, norm_w = offsets[here + W_QKV], offsets[here + NORM_1]
                multiply_qkv(
                    qkv, h1, h0, delta, weights[w : w + P * C], small[norm_w : norm_w + C],
                    small[offsets[here + BIAS] : offsets[here + BIAS] + P], sums, squares_s, x_s, share, shares,
                    eps, counters, wait, target,
                )  # fmt: skip
            elif kind == ATTEND:
                keys = 2 * layer * half_cache
                values, q_w, k_w = keys + half_cache, offsets[here + Q_NORM], offsets[here + K_NORM]
                attend_items(
                    o, partial, m_partial, l_partial, merge_counters, kv[keys:values],
                    kv[values : values + half_cache], small, qkv, tables, small[q_w : q_w + D], small[k_w : k_w + D],
                    cos, sin, N, G, M, R, splits, eps, scale, q_s, acc_s, weight_s, m_s, l_s, first_s, t_s,
                    last_s, share, shares, items, counters, wait, target,
                )  # fmt: skip
            elif kind == OUT:
                w = offsets[here + W_OUT]
                multiply_out(
                    delta, h1, o, delta, weights[w : w + C * Q], small, small, sums, squares_s, x_s, share,
                    shares, eps, counters, wait, target,
                )  # fmt: skip
            elif kind == GATE_UP:
                w, norm_w = offsets[here + W_GATE_UP], offsets[here + NORM_2]
                multiply_gate_up(
                    act, h0, h1, delta, weights[w : w + 2 * F * C], small[norm_w : norm_w + C], small, sums,
                    squares_s, x_s, share, shares, eps, counters, wait, target,
                )  # fmt: skip
            elif kind == DOWN:
                w = offsets[here + W_DOWN]
                multiply_down(
                    delta, h1, act, delta, weights[w : w + C * F], small, small, sums, squares_s, x_s, share,
                    shares, eps, counters, wait, target,
                )  # fmt: skip
            elif kind == HEAD:
                w, norm_w = offsets[here + W_QKV], offsets[here + NORM_1]
                multiply_head(
                    logits, h1, h0, delta, weights[w : w + V * C], small[norm_w : norm_w + C], small, sums,
                    squares_s, x_s, share, shares, eps, counters, wait, target,
                )  # fmt: skip
            arrive(counters, signal)
        arrive(counters, 0)  # this block has finished

    return step_kernel


# ----------------------------------------------------------------------------- launcher
@dataclass(frozen=True)
class StepWeights:
    """A model's weights, flat. The kernel reads them in place; offsets (L + 1, OFFSETS), int64, on the host."""

    embedding: Array
    matrices: Array
    small: Array
    offsets: np.ndarray


class DecodingStep:
    """A step for N sequences: its buffers, its table of tasks and its counters, which stay from launch to launch.

    kv (L, 2, R, G, S, D).  M: blocks of a sequence's table.  cos, sin (P, D/2), P >= M S.
    Steps of one object must not run at the same time.
    """

    def __init__(
        self, shape: StepShape, weights: StepWeights, kv: Array, M: int, cos: Array, sin: Array, eps: float
    ):  # fmt: skip
        c, like = shape, weights.matrices
        why = obstacle(c.N, c.C, c.F, c.H * c.D, c.half)
        check(not why, f"decoding step: {why}")
        L, two, R, G, S, D = kv.shape
        fits = (L, two, G, S, D) == (c.L, 2, c.G, c.S, c.D)
        check(fits, f"decoding step: a cache of shape {tuple(kv.shape)} does not fit {c}")
        check(cos.shape[0] >= M * S, f"decoding step: {cos.shape[0]} positions, {M * S} are needed")
        self.shape, self.weights, self.kernel = c, weights, make_step_kernel(c)
        config = c.attention
        self.splits = splits_of(M * S, config.keys, config.splits)
        self.stages = tasks_of.make_stages(c.L, c.units(self.splits))
        heads = min(heads_of(c.half, c.H // c.G), c.H // c.G)
        count = c.N * c.G * -(-(c.H // c.G) // heads)
        branch = weights.matrices.dtype
        new = lambda columns, dtype=branch: empty(like, c.N * columns, dtype)
        self.logits, self.h = new(c.V, np.float32), new(2 * c.C, np.float32)
        self.buffers = [new(c.P), new(c.H * c.D), new(c.F), new(c.C)]
        self.partials = [
            empty(like, count * self.splits * n, np.float32) for n in (heads * c.D, heads, heads)
        ]
        where = "sim" if isinstance(like, SimArray) else "gpu"
        # Outside of any memory pool: a graph captured earlier may use free memory of its pool again in each replay. That does no
        # harm to the buffers above, which each launch writes before it reads them, but it would to what outlives a launch.
        self.upload = (
            (lambda x: upload(x.tobytes()).view(x.dtype))
            if where == "gpu"
            else (lambda x: to_device(x, where))
        )
        self.merge_counters = self.upload(np.zeros(count + count % 2, np.int32))
        self.cache, self.angles = kv.reshape(-1), (cos.reshape(-1), sin.reshape(-1))
        self.offsets = self.upload(weights.offsets.reshape(-1))
        self.scalars = M, R, self.splits, np.float32(eps), np.float32(c.D**-0.5)
        self.blocks, self.tasks = 0, self.upload(np.zeros(FIELDS, np.int32))
        self.counters = self.upload(np.zeros(tasks_of.counters_size(self.stages), np.int64))

    def __call__(self, ids_N: Array, lengths_N: Array, tables_NM: Array) -> Array:
        """-> logits (N, V), which the next call overwrites. lengths: tokens in the cache, below 0 for an idle entry."""
        inputs = self.cache, ids_N, lengths_N, tables_NM.reshape(-1)
        arguments = lambda: (
            self.logits, self.h, *self.buffers, *self.partials, self.merge_counters, self.counters, *inputs,
            self.weights.embedding, self.weights.matrices, self.weights.small, *self.angles, self.tasks,
            self.offsets, *self.scalars,
        )  # fmt: skip
        shared = self.shape.shared
        blocks = resident_blocks(self.kernel, self.shape.block, *arguments(), shared=shared)
        check(blocks > 0, f"decoding step: a block of {self.shape} does not fit a multiprocessor")
        if blocks != self.blocks:  # the first call
            self.tasks = self.upload(tasks_of.make_tasks(self.stages, blocks).reshape(-1))
            self.counters[...] = 0
            self.blocks = blocks
        launch(self.kernel, blocks, self.shape.block, *arguments(), shared=shared, resident=True)
        return self.logits.reshape(self.shape.N, self.shape.V)
