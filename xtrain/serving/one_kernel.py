"""The decoding step of a Transformer as one kernel (kernels/step/step_kernel.py): what Engine(one_kernel=True) uses.

The kernel reads the model's matrices, norm weights and biases where the arena has them, so it needs no copy and sees new values.
"""

import numpy as np

from ..errors import UserError
from ..kernels.attention.flash_attention import shared_limit
from ..kernels.decoding.gemv_tensor_cores import MAX_ROWS
from ..kernels.step import step_kernel as kernels
from ..kernels.step.step_kernel import DecodingStep, StepShape, StepWeights
from ..nn.model import Transformer
from .paged_cache import PagedCache


def check_model(model: Transformer, max_batch: int) -> None:
    """Raise UserError if the kernel cannot compute this model's steps, of up to max_batch sequences."""
    why = _obstacle(model, max_batch)
    if why:
        raise UserError(f"one_kernel is not supported for this model ({why}): leave it out")


def _obstacle(model: Transformer, max_batch: int) -> str:
    c = model.config
    if model.device == "cpu":
        return "it is on the CPU"
    if model.variation or model.adapter is not None:
        return model.variation or "it has an adapter"
    if c.no_rope_layers:
        return "it has layers without RoPE"
    if any(c.window(i) for i in range(c.n_layers)):
        return "it has a sliding window"
    if any(p.quantized is not None for _, p in model.storage()):
        return "its weights are quantized"
    half = model.branch_dtype is not None
    why = kernels.obstacle(1, c.dim, c.hidden_dim, c.n_heads * c.head_dim, half)
    largest = _shape(model, min(max_batch, MAX_ROWS), S=0)
    return why or kernels.no_room(largest, shared_limit(model.arena.weights))


def fits(b: int) -> bool:
    """True if one kernel computes a step of b sequences."""
    return b <= MAX_ROWS


def make_step(model: Transformer, cache: PagedCache, b: int, **changes: int) -> DecodingStep:
    """The step for b sequences whose keys and values are in the cache, of a model that check_model has accepted.

    changes: of StepShape.
    """
    shape, M = _shape(model, b, S=cache.S, **changes), -(-cache.capacity // cache.S)
    weights, eps = _weights(model, model._head()), model.config.norm_eps
    return DecodingStep(shape, weights, cache.arrays[0], M, *cache.tables, eps)


def _shape(model, b, **more):
    c, V = model.config, model._head().declared_shape[0]
    return StepShape(
        N=b, C=c.dim, H=c.n_heads, G=c.n_kv_heads, D=c.head_dim, F=c.hidden_dim, V=V, L=c.n_layers,
        half=model.branch_dtype is not None, qk_norm=c.qk_norm, bias=c.qkv_bias, **more,
    )  # fmt: skip


def _weights(model, head) -> StepWeights:
    arena, decoder = model.arena, model.model
    # in bf16, a model that is not trained has float32 memory for what is not a matrix only
    shift = arena.n_decay if arena.half is not None and not arena.trainable else 0
    small = lambda p: 0 if p is None else p.offset - shift
    rows = []
    for layer in decoder.layers:
        a, mlp = layer.self_attn, layer.mlp
        norms = (a.q_norm.weight, a.k_norm.weight) if model.config.qk_norm else (None, None)
        matrices = (a.qkv.weight, a.o_proj.weight, mlp.gate_up.weight, mlp.down_proj.weight)
        rest = (
            layer.input_layernorm.weight,
            layer.post_attention_layernorm.weight,
            *norms,
            a.qkv.bias,
        )
        rows.append([*(p.offset for p in matrices), *map(small, rest)])
    last = [0] * kernels.OFFSETS
    last[kernels.W_QKV], last[kernels.NORM_1] = head.offset, small(decoder.norm.weight)
    return StepWeights(
        embedding=decoder.embed_tokens.weight.data.reshape(-1),
        matrices=arena.weights if arena.half is None else arena.half,
        small=arena.weights,
        offsets=np.array([*rows, last], np.int64),
    )
