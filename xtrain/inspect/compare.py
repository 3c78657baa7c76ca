"""Compare two implementations of one model, stage by stage in the order of the forward pass, and
find where they diverge."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from rich.console import Console
from rich.table import Table

from ..cli import say
from ..device import Array, to_numpy
from ..errors import UserError
from ..formats.adapters import base_folder, is_adapter
from ..formats.architectures import architecture_of
from ..formats.gguf_tensors import file_of, shown
from ..formats.huggingface import open_weights
from ..formats.saved_runs import model_folder
from ..nn.autograd import no_grad
from ..nn.model import Transformer
from ..nn.observers import Op, observe_ops
from ..option_fields import POSITIONAL


@dataclass(frozen=True)
class CompareConfig:
    """What to compare, and on which tokens."""

    folder: Annotated[Path, POSITIONAL]  # a model in the Hugging Face layout, or a run
    ids: tuple[int, ...] | None = None  # one sequence of token ids
    seed: int = 0  # of the random token ids, used without --ids
    batch: int = 2  # number of random sequences
    length: int | None = None  # tokens in each; none: 32, or the model's longest sequence
    against: Literal["transformers"] = "transformers"  # the other implementation
    tolerance: float = 1e-4  # largest difference, relative to the stage's largest value
    device: Literal["auto", "cpu", "gpu"] = "auto"  # of xtrain; the other one runs on the CPU


@dataclass(frozen=True)
class Difference:
    """Of one stage: the largest absolute difference, and that divided by the largest absolute value
    of the other model."""

    stage: str
    absolute: float
    relative: float


def compare(model: Transformer, other: Any, ids: np.ndarray) -> list[Difference]:
    """Run both models on ids (B, T), T > 1, and return the difference of every stage in order.

    other: a transformers model. Raises UserError when a stage has different shapes. Multipliers
    that xtrain has folded into the weights (formats/architectures.py) act there after the stages
    "embedding" and "attention", and so do Gemma's scale and norm: these stages are then left out.
    """
    with no_grad():
        ours = stages(model, ids)
        theirs = stages_of_transformers(other, ids)
    architecture = architecture_of(other.config.to_dict())
    later = bool(architecture.multipliers) or "sandwich_norms" in architecture.fields
    kept = [x for x in ours if not (later and x.endswith(("embedding", "attention")))]
    return [_difference(name, ours[name], theirs[name]) for name in kept]


def _difference(name, a, b):
    if a.shape != b.shape:
        raise UserError(f"{name}: xtrain returns shape {a.shape}, the other model {b.shape}")
    absolute = np.abs(a.astype(np.float64) - b).max()
    relative = absolute / max(np.abs(b).max(), np.finfo(np.float32).tiny)
    return Difference(name, float(absolute), float(relative))


def first_divergence(differences: list[Difference], tolerance: float) -> Difference | None:
    """Return the first stage whose relative difference exceeds the tolerance or is NaN, or None."""
    return next((d for d in differences if not d.relative <= tolerance), None)


# ----------------------------------------------------------------------------- the output of each stage
def stages(model: Transformer, ids: np.ndarray) -> dict[str, np.ndarray]:
    """Return {stage: output} of one forward pass of xtrain.

    Shapes: (B, T, C), logits (B, T, V), loss ()
    """
    outputs: dict[str, np.ndarray] = {}
    attended: set[str] = set()  # layers whose attention output is not in the residual stream yet

    def keep(name: str, array: Array) -> None:
        outputs[name] = to_numpy(array).reshape(*ids.shape, -1).copy()

    @contextlib.contextmanager
    def observer(op: Op) -> Iterator[None]:
        yield
        if op.name == "Embedding":
            keep("embedding", op.outputs[0])
        elif op.layer and op.name == "Attention":
            attended.add(op.layer)
        elif op.layer in attended and op.name in ("AddNormLinear", "ResidualRMSNorm", "Add"):
            if op.inputs[1] is not None:  # (h, delta, ...): what the attention adds to the stream
                attended.remove(op.layer)
                keep(f"{op.layer} attention", op.inputs[1])
        elif op.layer and not op.name:
            # a layer returns the residual stream and the branch output that still has to be added
            # to it
            keep(f"{op.layer} output", sum(op.outputs[1:], op.outputs[0]))

    with observe_ops(observer):
        x_NC = model.hidden(ids)
    keep("final norm", x_NC.data)
    keep("logits", model.logits(x_NC).data[:, : model.config.vocab_size])
    outputs["loss"] = to_numpy(model.loss(ids, next_tokens(ids)).data)
    return outputs


def next_tokens(ids: np.ndarray) -> np.ndarray:
    """Return the targets (B, T): each token's successor, and -100 (ignored) for the last."""
    return np.concatenate([ids[:, 1:], np.full_like(ids[:, :1], -100)], axis=1)


def stages_of_transformers(other: Any, ids: np.ndarray) -> dict[str, np.ndarray]:
    """Return the same stages of a transformers model, taken by its forward hooks."""
    import torch

    outputs: dict[str, np.ndarray] = {}
    handles = []

    def keep(name, module):
        def hook(_module, _inputs, out):
            outputs[name] = (out[0] if isinstance(out, tuple) else out).detach().numpy().copy()

        handles.append(module.register_forward_hook(hook))

    keep("embedding", other.model.embed_tokens)
    for i, layer in enumerate(other.model.layers):
        keep(f"layer {i} attention", layer.self_attn)
        keep(f"layer {i} output", layer)
    keep("final norm", other.model.norm)
    try:
        tokens = torch.from_numpy(ids)
        with torch.no_grad():
            out = other(input_ids=tokens, labels=tokens)  # it shifts the labels itself
    finally:
        for handle in handles:
            handle.remove()
    return outputs | {"logits": out.logits.numpy(), "loss": out.loss.numpy()}


def load_transformers(folder: Path) -> Any:
    """Load the folder as a transformers model: fp32, eager attention and experts, on the CPU.

    A GGUF file is read, and dequantized, by transformers itself. Raises UserError.
    """
    try:
        import torch
        import transformers
    except ImportError as error:
        raise UserError(
            f"comparing needs torch and transformers, and {error.name} is not installed: pip "
            "install torch transformers"
        ) from None
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    file = file_of(folder)
    options = {"dtype": torch.float32, "attn_implementation": "eager", "local_files_only": True}
    if is_adapter(folder) and file_of(base_folder(folder)):
        raise UserError(
            f"{folder} holds adapters of a GGUF file, which transformers cannot read: merge them "
            "with `xtrain export --merge`, and compare that folder"
        )
    try:
        if file is not None:
            # its own reading of the metadata lacks the width of an expert
            config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
            options |= {"gguf_file": str(file), "config": config}  # beside it may be other models
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    except Exception as error:  # transformers raises many types of errors
        reason = str(error).strip().replace("\n", " ")[:300]
        raise UserError(f"transformers cannot load {shown(folder)}: {reason}") from None
    if hasattr(model, "set_experts_implementation"):  # transformers 5
        model.set_experts_implementation("eager")  # grouped products refuse odd widths
    return model


# ----------------------------------------------------------------------------- command line
def run(config: CompareConfig, console: Console) -> bool:
    """Compare, print the table, and return True if the two agree. Raises UserError."""
    folder = model_folder(config.folder, say)
    open_weights(folder)  # refuses a changed model, which transformers does not have
    model = Transformer.from_pretrained(folder, config.device)
    ids = _ids(config, model)
    differences = compare(model, load_transformers(folder), ids)
    first = first_divergence(differences, config.tolerance)
    table = Table("stage", "largest difference", "relative", "agrees", box=None)
    for d in differences:
        agrees = "[bold]NO[/]"
        if d.relative <= config.tolerance:
            agrees = "yes"
        table.add_row(d.stage, f"{d.absolute:.2e}", f"{d.relative:.2e}", agrees)
    console.print(table)
    what = f"{ids.shape[0]} x {ids.shape[1]} tokens, xtrain ({model.device}) and {config.against}"
    if first is None:
        console.print(f"{what}: no stage differs by more than {config.tolerance:g}", soft_wrap=True)
    else:
        console.print(
            f"{what} diverge at [bold]{first.stage}[/]: "
            f"{first.relative:.2e} relative, more than {config.tolerance:g}",
            soft_wrap=True,
        )
    return first is None


def _ids(config, model):
    V, longest = model.config.vocab_size, model.config.context
    if config.ids is not None:
        ids = np.array([config.ids], np.int64)
    else:
        if config.length is None:
            length = min(32, longest)
        else:
            length = config.length
        if config.batch < 1 or length < 2:
            raise UserError("--batch must be at least 1 and --length at least 2")
        ids = np.random.default_rng(config.seed).integers(0, V, (config.batch, length))
    if not (2 <= ids.shape[1] <= longest and ids.min() >= 0 and ids.max() < V):
        raise UserError(
            f"the model supports 2 to {longest} tokens per sequence, and ids from 0 to {V - 1}"
        )
    return ids
