"""LoRA (Hu et al. 2021): small trained matrices next to frozen ones.

    y = x w^T + f (x a^T) b^T     w (O, I) frozen   a (r, I), b (O, r) trained   f = alpha / r

With rsLoRA (Kalajdzievski 2023) f = alpha / r^1/2. Rank and alpha may differ by matrix.

b is 0 at first. The frozen model has no gradients, no moments, and in bf16 no float32 matrices: its
arena is one for inference. The adapters have an arena of their own, which is that of the
AdaptedTransformer. So optimizer, clipping, data parallelism and checkpoints see the adapters alone.

q, k and v are one packed product, and so are gate and up. Each has its own a and b: the a's lie one
below the other, x a^T is one product for all, and each adds to its own columns of y
(functions.LoraLinear).
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..formats.adapters import PATTERNS, Ranks, read_ranks, read_targets
from ..formats.huggingface import shapes_of
from . import functional as F
from .functions import LoraPart
from .model import Transformer
from .modules import Linear, Parameter
from .tensor import Tensor

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Lora:
    """The options of adapters, which are those of peft's LoraConfig.

    r: rank.
    alpha: the adapters' product is multiplied by alpha / r.
    targets: some of TARGETS.
    base: the model's folder.
    rank_pattern, alpha_pattern: {regular expression of the end of a matrix's name: its own rank or
        alpha}; the first that fits decides.
    rslora: alpha / r^1/2 in place of alpha / r.
    """

    r: int
    alpha: float
    targets: tuple[str, ...] = TARGETS
    base: str = ""
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    rslora: bool = False

    def __post_init__(self):
        unknown = [name for name in self.targets if name not in TARGETS]
        if unknown or not self.targets:
            raise UserError(
                f"LoRA targets {unknown or '()'} are not known: choose some of {', '.join(TARGETS)}"
            )
        ranks = self.ranks
        for r in (self.r, *ranks.ranks.values()):
            for alpha in (self.alpha, *ranks.alphas.values()):
                if not 0 < r < 2**16 or not 0 < alpha < 1e6:
                    raise UserError(
                        "LoRA needs a positive rank and alpha, at most 65535 and 10^6, got "
                        f"{r} and {alpha:g}"
                    )

    @property
    def ranks(self) -> Ranks:
        """The rank and factor of each matrix."""
        return Ranks(self.r, self.alpha, self.rank_pattern, self.alpha_pattern, self.rslora)

    @property
    def config(self) -> dict[str, Any]:
        """What adapter_config.json says: the keys of peft."""
        return {
            "base_model_name_or_path": self.base,
            "r": self.r,
            "lora_alpha": self.alpha,
            "target_modules": list(self.targets),
            **self.extensions,
        }

    @property
    def extensions(self) -> dict[str, Any]:
        """Those keys that plain LoRA does not have."""
        keys = {
            "rank_pattern": self.rank_pattern,
            "alpha_pattern": self.alpha_pattern,
            "use_rslora": self.rslora,
        }
        return {key: value for key, value in keys.items() if value}

    @classmethod
    def read(cls, folder: Path) -> "Lora":
        """Return the options of the adapters in a folder. Raises UserError for what cannot be
        trained."""
        ranks = read_ranks(folder, PATTERNS)
        names = read_targets(folder)
        return cls(
            ranks.rank,
            ranks.alpha,
            (*filter(names.__contains__, TARGETS), *sorted(names.difference(TARGETS))),
            rank_pattern=ranks.ranks,
            alpha_pattern=ranks.alphas,
            rslora=ranks.by_root,
        )


class LoraLinear(Linear):
    """A Linear, frozen, with adapters on some of its parts.

    path: of the module that has it, "model.layers.0.self_attn."
    name: of the Linear there, if it is not packed.
    on: False inside AdaptedTransformer.without_adapters.
    """

    on = True

    def __init__(self, linear: Linear, path: str, name: str, lora: Lora):
        self.linear = linear
        columns = linear.weight.shape[1]
        first = 0
        self.parts: list[LoraPart] = []
        a: dict[str, int] = {}
        self.lora_b: list[Parameter] = []
        for part, rows in linear.weight.parts.items():
            prefix = part.removesuffix("weight")  # "q_proj." of a packed one, else ""
            matrix = prefix.removesuffix(".") or name
            if matrix in lora.targets:
                r, factor = lora.ranks.of(path + matrix)
                ranks = slice(sum(a.values()), sum(a.values()) + r)
                self.parts.append(LoraPart(slice(first, first + rows), ranks, factor))
                a[f"{prefix}lora_A.weight"] = r
                self.lora_b.append(Parameter((rows, r), 0.0, {f"{prefix}lora_B.weight": rows}))
            first += rows
        # the variance of PEFT's initialisation, uniform in +- I^-1/2
        self.lora_a = Parameter((sum(a.values()), columns), (3 * columns) ** -0.5, a)

    def __call__(self, x_NI: Tensor) -> Tensor:
        if not self.on:
            return self.linear(x_NI)
        linear = self.linear
        return F.lora_linear(x_NI, linear.weight, self.lora_a, self.lora_b, self.parts, linear.bias)

    def _storage(self, prefix):
        packed = "weight" not in self.linear.weight.parts
        path = prefix[: prefix[:-1].rfind(".") + 1] if packed else prefix
        yield path, self.lora_a
        for b in self.lora_b:
            yield path, b


class AdaptedTransformer(Transformer):
    """A frozen Transformer with adapters, its only parameters after `adapt`.

    Make it with trainable=False.

    lora: what `adapt` was given, None before.
    frozen: {name: shape} of the model's own parameters, after `adapt`.
    """

    lora: Lora | None = None
    frozen: dict[str, tuple[int, ...]]

    def adapt(self, lora: Lora, seed: int | None = 0, world: int = 1) -> None:
        """Add adapters, which change nothing yet.

        seed: of their initialisation; None: they are zero.
        world: see nn.Arena.
        """
        self.frozen = shapes_of(self)
        self.base_arena = self.arena
        matrices = [
            (module, name, LoraLinear(item, path, name, lora))
            for path, module in list(self.modules())
            for name, item in vars(module).items()
            if path.startswith("model.layers.") and type(item) is Linear
        ]
        matrices = [item for item in matrices if item[2].parts]
        for module, name, adapted in matrices:
            setattr(module, name, adapted)
        if not matrices:
            raise UserError(
                f"no matrix of the changed model is named {' or '.join(lora.targets)}: choose "
                "other --lora-targets"
            )
        self.lora = lora
        device, bf16, *_ = self.arena.kind
        self.arena = self.make_arena(device, seed, bf16, world)

    @contextlib.contextmanager
    def without_adapters(self) -> Iterator[None]:
        """Compute with the frozen model alone inside this context."""
        adapted = [module for _, module in self.modules() if isinstance(module, LoraLinear)]
        for module in adapted:
            module.on = False
        try:
            yield
        finally:
            for module in adapted:
                module.on = True

    def _storage(self, prefix: str) -> Iterator[tuple[str, Parameter]]:
        if self.lora is None:
            yield from super()._storage(prefix)
            return
        for path, module in self.modules(prefix):
            if isinstance(module, LoraLinear):
                yield from module._storage(path)

    @property
    def variation(self) -> str:
        """Return "": adapters are written apart from the model, which stays what it is."""
        return "" if self.lora else super().variation

    @property
    def adapter(self) -> dict[str, Any] | None:
        """Return what adapter_config.json says of them."""
        if self.lora is None:
            return None
        return self.lora.config


def frozen_shapes(model: Transformer) -> dict[str, tuple[int, ...]]:
    """Return {name: shape} of the parameters that no optimizer sees."""
    return getattr(model, "frozen", {})
