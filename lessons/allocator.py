"""A readable memory pool: why creating an array on a GPU is cheap, and how memory can be free but unusable.

    python lessons/allocator.py        replays three programs on four allocators (and on CuPy's pool, if there is a GPU)

Returning memory to the driver waits for the GPU, and requesting it takes longer than launching a kernel; a training step
makes hundreds of requests. So a library keeps freed memory and reuses it. This file is a simple but complete pool of that
kind, modelled on the caching allocators of PyTorch and CuPy:

    round     every request is rounded up to a multiple of 512 bytes, so that a freed block fits many requests
    segments  the pool requests large pieces from the driver: 2 MB, or the size of a larger request
    two kinds small requests (up to 1 MB) are served from 2 MB segments; large requests have their own segments, so that
              a long-lived 100-byte array cannot occupy the middle of a gigabyte and make it unusable
    best fit  take the smallest free block that is large enough; among equal ones, the lowest address
    split     the rest of the block becomes a free block (for a large block: only if a large request could use it)
    join      a freed block is merged with its free neighbours
    trim      completely free segments are returned to the driver: on request, and before a request fails

The cost is fragmentation. It has two kinds, both measured here:

    internal  bytes allocated beyond the request (rounding)
    external  reserved bytes that are in no block in use; `largest_free` tells whether a single request could use them

For the second program below (growing caches), the engine's solution is not a better pool: it allocates its whole KV cache once.
"""

import bisect
import random
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

ROUND = 512  # bytes: CUDA aligns to 256; a 16-byte load needs 16
SMALL = 1 << 20  # largest small request, in bytes
SEGMENT = 2 << 20  # the driver's own granularity
Event = tuple[str, str, int]  # ("alloc" or "free", name, bytes)


@dataclass(eq=False)
class Block:
    """`size` bytes at offset `start` of a segment. before, after: its neighbours in the segment."""

    segment: "Segment"
    start: int
    size: int
    asked: int = 0  # bytes requested
    free: bool = True
    before: "Block | None" = None
    after: "Block | None" = None

    @property
    def address(self) -> int:
        return self.segment.address + self.start


@dataclass(eq=False)
class Segment:
    """One piece of memory from the driver."""

    address: int
    size: int
    small: bool


class OutOfMemory(MemoryError):
    """Neither the pool nor the driver has a piece of the requested size."""


class Driver:
    """Stands in for cudaMalloc and cudaFree: counts the calls, and has `limit` bytes."""

    def __init__(self, limit: int = 1 << 40):
        self.limit, self.used, self.peak, self.calls, self.next = limit, 0, 0, 0, SEGMENT

    def alloc(self, size: int) -> int:
        self.calls += 1
        if self.used + size > self.limit:
            raise OutOfMemory(
                f"{size} bytes requested, but only {self.limit - self.used} are left on the GPU"
            )
        self.used += size
        self.peak = max(self.peak, self.used)
        address, self.next = self.next, self.next + size
        return address

    def free(self, address: int, size: int) -> None:
        self.calls += 1
        self.used -= size


@dataclass
class Statistics:
    asked: int = 0  # requested bytes of the blocks in use
    used: int = 0  # the same, rounded up
    reserved: int = 0  # bytes of all segments
    largest_free: int = 0  # size of the largest free block
    peak_used: int = 0
    peak_reserved: int = 0
    requests: int = 0

    @property
    def internal(self) -> float:
        """Share of the bytes in use that was not requested."""
        return 1 - self.asked / self.used if self.used else 0.0

    @property
    def external(self) -> float:
        """Share of the reserved bytes that is not in use."""
        return 1 - self.used / self.reserved if self.reserved else 0.0


class Pool:
    """The allocator. separate: small and large requests use separate segments. split: blocks may be split. join: and merged."""

    def __init__(self, driver: Driver, separate=True, split=True, join=True):
        self.driver, self.separate, self.split, self.join = driver, separate, split, join
        self.segments: list[Segment] = []
        self.free_blocks = {True: [], False: []}  # small?: [(size, address, Block)], sorted
        self.in_use: set[Block] = set()
        self.statistics = Statistics()

    # ------------------------------------------------------------------------- public methods
    def alloc(self, asked: int) -> Block:
        """Return a block of at least `asked` bytes. Raises OutOfMemory, or ValueError if `asked` is less than 1."""
        if asked < 1:
            raise ValueError(f"cannot allocate {asked} bytes: request at least one")
        size = -(-asked // ROUND) * ROUND
        small = self.separate and size <= SMALL
        block = self._best_fit(size, small) or self._grow(size, small)
        if self.split and block.size - size >= (SMALL if self.separate and not small else ROUND):
            self._cut(block, size)
        block.free, block.asked = False, asked
        self.in_use.add(block)
        s = self.statistics
        s.requests += 1
        s.asked += asked
        s.used += block.size
        s.peak_used = max(s.peak_used, s.used)
        return block

    def free(self, block: Block) -> None:
        """Free a block. Raises ValueError if it is not in use."""
        if block not in self.in_use:
            raise ValueError(
                "this block is not in use: it was already freed, or it belongs to another pool"
            )
        self.in_use.remove(block)
        self.statistics.asked -= block.asked
        self.statistics.used -= block.size
        block.free = True
        if self.join:
            if block.after and block.after.free:
                self._swallow(block)
            if block.before and block.before.free:
                block = block.before
                self._swallow(block, listed=True)
        self._list(block)

    def trim(self) -> int:
        """Return completely free segments to the driver. -> bytes returned"""
        kept, given = [], 0
        for segment in self.segments:
            blocks = [
                b
                for entries in self.free_blocks.values()
                for _, _, b in entries
                if b.segment is segment
            ]
            if sum(b.size for b in blocks) < segment.size:
                kept.append(segment)
                continue
            for block in blocks:
                self._unlist(block)
            self.driver.free(segment.address, segment.size)
            given += segment.size
        self.segments = kept
        self.statistics.reserved -= given
        return given

    def measure(self) -> Statistics:
        sizes = [size for entries in self.free_blocks.values() for size, _, _ in entries]
        self.statistics.largest_free = max(sizes, default=0)
        return self.statistics

    # ------------------------------------------------------------------------- internals
    def _best_fit(self, size, small):
        entries = self.free_blocks[small]
        i = bisect.bisect_left(entries, (size, 0))
        if i == len(entries):
            return None
        if not self.split and entries[i][0] > 2 * size:
            return None  # without splitting, do not use a block more than twice the size
        return entries.pop(i)[2]

    def _grow(self, size, small):
        """Get a new segment. If the driver has none left, return free segments to it and try once more."""
        wanted = SEGMENT if small or not self.separate else size
        wanted = -(-max(size, wanted) // SEGMENT) * SEGMENT if self.split else size
        try:
            address = self.driver.alloc(wanted)
        except OutOfMemory:
            if not self.trim():
                raise
            address = self.driver.alloc(wanted)
        segment = Segment(address, wanted, small)
        self.segments.append(segment)
        s = self.statistics
        s.reserved += wanted
        s.peak_reserved = max(s.peak_reserved, s.reserved)
        return Block(segment, 0, wanted)

    def _cut(self, block, size):
        rest = Block(
            block.segment, block.start + size, block.size - size, before=block, after=block.after
        )
        if block.after:
            block.after.before = rest
        block.after, block.size = rest, size
        self._list(rest)

    def _swallow(self, block, listed=False):
        """Merge block.after into block. listed: block is already in the list of free blocks."""
        # if listed, block is in the list under its old size, and block.after is not in the list
        if listed:
            self._unlist(block)
        else:
            self._unlist(block.after)
        gone = block.after
        block.size, block.after = block.size + gone.size, gone.after
        if gone.after:
            gone.after.before = block

    def _list(self, block):
        bisect.insort(self.free_blocks[block.segment.small], (block.size, block.address, block))

    def _unlist(self, block):
        entries = self.free_blocks[block.segment.small]
        del entries[bisect.bisect_left(entries, (block.size, block.address))]


# ----------------------------------------------------------------------------- programs
def training_steps(layers=12, tokens=8192, width=384, steps=3) -> Iterable[Event]:
    """Forward allocates activations, backward frees them in the opposite order: a stack, the easy case."""
    sizes = {"norm": 4 * width, "stat": 4, "qkv": 12 * width, "out": 4 * width, "up": 32 * width}
    for _ in range(steps):
        for layer in range(layers):
            for name, size in sizes.items():
                yield "alloc", f"{layer} {name}", size * tokens
        for layer in reversed(range(layers)):
            for name, size in reversed(sizes.items()):
                yield "alloc", "gradient", size * tokens
                yield "free", f"{layer} {name}", 0
                yield "free", "gradient", 0


def growing_caches(sequences=16, layers=8, seed=0) -> Iterable[Event]:
    """Serving with caches that grow by copying: every 64 tokens, allocate a longer array, then free the old one."""
    draw, lengths = random.Random(seed), {}
    for i in range(400):
        name = f"{i} {draw.randrange(10**9)}"
        if len(lengths) == sequences:
            gone = draw.choice(sorted(lengths))
            for layer in range(layers):
                yield "free", f"{gone} {layer} {lengths[gone]}", 0
            del lengths[gone]
        lengths[name] = 1 + draw.randrange(8)
        for layer in range(layers):
            yield "alloc", f"{name} {layer} {lengths[name]}", lengths[name] * 64 * 2048
        for grown in draw.sample(sorted(lengths), len(lengths) // 2):
            for layer in range(layers):
                yield (
                    "alloc",
                    f"{grown} {layer} {lengths[grown] + 1}",
                    (lengths[grown] + 1) * 64 * 2048,
                )
                yield "free", f"{grown} {layer} {lengths[grown]}", 0
            lengths[grown] += 1


def scalar_in_the_way(rounds=60) -> Iterable[Event]:
    """A large temporary is allocated and freed; after each one, a small array stays, and the first one takes its memory."""
    for i in range(rounds):
        yield "alloc", "temporary", 64 << 20
        yield "free", "temporary", 0
        yield "alloc", f"kept {i}", 100


PROGRAMS = {
    "training": training_steps,
    "growing caches": growing_caches,
    "scalar in the way": scalar_in_the_way,
}
POOLS = {  # the first is hardly a pool: it reuses a block for a request of about the same size and never splits one
    "whole blocks": dict(separate=False, split=False, join=False),
    "split": dict(separate=False, join=False),
    "split, join": dict(separate=False),
    "split, join, two kinds": dict(),
}  # fmt: skip


def replay(
    pool: Pool, events: Iterable[Event], check: Callable[[Pool], None] = lambda pool: None
) -> Statistics:
    """Run a program. Blocks that it did not free are freed at the end, after the measurement."""
    blocks: dict[str, Block] = {}
    for what, name, size in events:
        if what == "alloc":
            blocks[name] = pool.alloc(size)
        else:
            pool.free(blocks.pop(name))
        check(pool)
    measured = Statistics(**vars(pool.measure()))
    for block in blocks.values():
        pool.free(block)
    return measured


@dataclass
class CupyPool:
    """CuPy's pool with the same three methods, for comparison; it allocates real GPU memory."""

    pool: object = None
    statistics: Statistics = field(default_factory=Statistics)

    def __post_init__(self):
        import cupy

        self.pool = cupy.cuda.MemoryPool()

    def alloc(self, size):
        memory, s = self.pool.malloc(size), self.statistics
        s.requests, s.asked = s.requests + 1, s.asked + size
        s.peak_used = max(s.peak_used, self.pool.used_bytes())
        return [memory, size]

    def free(self, block):
        self.statistics.asked -= block.pop()
        block.clear()  # drops the last reference, so the pool gets the memory back

    def measure(self):
        s = self.statistics
        s.used, s.reserved = self.pool.used_bytes(), self.pool.total_bytes()
        s.peak_reserved = max(s.peak_reserved, s.reserved)
        return s


def report() -> Iterable[str]:
    """One line per program and allocator."""
    yield (
        f"{'program':18} {'allocator':24} {'driver':>7} {'reserved':>9} {'used':>7} {'at the end: external':>21} "
        f"{'internal':>9} {'us':>6}"
    )
    yield f"{'':43} {'calls':>7} {'peak MB':>9} {'peak MB':>7}"
    for program, events in PROGRAMS.items():
        makers = {
            name: lambda options=options: Pool(Driver(), **options)
            for name, options in POOLS.items()
        }
        if _has_gpu():
            makers["CuPy's pool"] = CupyPool
        for name, make in makers.items():
            pool, listed = make(), list(events())
            start = time.perf_counter()
            s = replay(pool, listed)
            us = (time.perf_counter() - start) / len(listed) * 1e6
            calls = pool.driver.calls if isinstance(pool, Pool) else "-"
            yield (
                f"{program:18} {name:24} {calls:>7} {s.peak_reserved / 1e6:9.1f} {s.peak_used / 1e6:7.1f} "
                f"{s.external:21.1%} {s.internal:9.2%} {us:6.1f}"
            )


def _has_gpu() -> bool:
    from xtrain.device import gpu_available

    return gpu_available()


if __name__ == "__main__":
    sys.stdout.writelines(line + "\n" for line in report())
