"""bench_handover.py: both ways to hand a vector over compute the same; the simulator and the numbers show planted bugs."""

import sys
from pathlib import Path

import numpy as np
import pytest
from checks import with_planted_bug

from xtrain.simulator import sim
from xtrain.simulator.errors import RaceError

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

import bench_handover as bench


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of one warp: in the simulator all threads take turns while they poll."""
    monkeypatch.setattr(bench, "BLOCK", 32)
    monkeypatch.setattr(bench, "WARPS", 1)
    clear()
    yield
    clear()


def clear():
    bench.make_counter_kernel.cache_clear()
    bench.make_sealed_kernel.cache_clear()


@pytest.mark.parametrize("name", bench.VARIANTS)
@pytest.mark.parametrize("columns, blocks", [(20, 2), (40, 2)])
def test_the_vector_after_two_rounds(name, columns, blocks):
    start, vector = bench.VARIANTS[name](sim, columns, blocks, 2)
    start()
    assert np.array_equal(np.array(vector()), bench.expected(columns, 2))


def test_a_block_without_words_is_refused():
    """Nothing waits for it, so it can find the words of a later round, and polls forever."""
    with pytest.raises(ValueError, match="1 columns for 2 blocks: give at least one column"):
        bench.VARIANTS["sealed"](sim, 1, 2, 2)


BUGS = [
    ("counter", "make_counter_kernel", "            cuda.syncthreads()  # all threads have written\n", "", RaceError),
    ("counter", "make_counter_kernel", "atomic_add_release(counter_1", "cuda.atomic.add(counter_1", RaceError),
    ("sealed", "make_sealed_kernel", "missing |= (mine[e] >> 32) != r", "missing |= False", AssertionError),
]  # fmt: skip


@pytest.mark.parametrize("name, make, old, new, error", BUGS, ids=["barrier", "release", "no wait"])
def test_planted_bugs_are_found(name, make, old, new, error):
    with with_planted_bug([bench], make, old, new), pytest.raises(error):
        start, vector = bench.VARIANTS[name](sim, 40, 2, 2)
        start()
        assert np.array_equal(np.array(vector()), bench.expected(40, 2))
