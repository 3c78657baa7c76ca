"""Changes of single logits before a token is drawn: bias, penalties and tokens that are forbidden.

    logits: (B, V), changed in place

    bias         x += bias_t                                      OpenAI's logit_bias
    repetition   x / r if x > 0 else x r                          if token t is in the prompt or the
                                                                  answer (Keskar et al. 2019)
    frequency    x -= f times the number of t in the answer       OpenAI's frequency_penalty
    presence     x -= a if t is in the answer                     OpenAI's presence_penalty
    ends         x = -inf if t ends the answer, and it has less   vLLM's min_tokens
                 than m tokens
    allowed      x = -inf for every other token                   vLLM's allowed_token_ids

in this order. (transformers has the first two, in the same order.)

Only tokens that occur in the text, have a bias or end an answer are changed, so a sequence has a
short list of them: token, count, bias, and from which token of the answer on it may be drawn. It is
cheaper than an array over the vocabulary, which sampling would have to read with the logits. Only
sequences with `allowed` have one, of bits. The list belongs to a slot of the decode batch and stays
on the device: a step changes the logits (apply_penalties), draws, and counts the drawn token
(count_tokens). Rows without a slot end at once. Bytes moved: 24 per token of a list; a row with
`allowed` reads V / 8 and writes V logits at most.

count        -1: the token is not in the text, it only has a bias
             0: only in the prompt
             above: times in the answer
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...device import Array, array_module
from ..primitives.ptx import device, kernel, let_next_start, load1, store1, wait_for_previous
from ..runtime.compiler import cuda, fadd_rn, fdiv_rn, float32, fmul_rn, fsub_rn, int32, int64
from ..runtime.launch import FLOATS, can_overlap, check, check_array, launch, on_host, wide, zeros

THREADS = 256  # of a row's block
MAX_BIASES = 300  # of a request, as OpenAI's limit
MAX_BIAS = 100  # and its values
MAX_ENDS = 256  # tokens that end an answer, of a request with min_tokens
FORBIDDEN = float32(-math.inf)


@dataclass(frozen=True)
class PenaltyRules:
    """What one request changes.

    ends: tokens that may not be drawn before the answer has min_tokens.
    allowed: the only tokens that may be drawn; None: all.
    """

    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    bias: Mapping[int, float] | None = None
    min_tokens: int = 0
    ends: frozenset[int] = frozenset()
    allowed: frozenset[int] | None = None

    def check(self) -> None:
        """Raise ValueError for values that are not supported. Call this for each request: kernels
        cannot raise."""
        bias = self.bias or {}
        check(len(bias) <= MAX_BIASES, f"logit_bias has {len(bias)} tokens, expected at most 300")
        wrong = next((x for x in bias.values() if not -MAX_BIAS <= x <= MAX_BIAS), None)
        check(wrong is None, f"logit_bias {wrong}: expected -100 to 100")
        least = float(np.finfo(np.float32).tiny)
        fits = least <= self.repetition <= 1 / least
        positive = f"repetition_penalty {self.repetition}: expected more than 0, 1 is off"
        check(self.repetition > 0, positive)
        check(
            fits, f"repetition_penalty {self.repetition}: expected {least:.2g} to {1 / least:.2g}"
        )
        for name, x in (("frequency", self.frequency), ("presence", self.presence)):
            check(abs(x) <= MAX_BIAS, f"{name}_penalty {x}: expected -100 to 100, 0 is off")
        few = not self.min_tokens or len(self.ends) <= MAX_ENDS
        check(few, f"stop has {len(self.ends)} tokens, expected at most {MAX_ENDS} with a minimum")
        if self.allowed is not None:
            check(bool(self.allowed), "allowed_token_ids is empty, expected at least one token")
            drawable = self.allowed - self.ends or not self.min_tokens
            only_ends = "allowed_token_ids has only stop tokens, which the minimum forbids at first"
            check(bool(drawable), only_ends)

    @functools.cached_property
    def active(self) -> bool:
        """False if they change nothing."""
        penalized = (self.repetition, self.frequency, self.presence) != (1, 0, 0)
        late = bool(self.min_tokens and self.ends)
        return penalized or late or bool(self.bias) or self.allowed is not None


@dataclass(frozen=True)
class Penalties:
    """The lists and rules of R slots, with room for L tokens each: distinct tokens of prompt and
    answer, and those with a bias or that end it."""

    tokens_RL: Array  # int32, the first sizes_R[r] of a row, distinct
    counts_RL: Array  # int32
    biases_RL: Array  # float32
    from_RL: Array  # int32: tokens that the answer must have before this one may be drawn
    sizes_R: Array  # int32
    rules_R3: Array  # float32: repetition, frequency, presence
    limited_R: Array  # int32: 1 for the slots that have `allowed`
    allowed_RW: Array  # int32: bit v mod 32 of word v // 32 says whether token v is allowed

    @classmethod
    def empty(cls, like: Array, slots: int, tokens: int, vocab: int) -> "Penalties":
        """Empty lists on the device of `like`. Bytes: 16 for each of slots x tokens, and a bit for
        each of slots x vocab."""
        new = lambda shape, dtype: zeros(like, shape, dtype)
        ints = lambda *shape: new((slots, *shape), np.int32)
        floats = lambda *shape: new((slots, *shape), np.float32)
        lists = (ints(tokens), ints(tokens), floats(tokens), ints(tokens))
        return cls(*lists, ints(), floats(3), ints(), ints(-(-vocab // 32)))

    @property
    def arrays(self) -> tuple[Array, ...]:
        """All of them, in the order above."""
        return (
            self.tokens_RL,
            self.counts_RL,
            self.biases_RL,
            self.from_RL,
            self.sizes_R,
            self.rules_R3,
            self.limited_R,
            self.allowed_RW,
        )

    def set_slot(
        self, slot: int, rules: PenaltyRules, prompt: Sequence[int], answer: Sequence[int]
    ) -> None:
        """Write the rules of a sequence and its tokens so far to a slot, in stream order. They must
        fit: L distinct tokens."""
        counts = dict.fromkeys(prompt, 0) if rules.repetition != 1 else {}
        for token in answer:
            counts[token] = counts.get(token, 0) + 1
        bias = rules.bias or {}
        ends = rules.ends if rules.min_tokens else frozenset()
        tokens = list(dict.fromkeys([*counts, *bias, *sorted(ends)]))
        n = len(tokens)
        L = self.tokens_RL.shape[1]
        check(n <= L, f"penalties: {n} different tokens, a slot has room for {L}")
        module = array_module(self.tokens_RL)
        for array, values in (
            (self.tokens_RL[slot, :n], tokens),
            (self.counts_RL[slot, :n], [counts.get(t, -1) for t in tokens]),
            (self.biases_RL[slot, :n], [bias.get(t, 0.0) for t in tokens]),
            (self.from_RL[slot, :n], [rules.min_tokens if t in ends else 0 for t in tokens]),
            (self.rules_R3[slot], [rules.repetition, rules.frequency, rules.presence]),
            (self.sizes_R[slot : slot + 1], [n]),
            (self.limited_R[slot : slot + 1], [rules.allowed is not None]),
        ):
            array[...] = module.asarray(np.array(values, array.dtype))
        if rules.allowed is not None:
            words = allowed_words_ref(rules.allowed, self.allowed_RW.shape[1])
            self.allowed_RW[slot] = module.asarray(words)


# ----------------------------------------------------------------------------- reference
@functools.lru_cache(8)  # several answers have the same set, which may be large
def allowed_words_ref(tokens, W):
    """Return the bits of a set of tokens, in W words."""
    bits = np.zeros(32 * W, np.uint8)
    bits[np.fromiter(tokens, np.int64, len(tokens))] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def allowed_ref(x_V, words_W):
    """-inf where the bit of the column is 0"""
    bits = np.unpackbits(words_W.view(np.uint8), bitorder="little", count=len(x_V))
    return np.where(bits, x_V, x_V.dtype.type(-np.inf))


def penalized_ref(x, count, bias, forbidden, repetition, frequency, presence):
    """The changed logits of tokens with these counts and biases, float32. x, count, bias,
    forbidden: arrays of the same length"""
    f32 = np.float32
    x = x.astype(f32) + bias
    repeated = np.where(x > 0, x / f32(repetition), x * f32(repetition))
    x = np.where(count >= 0, repeated, x)
    changed = (x - f32(frequency) * count.astype(f32)) - f32(presence)
    return np.where(forbidden, FORBIDDEN, np.where(count > 0, changed, x))


# ----------------------------------------------------------------------------- kernels
@device
def penalized(x, count, bias, forbidden, repetition, frequency, presence):
    """penalized_ref of one logit. The *_rn functions round each operation, so the bits are those of
    the reference."""
    x = fadd_rn(x, bias)
    if count >= 0:
        x = fdiv_rn(x, repetition) if x > float32(0.0) else fmul_rn(x, repetition)
    if count > 0:
        x = fsub_rn(fsub_rn(x, fmul_rn(frequency, float32(count))), presence)
    if forbidden:
        x = FORBIDDEN
    return x


@functools.cache
def make_apply_kernel(overlap: bool):
    """overlap: the kernel may start before the previous one has ended."""

    @kernel(THREADS)
    def apply_penalties_kernel(
        logits,
        tokens_RL,
        counts_RL,
        biases_RL,
        from_RL,
        sizes_R,
        rules_R3,
        limited_R,
        allowed_RW,
        slots_B,
        steps_B,
        vocab,
        columns,
    ):
        """Grid B, block THREADS. logits: flat (B columns). Every entry of the list is one token: no
        two threads share one."""
        b = int64(cuda.blockIdx.x)
        if overlap:
            wait_for_previous()
            let_next_start()
        r = int64(slots_B[b])
        if r < 0:
            return
        repetition = rules_R3[r, 0]
        frequency = rules_R3[r, 1]
        presence = rules_R3[r, 2]
        if limited_R[r] != 0:  # for all threads of the block, or for none
            for v in range(cuda.threadIdx.x, vocab, THREADS):
                if (allowed_RW[r, v >> 5] >> int32(v & 31)) & 1 == 0:  # a warp reads one word
                    store1(logits, b * columns + v, FORBIDDEN)
            cuda.syncthreads()  # penalties leave -inf as it is
        for i in range(cuda.threadIdx.x, sizes_R[r], THREADS):
            at = b * columns + tokens_RL[r, i]
            forbidden = steps_B[b] < from_RL[r, i]
            count, bias = counts_RL[r, i], biases_RL[r, i]
            x = load1(logits, at)
            x = penalized(x, count, bias, forbidden, repetition, frequency, presence)
            store1(logits, at, x)

    return apply_penalties_kernel


@functools.cache
def make_count_kernel(overlap: bool):
    """overlap: the kernel may start before the previous one has ended."""

    @kernel(THREADS)
    def count_tokens_kernel(tokens_RL, counts_RL, biases_RL, from_RL, sizes_R, slots_B, ids_B):
        """Grid B, block THREADS. Counts ids_B[b]; a new token is appended to the list."""
        listed_s = cuda.shared.array(1, int32)
        b = int64(cuda.blockIdx.x)
        tid = cuda.threadIdx.x
        if overlap:
            wait_for_previous()
            let_next_start()
        r = int64(slots_B[b])
        if r < 0:
            return
        size, token = sizes_R[r], ids_B[b]
        if tid == 0:
            listed_s[0] = 0
        cuda.syncthreads()
        for i in range(tid, size, THREADS):
            if tokens_RL[r, i] == token:
                counts_RL[r, i] = max(counts_RL[r, i], int32(0)) + 1
                listed_s[0] = 1
        cuda.syncthreads()  # also: every thread has read the size
        if tid == 0 and listed_s[0] == 0 and token >= 0 and size < tokens_RL.shape[1]:
            tokens_RL[r, size] = token
            counts_RL[r, size] = int32(1)
            biases_RL[r, size] = float32(0.0)
            from_RL[r, size] = int32(0)
            sizes_R[r] = size + 1

    return count_tokens_kernel


# ----------------------------------------------------------------------------- launchers
def apply_penalties(
    logits_BV: Array, penalties: Penalties, slots_B: Array, steps_B: Array, vocab: int
) -> None:
    """Change the logits of row b by the list of slot slots[b], in place; a row with slots[b] < 0 is
    left alone.

    logits (B, V): float32 or bf16; in bf16 the changed logits are rounded. slots (B,): int32, none
    twice. steps (B,): int32, tokens of the answers so far. vocab: number of tokens; further columns
    are padding. Raises ValueError or TypeError if shapes or dtypes do not match.
    """
    op = "apply_penalties"
    check_array(op, "logits", logits_BV, (None, None), FLOATS)
    check_array(op, "slots", slots_B, logits_BV.shape[:1], ("int32",))
    check_array(op, "steps", steps_B, logits_BV.shape[:1], ("int32",))
    p = penalties
    B, V = logits_BV.shape
    room = min(32 * p.allowed_RW.shape[1], V)
    check(vocab <= room, f"{op}: a vocabulary of {vocab}, there is room for {room} tokens")
    if on_host(logits_BV, slots_B, steps_B, *p.arrays):
        for b, r, n in _lists(p, slots_B):
            if p.limited_R[r]:
                logits_BV[b, :vocab] = allowed_ref(logits_BV[b, :vocab], p.allowed_RW[r])
            tokens = p.tokens_RL[r, :n]
            forbidden = steps_B[b] < p.from_RL[r, :n]
            listed = (p.counts_RL[r, :n], p.biases_RL[r, :n], forbidden)
            changed = penalized_ref(wide(logits_BV[b, tokens]), *listed, *p.rules_R3[r])
            logits_BV[b, tokens] = changed.astype(logits_BV.dtype)
        return
    overlap = can_overlap(logits_BV)
    arguments = (logits_BV.reshape(-1), *p.arrays, slots_B, steps_B, vocab, V)
    launch(make_apply_kernel(overlap), B, THREADS, *arguments, overlap=overlap)


def count_tokens(penalties: Penalties, slots_B: Array, ids_B: Array) -> None:
    """Count the token ids[b] as one of the answer of slot slots[b].

    slots (B,): int32, none twice; below 0: no slot. ids (B,): int32; a negative one is not counted.
    Raises ValueError or TypeError if shapes or dtypes do not match.
    """
    check_array("count_tokens", "slots", slots_B, (None,), ("int32",))
    check_array("count_tokens", "ids", ids_B, slots_B.shape, ("int32",))
    p = penalties
    if on_host(slots_B, ids_B, *p.arrays):
        for b, r, n in _lists(p, slots_B):
            listed = np.flatnonzero(p.tokens_RL[r, :n] == ids_B[b])
            if listed.size:
                p.counts_RL[r, listed] = np.maximum(p.counts_RL[r, listed], 0) + 1
            elif ids_B[b] >= 0 and n < p.tokens_RL.shape[1]:
                p.tokens_RL[r, n] = ids_B[b]
                p.counts_RL[r, n] = 1
                p.biases_RL[r, n] = 0
                p.from_RL[r, n] = 0
                p.sizes_R[r] += 1
        return
    overlap = can_overlap(ids_B)
    arguments = (*p.arrays[:5], slots_B, ids_B)
    launch(make_count_kernel(overlap), len(slots_B), THREADS, *arguments, overlap=overlap)


def _lists(penalties, slots_B):
    """Return row, slot, length of its list, of the rows that have a slot"""
    return [(b, r, penalties.sizes_R[r]) for b, r in enumerate(slots_B.tolist()) if r >= 0]
