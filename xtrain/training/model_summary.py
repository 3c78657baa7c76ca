"""A model in one line, and the table of its parameters."""

import math

from rich.table import Table

from ..config import ModelConfig
from ..formats.expert_files import active_share
from ..formats.huggingface import shapes_of
from ..nn.draft_heads import HeadedTransformer
from ..nn.lora import frozen_shapes
from ..nn.model import Transformer


def describe(config: ModelConfig) -> str:
    """Return "Qwen3-style, 12 layers, width 384, ..." """
    kind = ""
    if config.family:
        kind = f"{config.family}-style, "
    mlp = f"MLP {config.hidden_dim}"
    if config.n_experts:
        mlp = f"{config.experts_per_token} of {config.n_experts} experts {config.expert_hidden_dim}"
    return (
        f"{kind}{config.n_layers} layers, width {config.dim}, {config.n_heads} heads x "
        f"{config.head_dim} ({config.n_kv_heads} for keys), {mlp}, vocabulary {config.vocab_size}"
    )


def parameter_table(model: Transformer) -> Table:
    """Return the number of parameters by part. Embedding and head are apart from the core: a large
    vocabulary dominates small models. Of experts those count as active that compute one token."""
    trained = shapes_of(model)
    frozen = frozen_shapes(model)
    marks = {
        "norm": "norms",
        "embed": "embedding",
        "lm_head": "head",
        "self_attn": "attention",
        "mlp.gate.": "routers",
        "experts.": "experts",
        "mlp": "MLP",
    }
    parts = ("embedding", "attention", "MLP", "routers", "experts", "norms", "head", "other")
    groups = dict.fromkeys(parts, 0)
    active = 0.0
    for name, shape in (frozen or trained).items():
        kind = next((group for mark, group in marks.items() if mark in name), "other")
        groups[kind] += math.prod(shape)
        active += math.prod(shape) * active_share(model.config, name)
    total = sum(groups.values())
    core = total - groups["embedding"] - groups["head"]
    if model.config.tie_embeddings:
        del groups["head"]
    for name in ("MLP", "routers", "experts", "other"):
        if not groups[name]:
            del groups[name]
    table = Table(title="parameters", title_justify="left")
    table.add_column("part")
    table.add_column("number", justify="right")
    table.add_column("share", justify="right")
    for name, n in [*groups.items(), ("core (without embedding and head)", core), ("all", total)]:
        table.add_row(name, f"{n:,}", f"{100 * n / total:.1f} %")
    if model.config.n_experts:
        n = round(active)
        table.add_row("active for each token", f"{n:,}", f"{100 * n / total:.1f} %")
    if frozen:
        n = sum(map(math.prod, trained.values()))
        what = "draft heads" if isinstance(model, HeadedTransformer) else "LoRA adapters"
        table.add_row(f"trained: {what}", f"{n:,}", f"{100 * n / total:.1f} %")
    return table
