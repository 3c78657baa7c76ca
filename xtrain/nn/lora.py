"""LoRA (Hu et al. 2021): small trained matrices next to frozen ones.

    y = x w^T + f (x a^T) b^T     w (O, I) frozen   a (r, I), b (O, r) trained   f = alpha / r

With rsLoRA (Kalajdzievski 2023) f = alpha / r^1/2. Rank and alpha may differ by matrix. With DoRA the
product is then scaled to trained magnitudes (kernels/dora.py).

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

import numpy as np

from ..device import Array, to_device, to_numpy
from ..errors import UserError
from ..formats.adapters import ADAPTER_CONFIG, TRAINED, LoraPart, Ranks, read_ranks, read_targets
from ..formats.huggingface import shapes_of
from ..json_files import read_json
from ..kernels.dora import inverse_norms
from ..kernels.gemm import linear_fwd
from ..kernels.quantize import dense
from ..kernels.runtime.launch import empty
from . import functional as F
from .model import Transformer
from .modules import Linear, Parameter
from .tensor import Tensor

TARGETS_OF_MLP = ("gate_proj", "up_proj", "down_proj")
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", *TARGETS_OF_MLP)


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
    dora: with trained magnitudes.
    """

    r: int
    alpha: float
    targets: tuple[str, ...] = TARGETS
    base: str = ""
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    rslora: bool = False
    dora: bool = False

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
            "use_dora": self.dora,
        }
        return {key: value for key, value in keys.items() if value}

    @classmethod
    def read(cls, folder: Path) -> "Lora":
        """Return the options of the adapters in a folder. Raises UserError for what cannot be
        trained."""
        ranks = read_ranks(folder, TRAINED)
        content = read_json(folder / ADAPTER_CONFIG)
        names = read_targets(folder)
        return cls(
            ranks.rank,
            ranks.alpha,
            (*filter(names.__contains__, TARGETS), *sorted(names.difference(TARGETS))),
            rank_pattern=ranks.ranks,
            alpha_pattern=ranks.alphas,
            rslora=ranks.by_root,
            dora=bool(content.get("use_dora")),
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
        m: dict[str, int] = {}
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
                m[f"{prefix}lora_magnitude_vector"] = rows
            first += rows
        # the variance of PEFT's initialisation, uniform in +- I^-1/2
        self.lora_a = Parameter((sum(a.values()), columns), (3 * columns) ** -0.5, a)
        self.magnitudes: Parameter | None = None
        self.norms2_O: Array | None = None  # of w, squared
        if lora.dora:
            self.magnitudes = Parameter((sum(m.values()),), None, m)

    def __call__(self, x_NI: Tensor) -> Tensor:
        linear = self.linear
        if not self.on:
            return linear(x_NI)
        dora = self.magnitudes, self.inverse_norms()
        return F.lora_linear(
            x_NI, linear.weight, self.lora_a, linear.bias, *dora, self.parts, *self.lora_b
        )

    def inverse_norms(self) -> Array | None:
        """Return 1 / the norms of the adapted matrix's rows, (O,), 1 for those without adapters;
        None without DoRA."""
        if self.norms2_O is None:
            return None
        p_AO = linear_fwd(self.lora_a.value, self.linear.weight.value, np.float32)
        c_O = empty(p_AO, p_AO.shape[1])
        c_O.fill(1)
        for part, b in zip(self.parts, self.lora_b):
            a_rI = self.lora_a.data[part.ranks]
            columns = part.columns
            p_rO = p_AO[part.ranks, columns].copy()
            q_rO = linear_fwd(linear_fwd(a_rI, a_rI), b.data)
            inverse_norms(c_O[columns], self.norms2_O[columns], p_rO, q_rO, b.data, part.factor)
        return c_O

    def start_magnitudes(self, device: str) -> None:
        """With DoRA: set the magnitudes to the norms of w, which new adapters do not change."""
        if self.magnitudes is None:
            return
        w_OI = to_numpy(dense(self.linear.weight.value, np.float32)).astype(np.float32)
        norms_O = np.linalg.norm(w_OI, axis=1)
        self.norms2_O = to_device(norms_O**2, device)
        m = np.concatenate([norms_O[part.columns] for part in self.parts])
        self.magnitudes.data = to_device(m, device)

    def _storage(self, prefix):
        packed = "weight" not in self.linear.weight.parts
        path = prefix[: prefix[:-1].rfind(".") + 1] if packed else prefix
        yield path, self.lora_a
        for b in self.lora_b:
            yield path, b
        if self.magnitudes is not None:
            yield path, self.magnitudes


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
        for *_, adapted in matrices:
            adapted.start_magnitudes(device)

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
