"""Quantize a model for serving: matrices of Linear and of experts become codes of one byte or of four
bits.

    quantize_weights(model, "int8")      or fp8, int4, nf4; the same as Engine(model, weights="int8")

kernels/quantize.py and kernels/four_bits.py explain the codes. A quantized matrix is another storage
of the same Parameter: the forward does not change, and where it multiplies by the parameter, the
product takes the codes.
Everything else stays as it is:

    embedding    rows are looked up, not multiplied, and few bytes of it are read
    head         the same matrix in a model with tied embeddings. Elsewhere it is 6 % of a 1.1 B
                 model's bytes, and its error goes to the logits directly. Errors of standard
                 deviation e raise the cross-entropy by about e^2 / 2: with logits of size 3, fp8's
                 2.6 % would cost 0.3 % of perplexity by the head alone. Next to weights of four
                 bits it is a quarter of an 8 B model's bytes, and becomes int8, whose 0.9 % cost
                 0.04 %
    router       few numbers, which decide the experts
    norms, bias  few numbers
    LoRA         adapters add to the product of the quantized matrix, in the model's precision

The codes of all matrices are in memory before the matrices themselves are freed: at most 1.5 times
the model in bf16. quantize_onto starts from a model on the CPU, and never has more than one whole
matrix on the GPU.

A quantized model is not trained, but adapters of it are (nn/lora.py), as in QLoRA: forward and
backward multiply by a dequantized copy that is freed after the product.
"""

from dataclasses import replace

import numpy as np

from ..device import to_device
from ..errors import UserError
from ..kernels.cast import BFLOAT16
from ..kernels.four_bits import FOUR_BITS
from ..kernels.quantize import KINDS, check_finite, quantize
from .arena import Arena, arena_of
from .expert_lora import LoraExperts
from .experts import MixtureOfExperts
from .lora import AdaptedTransformer
from .model import Precision, RotaryTables, Transformer
from .modules import Linear, Module, Parameter
from .variation import overrides

WEIGHTS = ("full", *KINDS)
MIXED = (MixtureOfExperts.mixed, LoraExperts.mixed)  # which take codes
HEAD = "int8"  # of an untied head, next to weights of four bits


def quantize_weights(model: Transformer, kind: str) -> None:
    """Quantize the matrices of all Linear modules and experts, in place.

    A matrix that is quantized in this way already is left as it is. Raises UserError, and changes
    nothing, for a model that can be trained, one that is quantized in another way, or one with
    weights that are not numbers.

    kind: one of WEIGHTS; "full" changes nothing.
    """
    if kind not in WEIGHTS:
        raise UserError(f"weights {kind!r} is not known: choose {', '.join(WEIGHTS)}")
    if kind == "full":
        return
    adapted = None
    if isinstance(model, AdaptedTransformer) and model.lora:
        adapted = model
    arena = adapted.base_arena if adapted else model.arena
    if arena.trainable:
        raise UserError(
            f"weights {kind!r} is for serving, this model can be trained: make it with "
            "trainable=False"
        )
    matrices = [(name, p, kind) for name, p in linear_weights(model)]
    for _, p, _ in matrices:
        if p.quantized is not None and p.quantized.kind != kind:
            raise UserError(
                f"the model is quantized to {p.quantized.kind} already: load it again for weights "
                f"{kind!r}"
            )
    if kind in FOUR_BITS and _has_plain_head(model, arena):
        matrices.append(("lm_head.", model.lm_head, HEAD))
    found = [item for item in matrices if item[1].quantized is None]
    codes = [quantize(p.data, its_kind) for _, p, its_kind in found]
    for (name, *_), quantized in zip(found, codes):
        check_finite(quantized, f"{name}weight")
    for (_, parameter, _), quantized in zip(found, codes):
        parameter.quantized = quantized
    if adapted:
        adapted.base_arena = arena_of(arena.parameters, arena.kind)
    else:
        model.arena = arena_of(arena.parameters, arena.kind)


def quantize_onto(model: Transformer, kind: str, device: str, precision: Precision) -> None:
    """Move a model from the CPU to a device, its matrices quantized there one after the other.

    The head stays whole: the loss of training reads it.
    precision: there. Raises UserError for weights that are not numbers.
    """
    dtype = np.dtype(np.float32 if precision == "fp32" else BFLOAT16)
    for name, parameter in linear_weights(model):
        codes = quantize(to_device(parameter.data, device), kind)
        check_finite(codes, f"{name}weight")
        parameter.quantized = replace(codes, dtype=dtype)
    arena = model.arena
    *_, world, trainable = arena.kind
    model.arena = arena_of(arena.parameters, (device, precision != "fp32", world, trainable))
    model.device = device
    model.precision = precision
    model.rotary = RotaryTables(model.config, device)


def _has_plain_head(model: Transformer, arena: Arena) -> bool:
    """Return whether the logits are a product of the hidden state and a frozen matrix of its own."""
    if model.config.tie_embeddings or overrides(model, Transformer, "logits"):
        return False
    return model._head() is model.lm_head and any(p is model.lm_head for p in arena.parameters)


def linear_weights(model: Module) -> list[tuple[str, Parameter]]:
    """Return (name of the module, its matrix) of every module that multiplies as Linear does.

    Of a mixture of experts those of all experts, "model.layers.0.mlp.experts.down_proj.", but not
    that of its router. A shared matrix appears once.
    """
    found: dict[int, tuple[str, Parameter]] = {}
    routers = set()
    for name, module in model.modules():
        if isinstance(module, MixtureOfExperts):
            routers.add(module.gate)
            own = type(module)
            if own.__call__ is MixtureOfExperts.__call__ and own.mixed in MIXED:
                found[id(module.gate_up)] = f"{name}experts.gate_up_proj.", module.gate_up
                found[id(module.down)] = f"{name}experts.down_proj.", module.down
            continue
        weight = vars(module).get("weight")
        multiplies = isinstance(module, Linear) and type(module).__call__ is Linear.__call__
        if multiplies and module not in routers and isinstance(weight, Parameter):
            found.setdefault(id(weight), (name, weight))
    return list(found.values())
