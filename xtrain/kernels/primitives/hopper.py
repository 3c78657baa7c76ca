"""Instructions of compute capability 9.0 ("sm_90a").

They are asynchronous matrix products of a warpgroup (wgmma), asynchronous copies of tiles (TMA),
and the barriers in shared memory that signal their completion.

    make_wgmma, make_wgmma_wait, make_hold  wgmma: 128 threads multiply 64 x 16k by 16k x n,
                                        asynchronously until make_wgmma_wait
    make_descriptor                     the matrix descriptor of an operand in shared memory
    tma_load, tma_load_row, tma_store   TMA: one thread starts a copy of a box of the tensor that a
                                        tensor map describes
    mbarrier_*                          mbarriers, which such copies complete and at which threads
                                        arrive
    bar_sync, fence_proxy_async, make_setmaxnreg

Names in "quotes" are sections of NVIDIA's PTX ISA manual. hopper_simulated.py implements each
instruction in Python for the simulator.

Shared memory is addressed in bytes: a uint32 from shared_base() on. A tile is stored in panels of
64 columns: rows of 128 bytes whose eight 16-byte chunks are swizzled, chunk c of row r at index
c ^ (r % 8) ("Swizzling modes", 128 bytes). So neither the eight rows of a chunk nor the eight
chunks of a row share a bank. Panels start at multiples of 1024 bytes.

The accumulator of a 64 x n product is a register array of n / 2 float32. Lane 4 g + t of the
warpgroup's warp w holds
    acc[4 j], acc[4 j + 1]          row 16 w + g, columns 8 j + 2 t and 8 j + 2 t + 1
    acc[4 j + 2], acc[4 j + 3]      row 16 w + g + 8, the same columns
("Register Fragments for wgmma.mma_async.m64nNk16", matrix D). Packed to bf16 in this order it is
the left operand of the next product in registers (matrix A, the same section).
"""

from ...simulator import simulates
from ..runtime.compiler import COMPILER, float32, int32, uint32, uint64
from . import hopper_simulated as simulated
from .intrinsics import GLOBAL, instruction, intrinsic
from .ptx import device

# Options of kernels with these instructions. numba-cuda chooses sm_90a on such a GPU by itself.
SM_90A = {"chip": "sm_90a"} if COMPILER == "mlir" else {}
WARPGROUP = 128  # threads
MAP_WORDS = 16  # a tensor map is 16 x 8 bytes
SHARED_ALIGNMENT = 1024
PANEL = 64  # columns of bf16: 128 bytes
PANEL_ROW = 128  # bytes of a row of a panel


# ------------------------------------------------------------------------- shared memory by address
@intrinsic(returns=uint32)
def shared_base(code):
    """Return the address of the block's dynamic shared memory, uint32, a multiple of 1024.

    The launch says how many bytes it has.
    """
    return code.dynamic_shared("xtrain_dynamic_shared", SHARED_ALIGNMENT)


store_shared = instruction(
    "store_shared",
    "st.shared.b32 [$0], $1;",
    None,
    doc="""Store 32 bits at a shared address, a multiple of 4. "st" """,
    address=uint32,
    value=uint32,
)
clear_shared = instruction(
    "clear_shared",
    "{ .reg .b32 z; mov.b32 z, 0; st.shared.v4.b32 [$0], {z, z, z, z}; }",
    None,
    doc="""Make 16 bytes of a tile that a copy has brought zeros. "st", vectors

    address: a multiple of 16.
    """,
    address=uint32,
)
# post and read_post are atomics, because compute-sanitizer's racecheck does not track mbarriers and
# does not report two atomics as a hazard.
post = instruction(
    "post",
    "{ .reg .b32 t; atom.shared.exch.b32 t, [$0], $1; }",
    None,
    doc="""Publish a number for other warps: read_post, after an mbarrier. "atom" """,
    address=uint32,
    value=uint32,
)
read_post = instruction(
    "read_post",
    "{ .reg .pred p; .reg .b32 t; mov.u32 t, %laneid; setp.eq.u32 p, t, 0; mov.b32 t, 0; "
    "@p atom.shared.or.b32 t, [$1], 0; mov.b32 $0, t; }",
    int32,
    doc="""Return a posted number in lane 0; 0 in the other lanes. "atom" """,
    address=uint32,
)


@intrinsic(address=uint32)
def load_floats(code, registers, address):
    """Set registers[0:2] to the two float32 at a shared address, a multiple of 8. "ld", vectors"""
    values = code.asm("ld.shared.v2.f32 {$0,$1}, [$2];", [float32] * 2, [address], memory=True)
    code.set_registers(registers, values)


@intrinsic(address=uint32)
def store_floats(code, address, registers):
    """Store registers[0:2], two float32, at a shared address, a multiple of 8. "st", vectors"""
    values = code.registers(registers, 2)
    code.asm("st.shared.v2.f32 [$0], {$1, $2};", None, [address, *values], memory=True)


# ----------------------------------------------------------------------------- barriers
mbarrier_init = instruction(
    "mbarrier_init",
    "mbarrier.init.shared::cta.b64 [$0], $1;",
    None,
    doc="""Make 8 bytes of shared memory an mbarrier. "mbarrier.init"

    A phase of it completes after `count` arrivals and all expected bytes; then the next begins.
    address: a multiple of 8.
    """,
    address=uint32,
    count=uint32,
)
mbarrier_init_fence = instruction(
    "mbarrier_init_fence",
    "fence.mbarrier_init.release.cluster;",
    None,
    doc="""Make the mbarriers that this thread has initialized visible to the copy engine.

    The other threads see them after the next barrier. "membar / fence", fence.mbarrier_init
    """,
)
mbarrier_arrive_expect_tx = instruction(
    "mbarrier_arrive_expect_tx",
    "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;",
    None,
    doc="""Arrive once, and let the phase expect nbytes more of copies. "mbarrier.arrive"

    nbytes: those of the copies that name this barrier; start them afterwards.
    """,
    address=uint32,
    nbytes=uint32,
)
mbarrier_arrive = instruction(
    "mbarrier_arrive",
    "{ .reg .pred p; .reg .u32 t; mov.u32 t, %laneid; setp.eq.u32 p, t, 0; "
    "@p mbarrier.arrive.shared::cta.b64 _, [$0]; }",
    None,
    doc="""Arrive once for the whole warp: lane 0 does. "mbarrier.arrive"

    Call syncwarp first to include the work of the other lanes.
    """,
    address=uint32,
)
mbarrier_wait = instruction(
    "mbarrier_wait",
    "{ .reg .pred p; L: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1; "
    "@p bra D; bra L; D: }",
    None,
    doc="""Wait until the phase of this parity has completed. "mbarrier.test_wait/mbarrier.try_wait"

    parity: 0: the first phase, 1: the second, 0: the third ... On a new mbarrier, parity 1 does not
        wait: it is "the phase before the first".
    """,
    address=uint32,
    parity=uint32,
)
bar_sync = instruction(
    "bar_sync",
    "bar.sync $0, $1;",
    None,
    doc="""Wait at a named barrier of the block for `count` threads. "bar{.cta}/barrier{.cta}"

    number: 1 to 15; cuda.syncthreads is 0. count: a multiple of 32.
    """,
    number=uint32,
    count=uint32,
)
fence_proxy_async = instruction(
    "fence_proxy_async",
    "fence.proxy.async.shared::cta;",
    None,
    doc="""Make this thread's stores to shared memory visible to wgmma and TMA.

    Then a barrier, then the product or the copy. "membar / fence", proxies
    """,
)


def make_setmaxnreg(count, increases):
    """Return f(), which gives each thread of a warpgroup `count` registers. "setmaxnreg"

    count: a multiple of 8 from 24 to 256.
    increases: more than the threads have; else fewer.
    """
    direction = "inc" if increases else "dec"
    text = f"setmaxnreg.{direction}.sync.aligned.u32 {count};"
    op = instruction(f"setmaxnreg_{count}_{increases}", text, None)
    simulates(op, collective=WARPGROUP)(simulated.setmaxnreg(count))
    return op


# ----------------------------------------------------------------------------- copies (TMA)
def _map_address(code, maps, i):
    """Return the address of tensor map number i of the array `maps`."""
    start = code.address(maps, 0, GLOBAL)
    return code.add(start, code.mul(code.resize(i, uint64), 8 * MAP_WORDS))


@intrinsic(i=uint32)
def acquire_map(code, maps, i):
    """Make map i visible to the copy engine, before this thread uses it. "membar / fence"

    maps: tensor maps in global memory (tma.py), written by a copy before the launch.
    """
    text = "fence.proxy.tensormap::generic.acquire.gpu [$0], 128;"
    code.asm(text, None, [_map_address(code, maps, i)], memory=True)


@intrinsic(
    target=uint32, i=uint32, barrier=uint32, column=int32, row=int32, head=int32, sequence=int32
)
def tma_load(code, target, maps, i, barrier, column, row, head, sequence):
    """Start a copy of the box of map i with this start to shared memory. "cp.async.bulk.tensor"

    One thread calls it. The bytes complete a phase of `barrier`. Beyond the end of the tensor: 0.
    target: a shared address, a multiple of 1024.
    maps, i: tensor maps in global memory, and the number of one that acquire_map has acquired.
    barrier: the shared address of an mbarrier that expects the bytes of the box.
    column, row, head, sequence: the start of the box in x (sequences, rows, heads, columns).
    """
    text = (
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[$0], [$1, {$3, $4, $5, $6}], [$2];"
    )
    start = [column, head, row, sequence]
    code.asm(text, None, [target, _map_address(code, maps, i), barrier, *start], memory=True)


@intrinsic(target=uint32, i=uint32, barrier=uint32, column=int32, row=int32)
def tma_load_row(code, target, maps, i, barrier, column, row):
    """Start a copy of some columns of one row of a float32 matrix. "cp.async.bulk.tensor"

    As tma_load does, but not swizzled. target: a shared address, a multiple of 128.
    """
    text = (
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[$0], [$1, {$3, $4}], [$2];"
    )
    code.asm(text, None, [target, _map_address(code, maps, i), barrier, column, row], memory=True)


def _box_from_shared(name, operation, verb):
    doc = f"""Start a copy that {verb} a box from shared memory. "{operation.split(".4d")[0]}"

    One thread calls it, after fence_proxy_async and a barrier of the threads that wrote the box.
    Nothing is written beyond the end of the tensor.
    address: the shared address of the box, a multiple of 1024, swizzled as tma_load leaves it.
    """

    def copy(code, maps, i, address, column, row, head, sequence):
        text = f"{operation}.bulk_group [$0, {{$2, $3, $4, $5}}], [$1];"
        start = [column, head, row, sequence]
        code.asm(text, None, [_map_address(code, maps, i), address, *start], memory=True)

    starts = {"column": int32, "row": int32, "head": int32, "sequence": int32}
    return intrinsic(name=name, doc=doc, i=uint32, address=uint32, **starts)(copy)


tma_store = _box_from_shared(
    "tma_store", "cp.async.bulk.tensor.4d.global.shared::cta", "stores to the tensor of map i"
)
tma_add = _box_from_shared(
    "tma_add",
    "cp.reduce.async.bulk.tensor.4d.global.shared::cta.add",
    "adds to the tensor of map i, float32,",
)


tma_store_commit = instruction(
    "tma_store_commit",
    "cp.async.bulk.commit_group;",
    None,
    doc="""Make the stores that this thread has started a group. "cp.async.bulk.commit_group" """,
)
tma_store_wait = instruction(
    "tma_store_wait",
    "cp.async.bulk.wait_group.read 0;",
    None,
    doc="""Wait until the copy engine has read the data of all groups of this thread.

    Then the shared memory may be written again. "cp.async.bulk.wait_group"
    """,
)


# -------------------------------------------------------------------------- products of a warpgroup
SWIZZLE_128 = 1  # in a descriptor


def descriptor_bits(panel_bytes: int) -> int:
    """Return a matrix descriptor without the address. "Matrix-Descriptor Format"

    The stride is 1024 bytes between groups of 8 rows, and panel_bytes between panels of 64 columns
    (used for transposed operands only); the swizzle is that of 128 bytes.
    """
    return SWIZZLE_128 << 62 | (1024 >> 4) << 32 | (panel_bytes >> 4) << 16


def make_descriptor(panel_bytes):
    """Return descriptor(address): the uint64 descriptor of a tile.

    panel_bytes: from one panel of the tile to the next.
    """
    BITS = descriptor_bits(panel_bytes)

    @device
    def descriptor(address):
        return uint64(BITS) | uint64((address & uint32(0x3FFFF)) >> uint32(4))

    return descriptor


def along_rows(D, panel_bytes) -> tuple[int, ...]:
    """Return the start of each slice of 16 columns of a tile of D columns, in bytes."""
    return tuple(32 * (k % 4) + k // 4 * panel_bytes for k in range(D // 16))


def down_rows(rows) -> tuple[int, ...]:
    """Return the start of each slice of 16 rows of a tile, in bytes.

    For an operand that is read transposed.
    """
    return tuple(16 * 128 * k for k in range(rows // 16))


def make_wgmma(n, a_steps, b_steps, b_rows=False, accumulate=False, a_rows=False):
    """Return product(acc, a, b): a warpgroup starts acc (64 x n) = A B^T. "wgmma.mma_async"

    acc may be read after the function of make_wgmma_wait. A and B are bf16, acc is float32.
    n: a multiple of 8 from 8 to 256.
    b_steps: the starts of the 16-deep slices of B, in bytes after its descriptor `b`.
    a_steps: those of A; None: A is in registers, uint32, 4 per slice.
    a_rows, b_rows: a slice of A or B in shared memory is 16 rows (it is read transposed), not 16
        columns.
    accumulate: acc += A B^T.

    It is one asm statement, from the fence that makes this warpgroup's registers visible to the
    tensor core ("wgmma.fence") to the commit, with all registers as operands, so that the compilers
    cannot move them.
    """
    size = n // 2
    in_registers = a_steps is None
    text = _product_text(n, a_steps, b_steps, b_rows, accumulate, a_rows)
    name = f"product_{n}_{a_steps}_{b_steps}_{b_rows}_{accumulate}_{a_rows}"
    declared = {"b": uint64} if in_registers else {"a": uint64, "b": uint64}

    @intrinsic(name=name, **declared)
    def op(code, acc, a, b):
        left = code.registers(a, 4 * len(b_steps)) if in_registers else [a]
        before = code.registers(acc, size) if accumulate else []
        _with_accumulator(code, acc, size, text, [*left, b], before)

    simulate_product = simulated.product(n, a_steps, b_steps, b_rows, accumulate, a_rows)
    simulates(op, collective=WARPGROUP)(simulate_product)
    return op


def _product_text(n, a_steps, b_steps, b_rows, accumulate, a_rows):
    size = n // 2
    in_registers = a_steps is None
    acc = "{" + ",".join(f"${i}" for i in range(size)) + "}"
    b = size + (4 * len(b_steps) if in_registers else 1)
    text = ["{ .reg .pred p; .reg .b64 a, b; wgmma.fence.sync.aligned; "]
    for k, step in enumerate(b_steps):
        text.append(f"setp.ne.u32 p, {int(accumulate or k > 0)}, 0; add.u64 b, ${b}, {step >> 4}; ")
        if in_registers:
            a = "{" + ",".join(f"${size + 4 * k + i}" for i in range(4)) + "}"
            transpose = f"{int(b_rows)}"
        else:
            text.append(f"add.u64 a, ${size}, {a_steps[k] >> 4}; ")
            a = "a"
            transpose = f"{int(a_rows)}, {int(b_rows)}"
        text.append(
            f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {acc}, {a}, b, p, 1, 1, "
            f"{transpose}; "
        )
    return "".join([*text, "wgmma.commit_group.sync.aligned; }"])


def _with_accumulator(code, acc, size, text, operands, before):
    """Add one statement that has all registers of the accumulator as results."""
    after = code.asm(text, [float32] * size, operands, memory=True, tied=before)
    code.set_registers(acc, after)


def _accumulator_instruction(name, n, text):
    @intrinsic(name=name)
    def op(code, acc):
        _with_accumulator(code, acc, n // 2, text, [], code.registers(acc, n // 2))

    return op


def make_wgmma_wait(n, pending):
    """Return wait(acc), which waits until at most `pending` of the warpgroup's products are in flight.

    acc (64 x n) is then complete. "wgmma.wait_group"
    """
    op = _accumulator_instruction(
        f"wait_{n}_{pending}", n, f"wgmma.wait_group.sync.aligned {pending};"
    )
    simulates(op, collective=True, last=True)(simulated.wait(pending))
    return op


def make_wgmma_wait_group(pending):
    """Return wait(): wait until at most `pending` of the warpgroup's products are in flight.

    The operands of the others may then be overwritten. It names no accumulator, so that one whose
    next product is in flight is not touched. "wgmma.wait_group"
    """
    text = f"wgmma.wait_group.sync.aligned {pending};"
    op = instruction(f"wait_group_{pending}", text, None)
    simulates(op, collective=True, last=True)(simulated.wait(pending))
    return op


def make_hold(n):
    """Return hold(acc), no instruction: the arithmetic on acc stays before the code that follows.

    Otherwise ptxas would move a wait above arithmetic that does not depend on it, and the two would
    no longer overlap.
    """
    op = _accumulator_instruction(f"hold_{n}", n, "")
    simulates(op)(lambda thread, site, acc: None)
    return op


# ------------------------------------------------------------------------ the same in the simulator
simulates(shared_base)(simulated.shared_base)
simulates(store_shared)(simulated.store_shared)
simulates(clear_shared)(simulated.clear_shared)
simulates(post)(simulated.store_shared)
simulates(read_post)(simulated.read_post)
simulates(load_floats)(simulated.load_floats)
simulates(store_floats)(simulated.store_floats)
simulates(mbarrier_init)(simulated.mbarrier_init)
simulates(mbarrier_init_fence)(lambda thread, site: thread.block.engines.show_barriers(thread))
simulates(mbarrier_arrive_expect_tx)(simulated.mbarrier_arrive_expect_tx)
simulates(mbarrier_arrive)(simulated.mbarrier_arrive)
simulates(mbarrier_wait, polled=True)(simulated.mbarrier_wait)
simulates(bar_sync, polled=True)(simulated.bar_sync)
simulates(fence_proxy_async)(lambda thread, site: thread.block.engines.fence(thread))
simulates(acquire_map)(simulated.acquire_map)
simulates(tma_load)(simulated.tma_load)
simulates(tma_store)(simulated.tma_store)
simulates(tma_add)(simulated.tma_add)
simulates(tma_load_row)(simulated.tma_load_row)
simulates(tma_store_commit)(lambda thread, site: thread.block.engines.tma_store_commit(thread))
simulates(tma_store_wait)(lambda thread, site: thread.block.engines.tma_store_wait(thread, site))
