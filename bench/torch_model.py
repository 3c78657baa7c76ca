"""The peer of the benches: the same model in plain PyTorch, or with Liger-Kernel's ops."""

from dataclasses import replace
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import nn

from xtrain import ModelConfig
from xtrain.formats.huggingface import config_to_hf
from xtrain.kernels.rope import rope_tables


def rotate(x_BHTD, cos_TR, sin_TR):
    a, b = x_BHTD.chunk(2, dim=-1)
    return torch.cat([a * cos_TR - b * sin_TR, b * cos_TR + a * sin_TR], dim=-1).to(x_BHTD.dtype)


class Ops:
    """Those that Liger-Kernel has, too."""

    norm = nn.RMSNorm

    def rope(self, q_BHTD, k_BGTD, cos_TR, sin_TR):
        return rotate(q_BHTD, cos_TR, sin_TR), rotate(k_BGTD, cos_TR, sin_TR)

    def swiglu(self, gate, up):
        return F.silu(gate) * up

    def loss(self, x_BTC, head, targets_N):
        logits_BTV = head(x_BTC)
        return F.cross_entropy(logits_BTV.view(-1, logits_BTV.shape[-1]).float(), targets_N)


class LigerOps(Ops):
    """Liger-Kernel's, as it puts them into a Llama of transformers.

    Raises ImportError if it is not installed.
    """

    def __init__(self):
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss, LigerRMSNorm
        from liger_kernel.transformers.rope import liger_rotary_pos_emb

        self.norm = LigerRMSNorm
        self.rotate = liger_rotary_pos_emb
        self.silu_mul = LigerSiLUMulFunction.apply
        self.linear_loss = LigerFusedLinearCrossEntropyLoss()

    def rope(self, q_BHTD, k_BGTD, cos_TR, sin_TR):
        cos_1TD, sin_1TD = (torch.cat([t, t], dim=-1)[None] for t in (cos_TR, sin_TR))
        return self.rotate(q_BHTD, k_BGTD, cos_1TD, sin_1TD)

    def swiglu(self, gate, up):
        return self.silu_mul(gate, up)

    def loss(self, x_BTC, head, targets_N):
        return self.linear_loss(head.weight, x_BTC.flatten(0, 1), targets_N)


HAS_LIGER = find_spec("liger_kernel") is not None
HAS_FLOAT8 = find_spec("torchao") is not None
RECIPES = (
    "tensorwise",
    "rowwise",
)  # of torchao's float8 training: the scope of a scale, always of the current maximum


class Block(nn.Module):
    def __init__(self, c: ModelConfig, ops: Ops):
        super().__init__()
        self.c = c
        self.ops = ops
        self.dims = (c.n_heads, c.n_kv_heads, c.head_dim)
        H, G, D = self.dims
        self.norm1, self.norm2 = ops.norm(c.dim, c.norm_eps), ops.norm(c.dim, c.norm_eps)
        if c.qk_norm:  # unused parameters make DDP fail
            self.q_norm = ops.norm(D, c.norm_eps)
            self.k_norm = ops.norm(D, c.norm_eps)
        self.qkv = nn.Linear(c.dim, (H + 2 * G) * D, bias=False)
        self.out = nn.Linear(H * D, c.dim, bias=False)
        self.gate_up = nn.Linear(c.dim, 2 * c.hidden_dim, bias=False)
        self.down = nn.Linear(c.hidden_dim, c.dim, bias=False)

    def forward(self, x_BTC, cos, sin):
        B, T, _ = x_BTC.shape
        H, G, D = self.dims
        q, k, v = self.qkv(self.norm1(x_BTC)).view(B, T, H + 2 * G, D).split([H, G, G], dim=2)
        if self.c.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        q, k = self.ops.rope(q, k, cos, sin)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=G != H)
        x_BTC = x_BTC + self.out(o.transpose(1, 2).reshape(B, T, H * D))
        gate, up = self.gate_up(self.norm2(x_BTC)).chunk(2, dim=-1)
        return x_BTC + self.down(self.ops.swiglu(gate, up))


class Model(nn.Module):
    """The model of the config.

    padded: use the padded vocabulary size of xtrain. Here the padding is part of the softmax, as in
        user code: with 47 tokens more than 50257 the initial loss is 0.0009 higher.
    """

    def __init__(self, c: ModelConfig, T: int, padded: bool, ops: Ops | None = None):
        super().__init__()
        self.c = c
        self.rows = c.padded_vocab_size if padded else c.vocab_size
        self.ops = ops or Ops()
        self.embed, self.head = (
            nn.Embedding(self.rows, c.dim),
            nn.Linear(c.dim, self.rows, bias=False),
        )
        self.blocks = nn.ModuleList(Block(c, self.ops) for _ in range(c.n_layers))
        self.norm = self.ops.norm(c.dim, c.norm_eps)
        for name, table in zip(("cos", "sin"), rope_tables(c.head_dim, T, c.rope_theta)):
            self.register_buffer(name, torch.from_numpy(table))
        if c.tie_embeddings:
            self.head.weight = self.embed.weight
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, ids_BT, targets_BT):
        x = self.embed(ids_BT)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.ops.loss(self.norm(x), self.head, targets_BT.reshape(-1))


def to_float8(model: nn.Module, recipe: str, head: bool, **more) -> None:
    """Let the Linear modules of the blocks, and with `head` that too, compute in torchao's float8.

    more: fields of its config.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = replace(Float8LinearConfig.from_recipe_name(recipe), **more)
    chosen = lambda module, name: head or name != "head"
    convert_to_float8_training(model, module_filter_fn=chosen, config=config)


def load_weights(model: Model, ours) -> None:
    """Copy the weights of an xtrain Transformer, so that both start from the same point."""
    theirs = {"model.embed_tokens.weight": model.embed.weight, "lm_head.weight": model.head.weight}
    theirs["model.norm.weight"] = model.norm.weight
    H = model.c.n_heads
    G = model.c.n_kv_heads
    D = model.c.head_dim
    for i, b in enumerate(model.blocks):
        p = f"model.layers.{i}."
        q, k, v = b.qkv.weight.split([H * D, G * D, G * D])
        gate, up = b.gate_up.weight.chunk(2)
        theirs |= {
            p + "self_attn.q_proj.weight": q,
            p + "self_attn.k_proj.weight": k,
            p + "self_attn.v_proj.weight": v,
            p + "self_attn.o_proj.weight": b.out.weight,
            p + "mlp.gate_proj.weight": gate,
            p + "mlp.up_proj.weight": up,
            p + "mlp.down_proj.weight": b.down.weight,
            p + "input_layernorm.weight": b.norm1.weight,
            p + "post_attention_layernorm.weight": b.norm2.weight,
        }
        if model.c.qk_norm:
            norms = {"q_norm": b.q_norm, "k_norm": b.k_norm}
            theirs |= {f"{p}self_attn.{name}.weight": norm.weight for name, norm in norms.items()}
    with torch.no_grad():
        for name, tensor in ours.named_parameters():
            theirs[name][: tensor.shape[0]].copy_(torch.from_numpy(tensor.numpy()))


def as_torch(array):
    """Return an array of xtrain, float32 or bf16, as a tensor of the same memory."""
    if array.dtype.itemsize == 2:  # which DLPack does not know from CuPy
        return torch.from_dlpack(array.view("int16")).view(torch.bfloat16)
    return torch.from_dlpack(array)


class Mixture(nn.Module):
    """transformers' model of a mixture of experts, in bf16, with grouped products.

    ours: the model whose weights it gets.
    """

    def __init__(self, ours):
        super().__init__()
        from transformers import AutoConfig, AutoModelForCausalLM

        content = config_to_hf(ours.config) | {"dtype": "bfloat16"}
        config = AutoConfig.for_model(content.pop("model_type"), **content)
        options = dict(attn_implementation="sdpa", experts_implementation="grouped_mm")
        self.model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, **options)
        self.model.to("cuda")
        state = self.model.state_dict()
        for name, p in ours.named_parameters():
            if "experts." not in name:
                state[name].copy_(as_torch(p.data))
        for i, layer in enumerate(ours.model.layers):
            for theirs, p in (("gate_up_proj", layer.mlp.gate_up), ("down_proj", layer.mlp.down)):
                to = state[f"model.layers.{i}.mlp.experts.{theirs}"]
                to.copy_(as_torch(p.data).view(to.shape))

    def forward(self, ids_BT, targets_BT):
        logits_NV = self.model(input_ids=ids_BT, use_cache=False).logits.flatten(0, 1)
        return F.cross_entropy(logits_NV.float(), targets_BT.flatten())
