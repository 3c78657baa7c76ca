"""Intrinsics for what Numba cannot express: 16-byte accesses, and single PTX instructions.

bfloat16 arrays are passed to kernels as uint16: Numba has no such type, and a bf16 is the upper half of a float32, so
widening is a shift. All arithmetic is in float32.

An intrinsic takes register arrays (`cuda.local.array(8, float32)`, or a row of a larger one) and accesses them at constant
indices; when the loops around it are unrolled, they are registers. Each intrinsic has a Python implementation at the end of
this file, which the simulator runs instead. Names in "quotes" are sections of NVIDIA's PTX ISA manual.
"""

import inspect
from typing import Any

import ml_dtypes
import numpy as np
from llvmlite import ir
from numba import cuda, types

from ...simulator import simulates
from ...simulator.early import let_next, wait

intrinsic: Any
try:
    from numba.cuda.extending import intrinsic
except ImportError:  # older releases
    from numba.extending import intrinsic

I8, I16, I32, I64, F32 = (
    ir.IntType(8),
    ir.IntType(16),
    ir.IntType(32),
    ir.IntType(64),
    ir.FloatType(),
)
GLOBAL, SHARED = 1, 3  # NVVM's address spaces

_JIT = inspect.signature(cuda.jit).parameters


def device(fn):
    """Decorator: a device function that is always inlined, so register arrays passed to it stay in registers."""
    inline = {"forceinline": True} if "forceinline" in _JIT else {"inline": "always"}
    return cuda.jit(device=True, **inline)(fn)


def kernel(threads: int, min_blocks: int = 0, **options):
    """cuda.jit with launch bounds: the block size, and the minimum of resident blocks per multiprocessor (0: no minimum)."""
    if "launch_bounds" in _JIT:
        options["launch_bounds"] = (threads, min_blocks) if min_blocks else threads
    return cuda.jit(**options)


# ----------------------------------------------------------------------------- helpers for code generation
def _data(context, builder, array_type, array):
    return context.make_array(array_type)(context, builder, value=array).data


def _int64(builder, value, number):
    if value.type.width >= 64:
        return value
    return builder.sext(value, I64) if number.signed else builder.zext(value, I64)


def _vector(context, builder, sig, args, a, i, element, length, space):
    """Pointer to the vector of `length` elements at args[a][args[i]] in address space `space`. No bounds check."""
    pointer = builder.gep(
        _data(context, builder, sig.args[a], args[a]), [_int64(builder, args[i], sig.args[i])]
    )
    there = builder.addrspacecast(pointer, ir.PointerType(pointer.type.pointee, space))
    return builder.bitcast(there, ir.PointerType(ir.VectorType(element, length), space))


def _register(builder, pointer, j):
    return builder.gep(pointer, [ir.Constant(I32, j)])


def _widen(builder, bits, is_bf16):
    """The low (0) or high (1) half of a 32-bit pair of bf16, as float32"""
    if is_bf16:
        bits = builder.and_(bits, ir.Constant(I32, 0xFFFF0000))
    else:
        bits = builder.shl(bits, ir.Constant(I32, 16))
    return builder.bitcast(bits, F32)


def _narrow_pair(builder, low, high):
    """Two float32 -> a 32-bit pair of bf16, rounded to nearest even. PTX ISA, cvt: the first source is the upper half."""
    function = ir.FunctionType(I32, [F32, F32])
    asm = ir.InlineAsm(function, "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", side_effect=False)
    return builder.call(asm, [low, high])


# ----------------------------------------------------------------------------- 8 or 4 elements of a row at once
def _load(name, count, space):
    def load(typingctx, registers, x, i):
        is_bf16 = isinstance(x.dtype, types.Integer)
        word, length = (I32, count // 2) if is_bf16 else (F32, 4)  # one access: 16 or 8 bytes

        def codegen(context, builder, sig, args):
            out = _data(context, builder, sig.args[0], args[0])
            pointer = _vector(context, builder, sig, args, 1, 2, word, length, space)
            values = []
            for j in range(count // (2 * length if is_bf16 else length)):
                vector = builder.load(_register(builder, pointer, j), align=4 * length)
                at = [ir.Constant(I32, k) for k in range(length)]
                values += [builder.extract_element(vector, k) for k in at]
            if is_bf16:
                values = [_widen(builder, values[j // 2], j % 2) for j in range(count)]
            for j, value in enumerate(values):
                builder.store(value, _register(builder, out, j))
            return context.get_dummy_value()

        return types.void(registers, x, i), codegen

    load.__name__ = name
    return intrinsic(load)


def _store(name, count, space):
    def store(typingctx, x, i, registers):
        is_bf16 = isinstance(x.dtype, types.Integer)
        word, length = (I32, count // 2) if is_bf16 else (F32, 4)

        def codegen(context, builder, sig, args):
            source = _data(context, builder, sig.args[2], args[2])
            values = [builder.load(_register(builder, source, j)) for j in range(count)]
            if is_bf16:
                values = [_narrow_pair(builder, *values[j : j + 2]) for j in range(0, count, 2)]
            pointer = _vector(context, builder, sig, args, 0, 1, word, length, space)
            for j in range(0, len(values), length):
                vector = ir.Constant(ir.VectorType(word, length), ir.Undefined)
                for k in range(length):
                    vector = builder.insert_element(vector, values[j + k], ir.Constant(I32, k))
                builder.store(vector, _register(builder, pointer, j // length), align=4 * length)
            return context.get_dummy_value()

        return types.void(x, i, registers), codegen

    store.__name__ = name
    return intrinsic(store)


# load8(registers, x, i): registers[0:8] = x[i : i + 8] as float32. x: flat, float32 or bf16; i: a multiple of 8.
# store8(x, i, registers): the reverse, rounded to nearest even for bf16. Both use 16-byte accesses.
# load4, store4: 4 elements, i a multiple of 4; 16 bytes in float32, 8 in bf16. A float32 store8 is two stores, each of
# half a 32-byte sector: a kernel that writes float32 is faster with store4, where neighbouring threads write neighbouring
# quads.
load8, store8 = _load("load8", 8, GLOBAL), _store("store8", 8, GLOBAL)
load4, store4 = _load("load4", 4, GLOBAL), _store("store4", 4, GLOBAL)
load8_shared, store8_shared = _load("load8_shared", 8, SHARED), _store("store8_shared", 8, SHARED)
load4_shared, store4_shared = _load("load4_shared", 4, SHARED), _store("store4_shared", 4, SHARED)


@intrinsic
def load1(typingctx, x, i):
    """x[i] as float32. x: flat, float32 or bf16."""
    is_bf16 = isinstance(x.dtype, types.Integer)

    def codegen(context, builder, sig, args):
        pointer = builder.gep(
            _data(context, builder, sig.args[0], args[0]), [_int64(builder, args[1], sig.args[1])]
        )
        value = builder.load(pointer)
        return _widen(builder, builder.zext(value, I32), 0) if is_bf16 else value

    return types.float32(x, i), codegen


@intrinsic
def store1(typingctx, x, i, value):
    """x[i] = value, rounded to nearest even for bf16."""
    is_bf16 = isinstance(x.dtype, types.Integer)

    def codegen(context, builder, sig, args):
        pointer = builder.gep(
            _data(context, builder, sig.args[0], args[0]), [_int64(builder, args[1], sig.args[1])]
        )
        value = args[2]
        if is_bf16:
            value = builder.trunc(_narrow_pair(builder, value, value), I16)
        builder.store(value, pointer)
        return context.get_dummy_value()

    return types.void(x, i, types.float32), codegen


# ----------------------------------------------------------------------------- kernels that overlap
def _grid_control(name, instruction):
    def control(typingctx):
        def codegen(context, builder, sig, args):
            function = ir.FunctionType(ir.VoidType(), [])
            asm = ir.InlineAsm(function, f"{instruction};", "~{memory}", side_effect=True)
            builder.call(asm, [])
            return context.get_dummy_value()

        return types.void(), codegen

    control.__name__ = name
    return intrinsic(control)


# For kernels launched with overlap (runtime/launch.py). Compute capability 9.0 and up, "griddepcontrol".
# wait_for_previous(): when it returns, the previous kernel has finished and its writes are visible. Before this call a kernel
# may only read memory that the previous kernel does not write (such as weights), and only write memory that the previous
# kernel was not given. Every block must call it.
# let_next_start(): when all blocks have called it or finished, blocks of the next kernel may start where there is room. If it
# is called after wait_for_previous, the next kernel overlaps only with this one. If it is called before, the next kernel may
# start while two or more earlier kernels still run, and the rules above hold for all of them. (Each of them waits for the one
# before it, so after wait_for_previous all of them have finished.)
wait_for_previous = _grid_control("wait_for_previous", "griddepcontrol.wait")
let_next_start = _grid_control("let_next_start", "griddepcontrol.launch_dependents")


@intrinsic
def prefetch(typingctx, x, i):
    """Prefetch the 128 bytes around x[i], in global memory, into the L2 cache. "prefetch" """

    def codegen(context, builder, sig, args):
        pointer = builder.gep(
            _data(context, builder, sig.args[0], args[0]), [_int64(builder, args[1], sig.args[1])]
        )
        there = builder.addrspacecast(pointer, ir.PointerType(pointer.type.pointee, GLOBAL))
        function = ir.FunctionType(ir.VoidType(), [I64])
        asm = ir.InlineAsm(function, "prefetch.global.L2 [$0];", "l", side_effect=True)
        builder.call(asm, [builder.ptrtoint(there, I64)])
        return context.get_dummy_value()

    return types.void(x, i), codegen


@intrinsic
def prefetch_run(typingctx, x, i, n):
    """Prefetch x[i : i + n] into the L2 cache. Both ends are multiples of 16 bytes. Compute capability 9.0 and up.
    "cp.async.bulk.prefetch" """

    def codegen(context, builder, sig, args):
        pointer = builder.gep(
            _data(context, builder, sig.args[0], args[0]), [_int64(builder, args[1], sig.args[1])]
        )
        there = builder.addrspacecast(pointer, ir.PointerType(pointer.type.pointee, GLOBAL))
        bytes_of_one = ir.Constant(I64, sig.args[0].dtype.bitwidth // 8)
        count = builder.mul(_int64(builder, args[2], sig.args[2]), bytes_of_one)
        function = ir.FunctionType(ir.VoidType(), [I64, I32])
        text = "cp.async.bulk.prefetch.L2.global [$0], $1;"
        asm = ir.InlineAsm(function, text, "l,r", side_effect=True)
        builder.call(asm, [builder.ptrtoint(there, I64), builder.trunc(count, I32)])
        return context.get_dummy_value()

    return types.void(x, i, n), codegen


def _aligned_run(thread, site, x, i, n):
    for at in (i, n):
        if at * x.dtype.itemsize % 16:
            raise ValueError(
                f"{site.what}: {n} elements from element {i} on: not multiples of 16 bytes"
            )
    if not 0 <= i <= i + n <= x.size:
        raise ValueError(f"{site.what}: elements {i} to {i + n} are outside an array of {x.size}")


@intrinsic
def atomic_add_in_order(typingctx, x, i, value):
    """x[i] += value, int32 or int64 in global memory; returns the old value. With acquire-release ordering ("atom", .acq_rel).

    All writes that are visible to this thread (its own and, after a barrier, those of its block) become visible to every
    thread whose later call observes this addition. It waits once, for those writes; cuda.threadfence before and after an
    atomic would wait twice.
    """
    word, kind, name = (I64, "u64", "l") if x.dtype.bitwidth == 64 else (I32, "s32", "r")

    def codegen(context, builder, sig, args):
        pointer = builder.gep(
            _data(context, builder, sig.args[0], args[0]), [_int64(builder, args[1], sig.args[1])]
        )
        there = builder.addrspacecast(pointer, ir.PointerType(pointer.type.pointee, GLOBAL))
        function = ir.FunctionType(word, [I64, word])
        text = f"atom.acq_rel.gpu.global.add.{kind} $0, [$1], $2;"
        asm = ir.InlineAsm(function, text, f"={name},l,{name},~{{memory}}", side_effect=True)
        return builder.call(asm, [builder.ptrtoint(there, I64), args[2]])

    return x.dtype(x, i, x.dtype), codegen


@intrinsic
def load_acquire(typingctx, x, i):
    """x[i], int64 in global memory. With acquire ordering ("ld", .acquire).

    What the threads that have made additions in order (atomic_add_in_order) had written or seen before is visible to this
    thread afterwards if it observes their additions, and after a barrier to its block.
    """

    def codegen(context, builder, sig, args):
        pointer = builder.gep(
            _data(context, builder, sig.args[0], args[0]), [_int64(builder, args[1], sig.args[1])]
        )
        there = builder.addrspacecast(pointer, ir.PointerType(pointer.type.pointee, GLOBAL))
        function = ir.FunctionType(I64, [I64])
        text = "ld.acquire.gpu.global.s64 $0, [$1];"
        asm = ir.InlineAsm(function, text, "=l,l,~{memory}", side_effect=True)
        return builder.call(asm, [builder.ptrtoint(there, I64)])

    return types.int64(x, i), codegen


# The simulator runs launches one after the other, but it checks the rules of overlapping ones; prefetching has no effect.
simulates(prefetch)(lambda thread, site, x, i: None)
simulates(prefetch_run)(_aligned_run)
simulates(wait_for_previous)(wait)


@simulates(atomic_add_in_order)
def _simulated_add_in_order(thread, site, x, i, value):
    thread.threadfence()
    return thread.atomic_add(site, x, i, value)


@simulates(load_acquire)
def _simulated_load_acquire(thread, site, x, i):
    return thread.load_acquire(site, x, i)


simulates(let_next_start)(let_next)


# ----------------------------------------------------------------------------- the same in the simulator
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


for _intrinsic in (load8, load8_shared):
    simulates(_intrinsic)(_simulated_load(8))
for _intrinsic in (store8, store8_shared):
    simulates(_intrinsic)(_simulated_store(8))
for _intrinsic in (load4, load4_shared):
    simulates(_intrinsic)(_simulated_load(4))
for _intrinsic in (store4, store4_shared):
    simulates(_intrinsic)(_simulated_store(4))


@simulates(load1)
def _simulated_load1(thread, site, x, i):
    return _from_memory(thread, x, i, site)


@simulates(store1)
def _simulated_store1(thread, site, x, i, value):
    _to_memory(thread, x, i, value, site)
