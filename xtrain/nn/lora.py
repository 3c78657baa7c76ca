"""LoRA (Hu et al. 2021): small trained matrices next to frozen ones.

    y = x w^T + f (x a^T) b^T     w (O, I) frozen   a (r, I), b (O, r) trained   f = alpha / r

With rsLoRA (Kalajdzievski 2023) f = alpha / r^1/2. Rank and alpha may differ by matrix. With DoRA the
product is then scaled to trained magnitudes (kernels/dora.py).

b is 0 at first. The frozen model has no gradients, no moments, and in bf16 no float32 matrices: its
arena is one for inference. The adapters have an arena of their own, which is that of the
AdaptedTransformer. So optimizer, clipping, data parallelism and checkpoints see the adapters alone.

q, k and v are one packed product, and so are gate and up. Each has its own a and b: the a's lie one
below the other, x a^T is one product for all, and each adds to its own columns of y
(functions.LoraLinear). Of a mixture each expert has its own (expert_lora.py).
"""

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..device import Array, to_device, to_numpy
from ..errors import UserError
from ..formats import huggingface
from ..formats.adapters import (
    ADAPTER_CONFIG,
    PISSA,
    TRAINED,
    A,
    B,
    LoraPart,
    Ranks,
    read_modules,
    read_ranks,
)
from ..formats.architectures import is_norm
from ..formats.huggingface import shapes_of
from ..formats.tensor_file import principal_factors
from ..json_files import read_json
from ..kernels.dora import inverse_norms
from ..kernels.gemm import linear_fwd
from ..kernels.quantize import dense
from ..kernels.runtime.launch import empty
from . import functional as F
from .expert_lora import EXPERT_MATRICES, LoraExperts
from .experts import MixtureOfExperts
from .model import Transformer
from .modules import Embedding, Linear, Module, Parameter, RMSNorm
from .tensor import Tensor

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", *EXPERT_MATRICES)  # of experts, or of an MLP
TABLES = ("embed_tokens", "lm_head")  # may be targets, too


@dataclass(frozen=True)
class Lora:
    """The options of adapters, which are those of peft's LoraConfig.

    r: rank.
    alpha: the adapters' product is multiplied by alpha / r.
    targets: some of TARGETS and TABLES.
    base: the model's folder.
    rank_pattern, alpha_pattern: {regular expression of the end of a matrix's name: its own rank or
        alpha}; the first that fits decides.
    rslora: alpha / r^1/2 in place of alpha / r.
    dora: with trained magnitudes.
    bias: which biases of linear layers are trained: "none", "all", or "lora_only", those of targets.
    modules_to_save: ends of the names of norms and TABLES that are trained whole.
    init: "default", or "pissa" (Meng et al. 2024): a and b begin with the largest singular values
        of w, which w then lacks.
    modules: the names of the matrices with adapters, if these are some of the targets; else empty.
    """

    r: int
    alpha: float
    targets: tuple[str, ...] = TARGETS
    base: str = ""
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    rslora: bool = False
    dora: bool = False
    bias: Literal["none", "all", "lora_only"] = "none"
    modules_to_save: tuple[str, ...] = ()
    init: Literal["default", "pissa"] = "default"
    modules: frozenset[str] = field(default=frozenset(), compare=False)

    def __post_init__(self):
        known = (*TARGETS, *TABLES)
        unknown = [name for name in self.targets if name not in known]
        if unknown or not self.targets:
            raise UserError(
                f"LoRA targets {unknown or '()'} are not known: choose some of {', '.join(known)}"
            )
        if "" in self.modules_to_save:
            raise UserError("a name of --lora-modules-to-save is empty: give an end of a name")
        tables = [name for name in TABLES if name in self.targets]
        if not self.dora:
            tables = [name for name in tables if name_ends(name, self.modules_to_save)]
        if tables:
            raise UserError(
                f"{tables[0]} is a target of LoRA, with DoRA or while it is trained whole: leave "
                "one of them out"
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

    def adapts(self, path: str, matrix: str) -> bool:
        """Return True if a matrix has adapters: "q_proj" of "model.layers.0.self_attn."."""
        return matrix in self.targets and (not self.modules or path + matrix in self.modules)

    @property
    def config(self) -> dict[str, Any]:
        """What adapter_config.json says: the keys of peft."""
        return {
            "base_model_name_or_path": self.base,
            "r": self.r,
            "lora_alpha": self.alpha,
            "target_modules": sorted(self.modules) or list(self.targets),
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
            "bias": self.bias if self.bias != "none" else "",
            "modules_to_save": list(self.modules_to_save),
            "init_lora_weights": PISSA if self.init == PISSA else "",
        }
        return {key: value for key, value in keys.items() if value}

    @classmethod
    def read(cls, folder: Path) -> "Lora":
        """Return the options of the adapters in a folder. Raises UserError for what cannot be
        trained."""
        ranks = read_ranks(folder, TRAINED)
        content = read_json(folder / ADAPTER_CONFIG)
        modules = read_modules(folder)
        names = {module.rpartition(".")[2] for module in modules}
        known = (*TARGETS, *TABLES)
        return cls(
            ranks.rank,
            ranks.alpha,
            (*filter(names.__contains__, known), *sorted(names.difference(known))),
            rank_pattern=ranks.ranks,
            alpha_pattern=ranks.alphas,
            rslora=ranks.by_root,
            dora=bool(content.get("use_dora")),
            bias=content.get("bias") or "none",
            modules_to_save=tuple(content.get("modules_to_save") or ()),
            init="pissa" if content.get("init_lora_weights") == PISSA else "default",
            modules=modules,
        )


def _divided(name: str) -> tuple[str, str]:
    """Return the two arguments of `Lora.adapts`: "model.layers.0.self_attn.", "q_proj"."""
    path, dot, matrix = name.rpartition(".")
    return path + dot, matrix


def name_ends(name: str, ends: Sequence[str]) -> bool:
    """Return True if a module's name ends in one of these, as peft finds modules_to_save."""
    return name.endswith(tuple(ends))


def as_float32(parameter: Any) -> np.ndarray:
    """Return the values of a Parameter, perhaps quantized, on the host."""
    if parameter.quantized is None:
        return to_numpy(parameter.data).astype(np.float32)
    return to_numpy(dense(parameter.quantized, np.float32))


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
        self.own_bias: Parameter | None = None  # in place of that of the parts
        self.magnitudes: Any = None  # with DoRA
        self.norms2_O: Any = None  # of w, squared
        self.ones_O: Any = None
        self.lora_b: list[Parameter] = []
        a: dict[str, int] = {}
        rows_of: dict[str, int] = {}
        for part, rows in linear.weight.parts.items():
            prefix = part.removesuffix("weight")  # "q_proj." of a packed one, else ""
            matrix = prefix.removesuffix(".") or name
            if lora.adapts(path, matrix):
                r, factor = lora.ranks.of(path + matrix)
                ranks = slice(sum(a.values()), sum(a.values()) + r)
                self.parts.append(LoraPart(slice(first, first + rows), ranks, factor))
                a[f"{prefix}lora_A.weight"] = r
                self.lora_b.append(Parameter((rows, r), 0.0, {f"{prefix}lora_B.weight": rows}))
                rows_of[prefix] = rows
            first += rows
        # the variance of PEFT's initialisation, uniform in +- I^-1/2
        self.lora_a = Parameter((sum(a.values()), columns), (3 * columns) ** -0.5, a)
        vector = lambda end: Parameter(
            (sum(rows_of.values()),), None, {f"{prefix}{end}": n for prefix, n in rows_of.items()}
        )
        if lora.dora and self.parts:
            self.magnitudes = vector("lora_magnitude_vector")
        if lora.bias == "lora_only" and linear.bias is not None and self.parts:
            self.own_bias = vector("base_layer.bias")

    def __call__(self, x_NI: Tensor) -> Tensor:
        linear = self.linear
        if not self.on:
            return linear(x_NI)
        places = [part.columns for part in self.parts]
        bias: Any = linear.bias
        if self.own_bias is not None:
            bias = F.replace_rows(bias.data, self.own_bias, places)
        dora: tuple[Any, Any] = (None, None)
        if self.magnitudes is not None:
            dora = F.replace_rows(self.ones_O, self.magnitudes, places), self.inverse_norms()
        return F.lora_linear(
            x_NI, linear.weight, self.lora_a, bias, *dora, self.parts, *self.lora_b
        )

    def inverse_norms(self) -> Array:
        """Return 1 / the norms of the adapted matrix's rows, (O,); 1 for those without adapters."""
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

    def adapted_names(self) -> list[str]:
        """Return how the names of the parts with adapters begin: "q_proj." or ""."""
        return [name.removesuffix("lora_A.weight") for name in self.lora_a.parts]

    def start(self, device: str) -> None:
        """Set the biases to those of the model, the magnitudes to the norms of the adapted rows."""
        columns = [part.columns for part in self.parts]
        if self.own_bias is not None:
            bias_O = as_float32(self.linear.bias)
            self.own_bias.data = to_device(np.concatenate([bias_O[x] for x in columns]), device)
        if self.magnitudes is None:
            return
        v_OI = as_float32(self.linear.weight)
        norms2_O = np.square(v_OI).sum(1)
        self.norms2_O = to_device(norms2_O, device)
        self.ones_O = to_device(np.ones_like(norms2_O), device)
        m = []
        for part, b in zip(self.parts, self.lora_b):
            change = part.factor * (as_float32(b) @ as_float32(self.lora_a)[part.ranks])
            m.append(np.linalg.norm(v_OI[part.columns] + change, axis=1))
        self.magnitudes.data = to_device(np.concatenate(m), device)

    def _storage(self, prefix):
        packed = "weight" not in self.linear.weight.parts
        path = prefix[: prefix[:-1].rfind(".") + 1] if packed else prefix
        yield from self.linear._storage(prefix)
        for parameter in (self.lora_a, *self.lora_b, self.magnitudes, self.own_bias):
            if parameter is not None:
                yield path, parameter


class LoraEmbedding(Embedding):
    """An Embedding, frozen, with an adapter, whose a is 0 at first, as in PEFT."""

    on = True

    def __init__(self, embedding: Embedding, lora: Lora):
        self.weight = embedding.weight
        C = self.weight.shape[1]
        rows = sum(self.weight.parts.values())
        r, self.factor = lora.ranks.of("model.embed_tokens")
        self.lora_a = Parameter((r, rows), 0.0, {"lora_embedding_A": r})
        self.lora_b = Parameter((C, r), 1.0, {"lora_embedding_B": C})

    def __call__(self, ids_N: Array) -> Tensor:
        if not self.on:
            return F.embedding(ids_N, self.weight)
        table = F.adapted_matrix(self.weight, self.lora_a, self.lora_b, self.factor, True)
        return F.embedding(ids_N, table)


@dataclass(frozen=True)
class Copied:
    """A Parameter of the frozen model, `attribute` of a module, and what is trained in its place."""

    module: Module
    attribute: str
    frozen: Parameter
    trained: Parameter


class AdaptedTransformer(Transformer):
    """A frozen Transformer with adapters, its only parameters after `adapt`.

    Make it with trainable=False.

    lora: what `adapt` was given, None before.
    frozen: {name: shape} of the model's own parameters, after `adapt`.
    """

    lora: Lora | None = None
    frozen: dict[str, tuple[int, ...]]
    head_a: Parameter | None = None  # of an adapter of the head
    on = True

    def adapt(self, lora: Lora, seed: int | None = 0, world: int = 1) -> None:
        """Add adapters, which change nothing yet.

        seed: of their initialisation; None: they are zero.
        world: see nn.Arena.
        """
        self._check(lora)
        if lora.modules.issuperset(self._matrices(lora.targets)):
            lora = replace(lora, modules=frozenset())
        self.frozen = shapes_of(self)
        self.base_arena = self.arena
        base = dict(self.named_parameters()) if lora.init == PISSA else {}
        old = {id(parameter) for _, parameter in self.storage()}
        self.copied: list[Copied] = []
        matrices = self._add_adapters(lora)
        self._copy_trained(lora)
        frozen = old - {id(copied.trained) for copied in self.copied}
        self.trained = {id(p) for _, p in super()._storage("")} - frozen
        self.lora = lora
        device, bf16, *_ = self.arena.kind
        self.arena = self.make_arena(device, seed, bf16, world)
        for copied in self.copied:
            copied.trained.data = to_device(as_float32(copied.frozen), device)
        if base:
            self._take_principal(lora.ranks, base)
        for adapted in matrices:
            adapted.start(device)

    def check_patterns(self, ranks: Ranks) -> None:
        """Raise UserError if a pattern of ranks or alphas fits no matrix that has adapters."""
        names = [
            re.sub(r"\.lora_(embedding_)?A.*", "", name) for name, _ in self.named_parameters()
        ]
        if unused := ranks.unused(names):
            raise UserError(
                f"{unused[0]!r} of --lora-rank-pattern or --lora-alpha-pattern fits no matrix with "
                "adapters: give the end of its name, such as q_proj"
            )

    def _check(self, lora: Lora) -> None:
        """Raise UserError for options that this model does not allow."""
        inside = [name for name in lora.targets if name in EXPERT_MATRICES]
        if self.config.n_experts and inside and (lora.dora or lora.init == PISSA):
            others = " ".join(name for name in TARGETS if name not in EXPERT_MATRICES)
            raise UserError(
                f"the matrices of experts cannot have {'DoRA' if lora.dora else 'PiSSA'}, but the "
                f"targets are {', '.join(inside)}: leave it out, or give --lora-targets {others}"
            )
        tables = [x for x in TABLES if x in lora.targets or name_ends(x, lora.modules_to_save)]
        if tables and self.config.tie_embeddings:
            raise UserError(
                f"embedding and head are one matrix in this model, which training {tables[0]} "
                "would divide: leave it out"
            )
        if lora.init == PISSA and any(x.quantized is not None for _, x in self.storage()):
            raise UserError(
                "PiSSA is not supported with quantized --weights: leave one of them out"
            )
        names = [path.rstrip(".") for path, _ in self.storage() if is_norm(f"{path}weight")]
        saved = [name for name in names if name_ends(name, lora.modules_to_save)]
        if saved and huggingface.offset_of_norms(self):
            raise UserError(
                "the norms of a Gemma cannot be trained with adapters, whose files hold them minus "
                "1: leave them out of --lora-modules-to-save"
            )

    def _linears(self) -> Iterator[tuple[str, Module, str, Linear]]:
        """Yield path, module, name and Linear of the blocks."""
        for path, module in list(self.modules()):
            for name, item in vars(module).items():
                if path.startswith("model.layers.") and type(item) is Linear:
                    yield path, module, name, item

    def _mixtures(self) -> Iterator[tuple[str, Module, str, MixtureOfExperts]]:
        """Yield path, module, name and mixture of the blocks that have experts."""
        for path, module in list(self.modules()):
            for name, item in vars(module).items():
                if type(item) is MixtureOfExperts:
                    yield f"{path}{name}.", module, name, item

    def _matrices(self, targets: Sequence[str]) -> Iterator[str]:
        """Yield the names of the matrices of the blocks that are targets."""
        for path, _, _, mixture in self._mixtures():
            for matrix in filter(EXPERT_MATRICES.__contains__, targets):
                yield from mixture.matrix_names(path, matrix)
        for path, _, name, item in self._linears():
            for part in item.weight.parts:
                matrix = part.removesuffix("weight").removesuffix(".") or name
                if matrix in targets:
                    yield path + matrix

    def _add_adapters(self, lora: Lora) -> list[LoraLinear]:
        """Put adapters on the targets, and return those of the blocks."""
        matrices = [
            (module, name, LoraLinear(item, path, name, lora))
            for path, module, name, item in self._linears()
        ]
        matrices = [item for item in matrices if item[2].parts]
        for module, name, adapted in matrices:
            setattr(module, name, adapted)
        experts = self._add_to_experts(lora)
        if "embed_tokens" in lora.targets:
            self.model.embed_tokens = LoraEmbedding(self.model.embed_tokens, lora)
        if "lm_head" in lora.targets:
            r, self.head_factor = lora.ranks.of("lm_head")
            V, C = self.config.vocab_size, self.config.dim
            self.head_a = Parameter((r, C), (3 * C) ** -0.5, {"lm_head.lora_A.weight": r})
            self.head_b = Parameter((V, r), 0.0, {"lm_head.lora_B.weight": V})
        if not matrices and not experts and not set(TABLES).intersection(lora.targets):
            raise UserError(
                f"no matrix of the changed model is named {' or '.join(lora.targets)}: choose "
                "other --lora-targets"
            )
        return [adapted for *_, adapted in matrices]

    def _add_to_experts(self, lora: Lora) -> bool:
        """Put adapters on the targets that are matrices of experts. Return True if there are some."""
        added = False
        for path, module, name, mixture in list(self._mixtures()):
            if targets := self._targets_of_experts(lora, path, mixture):
                setattr(module, name, LoraExperts(mixture, path, targets, lora.ranks))
                added = True
        return added

    def _targets_of_experts(
        self, lora: Lora, path: str, mixture: MixtureOfExperts
    ) -> tuple[str, ...]:
        """Return the matrices that have adapters, of all experts. Raises UserError if only some
        experts have them."""
        targets = []
        for matrix in EXPERT_MATRICES:
            names = mixture.matrix_names(path, matrix)
            adapted = [name for name in names if lora.adapts(*_divided(name))]
            if 0 < len(adapted) < len(names):
                raise UserError(
                    f"only {len(adapted)} of the {len(names)} experts of {path.rstrip('.')} have "
                    f"adapters of {matrix}, which can be merged, not trained further: merge them "
                    "with `xtrain export --merge`, and train new ones"
                )
            if adapted:
                targets.append(matrix)
        return tuple(targets)

    def _copy_trained(self, lora: Lora) -> None:
        """Put new parameters in place of those that are trained whole."""
        found = set()
        inner = set()  # Linears inside a LoraLinear
        for path, module in list(self.modules()):
            if isinstance(module, LoraLinear):
                inner.add(module.linear)
                if lora.bias == "all" and module.linear.bias is not None:
                    self._copy(module.linear, "bias", module.adapted_names())
            elif isinstance(module, Linear):
                if lora.bias == "all" and module.bias is not None and module not in inner:
                    self._copy(module, "bias")
            elif module is self or isinstance(module, (Embedding, RMSNorm)):
                for attribute, item in list(vars(module).items()):
                    name = attribute if module is self else path.rstrip(".")
                    ends = [end for end in lora.modules_to_save if name.endswith(end)]
                    if isinstance(item, Parameter) and ends:
                        self._copy(module, attribute)
                        found.update(ends)
        if missing := set(lora.modules_to_save) - found:
            raise UserError(
                f"the model has no module {sorted(missing)[0]!r} that is trained whole: choose "
                "embed_tokens, lm_head or norms for --lora-modules-to-save"
            )

    def _copy(self, module: Module, attribute: str, adapted: Sequence[str] = ()) -> None:
        """adapted: beginnings of the names of parts that have adapters, "q_proj."."""
        frozen = getattr(module, attribute)
        parts = {}
        for name, rows in frozen.parts.items():
            start = name.removesuffix("bias")
            parts[f"{start}base_layer.bias" if start in adapted else name] = rows
        trained = Parameter(frozen.declared_shape, frozen.std, parts)
        setattr(module, attribute, trained)
        self.copied.append(Copied(module, attribute, frozen, trained))

    def _take_principal(self, ranks: Ranks, base: Mapping[str, Tensor]) -> None:
        """Start as PiSSA: move the largest singular values of each matrix to its adapter."""
        device = self.arena.kind[0]
        trained = dict(self.named_parameters())
        for name, a in trained.items():
            if not name.endswith(A):
                continue
            module = name.removesuffix(A)
            w = base[f"{module}.weight"]
            r, factor = ranks.of(module)
            values = to_numpy(w.data).astype(np.float32)
            if r > min(values.shape):
                raise UserError(
                    f"PiSSA of {module} needs a rank of at most {min(values.shape)}, got {r}: give "
                    "a smaller one"
                )
            a_rI, b_Or = principal_factors(values, r)
            a.data = to_device(a_rI * np.float32(factor**-0.5), device)
            trained[module + B].data = to_device(b_Or * np.float32(factor**-0.5), device)
            w.data = to_device((values - b_Or @ a_rI).astype(w.dtype), device)

    @contextlib.contextmanager
    def without_adapters(self) -> Iterator[None]:
        """Compute with the frozen model alone inside this context; after PiSSA it is not the one
        that was read."""
        kinds = LoraLinear, LoraEmbedding, LoraExperts
        adapted = [module for _, module in self.modules() if isinstance(module, kinds)]
        self._switch(adapted, on=False)
        try:
            yield
        finally:
            self._switch(adapted, on=True)

    def _switch(self, adapted: list[Any], on: bool) -> None:
        self.on = on
        for module in adapted:
            module.on = on
        for copied in self.copied:
            setattr(copied.module, copied.attribute, copied.trained if on else copied.frozen)

    def _head(self) -> Any:
        head = super()._head()
        if self.head_a is None or not self.on:
            return head
        v_PC = F.adapted_matrix(head, self.head_a, self.head_b, self.head_factor)
        return F.cast(v_PC, head.value.dtype)

    def _storage(self, prefix: str) -> Iterator[tuple[str, Parameter]]:
        for path, parameter in super()._storage(prefix):
            if self.lora is None or id(parameter) in self.trained:
                yield path, parameter

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
