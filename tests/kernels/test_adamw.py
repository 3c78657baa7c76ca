"""AdamW: against PyTorch over many steps; the kernel bit for bit against its reference."""

import ml_dtypes
import numpy as np
import pytest
import torch
from checks import GPU, normal, same_bytes, to_host, to_kernel

from xtrain.kernels import adamw as module
from xtrain.kernels.adamw import adamw, adamw_hyper, adamw_ref

BF16 = ml_dtypes.bfloat16

LARGE = module.TILE + 3
TILE = module.TILE if GPU else 32 * module.CHUNK  # of the small blocks
SIZES = [0, 1, 5, TILE + 3, LARGE] + ([5_000_003] if GPU else [])
BETAS, EPS, DECAY = (0.9, 0.95), 1e-8, 0.1
NAMES = ("w", "g", "m", "v")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of 32 threads in the simulator: every thread computes 8 elements, whether they exist or not."""
    if not GPU:
        small = dict(BLOCK=32, GAP=32 * module.QUAD, TILE=TILE)
        for name, value in small.items():
            monkeypatch.setattr(module, name, value)
        module.make_adamw_kernel.cache_clear()
    yield monkeypatch
    module.make_adamw_kernel.cache_clear()


def case(n, scale=1.0):
    """w, g, m, v as after some steps; a few gradients and moments are zero, tiny or huge."""
    w, g, m = normal(1, n), normal(2, n, scale=scale), normal(3, n, scale=scale)
    v = normal(4, n, scale=scale) ** 2
    for x, values in ((g, (0, 1e-30, -1e15)), (m, (0, -1e-30, 1e15)), (v, (0, 1e-41, 1e30))):
        x[3:6] = np.array(values, np.float32)[: x[3:6].size]
    return w, g, m, v


def ones(*values):
    return np.array(values, np.float32)


@pytest.mark.parametrize(
    "n, factor",
    [(n, factor) for n in SIZES for factor in (1.0, 0.37) if (n, factor) != (LARGE, 1.0)],
)
def test_kernel_equals_the_reference_bit_for_bit(small_blocks, n, factor):
    if n == LARGE:
        small_blocks.undo()  # a block as on a GPU
        module.make_adamw_kernel.cache_clear()
    arrays = case(n)
    on_kernel = [to_kernel(a) for a in arrays]
    g_before = to_host(on_kernel[1]).copy()
    for step in (1, 2, 1000) if n != LARGE else (2,):
        hyper, n_decay = adamw_hyper(3e-4 * step, *BETAS, step), n // 2
        constants = (n_decay, *BETAS, EPS, DECAY)
        adamw_ref(*arrays, ones(factor), hyper, *constants)
        adamw(*on_kernel, to_kernel(ones(factor)), to_kernel(hyper), *constants)
        for name, k, r in zip(NAMES, on_kernel, arrays):
            wrong = np.flatnonzero(to_host(k).view(np.uint32) != r.view(np.uint32))
            assert not wrong.size, (name, step, wrong[:5], to_host(k)[wrong[:5]], r[wrong[:5]])
    assert np.array_equal(to_host(on_kernel[1]), g_before)


@pytest.mark.parametrize("zero_grad", [False, True])
@pytest.mark.parametrize("with_copy", [False, True])
def test_the_copy_in_bf16_and_the_zeroed_gradient(with_copy, zero_grad):
    """The same pass writes both, and nothing else changes."""
    n = TILE + 5
    rest = (adamw_hyper(1e-3, *BETAS, 7), n // 3, *BETAS, EPS, DECAY)
    want = case(n)
    adamw_ref(*want, ones(0.5), *rest)
    for place in (to_kernel, np.array):
        arrays = [place(a) for a in case(n)]
        half = place(np.full(n, 7, BF16))
        more = (half if with_copy else None, zero_grad)
        adamw(*arrays, place(ones(0.5)), place(rest[0]), *rest[1:], *more)
        for name, k, r in zip(NAMES, arrays, want):
            r = np.zeros_like(r) if name == "g" and zero_grad else r
            assert same_bytes(to_host(k), r), name
        copy = want[0].astype(BF16) if with_copy else np.full(n, 7, BF16)
        assert same_bytes(to_host(half), copy)


@pytest.mark.parametrize("first", [1, 4, 8])
def test_a_slice_at_any_address(first):
    """As on a rank that owns a slice of the arena: the same bits, and nothing outside the slice is written."""
    n, part = 40, slice(first, first + 27)
    rest = (adamw_hyper(1e-3, *BETAS, 7), 11, *BETAS, EPS, DECAY)
    want, half = [*case(n), np.ones(n, BF16)], to_kernel(np.ones(n, BF16))
    on_kernel = [to_kernel(a) for a in want[:4]]
    adamw_ref(*(a[part] for a in want[:4]), ones(0.5), *rest, want[4][part], True)
    slices = [a[part] for a in on_kernel]
    adamw(*slices, to_kernel(ones(0.5)), to_kernel(rest[0]), *rest[1:], half[part], True)
    for name, k, r in zip((*NAMES, "half"), (*on_kernel, half), want):
        assert same_bytes(to_host(k), r), name


def test_the_launcher_on_the_host_is_the_reference():
    whole, launched = case(9), case(9)
    rest = (ones(0.5), adamw_hyper(1e-3, *BETAS, 3), 4, *BETAS, EPS, DECAY)
    adamw_ref(*whole, *rest)
    adamw(*launched, *rest)
    assert all(np.array_equal(a, b) for a, b in zip(whole, launched))


@pytest.mark.long
@pytest.mark.parametrize("dtype, tol", [(np.float32, 1e-6), (np.float64, 1e-13)])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95), (0.5, 0.5)])
def test_twenty_steps_against_pytorch(dtype, tol, betas):
    n, n_decay, lr = 250, 150, 1e-2
    w = normal(1, n).astype(dtype)
    tw = torch.tensor(w, requires_grad=True)
    decayed, plain = (
        torch.nn.Parameter(t.clone()) for t in tw.detach().split([n_decay, n - n_decay])
    )
    groups = [{"params": [decayed], "weight_decay": DECAY}, {"params": [plain], "weight_decay": 0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=betas, eps=EPS)
    place = to_kernel if dtype == np.float32 else np.array  # the kernels support float32 only
    w, m, v = (place(a) for a in (w, np.zeros_like(w), np.zeros_like(w)))
    one = place(np.ones(1, dtype))
    for step in range(1, 21):
        g = normal(step, n).astype(dtype)
        decayed.grad, plain.grad = torch.tensor(g).split([n_decay, n - n_decay])
        for group in optimizer.param_groups:
            group["lr"] = lr / step
        optimizer.step()
        hyper = place(adamw_hyper(lr / step, *betas, step, dtype))
        adamw(w, place(g), m, v, one, hyper, n_decay, *betas, EPS, DECAY)
    want = torch.cat([decayed, plain]).detach().numpy()
    np.testing.assert_allclose(to_host(w), want, rtol=tol, atol=tol)


def test_what_is_not_decayed_and_what_is_outside_stays():
    pad = 8
    whole = [to_kernel(normal(i, 40 + 2 * pad)) ** 2 for i in range(4)]
    before = [to_host(a).copy() for a in whole]
    w, g, m, v = (a[pad:-pad] for a in whole)
    hyper = to_kernel(adamw_hyper(0.5, *BETAS, 1))
    g[...] = 0
    m[...] = 0
    adamw(w, g, m, v, to_kernel(ones(1)), hyper, 16, *BETAS, EPS, DECAY)
    for a, b in zip(whole, before):
        assert np.array_equal(to_host(a)[:pad], b[:pad])
        assert np.array_equal(to_host(a)[-pad:], b[-pad:])
    old, new = before[0][pad:-pad], to_host(w)  # no gradient: only the decay is left
    np.testing.assert_allclose(new[:16], old[:16] * 0.95, rtol=1e-6)
    assert np.array_equal(new[16:], old[16:])


def test_bad_input():
    n = 6
    good = [*case(n), ones(1), adamw_hyper(1e-3, *BETAS, 1), n, *BETAS, EPS, DECAY]

    def with_(i, value):
        return [*good[:i], value, *good[i + 1 :]]

    with pytest.raises(ValueError, match=r"g has shape \(5,\), expected \(6\)"):
        adamw(*with_(1, np.ones(5, np.float32)))
    with pytest.raises(TypeError, match="v is int32"):
        adamw(*with_(3, np.ones(n, np.int32)))
    with pytest.raises(ValueError, match=r"hyper has shape \(2,\), expected \(3\)"):
        adamw(*with_(5, ones(1, 1)))
    for n_decay in (-1, n + 1):
        with pytest.raises(ValueError, match="n_decay is"):
            adamw(*with_(6, n_decay))
    with pytest.raises(ValueError, match="first step is 1"):
        adamw_hyper(1e-3, *BETAS, 0)
    with pytest.raises(TypeError, match="copy is float32, expected bfloat16"):
        adamw(*good, copy_n=np.ones(n, np.float32))
    with pytest.raises(ValueError, match=r"copy has shape \(5,\), expected \(6\)"):
        adamw(*good, copy_n=np.ones(5, BF16))
    with pytest.raises(TypeError, match="on one device"):
        adamw(*with_(0, to_kernel(good[0])))
