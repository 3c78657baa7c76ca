"""What the tests of FlashAttention share: inputs, all results at once, the float64 results and PyTorch's.

In the simulator the kernels get small tiles, so a few dozen tokens make several tiles; on a GPU they get the tuned ones.
"""

import contextlib

import ml_dtypes
import numpy as np
import pytest
import torch
from checks import GPU, normal

from xtrain.kernels.attention import context_attention
from xtrain.kernels.attention import flash_attention as fa
from xtrain.kernels.attention import flash_attention_fp32 as fp32
from xtrain.kernels.attention.flash_attention import flash_attention_bwd, flash_attention_fwd
from xtrain.kernels.attention.flash_attention_table import Tiles

BF16 = ml_dtypes.bfloat16
TILES = {  # two warps, since the heads are narrow, and three tiles for 70 tokens
    "fwd": Tiles(BM=32, BN=32, warps=2, blocks=1, q_in_registers=True),
    "dq": Tiles(BM=32, BN=16, warps=2, blocks=1),
    "dkdv": Tiles(BM=32, BN=32, warps=2, blocks=1),
}
WIDE_TILES = {
    "fwd": Tiles(BM=64, BN=16, warps=4, blocks=1),
    "dq": Tiles(BM=64, BN=16, warps=4, blocks=1),
    "dkdv": Tiles(BM=32, BN=64, warps=4, blocks=1),
}


def _clear_fp32_kernels():
    for x in (*vars(fp32).values(), *vars(context_attention).values()):
        if hasattr(x, "cache_clear"):
            x.cache_clear()


def choose_small(kind, D, *rest):
    """Tiles of the mma.sync kernels for the simulator."""
    if D > 128:
        return fa.small_tiles(kind, D)
    return (WIDE_TILES if D == 128 else TILES)[kind]


@contextlib.contextmanager
def rows_of_16():
    """Tiles of 16 rows in float32: a quarter of the work. test_flash_attention_fp32.py tests tiles of 32."""
    if GPU:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        _clear_fp32_kernels()
        patch.setattr(fp32, "tile_rows", lambda D: 16)
        yield
    _clear_fp32_kernels()


@contextlib.contextmanager
def small_tiles():
    """For a whole model in the simulator: small tiles in float32 and in bf16."""
    with rows_of_16(), pytest.MonkeyPatch.context() as patch:
        for module in () if GPU else (fa, context_attention):
            patch.setattr(module, "choose", choose_small)
        yield


@pytest.fixture(autouse=True)
def small_fp32_tiles():
    with rows_of_16():
        yield


@pytest.fixture(autouse=True)
def small_bf16_tiles(monkeypatch):
    """For the mma.sync kernels; test_flash_attention_hopper.py tests those with wgmma."""
    monkeypatch.setattr(fa, "HOPPER", False)
    if not GPU:
        monkeypatch.setattr(fa, "choose", choose_small)


def case(B, T, S, H, G, D, dtype=np.float64):
    """-> random q, k, v, do"""
    shapes = (B, T, H, D), (B, S, G, D), (B, S, G, D), (B, T, H, D)
    return [normal(i, *shape, dtype=dtype) for i, shape in enumerate(shapes)]


def everything(q, k, v, do, scale, causal):
    """-> o, lse, dq, dk, dv"""
    o, lse = flash_attention_fwd(q, k, v, scale, causal)
    return o, lse, *flash_attention_bwd(do, q, k, v, o, lse, scale, causal)


def exact(arrays, scale, causal):
    """-> o, lse, dq, dk, dv of the references in float64"""
    return everything(*(x.astype(np.float64) for x in arrays), scale, causal)


def torch_sdpa(q, k, v, do, scale, causal):
    """-> o, dq, dk, dv in bf16 by PyTorch for the same rounded inputs; on a GPU with its flash kernel"""
    to = lambda x: torch.from_numpy(np.ascontiguousarray(x).view(np.uint16)).view(torch.bfloat16)
    q, k, v, do = (to(x).to("cuda" if GPU else "cpu").transpose(1, 2) for x in (q, k, v, do))
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    T, S = q.shape[2], k.shape[2]
    past = causal and S > T
    mask = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T) if past else None
    o = torch.nn.functional.scaled_dot_product_attention(
        q,
        k,
        v,
        mask,
        is_causal=causal and not past,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    o.backward(do)
    results = (o, q.grad, k.grad, v.grad)
    return [x.detach().transpose(1, 2).float().cpu().numpy() for x in results]
