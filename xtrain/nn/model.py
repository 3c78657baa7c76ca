"""The model, from token ids to logits, loss and log-probabilities; reading, writing, changing it.

ids (B, T) -> Decoder (decoder.py): (N, C), N = B T -> head: logits (N, V)
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..config import ModelConfig
from ..device import Array, as_array, has_bf16, has_fp8, is_gpu, resolve_device, to_device
from ..errors import UserError
from ..formats import huggingface
from ..formats.architectures import tensor_shapes
from ..formats.manifest import verify_weights
from ..kernels.cast import BFLOAT16
from ..kernels.cross_entropy import IGNORE, count_targets
from ..kernels.decoding.sampling import UNCHANGED, Sampling
from ..kernels.primitives.tiles import WIDTHS
from ..option_words import own_word
from ..options import described, find_function, name_of
from . import functional as F
from .arena import Arena
from .decoder import MLP, Attention, Block, Decoder, JointNormAttention, SandwichBlock
from .experts import MixtureOfExperts
from .fp8 import HEAD, Fp8Scales, check_tokens
from .generation import generate
from .loss_functions import linear_kept_tokens, linear_top_logprobs
from .mode import is_training
from .modules import STD, Embedding, Linear, Module, Parameter, RMSNorm
from .sequences import PackedSequences, RotaryTables, Sequences
from .sharded_arena import ShardedArena, Share, groups_of_layers
from .tensor import Tensor
from .variation import changed_modules, changed_tensors, listed, overrides, with_layers

Precision = Literal["auto", "fp32", "bf16", "fp8", "float32", "bfloat16"]
STANDARD = (
    Decoder, Block, SandwichBlock, Attention, JointNormAttention, MLP, MixtureOfExperts, Embedding,
    Linear, RMSNorm,
)  # fmt: skip


def bf16_obstacle(device: str, head_dim: int) -> str:
    """Return why a model cannot compute in bf16 there; "" if it can.

    device: "cpu", "gpu", or "sim" for any GPU that supports bf16.
    """
    if device == "cpu":
        return "bf16 is not supported on the CPU"
    if head_dim not in WIDTHS:
        widths = ", ".join(map(str, WIDTHS))
        return f"attention in bf16 supports head_dim {widths}, this model has {head_dim}"
    if device == "gpu" and not has_bf16():
        return "this GPU has no bf16 instructions, which need compute capability 8.0 (Ampere)"
    return ""


def choose_precision(precision: str, device: str, head_dim: int) -> tuple[Any, str]:
    """Return the precision, for "auto" ("bf16", "") or ("fp32", why bf16 is not supported).

    precision: as on the command line, also "bfloat16" and "float32".
    """
    precision = own_word("precision", precision)
    if precision != "auto":
        return precision, ""
    obstacle = bf16_obstacle(device, head_dim)
    return ("fp32" if obstacle else "bf16"), obstacle


class Transformer(Module):
    """The model. Calling it gives logits, `loss` the mean cross-entropy.

    config: its shape.
    seed: of the initialisation; None: all weights are zero, to be loaded. The same seed gives the
        same weights on every device.
    device: "cpu" (NumPy), "gpu" or "cuda" (CuPy), or "auto".
    precision: "fp32", or on a GPU "bf16": activations and a copy of the matrices in bf16; weights,
        their gradients, moments, the residual stream and all sums in float32. "auto", which is the
        default of the commands: bf16 where it is supported. "fp8", for training: as bf16, and the
        products of the blocks on fp8 codes (nn/fp8.py). Needs compute capability 8.9.
    recompute: which activations backward recomputes instead of keeping them (activation
        checkpointing): "none", "attention" (between its matrix products) or "block". May be set at
        any time; changes no bit of any gradient.
    world: the number of ranks among which the arena can be divided (nn.Arena).
    share: None, or with ZeRO-3 which share of the layers is kept (sharded_arena.py); then forward
        and backward run only in a DataParallel.
    trainable: False: for inference: no memory for gradients, and in bf16 none for float32 matrices.

    Attributes:
    arena: all parameters (nn.Arena).
    change: "MODULE:FUNCTION" if `changed` made this model, else "".
    special_tokens: bos_token_id, eos_token_id, pad_token_id of the folder that the model was read
        from.
    adapters: several LoRA adapters, while it is served (serving/adapters.py), or None.
    generation: what else its generation_config.json says, or None. `save_pretrained` writes both.

    Raises UserError when precision or recompute is unknown or the device does not support it.

    To change the model, replace modules (`model.model.layers[3].mlp = MyMLP(config)`) and call
    `renew_arena`, or derive a class and override `logits` or `loss`:
    lessons/howto/change_the_model.md.
    """

    fp8_head = False  # see use_fp8_head
    adapters: Any = None

    def __init__(
        self,
        config: ModelConfig,
        seed: int | None = 0,
        device: str = "cpu",
        precision: Precision = "fp32",
        recompute: Literal["none", "attention", "block"] = "none",
        world: int = 1,
        trainable: bool = True,
        share: Share | None = None,
    ):
        self.config = config
        self.share = share
        self.recompute = recompute
        self.device = device if device == "sim" else resolve_device(device)
        self.precision, _ = choose_precision(precision, self.device, config.head_dim)
        self.model = Decoder(config)
        if not config.tie_embeddings:
            self.lm_head = Parameter(
                (config.padded_vocab_size, config.dim), STD, {"lm_head.weight": config.vocab_size}
            )
        self._check_precision(trainable)
        if recompute not in ("none", "attention", "block"):
            raise UserError(
                f"recompute {recompute!r} is not known: choose none, attention or block"
            )
        self.arena = self.make_arena(self.device, seed, self.precision != "fp32", world, trainable)
        self._renew_fp8()
        self.rotary = RotaryTables(config, self.device)
        self.change = ""
        self.seed = seed or 0
        self.special_tokens: dict[str, Any] = {}
        self.generation: dict[str, Any] | None = None
        self.scales: dict[str, float] = {}  # of parameters that were multiplied when they were read

    def _check_precision(self, trainable) -> None:
        half = self.precision in ("bf16", "fp8")
        if self.precision not in ("fp32", "bf16", "fp8") or (half and self.device == "cpu"):
            raise UserError(
                f"precision {self.precision!r} is not supported on the {self.device}: choose fp32, "
                "or bf16 on a GPU"
            )
        if half and (obstacle := bf16_obstacle(self.device, self.config.head_dim)):
            raise UserError(f"{obstacle}: choose precision fp32")
        if self.precision != "fp8":
            return
        if self.device == "gpu" and not has_fp8():
            raise UserError(
                "this GPU has no fp8 products, which need compute capability 8.9 (Ada): choose "
                "precision bf16"
            )
        if self.config.n_experts:
            raise UserError("precision fp8 is not supported for a mixture of experts: choose bf16")
        if self.share is not None:
            raise UserError("precision fp8 is not supported with --zero 3: choose bf16")
        if not trainable:
            raise UserError(
                "precision fp8 is not supported with adapters (--lora) or for serving: choose bf16"
            )

    def _renew_fp8(self) -> None:
        """Make new fp8 scales, for all matrices of the blocks that are there now."""
        if self.precision == "fp8":
            blocks = [item for item in self.modules() if item[0].startswith("model.layers.")]
            weights = [(name + "weight", m.weight) for name, m in blocks if type(m) is Linear]
            if self.fp8_head:
                weights.append((HEAD, self._head()))
            self.fp8 = Fp8Scales(weights, self.device)

    def use_fp8_head(self) -> None:
        """Compute the products of the head on fp8 codes, too. Call it before training.

        Raises UserError in another precision.
        """
        if self.precision != "fp8":
            raise UserError(
                f"an fp8 head needs precision fp8, this model has {self.precision}: choose fp8, or "
                "leave the head as it is"
            )
        self.fp8_head = True
        self._renew_fp8()

    def new_arena(self, device: str, bf16: bool, world: int, trainable: bool) -> Arena:
        """Do Module.new_arena, or return the arena of this rank's share."""
        if self.share is None:
            return super().new_arena(device, bf16, world, trainable)
        layers = enumerate(self.model.layers)
        layer_of = {p: i for i, layer in layers for _, p in layer.storage()}
        parameters = [p for _, p in self.storage()]
        groups = groups_of_layers([p for p in parameters if p.decay], layer_of)
        vectors = [p for p in parameters if not p.decay]
        return ShardedArena(groups, vectors, device, bf16, self.share)

    def renew_arena(self, seed: int | None = None) -> None:
        """Do Module.renew_arena, by default with the seed of the model; in fp8 with new scales."""
        super().renew_arena(self.seed if seed is None else seed)
        self._renew_fp8()

    def __call__(self, ids: Array) -> Tensor:
        """Return the logits of ids (B, T), whole numbers, NumPy or CuPy: (B, T, V), float32.

        Raises UserError when T > max_seq_len or an id is not in [0, vocab_size). (Ids that are
        already on the GPU are not checked, because reading them would wait for the GPU: an invalid
        id gives NaN logits.)
        """
        ids = self.check_ids(ids, "ids")
        B, T = ids.shape
        logits_BTP = self.logits(self.hidden(ids, self.sequences(B, T))).reshape(B, T, -1)
        return F.narrow(logits_BTP, self.config.vocab_size)

    def loss(
        self,
        ids: Array,
        targets: Array,
        inv_count: Array | None = None,
        starts: Array | None = None,
    ) -> Tensor:
        """Return the mean cross-entropy over the targets that are not -100, in nats; shape ().

        The losses of the routers of a mixture are not part of it: nn/router_losses.py.
        The logits never exist as a whole, and this call already computes their gradient: use
        no_grad if no backward follows. Without any target the loss is 0. Raises UserError like
        calling the model.

        ids, targets: (B, T).
        inv_count: (1,) float32 on the model's device: 1 / the number of targets of the whole batch,
            if this call gets only a part of it.
        starts: (B, T) int32, if the rows hold several documents each: the column at which the
            document of each token begins; it never decreases. Attention then stays in the document,
            and positions count from its start.
        """
        x_NC, targets_N = self._hidden_and_targets(ids, targets, starts)
        vocab_size = self.config.vocab_size
        if inv_count is None:
            inv_count = count_targets(targets_N)
        return F.cross_entropy(self.logits(x_NC), targets_N, vocab_size, inv_count)

    def logprobs(
        self,
        ids: Array,
        targets: Array,
        starts: Array | None = None,
        sampling: Sampling = UNCHANGED,
        kept: Array | None = None,
        entropies: Array | None = None,
    ) -> Tensor:
        """Return the log-probability of each target, (B, T) float32; NaN at -100.

        For a loss of any form: `functional.with_gradient` takes its value and its derivative by
        each, zeros where they are NaN (tuning/prefer.py). In batch-invariant mode the bits are those
        of `Engine(batch_invariant=True)`. Arguments as in `loss`. Raises UserError like calling the
        model, and if a derived class overrides `logits`.

        sampling: of the distribution that tokens are drawn from with these options, instead of the
            model's own: softmax of logits / temperature over the tokens that min-p, top-k and top-p
            keep. The bits are those of `Engine(batch_invariant=True, logprobs_of="sampled")`.
        kept: the kept tokens as `kept_tokens` has returned them, perhaps for other weights; None:
            those of the weights now. They are a constant of the gradient.
        entropies: (B, T) float32 on the device, is filled with the entropies of the same
            distributions, in nats, also at -100. They have no gradient.
        """
        head = self._plain_head()
        x_NC, targets_N = self._hidden_and_targets(ids, targets, starts)
        if kept is not None:
            kept = self._to_device(kept.reshape(targets_N.size, -1))
        vocab_size = self.config.vocab_size
        if entropies is not None:
            entropies = entropies.reshape(-1)
        options = (None, sampling, kept, entropies)
        logprobs_N = F.linear_logprobs(x_NC, head, targets_N, vocab_size, *options)
        return logprobs_N.reshape(*ids.shape)

    def kept_tokens(self, ids: Array, targets: Array, sampling: Sampling) -> Array:
        """Return which tokens `sampling` keeps at each position, and the target: bits, (B, T, W)
        int32 on the device, W = ceil(V / 32). Arguments and errors as in `logprobs`."""
        head = self._plain_head().value
        x_NC, targets_N = self._hidden_and_targets(ids, targets, None)
        vocab_size = self.config.vocab_size
        kept_NW = linear_kept_tokens(x_NC.data, head, targets_N, vocab_size, sampling)
        return kept_NW.reshape(*ids.shape, -1)

    def top_logprobs(
        self, ids: Array, targets: Array, starts: Array | None, top: int
    ) -> tuple[Array, Array]:
        """Return the `top` most likely tokens at each position, (N, top) int32, N = B T, and their
        log-probabilities. top: at most 20. Arguments and errors as in `logprobs`."""
        head = self._plain_head().value
        x_NC, _ = self._hidden_and_targets(ids, targets, starts)
        return linear_top_logprobs(x_NC.data, head, self.config.vocab_size, top)

    def distillation_loss(
        self,
        ids: Array,
        targets: Array,
        inv_count: Array,
        starts: Array | None,
        teacher: tuple[Array, Array],
        weight: float,
        reverse: bool = False,
    ) -> Tensor:
        """Return (1 - weight) `loss` + weight KL; teacher: what its `top_logprobs` returns.

        reverse: of the model to the teacher (kernels/distillation.py). The others as in `loss`.
        """
        head = self._plain_head()
        x_NC, targets_N = self._hidden_and_targets(ids, targets, starts)
        vocab_size = self.config.vocab_size
        return F.linear_distillation(
            x_NC, head, targets_N, *teacher, vocab_size, inv_count, weight, reverse
        )

    def _plain_head(self) -> Parameter:
        """Return the weights of the head. Raises UserError if it is not the only thing between
        hidden and logits."""
        if overrides(self, Transformer, "logits"):
            raise UserError(
                f"{type(self).__name__} overrides `logits`, which logprobs does not call: override "
                "logprobs too"
            )
        return self._head()

    def _hidden_and_targets(self, ids, targets, starts):
        """Check all three. Return hidden (N, C), targets (N,) on the device."""
        ids = self.check_ids(ids, "ids")
        targets = self.check_ids(targets, "targets")
        if targets.shape != ids.shape:
            raise UserError(
                f"targets have shape {targets.shape}, ids {ids.shape}: they must be the same"
            )
        targets_N = self._to_device(targets.reshape(-1))
        if starts is None:
            sequences = self.sequences(*ids.shape)
        else:
            sequences = self.packed_sequences(starts, ids.shape)
        return self.hidden(ids, sequences), targets_N

    def hidden(self, ids: Array, sequences: Sequences | None = None) -> Tensor:
        """Return the output of the last norm for ids (B, T): (N, C), N = B T.

        Raises UserError like calling the model.

        sequences: how the rows divide into sequences, if not into B of T tokens: the engine passes
            its KV cache in it, and ids (N,) that are checked and on the device; then the result has
            the rows that are wanted.
        """
        if sequences is None:
            ids = self.check_ids(ids, "ids")
            sequences = self.sequences(*ids.shape)
        self.arena.refresh()
        if self.fp8 is not None and is_training():
            check_tokens(ids.size)
        return self.model(self._to_device(ids.reshape(-1)), sequences)

    def sequences(self, B: int, T: int) -> Sequences:
        """Return the description of rows that are B sequences of T tokens."""
        local = self.rotary.local(T) if self.rotary.local else None
        return Sequences(B, T, *self.rotary(T), self.branch_dtype, self.recompute, local=local)

    def packed_sequences(self, starts: Array, shape: tuple[int, int]) -> PackedSequences:
        """Return the description of rows of `shape` (B, T) that hold several documents each.

        starts: see `loss`. Raises UserError.
        """
        starts = as_array(starts)
        if starts.shape != shape or starts.dtype.kind not in "iu":
            raise UserError(
                f"starts are {starts.dtype} of shape {starts.shape}, ids of shape {shape}: give "
                "whole numbers of that shape"
            )
        if not is_gpu(starts) and (
            (starts < 0).any()
            or (starts > np.arange(shape[1])).any()
            or (starts[:, 1:] < starts[:, :-1]).any()
        ):
            raise UserError(
                "starts of documents must not decrease along a row, and that of token t must lie "
                "in 0 .. t: give the column at which its document begins"
            )
        if self.config.rope_type == "dynamic" and shape[1] > self.config.max_seq_len:
            raise UserError(
                f"rows of {shape[1]} tokens with several documents are longer than max_seq_len "
                f"{self.config.max_seq_len}, where dynamic RoPE depends on a sequence's length: "
                "give shorter rows"
            )
        starts_BT = self._to_device(starts.astype(np.int32, copy=False))
        return PackedSequences(**vars(self.sequences(*shape)), starts_BT=starts_BT)

    @property
    def branch_dtype(self) -> Any:
        """Return the dtype of everything but the residual stream, if it is another."""
        return None if self.precision == "fp32" else BFLOAT16

    def _head(self) -> Parameter:
        if self.config.tie_embeddings:
            return self.model.embed_tokens.weight
        return self.lm_head

    def logits(self, x_NC: Tensor) -> Tensor:
        """Return (N, padded V) of hidden (N, C).

        float32, also in bf16: small differences between them decide the next token. If a derived
        class overrides it, calling the model, `loss` and `generate` use the new one.
        """
        return F.logits(x_NC, self._head())

    def _to_device(self, array: Array) -> Array:
        if is_gpu(array):
            return array
        return to_device(np.ascontiguousarray(array), self.device)

    def check_ids(self, ids: Array, what: str) -> Array:
        """Return ids (B, T), or targets, as an array. Raises UserError. what: their name in it."""
        c = self.config
        ids = as_array(ids)
        if ids.ndim != 2 or ids.dtype.kind not in "iu":
            raise UserError(
                f"{what} must be whole numbers of shape (B, T), got {ids.dtype} of shape "
                f"{ids.shape}"
            )
        if not ids.size:
            raise UserError(f"{what} of shape {ids.shape} are empty: give at least one token")
        if ids.shape[1] > c.context:
            raise UserError(
                f"{what} have {ids.shape[1]} tokens per sequence, the model supports {c.context} "
                "(max_seq_len): give shorter sequences"
            )
        if is_gpu(ids) and self.device != "gpu":
            raise UserError(
                f"{what} are on the GPU, the model on the CPU: use device='gpu' or {what}.get()"
            )
        if not is_gpu(ids):
            bad = (ids < 0) | (ids >= c.vocab_size)
            allowed = f"0 to {c.vocab_size - 1} (vocab_size is {c.vocab_size})"
            if what == "targets":
                bad &= ids != IGNORE
                allowed += f", or {IGNORE} to ignore a position"
            if bad.any():
                raise UserError(f"{what} hold {int(ids[bad][0])}: give ids from {allowed}")
        return ids

    def generate(
        self,
        ids: Array,
        max_new_tokens: int,
        temperature: float = 0,
        top_k: int | None = None,
        seed: int = 0,
        stop: Iterable[int] = (),
    ) -> Array:
        """Return ids (B, T) or (T,) with max_new_tokens appended to every sequence.

        The whole prefix is recomputed for every token (serving/engine.py has a KV cache). Raises
        UserError when prompt and new tokens exceed max_seq_len, and when a logit is NaN: no token
        is the right one then (the engine ends such a sequence with the reason "nan").

        temperature: 0: take the most likely token; else draw from softmax(logits / temperature).
        top_k: draw among the top_k most likely tokens.
        seed: of the random numbers, a separate stream for every sequence.
        stop: end when every sequence has one of these tokens; what follows it is not cut off.
        """
        return generate(self, ids, max_new_tokens, temperature, top_k, seed, stop)

    @property
    def variation(self) -> str:
        """Return how the model differs from the families that other programs can load, or "".

        The families are config.FAMILIES.
        """
        c = self._config_of_layers()
        differences = []
        if not c.family:
            differences.append(c.features)
        if len(self.model.layers) != c.n_layers:
            differences.append(f"{len(self.model.layers)} layers")
        if len(list(self._storage(""))) > len(list(self.storage())):
            differences.append("parameters in two places")
        for name in ("__call__", "hidden", "logits", "sequences", "packed_sequences"):
            if overrides(self, Transformer, name):
                differences.append(f"{name} of {type(self).__name__}")
        differences += changed_modules(self, Decoder(c), STANDARD)
        if getattr(self.rotary, "config", None) != self.config:
            differences.append("rotary")
        differences = differences or changed_tensors(self, tensor_shapes(c))
        return listed(differences)

    @property
    def saved_config(self) -> ModelConfig:
        """Return the config with which the model is saved.

        It has the number of layers that the model has, where a plain model of it is this one.
        """
        return self.config if self.variation else self._config_of_layers()

    def _config_of_layers(self) -> ModelConfig:
        if self.change:  # which will be applied to the plain model of config again
            return self.config
        return with_layers(self.config, self.model.layers)

    @property
    def adapter(self) -> dict[str, Any] | None:
        """Return None: all weights are the model's own. nn/lora.py: models written as adapters."""
        return None

    def load_weights(self, folder: str | Path) -> None:
        """Read the weights of a folder that `save_pretrained` or a run has written.

        The model may have a `variation`. Raises UserError when names, shapes or checksums do not
        match; the model is then unchanged.
        """
        verify_weights(Path(folder))
        huggingface.load_into(self, Path(folder))

    def save_pretrained(self, folder: str | Path, tokenizer: Any = None) -> None:
        """Write the Hugging Face layout, as the class of the model's family: huggingface.save.

        A model with a `variation` gets a config.json that only load_weights accepts.
        """
        huggingface.save(self, Path(folder), tokenizer)

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        device: str = "cpu",
        precision: Precision = "fp32",
        trainable: bool = True,
        world: int = 1,
        share: Share | None = None,
        change: str | Callable[["Transformer"], "Transformer"] | None = None,
        vocab_size: int | None = None,
    ) -> "Transformer":
        """Read a folder in the Hugging Face layout: huggingface.load.

        Raises UserError when it is not a supported model.

        change: the function that changes the model, see `changed`; also for a folder of a model
            that was changed and trained.
        vocab_size: of the model, if it shall have more tokens than in the folder; their rows of the
            embedding and of the head are near the mean of the others.
        """

        def make(config: ModelConfig) -> "Transformer":
            if vocab_size is not None:
                config = replace(config, vocab_size=max(vocab_size, config.vocab_size))
            return cls(
                config, None, device, precision, world=world, trainable=trainable, share=share
            )

        change_it = None if change is None else lambda model: model.changed(change)
        return huggingface.load(Path(folder), make, change_it, trainable)

    def changed(self, change: str | Callable[["Transformer"], "Transformer"]) -> "Transformer":
        """Change this model in place by a function, which returns it: the commands' --change.

        Raises UserError if there is no such function, or if it fails or returns something else.

        change: the function, or its name MODULE:FUNCTION, which is saved with the model. The name
            of a function that no other program can import is not saved.
        """
        if isinstance(change, str):
            name = change
            function = find_function("--change", change, "my_model:change")
        else:
            name = name_of(change)
            function = change
        kind = type(self)
        config = self.config
        say = f"--change {name or repr(function)}"
        try:
            model = function(self)
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"{say} raised {described(error)}: fix the function") from error
        if model is not self:
            what = "another model"
            if not isinstance(model, Transformer):
                what = type(model).__name__
            raise UserError(f"{say} returned {what}: change the model that it gets, and return it")
        if self.config != config:
            raise UserError(
                f"{say} replaced model.config, by which the plain model is built again: give the "
                "modules another config instead"
            )
        # the function has set __class__: a model with adapters stays one
        if not isinstance(self, kind):
            self.__class__ = type(type(self).__name__, (kind, type(self)), {})
        self.change = name
        return self
