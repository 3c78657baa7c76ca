"""Instructions of compute capability 9.0 ("sm_90a"): asynchronous matrix products of a warpgroup (wgmma), asynchronous copies
of tiles (TMA), and the barriers in shared memory that signal their completion.

    make_product, make_wait, make_hold  wgmma: 128 threads multiply 64 x 16k by 16k x n, asynchronously until make_wait
    make_descriptor                     the matrix descriptor of an operand in shared memory
    load_tile, load_row, store_tile     TMA: one thread starts a copy of a box of the tensor that a tensor map describes
    mbar_*                              mbarriers, which such copies complete and at which threads arrive
    bar_sync, fence_async, make_setmaxnreg

Names in "quotes" are sections of NVIDIA's PTX ISA manual. hopper_simulated.py implements each instruction in Python for the
simulator.

Shared memory is addressed in bytes: a uint32 from shared_base() on. A tile is stored in panels of 64 columns: rows of 128 bytes
whose eight 16-byte chunks are swizzled, chunk c of row r at index c ^ (r % 8) ("Swizzling modes", 128 bytes). So neither the
eight rows of a chunk nor the eight chunks of a row share a bank. Panels start at multiples of 1024 bytes.

The accumulator of a 64 x n product is a register array of n / 2 float32. Lane 4 g + t of the warpgroup's warp w holds
    acc[4 j], acc[4 j + 1]          row 16 w + g, columns 8 j + 2 t and 8 j + 2 t + 1
    acc[4 j + 2], acc[4 j + 3]      row 16 w + g + 8, the same columns
("Register Fragments for wgmma.mma_async.m64nNk16", matrix D). Packed to bf16 in this order it is the left operand of the next
product in registers (matrix A, the same section).
"""

import inspect

from llvmlite import ir
from numba import types, uint32, uint64

from ...simulator import simulates
from . import hopper_simulated as simulated
from .ptx import F32, I8, I32, I64, SHARED, device, intrinsic
from .tensor_cores import _asm, _global_address, _registers, _set_registers

VOID = ir.VoidType()
LETTER = {types.uint32: "r", types.int32: "r", types.uint64: "l", types.float32: "f"}
_u32, _u64, _i32 = types.uint32, types.uint64, types.int32
WARPGROUP = 128  # threads
MAP_WORDS = 16  # a tensor map is 16 x 8 bytes
SHARED_ALIGNMENT = 1024
PANEL = 64  # columns of bf16: 128 bytes


def _define(name, parameters, make):
    """Define an intrinsic with these parameter names. make(*types of the arguments) -> (signature, code generator)"""

    def impl(typingctx, *args):
        return make(*args)

    positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
    names = ["typingctx", *parameters.split()]
    signature = inspect.Signature([inspect.Parameter(n, positional) for n in names])
    setattr(impl, "__signature__", signature)  # noqa: B010  mypy knows no such attribute
    impl.__name__ = impl.__qualname__ = name  # part of the cache key, see runtime/compile.py
    return intrinsic(impl)


def instruction(name, text, result, *arguments, pure=False):
    """An intrinsic for one PTX statement on scalars. In the text, $0 is the result if there is one, then the arguments.

    result, arguments: Numba types; result None: no result. pure: the statement has no side effects.
    """
    result = result or types.void
    constraints = [] if result == types.void else ["=" + LETTER[result]]
    constraints += [LETTER[a] for a in arguments] + ([] if pure else ["~{memory}"])

    def codegen(context, builder, sig, args):
        kind = VOID if result == types.void else context.get_value_type(result)
        out = _asm(builder, text, ",".join(constraints), kind, list(args), effect=not pure)
        return context.get_dummy_value() if result == types.void else out

    names = " ".join(f"a{i}" for i in range(len(arguments)))
    return _define(name, names, lambda *_: (result(*arguments), codegen))


# ----------------------------------------------------------------------------- shared memory by address
@intrinsic
def shared_base(typingctx):
    """The address of the block's dynamic shared memory, a multiple of 1024."""

    def codegen(context, builder, sig, args):
        module = builder.module
        memory = module.globals.get("xtrain_dynamic_shared")
        if memory is None:
            kind = ir.ArrayType(I8, 0)
            memory = ir.GlobalVariable(module, kind, "xtrain_dynamic_shared", addrspace=SHARED)
            memory.linkage, memory.align = "external", SHARED_ALIGNMENT
        return builder.ptrtoint(memory, I32)

    return types.uint32(), codegen


store_shared = instruction("store_shared", "st.shared.b32 [$0], $1;", None, _u32, _u32)
# clear_shared(address): 16 bytes become zeros; address: a multiple of 16. For rows of a tile that a copy has brought.
clear_shared = instruction(
    "clear_shared",
    "{ .reg .b32 z; mov.b32 z, 0; st.shared.v4.b32 [$0], {z, z, z, z}; }",
    None,
    _u32,
)
# post(address, value) publishes a number for other warps. read_post(address) reads it in lane 0; the other lanes get 0. An
# mbarrier must order the two. They are atomics, because compute-sanitizer's racecheck does not track mbarriers and does not
# report two atomics as a hazard. "atom"
post = instruction("post", "{ .reg .b32 t; atom.shared.exch.b32 t, [$0], $1; }", None, _u32, _u32)
read_post = instruction(
    "read_post",
    "{ .reg .pred p; .reg .b32 t; mov.u32 t, %laneid; setp.eq.u32 p, t, 0; mov.b32 t, 0; "
    "@p atom.shared.or.b32 t, [$1], 0; mov.b32 $0, t; }",
    _i32,
    _u32,
)


@intrinsic
def load_floats(typingctx, registers, address):
    """registers[0:2] = the two float32 at a shared address, a multiple of 8. "ld" """

    def codegen(context, builder, sig, args):
        kind = ir.LiteralStructType([F32] * 2)
        constraints = "=f,=f,r,~{memory}"
        out = _asm(builder, "ld.shared.v2.f32 {$0,$1}, [$2];", constraints, kind, [args[1]])
        values = [builder.extract_value(out, i) for i in range(2)]
        _set_registers(context, builder, sig, args, 0, values)
        return context.get_dummy_value()

    return types.void(registers, types.uint32), codegen


# ----------------------------------------------------------------------------- barriers
# mbar_init(address, count): an mbarrier is 8 bytes. A phase completes after `count` arrivals and all expected bytes. "mbarrier"
mbar_init = instruction("mbar_init", "mbarrier.init.shared::cta.b64 [$0], $1;", None, _u32, _u32)
# Makes the mbarriers that this thread has initialized visible to the copy engine. "fence.mbarrier_init"
mbar_init_fence = instruction("mbar_init_fence", "fence.mbarrier_init.release.cluster;", None)
# mbar_expect(address, nbytes): arrive, and expect nbytes more. "mbarrier.arrive", "expect-tx operation"
mbar_expect = instruction(
    "mbar_expect", "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", None, _u32, _u32
)
# mbar_arrive(address): lane 0 arrives for the whole warp. Call syncwarp first to include the work of the other lanes.
mbar_arrive = instruction(
    "mbar_arrive",
    "{ .reg .pred p; .reg .u32 t; mov.u32 t, %laneid; setp.eq.u32 p, t, 0; "
    "@p mbarrier.arrive.shared::cta.b64 _, [$0]; }",
    None,
    _u32,
)
# mbar_wait(address, parity): wait until the phase of this parity (0: the first, 1: the second, 0 ...) has completed. On a new
# mbarrier, parity 1 does not wait: it is "the phase before the first". "mbarrier.try_wait"
mbar_wait = instruction(
    "mbar_wait",
    "{ .reg .pred p; L: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1; @p bra D; bra L; D: }",
    None,
    _u32,
    _u32,
)
# bar_sync(number, count): named barrier 1 to 15 of the block, for `count` threads. "barrier"
bar_sync = instruction("bar_sync", "bar.sync $0, $1;", None, _u32, _u32)
# Makes this thread's stores to shared memory visible to wgmma and TMA. "membar / fence", proxies
fence_async = instruction("fence_async", "fence.proxy.async.shared::cta;", None)


def make_setmaxnreg(count, more):
    """-> f(): gives each thread of a warpgroup `count` registers. more: the number increases. "setmaxnreg" """
    text = f"setmaxnreg.{'inc' if more else 'dec'}.sync.aligned.u32 {count};"
    op = instruction(f"setmaxnreg_{count}_{more}", text, None)
    simulates(op, collective=WARPGROUP)(simulated.setmaxnreg(count))
    return op


# ----------------------------------------------------------------------------- copies (TMA)
def _map_address(context, builder, sig, args, maps, i):
    start = _global_address(context, builder, sig, [*args, ir.Constant(I64, 0)], maps, -1)
    number = builder.zext(args[i], I64)
    return builder.add(start, builder.mul(number, ir.Constant(I64, 8 * MAP_WORDS)))


def _with_map(name, text, constraints, order, parameters, kinds, maps, i):
    """An intrinsic that takes a tensor map.

    order: the operands of the text, as indices into the arguments; "map" is the address of map number args[i] in args[maps].
    """

    def make(*given):
        def codegen(context, builder, sig, args):
            address = _map_address(context, builder, sig, args, maps, i)
            operands = [address if k == "map" else args[k] for k in order]
            _asm(builder, text, constraints, VOID, operands)
            return context.get_dummy_value()

        full = [given[maps] if k == maps else kind for k, kind in enumerate(kinds)]
        return types.void(*full), codegen

    return _define(name, parameters, make)


# acquire_map(maps, i): tensor maps are in global memory, written by a copy before the launch. A thread must make a map visible
# to the copy engine before it uses the map. "fence.proxy.tensormap"
acquire_map = _with_map(
    "acquire_map",
    "fence.proxy.tensormap::generic.acquire.gpu [$0], 128;",
    "l,~{memory}",
    ["map"],
    "maps i",
    [None, _u32],
    0,
    1,
)
# load_tile(to, maps, i, barrier, column, row, head, sequence): copies the box of map i with this start to shared address `to`;
# its bytes complete `barrier`. Zeros beyond the end of the tensor. "cp.async.bulk.tensor". In the map, heads come before rows,
# see tensor_maps.py.
load_tile = _with_map(
    "load_tile",
    "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
    "[$0], [$1, {$3, $4, $5, $6}], [$2];",
    "r,l,r,r,r,r,r,~{memory}",
    [0, "map", 3, 4, 6, 5, 7],
    "to maps i barrier column row head sequence",
    [_u32, None, _u32, _u32, _i32, _i32, _i32, _i32],
    1,
    2,
)
# load_row(to, maps, i, barrier, column, row): the same for a float32 matrix: some columns of one row, not swizzled.
load_row = _with_map(
    "load_row",
    "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
    "[$0], [$1, {$3, $4}], [$2];",
    "r,l,r,r,r,~{memory}",
    [0, "map", 3, 4, 5],
    "to maps i barrier column row",
    [_u32, None, _u32, _u32, _i32, _i32],
    1,
    2,
)
# store_tile(maps, i, address, column, row, head, sequence): the reverse; nothing is written beyond the end of the tensor.
store_tile = _with_map(
    "store_tile",
    "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [$0, {$2, $3, $4, $5}], [$1];",
    "l,r,r,r,r,r,~{memory}",
    ["map", 2, 3, 5, 4, 6],
    "maps i address column row head sequence",
    [None, _u32, _u32, _i32, _i32, _i32, _i32],
    0,
    1,
)
# commit_stores(): the stores that this thread has started become a group. wait_stores(): wait until the copy engine has read
# the data of all groups. "cp.async.bulk.commit_group", "cp.async.bulk.wait_group"
commit_stores = instruction("commit_stores", "cp.async.bulk.commit_group;", None)
wait_stores = instruction("wait_stores", "cp.async.bulk.wait_group.read 0;", None)


# ----------------------------------------------------------------------------- products of a warpgroup
SWIZZLE_128 = 1  # in a descriptor


def descriptor_bits(panel_bytes: int) -> int:
    """A matrix descriptor without the address. "Matrix-Descriptor Format"

    The stride is 1024 bytes between groups of 8 rows, and panel_bytes between panels of 64 columns (used for transposed
    operands only); the swizzle is that of 128 bytes.
    """
    return SWIZZLE_128 << 62 | (1024 >> 4) << 32 | (panel_bytes >> 4) << 16


def make_descriptor(panel_bytes):
    """-> descriptor(address): the uint64 descriptor of a tile whose panels are panel_bytes apart"""
    BITS = descriptor_bits(panel_bytes)

    @device
    def descriptor(address):
        return uint64(BITS) | uint64((address & uint32(0x3FFFF)) >> uint32(4))

    return descriptor


def along_rows(D, panel_bytes) -> tuple[int, ...]:
    """The start of each slice of 16 columns of a tile of D columns, in bytes"""
    return tuple(32 * (k % 4) + k // 4 * panel_bytes for k in range(D // 16))


def down_rows(rows) -> tuple[int, ...]:
    """The start of each slice of 16 rows of a tile, in bytes, for an operand that is read transposed"""
    return tuple(16 * 128 * k for k in range(rows // 16))


def make_product(n, a_steps, b_steps, b_rows=False, accumulate=False):
    """-> product(acc, a, b): a warpgroup starts acc (64 x n) = A B^T. acc may be read after make_wait. "wgmma.mma_async"

    b_steps: the starts of the 16-deep slices of B, in bytes after its descriptor `b`; a_steps: those of A. a_steps None: A is
    in registers, uint32, 4 per slice. b_rows: a slice of B is 16 rows (B is read transposed: A B), not 16 columns.
    accumulate: acc += A B^T.
    It is one asm statement, from the fence that makes this warpgroup's registers visible to the tensor core ("wgmma.fence") to
    the commit, with all registers as operands, so that the compilers cannot move them.
    """
    size, in_registers = n // 2, a_steps is None
    count = 4 * len(b_steps) if in_registers else 1
    text = _product_text(n, a_steps, b_steps, b_rows, accumulate)
    operands = ["=f"] * size + ["r" if in_registers else "l"] * count + ["l"]
    operands += [str(i) for i in range(size)] if accumulate else []
    constraints = ",".join([*operands, "~{memory}"])

    def make(acc, a, b):
        def codegen(context, builder, sig, args):
            values = (
                _registers(context, builder, sig, args, 1, count) if in_registers else [args[1]]
            )
            values.append(args[2])
            if accumulate:
                values += _registers(context, builder, sig, args, 0, size)
            _accumulator_asm(context, builder, sig, args, text, constraints, values, size)
            return context.get_dummy_value()

        return types.void(acc, a if in_registers else _u64, _u64), codegen

    name = f"product_{n}_{a_steps}_{b_steps}_{b_rows}_{accumulate}"
    op = _define(name, "acc a b", make)
    simulate_product = simulated.product(n, a_steps, b_steps, b_rows, accumulate)
    simulates(op, collective=WARPGROUP)(simulate_product)
    return op


def _product_text(n, a_steps, b_steps, b_rows, accumulate):
    size, in_registers = n // 2, a_steps is None
    acc = "{" + ",".join(f"${i}" for i in range(size)) + "}"
    b = size + (4 * len(b_steps) if in_registers else 1)
    text = ["{ .reg .pred p; .reg .b64 a, b; wgmma.fence.sync.aligned; "]
    for k, step in enumerate(b_steps):
        text.append(f"setp.ne.u32 p, {int(accumulate or k > 0)}, 0; add.u64 b, ${b}, {step >> 4}; ")
        if in_registers:
            a, more = "{" + ",".join(f"${size + 4 * k + i}" for i in range(4)) + "}", ""
        else:
            text.append(f"add.u64 a, ${size}, {a_steps[k] >> 4}; ")
            a, more = "a", "0, "
        text.append(
            f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {acc}, {a}, b, p, 1, 1, "
            f"{more}{int(b_rows)}; "
        )
    return "".join([*text, "wgmma.commit_group.sync.aligned; }"])


def _accumulator_asm(context, builder, sig, args, text, constraints, values, size):
    out = _asm(builder, text, constraints, ir.LiteralStructType([F32] * size), values)
    fields = [builder.extract_value(out, i) for i in range(size)]
    _set_registers(context, builder, sig, args, 0, fields)


def _accumulator_instruction(name, n, text):
    size = n // 2
    constraints = ",".join(["=f"] * size + [str(i) for i in range(size)] + ["~{memory}"])

    def make(acc):
        def codegen(context, builder, sig, args):
            values = _registers(context, builder, sig, args, 0, size)
            _accumulator_asm(context, builder, sig, args, text, constraints, values, size)
            return context.get_dummy_value()

        return types.void(acc), codegen

    return _define(name, "acc", make)


def make_wait(n, pending):
    """-> wait(acc): wait until at most `pending` of this warpgroup's products are in flight; acc (64 x n) is then complete.
    "wgmma.wait_group"
    """
    op = _accumulator_instruction(
        f"wait_{n}_{pending}", n, f"wgmma.wait_group.sync.aligned {pending};"
    )
    simulates(op, collective=True)(simulated.wait(pending))
    return op


def make_hold(n):
    """-> hold(acc): no instruction; the arithmetic on acc stays before the code that follows. Otherwise ptxas would move a
    wait above arithmetic that does not depend on it, and the two would no longer overlap.
    """
    op = _accumulator_instruction(f"hold_{n}", n, "")
    simulates(op)(lambda thread, site, acc: None)
    return op


# ----------------------------------------------------------------------------- the same in the simulator
simulates(shared_base)(simulated.shared_base)
simulates(store_shared)(simulated.store_shared)
simulates(clear_shared)(simulated.clear_shared)
simulates(post)(simulated.store_shared)
simulates(read_post)(simulated.read_post)
simulates(load_floats)(simulated.load_floats)
simulates(mbar_init)(simulated.mbar_init)
simulates(mbar_init_fence)(lambda thread, site: thread.block.engines.show_barriers(thread))
simulates(mbar_expect)(simulated.mbar_expect)
simulates(mbar_arrive)(simulated.mbar_arrive)
simulates(mbar_wait, polled=True)(simulated.mbar_wait)
simulates(bar_sync, polled=True)(simulated.bar_sync)
simulates(fence_async)(lambda thread, site: thread.block.engines.fence(thread))
simulates(acquire_map)(simulated.acquire_map)
simulates(load_tile)(simulated.load_tile)
simulates(store_tile)(simulated.store_tile)
simulates(load_row)(simulated.load_row)
simulates(commit_stores)(lambda thread, site: thread.block.engines.commit_stores(thread))
simulates(wait_stores)(lambda thread, site: thread.block.engines.wait_stores(thread))
