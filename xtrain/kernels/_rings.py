"""A thread's own ring in shared memory: what it needs next is on its way while it deals with what has come.

Registers hold one or two rows under way at most; shared memory holds several. No other thread looks into a ring, so no barrier
is needed: wait_copies is enough (_tensor_cores.py). Chunk k of all threads lies side by
side, so that neighbouring threads touch neighbouring banks. A ring is a float32 array; its indices count words. From compute capability 8.0 on.

    start_copy4, start_copy8(ring, i, x, j)      x[j : j + 4] (or 8), at most 16 bytes, are on their way to ring[i]
    take4, take8(words, ring, i, x)              words = what came, see _words.py; x: only its dtype counts
    start_copy4_once, start_copy8_once           the same for what is read for the last time: it leaves the second-level
                                                 cache before anything else does, such as what this kernel writes
"""

import numpy as np
from llvmlite import ir
from numba import types

from ..simulator import simulates
from ._ptx import I32, SHARED, _register, _vector, intrinsic
from ._tensor_cores import _asm, _global_address, _shared_address
from ._words import _aligned, _is_half, _set, _words_in, _write

EVICT_FIRST = 0x12F0000000000000  # the policy that "createpolicy.fractional.L2::evict_first" makes


# ----------------------------------------------------------------------------- code generation
def _make_copy(name, n, once):
    def copy(typingctx, ring, i, x, j):
        nbytes = n * x.dtype.bitwidth // 8
        cache = "cg" if nbytes == 16 else "ca"
        hint, policy = (".L2::cache_hint", f", {EVICT_FIRST}") if once else ("", "")

        def codegen(context, builder, sig, args):
            to = _shared_address(context, builder, sig, args, 0, 1)
            source = _global_address(context, builder, sig, args, 2, 3)
            text = f"cp.async.{cache}.shared.global{hint} [$0], [$1], {nbytes}{policy};"
            _asm(builder, text, "r,l,~{memory}", ir.VoidType(), [to, source])
            return context.get_dummy_value()

        return types.void(ring, i, x, j), codegen

    copy.__name__ = name
    return intrinsic(copy)


def _make_take(name, n):
    def take(typingctx, words, ring, i, x):
        length = n // 2 if _is_half(x) else n

        def codegen(context, builder, sig, args):
            pointer = _vector(context, builder, sig, args, 1, 2, I32, length, SHARED)
            vector = builder.load(_register(builder, pointer, 0), align=4 * length)
            values = [builder.extract_element(vector, ir.Constant(I32, k)) for k in range(length)]
            return _set(context, builder, sig, args, 0, values)

        return types.void(words, ring, i, x), codegen

    take.__name__ = name
    return intrinsic(take)


start_copy4, start_copy8 = (_make_copy(f"start_copy{n}", n, False) for n in (4, 8))
start_copy4_once, start_copy8_once = (_make_copy(f"start_copy{n}_once", n, True) for n in (4, 8))
take4, take8 = (_make_take(f"take{n}", n) for n in (4, 8))


# ----------------------------------------------------------------------------- the same in the simulator
def _copy_twin(n):
    def twin(thread, site, ring, i, x, j):
        """The words arrive when wait_copies covers them. Until then the place counts as never written."""
        _aligned(_words_in(n, x), i, site)
        _aligned(n, j, site)
        elements = np.array([thread.load(x, j + e, site) for e in range(n)], x.dtype)
        words = list(elements.view(np.float32))
        assert len(words) <= 4, f"{site.what}: {n} of {x.dtype} are more than 16 bytes"
        for e, word in enumerate(words):
            thread.store(ring, i + e, word, site)
            for key in ring.keys(ring.locate(i + e)):
                del ring.memory.writes[key]
        thread.state.setdefault("copies", []).append((ring, i, words, site))

    return twin


def _take_twin(n):
    def twin(thread, site, words, ring, i, x):
        _aligned(_words_in(n, x), i, site)
        got = [thread.load(ring, i + k, site) for k in range(_words_in(n, x))]
        _write(thread, words, np.array(got, np.float32).view(np.uint32), site)

    return twin


for _n, _copies, _take in (
    (4, (start_copy4, start_copy4_once), take4),
    (8, (start_copy8, start_copy8_once), take8),
):
    simulates(_take)(_take_twin(_n))
    for _copy in _copies:
        simulates(_copy)(_copy_twin(_n))
