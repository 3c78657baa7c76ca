"""How a model differs from the plain model of its config: what `Transformer.variation` lists."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..config import ModelConfig
from .experts import MixtureOfExperts
from .modules import Module, Parameter

NO_EXPERTS: dict[str, Any] = dict(
    n_experts=0, experts_per_token=0, expert_hidden_dim=0, dense_layers=(), expert_bias=False
)


def overrides(module: Module, kind: type, name: str) -> bool:
    """Return True if a derived class or an attribute replaces the method `name` of `kind`."""
    return getattr(getattr(module, name, None), "__func__", None) is not getattr(kind, name)


def with_layers(config: ModelConfig, layers: Sequence[Module]) -> ModelConfig:
    """Return the config with the number of these layers, some of which were removed or added."""
    if len(layers) in (0, config.n_layers):
        return config
    attentions = list(enumerate(getattr(layer, "self_attn", layer) for layer in layers))
    no_rope = tuple(i for i, x in attentions if not getattr(x, "rotary", True))
    full: tuple[int, ...] = ()
    if config.sliding_window:
        full = tuple(i for i, x in attentions if getattr(x, "window", None) == 0)
    shape: dict[str, Any] = {"no_rope_layers": no_rope, "full_attention_layers": full}
    if config.n_experts:
        mlps = [getattr(layer, "mlp", None) for layer in layers]
        dense = tuple(i for i, x in enumerate(mlps) if not isinstance(x, MixtureOfExperts))
        shape |= NO_EXPERTS if len(dense) == len(layers) else {"dense_layers": dense}
    return replace(config, n_layers=len(layers), **shape)


def changed_modules(model: Module, plain: Module, standard: tuple[type, ...]) -> list[str]:
    """Return what differs in the modules of model.model from those of `plain`.

    These are the modules that are of no standard class, and settings of the others, by their paths.
    """
    plain_modules = dict(plain.modules("model."))
    differences = []
    for path, module in list(model.modules())[1:]:
        if type(module) not in standard:
            differences.append(f"{path}{type(module).__name__}")
        elif path in plain_modules:
            differences += [path + name for name in changed_settings(module, plain_modules[path])]
    return differences


def changed_settings(module: Module, plain: Module) -> list[str]:
    """Return the attributes by which a module computes something else than `plain`, of its class.

    Modules and parameters are not compared, but an attribute that replaces a method counts.
    """
    own = vars(module)
    other = vars(plain)
    settings = [n for n, x in other.items() if not isinstance(x, Module | Parameter | list)]
    methods = [n for n in own.keys() - other if callable(getattr(type(module), n, None))]
    return [n for n in settings + methods if of_layer(own.get(n)) != of_layer(other.get(n))]


def of_layer(setting: Any) -> Any:
    """Return a setting of a layer; of a config only what does not count the layers, or the experts,
    which a MixtureOfExperts has itself."""
    if isinstance(setting, ModelConfig):
        of_one: dict[str, Any] = {"no_rope_layers": (), "full_attention_layers": ()}
        return replace(setting, n_layers=1, **of_one, **NO_EXPERTS)
    return setting


def changed_tensors(model: Module, shapes: dict[str, Any]) -> list[str]:
    """Return the names of the tensors that are not those of `shapes`."""
    own = {
        prefix + suffix: (rows, *p.declared_shape[1:])
        for prefix, p in model.storage()
        for suffix, rows in p.parts.items()
    }
    return sorted({name for name, _ in own.items() ^ shapes.items()})


def listed(differences: list[str]) -> str:
    """Return the first three, and how many more there are."""
    if len(differences) > 3:
        more = f" and {len(differences) - 3} more"
    else:
        more = ""
    return ", ".join(differences[:3]) + more
