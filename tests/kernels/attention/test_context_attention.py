"""context_attention.py: the reference against PyTorch with masks, the kernels against the reference."""

import ml_dtypes
import numpy as np
import pytest
import torch
from checks import GPU, assert_as_good, normal, rng, sentinels, to_host, to_kernel, with_bug
from flash_attention_cases import small_fp32_tiles
from hypothesis import given, settings
from hypothesis import strategies as st

from xtrain.kernels.attention import context_attention as file
from xtrain.kernels.attention.context_attention import context_attention, context_attention_ref
from xtrain.kernels.decoding.kv_cache import append_kv
from xtrain.kernels.decoding.padding import token_positions
from xtrain.simulator import KernelError, sim

__all__ = ["small_fp32_tiles"]
BF16 = ml_dtypes.bfloat16


def int32(values):
    return np.array(values, np.int32)


def case(lengths, history, H, G, D, dtype=np.float32, more=3):
    """-> q, k, v caches, edges, history, rows, longest, scale. The cache is NaN beyond the end of each sequence."""
    A, N = len(lengths), sum(lengths)
    S = max(n + h for n, h in zip(lengths, history)) + more
    rows = int32(rng(7).permutation(A + 1)[:A])
    q, k, v = normal(1, N, H, D), normal(2, A + 1, G, S, D), normal(3, A + 1, G, S, D)
    for x in (k, v):
        unused = np.ones((A + 1, S), bool)
        for a in range(A):
            unused[rows[a], : lengths[a] + history[a]] = False
        x.swapaxes(1, 2)[unused] = np.nan
    edges = int32(np.cumsum([0, *lengths]))
    return (
        *(x.astype(dtype) for x in (q, k, v)),
        edges,
        int32(history),
        rows,
        max(lengths),
        D**-0.5,
    )


def run(args, put):
    return to_host(context_attention(*[put(a) if isinstance(a, np.ndarray) else a for a in args]))


def check(args):
    got, single = run(args, to_kernel), run(args, np.array)
    exact = context_attention_ref(*(x.astype(np.float64) for x in args[:3]), *args[3:6], args[7])
    assert got.dtype == args[0].dtype
    floor = 1e-6 if got.dtype == np.float32 else 4e-3  # p is rounded to bf16 on tensor cores
    assert_as_good(got, exact, single, what="o", floor=floor)
    return got


SHAPES = [  # lengths, history, H, G, D
    ([1], [0], 1, 1, 16),
    ([3, 0, 10], [2, 1, 0], 2, 1, 16),
    ([5], [20], 1, 1, 32),
    ([5], [3], 1, 1, 64),
    ([1], [9], 1, 1, 128),
    ([34], [20], 1, 1, 16),  # several tiles of queries, and of keys before them
]
SHAPES += (
    [([700, 1, 90], [0, 3000, 200], 8, 2, 64), ([300, 65], [100, 0], 4, 4, 128)] if GPU else []
)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernel(shape, dtype):
    check(case(*shape, dtype))


@settings(max_examples=3, deadline=None)
@given(st.data())
def test_any_lengths_heads_and_batch(data):
    A, (H, G) = data.draw(st.integers(1, 2)), data.draw(st.sampled_from([(1, 1), (2, 1), (2, 2)]))
    numbers = lambda low, high: data.draw(st.lists(st.integers(low, high), min_size=A, max_size=A))
    lengths, history = numbers(0, 9), numbers(0, 9)
    dtype = data.draw(st.sampled_from([np.float32, BF16]))
    check(case(lengths, history, H, G, 16, dtype, more=data.draw(st.integers(1, 40))))


def test_against_pytorch():
    lengths, history, H, G, D = [4, 7], [3, 0], 2, 1, 16
    args = case(lengths, history, H, G, D)
    o = run(args, to_kernel)
    q, k, v, edges, _, rows, _, _ = args
    for a, (T, past) in enumerate(zip(lengths, history)):
        mask = torch.arange(past + T)[None] <= torch.arange(T)[:, None] + past
        here = torch.tensor(q[edges[a] : edges[a + 1]]).transpose(0, 1)
        keys, values = (torch.tensor(x[rows[a], :, : past + T]) for x in (k, v))
        want = torch.nn.functional.scaled_dot_product_attention(
            here[None], keys[None], values[None], mask[None, None], enable_gqa=True
        )
        np.testing.assert_allclose(o[edges[a] : edges[a + 1]], want[0].transpose(0, 1), atol=2e-6)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_a_prompt_in_two_parts_is_a_prompt(dtype):
    """The second part continues the cached first one, packed together with another sequence."""
    H, G, D, T, cut = 2, 1, 16, 8, 3
    q, k, v = (normal(i, T, heads, D).astype(dtype) for i, heads in ((1, H), (2, G), (3, G)))
    other = [normal(i, 4, heads, D).astype(dtype) for i, heads in ((4, H), (5, G), (6, G))]

    def prefill(caches, packed, lengths, history):
        edges, history, rows = (
            to_kernel(int32(x)) for x in (np.cumsum([0, *lengths]), history, range(len(lengths)))
        )
        places = token_positions(edges, sum(lengths), history, rows)
        append_kv(*caches, *map(to_kernel, packed[1:]), *places)
        args = (to_kernel(packed[0]), *caches, edges, history, rows, max(lengths), D**-0.5)
        return to_host(context_attention(*args))

    empty = lambda: [to_kernel(np.zeros((2, G, 32, D), dtype)) for _ in range(2)]
    whole, caches = prefill(empty(), (q, k, v), [T], [0]), empty()
    first = prefill(caches, (q[:cut], k[:cut], v[:cut]), [cut], [0])
    both = [np.concatenate([x[cut:], y]) for x, y in zip((q, k, v), other)]
    second = prefill(caches, both, [T - cut, 4], [cut, 0])
    tolerance = 2e-6 if dtype == np.float32 else 2e-2
    joined = np.concatenate([first, second[: T - cut]]).astype(float)
    np.testing.assert_allclose(joined, whole.astype(float), atol=tolerance)
    alone = prefill(empty(), other, [4], [0])
    assert np.array_equal(second[T - cut :], alone)  # a sequence does not depend on the others


@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_nothing_outside_the_output_and_the_same_bits_twice(monkeypatch, dtype):
    args = case([3, 5], [2, 7], 1, 1, 16, dtype)
    with sentinels(monkeypatch):
        first = run(args, to_kernel)
    assert np.array_equal(first, run(args, to_kernel))


def test_large_scores():
    args = case([10], [3], 2, 1, 16)
    check((args[0] * 30, args[1] * 30, *args[2:]))


def test_no_tokens_at_all():
    for put in (np.array, to_kernel):
        assert run(case([0, 0], [3, 0], 2, 1, 16), put).shape == (0, 2, 16)


@pytest.mark.parametrize(
    "old, new",
    [
        ("            cuda.syncthreads()  # all warps have left the previous tile\n", ""),
        ("            cuda.syncthreads()\n            dots", "            dots"),
        ("            cuda.syncwarp()  # a row of p", "            # a row of p"),
        ("if t < T and d < D:", "if d < D:"),
    ],
)
def test_planted_bugs_are_found(old, new):
    scope = with_bug(file.make_fp32_kernel, old, new, dict(vars(file)))
    args = case([20, 40], [2, 3], 1, 1, 16)
    arrays = [sim(a) for a in args[:6]]
    flat = [x.reshape(-1) for x in (sim(args[0]), *arrays[:3])]
    S = args[1].shape[2]
    with pytest.raises(KernelError):
        grid, threads = (2, 2), file.fp32.THREADS
        file.launch(
            scope["make_fp32_kernel"](16),
            grid,
            threads,
            *flat,
            *arrays[3:],
            60,
            3,
            1,
            1,
            S,
            np.float32(0.25),
        )


@pytest.mark.long
@pytest.mark.parametrize(
    "which, values, dtype",
    [
        (4, [1, 10**6, 0], np.float32),
        (4, [1, -1, 0], BF16),
        (4, [1, 2**31 - 2, 0], BF16),
        (5, [2, 9, 0], np.float32),
        (5, [2, -1, 0], BF16),
        (3, [0, 3, 10**6, 15], BF16),
        (3, [0, 3, -9, 15], BF16),
        (3, [0, 3, 2**31 - 1, 15], np.float32),
    ],
)
def test_the_kernel_checks_values_that_only_the_device_knows(which, values, dtype):
    """Invalid history, rows and edges: nothing is read or written out of bounds (the simulator would report it), and the
    sequence's rows become NaN; the first sequence, which is valid, is unchanged."""
    args = case([3, 7, 5], [1, 0, 4], 2, 1, 16, dtype)
    want = run(args, to_kernel)
    o = run((*args[:which], int32(values), *args[which + 1 :]), to_kernel)
    first = 3 if which != 5 else 0  # another row has other keys
    assert np.array_equal(o[:first], want[:first])
    if which != 3:
        assert np.isnan(o[3:10].astype(np.float32)).all()
        assert not np.isnan(o[10:].astype(np.float32)).any() or which == 5


def test_bad_input():
    args = case([3, 2], [1, 0], 4, 2, 16)
    replace = lambda i, x: (*args[:i], x, *args[i + 1 :])
    with pytest.raises(ValueError, match="a sequence of 3 tokens, expected at most 2"):
        context_attention(*replace(6, 2))
    with pytest.raises(ValueError, match="longest is -1"):
        run(replace(6, -1), to_kernel)
    # not as many blocks
    assert np.array_equal(run(replace(6, 2**31), to_kernel), run(args, to_kernel))
    with pytest.raises(
        ValueError, match="history and new tokens do not fit the cache of 7 positions"
    ):
        context_attention(*replace(4, int32([5, 0])))
    with pytest.raises(ValueError, match=r"a row is not in 0 \.\. 2"):
        context_attention(*replace(5, int32([0, 3])))
    with pytest.raises(ValueError, match="5 packed tokens, the edges end at 4"):
        context_attention(*replace(3, int32([0, 3, 4])))
    for edges in ([1, 3, 5], [0, 6, 5]):
        with pytest.raises(ValueError, match="edges must begin at 0 and not decrease"):
            context_attention(*replace(3, int32(edges)))
    with pytest.raises(TypeError, match="q is bfloat16, expected float32"):
        context_attention(*replace(0, args[0].astype(BF16)))
    with pytest.raises(ValueError, match="3 query heads cannot share 2 key heads"):
        context_attention(*replace(0, args[0][:, :3].copy()))
    with pytest.raises(ValueError, match="head dim 24, the GPU kernels for bf16 support"):
        odd = case([3], [0], 2, 1, 24, BF16)
        run(odd, np.array)
        run(odd, to_kernel)
