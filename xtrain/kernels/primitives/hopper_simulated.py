"""The simulator's implementation of the instructions in hopper.py.

This file defines the data layouts; simulator/engines.py keeps track of barriers, copies and
products in flight. A product reads its operands as the hardware does: address by address, from the
descriptor ("Shared Memory Matrix Layout" in NVIDIA's PTX ISA manual). Every 16-byte chunk that a
copy has written carries a tag with its tensor, row and columns. So an operand that is not a correct
tile, row by row and column by column, raises an error instead of giving a wrong number.
"""

import functools

import numpy as np

from ...simulator.errors import RaceError, where
from ...simulator.memory import BASE, _Bytes
from ...simulator.scalars import Int32, UInt32
from .tensor_cores import add_products

# Swizzle mode of a descriptor -> bytes of a row that it permutes.
WIDTHS = {0: 16, 1: 128, 2: 64, 3: 32}
MAP_SWIZZLE = 3  # CU_TENSOR_MAP_SWIZZLE_128B; the only one that is simulated
MAP_MARK = 0x58544D4150  # the first word of a simulated tensor map
ROWS_MARK = MAP_MARK + 1  # the same for the map of a float32 matrix


# ----------------------------------------------------------------------------- shared memory
def shared_base(thread, site):
    """Return the address of the simulated shared memory."""
    return UInt32(BASE)


def store_shared(thread, site, address, value):
    """Store 32 bits at a shared address."""
    engines = thread.block.engines
    first, end = engines.span(thread, address, 4, site)
    engines.write(thread, first, end, engines.clocks[:, thread.index], site)
    engines.bytes[4 * first : 4 * end].view(np.uint32)[0] = np.uint32(int(value) & 0xFFFFFFFF)


def clear_shared(thread, site, address):
    """Store 16 zero bytes at a shared address.

    They remain part of the tile that a copy has written there.
    """
    engines = thread.block.engines
    first, end = engines.span(thread, address, 16, site, 16)
    tags = engines.tags[:, first // 4].copy()
    engines.write(thread, first, end, engines.clocks[:, thread.index], site)
    engines.tags[:, first // 4] = tags
    engines.bytes[4 * first : 4 * end] = 0


def read_post(thread, site, address):
    """Read a number that another warp has stored.

    Checked for races like any other access: a barrier must order it after the store.
    """
    if thread.lane:
        return Int32(0)
    engines = thread.block.engines
    first, end = engines.span(thread, address, 4, site)
    engines.read(thread, first, end, engines.clocks[:, thread.index], site, "")
    return Int32(int(engines.bytes[4 * first : 4 * end].view(np.int32)[0]))


def load_floats(thread, site, registers, address):
    """Load two float32 from a shared address."""
    engines = thread.block.engines
    first, end = engines.span(thread, address, 8, site, 8)
    engines.read(thread, first, end, engines.clocks[:, thread.index], site, "")
    values = engines.bytes[4 * first : 4 * end].view(np.float32)
    thread.store_registers(registers, values, site)


def store_floats(thread, site, address, registers):
    """Store two float32 at a shared address."""
    engines = thread.block.engines
    first, end = engines.span(thread, address, 8, site, 8)
    engines.write(thread, first, end, engines.clocks[:, thread.index], site)
    values = thread.load_registers(registers, 2, site)
    engines.bytes[4 * first : 4 * end].view(np.float32)[:] = values


# ----------------------------------------------------------------------------- barriers
def mbarrier_init(thread, site, address, count):
    """Initialize an mbarrier."""
    thread.block.engines.make_barrier(thread, site, address, count)


def mbarrier_arrive_expect_tx(thread, site, address, nbytes):
    """Arrive, and expect nbytes more."""
    thread.block.engines.arrive(thread, site, address, nbytes)


def mbarrier_arrive(thread, site, address):
    """Arrive for the warp, in lane 0."""
    if thread.lane == 0:
        thread.block.engines.arrive(thread, site, address)


def mbarrier_wait(thread, site, address, parity):
    """Return True if the phase of this parity has completed; the simulator polls it."""
    return thread.block.engines.try_wait(thread, site, address, parity)


def bar_sync(thread, site, number, count):
    """Return True if `count` threads have arrived at the named barrier; the simulator polls it."""
    return thread.block.engines.arrive_named(thread, site, number, count)


def setmaxnreg(count):
    """Return the simulated instruction, which checks the block's total of registers."""

    def run(threads, sites, args):
        engines = threads[0].block.engines
        engines.registers[threads[0].index] = count
        total = sum(128 * n for n in engines.registers.values())
        if count % 8 or not 24 <= count <= 256 or total > 65536:
            text = (
                f"{count} registers: must be a multiple of 8 from 24 to 256, "
                f"and the block's total of {total} at most 65536"
            )
            raise engines.error(threads[0], sites[0], text)
        return [None] * len(threads)

    return run


# ----------------------------------------------------------------------------- copies
def simulated_map(address, dims, strides, box, itemsize) -> list[int]:
    """Return 16 words that replace a real tensor map, whose format is not public.

    Strides in bytes. Four dims: bf16 or float32, by itemsize; two: float32.
    """
    mark = MAP_MARK if len(dims) == 4 else ROWS_MARK
    words = [mark, address, *dims, *strides, *box, MAP_SWIZZLE, itemsize]
    return words + [0] * (16 - len(words))


class SimulatedMap:
    """A decoded tensor map of tiles. columns, rows: those of its box."""

    def __init__(self, words):
        self.address, *rest = map(int, words[1:])
        self.dims = rest[:4]
        self.strides = rest[4:7]
        self.columns, _, self.rows, _ = rest[7:11]
        self.dtype = np.dtype({2: np.uint16, 4: np.float32}[rest[12]])
        self.end = self.address + self.dtype.itemsize * self.dims[0]
        self.end += sum((n - 1) * s for n, s in zip(self.dims[1:], self.strides))

    def tensor(self):
        """Return a view of the tensor (sequences, rows, heads, columns); bf16 as uint16."""
        raw = np.asarray(_Bytes(self.address, self.end - self.address, None)).view(self.dtype)
        strides = [*self.strides[::-1], self.dtype.itemsize]
        return np.lib.stride_tricks.as_strided(raw, self.dims[::-1], strides)


def _read_map(thread, site, maps, i, mark=MAP_MARK):
    """Return the words of map i.

    Raises AsyncError if it is another kind of map, or not acquired by this thread.
    """
    start = 16 * int(i)
    words = [int(thread.load(maps, start + j, site)) for j in range(16)]
    engines = thread.block.engines
    if words[0] != mark:
        raise engines.error(thread, site, f"element {i} is not a tensor map of this kind")
    if int(i) not in thread.state.get("maps", ()):
        text = (
            f"this thread has not made tensor map {i} visible to the copy engine: call acquire_map"
        )
        raise engines.error(thread, site, text)
    return words


def acquire_map(thread, site, maps, i):
    """Allow this thread to use map i."""
    thread.state.setdefault("maps", set()).add(int(i))


def _swizzled_offsets(box, address, nbytes):
    """Return the byte offset of each 16-byte chunk of a box in shared memory, with the swizzle.

    (rows, chunks of a row)
    """
    width = box.dtype.itemsize * box.columns
    assert width == 128 and nbytes == width * box.rows, "only the 128-byte swizzle is simulated"
    row, chunk = np.ogrid[: box.rows, : width // 16]
    offset = row * width + chunk * 16
    return offset ^ ((((address + offset) >> 7) & 7) << 4)


def _require_1024_alignment(engines, thread, site, address):
    if int(address) % 1024:
        offset = int(address) - BASE
        text = f"a tile with 128-byte swizzle at byte {offset}: must be a multiple of 1024"
        raise engines.error(thread, site, text)


def tma_load(thread, site, target, maps, i, barrier, column, row, head, sequence):
    """Start a copy of a box from global to shared memory."""
    engines = thread.block.engines
    box = SimulatedMap(_read_map(thread, site, maps, i))
    _require_1024_alignment(engines, thread, site, target)
    b = int(sequence)
    r = int(row)
    h = int(head)
    c = int(column)
    values = np.zeros((box.rows, box.columns), box.dtype)
    thread.note_copy(site, box.address, box.end, False)
    if all(0 <= k < n for k, n in zip((b, r, h, c), box.dims[::-1])):
        inside = box.tensor()[b, r : r + box.rows, h, c : c + box.columns]
        values[: inside.shape[0], : inside.shape[1]] = inside
    nbytes = values.nbytes
    data = np.empty(nbytes, np.uint8)
    tags = np.empty((4, nbytes // 16), np.int64)
    k = _swizzled_offsets(box, int(target), nbytes) // 16
    data.reshape(-1, 16)[k] = values.view(np.uint8).reshape(*k.shape, 16)
    rows, chunks = np.indices(k.shape)
    key = box.address, int(barrier)
    plane = engines.plane(*key, b, h)
    first_chunk = (int(target) - BASE) // 16
    before = engines.tags[:, first_chunk - 8 : first_chunk]
    plane_before, row_before, column_before, _ = (int(tag.min()) for tag in before)
    # behind a box of the same tensor, columns and barrier, this box continues its tile
    if column_before == c // 8 and engines.planes_of.get(plane_before, ())[:2] == key:
        plane = plane_before
        r = row_before + 1
    for tag, value in zip(tags, (plane, r + rows, c // 8 + chunks, 1)):
        tag[k] = value
    engines.begin_copy(thread, site, target, data, barrier, tags)


def tma_load_row(thread, site, target, maps, i, barrier, column, row):
    """Start a copy of part of a matrix row from global to shared memory."""
    engines = thread.block.engines
    words = _read_map(thread, site, maps, i, ROWS_MARK)
    address, columns, rows, stride, count = map(int, words[1:6])
    if int(target) % 128:
        raise engines.error(thread, site, f"byte {int(target) - BASE} must be a multiple of 128")
    values = np.zeros(count, np.float32)
    if 0 <= int(row) < rows and 0 <= int(column) < columns:
        start = address + int(row) * stride
        thread.note_copy(site, start, start + 4 * columns, False)
        raw = np.asarray(_Bytes(start, 4 * columns, None))
        inside = raw.view(np.float32)[int(column) : int(column) + count]
        values[: len(inside)] = inside
    engines.begin_copy(thread, site, target, values.view(np.uint8), barrier)


def tma_store(thread, site, maps, i, address, column, row, head, sequence):
    """Start a copy of a box from shared to global memory.

    Raises RaceError if two copies store the same element.
    """
    _box_from_shared(thread, site, maps, i, address, (sequence, row, head, column), False)


def tma_add(thread, site, maps, i, address, column, row, head, sequence):
    """Start a copy that adds a box in shared memory to a float32 tensor. Errors: as of tma_store."""
    _box_from_shared(thread, site, maps, i, address, (sequence, row, head, column), True)


def _box_from_shared(thread, site, maps, i, address, start, add):
    engines = thread.block.engines
    box = SimulatedMap(_read_map(thread, site, maps, i))
    nbytes = box.dtype.itemsize * box.rows * box.columns
    data = engines.begin_store(thread, site, address, nbytes).reshape(-1, 16)
    k = _swizzled_offsets(box, int(address), nbytes) // 16
    values = data[k].reshape(box.rows, -1).view(box.dtype)
    b, r, h, c = map(int, start)
    tensor = box.tensor()
    thread.note_copy(site, box.address, box.end, True)
    out = tensor[b, r : r + box.rows, h, c : c + box.columns]
    launch = thread.block.launch
    written = launch.stored.setdefault(box.address, np.zeros(tensor.shape, bool))
    written_in_box = written[b, r : r + box.rows, h, c : c + box.columns]
    if written_in_box.any():
        raise RaceError(
            f"race {where(thread, site)}: {thread} stores rows {r} to {r + box.rows} of a tensor "
            f"at {site}, but another copy of this launch has stored some of them (global memory)",
            (site,),
        )
    written_in_box[...] = True
    values = values[: out.shape[0], : out.shape[1]]
    out[...] = out + values if add else values


# ----------------------------------------------------------------------------- operands of products
@functools.cache
def _fragment(n):
    """Return the rows and columns of the elements of a 64 x n accumulator that each thread holds.

    (128, n / 2), for the threads of a warpgroup.
    """
    thread, j = np.ogrid[:128, : n // 2]
    g = thread % 32 // 4
    t = thread % 4
    return 16 * (thread // 32) + g + 8 * (j // 2 % 2), 8 * (j // 4) + 2 * t + j % 2


def _addresses(descriptor, step, rows, transposed):
    """Return the addresses of the 16-byte chunks of one slice, and the swizzle mode.

    (rows, 2), or if transposed (16, rows / 8)
    """
    bits = int(descriptor)
    mode = bits >> 62
    start = ((bits & 0x3FFF) << 4) + step
    leading = (bits >> 16 & 0x3FFF) << 4
    stride = (bits >> 32 & 0x3FFF) << 4
    width = WIDTHS[mode]
    if transposed:
        row, chunk = np.ogrid[:16, : rows // 8]
        per_row = width // 16
        column_offset = chunk // per_row * leading + chunk % per_row * 16
    else:
        row, chunk = np.ogrid[:rows, :2]
        column_offset = chunk * 16
    address = start + row // 8 * stride + row % 8 * width + column_offset
    return address ^ (((address >> 7) & (width // 16 - 1)) << 4), mode


class _Operand:
    """A tile in shared memory that a product reads slice by slice; each is checked."""

    def __init__(self, threads, site, clocks, marks, descriptor, rows, transposed):
        self.threads = threads
        self.site = site
        self.clocks = clocks
        self.marks = marks
        self.engines = threads[0].block.engines
        self.descriptor = descriptor
        self.rows = rows
        self.transposed = transposed
        self.first: tuple[int, int] | None = None  # row and chunk at which the last slice starts

    def slice(self, step):
        """Return the slice at byte `step` after the descriptor's address, (rows, 16) float32."""
        addresses, mode = _addresses(self.descriptor, step, self.rows, self.transposed)
        low = int(addresses.min())
        high = int(addresses.max()) + 16
        self.engines.span(self.threads[0], low, high - low, self.site, 16)
        for first, end in _ranges(addresses):
            words = (first - BASE) // 4, (end - BASE) // 4
            for thread, mark in zip(self.threads[::32], self.marks):
                self.engines.read(thread, *words, self.clocks, self.site, "wgmma", mark)
        k = (addresses - BASE) // 16
        self._check_tags(self.engines.tags[:, k], mode, step)
        halves = self.engines.bytes.reshape(-1, 16)[k].reshape(k.shape[0], -1).view(np.uint16)
        values = (halves.astype(np.uint32) << 16).view(np.float32)
        return values.T if self.transposed else values

    def end(self):
        """Return the column of the tile where the last slice ends; the row if it is transposed."""
        assert self.first is not None  # a slice has been read
        row, chunk = self.first
        return 16 + (row if self.transposed else 8 * chunk)

    def _check_tags(self, tags, mode, step):
        plane, row, column, swizzle = tags
        if (plane < 0).any():
            raise self._wrong_descriptor("it reads memory that no copy has written")
        if (swizzle != mode).any():
            raise self._wrong_descriptor(
                f"its swizzle mode is {mode}, the tile was copied with mode {int(swizzle.flat[0])}"
            )
        start = int(row[0, 0]), int(column[0, 0])
        rows, columns = np.indices(row.shape)
        other_tensor = plane != plane[0, 0]
        wrong = other_tensor | (row != start[0] + rows) | (column != start[1] + columns)
        if wrong.any():
            i, j = (int(x) for x in np.argwhere(wrong)[0])
            tensor = " of another tensor" if other_tensor[i, j] else ""
            raise self._wrong_descriptor(
                f"expected row {start[0] + i}, column {8 * (start[1] + j)} of the tile, "
                f"found row {int(row[i, j])}, column {8 * int(column[i, j])}{tensor}"
            )
        if self.first is not None and start != self._end(self.first):
            raise self._wrong_descriptor(f"the slice at byte {step} does not follow the one before")
        self.first = start

    def _wrong_descriptor(self, text):
        return self.engines.error(self.threads[0], self.site, f"wrong descriptor: {text}")

    def _end(self, start):
        """Return row and chunk at which the slice after this one must start."""
        row, chunk = start
        if self.transposed:
            return row + 16, chunk
        return row, chunk + 2


def _ranges(addresses):
    """Return the ranges of contiguous 16-byte chunks: [(first byte, end)]."""
    flat = np.unique(addresses)
    cuts = np.flatnonzero(np.diff(flat) != 16) + 1
    return [(int(run[0]), int(run[-1]) + 16) for run in np.split(flat, cuts)]


# ----------------------------------------------------------------------------- products
class _ProductGroup:
    """A product in flight, for one warp. inputs: the registers that it reads."""

    def __init__(self, number, site):
        self.number = number
        self.site = site
        self.inputs = []


def _element_keys(array):
    return range(array.bias + array.start, array.bias + array.start + array.dims[0])


def product(n, a_steps, b_steps, b_rows, accumulate, a_rows):
    """Return the simulated product, see hopper.make_wgmma.

    The result is computed immediately and becomes readable in wait.
    """
    rows, columns = _fragment(n)

    def run(threads, sites, args):
        engines = threads[0].block.engines
        site = sites[0]
        warps = [t.warp for t in threads[::32]]
        number = engines.committed[warps[0]] + 1
        groups = [_ProductGroup(number, site) for _ in warps]
        marks = [(engines.threads + w, number) for w in warps]
        thread_indices = [t.index for t in threads]
        clocks = engines.clocks[:, thread_indices].min(axis=1)
        b = _uniform(threads, site, [x[2] for x in args])
        right = _Operand(threads, site, clocks, marks, b, n, b_rows)
        if a_steps is None:
            left = _from_registers(threads, site, [x[1] for x in args], len(b_steps), groups)
        else:
            a = _uniform(threads, site, [x[1] for x in args])
            operand = _Operand(threads, site, clocks, marks, a, 64, a_rows)
            left = [operand.slice(step) for step in a_steps]
        total = np.zeros((64, n), np.float32)
        if accumulate:
            total[rows, columns] = [
                _accumulator_values(t, x[0], n, site) for t, x in zip(threads, args)
            ]
        for left_slice, step in zip(left, b_steps):
            total = add_products(total, left_slice, right.slice(step).T)
        if a_steps is not None and a_rows == b_rows and operand.end() != right.end():
            axis = "rows" if b_rows else "columns"
            ends = f"{operand.end()} and {right.end()}"
            text = f"the operands end at different {axis} of their tiles: {ends}"
            raise engines.error(threads[0], site, text)
        for thread, x, values in zip(threads, args, total[rows, columns]):
            _start_product(thread, x[0], groups[thread.warp - warps[0]], values, site)
        for w, group in zip(warps, groups):
            engines.committed[w] = number
            engines.groups[w].append(group)
        return [None] * len(threads)

    return run


def _uniform(threads, site, values):
    if any(v != values[0] for v in values):
        text = "the threads of the warpgroup have different descriptors"
        raise threads[0].block.engines.error(threads[0], site, text)
    return values[0]


def _from_registers(threads, site, arrays, slices, groups):
    """Return the left operand, (64, 16) per slice.

    Its registers must not be written until the product has completed.
    """
    packed = np.empty((128, 4 * slices), np.uint32)
    for i, (thread, array) in enumerate(zip(threads, arrays)):
        packed[i] = thread.load_registers(array, 4 * slices, site)
        array.writeable = False
        array.memory.busy = (site, "which is an operand of")
        groups[i // 32].inputs.append(array)
    rows, columns = _fragment(16 * slices)
    whole = np.empty((64, 16 * slices), np.uint16)
    whole[rows, columns] = packed.view(np.uint16)
    values = (whole.astype(np.uint32) << 16).view(np.float32)
    return [values[:, 16 * k : 16 * k + 16] for k in range(slices)]


def _pending_products(thread):
    return thread.state.setdefault("products", {})


def _accumulator_values(thread, acc, n, site):
    """Return the values of an accumulator, or those that a pending product will give it."""
    pending_product = _pending_products(thread).get(id(acc.memory))
    if pending_product is not None:
        return pending_product[1]
    return thread.load_registers(acc, n // 2, site)


def _start_product(thread, acc, group, values, site):
    for key in _element_keys(acc):
        acc.memory.writes.pop(key, None)
    acc.writeable = False
    acc.memory.busy = (site, "the result of")
    _pending_products(thread)[id(acc.memory)] = group, values, acc


def wait(pending):
    """Return the simulated wait, see hopper.make_wgmma_wait and make_wgmma_wait_group."""

    def run(threads, sites, args):
        engines = threads[0].block.engines
        site = sites[0]
        w = threads[0].warp
        done = max(engines.completed[w], engines.committed[w] - pending)
        engines.completed[w] = done
        thread_indices = [t.index for t in threads]
        column = engines.threads + w
        engines.clocks[0, thread_indices, column] = np.maximum(
            engines.clocks[0, thread_indices, column], done
        )
        for group in [g for g in engines.groups[w] if g.number <= done]:
            engines.groups[w].remove(group)
            engines.tell("completed", threads[0].block, "wgmma", threads[0])
            for array in group.inputs:
                array.writeable = True
                array.memory.busy = None
        for thread, accumulators in zip(threads, args):
            for acc in accumulators:
                _complete_product(thread, acc, done, pending, site, engines)
        return [None] * len(threads)

    return run


def _complete_product(thread, acc, done, pending, site, engines):
    pending_product = _pending_products(thread).get(id(acc.memory))
    if pending_product is None:
        return
    group, values, _ = pending_product
    if group.number > done:
        text = (
            f"this wait leaves {pending} products in flight, and the one started at {group.site}, "
            "whose result it names, may be among them"
        )
        raise engines.error(thread, site, text, group.site)
    del _pending_products(thread)[id(acc.memory)]
    acc.writeable = True
    acc.memory.busy = None
    acc.flat[acc.start : acc.start + acc.dims[0]] = values
    acc.memory.writes.update(dict.fromkeys(_element_keys(acc), (thread.mark, site)))
