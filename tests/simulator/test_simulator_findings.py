"""What is a finding, how severe it is, and what is none: indices below zero, threads that exit, values that were never written,
arithmetic. Every planted bug stands next to honest code that must not alarm.
"""

import threading

import numpy as np
import pytest
from numba import cuda, float32, int16, int32, int64, uint32  # noqa: F401  expressions below use them
from numba.cuda.random import xoroshiro128p_uniform_float32

from xtrain import simulator
from xtrain.simulator import (
    KINDS,
    DeadlockError,
    KernelError,
    OutOfBoundsError,
    RaceError,
    UninitializedError,
    check,
    run,
    thread,
)
from xtrain.simulator.observers import ATOMIC, Observer

FULL = 0xFFFFFFFF
LAST = -1


def ramp(n=8, dtype=np.float32):
    return np.arange(n, dtype=dtype)


def kinds(findings):
    return [f.kind for f in findings]


# ----------------------------------------------------------------------------- indices below zero
@cuda.jit
def literal_negatives(o, x, m):
    s = cuda.shared.array(8, float32)
    s[-8] = x[LAST]
    s[-1] = x[-2]
    s[1] = m[-1][-2]
    o[0], o[-1] = s[0] + s[7], s[1] + m[0, -1]
    cuda.atomic.add(o, -2, x[(-1)])


def test_literal_negative_indices_wrap():
    o = np.zeros(3, np.float32)
    run(literal_negatives, 1, 1, o, ramp(), ramp(6).reshape(2, 3))
    assert o.tolist() == [13, 7, 6]


@cuda.jit
def computed_negative(o, h, x, by):
    i = cuda.threadIdx.x
    o[i] = x[i - by]
    cuda.atomic.add(h, i - by, i)


def test_a_computed_negative_index_is_a_warning():
    o, h, x = np.zeros(4, np.float32), np.zeros(4, np.int64), ramp(4)
    with pytest.raises(OutOfBoundsError, match=r"negative index in .*x\[-1\].*wraps around to 3"):
        run(computed_negative, 1, 4, o, h, x, 1)
    found = check(computed_negative, 1, 4, o, h, x, 1)
    assert kinds(found) == ["negative_index"] * 2 and found[0].severity == "warning"
    assert o.tolist() == [3, 0, 1, 2] and h.tolist() == [1, 2, 3, 0]
    run(computed_negative, 1, 4, o, h, x, 1, allow={"negative_index"})
    assert o.tolist() == [3, 0, 1, 2]
    found = check(computed_negative, 1, 1, o, h, x, 5)
    assert kinds(found) == ["out_of_bounds"] * 2 and found[0].severity == "error"
    assert "index -5 is negative" in str(found[0])


@cuda.jit
def unsigned_index(o, x):
    i = uint32(cuda.threadIdx.x)
    o[i] = x[i - uint32(1)]


def test_an_unsigned_index_does_not_wrap():
    found = check(unsigned_index, 1, 2, np.zeros(2), ramp(2))
    assert kinds(found) == ["out_of_bounds"] and "18446744073709551615" in str(found[0])


# ----------------------------------------------------------------------------- threads that have exited
@cuda.jit
def early_return(o, x):
    s = cuda.shared.array(64, float32)
    i = cuda.grid(1)
    if i >= x.size:
        return
    s[i] = x[i]
    cuda.syncthreads()
    o[i] = s[x.size - 1 - i]


@cuda.jit
def early_vote(o, x):
    i = cuda.grid(1)
    if i >= x.size:
        return
    o[i] = cuda.ballot_sync(FULL, x[i] >= 0)


@pytest.mark.parametrize("kernel", [early_return, early_vote])
def test_threads_that_have_exited_count_as_arrived(kernel):
    x, o = ramp(5), np.zeros(5, np.float32)
    with pytest.raises(DeadlockError, match=r"count as arrived on compute capability 7\.0"):
        run(kernel, 1, 32, o, x)
    o[:] = 0
    (found,) = check(kernel, 1, 32, o, x)
    assert (found.kind, found.severity) == ("exited_threads", "warning")
    assert "27 threads (5-31) have returned" in str(found) and len(found.sites) == 2
    assert o.tolist() == (x[::-1].tolist() if kernel is early_return else [31.0] * 5)


@cuda.jit
def different_barriers(o):
    if cuda.threadIdx.x < 8:
        cuda.syncthreads()
    else:
        cuda.syncthreads()
    o[0] = 1


@cuda.jit
def small_block(o):
    o[cuda.threadIdx.x] = cuda.any_sync(FULL, cuda.threadIdx.x == 3)


@cuda.jit
def reads_an_exited_lane(o):
    if cuda.laneid < 16:
        o[cuda.laneid] = cuda.shfl_down_sync(FULL, cuda.laneid, 8)


def test_what_waits_for_ever_and_what_does_not():
    (found,) = check(different_barriers, 1, 16, np.zeros(1))
    assert (found.kind, found.severity) == ("deadlock", "error")
    o = np.zeros(8)
    assert kinds(check(small_block, 1, 8, o)) == ["partial_warp"] and o.all()
    found = check(reads_an_exited_lane, 1, 32, np.zeros(16))
    assert kinds(found) == ["exited_threads", "collective"] and found[1].count == 8


# ----------------------------------------------------------------------------- values that were never written
@cuda.jit
def dropped(o, x, n):
    """A tile whose last column nobody writes; a zip of two local arrays; a copy of unwritten elements."""
    tile = cuda.shared.array((4, 4), float32)
    a, b = cuda.local.array(4, float32), cuda.local.array(4, int32)
    i, j = cuda.threadIdx.y, cuda.threadIdx.x
    if j < n:
        tile[i, j] = x[i, j]
        a[j] = x[i, j]
    cuda.syncthreads()
    acc = float32(0)
    for k in range(4):
        acc += tile[i, k] * tile[k, j]
    kept = float32(0)
    for k, (u, v) in enumerate(zip(a, b)):
        w = float32(max(u, 2) * v + abs(u) ** 2 - -u // 3)
        if k == j and j < n:
            kept = u
    b[0] = b[1]
    cuda.syncthreads()
    if j == 3:
        tile[i, 3] = tile[i, 3] + w
    if j < n:
        o[i, j] = kept


def test_a_value_that_is_computed_and_dropped():
    o = np.zeros((4, 4), np.float32)
    run(dropped, 1, (4, 4), o, ramp(16).reshape(4, 4), 3)
    assert (o[:, :3] == ramp(16).reshape(4, 4)[:, :3]).all()


USES = {
    "to_global": "o[0] = v + 1",
    "branch": "if v > 0: o[0] = 1",
    "conditional": "o[0] = 1 if v * 2 > 0 else 3",
    "boolean": "o[0] = 1.0 if x[0] > -1 and v < 0 else 2.0",
    "loop": "for _ in range(int32(v)): o[0] = 1",
    "while_loop": "w = v\n    while w > 5: w = float32(0)",
    "index": "o[int32(v)] = 1",
    "slice_of": "o[0] = x[1:][int64(v) % 2]",
    "atomic": "cuda.atomic.add(o, 0, v)",
    "shuffle": "w = cuda.shfl_xor_sync(1, v, 0)",
    "vote": "w = cuda.syncthreads_or(int32(v))",
    "through_memory": "t = cuda.local.array(1, float32); t[0] = v; o[0] = t[0]",
    "through_shared": "s[1] = v; s[2] = s[1] * 2; cuda.syncthreads(); o[0] = s[2]",
    "through_math": "o[0] = math.sqrt(max(float32(abs(v)), x[0])) + round(v)",
    "in_a_function": "o[0] = passed(v)",
    "through_numpy": "o[0] = np.log(v) + math.ldexp(v, 2) + cuda.cbrt(v)",
}


@cuda.jit(device=True)
def passed(v):
    return v * v


def defined(name, text):
    import linecache

    lines = f"def {name}(o, x):\n    s = cuda.shared.array(4, float32)\n    v = s[0]\n    {text}\n"
    file = f"<findings {name}>"
    linecache.cache[file] = (len(lines), None, lines.splitlines(True), file)
    exec(compile(lines, file, "exec"), {**globals(), "math": __import__("math")}, scope := {})
    return cuda.jit(scope[name])


@pytest.mark.parametrize("name", USES)
def test_a_value_that_was_never_written_is_reported_where_it_matters(name):
    kernel = defined(name, USES[name])
    with pytest.raises(UninitializedError, match=rf"thread 0 reads s\[0\] at <findings {name}>:3"):
        run(kernel, 1, 1, np.zeros(4, np.float32), ramp())
    found = check(kernel, 1, 1, np.zeros(4, np.float32), ramp())
    assert kinds(found)[0] == "uninitialized" and "the value reaches" in str(found[0])
    assert {site.line for site in found[0].sites} >= {3}


def test_it_is_none_once_it_is_overwritten():
    kernel = defined("overwritten", "s[1] = v; s[1] = x[0]; s[0] = x[1]; o[0] = s[0] + s[1]")
    assert check(kernel, 1, 1, np.zeros(4, np.float32), ramp()) == []


@cuda.jit
def missing_barrier(o, x):
    s = cuda.shared.array(8, float32)
    i = cuda.threadIdx.x
    s[i] = x[i]
    o[i] = s[7 - i]


def test_an_early_read_names_the_writer_in_both_modes():
    words = r"that thread 7 writes at .*, with no barrier between them"
    with pytest.raises(UninitializedError, match=words):
        run(missing_barrier, 1, 8, np.zeros(8), ramp())
    found = check(missing_barrier, 1, 8, np.zeros(8), ramp())
    assert {*kinds(found)} == {"uninitialized", "race"} and "thread 7 writes" in str(found[0])


@cuda.jit
def copies(o, x):
    i = cuda.grid(1)
    if i < o.size:
        o[i] = x[i]


def test_unwritten_global_memory():
    x, o = simulator.empty(8, np.float32), simulator.empty(8, np.float32)
    with pytest.raises(UninitializedError, match=r"thread 0 reads x\[0\].*, global memory that no"):
        run(copies, 1, 8, o, x)
    assert kinds(check(copies, 1, 8, o, x)) == ["unwritten_global"]
    assert check(copies, 1, 8, o, x, allow={"unwritten_global"}) == []
    run(copies, 2, 2, x[:4], ramp())  # in two blocks
    run(copies, 1, 4, o, x[:4])
    (found,) = check(copies, 1, 8, np.zeros(8), x)
    assert found.count == 4
    x[4:] = 1
    assert check(copies, 1, 8, np.zeros(8), x) == []
    plain = simulator.mark_unwritten(np.zeros(8))
    assert kinds(check(copies, 1, 8, np.zeros(8), plain)) == ["unwritten_global"]
    simulator.mark_written(plain)
    assert check(copies, 1, 8, np.zeros(8), plain) == []


# ----------------------------------------------------------------------------- severities, all findings
@cuda.jit
def same_value(flag, o):
    if cuda.grid(1) > 2:
        flag[0] = 1
    o[0] = cuda.grid(1)


@pytest.mark.parametrize("grid, block", [(1, 6), (6, 1)])
def test_same_value_races(grid, block):
    flag, o = np.zeros(1, np.int32), np.zeros(1)
    with pytest.raises(RaceError):
        run(same_value, grid, block, flag, o)
    found = check(same_value, grid, block, flag, o)
    assert kinds(found) == ["race", "same_value_race"]
    assert [f.severity for f in found] == ["error", "warning"] and found[0].count == 5
    assert kinds(check(same_value, grid, block, flag, o, allow={"race"})) == ["same_value_race"]
    run(same_value, grid, block, flag, np.zeros(1), allow={"race", "same_value_race"})
    with pytest.raises(ValueError, match="'rase' is not a kind of finding: use one of error, race"):
        run(same_value, grid, block, flag, o, allow={"rase"})


@cuda.jit
def many_bugs(o, x, h):
    s = cuda.shared.array(4, float32)
    i = cuda.threadIdx.x
    o[i + 1] = x[i]
    o[0] = s[i]
    h[i] = h[i] // h[0]
    h[i] = h[i] << (h[i] + 64)
    h[0] = 2


def test_all_findings_of_a_run():
    found = check(many_bugs, 1, 4, np.zeros(4, np.float32), ramp(4), np.zeros(4, np.int64))
    expected = (
        "out_of_bounds",
        "uninitialized",
        "race",
        "same_value_race",
        "division_by_zero",
        "shift",
    )
    assert {*kinds(found)} == {*expected}
    assert len({f.sites for f in found}) == len(found)
    assert all(f.kind in KINDS and f.severity == KINDS[f.kind].severity for f in found)


def test_what_numba_refuses_is_one_finding():
    (found,) = check(cuda.jit(lambda x: x), 1, 2048, ramp())
    assert type(found) is KernelError and found.kind == "error"


@cuda.jit
def one_state_for_all(o, states):
    o[cuda.grid(1)] = xoroshiro128p_uniform_float32(states, 0)


def test_a_race_inside_numba_names_the_programs_line():
    states = np.ones(2, [("s0", np.uint64), ("s1", np.uint64)])
    line = one_state_for_all.py_func.__code__.co_firstlineno + 2
    found = check(one_state_for_all, 1, 2, np.zeros(2, np.float32), states)
    assert "random.py:" in str(found[0])
    assert f"called at test_simulator_findings.py:{line}" in str(found[0])


# ----------------------------------------------------------------------------- findings that are allowed
@cuda.jit
def sums(total, other, x):
    total[0] += x[
        cuda.grid(1)
    ]  # simulate: allow race because one warp adds them one after the other
    other[0] += x[cuda.grid(1)]


@cuda.jit
def no_reason(total):
    total[0] += 1  # simulate: allow race


@cuda.jit
def no_kind(total):
    total[0] += 1  # simulate: allow races because nobody looks


def test_a_finding_is_allowed_at_a_line_and_for_an_array():
    arguments = 1, 32, np.zeros(1, np.float32), np.zeros(1, np.float32), ramp(32)
    found = check(sums, *arguments)
    assert kinds(found) == ["race"] and "other[0]" in str(found[0])
    assert check(sums, *arguments, allow={"race:other"}) == []
    assert check(sums, *arguments, allow={"race:x", "same_value_race:other"}) != []
    assert check(sums, *arguments, allow={"race"}) == []
    with pytest.raises(ValueError, match="'rase' is not a kind of finding"):
        check(sums, *arguments, allow={"rase:other"})


@pytest.mark.parametrize("kernel", [no_reason, no_kind], ids=lambda k: k.__name__)
def test_a_comment_that_allows_nothing_is_an_error(kernel):
    with pytest.raises(KernelError, match="allows nothing: write `# simulate: allow KIND because"):
        run(kernel, 1, 2, np.zeros(1))


# ----------------------------------------------------------------------------- arithmetic
ARITHMETIC = {
    "division_by_zero": ("h[0] // h[1]", "h[0] % h[1]", "int32(3) // int32(h[1])"),
    "shift": ("h[0] << h[2]", "h[0] >> h[3]", "h[0] << 64", "int32(1) << h[3]"),
    "float_to_integer": ("int32(f[0])", "int(f[1])", "int64(f[0])", "int32(f[2])", "uint32(-f[2])"),
    "integer_overflow": ("int32(h[4])", "int32(h[4] * 2)"),
    "int16_overflow": ("int16(h[4])", "int16(-h[4])"),
}
HONEST = """
h[0] // h[2] | h[0] % h[2] | f[3] // f[4] | h[0] << 63 | h[0] << h[5] | int32(h[0]) << 40 | int32(f[3]) | int64(f[2])
uint32(h[4]) | uint32(h[0] * 747796405 + 2891336453) | h[0] // 3 | h[0] % 32 | f[3] / f[4] | int(f[5]) | uint32(f[5])
"""


@pytest.mark.parametrize("kind, text", [(k, e) for k, es in ARITHMETIC.items() for e in es])
def test_arithmetic_without_a_defined_result(kind, text):
    found = check(*arithmetic(text), enable={kind})
    assert kinds(found)[0] == kind and "<findings arithmetic>:4" in str(found[0])
    assert kinds(check(*arithmetic(text))) == [k for k in kinds(found) if KINDS[k].reported]


@pytest.mark.parametrize(
    "text", [e.strip() for e in HONEST.replace("\n", "|").split("|") if e.strip()]
)
def test_honest_arithmetic(text):
    assert check(*arithmetic(text), enable={"integer_overflow", "int16_overflow"}) == []


def test_sixteen_bits_may_be_meant_as_int16():
    assert check(*arithmetic("int16(h[0] + 65000)"), enable={"int16_overflow"}) == []


def arithmetic(text):
    kernel = defined("arithmetic", f"h, f = o, x; x[6] = {text}").py_func
    h = np.array([7, 0, 64, -1, 2**31, 5, 0], np.int64)
    f = np.array([np.nan, np.inf, 3e9, 2.5, 0, -0.5, 0], np.float64)
    return cuda.jit(kernel), 1, 1, h, f


@cuda.jit
def stores_what_does_not_fit(h, f):
    h[0] = f[0]
    h[1] = 2**40


def test_stores_of_integers_that_do_not_fit():
    h, f = np.zeros(2, np.int32), np.array([np.nan])
    found = check(stores_what_does_not_fit, 1, 1, h, f, enable={"integer_overflow"})
    assert kinds(found) == ["float_to_integer", "integer_overflow"] and h.tolist() == [0, 0]


# ----------------------------------------------------------------------------- loops
@cuda.jit
def long_loop(o, x, n):
    i = acc = 0
    while i < n:
        i += 1
        acc += i & 3
    o[0] = acc
    i = 0
    while i < n // 50:
        acc += x[i & 7] > 3
        i += 1
    o[1] = acc


def test_an_honest_loop_of_millions_of_turns():
    o = np.zeros(2, np.int64)
    assert check(long_loop, 1, 1, o, ramp(), 1_200_000) == []
    assert o[0] == 1_800_000


@cuda.jit
def never_ends(o):
    i = 0
    while i < 3:
        o[0] += i


@cuda.jit
def nothing_changes(o, n):
    i = 0
    while i < n:
        j = i + 1
    o[0] = j


def test_a_loop_in_which_nothing_changes():
    with pytest.raises(KernelError, match=r"endless loop in nothing_changes.*while i < n"):
        run(nothing_changes, 1, 1, np.zeros(1), 3)


def test_a_loop_of_too_many_turns(monkeypatch):
    monkeypatch.setattr(thread, "MAX_TURNS", 5000)
    with pytest.raises(KernelError, match="starts iteration 5,001 of while i < 3"):
        run(never_ends, 1, 1, np.zeros(1))


@cuda.jit
def spin_lock(total, lock, x):
    i = cuda.grid(1)
    while cuda.atomic.cas(lock, 0, 0, 1) != 0:
        pass
    cuda.threadfence()
    total[0] += x[i]
    cuda.threadfence()
    cuda.atomic.exch(lock, 0, 0)


@cuda.jit
def spin_lock_in_shared(total, x):
    lock, s = cuda.shared.array(1, int32), cuda.shared.array(1, float32)
    i = cuda.threadIdx.x
    if i == 0:
        lock[0] = 0
        s[0] = 0
    cuda.syncthreads()
    taken = False
    while not taken:
        if cuda.atomic.cas(lock, 0, 0, 1) == 0:
            cuda.threadfence_block()
            s[0] += x[i]
            cuda.threadfence_block()
            cuda.atomic.exch(lock, 0, 0)
            taken = True
    cuda.syncthreads()
    if i == 0:
        total[0] = s[0]


@cuda.jit
def lock_without_fence(total, lock, x):
    while cuda.atomic.cas(lock, 0, 0, 1) != 0:
        pass
    cuda.threadfence()
    total[0] += x[cuda.grid(1)]
    cuda.atomic.exch(lock, 0, 0)


@cuda.jit
def lock_too_short(total, lock, x):
    while cuda.atomic.cas(lock, 0, 0, 1) != 0:
        pass
    cuda.threadfence()
    v = total[0]
    cuda.threadfence()
    cuda.atomic.exch(lock, 0, 0)
    total[0] = v + x[cuda.grid(1)]


def test_spin_locks():
    lock = np.zeros(1, np.int32)
    for grid, block in ((1, 64), (4, 16)):
        total = np.zeros(1, np.float32)
        run(spin_lock, grid, block, total, lock, ramp(64))
        assert total[0] == 2016 and lock[0] == 0
        for kernel in (lock_without_fence, lock_too_short):
            lock[0] = 0
            with pytest.raises(RaceError, match=r"total\[0\]"):
                run(kernel, grid, block, total, lock, ramp(64))
        lock[0] = 0
    run(spin_lock_in_shared, 1, 40, total, ramp(64))
    assert total[0] == 780


@cuda.jit
def keeps_the_lock(lock):
    while cuda.atomic.cas(lock, 0, 0, 1) != 0:
        pass
    if cuda.grid(1) != 1:
        cuda.atomic.exch(lock, 0, 0)


@pytest.mark.parametrize("grid, block", [(1, 3), (3, 1)])
def test_a_deadlock_names_the_holder_of_the_lock(grid, block):
    with pytest.raises(DeadlockError) as caught:
        run(keeps_the_lock, grid, block, np.zeros(1, np.int32))
    holder = f"{'block (0, 0, 0) thread 1' if grid == 1 else 'block (1, 0, 0) thread 0'} at"
    assert f"of lock for which they wait was last changed by {holder}" in str(caught.value)


@cuda.jit
def relay(o, turn):
    """Every thread waits for the thread after it; every block for the block after it."""
    i, n = cuda.grid(1), cuda.gridsize(1)
    while cuda.atomic.add(turn, 0, 0) != n - 1 - i:
        cuda.nanosleep(10)
    o[i] = cuda.atomic.add(turn, 0, 1)


@cuda.jit
def relay_with_break(o, turn):
    """The same, in other words."""
    i, n = cuda.grid(1), cuda.gridsize(1)
    while True:
        seen = cuda.atomic.add(turn, 0, 0)
        if seen == n - 1 - i:
            break
    o[i] = cuda.atomic.add(turn, 0, 1)


@cuda.jit
def counts_while_it_waits(flag, turns):
    """Block 0 stores in the loop in which it waits for block 1."""
    if cuda.blockIdx.x == 0:
        while cuda.atomic.add(flag, 0, 0) == 0:
            turns[0] += 1
    else:
        cuda.atomic.exch(flag, 0, 1)


def test_a_waiting_loop_that_stores():
    turns = np.zeros(1, np.int64)
    run(counts_while_it_waits, 2, 1, np.zeros(1, np.int32), turns)
    assert turns[0] > 0


@cuda.jit
def waits_for_nobody(turn):
    if cuda.threadIdx.x == 0:
        while cuda.atomic.add(turn, 0, 0) == 0:
            pass
    cuda.syncthreads()


@pytest.mark.parametrize("grid, block", [(1, 40), (12, 1), (2, 33)])
def test_waiting_loops_let_others_run(grid, block):
    o, turn = np.zeros(grid * block, np.int64), np.zeros(1, np.int64)
    run(relay, grid, block, o, turn)
    assert o.tolist() == [*range(grid * block)][::-1]


class CountsAtomics(Observer):
    count = 0

    def access(self, thread, array, k, site, how, value):
        self.count += how == ATOMIC


@pytest.mark.parametrize("relay", [relay, relay_with_break], ids=lambda k: k.__name__)
def test_a_loop_that_only_waits_reads_seldom(relay):
    """Every thread waits for the thread after it: thread 0 looks 40 times, the last once, and each adds one at the end."""
    o, turn = np.zeros(40, np.int64), np.zeros(1, np.int64)
    with simulator.observe(CountsAtomics()) as counted:
        run(relay, 1, 40, o, turn)
    assert counted.count == 40 * 41 / 2 + 40


def test_an_observer_sees_the_launches_of_its_thread():
    o, turn = np.zeros(4, np.int64), np.zeros(1, np.int64)
    other = threading.Thread(target=run, args=(relay, 1, 4, o, turn))
    with simulator.observe(CountsAtomics()) as counted:
        other.start()
        other.join()
    assert o.any() and counted.count == 0


@pytest.mark.parametrize("grid", [1, 3])
def test_a_waiting_loop_that_nobody_ends(grid):
    with pytest.raises(DeadlockError) as caught:
        run(waits_for_nobody, grid, 4, np.zeros(1, np.int32))
    words = (
        "a loop waits for a change of memory that no thread makes",
        "1 threads (0) wait in while",
    )
    assert all(w in str(caught.value) for w in (*words, "3 threads (1-3) wait in syncthreads"))
