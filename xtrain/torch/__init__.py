"""xtrain's kernels in PyTorch: ops, and one line for a model of transformers.

    import xtrain.torch

    y = xtrain.torch.rmsnorm(x, weight)           CUDA tensors: the kernel. CPU tensors: NumPy
    xtrain.torch.apply(model)                     replaces the modules of a transformers model

Needs the extra `torch`; nothing else of xtrain imports this package.
"""

from .arrays import simulated
from .attention import attention, register_attention
from .decoding import linear_logprobs, sample, token_logprobs
from .losses import cross_entropy, linear_cross_entropy, softmax
from .models import apply, revert
from .ops import embedding, geglu, norm_rope, qk_norm_rope, residual_rmsnorm, rmsnorm, rope, swiglu
from .optimizers import AdamW, Muon
from .register import call, register_op

__all__ = [
    "AdamW",
    "Muon",
    "apply",
    "attention",
    "call",
    "cross_entropy",
    "embedding",
    "geglu",
    "linear_cross_entropy",
    "linear_logprobs",
    "norm_rope",
    "qk_norm_rope",
    "register_attention",
    "register_op",
    "residual_rmsnorm",
    "revert",
    "rmsnorm",
    "rope",
    "sample",
    "simulated",
    "softmax",
    "swiglu",
    "token_logprobs",
]
