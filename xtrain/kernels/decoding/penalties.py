"""Changes of single logits before a token is drawn: bias and penalties.   logits: (B, V), changed in place

    bias         x += bias_t                                      OpenAI's logit_bias
    repetition   x / r if x > 0 else x r                          if token t is in the prompt or the answer (Keskar et al. 2019)
    frequency    x -= f times the number of t in the answer       OpenAI's frequency_penalty
    presence     x -= a if t is in the answer                     OpenAI's presence_penalty

in this order, that of vLLM. (transformers has the first two, in the same order.)

Only tokens that occur in the text or have a bias are changed, so a row has a short list of them: token, count, bias. It is
cheaper than an array over the vocabulary, which sampling would have to read with the logits. The list belongs to a slot of the KV
cache and stays on the device: a decoding step changes the logits (apply_penalties), draws, puts the model's own logits back and
counts the drawn token (count_tokens). So log-probabilities afterwards are those of the model. Idle rows, and rows whose list is
empty, end at once.

count        -1: the token is not in the text, it only has a bias; 0: only in the prompt; above: times in the answer
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numba import cuda, float32, int32, int64
from numba.cuda.libdevice import fadd_rn, fdiv_rn, fmul_rn, fsub_rn

from ...device import Array, array_module
from ..primitives.ptx import device, kernel, let_next_start, load1, store1, wait_for_previous
from ..runtime.launch import FLOATS, can_overlap, check, check_array, launch, on_host, wide, zeros

THREADS = 256  # of a row's block
MAX_BIASES = 300  # of a request, OpenAI's limit


@dataclass(frozen=True)
class Penalties:
    """The lists and penalties of R slots, with room for L tokens each: distinct tokens of prompt and answer, and biases.

    Slot r is in use if sizes_R[r] > 0 or it has a penalty; `set_slot` fills it. All arrays are on one device.
    """

    tokens_RL: Array  # int32, the first sizes_R[r] of a row, distinct
    counts_RL: Array  # int32
    biases_RL: Array  # float32
    raw_RL: Array  # float32: logits before apply_penalties
    sizes_R: Array  # int32
    repetition_R: Array  # float32, 1: off
    frequency_R: Array  # float32, 0: off
    presence_R: Array  # float32, 0: off

    @classmethod
    def empty(cls, like: Array, slots: int, tokens: int) -> "Penalties":
        """Unused slots, on the device of `like`. Bytes: 16 for each of slots x tokens."""
        new = lambda shape, dtype: zeros(like, shape, dtype)
        lists = (new((slots, tokens), t) for t in (np.int32, np.int32, np.float32, np.float32))
        rows = (new(slots, t) for t in (np.int32, np.float32, np.float32, np.float32))
        return cls(*lists, *rows)

    def set_slot(
        self,
        slot: int,
        prompt: Sequence[int],
        answer: Sequence[int] = (),
        bias: Mapping[int, float] | None = None,
        repetition: float = 1.0,
        frequency: float = 0.0,
        presence: float = 0.0,
    ) -> None:
        """Write a request's tokens so far, biases and penalties to a slot. Not for use while a step is in flight.

        Raises ValueError if a value is out of range, or if the slot has no room for its tokens.
        """
        check_penalties(bias or {}, repetition, frequency, presence)
        counts: dict[int, int] = {}
        if repetition != 1:
            counts |= dict.fromkeys(prompt, 0)
        if (repetition, frequency, presence) != (1, 0, 0):
            for token in answer:
                counts[token] = counts.get(token, 0) + 1
        tokens = list(dict.fromkeys([*counts, *(bias or {})]))
        n, L = len(tokens), self.tokens_RL.shape[1]
        check(n <= L, f"penalties: {n} different tokens, a slot has room for {L}")
        module = array_module(self.tokens_RL)
        columns = (
            (self.tokens_RL, tokens),
            (self.counts_RL, [counts.get(t, -1) for t in tokens]),
            (self.biases_RL, [(bias or {}).get(t, 0.0) for t in tokens]),
        )
        for array, values in columns:
            array[slot, :n] = module.asarray(np.array(values, array.dtype))
        self.sizes_R[slot] = n
        self.repetition_R[slot], self.frequency_R[slot] = repetition, frequency
        self.presence_R[slot] = presence

    def arrays(self) -> tuple[Array, ...]:
        """All arrays, in the order of their names above."""
        return (
            self.tokens_RL, self.counts_RL, self.biases_RL, self.raw_RL, self.sizes_R, self.repetition_R, self.frequency_R,
            self.presence_R,
        )  # fmt: skip


def check_penalties(
    bias: Mapping[int, float], repetition: float, frequency: float, presence: float
) -> None:
    """Raise ValueError for penalties that are not supported. Call this for each request: kernels cannot raise."""
    check(len(bias) <= MAX_BIASES, f"logit_bias has {len(bias)} tokens, expected at most 300")
    finite = lambda x: bool(np.isfinite(np.float32(x)))
    wrong = next((x for x in bias.values() if not -100 <= x <= 100), None)
    check(wrong is None, f"logit_bias {wrong}: expected -100 to 100")
    check(repetition > 0 and finite(repetition), f"repetition_penalty {repetition}: expected > 0")
    for name, x in (("frequency", frequency), ("presence", presence)):
        check(finite(x), f"{name}_penalty {x}: expected a finite number")


# ----------------------------------------------------------------------------- reference
def penalized_ref(x, count, bias, repetition, frequency, presence):
    """The changed logits of tokens with these counts and biases, float32. x, count, bias: arrays of the same length"""
    f32 = np.float32
    x = x.astype(f32) + bias
    repeated = np.where(x > 0, x / f32(repetition), x * f32(repetition))
    x = np.where(count >= 0, repeated, x)
    x = x - f32(frequency) * np.maximum(count, 0).astype(f32)
    return x - np.where(count > 0, f32(presence), f32(0))


# ----------------------------------------------------------------------------- kernels
@device
def penalized(x, count, bias, repetition, frequency, presence):
    """penalized_ref of one logit. The *_rn functions round each operation, so the bits are those of the reference."""
    x = fadd_rn(x, bias)
    if count >= 0:
        x = fdiv_rn(x, repetition) if x > float32(0.0) else fmul_rn(x, repetition)
    if count > 0:
        x = fsub_rn(fsub_rn(x, fmul_rn(frequency, float32(count))), presence)
    return x


@functools.cache
def make_apply_kernel(overlap: bool):
    """overlap: the kernel may start before the previous one has ended."""

    @kernel(THREADS)
    def apply_penalties_kernel(
        logits, tokens_RL, counts_RL, biases_RL, raw_RL, sizes_R, repetition_R, frequency_R, presence_R, rows_B, columns
    ):  # fmt: skip
        """Grid B, block THREADS. logits: flat (B columns). Every entry of the list is one token: no two threads share one."""
        b = int64(cuda.blockIdx.x)
        if overlap:
            wait_for_previous()
            let_next_start()
        r = int64(rows_B[b])
        if r < 0:
            return
        for i in range(cuda.threadIdx.x, sizes_R[r], THREADS):
            at = b * columns + tokens_RL[r, i]
            x = load1(logits, at)
            raw_RL[r, i] = x
            x = penalized(
                x, counts_RL[r, i], biases_RL[r, i], repetition_R[r], frequency_R[r], presence_R[r]
            )
            store1(logits, at, x)

    return apply_penalties_kernel


@functools.cache
def make_count_kernel(overlap: bool):
    """overlap: the kernel may start before the previous one has ended."""

    @kernel(THREADS)
    def count_tokens_kernel(
        logits, tokens_RL, counts_RL, biases_RL, raw_RL, sizes_R, repetition_R, frequency_R, presence_R, rows_B, ids_B,
        columns,
    ):  # fmt: skip
        """Grid B, block THREADS. Restores the row's logits and counts ids_B[b]; a new token is appended to the list."""
        known = cuda.shared.array(1, int32)
        b, tid = int64(cuda.blockIdx.x), cuda.threadIdx.x
        if overlap:
            wait_for_previous()
            let_next_start()
        r = int64(rows_B[b])
        if r < 0:
            return
        size, token = sizes_R[r], ids_B[b]
        off = frequency_R[r] == float32(0.0) and presence_R[r] == float32(0.0)
        counts = not (off and repetition_R[r] == float32(1.0)) and token >= 0
        if tid == 0:
            known[0] = 0
        cuda.syncthreads()
        for i in range(tid, size, THREADS):
            store1(logits, b * columns + tokens_RL[r, i], raw_RL[r, i])
            if tokens_RL[r, i] == token and counts:
                counts_RL[r, i] = max(counts_RL[r, i], int32(0)) + 1
                known[0] = 1
        cuda.syncthreads()
        if tid == 0 and known[0] == 0 and counts and size < tokens_RL.shape[1]:
            tokens_RL[r, size], counts_RL[r, size] = token, int32(1)
            biases_RL[r, size] = float32(0.0)
            sizes_R[r] = size + 1

    return count_tokens_kernel


# ----------------------------------------------------------------------------- launchers
def apply_penalties(logits_BV: Array, penalties: Penalties, rows_B: Array) -> None:
    """Change the logits of row b by the list of slot rows[b], in place; a row with rows[b] < 0 is left alone.

    logits (B, V): float32 or bf16; in bf16 the changed logits are rounded. rows (B,): int32, no slot twice. The logits must be
    put back by count_tokens before the next call. Raises ValueError or TypeError if shapes or dtypes do not match.
    """
    _check("apply_penalties", logits_BV, rows_B)
    if on_host(logits_BV, rows_B, *penalties.arrays()):
        for b, r, n in _live(penalties, rows_B):
            tokens = penalties.tokens_RL[r, :n]
            raw = wide(logits_BV[b, tokens])
            penalties.raw_RL[r, :n] = raw
            rules = (penalties.repetition_R[r], penalties.frequency_R[r], penalties.presence_R[r])
            counts, biases = penalties.counts_RL[r, :n], penalties.biases_RL[r, :n]
            logits_BV[b, tokens] = penalized_ref(raw, counts, biases, *rules)
        return
    (B, V), overlap = logits_BV.shape, can_overlap(logits_BV)
    arguments = (logits_BV.reshape(-1), *penalties.arrays(), rows_B, V)
    launch(make_apply_kernel(overlap), B, THREADS, *arguments, overlap=overlap)


def count_tokens(logits_BV: Array, penalties: Penalties, rows_B: Array, ids_B: Array) -> None:
    """Undo apply_penalties, and count the token ids[b] as one of the answer of slot rows[b], if that has a penalty.

    ids (B,): int32; a negative one is not counted. Others as in apply_penalties.
    """
    _check("count_tokens", logits_BV, rows_B)
    check_array("count_tokens", "ids", ids_B, rows_B.shape, ("int32",))
    if on_host(logits_BV, rows_B, ids_B, *penalties.arrays()):
        p = penalties
        for b, r, n in _live(p, rows_B):
            logits_BV[b, p.tokens_RL[r, :n]] = p.raw_RL[r, :n].astype(logits_BV.dtype)
            off = (p.repetition_R[r], p.frequency_R[r], p.presence_R[r]) == (1, 0, 0)
            if off or ids_B[b] < 0:
                continue
            known = np.flatnonzero(p.tokens_RL[r, :n] == ids_B[b])
            if known.size:
                p.counts_RL[r, known[0]] = max(p.counts_RL[r, known[0]], 0) + 1
            elif n < p.tokens_RL.shape[1]:
                p.tokens_RL[r, n], p.counts_RL[r, n], p.biases_RL[r, n] = ids_B[b], 1, 0
                p.sizes_R[r] += 1
        return
    (B, V), overlap = logits_BV.shape, can_overlap(logits_BV)
    arguments = (logits_BV.reshape(-1), *penalties.arrays(), rows_B, ids_B, V)
    launch(make_count_kernel(overlap), B, THREADS, *arguments, overlap=overlap)


def _check(op, logits_BV, rows_B):
    check_array(op, "logits", logits_BV, (None, None), FLOATS)
    check_array(op, "rows", rows_B, logits_BV.shape[:1], ("int32",))


def _live(penalties, rows_B):
    """-> row, slot, length of its list, of the rows that have a slot"""
    return [(b, r, penalties.sizes_R[r]) for b, r in enumerate(rows_B.tolist()) if r >= 0]
