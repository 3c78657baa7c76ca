"""lessons/allocator.py: blocks never overlap, freed memory is reused, fragmentation is measured correctly."""

import importlib.util
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

PATH = Path(__file__).resolve().parents[2] / "lessons" / "allocator.py"
spec = importlib.util.spec_from_file_location("allocator", PATH)
allocator = sys.modules["allocator"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(allocator)
Driver, OutOfMemory, Pool, replay = (
    getattr(allocator, n) for n in ("Driver", "OutOfMemory", "Pool", "replay")
)
POOLS, PROGRAMS, ROUND, SEGMENT, SMALL = (
    getattr(allocator, n) for n in ("POOLS", "PROGRAMS", "ROUND", "SEGMENT", "SMALL")
)
every_pool = pytest.mark.parametrize("options", POOLS.values(), ids=POOLS)
MB = 1 << 20


def check_whole(pool):
    """Check that every byte of every segment is in exactly one block, and that lists, links and sums agree."""
    free = [b for entries in pool.free_blocks.values() for _, _, b in entries]
    blocks = sorted([*free, *pool.in_use], key=lambda b: b.address)
    assert len(set(blocks)) == len(blocks) and all(b.free for b in free)
    assert not any(b.free for b in pool.in_use)
    for segment in pool.segments:
        here, at = [b for b in blocks if b.segment is segment], 0
        for left, right in zip([None, *here], [*here, None]):
            assert left is None or left.after is right
            assert right is None or (right.before is left and right.start == at and right.size > 0)
            at += right.size if right else 0
            assert not (pool.join and left and right and left.free and right.free)
        assert at == segment.size
    s = pool.statistics
    assert s.used == sum(b.size for b in pool.in_use) and s.asked == sum(
        b.asked for b in pool.in_use
    )
    assert s.reserved == sum(x.size for x in pool.segments) == pool.driver.used
    assert s.peak_used >= s.used and s.peak_reserved >= s.reserved


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_program_leaves_a_valid_pool(data):
    pool = Pool(Driver(), **data.draw(st.sampled_from(list(POOLS.values()))))
    sizes, blocks = st.one_of(st.integers(1, 5000), st.integers(1, 9 * MB)), []
    for _ in range(data.draw(st.integers(1, 40))):
        if blocks and data.draw(st.booleans()):
            pool.free(blocks.pop(data.draw(st.integers(0, len(blocks) - 1))))
        else:
            asked = data.draw(sizes)
            blocks.append(pool.alloc(asked))
            assert blocks[-1].size >= asked and blocks[-1].address % ROUND == 0
        check_whole(pool)
    if data.draw(st.booleans()):
        pool.trim()
        check_whole(pool)
    for block in blocks:
        pool.free(block)
    check_whole(pool)
    assert pool.statistics.used == 0
    pool.trim()
    assert pool.driver.used == 0 and not pool.segments


@every_pool
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_programs(options, program):
    pool = Pool(Driver(), **options)
    events = list(PROGRAMS[program]())
    replay(pool, events, check_whole if len(events) < 700 else lambda pool: None)
    check_whole(pool)
    assert pool.statistics.used == 0
    calls = pool.driver.calls
    replay(pool, events)
    if program == "training" or pool.join:
        assert pool.driver.calls == calls  # the second run allocates nothing


def test_training_is_the_easy_case():
    """It allocates like a stack: the pool reserves what is in use at the peak, and rarely calls the driver."""
    s, pool = run("training", "split, join, two kinds")
    assert s.used == 0 and s.peak_reserved < 1.05 * s.peak_used
    assert pool.driver.calls < s.requests / 5


def run(program, name):
    pool = Pool(Driver(), **POOLS[name])
    return replay(pool, PROGRAMS[program]()), pool


def test_what_each_idea_improves():
    reserved = {
        program: {name: run(program, name)[0].peak_reserved for name in POOLS}
        for program in PROGRAMS
    }
    caches, mixed = reserved["growing caches"], reserved["scalar in the way"]
    # without joining, only small fragments remain
    assert caches["split, join"] < caches["split"]
    # without two kinds, 100 bytes block 64 MB
    assert mixed["split, join, two kinds"] < 0.7 * mixed["split, join"]
    s, _ = run("growing caches", "split, join, two kinds")
    assert s.external > 0.1 and s.largest_free < (1 - s.used / s.reserved) * s.reserved


def test_blocks_are_reused():
    pool = Pool(Driver())
    first = pool.alloc(1000)
    assert (first.size, pool.driver.calls, pool.statistics.reserved) == (1024, 1, SEGMENT)
    second = pool.alloc(512)
    assert second.address == first.address + 1024
    pool.free(first)
    assert pool.alloc(700).address == first.address  # best fit: not the larger rest of the segment
    assert pool.driver.calls == 1
    large = pool.alloc(SMALL + 1)
    assert large.segment is not first.segment and pool.driver.calls == 2


def test_free_neighbours_are_joined():
    pool = Pool(Driver())
    blocks = [pool.alloc(n) for n in (512, 1024, 2048)]
    for i in (0, 2, 1):
        pool.free(blocks[i])
    assert pool.measure().largest_free == SEGMENT and len(pool.free_blocks[True]) == 1
    assert pool.alloc(SMALL).start == 0


def test_fragmentation_is_measured():
    pool = Pool(Driver())
    blocks = [pool.alloc(1 << 18) for _ in range(8)]  # exactly a segment
    s = pool.measure()
    assert (s.internal, s.external, s.largest_free) == (0, 0, 0)
    for block in blocks[::2]:
        pool.free(block)
    s = pool.measure()
    # 1 MB is free, but no request above 256 kB fits
    assert s.external == 0.5 and s.largest_free == 1 << 18
    pool.alloc(SMALL)
    assert len(pool.segments) == 2
    other = Pool(Driver())
    other.alloc(1)
    assert other.measure().internal == 1 - 1 / ROUND


def test_out_of_memory_only_if_trimming_does_not_help():
    pool = Pool(Driver(limit=10 * MB))
    big = pool.alloc(6 * MB)
    with pytest.raises(OutOfMemory, match="bytes requested"):
        pool.alloc(6 * MB)
    check_whole(pool)
    pool.free(big)
    # the 6 MB are returned to the driver first
    assert pool.alloc(9 * MB).size >= 9 * MB and len(pool.segments) == 1
    check_whole(pool)


@every_pool
def test_mistakes_are_found(options):
    pool, other = Pool(Driver(), **options), Pool(Driver(), **options)
    block = pool.alloc(10)
    pool.free(block)
    for where, what in ((pool, block), (pool, other.alloc(10))):
        with pytest.raises(ValueError, match="not in use"):
            where.free(what)
    for size in (0, -1):
        with pytest.raises(ValueError, match="at least one"):
            pool.alloc(size)
    check_whole(pool)


def test_the_report():
    lines = list(allocator.report())
    assert len(lines) >= 2 + len(PROGRAMS) * len(POOLS) and all(len(x) < 110 for x in lines)


@pytest.mark.gpu
@pytest.mark.parametrize("program", PROGRAMS)
def test_compared_with_cupys_pool(program):
    """Both pools get all memory back. CuPy requests blocks of the requested size from the driver, ours requests whole
    segments. So CuPy's blocks of many sizes cannot join, and its pool may need several times the memory."""
    ours = Pool(Driver())
    mine = replay(ours, PROGRAMS[program]())
    theirs_pool = allocator.CupyPool()
    theirs = replay(theirs_pool, PROGRAMS[program]())
    assert theirs.requests == mine.requests and theirs.asked == mine.asked
    assert theirs_pool.pool.used_bytes() == 0
    assert 0.5 < theirs.reserved / mine.reserved < 4
