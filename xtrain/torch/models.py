"""One line for a model of transformers: `apply`, and `revert`.

Only methods of this model's modules are replaced: parameters, names, hooks and files stay. What
is replaced in a decoder layer:

    RMSNorm                    rmsnorm
    x + attention, RMSNorm     residual_rmsnorm
    the MLP                    swiglu between its products, or Gemma's geglu
    RoPE, QK-norm              rope, norm_rope, with float32 tables made once per forward pass
    attention                  attn_implementation="xtrain"
    head and loss              linear_cross_entropy, if labels are given: no logits
"""

import functools
import inspect
import sys
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UserError
from .attention import NAME, register_attention
from .losses import linear_cross_entropy
from .ops import geglu, norm_rope, residual_rmsnorm, rmsnorm, rope, swiglu

# model_type -> prefix of its classes in transformers
FAMILIES = {
    "gemma": "Gemma",
    "gemma3_text": "Gemma3",
    "llama": "Llama",
    "mistral": "Mistral",
    "phi3": "Phi3",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "smollm3": "SmolLM3",
}
ACTIVATIONS = {"silu": swiglu, "gelu_pytorch_tanh": geglu}
_MARK = "_xtrain_replaced"  # of a module whose forward is replaced
_ATTENTION = "_xtrain_attention"  # of a model: its attention implementation before


def apply(model: nn.Module, attention: bool = True, loss: bool = True) -> nn.Module:
    """Let a transformers model compute with xtrain's kernels; return it.

    Llama and SmolLM, Qwen2, Qwen2.5 and Qwen3, Mistral, Phi-3, Gemma 1 and 3 (text), with or
    without adapters of peft, in float32 or bf16.
    attention: also its attention. Without: as it was loaded, for example for head widths that the
        kernels do not have, or padded prompts next to a KV cache.
    loss: also head and loss; then the output of a call with labels has no logits.
    Call it before torch.compile, DistributedDataParallel, fully_shard or Accelerator.prepare.
    Raises UserError for another model, and for one with replaced forwards.
    """
    root = _pretrained(model)
    prefix = FAMILIES[root.config.model_type]
    family = prefix.lower()  # the folder in transformers.models
    if hasattr(root, _ATTENTION):
        raise UserError("this model has xtrain's kernels already: call revert(model) first")
    replaced = _replacements(prefix)
    forwards = [
        (module, replaced[type(module).__name__])
        for module in root.modules()
        if type(module).__name__ in replaced and f".{family}." in type(module).__module__
    ]
    if not forwards:
        raise UserError(
            f"apply does not know the modules of {type(root).__name__}, which are not those of "
            f"transformers.models.{family}: load the model without trust_remote_code"
        )
    if loss and type(root).forward is _forward_of(type(root), f"{prefix}ForCausalLM"):
        forwards.append((root, _causal_lm_forward))
    for module, _ in forwards:
        if "forward" in vars(module) and not hasattr(module, "_hf_hook"):
            raise UserError(
                f"the forward of {type(module).__name__} is not its own any more: call apply before "
                "Accelerator.prepare, before a Trainer is made, and without another library's kernels"
            )
    for module, new in forwards:
        _replace(module, new)
    setattr(root, _ATTENTION, root.config._attn_implementation)
    if attention:
        root.set_attn_implementation(NAME)
    return model


def revert(model: nn.Module) -> nn.Module:
    """Undo apply; return the model."""
    root = _pretrained(model)
    if not hasattr(root, _ATTENTION):
        return model
    for module in root.modules():
        if not module.__dict__.pop(_MARK, False):
            continue
        if hasattr(module, "_hf_hook"):
            module._old_forward = MethodType(type(module).forward, module)
        else:
            del module.forward
    root.set_attn_implementation(getattr(root, _ATTENTION))
    delattr(root, _ATTENTION)
    return model


def _pretrained(model: nn.Module) -> Any:
    """Return the model of transformers in `model`, which may be inside peft's."""
    from transformers import PreTrainedModel

    for module in model.modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, PreTrainedModel) and module.config.model_type in FAMILIES:
            return module
    known = ", ".join(FAMILIES)
    raise UserError(
        f"apply does not know {type(model).__name__}: give a transformers model of one of the "
        f"types {known}, or call the ops of xtrain.torch in your modules"
    )


def _replace(module: nn.Module, forward: Callable) -> None:
    """Replace a module's forward. Accelerate's hooks keep the module's own in _old_forward."""
    name = "_old_forward" if hasattr(module, "_hf_hook") else "forward"
    setattr(module, name, _bound(forward, module))
    module.__dict__[_MARK] = True


class _Forward(functools.partial):
    """A function as a module's forward, which can be copied and pickled with the module.

    Its signature is that of the module's own, where a Trainer looks for the columns to pass.
    """

    @property
    def __signature__(self) -> inspect.Signature:
        (module,) = self.args
        return inspect.signature(MethodType(type(module).forward, module))

    @property
    def __func__(self) -> Callable:
        """What Accelerate wraps for mixed precision, and makes a method of the module again."""
        (module,) = self.args
        forward = self.func

        def unbound(*args: Any, **kwargs: Any) -> Any:
            return forward(*args, **kwargs)

        unbound.__signature__ = inspect.signature(type(module).forward)  # type: ignore[attr-defined]
        return unbound

    def __reduce__(self) -> tuple:
        return _bound, (self.func, *self.args)


def _bound(forward: Callable, module: nn.Module) -> _Forward:
    """Return the function as a forward of the module, ready to be called in this process."""
    register_attention()
    _dispatch_rope(sys.modules[type(module).__module__])
    return _Forward(forward, module)


def _forward_of(kind: Any, name: str) -> Callable | None:
    """Return the forward of the base class with this name."""
    return next((base.forward for base in kind.__mro__ if base.__name__ == name), None)


def _has_hooks(module: Any) -> bool:
    """Does more happen in a call of the module than its forward?"""
    before = module._forward_pre_hooks or module._backward_pre_hooks
    return bool(before or module._forward_hooks or module._backward_hooks)


def _is_plain(module: Any) -> bool:
    """May an op read the module's weight without calling the module?

    Not if a hook wants to know of the call, or the weight is loaded or gathered in it.
    """
    return not (_has_hooks(module) or module.weight.is_meta)


def _is_plain_norm(module: Any) -> bool:
    """The same for a norm, which an adapter of peft may take the place of."""
    return hasattr(module, _MARK) and _is_plain(module)


def _replacements(prefix: str) -> dict[str, Callable]:
    """Return class name -> its new forward."""
    found: dict[str, Callable] = {
        f"{prefix}RMSNorm": _norm_forward,
        f"{prefix}RotaryEmbedding": _rotary_forward,
        f"{prefix}MLP": _mlp_forward,
        f"{prefix}DecoderLayer": _layer_forward,
    }
    if prefix in ("Qwen3", "Gemma3"):
        found[f"{prefix}Attention"] = _qk_norm_attention_forward
    if prefix == "Phi3":
        found["Phi3MLP"] = _packed_mlp_forward
    if prefix == "Gemma3":
        found["Gemma3DecoderLayer"] = _sandwich_layer_forward
    return found


# ----------------------------------------------------------------------------- the new forwards
def _parameters(norm: Any) -> tuple[Tensor, float]:
    """Return the factors of a norm, and its epsilon. Gemma's factors are 1 + weight, in float32."""
    if type(norm).__name__.startswith("Gemma"):
        return 1.0 + norm.weight.float(), norm.eps
    return norm.weight, norm.variance_epsilon


def _norm_forward(self: Any, hidden_states: Tensor) -> Tensor:
    return rmsnorm(hidden_states, *_parameters(self))


def _activation(mlp: Any, module: nn.Module) -> Callable | None:
    """Return the op for the activation of an MLP, which this module computes; None without one."""
    name = getattr(mlp.config, "hidden_act", None) or mlp.config.hidden_activation
    return None if _has_hooks(module) else ACTIVATIONS.get(name)


def _mlp_forward(self: Any, x: Tensor) -> Tensor:
    gated = _activation(self, self.act_fn)
    if gated is None:
        return type(self).forward(self, x)
    return self.down_proj(gated(self.gate_proj(x), self.up_proj(x)))


def _packed_mlp_forward(self: Any, hidden_states: Tensor) -> Tensor:
    gated = _activation(self, self.activation_fn)
    if gated is None:
        return type(self).forward(self, hidden_states)
    return self.down_proj(gated(self.gate_up_proj(hidden_states)))


def _layer_forward(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    r = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)[0]
    r = getattr(self, "resid_attn_dropout", _unchanged)(r)  # Phi-3's
    h, y = _add_and_norm(hidden_states, r, self.post_attention_layernorm)
    return h + getattr(self, "resid_mlp_dropout", _unchanged)(self.mlp(y))


def _sandwich_layer_forward(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    """Gemma 3 has a norm on both sides of a branch."""
    r = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)[0]
    r = self.post_attention_layernorm(r)
    h, y = _add_and_norm(hidden_states, r, self.pre_feedforward_layernorm)
    return h + self.post_feedforward_layernorm(self.mlp(y))


def _add_and_norm(x: Tensor, r: Tensor, norm: Any) -> tuple[Tensor, Tensor]:
    """Return h = x + r and norm(h)."""
    if _is_plain_norm(norm):
        return residual_rmsnorm(x, r, *_parameters(norm))
    h = x + r
    return h, norm(h)


def _unchanged(x: Tensor) -> Tensor:
    return x


def _qk_norm_attention_forward(
    self: Any, hidden_states: Tensor, position_embeddings: tuple, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, Any]:
    """Norm and rotation of a head are one op, which apply_rotary_pos_emb cannot do."""
    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    cos, sin = position_embeddings
    turned = []
    for product, norm in ((self.q_proj, self.q_norm), (self.k_proj, self.k_norm)):
        x = product(hidden_states).view(shape)
        if _is_plain_norm(norm):
            weight, eps = _parameters(norm)
            y = norm_rope(_as_sequences(x, cos), weight, cos, sin, eps)
        else:
            y = rope(_as_sequences(norm(x), cos), cos, sin)
        turned.append(y.view(x.shape))
    q, k, v = (x.transpose(1, 2) for x in (*turned, self.v_proj(hidden_states).view(shape)))
    cache = kwargs.pop("cache", None)
    if cache is None:
        cache = kwargs.pop("past_key_values", None)  # its name before transformers 5.24
    if cache is not None:
        k, v = cache.update(k, v, self.layer_idx)
    implementation = self.config._attn_implementation
    compute = sys.modules[type(self).__module__].eager_attention_forward
    if implementation != "eager":
        compute = sys.modules["transformers"].AttentionInterface()[implementation]
    options = dict(scaling=self.scaling, sliding_window=self.sliding_window)
    options["dropout"] = self.attention_dropout if self.training else 0.0
    o, weights = compute(self, q, k, v, attention_mask, **options, **kwargs)
    return self.o_proj(o.reshape(*hidden_states.shape[:-1], -1)), weights


def _rotary_forward(
    self: Any, x: Tensor, position_ids: Tensor, *layer_type: str
) -> tuple[Tensor, Tensor]:
    """Return cos and sin (P, R) float32, one row per token, or per position if all rows of the
    batch have the same. _dispatch_rope tells them from tables of transformers by their axes."""
    like = torch.empty(0, dtype=torch.float32, device=x.device)
    cos, sin = type(self).forward(self, like, position_ids, *layer_type)
    R = cos.shape[-1] // 2
    cos, sin = (table[..., :R].reshape(-1, R).contiguous() for table in (cos, sin))
    return cos, sin


def _dispatch_rope(modeling: Any) -> None:
    """Let apply_rotary_pos_emb of a module of transformers rotate with tables of _rotary_forward.

    With its own tables, those of other models, it does what it did.
    """
    original = getattr(modeling, "apply_rotary_pos_emb", None)
    if original is None or hasattr(original, "original"):
        return

    def apply_rotary_pos_emb(q, k, cos, sin, *args, **kwargs):
        if cos.dim() == 2:
            return _rotate(q, cos, sin), _rotate(k, cos, sin)
        return original(q, k, cos, sin, *args, **kwargs)

    apply_rotary_pos_emb.original = original  # type: ignore[attr-defined]
    modeling.apply_rotary_pos_emb = apply_rotary_pos_emb


def _rotate(x_BHTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first 2 R columns of every head."""
    x = x_BHTD.transpose(1, 2)
    columns = 2 * cos.shape[1]
    rotated = rope(_as_sequences(x[..., :columns], cos), cos, sin).view(*x.shape[:3], columns)
    if columns < x.shape[-1]:
        rotated = torch.cat((rotated, x[..., columns:]), -1)
    return rotated.transpose(1, 2)


def _as_sequences(x: Tensor, cos: Tensor) -> Tensor:
    """Return x (B, T, H, D), as one sequence if the tables have a row for each of its B T tokens."""
    return x if len(cos) == x.shape[1] else x.flatten(0, 1)[None]


def _causal_lm_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute the loss without logits, if there are labels and nothing about head and loss is
    special."""
    from transformers.loss.loss_utils import ForCausalLMLoss
    from transformers.modeling_outputs import CausalLMOutputWithPast

    head = self.lm_head
    plain = type(head) is nn.Linear and head.bias is None and self.loss_function is ForCausalLMLoss
    plain = plain and kwargs.get("ignore_index", -100) == -100
    plain = plain and getattr(self.config, "final_logit_softcapping", None) is None  # Gemma 3's
    if kwargs.get("labels") is None or not plain or not _is_plain(head):
        return type(self).forward(self, *args, **kwargs)
    labels = kwargs.pop("labels")
    count = kwargs.pop("num_items_in_batch", None)
    targets = kwargs.pop("shift_labels", None)
    kwargs.pop("logits_to_keep", None)
    return_dict = kwargs.pop("return_dict", None)
    if targets is None:
        targets = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:]
    outputs = dict(self.model(*args, **kwargs, return_dict=True))
    hidden = outputs.pop("last_hidden_state")
    loss = linear_cross_entropy(hidden, head.weight, targets.to(hidden.device), count)
    output = CausalLMOutputWithPast(loss=loss, **outputs)
    if return_dict is False or (return_dict is None and not self.config.return_dict):
        return output.to_tuple()
    return output
