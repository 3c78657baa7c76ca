"""The table of a decoding step's tasks: complete, in an order without deadlock, and refused if a count is wrong."""

import numpy as np
import pytest

from xtrain.kernels.step import step_tasks as file

UNITS = {
    file.EMBED: 1, file.QKV: 5, file.ATTEND: 2, file.OUT: 3, file.GATE_UP: 9, file.DOWN: 3, file.HEAD: 40,
}  # fmt: skip


@pytest.mark.parametrize("blocks", [1, 2, 4, 132])
def test_every_share_once(blocks):
    stages = file.make_stages(3, UNITS)
    tasks = file.make_tasks(stages, blocks)
    assert [s.kind for s in stages[:7]] == [0, 1, 2, 3, 4, 5, 1] and stages[-1].layer == 3
    found = {tuple(t[[file.KIND, file.LAYER, file.SHARE, file.SHARES]]) for t in tasks}
    shares = [min(UNITS[s.kind], blocks) for s in stages]
    assert len(found) == len(tasks) == sum(shares)
    assert found == {(s.kind, s.layer, i, n) for s, n in zip(stages, shares) for i in range(n)}
    assert tasks[:, file.SIGNAL].max() * file.SPACING < file.counters_size(stages)


@pytest.mark.parametrize("blocks", [1, 3, 8])
def test_a_run_block_by_block_ends(blocks):
    """An oracle: blocks take their rows in order, one at random that can go on; nothing may stop before the end."""
    tasks = file.make_tasks(file.make_stages(2, UNITS), blocks)
    counters, draw = np.zeros(tasks[:, file.SIGNAL].max() + 1, int), np.random.default_rng(blocks)
    left = {p: list(range(p, len(tasks), blocks)) for p in range(blocks)}
    while left := {p: rows for p, rows in left.items() if rows}:
        ready = [
            p for p, rows in left.items()
            if counters[tasks[rows[0]][file.WAIT]] >= tasks[rows[0]][file.ARRIVALS]
        ]  # fmt: skip
        assert ready
        row = left[draw.choice(ready)].pop(0)
        counters[tasks[row][file.SIGNAL]] += 1


@pytest.mark.parametrize(
    "row, column, change", [(2, file.ARRIVALS, 1), (2, file.ARRIVALS, -1), (1, file.WAIT, 2), (4, file.SIGNAL, 1)]
)  # fmt: skip
def test_a_wrong_table_is_refused(row, column, change):
    tasks = file.make_tasks(file.make_stages(2, UNITS), 3)
    tasks[row, column] += change
    with pytest.raises(ValueError, match="arrivals at counter"):
        file.check_tasks(tasks)
