"""RoPE: tables against transformers, reference against calculus, kernel against reference."""

import ml_dtypes
import numpy as np
import pytest
import torch
from checks import (
    GPU,
    assert_as_good,
    assert_directional,
    normal,
    pairwise,
    rng,
    sentinels,
    to_host,
    to_kernel,
)
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from xtrain.kernels.rope import rope_bwd, rope_frequencies, rope_fwd, rope_ref, rope_tables

BF16 = ml_dtypes.bfloat16
SHAPES = [(1, 1, 2), (3, 2, 8), (5, 3, 6), (2, 9, 64), (3, 1, 256), (2, 3, 74)]  # N, H, D
SHAPES += [(3, 3, 16), (3, 2, 32), (2, 1, 48)]
SHAPES += [(8192, 12, 64), (1000, 7, 128)] if GPU else []
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SCALINGS = [
    None,
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"type": "linear", "factor": 2.5},
    {"rope_type": "dynamic", "factor": 2.0},
    LLAMA3,
]


def case(N, H, D, T=None):
    cos, sin = rope_tables(D, N if T is None else T, 10000.0)
    return normal(1, N, H, D), cos, sin


def hf_config(D, theta, scaling, trained=128):
    parameters = dict(scaling or {"rope_type": "default"}, rope_theta=theta)
    return LlamaConfig(
        hidden_size=4 * D,
        num_attention_heads=4,
        head_dim=D,
        max_position_embeddings=trained,
        rope_parameters=parameters,
    )


# ----------------------------------------------------------------------------- tables
@pairwise(
    {
        "scaling": SCALINGS,
        "D, theta": [(8, 10000.0), (64, 500000.0), (128, 1e6)],
        "seq_len": [None, 100, 128, 300],
    }
)
def test_frequencies_against_transformers(scaling, D, theta, seq_len):
    config = hf_config(D, theta, scaling)
    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        theirs, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        theirs, factor = ROPE_INIT_FUNCTIONS[kind](config, seq_len=seq_len)
    ours = rope_frequencies(D, theta, scaling, seq_len=seq_len, max_seq_len=128)
    assert factor == 1.0 and ours.dtype == np.float64
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=2e-6)  # theirs are float32


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_tables_against_transformers(scaling):
    config = hf_config(32, 10000.0, scaling)
    theirs = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(100)[None])
    for ours, table in zip(rope_tables(32, 100, 10000.0, scaling, max_seq_len=128), theirs):
        assert ours.shape == (100, 16) and ours.dtype == np.float32
        np.testing.assert_allclose(ours, table[0, :, :16].numpy(), atol=2e-5)


def test_llama3_has_all_three_kinds_of_planes():
    plain, scaled = rope_frequencies(64, 10000.0), rope_frequencies(64, 10000.0, LLAMA3)
    ratio = plain / scaled
    assert ratio[0] == 1 and np.isclose(ratio[-1], 8) and ((ratio > 1.01) & (ratio < 7.9)).any()


def test_tables_are_rounded_once():
    cos, sin = rope_tables(2, 100_000, 10000.0)  # one plane, one radian per position
    angles = np.arange(100_000, dtype=np.float64)[:, None]
    assert np.array_equal(cos, np.cos(angles).astype(np.float32))
    assert np.array_equal(sin, np.sin(angles).astype(np.float32))


def test_dynamic_scaling_of_a_single_plane():
    dynamic = {"rope_type": "dynamic", "factor": 2.0}
    assert np.array_equal(rope_frequencies(2, 1e4, dynamic, seq_len=9, max_seq_len=4), [1.0])


# ----------------------------------------------------------------------------- rotation
@pytest.mark.parametrize("shape", [(1, 1, 2), (3, 2, 8), (4, 3, 6)])
def test_reference_against_calculus(shape):
    x, cos, sin = case(*shape)
    x, dy, positions = x.astype(np.float64), normal(2, *shape, dtype=np.float64), np.arange(len(x))
    f = lambda x: float((rope_ref(x, cos, sin, positions) * dy).sum())
    assert_directional(f, (x,), (rope_bwd(dy, cos, sin),))


@pairwise(
    {
        "shape": SHAPES,
        "launcher, sign": [(rope_fwd, 1), (rope_bwd, -1)],
        "dtype": [np.float32, BF16],
    }
)
def test_kernel(shape, launcher, sign, dtype):
    x, cos, sin = case(*shape)
    x = x.astype(dtype)
    got = launcher(*map(to_kernel, (x, cos, sin)))
    assert to_host(got).dtype == dtype
    p = np.arange(len(x))
    exact = rope_ref(x.astype(np.float64), cos, sin, p, sign)
    assert_as_good(got, exact, rope_ref(x.astype(np.float32), cos, sin, p, sign).astype(dtype))


@pytest.mark.parametrize("D", [8, 32])
def test_positions_restart_in_every_sequence(D):
    x, cos, sin = case(6, 2, D, T=5)
    for to in (np.array, to_kernel):
        y = to_host(rope_fwd(to(x), to(cos), to(sin), T=3))
        assert np.array_equal(y[:3], to_host(rope_fwd(to(x[:3]), to(cos), to(sin))))
        assert np.array_equal(y[3:], to_host(rope_fwd(to(x[3:]), to(cos), to(sin))))


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint16])
@pytest.mark.parametrize("D", [8, 32])
def test_given_positions(D, dtype):
    x, cos, sin = case(6, 2, D, T=20)
    positions = np.array([19, 0, 3, 3, 7, 1], dtype)
    expected = rope_ref(x, cos, sin, positions)
    for to in (np.array, to_kernel):
        y = rope_fwd(to(x), to(cos), to(sin), to(positions))
        np.testing.assert_allclose(to_host(y), expected, atol=1e-6)
        back = rope_bwd(y, to(cos), to(sin), to(positions))
        np.testing.assert_allclose(to_host(back), x, atol=1e-6)  # forward, then back


@pytest.mark.parametrize("D", [8, 10, 32])
def test_positions_outside_the_tables_on_a_gpu(D):
    """The host cannot check them without synchronizing. The kernel does, reads nothing outside the tables, and gives NaN."""
    x, cos, sin = case(6, 2, D, T=20)
    positions = np.array([19, 20, 3, -1, 2**40, -(2**62)])
    inside = np.array([True, False, True, False, False, False])
    right = np.where(inside, positions, 0)
    for turn in (rope_fwd, rope_bwd):
        y, want = (to_host(turn(*map(to_kernel, (x, cos, sin, p)))) for p in (positions, right))
        assert np.array_equal(y[inside], want[inside])
        assert np.isnan(y[~inside]).all()


def test_only_the_distance_matters():
    cos, sin = rope_tables(16, 50, 10000.0)
    q, k = normal(1, 1, 1, 16, dtype=np.float64), normal(2, 1, 1, 16, dtype=np.float64)
    at = lambda x, p: rope_fwd(x, cos, sin, np.array([p]))
    assert np.isclose((at(q, 9) * at(k, 2)).sum(), (at(q, 47) * at(k, 40)).sum(), atol=1e-6)


def test_against_pytorch():
    B, T, H, D = 2, 7, 3, 16
    x, dy = normal(1, B * T, H, D), normal(2, B * T, H, D)
    cos, sin = rope_tables(D, T, 10000.0)
    tx = torch.tensor(x.reshape(B, T, H, D), requires_grad=True)
    tables = LlamaRotaryEmbedding(hf_config(D, 10000.0, None))(tx, torch.arange(T)[None])
    ty, _ = apply_rotary_pos_emb(tx, tx, *tables, unsqueeze_dim=2)
    ty.backward(torch.tensor(dy.reshape(ty.shape)))
    y, dx = rope_fwd(x, cos, sin, T=T), rope_bwd(dy, cos, sin, T=T)
    for ours, theirs in ((y, ty), (dx, tx.grad)):
        np.testing.assert_allclose(ours.reshape(ty.shape), theirs.detach().numpy(), atol=2e-6)


@pytest.mark.parametrize("D", [34, 32])
def test_nothing_outside_the_output_and_the_same_bits_twice(monkeypatch, D):
    x, cos, sin = map(to_kernel, case(5, 3, D))
    with sentinels(monkeypatch):
        y = rope_fwd(x, cos, sin)
    assert np.array_equal(to_host(y), to_host(rope_fwd(x, cos, sin)))


@pytest.mark.parametrize("shape", [(0, 3, 8), (4, 0, 8), (0, 3, 16), (4, 0, 16)])
def test_empty(shape):
    cos, sin = rope_tables(shape[2], 4, 10000.0)
    x = np.zeros(shape, np.float32)
    assert rope_fwd(x, cos, sin).shape == shape
    assert rope_fwd(*map(to_kernel, (x, cos, sin))).shape == shape


def test_bad_input():
    x, cos, sin = case(6, 2, 8)
    with pytest.raises(ValueError, match=r"cos has shape \(6, 4\), expected \(any, 3\)"):
        rope_fwd(x[..., :6].copy(), cos, sin)
    with pytest.raises(ValueError, match="head width 7 is odd"):
        rope_fwd(x[..., :7].copy(), cos, sin)
    with pytest.raises(ValueError, match="T = 6 positions, the tables hold 5"):
        rope_fwd(x, cos[:5], sin[:5])
    with pytest.raises(ValueError, match="positions 0 to 6, the tables hold 0 to 5"):
        rope_fwd(x, cos, sin, np.array([0, 1, 2, 3, 4, 6]))
    with pytest.raises(ValueError, match="positions must be integers"):
        rope_fwd(x, cos, sin, np.zeros(6, np.float32))
    with pytest.raises(ValueError, match=r"positions \(5,\), expected \(6,\)"):
        rope_fwd(x, cos, sin, np.zeros(5, np.int64))
    with pytest.raises(TypeError, match="x is float16"):
        rope_fwd(x.astype(np.float16), cos, sin)
    with pytest.raises(ValueError, match="scaling type 'longrope' is not supported"):
        rope_tables(8, 4, 10000.0, {"rope_type": "longrope", "factor": 2.0})
    with pytest.raises(ValueError, match="head_dim 7 is odd"):
        rope_tables(7, 4, 10000.0)


def test_random_positions_match_a_plain_loop():
    x, cos, sin = case(4, 2, 6, T=30)
    positions = rng(5).integers(0, 30, 4)
    y = rope_fwd(x, cos, sin, positions)
    for n, h, r in np.ndindex(4, 2, 3):
        c, s, (x1, x2) = cos[positions[n], r], sin[positions[n], r], x[n, h, [r, r + 3]]
        np.testing.assert_allclose(
            y[n, h, [r, r + 3]], [x1 * c - x2 * s, x2 * c + x1 * s], rtol=1e-6
        )
