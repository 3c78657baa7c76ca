"""Intrinsics for what Numba cannot express: 16-byte accesses, and single PTX instructions.

bfloat16 arrays are passed to kernels as uint16: Numba has no such type, and a bf16 is the upper
half of a float32, so widening is a shift. All arithmetic is in float32.

An intrinsic takes register arrays (`cuda.local.array(8, float32)`, or a row of a larger one) and
accesses them at constant indices; when the loops around it are unrolled, they are registers. Each
intrinsic has a Python implementation at the end of this file, which the simulator runs instead.
Names in "quotes" are sections of NVIDIA's PTX ISA manual.
"""

import inspect

import ml_dtypes
import numpy as np

from ...simulator import simulates
from ..runtime.compiler import COMPILER, cuda, float32, int32, int64, uint16, uint32
from .intrinsics import GLOBAL, SHARED, instruction, intrinsic

# Options that numba-cuda-mlir and releases of numba-cuda have, and older ones lack
_JIT = {"forceinline", "launch_bounds"}
if COMPILER == "numba":
    _JIT &= set(inspect.signature(cuda.jit).parameters)


def device(fn):
    """Decorate a device function so that it is always inlined.

    Register arrays that are passed to it then stay in registers.
    """
    inline = {"forceinline": True} if "forceinline" in _JIT else {"inline": "always"}
    return cuda.jit(device=True, **inline)(fn)


def kernel(threads: int, min_blocks: int = 0, **options):
    """Return cuda.jit with launch bounds.

    threads: the block size.
    min_blocks: the minimum of resident blocks per multiprocessor; 0: no minimum.
    """
    if "launch_bounds" in _JIT:
        options["launch_bounds"] = (threads, min_blocks) if min_blocks else threads
    return cuda.jit(**options)


# ----------------------------------------------------------------- 8 or 4 elements of a row at once
def widen(code, bits, upper):
    """Return the low (0) or high (1) half of a 32-bit pair of bf16, as float32."""
    bits = code.and_(bits, 0xFFFF0000) if upper else code.shl(bits, 16)
    return code.bitcast(bits, float32)


def narrow_pair(code, low, high):
    """Return two float32 as a 32-bit pair of bf16, rounded to nearest even.

    PTX ISA, cvt: the first source is the upper half.
    """
    return code.asm("cvt.rn.bf16x2.f32 $0, $2, $1;", uint32, [low, high], effect=False)


def _elements(code, x, i, count, space):
    """Yield x[i : i + count] as float32, in accesses of 16 bytes; 4 bf16 are 8 bytes."""
    if x.is_bf16:
        pairs = code.load(code.pointer(x, i), uint32, space, count // 2)
        yield from [widen(code, pair, upper) for pair in pairs for upper in (0, 1)]
    else:
        yield from code.load(code.pointer(x, i), float32, space, 4, count // 4)


def _about(space):
    """Return the part of a docstring that says what x is."""
    where = {GLOBAL: "global", SHARED: "shared"}[space]
    return f"x: flat, float32 or bf16, in {where} memory."


def _load(name, count, space):
    doc = f"""Set registers[0:{count}] to x[i : i + {count}] as float32. "ld", vectors

    In accesses of 16 bytes; 4 bf16 are 8 bytes. {_about(space)}
    registers: a register array of {count} float32, or a row of one.
    i: a multiple of {count}.
    """

    def load(code, registers, x, i):
        code.set_registers(registers, _elements(code, x, i, count, space))

    return intrinsic(name=name, doc=doc)(load)


def _store(name, count, space):
    doc = f"""Set x[i : i + {count}] to registers[0:{count}]. "st", vectors

    Rounded to nearest even for bf16. In accesses of 16 bytes; 4 bf16 are 8 bytes. {_about(space)}
    i: a multiple of {count}.
    registers: a register array of {count} float32, or a row of one.
    """

    def store(code, x, i, registers):
        values = code.registers(registers, count)
        length = 4
        if x.is_bf16:
            values = [narrow_pair(code, *values[j : j + 2]) for j in range(0, count, 2)]
            length = count // 2
        code.store(code.pointer(x, i), values, space, length)

    return intrinsic(name=name, doc=doc)(store)


# A float32 store8 is two stores, each of half a 32-byte sector: a kernel that writes float32 is
# faster with store4, where neighbouring threads write neighbouring quads.
load8 = _load("load8", 8, GLOBAL)
store8 = _store("store8", 8, GLOBAL)
load4 = _load("load4", 4, GLOBAL)
store4 = _store("store4", 4, GLOBAL)
load8_shared = _load("load8_shared", 8, SHARED)
store8_shared = _store("store8_shared", 8, SHARED)
load4_shared = _load("load4_shared", 4, SHARED)
store4_shared = _store("store4_shared", 4, SHARED)


@intrinsic(returns=float32)
def load1(code, x, i):
    """Return x[i] as float32. "ld"

    x: flat, float32 or bf16, in any memory. i: any index.
    """
    if not x.is_bf16:
        return code.load(code.pointer(x, i), float32)[0]
    (bits,) = code.load(code.pointer(x, i), uint16)
    return widen(code, code.resize(bits, uint32), 0)


@intrinsic(value=float32)
def store1(code, x, i, value):
    """Set x[i] to value, rounded to nearest even for bf16. "st"

    x: flat, float32 or bf16, in any memory. i: any index.
    """
    pointer = code.pointer(x, i)
    if x.is_bf16:
        value = code.resize(narrow_pair(code, value, value), uint16)
    code.store(pointer, [value])


# ----------------------------------------------------------------------------- kernels that overlap
wait_for_previous = instruction(
    "wait_for_previous",
    "griddepcontrol.wait;",
    None,
    doc="""Wait until the previous kernel has finished and its writes are visible.

    For kernels that are launched with programmatic stream serialization: `overlap` in
    runtime/launch.py. Before this call a kernel may only read memory that the previous kernel does
    not write (such as weights), and only write memory that the previous kernel was not given. Every
    block must call it. Compute capability 9.0 and up. "griddepcontrol"
    """,
)
let_next_start = instruction(
    "let_next_start",
    "griddepcontrol.launch_dependents;",
    None,
    doc="""Let blocks of the next kernel start where there is room.

    They start when all blocks of this kernel have called it or finished. If it is called after
    wait_for_previous, the next kernel overlaps only with this one. If it is called before, the next
    kernel may start while two or more earlier kernels still run, and the rules of wait_for_previous
    hold for all of them. (Each of them waits for the one before it, so after wait_for_previous all
    of them have finished.) Compute capability 9.0 and up. "griddepcontrol"
    """,
)


@intrinsic()
def prefetch(code, x, i):
    """Prefetch the 128 bytes around x[i], in global memory, into the L2 cache. "prefetch" """
    code.asm("prefetch.global.L2 [$0];", None, [code.address(x, i, GLOBAL)])


@intrinsic()
def prefetch_run(code, x, i, n):
    """Prefetch x[i : i + n] into the L2 cache. Both ends are multiples of 16 bytes.

    Compute capability 9.0 and up. "cp.async.bulk.prefetch"
    """
    start = code.address(x, i, GLOBAL)
    nbytes = code.resize(code.mul(code.int64(n), x.type.dtype.bitwidth // 8), uint32)
    code.asm("cp.async.bulk.prefetch.L2.global [$0], $1;", None, [start, nbytes])


def _aligned_run(thread, site, x, i, n):
    for elements in (i, n):
        if elements * x.dtype.itemsize % 16:
            raise ValueError(
                f"{site.what}: {n} elements from element {i} on: not multiples of 16 bytes"
            )
    if not 0 <= i <= i + n <= x.size:
        raise ValueError(f"{site.what}: elements {i} to {i + n} are outside an array of {x.size}")


@intrinsic(returns=int32, value=int32)
def atomic_add_acq_rel(code, x, i, value):
    """Add value to x[i], int32 in global memory, and return the old value. "atom", .acq_rel

    All writes that are visible to this thread (its own and, after a barrier, those of its block)
    become visible to every thread whose later call observes this addition. It waits once, for those
    writes; cuda.threadfence before and after an atomic would wait twice.
    """
    text = "atom.acq_rel.gpu.global.add.s32 $0, [$1], $2;"
    return code.asm(text, int32, [code.address(x, i, GLOBAL), value], memory=True)


@intrinsic(value=int64)
def atomic_add_release(code, x, i, value):
    """Add value to x[i], int64 in global memory. "red", .release

    What is visible to this thread becomes visible to those that observe the addition
    (load_acquire). No old value is returned, so the thread does not wait for one.
    """
    text = "red.release.gpu.global.add.u64 [$0], $1;"
    code.asm(text, None, [code.address(x, i, GLOBAL), value], memory=True)


@intrinsic(returns=int64)
def load_acquire(code, x, i):
    """Return x[i], int64 in global memory. "ld", .acquire

    If this thread observes the additions of other threads (atomic_add_release), what these had
    written or seen before is visible to it afterwards, and after a barrier to its block.
    """
    text = "ld.acquire.gpu.global.s64 $0, [$1];"
    return code.asm(text, int64, [code.address(x, i, GLOBAL)], memory=True)


# The simulator runs launches one after the other, but it checks the rules of overlapping ones;
# prefetching has no effect.
simulates(prefetch)(lambda thread, site, x, i: None)
simulates(prefetch_run)(_aligned_run)
simulates(wait_for_previous)(lambda thread, site: thread.wait_for_previous())


@simulates(atomic_add_acq_rel)
def _simulated_add_in_order(thread, site, x, i, value):
    return thread.atomic_add(site, x, i, value, acquires=True, releases=True)


@simulates(atomic_add_release)
def _simulated_add_release(thread, site, x, i, value):
    thread.atomic_add(site, x, i, value, releases=True)


@simulates(load_acquire)
def _simulated_load_acquire(thread, site, x, i):
    return thread.strong_load(site, x, i, acquires=True)


simulates(let_next_start)(lambda thread, site: thread.let_next_start())


# ------------------------------------------------------------------------ the same in the simulator
def _from_memory(thread, x, i, site):
    value = thread.load(x, i, site)
    if x.dtype == np.uint16:
        return (np.uint32(value) << np.uint32(16)).view(np.float32)
    return value


def _to_memory(thread, x, i, value, site):
    value = np.float32(value)
    if x.dtype == np.uint16:
        value = value.astype(ml_dtypes.bfloat16).view(np.uint16)
    thread.store(x, i, value, site)


def _simulated_load(count):
    def simulated(thread, site, registers, x, i):
        _aligned(i, count)
        for j in range(count):
            thread.store(registers, j, _from_memory(thread, x, i + j, site), site)

    return simulated


def _simulated_store(count):
    def simulated(thread, site, x, i, registers):
        _aligned(i, count)
        for j in range(count):
            _to_memory(thread, x, i + j, thread.load(registers, j, site), site)

    return simulated


def _aligned(i, count):
    if i % count:
        raise ValueError(
            f"access to {count} elements at element {i}: the index must be a multiple of {count}"
        )


simulates(load8)(_simulated_load(8))
simulates(load8_shared)(_simulated_load(8))
simulates(store8)(_simulated_store(8))
simulates(store8_shared)(_simulated_store(8))
simulates(load4)(_simulated_load(4))
simulates(load4_shared)(_simulated_load(4))
simulates(store4)(_simulated_store(4))
simulates(store4_shared)(_simulated_store(4))


@simulates(load1)
def _simulated_load1(thread, site, x, i):
    return _from_memory(thread, x, i, site)


@simulates(store1)
def _simulated_store1(thread, site, x, i, value):
    _to_memory(thread, x, i, value, site)
