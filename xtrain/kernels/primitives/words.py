"""Elements packed in 32-bit words: until it is used in arithmetic, a bf16 takes half a register.

A thread that loads data long before it uses them keeps them in words (`cuda.local.array(n,
uint32)`, or a row of a larger array) and unpacks them later. n is 4 or 8: n float32 are n words, n
bf16 are n / 2. Arrays are flat; an index counts elements and is a multiple of n, so these are
accesses of 16 bytes (4 bf16: of 8, 2 bf16: of 4).

    load_words4(words, x, i)      words = x[i : i + 4]
    store_words4(x, i, words)     the reverse
    unpack4(values, words, x)     values[0:4] = words as float32, by the dtype of x
    pack4(words, values, x)       the reverse, rounded to nearest even for bf16

load_words8 and so on: 8 elements. load_words2: 2. load_words4_shared, store_words4_shared: x is in
shared memory. WORD_OPS[n] holds all of them for n elements.
"""

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from ...device import Array
from ...simulator import simulates
from ..runtime.compiler import float32, uint32
from .intrinsics import GLOBAL, SHARED, intrinsic
from .ptx import narrow_pair, widen


def elements_per_vector(*arrays: Array) -> int:
    """Return the number of neighbouring elements that a thread should own.

    It is as many as 16 bytes of the widest of these dtypes hold. Then neighbouring threads own
    neighbouring 16 bytes, and a warp moves whole 128-byte lines. With 8 float32 per thread in two
    accesses, each access of a warp covers every second 16 bytes of the lines, and a copy is 7 %
    slower (H200).
    """
    return 16 // max(a.itemsize for a in arrays)


# ----------------------------------------------------------------------------- code generation
def _accesses(n, x):
    """Return the number of accesses and the words in each."""
    words = n // 2 if x.is_bf16 else n
    return max(words // 4, 1), min(words, 4)


WHERE = {GLOBAL: "global", SHARED: "shared"}


def _make_load(name, n, space):
    doc = f"""Set words to x[i : i + {n}], unchanged. "ld", vectors

    words: a register array of {n} uint32, or a row of one; bf16 fill the first half.
    x: flat, float32 or bf16, in {WHERE[space]} memory.
    i: a multiple of {n}.
    """

    def load(code, words, x, i):
        count, length = _accesses(n, x)
        code.set_registers(words, code.load(code.pointer(x, i), uint32, space, length, count))

    return intrinsic(name=name, doc=doc)(load)


def _make_store(name, n, space):
    doc = f"""Set x[i : i + {n}] to words, unchanged. "st", vectors

    x: flat, float32 or bf16, in {WHERE[space]} memory.
    i: a multiple of {n}.
    words: a register array of {n} uint32, or a row of one; bf16 fill the first half.
    """

    def store(code, x, i, words):
        count, length = _accesses(n, x)
        values = code.registers(words, count * length)
        code.store(code.pointer(x, i), values, space, length)

    return intrinsic(name=name, doc=doc)(store)


def _make_unpack(name, n):
    doc = f"""Set values[0:{n}] to the elements in words as float32.

    values: a register array of {n} float32. words: as loaded from x.
    x: the array whose dtype says what the words hold; it is not read.
    """

    def unpack(code, values, words, x):
        if x.is_bf16:
            pairs = code.registers(words, n // 2)
            floats = [widen(code, pair, upper) for pair in pairs for upper in (0, 1)]
        else:
            floats = [code.bitcast(word, float32) for word in code.registers(words, n)]
        code.set_registers(values, floats)

    return intrinsic(name=name, doc=doc)(unpack)


def _make_pack(name, n):
    doc = f"""Set words to values[0:{n}] as elements of x, rounded to nearest even for bf16. "cvt"

    words: a register array of {n} uint32. values: of {n} float32.
    x: the array whose dtype says what the words hold; it is not written.
    """

    def pack(code, words, values, x):
        floats = code.registers(values, n)
        if x.is_bf16:
            new = [narrow_pair(code, *pair) for pair in zip(floats[::2], floats[1::2])]
        else:
            new = [code.bitcast(value, uint32) for value in floats]
        code.set_registers(words, new)

    return intrinsic(name=name, doc=doc)(pack)


@dataclass(frozen=True)
class WordOps:
    """The intrinsics for n elements, see the file's docstring."""

    load: Callable
    store: Callable
    load_shared: Callable
    store_shared: Callable
    unpack: Callable
    pack: Callable


WORD_OPS = {
    n: WordOps(
        load=_make_load(f"load_words{n}", n, GLOBAL),
        store=_make_store(f"store_words{n}", n, GLOBAL),
        load_shared=_make_load(f"load_words{n}_shared", n, SHARED),
        store_shared=_make_store(f"store_words{n}_shared", n, SHARED),
        unpack=_make_unpack(f"unpack{n}", n),
        pack=_make_pack(f"pack{n}", n),
    )
    for n in (2, 4, 8)
}
load_words2 = WORD_OPS[2].load
load_words4 = WORD_OPS[4].load
load_words8 = WORD_OPS[8].load
store_words4 = WORD_OPS[4].store
store_words8 = WORD_OPS[8].store
load_words4_shared = WORD_OPS[4].load_shared
load_words8_shared = WORD_OPS[8].load_shared
store_words4_shared = WORD_OPS[4].store_shared
store_words8_shared = WORD_OPS[8].store_shared
unpack4 = WORD_OPS[4].unpack
pack4 = WORD_OPS[4].pack
unpack8 = WORD_OPS[8].unpack


# ------------------------------------------------------------------------ the same in the simulator
def _aligned(n, i, site):
    if i % n:
        raise ValueError(
            f"{site.what}: access to {n} elements at element {i}: "
            f"the index must be a multiple of {n}"
        )


def _read(thread, registers, n, dtype, site):
    return np.array(thread.load_registers(registers, n, site), dtype)


def _words_in(n, x):
    return n * x.dtype.itemsize // 4


def _simulated_load(n):
    def simulated(thread, site, words, x, i):
        _aligned(n, i, site)
        elements = np.array(thread.load_elements(x, i, n, site), x.dtype)
        thread.store_registers(words, elements.view(np.uint32), site)

    return simulated


def _simulated_store(n):
    def simulated(thread, site, x, i, words):
        _aligned(n, i, site)
        elements = _read(thread, words, _words_in(n, x), np.uint32, site).view(x.dtype)
        thread.store_elements(x, i, elements, site)

    return simulated


def _simulated_unpack(n):
    def simulated(thread, site, values, words, x):
        elements = _read(thread, words, _words_in(n, x), np.uint32, site).view(x.dtype)
        if x.dtype == np.uint16:
            elements = (elements.astype(np.uint32) << np.uint32(16)).view(np.float32)
        thread.store_registers(values, elements, site)

    return simulated


def _simulated_pack(n):
    def simulated(thread, site, words, values, x):
        floats = _read(thread, values, n, np.float32, site)
        if x.dtype == np.uint16:
            floats = floats.astype(ml_dtypes.bfloat16)
        thread.store_registers(words, floats.view(np.uint32), site)

    return simulated


for _n, _ops in WORD_OPS.items():
    simulates(_ops.load)(_simulated_load(_n))
    simulates(_ops.load_shared)(_simulated_load(_n))
    simulates(_ops.store)(_simulated_store(_n))
    simulates(_ops.store_shared)(_simulated_store(_n))
    simulates(_ops.unpack)(_simulated_unpack(_n))
    simulates(_ops.pack)(_simulated_pack(_n))
