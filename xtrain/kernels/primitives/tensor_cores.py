"""Tensor-core instructions and the data movement around them, for compute capability 8.0 and up.

    mma_bf16                        a warp multiplies a 16 x 16 by a 16 x 8 tile and accumulates
    transpose_pairs                 a warp transposes an 8 x 8 tile that it holds in registers
    ldmatrix, ldmatrix_trans        shared memory -> the operands of mma, as 8 x 8 tiles
    cp_async16, cp_async4       global -> shared memory, bypassing registers; threads continue
    cp_async_commit, cp_async_wait      group these copies, wait until groups have arrived
    store16, load16_shared, ...     16 bytes of bf16 in one access
    exp2, log2, fmax, warp_id, pack_bf16, low_bf16, high_bf16

A fragment, the part of a tile that a lane holds, is a register array (see ptx.py). Shared memory is
one flat uint16 array; its indices count elements, so 16 bytes are 8 elements. The second half of
the file has a Python implementation of each instruction, for the simulator. Names in "quotes" are
sections of NVIDIA's PTX ISA manual.
"""

import ml_dtypes
import numpy as np

from ...simulator import KernelError, simulates
from ..runtime.compiler import float32, int32, uint32
from .intrinsics import GLOBAL, LITERAL, SHARED, instruction, intrinsic
from .ptx import narrow_pair, widen


# ----------------------------------------------------------------------------- the tensor core
@intrinsic()
def mma_bf16(code, c, a, b):
    """Add A B to c[0:4] for one warp; A (16, 16) and B (16, 8) bf16, C (16, 8) float32.

    "Matrix Fragments for mma.m16n8k16 with floating point type". A is in a[0:4], B in b[0:2]. Lane
    4 g + t holds two neighbouring elements per register:
        A   a[0] row g, a[1] row g + 8: columns 2t, 2t + 1; a[2], a[3] the same rows, columns + 8
        B   b[0] rows 2t, 2t + 1, b[1] rows 2t + 8, 2t + 9: column g
        C   c[0], c[1] row g, c[2], c[3] row g + 8: columns 2t, 2t + 1
    """
    text = (
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
    )
    operands = code.registers(a, 4) + code.registers(b, 2) + code.registers(c, 4)
    code.set_registers(c, code.asm(text, [float32] * 4, operands))


def _ldmatrix(name, option, which=""):
    doc = f"""Set registers[0:4] to four 8 x 8 matrices of bf16, one register each. "ldmatrix"

    Row r of matrix m starts at element (i ^ flip) + more of smem, where i is the argument of lane
    8 m + r. Lane 4 g + t receives row g, columns 2t and 2t + 1{which}.
    registers: a register array of 4 uint32, or a row of one.
    smem: flat uint16 in shared memory.
    i: a multiple of 8, different in each lane.
    flip, more: the same in all lanes. They are constants, so one i serves a whole product.
    """
    text = f"ldmatrix.sync.aligned.m8n8.x4{option}.shared.b16 {{$0,$1,$2,$3}}, [$4];"

    def ldmatrix(code, registers, smem, i, flip, more):
        address = code.address(smem, i, SHARED)
        # Hides the sum from the compiler, which would otherwise compute another one for each
        # `more`.
        address = code.asm("mov.b32 $0, $1;", uint32, [address], effect=False)
        flip, more = (code.mul(code.int32(x), 2) for x in (flip, more))
        address = code.add(code.xor(address, flip), more)
        code.set_registers(registers, code.asm(text, [uint32] * 4, [address], memory=True))

    return intrinsic(name=name, doc=doc)(ldmatrix)


ldmatrix = _ldmatrix("ldmatrix", "")
ldmatrix_trans = _ldmatrix("ldmatrix_trans", ".trans", " of the transposed matrices")


# ----------------------------------------------------------------------------- asynchronous copies
def _copy_async(name, cache, nbytes, where):
    doc = f"""Start a copy of {nbytes} bytes from x[j] to smem[i]. "cp.async"

    It has arrived after cp_async_wait, for other threads after the next barrier.
    {where}
    valid: if False, x is not read and zeros are written.
    """
    text = f"cp.async.{cache}.shared.global [$0], [$1], {nbytes}, $2;"

    def copy(code, smem, i, x, j, valid):
        target = code.address(smem, i, SHARED)
        source = code.address(x, j, GLOBAL)
        code.asm(text, None, [target, source, code.choose(valid, nbytes, 0)], memory=True)

    return intrinsic(name=name, doc=doc)(copy)


# .cg bypasses the L1 cache and copies 16 bytes only; .ca can copy 4.
cp_async16 = _copy_async(
    "cp_async16", "cg", 16, "smem: flat uint16, shared. x: flat uint16. i, j: multiples of 8."
)
cp_async4 = _copy_async("cp_async4", "ca", 4, "smem: flat float32, shared. x: flat float32.")


cp_async_commit = instruction(
    "cp_async_commit",
    "cp.async.commit_group;",
    None,
    doc="""Make the copies that this thread has started since the last commit one group.

    "cp.async.commit_group"
    """,
)


@intrinsic(n=LITERAL)
def cp_async_wait(code, n):
    """Wait until at most n of this thread's groups of copies are in flight.

    Other threads see the data after the next barrier. "cp.async.wait_group"
    n: a constant.
    """
    code.asm(f"cp.async.wait_group {n};", memory=True)


# ----------------------------------------------------------------------------- 16 bytes of bf16
def _store16(name, space, where):
    doc = f"""Set x[i : i + 8] to registers[0:4]: 8 bf16 as 4 pairs. "st", vectors

    x: flat uint16, {where}. i: a multiple of 8.
    registers: a register array of 4 uint32, or a row of one.
    """

    def store16(code, x, i, registers):
        value = code.vector(code.registers(registers, 4))
        code.store(code.address(x, i, space), [value], space)

    return intrinsic(name=name, doc=doc)(store16)


store16 = _store16("store16", GLOBAL, "in global memory")
store16_shared = _store16("store16_shared", SHARED, "in shared memory")


@intrinsic()
def load16_shared(code, registers, smem, i):
    """Set registers[0:4] to smem[i : i + 8]: 8 bf16 as 4 pairs. "ld", vectors

    registers: a register array of 4 uint32, or a row of one.
    smem: flat uint16 in shared memory. i: a multiple of 8.
    """
    code.set_registers(registers, code.load(code.address(smem, i, SHARED), uint32, SHARED, 4))


@intrinsic(pair=uint32)
def store_pair_shared(code, smem, i, pair):
    """Set smem[i], smem[i + 1] to the two bf16 of `pair`. "st"

    smem: flat uint16 in shared memory. i: even. pair: uint32, the first in the lower half.
    """
    code.store(code.address(smem, i, SHARED), [pair], SHARED)


@intrinsic()
def load2_shared(code, registers, smem, i):
    """Set registers[0:2] to smem[i : i + 2]. "ld", vectors

    registers: a register array of 2 float32. smem: flat float32 in shared memory. i: even.
    """
    code.set_registers(registers, code.load(code.address(smem, i, SHARED), float32, SHARED, 2))


# ----------------------------------------------------------------------------- values
exp2 = instruction(
    "exp2",
    "ex2.approx.ftz.f32 $0, $1;",
    float32,
    doc="""Return 2 ** x, with an error of two units in the last place; exp2(-inf) is 0. "ex2" """,
    pure=True,
    x=float32,
)
log2 = instruction(
    "log2",
    "lg2.approx.ftz.f32 $0, $1;",
    float32,
    doc="""Return log2(x), with an error of two units in the last place. "lg2" """,
    pure=True,
    x=float32,
)
fmax = instruction(
    "fmax",
    "max.f32 $0, $1, $2;",
    float32,
    doc="""Return the larger of two float32; a NaN counts as missing. "max" """,
    pure=True,
    x=float32,
    y=float32,
)
pack_bf16 = intrinsic(
    uint32,
    "pack_bf16",
    """Return two float32 as a pair of bf16, rounded to nearest even. "cvt"

    low: becomes bits 0 to 15.
    """,
    low=float32,
    high=float32,
)(narrow_pair)
low_bf16 = intrinsic(
    float32,
    "low_bf16",
    "Return the bf16 in bits 0 to 15 of a pair, as float32.",
    pair=uint32,
)(lambda code, pair: widen(code, pair, 0))
high_bf16 = intrinsic(
    float32,
    "high_bf16",
    "Return the bf16 in bits 16 to 31 of a pair, as float32.",
    pair=uint32,
)(lambda code, pair: widen(code, pair, 1))
transpose_pairs = instruction(
    "transpose_pairs",
    "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;",
    uint32,
    doc="""Transpose an 8 x 8 matrix of 16-bit numbers that a warp holds. "movmatrix"

    Lane 4 g + t has elements 2t, 2t + 1 of row g and receives those of column g.
    """,
    memory=False,
    pair=uint32,
)
warp_id = instruction(
    "warp_id",
    "{ .reg .u32 t; mov.u32 t, %tid.x; shr.u32 t, t, 5; shfl.sync.idx.b32 $0, t, 0, 31, -1; }",
    int32,
    doc="""Return threadIdx.x // 32. "shfl.sync"

    The shuffle tells the compiler that it is the same in the whole warp.
    """,
    pure=True,
)
opaque = instruction(
    "opaque",
    "mov.b32 $0, $1;",
    int32,
    doc="""Return n, hidden from the compiler. "mov"

    It does not unroll a loop up to n, or compute an address from n before a loop.
    """,
    n=int32,
)


# ------------------------------------------------------------------------ the same in the simulator
def _misuse(site, text):
    return KernelError(f"{site.what} in {site.function}: {text}", (site,))


def _aligned16(index, site):
    if index % 8:
        raise _misuse(site, f"element {index} is not 16-byte aligned")


def _pairs(halves):
    """Return 16-bit numbers (low, high, low ...) as 32-bit pairs."""
    return [np.uint32(int(a) | int(b) << 16) for a, b in zip(halves[::2], halves[1::2])]


def _halves(pairs):
    return [np.uint16(int(p) >> s & 0xFFFF) for p in pairs for s in (0, 16)]


def _to_float32(halves):
    """Return the values of bf16 bits in float32."""
    return (np.asarray(halves, np.uint32) << np.uint32(16)).view(np.float32)


def _float32_of(bits):
    return np.uint32(bits).view(np.float32)


def _register_index(registers, j):
    return j if registers.ndim == 1 else np.unravel_index(j, registers.dims)


def _fragment(thread, registers, n, site):
    if registers.ndim == 1:
        return thread.load_registers(registers, n, site)
    return [thread.load(registers, _register_index(registers, j), site) for j in range(n)]


def _set_fragment(thread, registers, values, site):
    if registers.ndim == 1:
        thread.store_registers(registers, np.asarray(values), site)
        return
    for j, value in enumerate(values):
        thread.store(registers, _register_index(registers, j), value, site)


def add_products(C, A, B):
    """Return C + A B in float32, rounded once, as a tensor core adds the terms of one instruction.

    So the bits do not depend on the shape of A and B.
    """
    return (C + A.astype(np.float64) @ B.astype(np.float64)).astype(np.float32)


@simulates(mma_bf16, collective=True)
def _mma_bf16(threads, sites, args):
    fragments: tuple[list, list, list] = ([], [], [])
    for thread, site, (c, a, b) in zip(threads, sites, args):
        for lanes, registers, n in zip(fragments, (a, b, c), (4, 2, 4)):
            lanes.append(_fragment(thread, registers, n, site))
    # Lane 4 g + t has elements 2t, 2t + 1 of row g of each 8 x 8 part of A and C, and of column g
    # of each part of B.
    a, b = (
        np.array([[int(pair) for pair in lane] for lane in x], np.uint32) for x in fragments[:2]
    )
    A = _to_float32(a.view(np.uint16)).reshape(8, 4, 2, 2, 2).transpose(3, 0, 2, 1, 4)
    B = _to_float32(b.view(np.uint16)).reshape(8, 4, 2, 2).transpose(2, 1, 3, 0)
    C = np.array(fragments[2], np.float32).reshape(8, 4, 2, 2).transpose(2, 0, 1, 3)
    C = add_products(C.reshape(16, 8), A.reshape(16, 16), B.reshape(16, 8))
    results = C.reshape(2, 8, 4, 2).transpose(1, 2, 0, 3).reshape(32, 4)
    for thread, site, (c, _, _), result in zip(threads, sites, args, results):
        _set_fragment(thread, c, result, site)
    return [None] * len(threads)


def _simulated_ldmatrix(transpose):
    def run(threads, sites, args):
        matrices = np.empty((4, 8, 8), np.uint16)
        banks: list[set[int]] = [set() for _ in range(4)]
        for thread, site, (_, smem, i, flip, more) in zip(threads, sites, args):
            start = (int(i) ^ int(flip)) + int(more)
            m = thread.lane // 8
            _aligned16(start, site)
            unit = 512 if int(flip) >= 128 else 256  # bytes; of rows of 256 elements, and of others
            if int(flip) and thread.block.static_bytes % unit:
                raise _misuse(
                    site,
                    "i ^ flip is computed on addresses, and the dynamic shared memory begins "
                    f"behind {thread.block.static_bytes} bytes of static arrays: make each of them "
                    f"a multiple of {unit} bytes",
                )
            matrices[m, thread.lane % 8] = thread.load_elements(smem, start, 8, site)
            banks[m].add(start // 8 % 8)
        n = min(map(len, banks))
        if n < 8:  # not wrong but slow; a correctly swizzled tile has no conflicts
            raise _misuse(sites[0], f"bank conflict: 8 rows of 16 bytes use {n} of 8 bank groups")
        if transpose:
            matrices = np.ascontiguousarray(matrices.transpose(0, 2, 1))
        pairs = matrices.view(np.uint32)  # lane 4 g + t receives [:, g, t]
        for thread, site, (registers, *_) in zip(threads, sites, args):
            _set_fragment(thread, registers, pairs[(slice(None), *divmod(thread.lane, 4))], site)
        return [None] * len(threads)

    return run


simulates(ldmatrix, collective=True)(_simulated_ldmatrix(False))
simulates(ldmatrix_trans, collective=True)(_simulated_ldmatrix(True))


@simulates(transpose_pairs, collective=True)
def _transpose_pairs(threads, sites, args):
    lanes = [thread.lane for thread in threads]
    matrix = np.empty((8, 8), np.uint16)
    for lane, (pair,) in zip(lanes, args):
        matrix[lane // 4, 2 * (lane % 4) :][:2] = _halves([pair])
    return [_pairs(matrix[2 * (lane % 4) :, lane // 4][:2])[0] for lane in lanes]


def _simulated_copy(n):
    def run(thread, site, smem, i, x, j, valid):
        """Start a copy, whose data arrives when cp_async_wait covers it.

        Until then the elements count as uninitialized.
        """
        if n == 8:
            _aligned16(i, site)
            _aligned16(j if valid else 0, site)
        values = [thread.load(x, j + e, site) if valid else x.dtype.type(0) for e in range(n)]
        for e, value in enumerate(values):
            # Detects a race with threads that still use these elements.
            thread.store(smem, i + e, value, site)
            for key in smem.keys(smem.locate(i + e)):
                del smem.memory.writes[key]
        thread.state.setdefault("copies", []).append((smem, i, values, site))

    return run


simulates(cp_async16)(_simulated_copy(8))
simulates(cp_async4)(_simulated_copy(1))


@simulates(cp_async_commit)
def _commit_copies(thread, site):
    thread.state.setdefault("groups", []).append(thread.state.pop("copies", []))


@simulates(cp_async_wait)
def _wait_copies(thread, site, n):
    groups = thread.state.setdefault("groups", [])
    while len(groups) > n:
        for smem, i, values, copy_site in groups.pop(0):
            for e, value in enumerate(values):
                thread.store(smem, i + e, value, copy_site)


def _simulated_store16(thread, site, x, i, registers):
    _aligned16(i, site)
    for j, half in enumerate(_halves(_fragment(thread, registers, 4, site))):
        thread.store(x, i + j, half, site)


simulates(store16)(_simulated_store16)
simulates(store16_shared)(_simulated_store16)


@simulates(load16_shared)
def _load16_shared(thread, site, registers, smem, i):
    _aligned16(i, site)
    halves = [thread.load(smem, i + j, site) for j in range(8)]
    _set_fragment(thread, registers, _pairs(halves), site)


@simulates(load2_shared)
def _load2_shared(thread, site, registers, smem, i):
    if i % 2:
        raise _misuse(site, f"element {i} is not 8-byte aligned")
    _set_fragment(thread, registers, [thread.load(smem, i + j, site) for j in range(2)], site)


@simulates(store_pair_shared)
def _store_pair_shared(thread, site, smem, i, pair):
    for j, half in enumerate(_halves([pair])):
        thread.store(smem, i + j, half, site)


def _bits(x):
    return np.float32(x).astype(ml_dtypes.bfloat16).view(np.uint16)


simulates(exp2)(lambda thread, site, x: np.exp2(np.float32(x)))
simulates(log2)(lambda thread, site, x: np.log2(np.float32(x)))
simulates(fmax)(lambda thread, site, x, y: np.fmax(np.float32(x), np.float32(y)))
simulates(pack_bf16)(lambda thread, site, x, y: _pairs([_bits(x), _bits(y)])[0])
simulates(low_bf16)(lambda thread, site, pair: _float32_of(int(pair) << 16 & 0xFFFF0000))
simulates(high_bf16)(lambda thread, site, pair: _float32_of(int(pair) & 0xFFFF0000))
simulates(warp_id)(lambda thread, site: np.int64(thread.warp))
simulates(opaque)(lambda thread, site, n: n)
