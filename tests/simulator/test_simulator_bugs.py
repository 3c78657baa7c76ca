"""Bugs planted in copies of the library's kernels: the simulator reports each bug at the line where it was planted."""

import importlib.util
import inspect

import numpy as np
import pytest
from checks import source_of
from numba import cuda, float32, int32

from xtrain.simulator import (
    CollectiveError,
    DeadlockError,
    KernelError,
    OutOfBoundsError,
    RaceError,
    UninitializedError,
    run,
    sim,
)

MARK = "  # BUG"


@pytest.fixture
def planted(tmp_path):
    """-> plant(stem, old, new): xtrain/kernels/<stem>.py with `old` replaced by `new`, imported as another module.

    old: any fragment that occurs once. The first line that the file did not have before gets the
    mark `# BUG`. A removed line becomes `pass`. Without old and new: an unchanged copy.
    """

    def plant(stem, old="", new=""):
        source, file = source_of(stem), stem.rpartition(".")[2]
        path = tmp_path / f"bad_{file}.py"
        if old:
            count = source.count(old)
            assert count == 1, f"{stem}.py has changed: {old!r} occurs {count} times"
            known, lines = set(source.splitlines()), source.replace(old, new).splitlines()
            lines[next(i for i, s in enumerate(lines) if s not in known)] += MARK
            source = "\n".join(lines) + "\n"
        package = f"xtrain.kernels.{stem}".rpartition(".")[0]
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(f"{package}.bad_{file}", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.file, module.lines = path.name, source.splitlines()
        return module

    return plant


def assert_reported(caught, module, kernel, *words, lines=(MARK,)):
    """The report contains the kernel, a block and `words`, and the planted line or the lines with the texts `lines`."""
    message = str(caught.value)
    for word in (kernel, "block (", *words):
        assert word in message, f"{word!r} is not in\n{message}"
    found = {site.line for site in caught.value.sites if module.file in site.file}
    for text in lines:
        numbers = [i for i in found if text in module.lines[i - 1]]
        assert numbers, f"no line with {text!r} is in\n{message}"
        assert f"{module.file}:{numbers[0]}" in message


def f32(*shape, mean=0.0):
    x = np.random.default_rng(0).standard_normal(shape) + mean
    return sim(x.astype(np.float32))


def zeros(*shape, dtype=np.float32):
    return sim(np.zeros(shape, dtype))


def run_rmsnorm(module, N=2, C=40):
    args = zeros(N, C), zeros(N), f32(N, C), f32(C), np.float32(0)
    run(module.rmsnorm_fwd_naive_kernel, N, module.BLOCK, *args)


def run_softmax(planted, reduce):
    """softmax.py's kernel for long rows, with the device functions of a changed reduce.py."""
    softmax = planted("softmax")
    softmax.block_sum, softmax.block_max = reduce.block_sum, reduce.block_max
    args = zeros(2, 300), f32(2, 300), 1, np.float32(1), False
    run(softmax.causal_softmax_fwd_kernel, 2, softmax.BLOCK, *args)


def run_qk_norm_bwd(module):
    H, G, D, N = 2, 1, 12, 2  # a width for the plain kernels
    tables = zeros(4, D // 2), zeros(4, D // 2)
    qkv, rstd, w = f32(N, (H + 2 * G) * D), f32(N, H + G, mean=3.0), f32(D)
    dqkv, dq, dk = f32(N, (H + 2 * G) * D), f32(N, H, D), f32(N, G, D)
    args = dqkv, dq, dk, qkv, w, w, rstd, *tables, H, G, N, zeros(D), zeros(D)
    module.qk_norm_rope_bwd(*args)


# ----------------------------------------------------------------------------- barriers
def test_no_barrier_between_two_uses_of_shared_memory(planted):
    before = "    v = warp_sum(v)\n    "
    reduce = planted("primitives.reduce", before + "cuda.syncthreads()", before + "pass")
    with pytest.raises(RaceError) as caught:
        run_softmax(planted, reduce)
    kernel = "race in block_sum (called by causal_softmax_fwd_kernel)"
    words = "block (0, 0, 0)", "read partial[0]", "thread 0 wrote it", "with no barrier between"
    assert_reported(caught, reduce, kernel, *words, lines=("partial[warp] = v",))
    read, write = caught.value.sites
    assert read.function == "block_max" and write.function == "block_sum"


def test_no_barrier_between_write_and_read(planted):
    """Warp 0 runs first in the simulator, and reads an element that warp 1 writes later."""
    after = "  # every warp's maximum is written"
    reduce = planted("primitives.reduce", "cuda.syncthreads()" + after, "pass" + after)
    with pytest.raises(UninitializedError) as caught:
        run_softmax(planted, reduce)
    assert_reported(
        caught,
        reduce,
        "block_max",
        "thread 1 reads partial[1]",
        "shared memory that thread 32 writes",
        lines=("v = partial[lane]", "partial[warp] = v"),
    )
    read, write = caught.value.sites
    assert read.line > write.line


def test_barrier_in_a_branch_that_some_threads_take(planted):
    barrier, guard = (
        "    cuda.syncthreads()  # the previous use of `partial` is over\n",
        "    if lane == 0:\n",
    )
    rest = "        partial[warp] = v\n    cuda.syncthreads()  # every warp's sum is written\n"
    reduce = planted(
        "primitives.reduce",
        barrier + guard + rest,
        guard + "        cuda.syncthreads()  # of some\n" + rest,
    )
    with pytest.raises(DeadlockError) as caught:
        run_softmax(planted, reduce)
    words = "8 threads (0, 32, 64, 96, 128, 160, 192, 224) wait in syncthreads at bad_reduce.py"
    assert_reported(caught, reduce, "causal_softmax_fwd_kernel", words, "called at bad_softmax.py")
    assert_reported(
        caught, reduce, "248 threads (1-31, 33-63", lines=(MARK, "every warp's sum is written")
    )  # the two barriers


def test_barrier_in_a_loop_of_unequal_trips(planted):
    old = "    for start in range(0, N, SUM_BLOCK):"
    module = planted("cross_entropy", old, "    for start in range(tid, N, SUM_BLOCK):")
    with pytest.raises(DeadlockError) as caught:
        module.count_targets(zeros(10, dtype=np.int64))
    words = "10 threads (0-9) wait in syncthreads_count", "have reached the end of the kernel"
    assert_reported(caught, module, "count_targets_kernel", *words, lines=("syncthreads_count",))


def test_early_return_before_a_barrier(planted):
    old = "    partial = cuda.shared.array(MAX_WARPS, float32)\n    acc = float32(0.0)\n    for c in range(tid, C, BLOCK)"
    assert old in source_of("rmsnorm")
    new = old.replace("    acc", "    if tid >= 64: return\n    acc", 1)
    module = planted("rmsnorm", old, new)
    with pytest.raises(DeadlockError) as caught:
        run_rmsnorm(module)
    words = (
        "192 threads (64-255) have returned at",
        "64 threads (0-63) wait in syncthreads at reduce.py",
    )
    assert_reported(caught, module, "rmsnorm_fwd_naive_kernel", *words)


def test_no_syncwarp_between_lanes(planted):
    module = planted("qk_norm_rope", "cuda.syncwarp()  # from here", "pass  # from here")
    with pytest.raises(RaceError) as caught:
        run_qk_norm_bwd(module)
    words = "thread (6, 0, 0) wrote dw_WD[0, 6]", "thread (0, 0, 0) read", "shared memory"
    kernel, lines = "qk_norm_rope_bwd_warp_kernel", ("dw_WD[warp, d] =", "dw_WD[warp, r + R] +=")
    assert_reported(caught, module, kernel, *words, lines=lines)


# ----------------------------------------------------------------------------- elements written by several threads
def test_all_threads_write_what_one_should(planted):
    old = "    if tid == 0:\n        rstd_N[n] = rstd  # saved for backward\n"
    module = planted("rmsnorm", old, "    if tid >= 0:\n        rstd_N[n] = rstd\n")
    with pytest.raises(RaceError) as caught:
        run_rmsnorm(module)
    words = "block (0, 0, 0): thread 0 wrote rstd_N[0] at", "thread 1 wrote it at", "global memory"
    assert_reported(
        caught, module, "race in rmsnorm_fwd_naive_kernel", *words, lines=("rstd_N[n] = rstd",)
    )


def test_two_blocks_write_one_element(planted):
    module = planted("layout", "i = row % X", "i = row // X")
    with pytest.raises(RaceError) as caught:
        module.swap_heads(f32(1, 2, 3, 5))  # a width for the plain kernel
    kernel = "race between blocks in swap_heads_plain_kernel"
    words = "block (0, 0, 0) thread", "block (1, 0, 0) thread", "y_BYXD[0, 0, 0, 0]"
    assert_reported(caught, module, kernel, *words, lines=("y_BYXD[b, j, i, d] =",))


def test_neighbour_overwritten_in_place(planted):
    old = "        p_NS[n, s] = math.exp(fmul_rn(scale, s_NS[n, s]) - top) * inverse\n    for s in range(visible + tid, S, BLOCK):\n"
    new = old.replace("scale, s_NS[n, s]", "scale, s_NS[n, s ^ 1]")
    module = planted("softmax", old, new)
    x = f32(1, 300)
    with pytest.raises(RaceError) as caught:
        run(module.causal_softmax_fwd_kernel, 1, module.BLOCK, x, x, 1, np.float32(1), False)
    words = (
        "thread 0 wrote p_NS",
        "thread 1 read s_NS[0, 0], the same memory as p_NS",
        "global memory",
    )
    assert_reported(caught, module, "causal_softmax_fwd_kernel", *words)


def test_read_after_the_barrier_behind_which_it_is_overwritten(planted):
    old = "float32(LOG2E)), scratch)"
    new = old + "\n        at_target = load1(logits, n * P + target)"
    module = planted("cross_entropy", old, new)
    with pytest.raises(RaceError) as caught:
        module.cross_entropy(f32(2, 600), sim(np.array([40, 3])), 600, f32(1))
    words = "thread 0 read load1(logits, n * P + target)", "thread 10 wrote element 40"
    assert_reported(caught, module, "cross_entropy_kernel", *words)


def test_corrected_by_a_thread_that_did_not_write_it(planted):
    old = "if in_vocabulary and target // vec % BLOCK == tid:"
    module = planted("cross_entropy", old, "if in_vocabulary and tid == 0:")
    with pytest.raises(RaceError) as caught:
        module.cross_entropy(f32(2, 600), sim(np.array([40, 3])), 600, f32(1))
    words = "thread 0 wrote store1(logits, n * P + target", "thread 10 wrote element 40"
    lines = "store1(logits, n * P + target", "store_vector(logits"
    assert_reported(caught, module, "cross_entropy_kernel", *words, lines=lines)


def test_two_threads_put_sixteen_bytes_in_one_place(planted):
    module = planted("layout", "* y_row + i * D", "* y_row")
    with pytest.raises(RaceError) as caught:
        module.swap_heads(f32(1, 2, 3, 4))
    words = "thread 0 wrote element 0 in store_words(y", "thread 3 wrote it", "global memory"
    assert_reported(
        caught, module, "swap_heads_kernel", *words, lines=("store_words(y, (int64(b)",)
    )


def test_two_launch_arguments_are_one_array(planted):
    module = planted("layout")
    x = f32(1, 2, 2, 4)
    with pytest.raises(RaceError) as caught:
        run(module.swap_heads_plain_kernel, (2, 1), (32, module.WARPS), x, x)
    message = str(caught.value)
    assert "y_BYXD" in message and "x_BXYD" in message and "between blocks" in message


# ----------------------------------------------------------------------------- indices
def test_one_column_too_many(planted):
    old = "    for c in range(tid, C, BLOCK):  # neighbouring threads read neighbouring columns\n"
    module = planted("rmsnorm", old, "    for c in range(tid, C + 1, BLOCK):\n")
    with pytest.raises(OutOfBoundsError) as caught:
        run_rmsnorm(module)
    words = "thread 40 uses x_NC[0, 40]", "shape is (2, 40)", "axis 1: index 40 is past the end"
    assert_reported(caught, module, "rmsnorm_fwd_naive_kernel", *words, lines=("acc += x_NC",))


def test_negative_index(planted):
    old = "    for p in range(cuda.threadIdx.x, sums_P.size, BLOCK):\n        acc += sums_P[p]\n"
    module = planted("grad_norm", old, old.replace("sums_P[p]", "sums_P[p - 1]"))
    with pytest.raises(OutOfBoundsError) as caught:
        module.norm_and_factor(f32(5), 1.0)
    words = "thread 0 uses sums_P[-1]", "index -1 is negative (Numba counts it from the end)"
    assert_reported(caught, module, "norm_and_factor_kernel", *words)


def test_shared_array_too_small(planted):
    old = "    C = x_NC.shape[1]\n    partial = cuda.shared.array(MAX_WARPS, float32)\n"
    module = planted("rmsnorm", old, old.replace("MAX_WARPS", "4"))
    with pytest.raises(OutOfBoundsError) as caught:
        run_rmsnorm(module)
    words = "thread 128 uses partial[4] at reduce.py", "shape is (4,)", "partial[warp] = v"
    assert_reported(
        caught, module, "block_sum (called by rmsnorm_fwd_naive_kernel)", *words, lines=()
    )


def test_sixteen_bytes_past_the_end(planted):
    """Through the intrinsics of kernels/primitives/ptx.py."""
    old = "load_vector(registers, x, first + c)"
    rows = planted("primitives.rows", old, "load_vector(registers, x, first + c + 4)")
    rmsnorm = planted("rmsnorm")
    rmsnorm.make_row_ops = rows.make_row_ops
    with pytest.raises(OutOfBoundsError) as caught:
        rmsnorm.rmsnorm_fwd(f32(1, 16), f32(16), 0.0)
    call = "load_vector(registers, x, first + c + 4)"
    words = f"thread 3 uses element 16 in {call}", "shape is (16,)"
    assert_reported(caught, rows, "load (called by rmsnorm_fwd_kernel)", *words)


# ----------------------------------------------------------------------------- never written
def test_shared_memory_never_written(planted):
    old = "    v = partial[lane] if lane < cuda.blockDim.x // 32 else float32(0.0)\n"
    module = planted("primitives.reduce", old, old.replace("lane < ", "lane <= "))
    with pytest.raises(UninitializedError) as caught:
        run_softmax(planted, module)
    kernel = "block_sum (called by causal_softmax_fwd_kernel)"
    assert_reported(caught, module, kernel, "thread 8 reads partial[8]", "shared memory")


def test_local_memory_never_written(planted):
    old = "range(CHUNK):\n        acc[j] = float32(0.0)"
    module = planted("grad_norm", old, old.replace("CHUNK", "1, CHUNK"))
    with pytest.raises(UninitializedError) as caught:
        module.grad_norm(f32(8), 1.0)
    words = "thread 0 reads acc[0]", "local memory"
    assert_reported(caught, module, "sum_of_squares_kernel", *words, lines=("acc[j] +=",))


# ----------------------------------------------------------------------------- warps
def test_mask_of_half_a_warp(planted):
    old = "def warp_sum(v):\n"
    source = source_of("primitives.reduce")
    body = source[source.index(old) : source.index("@cuda.jit", source.index(old))]
    module = planted("primitives.reduce", body, body.replace("FULL", "0xFFFF"))
    with pytest.raises(CollectiveError) as caught:
        run_softmax(planted, module)
    words = "thread 16", "mask 0xffff does not contain lane 16"
    assert_reported(caught, module, "shfl_xor_sync in warp_sum (called by", *words)


def test_block_is_not_whole_warps(planted):
    module = planted("rmsnorm", "BLOCK = 256", "BLOCK = 48")
    with pytest.raises(CollectiveError) as caught:
        run_rmsnorm(module)
    words = "contains lanes 16-31, but this warp has 16", "a block of 48 threads is not whole warps"
    assert_reported(
        caught, module, "warp_sum (called by rmsnorm_fwd_naive_kernel)", *words, lines=()
    )


def test_shuffle_in_a_branch(planted):
    old = "    acc = float32(0.0)\n    for s in range(lane, visible, 32):\n        acc +="
    new = "    acc = float32(0.0)\n    if lane >= visible: return\n    for s in range(lane, visible, 32):\n        acc +="
    module = planted("softmax", old, new)
    with pytest.raises(DeadlockError) as caught:
        module.causal_softmax_bwd(f32(1, 8, 21), f32(1, 8, 21), 8, 1.0)  # no multiple of 4 keys
    words = "have returned at", "wait in shfl_xor_sync with mask 0xffffffff at reduce.py"
    assert_reported(caught, module, "causal_softmax_bwd_warp_kernel", *words)


# ----------------------------------------------------------------------------- patterns that the library does not use
@cuda.jit
def tile_reused_too_early(x):
    tile = cuda.shared.array(32, int32)
    i, total = cuda.threadIdx.x, 0
    for _ in range(2):
        tile[i] = i
        cuda.syncthreads()
        total += tile[(i + 1) % 32]
        # the next round writes what this one may still have to read
    x[i] = total


@cuda.jit
def one_count_missing(x):
    counts = cuda.shared.array(32, int32)
    if cuda.threadIdx.x > 0:
        counts[cuda.threadIdx.x] = 0
    cuda.atomic.add(counts, cuda.threadIdx.x % 4, 1)


@cuda.jit
def plain_histogram(counts, values):
    i = cuda.grid(1)
    counts[values[i]] += 1  # should be cuda.atomic.add


@cuda.jit
def atomic_and_plain(x):
    if cuda.threadIdx.x == 0:
        cuda.atomic.add(x, 0, 1)
    else:
        x[0] = 5


@cuda.jit
def inactive_source(x):
    if cuda.laneid < 16:
        x[cuda.laneid] = cuda.shfl_down_sync(0xFFFF, x[cuda.laneid], 8)


@cuda.jit
def two_types(x):
    v = x[0]
    if cuda.laneid > 3:
        v = 0.5
    x[cuda.laneid] = cuda.shfl_sync(0xFFFFFFFF, v, 0)


@cuda.jit
def greedy(x):
    big = cuda.shared.array((100, 128), float32)
    big[0, 0] = x[0]


@cuda.jit
def wrong_python(x):
    x[0] = x.nothing


@cuda.jit
def half_an_index(x):
    x[cuda.threadIdx.x / 2] = 1


@cuda.jit
def writes(x):
    x[cuda.threadIdx.x] = 1


@cuda.jit
def reads_next_block(x, out):
    out[cuda.blockIdx.x] = x[cuda.blockIdx.x + 1]
    x[cuda.blockIdx.x] = 0


@cuda.jit
def no_fence(partial, counter):
    partial[cuda.blockIdx.x] = 1
    if cuda.atomic.add(counter, 0, 1) == 1:
        partial[1] = partial[0]


@cuda.jit
def not_there(x):
    x[0] = cuda.clock_of_the_wall()


def helper(x):
    return x


@cuda.jit
def calls_python(x):
    x[0] = helper(x[0])


@cuda.jit
def byte_views(out):
    words, halves = cuda.shared.array(0, int32), cuda.shared.array(0, np.int16)
    i = cuda.threadIdx.x
    words[i] = 1
    halves[(2 * i + 3) % 64] = 2


@pytest.mark.parametrize(
    "kernel, grid, block, error, words",
    [
        (plain_histogram, 1, 4, RaceError, "thread 0 wrote counts[0]"),
        (plain_histogram, 4, 1, RaceError, "block (1, 0, 0) thread 0 read it"),
        (tile_reused_too_early, 1, 32, RaceError, "thread 0 read tile[1]"),
        (one_count_missing, 1, 8, UninitializedError, "thread 0 reads counts[0]"),
        (atomic_and_plain, 1, 2, RaceError, "thread 0 atomically changed x[0]"),
        (atomic_and_plain, 2, 2, RaceError, "thread 0 atomically changed x[0]"),
        (
            inactive_source,
            1,
            32,
            CollectiveError,
            "lane 8 reads from lane 16, which does not take part",
        ),
        (two_types, 1, 32, CollectiveError, "float32 and float64"),
        (greedy, 1, 1, KernelError, "51200 static bytes up to"),
        (
            wrong_python,
            1,
            1,
            KernelError,
            "AttributeError in wrong_python, block (0, 0, 0): thread 0",
        ),
        (half_an_index, 1, 1, KernelError, "TypeError in half_an_index"),
        (reads_next_block, 2, 1, RaceError, "block (0, 0, 0) thread 0 read x[1] at"),
        (no_fence, 2, 1, RaceError, "block (1, 0, 0) thread 0 read it at"),
        (not_there, 1, 1, KernelError, "not_there, cuda.clock_of_the_wall is not simulated"),
        (calls_python, 1, 1, KernelError, "decorate it with @cuda.jit(device=True)"),
        (byte_views, 1, 32, RaceError, "wrote words[1], the same memory as halves"),
    ],
)
def test_other_mistakes(kernel, grid, block, error, words):
    x = np.zeros(32, np.int32 if kernel in (plain_histogram, atomic_and_plain) else np.float32)
    args = (x, np.zeros(8, np.int64))[: len(inspect.signature(kernel.py_func).parameters)]
    with pytest.raises(error) as caught:
        run(kernel, grid, block, *args, shared=128)
    assert words in str(caught.value) and "test_simulator_bugs.py:" in str(caught.value)


def test_read_only_memory():
    x = np.zeros(1, np.float32)
    x.flags.writeable = False
    with pytest.raises(KernelError, match=r"read-only array in writes, .* thread 0 writes x\[0\]"):
        run(writes, 1, 1, x)


def test_what_a_student_reads(planted):
    """The whole message."""
    old = "    if tid == 0:\n        rstd_N[n] = rstd  # saved for backward\n"
    module = planted("rmsnorm", old, "    if tid < 2:\n        rstd_N[n] = rstd\n")
    with pytest.raises(RaceError) as caught:
        run_rmsnorm(module)
    line = 2 + next(i for i, text in enumerate(module.lines) if text.endswith(MARK))
    assert str(caught.value) == (
        f"data race in rmsnorm_fwd_naive_kernel, block (0, 0, 0): thread 0 wrote rstd_N[0] at bad_rmsnorm.py:{line}, "
        f"thread 1 wrote it at bad_rmsnorm.py:{line}, with no barrier between them (global memory): "
        f"both write the same value\n"
        f"    bad_rmsnorm.py:{line}    rstd_N[n] = rstd"
    )
