"""decode_attention.py: the reference against PyTorch and against the attention of a whole prompt, the kernels against it."""

import ml_dtypes
import numpy as np
import pytest
import torch
from checks import GPU, assert_as_good, normal, rng, sentinels, to_host, to_kernel, with_bug
from hypothesis import given, settings
from hypothesis import strategies as st

from xtrain import simulator
from xtrain.kernels.attention import decode_attention as file
from xtrain.kernels.attention import decode_attention_loops, decode_attention_parts
from xtrain.kernels.attention.decode_attention import (
    decode_attention,
    decode_attention_ref,
    make_decode_kernel,
)
from xtrain.kernels.attention.flash_attention import flash_attention_ref
from xtrain.kernels.primitives.ptx import kernel
from xtrain.kernels.qk_norm_rope import qk_norm_rope_ref, values_of
from xtrain.kernels.rope import rope_tables
from xtrain.simulator import KernelError, sim

BF16 = ml_dtypes.bfloat16
EPS = 1e-6


def int32(values):
    return np.array(values, np.int32)


def case(lengths, H, G, D, S, dtype=np.float32, norm=False, rows=None, scaling=None):
    """-> qkv, k, v caches, then the other arguments"""
    B = len(lengths)
    rows = int32(rng(9).permutation(B) if rows is None else rows)
    R = B + 1
    qkv, k, v = normal(1, B, (H + 2 * G) * D), normal(2, R, G, S, D), normal(3, R, G, S, D)
    tables = rope_tables(D, S, 1e4, scaling, max_seq_len=S)
    weights = (normal(4, D), normal(5, D)) if norm else (None, None)
    arrays = [x.astype(dtype) for x in (qkv, k, v)]
    return (*arrays, int32(lengths), rows, *tables, *weights, EPS, D**-0.5)


def run(args, put, **more):
    """-> o, k, v after the launch"""
    given_ = [put(a) if isinstance(a, np.ndarray) else a for a in args]
    o = decode_attention(*given_, **more)
    return tuple(to_host(a) for a in (o, *given_[1:3]))


def widened(args, dtype):
    return [a.astype(dtype) if getattr(a, "dtype", None) in (BF16, np.float32) else a for a in args]


def check(args):
    kernel_, single, exact = run(args, to_kernel), run(args, np.array), widened(args, np.float64)
    o64 = decode_attention_ref(*exact)
    for what, got, one, want in zip("okv", kernel_, single, (o64, *exact[1:3])):
        assert got.dtype == args[0].dtype
        # exp2 is off by two units; q, p are rounded to bf16
        floor = 2e-6 if got.dtype == np.float32 else 4e-3
        assert_as_good(got, want, one, what=what, floor=floor)
    return kernel_


SHAPES = [  # lengths, H, G, D, S
    ([3], 2, 1, 16, 8),
    ([0, 20], 4, 2, 16, 40),
    ([31, 7], 2, 2, 32, 33),
    ([33], 8, 1, 64, 40),
    ([20], 2, 1, 128, 24),
    ([20], 9, 1, 16, 24),  # more than 8 query heads share a key head
    ([17], 18, 1, 16, 24),  # more than 16
]
SHAPES += [([4000, 129, 7000], 32, 4, 64, 8192), ([5000, 1], 16, 8, 128, 5001)] if GPU else []


@pytest.mark.long
@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernel(shape, dtype):
    check(case(*shape, dtype, norm=len(shape[0]) > 1))


@pytest.fixture
def short_splits(monkeypatch):
    """Splits of 16 keys instead of 256, so that short rows have several."""
    monkeypatch.setattr(decode_attention_parts, "CHUNK", 16)
    monkeypatch.setattr(decode_attention_parts, "FEW_CHUNK", 16)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("shape", [([50, 15], 2, 1, 16, 64), ([36], 9, 1, 16, 48)], ids=str)
def test_split_keys_equal_unsplit(short_splits, monkeypatch, shape, dtype):
    args = case(*shape, dtype, True)
    o, k, v = check(args)
    monkeypatch.setattr(decode_attention_parts, "CHUNK", 256)
    monkeypatch.setattr(decode_attention_parts, "FEW_CHUNK", 256)
    o1, k1, v1 = run(args, to_kernel)
    assert np.array_equal(k, k1) and np.array_equal(v, v1)
    tolerance = 2e-6 if dtype == np.float32 else 2e-2
    np.testing.assert_allclose(o.astype(float), o1.astype(float), atol=tolerance)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_a_row_does_not_depend_on_the_others(short_splits, dtype):
    """Alone, in a batch, in another place and with a larger cache: the same bits."""
    args = case([20, 3], 2, 1, 16, 24, dtype, True)
    together = run(args, to_kernel)[0]
    for b in range(2):
        alone = run(
            (args[0][b : b + 1].copy(), *args[1:3], args[3][[b]], args[4][[b]], *args[5:]),
            to_kernel,
            cache_ready=b == 0,
        )
        assert np.array_equal(alone[0][0], together[b])
    turned = run(
        (args[0][::-1].copy(), *args[1:3], args[3][::-1].copy(), args[4][::-1].copy(), *args[5:]),
        to_kernel,
    )
    assert np.array_equal(turned[0], together[::-1])
    wider = [np.concatenate([x, x], 2) for x in args[1:3]]
    tables = rope_tables(16, 48, 1e4)
    assert np.array_equal(
        run((args[0], *wider, *args[3:5], *tables, *args[7:]), to_kernel)[0], together
    )


@pytest.mark.long
def test_batch_invariant_where_few_and_many_differ(short_splits, monkeypatch):
    monkeypatch.setattr(file, "FEW_HEADS", 1)
    args = case([40, 3], 2, 1, 16, 48, BF16, True)
    assert file.choose(16, 8, 1) != file.choose(16, 8, 2)
    together = run(args, to_kernel, batch_invariant=True)[0]
    for b in range(2):
        alone = (args[0][b : b + 1].copy(), *args[1:3], args[3][[b]], args[4][[b]], *args[5:])
        assert np.array_equal(run(alone, to_kernel)[0][0], together[b])


@pytest.mark.long
@settings(max_examples=6, deadline=None)
@given(st.data())
def test_any_lengths_heads_and_batch(data):
    G, group = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 4))
    S = data.draw(st.integers(1, 40))
    lengths = data.draw(st.lists(st.integers(-1, S), min_size=1, max_size=3))
    dtype = data.draw(st.sampled_from([np.float32, BF16]))
    check(case(lengths, G * group, G, 16, S, dtype, data.draw(st.booleans())))


@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_idle_rows(dtype):
    """No row, no length, a full cache: zeros come out, and nothing is appended."""
    args = case([5, -1, 8, 3], 4, 2, 16, 8, dtype, rows=[-1, 0, 1, 2])
    for put in (to_kernel, np.array):
        o, k, v = run(args, put)
        assert not o[:3].any() and o[3].all()
        changed = [(x != y).any(axis=(1, 3)) for x, y in ((k, args[1]), (v, args[2]))]
        for where in changed:
            assert np.argwhere(where).tolist() == [[2, 3]]


@pytest.mark.long
@pytest.mark.parametrize("norm, scaling", [(False, None), (True, dict(type="linear", factor=2.0))])
def test_step_by_step_is_the_whole_prompt_at_once(norm, scaling):
    H, G, D, T = 2, 1, 16, 9
    qkv, _, _, _, _, cos, sin, q_w, k_w, eps, scale = case(
        [0] * T, H, G, D, T, norm=norm, scaling=scaling
    )
    q, k, _ = qk_norm_rope_ref(qkv, q_w, k_w, cos, sin, H, G, np.arange(T), eps)
    v = values_of(qkv, H, G, 2 * cos.shape[1])
    want, _ = flash_attention_ref(q[None], k[None], v[None], scale)
    for put in (np.array, to_kernel):
        caches = [put(np.zeros((1, G, T, D), np.float32)) for _ in range(2)]
        others = [None if x is None else put(x) for x in (cos, sin, q_w, k_w)]
        for t in range(T):
            o = decode_attention(
                put(qkv[t : t + 1]), *caches, put(int32([t])), put(int32([0])), *others, eps, scale
            )
            np.testing.assert_allclose(to_host(o)[0], want[0, t].reshape(-1), atol=1e-5)


def test_against_pytorch():
    H, G, D, S, lengths = 4, 2, 32, 16, [15, 4]
    args = case(lengths, H, G, D, S)
    o, k, v = run(args, to_kernel)
    q = qk_norm_rope_ref(args[0], None, None, *args[5:7], H, G, args[3], EPS)[0]
    mask = torch.arange(S)[None] <= torch.tensor(lengths)[:, None]
    rows = [torch.tensor(x[args[4]]) for x in (k, v)]
    want = torch.nn.functional.scaled_dot_product_attention(
        torch.tensor(q)[:, :, None], *rows, mask[:, None, None], enable_gqa=True
    )
    np.testing.assert_allclose(o, want.reshape(2, -1).numpy(), atol=2e-6)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_nothing_outside_the_output_and_the_same_bits_twice(short_splits, monkeypatch, dtype):
    args = case([20, 2], 2, 1, 16, 24, dtype, True)
    with sentinels(monkeypatch):
        first = run(args, to_kernel)
    for a, b in zip(first, run(args, to_kernel)):
        assert np.array_equal(a, b)


def test_large_scores(short_splits):
    args = case([20], 2, 1, 16, 24)
    check((args[0] * 30, args[1] * 30, *args[2:]))


# ----------------------------------------------------------------------------- planted bugs
def planted(monkeypatch, old, new):
    """Replace decode_attention_parts by a copy with one line changed, for the kernel factory."""
    name = decode_attention_parts.__name__
    scope = with_bug(
        decode_attention_parts, old, new, dict(__name__=name, __package__=name.rpartition(".")[0])
    )
    scope["CHUNK"] = scope["FEW_CHUNK"] = 16
    for key in ("CHUNK", "FEW_CHUNK", "make_new_heads", "make_merge"):
        monkeypatch.setattr(decode_attention_parts, key, scope[key])
    monkeypatch.setattr(file, "arrive_last", scope["arrive_last"])
    make_decode_kernel.cache_clear()


BUGS = [
    (
        "atomic_add_in_order(counters, i, int32(1))",
        "cuda.atomic.add(counters, i, 1)",
        "race between blocks",
    ),
    ("    cuda.syncthreads()  # the block's writes come before thread 0's addition\n", "", "race"),
    (
        "weigh(weight_s, l_s, m_partial, l_partial, first, used)\n        cuda.syncthreads()\n",
        "weigh(weight_s, l_s, m_partial, l_partial, first, used)\n",
        "race",
    ),
    (
        "            cuda.syncthreads()\n            if share == 0:\n",
        "            if share == 0:\n",
        "race",
    ),
    (
        "        if owner and warp == WARPS - 1:",
        "        if owner and warp >= WARPS - 2:",
        "race",
    ),
    ("== used - 1)", "== used)", None),
]


@pytest.mark.long
@pytest.mark.parametrize("old, new, message", BUGS)
def test_planted_bugs_are_found(monkeypatch, old, new, message):
    args = [sim(a) if isinstance(a, np.ndarray) else a for a in case([40], 4, 1, 16, 48)]
    planted(monkeypatch, old, new)
    if message is None:  # no block is the last one: o is never written
        assert np.isnan(np.asarray(decode_attention(*args))).any()
    else:
        with pytest.raises(KernelError, match=message):
            decode_attention(*args)
    make_decode_kernel.cache_clear()


def test_keys_that_are_used_before_they_are_written():
    """A planted bug: the barrier between append and loop is missing."""
    attend = decode_attention_loops.make_attend_plain(16, 8, 4)[1]
    new_heads = decode_attention_parts.make_new_heads(16, 2, 8, 4, False)
    cuda, float32 = file.cuda, file.float32

    @kernel(128)
    def broken(out, k, v, qkv, cos, sin):
        q_s, acc_s = cuda.shared.array(128, float32), cuda.shared.array(512, float32)
        m_s, l_s = cuda.shared.array(32, float32), cuda.shared.array(32, float32)
        new_heads(q_s, k, v, qkv, 0, 32, 48, 0, True, 0, cos, cos, cos, sin, 0, float32(0.0))
        attend(acc_s, m_s, l_s, q_s, k, v, 0, k, v, 0, 0, 1, float32(1.0))
        out[cuda.threadIdx.x] = acc_s[cuda.threadIdx.x]

    cos, sin = rope_tables(16, 1, 1e4)
    arrays = [
        sim(a.reshape(-1))
        for a in (normal(1, 128), normal(2, 16), normal(3, 16), normal(4, 64), cos, sin)
    ]
    with pytest.raises(KernelError, match=r"in attend .called by broken"):
        simulator.run(broken, 1, 128, *arrays)


def test_bad_input():
    args = case([3], 4, 2, 16, 8)
    replace = lambda i, x: (*args[:i], x, *args[i + 1 :])
    with pytest.raises(ValueError, match="qkv of 72 columns"):
        decode_attention(*replace(0, args[0][:, :72].copy()))
    with pytest.raises(TypeError, match="qkv is bfloat16, expected float32"):
        decode_attention(*replace(0, args[0].astype(BF16)))
    with pytest.raises(TypeError, match="lengths is int64, expected int32"):
        decode_attention(*replace(3, args[3].astype(np.int64)))
    with pytest.raises(ValueError, match="tables of 4 positions, the cache has 8"):
        decode_attention(*args[:5], args[5][:4], args[6][:4], *args[7:])
    with pytest.raises(ValueError, match="both norm weights or none"):
        decode_attention(*replace(7, normal(1, 16)))
    with pytest.raises(ValueError, match="row 7, the cache has 2"):
        decode_attention(*replace(4, int32([7])))
    odd = case([3], 2, 1, 24, 8)
    decode_attention(*odd)  # any even width on the CPU
    with pytest.raises(ValueError, match="head dim 24, the GPU kernels support"):
        decode_attention(*[to_kernel(a) if isinstance(a, np.ndarray) else a for a in odd])


@pytest.mark.long
@pytest.mark.parametrize(
    "shape, warps", [(([20, 3], 4, 2, 16, 32), 4), (([34], 8, 1, 64, 40), 12)], ids=str
)
def test_loading_ahead_does_not_change_the_result(short_splits, monkeypatch, warps, shape):
    args, o = case(*shape, BF16), []
    for ahead in (False, True):
        monkeypatch.setattr(
            file, "choose", lambda *_, ahead=ahead: file.Config(warps, ahead, keys=16)
        )
        o.append(check(args)[0])
        o.append(run(args, to_kernel, cache_ready=True)[0])
    assert all(np.array_equal(x, o[0]) for x in o)
