"""Launches in several orders of blocks and warps: bugs that the usual order hides, each with a twin that is right."""

import sys

import numpy as np
import pytest
from numba import cuda, float32, int32

from xtrain import simulator
from xtrain.simulator import DeadlockError, Stepper, check, observe, run, simulate
from xtrain.simulator import __main__ as command


@cuda.jit(device=True)
def take(locks, i):
    while cuda.atomic.cas(locks, i, 0, 1) != 0:
        pass
    cuda.threadfence()


@cuda.jit(device=True)
def free(locks, i):
    cuda.threadfence()
    cuda.atomic.exch(locks, i, 0)


@cuda.jit
def two_locks(total, locks, crossed):
    """Block 0 takes lock 0 and lock 1, block 1 lock 1 and lock 0 if `crossed`."""
    first = cuda.blockIdx.x * crossed
    take(locks, first)
    take(locks, 1 - first)
    total[0] += 1
    free(locks, 1 - first)
    free(locks, first)


@cuda.jit
def two_locks_of_warps(total, crossed):
    locks = cuda.shared.array(2, int32)
    i = cuda.threadIdx.x
    if i < 2:
        locks[i] = 0
    cuda.syncthreads()
    if i % 32 == 0:
        first = i // 32 * crossed
        take(locks, first)
        take(locks, 1 - first)
        total[0] += 1
        free(locks, 1 - first)
        free(locks, first)


LOCKS = {
    "blocks": lambda crossed, **how: run(two_locks, 2, 1, np.zeros(1), np.zeros(2, np.int32), crossed, **how),
    "warps": lambda crossed, **how: run(two_locks_of_warps, 1, 64, np.zeros(1), crossed, **how),
}  # fmt: skip


def test_locks_that_blocks_take_in_opposite_orders():
    LOCKS["blocks"](1)
    with pytest.raises(DeadlockError, match="which seed") as found:
        LOCKS["blocks"](1, schedules=8)
    seed = int(str(found.value).partition("seed ")[2].split()[0])
    for _ in range(2):
        with pytest.raises(DeadlockError):
            LOCKS["blocks"](1, seed=seed)
    LOCKS["blocks"](0, schedules=8)


def test_locks_that_warps_take_in_opposite_orders():
    """Warps take turns in waiting loops, so the usual order shows it."""
    with pytest.raises(DeadlockError):
        LOCKS["warps"](1)
    LOCKS["warps"](0, schedules=8)


@cuda.jit
def counts_in_two_steps(total):
    """The sum is lost if another thread adds between the two atomics."""
    before = cuda.atomic.add(total, 0, 0)
    cuda.atomic.exch(total, 0, before + 1)


@cuda.jit
def counts(total):
    cuda.atomic.add(total, 0, 1)


@pytest.mark.parametrize(("grid", "block"), [(1, 64), (8, 1)])
def test_an_atomic_read_and_an_atomic_write_are_not_one(grid, block):
    total = np.zeros(1, np.int32)
    assert check(counts_in_two_steps, grid, block, total) == []
    (found,) = check(counts_in_two_steps, grid, block, total, schedules=4)
    assert found.kind == "order_dependent" and found.severity == "warning"
    assert f"total[0] is {2 * grid * block} in the usual order" in str(found) and "seed=" in str(
        found
    )
    assert found.sites[0].line == counts_in_two_steps.py_func.__code__.co_firstlineno + 4
    assert total[0] == 2 * grid * block  # what the usual order leaves
    assert check(counts, grid, block, total, schedules=4) == []


@cuda.jit
def first_free_place(out, places, x):
    i = cuda.grid(1)
    if x[i] > 0:
        out[cuda.atomic.add(places, 0, 1)] = x[i]


def test_a_result_that_depends_on_the_order_is_a_warning_that_can_be_allowed():
    out = np.zeros(8)
    places = np.zeros(1, np.int32)
    x = np.arange(8.0)
    warnings = []
    run(first_free_place, 2, 4, out, places, x, schedules=3, warn=warnings.append)
    assert [w.kind for w in warnings] == ["order_dependent"]
    assert out.tolist() == [*x[1:], 0] and places[0] == 7
    places[0] = 0
    run(first_free_place, 2, 4, out, places, x, schedules=3, allow=["order_dependent:out"])
    places[0] = 0
    run(first_free_place, 2, 4, out, places, x, seed=3)
    assert sorted(out) == [0, *x[1:]] and out.tolist() != [*x[1:], 0]


@cuda.jit
def sum_of_the_last_block(total, partial, counter, x):
    s = cuda.shared.array(1, int32)
    partial[cuda.blockIdx.x] = x[cuda.blockIdx.x]
    cuda.threadfence()
    s[0] = cuda.atomic.add(counter, 0, 1)
    cuda.threadfence()
    if s[0] == cuda.gridDim.x - 1:
        acc = float32(0.0)
        for i in range(cuda.gridDim.x):
            acc += partial[i]
        total[0] = acc


def test_the_last_block_is_another_one_in_each_order():
    x = np.random.default_rng(0).standard_normal(8).astype(np.float32)
    args = np.zeros(1, np.float32), np.zeros(8, np.float32), np.zeros(1, np.int32), x
    assert check(sum_of_the_last_block, 8, 1, *args, schedules=4) == []
    assert abs(args[0][0] - x.sum()) < 1e-5 and args[2][0] == 8


POINT = np.dtype([("n", np.int32)])


@cuda.jit
def adds_to_a_record(r):
    r.n += 1


@cuda.jit
def prints(x):
    print(x[0])


def test_every_order_starts_from_the_same_memory(capsys):
    record = np.zeros(1, POINT)[0]
    run(adds_to_a_record, 1, 1, record, schedules=4)
    assert record["n"] == 1
    run(prints, 1, 1, np.full(1, 7), schedules=4)
    assert capsys.readouterr().out == "7\n"
    unwritten = simulator.empty(1, np.int32)
    assert [f.kind for f in check(counts, 1, 1, unwritten, schedules=3)] == ["unwritten_global"]


def test_a_finding_of_the_usual_order_has_no_seed():
    @cuda.jit
    def racy(o):
        o[0] = cuda.threadIdx.x

    with pytest.raises(simulator.RaceError) as found:
        run(racy, 1, 4, np.zeros(1), schedules=4)
    assert "seed" not in str(found.value)


def test_an_observer_sees_the_order_of_the_finding():
    stepper = Stepper()
    with observe(stepper), pytest.raises(DeadlockError):
        LOCKS["blocks"](1, schedules=8)
    assert isinstance(stepper.error, DeadlockError) and any(stepper.ended)


@simulate(schedules=8)
def test_programs_run_in_several_orders():
    with pytest.raises(DeadlockError):
        two_locks[2, 1](np.zeros(1), np.zeros(2, np.int32), 1)
    total = np.zeros(1)
    two_locks[2, 1](total, np.zeros(2, np.int32), 0)
    assert total[0] == 2


@pytest.mark.parametrize("wrong", [{"schedules": 0}, {"schedules": 1.5}, {"seed": -1}])
def test_wrong_numbers(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        run(counts, 1, 1, np.zeros(1, np.int32), **wrong)
    with pytest.raises(ValueError, match=next(iter(wrong))), simulate(**wrong):
        pass


SCRIPT = """
import numpy as np
from test_orders import two_locks
two_locks[2, 1](np.zeros(1), np.zeros(2, np.int32), 1)
"""


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        ([], 0, ""),
        (["--schedules", "8"], 1, "DeadlockError: deadlock in two_locks"),
        (["--schedules", "0"], 2, "schedules=0 is not a positive integer"),
        (["--seed", "x"], 2, "--seed x: give a number"),
    ],
)
def test_the_command_has_the_options(tmp_path, monkeypatch, capsys, options, code, words):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert command.main([*options, str(script)]) == code
    assert words in capsys.readouterr().err
