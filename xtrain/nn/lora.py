"""LoRA (Hu et al. 2021): small trained matrices next to frozen ones.

    y = x w^T + f (x a^T) b^T     w (O, I) frozen   a (r, I), b (O, r) trained   f = alpha / r

b is 0 at first. The frozen model has no gradients, no moments, and in bf16 no float32 matrices: its
arena is one for inference. The adapters have an arena of their own, which is that of the
AdaptedTransformer. So optimizer, clipping, data parallelism and checkpoints see the adapters alone.

q, k and v are one packed product, and so are gate and up. Each has its own a and b: the a's lie one
below the other, x a^T is one product for all, and each adds to its own columns of y
(functions.LoraLinear).
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..errors import UserError
from ..formats.huggingface import shapes_of
from . import functional as F
from .model import Transformer
from .modules import Linear, Parameter
from .tensor import Tensor

TARGETS_OF_MLP = ("gate_proj", "up_proj", "down_proj")
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", *TARGETS_OF_MLP)


@dataclass(frozen=True)
class Lora:
    """The options of adapters.

    r: rank.
    alpha: the adapters' product is multiplied by alpha / r.
    targets: some of TARGETS.
    base: the model's folder.
    """

    r: int
    alpha: float
    targets: tuple[str, ...] = TARGETS
    base: str = ""

    def __post_init__(self):
        unknown = [name for name in self.targets if name not in TARGETS]
        if unknown or not self.targets:
            raise UserError(
                f"LoRA targets {unknown or '()'} are not known: choose some of {', '.join(TARGETS)}"
            )
        if not 0 < self.r < 2**16 or not 0 < self.alpha < 1e6:
            raise UserError(
                f"LoRA needs a positive rank and alpha, at most 65535 and 10^6, got {self.r} and "
                f"{self.alpha:g}"
            )


class LoraLinear(Linear):
    """A Linear, frozen, with adapters on some of its parts.

    name: of the module, if it is not packed.
    on: False inside AdaptedTransformer.without_adapters.
    """

    on = True

    def __init__(self, linear: Linear, name: str, lora: Lora):
        self.linear = linear
        self.factor = lora.alpha / lora.r
        columns = linear.weight.shape[1]
        first = 0
        self.slices: list[
            tuple[int, int]
        ] = []  # (first, number) of the rows of w that have adapters
        a: dict[str, int] = {}
        b: dict[str, int] = {}
        for part, rows in linear.weight.parts.items():
            prefix = part.removesuffix("weight")  # "q_proj." of a packed one, else ""
            if (prefix.removesuffix(".") or name) in lora.targets:
                self.slices.append((first, rows))
                a[f"{prefix}lora_A.weight"] = lora.r
                b[f"{prefix}lora_B.weight"] = rows
            first += rows
        # the variance of PEFT's initialisation, uniform in +- I^-1/2
        self.lora_a = Parameter((sum(a.values()), columns), (3 * columns) ** -0.5, a)
        self.lora_b = Parameter((sum(b.values()), lora.r), 0.0, b)

    def __call__(self, x_NI: Tensor) -> Tensor:
        if not self.on:
            return self.linear(x_NI)
        w, bias = self.linear.weight, self.linear.bias
        return F.lora_linear(x_NI, w, self.lora_a, self.lora_b, self.slices, self.factor, bias)

    def _storage(self, prefix):
        packed = "weight" not in self.linear.weight.parts
        path = prefix[: prefix[:-1].rfind(".") + 1] if packed else prefix
        yield path, self.lora_a
        yield path, self.lora_b


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
        inside = [name for name in lora.targets if name in TARGETS_OF_MLP]
        if self.config.n_experts and inside:
            others = " ".join(name for name in TARGETS if name not in TARGETS_OF_MLP)
            raise UserError(
                f"experts cannot have LoRA adapters, but the targets are {', '.join(inside)}: give "
                f"--lora-targets {others}"
            )
        self.frozen = shapes_of(self)
        self.base_arena = self.arena
        matrices = [
            (module, name, item)
            for layer in self.model.layers
            for _, module in layer.modules()
            for name, item in vars(module).items()
            if type(item) is Linear
        ]
        adapters = [(module, name, LoraLinear(x, name, lora)) for module, name, x in matrices]
        for module, name, adapted in adapters:
            if adapted.slices:
                setattr(module, name, adapted)
        if not any(adapted.slices for *_, adapted in adapters):
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
        return {
            "base_model_name_or_path": self.lora.base,
            "r": self.lora.r,
            "lora_alpha": self.lora.alpha,
            "target_modules": list(self.lora.targets),
        }


def frozen_shapes(model: Transformer) -> dict[str, tuple[int, ...]]:
    """Return {name: shape} of the parameters that no optimizer sees."""
    return getattr(model, "frozen", {})
