"""Read and write Hugging Face folders: config.json, safetensors, tokenizer.

Which models and how their configs are read: architectures.py.
"""

import contextlib
import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .. import files
from ..config import ModelConfig
from ..device import to_device
from ..errors import UserError
from ..json_files import is_folder, listed, read_json, read_json_if_present
from . import saved_runs
from .adapters import (
    ADAPTER_CONFIG,
    base_folder,
    is_adapter,
    merged,
    read_adapters,
    source_of,
    write_adapters,
)
from .architectures import (
    CHANGE,
    HEAD,
    SHAPE,
    SPECIAL,
    TABLE,
    VARIATION,
    config_from_hf,
    config_to_hf,
    is_norm,
    norm_offset,
    tensor_shapes,
    translate,
)
from .expert_adapters import file_names
from .expert_files import mixtral_name, one_tensor_each
from .four_bit_files import dequantized
from .generation_config import FILE as GENERATION
from .generation_config import read_generation
from .gguf_tensors import file_of, shown, tensors_of
from .manifest import MANIFEST, WEIGHT_FILES, verify_weights
from .saved_runs import CONFIG
from .tensor_file import DTYPES, Stored, read_header, tensor_bytes, write_safetensors

MAX_SHARD_BYTES = 5 * 10**9  # as in transformers
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
DROPOUT = ("attention_dropout", "resid_pdrop", "embd_pdrop")  # keys of config.json


# ----------------------------------------------------------------------------- reading
def load(
    folder: Path,
    make: Callable[[ModelConfig], Any],
    change: Callable[[Any], Any] | None = None,
    trainable: bool = True,
) -> Any:
    """Load the model in a Hugging Face folder, or in the newest checkpoint of a run, as fp32.

    make: make(config) returns a model of that shape
    change: change(model) returns a variation of it, before the weights are read if they were saved
    with such a change, else afterwards. Then parameters that the folder does not have are new,
    which trainable=False forbids.

    The headers of the files are checked before memory is allocated; in a checkpoint of a run, the
    checksums are checked too. Raises UserError.
    """
    folder = saved_runs.model_folder(Path(folder), _warn)
    identity = folder.stat().st_ino
    content = _content(base_folder(folder))
    saved = content.get(VARIATION)
    if CHANGE in content and change is None:
        raise UserError(
            f"{folder} was changed by {content[CHANGE]}: add --change {content[CHANGE]}, where "
            "that module can be imported"
        )
    config, stored = open_weights(folder, saved is not None)
    model = make(config)
    if saved is None:
        _fill(model, stored)
    if change is not None:
        model = change(model)
    if saved is not None and saved != model.variation:
        raise UserError(_other_variation(folder, saved, model.variation, change is not None))
    if saved is not None or (change is not None and not trainable):
        _check_tensors(folder, config, stored, _shapes_in_file(model, config))
        _fill(model, stored)
    read_companions(model, folder)
    if not is_folder(folder) or folder.stat().st_ino != identity:
        raise UserError(f"{folder} was replaced while it was read: try again")
    return model


def _shapes_in_file(model: Any, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return {name: shape} of a model's tensors in a folder with this config, which may have fewer
    tokens."""
    shapes = shapes_of(model)
    V = model.config.vocab_size
    for name in (TABLE, HEAD):
        if config.vocab_size < V and shapes.get(name, ())[:1] == (V,):
            shapes[name] = (config.vocab_size, *shapes[name][1:])
    return shapes


def _other_variation(folder: Path, saved: str, made: str, changes: bool) -> str:
    if changes:
        return (
            f"{folder} was saved as another model ({saved}) than this change makes "
            f"({made or 'a plain one'}): "
            "give the change with which it was trained"
        )
    return (
        f"{folder / CONFIG} cannot be used: the model is none that other programs know ({saved}): "
        "construct it as for training, "
        "then call model.load_weights(folder); or give the function that changes a plain model "
        "into it with --change"
    )


def open_weights(folder: Path, variation: bool = False) -> tuple[ModelConfig, dict[str, Stored]]:
    """Return the config of a Hugging Face folder, and its tensors without their values.

    variation: also accept a model with a variation, whose tensors the caller then checks

    Raises UserError if the tensors do not fit the config.
    """
    base = base_folder(folder)
    config = read_config(base)
    tensors = _find_tensors(base)
    content = _content(base)
    if base != folder:
        if config.n_experts:
            tensors = one_tensor_each(tensors)
        tensors = merged(tensors, folder, config.tie_embeddings)
        verify_weights(folder)
    stored = translate(content, tensors)
    if not variation:
        if VARIATION in content:
            raise UserError(
                f"{base} holds a model that other programs do not have: {content[VARIATION]}"
            )
        _check_tensors(base, config, stored)
    verify_weights(base)
    return config, stored


def _content(folder: Path) -> dict[str, Any]:
    """Return the content of config.json; {} if there is none."""
    return read_json_if_present(folder / CONFIG)


def shapes_of(model: Any) -> dict[str, tuple[int, ...]]:
    """Return {name: shape} of the parameters."""
    return {
        prefix + suffix: (rows, *parameter.shape[1:])
        for prefix, parameter in model.storage()
        for suffix, rows in parameter.parts.items()
    }


def _warn(sentence: str) -> None:
    warnings.warn(sentence, stacklevel=4)


def read_companions(model: Any, folder: Path) -> None:
    """Set model.special_tokens and model.generation from its folder. Raises UserError."""
    model.special_tokens = read_special_tokens(folder)
    content = read_generation(source_of(folder, GENERATION), source_of(folder, CONFIG))
    model.generation = content and {k: x for k, x in content.items() if k not in SPECIAL}


def read_special_tokens(folder: Path) -> dict[str, Any]:
    """Return bos_token_id, eos_token_id and pad_token_id where the folder has them.

    generation_config.json overrides config.json.
    """
    tokens: dict[str, Any] = {}
    files = (source_of(folder, name) / name for name in (CONFIG, GENERATION))
    for file in filter(Path.is_file, files):
        content = read_json(file)
        tokens |= {key: content[key] for key in SPECIAL if as_ids(content.get(key))}
    return tokens


def as_ids(value: Any) -> frozenset[int]:
    """Return the ids in a token id or a list of them; values that are not ids are ignored."""
    if isinstance(value, list):
        values = value
    else:
        values = [value]
    return frozenset(x for x in values if type(x) is int and x >= 0)


def load_into(model: Any, folder: Path) -> None:
    """Load the weights in a folder into a model, which transformers need not have.

    Raises UserError if they do not fit; the model is then unchanged.
    """
    _fill(model, tensors_for(model, saved_runs.model_folder(Path(folder), _warn)))


def tensors_for(model: Any, folder: Path) -> dict[str, Stored]:
    """Return {name: tensor} of all parameters of the model, from a folder.

    Raises UserError if they do not fit or are not finite.
    """
    if model.adapter is not None and is_adapter(folder):
        stored = _without_copies(folder, read_adapters(folder))
    elif is_adapter(folder):
        stored = open_weights(folder, variation=True)[1]
    else:
        stored = translate(_content(folder), _find_tensors(folder))
    expected = shapes_of(model)
    _check_tensors(folder, model.config, stored, expected)
    for name in expected:
        stored[name].read_finite()
    return stored


def _without_copies(folder: Path, adapters: dict[str, Stored]) -> dict[str, Stored]:
    """Return adapters without the model's own embedding and head, which peft writes next to theirs.
    Raises UserError if these are not the model's."""
    end = ".base_layer.weight"
    copies = [name for name in adapters if name.endswith(end)]
    base = base_folder(folder)
    tensors = _find_tensors(base) if copies else {}
    for name in copies:
        module = name.removesuffix(end)
        own = tensors.get(f"{module}.weight")
        if own is None or not np.array_equal(own.read_finite(), adapters[name].read_finite()):
            raise UserError(
                f"{folder} holds another {module} than its model {base}: write one model with "
                "`xtrain export --merge`, and train new adapters"
            )
    return {name: tensor for name, tensor in adapters.items() if name not in copies}


def _fill(model: Any, stored: dict[str, Stored]) -> None:
    """Copy the stored tensors into the model's parameters."""
    model.scales = {}
    for name, tensor in model.named_parameters():
        values = stored[name].read_finite(tensor.assigned_dtype)
        if new := tensor.shape[0] - len(values):  # tokens that the folder does not have
            values = np.concatenate([values, _new_rows(values, new)])
        tensor.data = to_device(values, model.device)
        if stored[name].scale != 1:
            model.scales[name] = stored[name].scale


def _new_rows(rows_VC: np.ndarray, n: int) -> np.ndarray:
    """Return n rows for new tokens: the mean of the others, which changes their probabilities least
    (Hewitt 2021), and a hundredth of their deviation, so no two are equal. The same each time."""
    rows = rows_VC.astype(np.float32)
    noise = np.random.default_rng(0).standard_normal((n, rows.shape[1]), np.float32)
    return (rows.mean(0) + 0.01 * rows.std(0) * noise).astype(rows_VC.dtype)


def read_config(folder: Path) -> ModelConfig:
    """Return the ModelConfig of a Hugging Face folder, or of its adapters' model.

    Raises UserError.
    """
    folder = source_of(folder, CONFIG)
    if not (folder / CONFIG).is_file():
        hint = "it is not a Hugging Face folder"
        files = [f for f in folder.glob("*.gguf") if not f.name.startswith("mmproj")]
        if files:
            hint = f"give a GGUF file in it, such as {min(files)}"
        raise UserError(f"{folder} has no {CONFIG}: {hint}")
    content = read_json(folder / CONFIG)
    try:
        return config_from_hf(content)
    except UserError as error:
        raise UserError(f"{folder / CONFIG} cannot be used: {error}") from None


def dropout_of(folder: Path) -> str:
    """Return the dropout with which transformers would train a folder's model, or "".

    Example: "attention_dropout 0.1"
    """
    path = source_of(folder, CONFIG) / CONFIG
    content = read_json_if_present(path)
    values = {key: content.get(key) for key in DROPOUT}
    return listed([f"{key} {x!r}" for key, x in values.items() if isinstance(x, float) and x > 0])


def _find_tensors(folder: Path) -> dict[str, Stored]:
    """Return {name: Stored} of model.safetensors, or of the shards in the index, or of a GGUF file.

    Codes of four bits appear as the matrices that they stand for. Raises UserError.
    """
    return dequantized(_content(folder), _tensors_in(folder))


def _tensors_in(folder: Path) -> dict[str, Stored]:
    if (folder / WEIGHTS).is_file():
        return read_header(folder / WEIGHTS)
    if file_of(folder):
        return tensors_of(folder)
    if not (folder / INDEX).is_file():
        other = [f.name for kind in ("bin", "pth", "pt", "gguf") for f in folder.glob(f"*.{kind}")]
        hint = "download them"
        if other:
            hint = f"{other[0]} must be converted to safetensors first"
            if other[0].endswith(".gguf"):
                hint = f"give the file itself, {folder / other[0]}"
        raise UserError(f"{folder} has neither {WEIGHTS} nor {INDEX}: {hint}")
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(map(_is_file_name, weight_map.values())):
        raise UserError(
            f"{folder / INDEX} is damaged: weight_map must give the file of each tensor"
        )
    tensors: dict[str, Stored] = {}
    for file in sorted(set(weight_map.values())):
        if not (folder / file).is_file():
            raise UserError(f"{folder} lacks {file}, which {INDEX} names")
        for name, tensor in read_header(folder / file).items():
            if name in tensors:
                raise UserError(
                    f"{folder} holds {listed([name])} twice: in {tensors[name].path.name} and "
                    f"{file}"
                )
            tensors[name] = tensor
    misplaced = [
        name
        for name, file in weight_map.items()
        if name not in tensors or tensors[name].path.name != file
    ]
    if misplaced:
        raise UserError(f"{folder}: {INDEX} names tensors that the files lack: {listed(misplaced)}")
    return tensors


def _is_file_name(name: Any) -> bool:
    return isinstance(name, str) and name.endswith(".safetensors") and not set(name) & set("/\\:\0")


def _check_tensors(
    folder: Path,
    config: ModelConfig,
    stored: dict[str, Stored],
    expected: dict[str, tuple[int, ...]] | None = None,
) -> None:
    """Raise UserError unless the files hold the expected tensors, and else only biases of zeros.

    expected: {name: shape}; None: those of the config.
    """
    whole = expected is None or len(expected) >= config.n_layers  # not adapters of the tables only
    if whole and config.n_layers > len(stored):
        raise UserError(
            f"{shown(folder)}: {CONFIG} says num_hidden_layers {config.n_layers}, "
            f"the weights hold only {len(stored)} tensors"
        )
    # Older transformers stored the RoPE frequencies, which follow from the config.
    names = {name for name in stored if not name.endswith("rotary_emb.inv_freq")}
    expected = expected or tensor_shapes(config)
    if config.tie_embeddings and HEAD in names:
        _check_tied(folder, stored)
        names.remove(HEAD)
    missing = sorted(expected.keys() - names)
    extra = sorted(n for n in names - expected.keys() if not _adds_nothing(n, stored[n]))
    wrong = [
        f"{name} has shape {stored[name].shape}, expected {shape}"
        for name, shape in expected.items()
        if name in names and stored[name].shape != shape
    ]
    faults = []
    if missing:
        faults = [f"missing tensors: {listed(missing)}"]
    faults += [f"unexpected tensors: {listed(extra)}"] if extra else []
    faults += [f"wrong shapes: {listed(wrong)}"] if wrong else []
    if faults:
        raise UserError(f"{shown(folder)}: the weights do not fit {CONFIG}: {'; '.join(faults)}")


def _adds_nothing(name: str, tensor: Stored) -> bool:
    """Return True for a bias of zeros. AutoGPTQ writes them for matrices that have no bias."""
    return name.endswith(".bias") and not tensor.read().any()


def _check_tied(folder: Path, stored: dict[str, Stored]) -> None:
    """Raise UserError if lm_head.weight differs from the embedding table."""
    head = stored[HEAD]
    table = stored.get(TABLE)
    same = table is None or (
        head.shape == table.shape and np.array_equal(head.read(), table.read(), equal_nan=True)
    )
    if not same:
        raise UserError(
            f"{shown(folder)}: {CONFIG} says tie_word_embeddings, but lm_head.weight differs from the "
            "embedding table"
        )


# ----------------------------------------------------------------------------- writing
@dataclass(frozen=True)
class Converted:
    """A tensor to be written with other values. dtype: of DTYPES. offset: is subtracted before."""

    tensor: Any
    dtype: np.dtype
    offset: float

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    def numpy(self) -> np.ndarray:
        """Return the values, rounded to the nearest. Raises UserError if one is out of range."""
        with np.errstate(over="ignore"):
            values = self.tensor.numpy()
            if self.offset:
                values = values - np.float32(self.offset)
            values = values.astype(self.dtype, copy=False)
        if not np.isfinite(values).all():
            raise UserError(f"a weight is too large for {self.dtype.name}: choose another --dtype")
        return values


def stored_dtype(folder: Path) -> str:
    """Return the dtype that most weights of a Hugging Face folder have: "bfloat16"."""
    sizes: dict[str, int] = {}
    for tensor in _find_tensors(folder).values():
        sizes[tensor.dtype.name] = sizes.get(tensor.dtype.name, 0) + tensor.nbytes
    return max(sizes, key=lambda name: sizes[name])


def save(
    model: Any,
    folder: Path,
    tokenizer: Any = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    dtype: str = "float32",
) -> None:
    """Write a model and its tokenizer as a Hugging Face folder, always with the same bytes.

    tokenizer: an xtrain Tokenizer, or anything with save_pretrained(folder)
    dtype: of the weights: float32, bfloat16 or float16

    Special tokens and generation settings of the folder that the model was read from are written
    again, with the tokenizer's tokens. Files of the same name are replaced, weights of an earlier
    export are removed, other files are kept. All of it changes at once: after an error, a kill or a
    power cut the folder is the old one or the new one.
    Raises UserError if writing fails.
    """
    with replacing(folder) as new:
        write_files(model, new, tokenizer, max_shard_bytes, dtype)


def write_files(
    model: Any,
    folder: Path,
    tokenizer: Any = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    dtype: str = "float32",
) -> None:
    """Write the files of `save` into an existing folder, which the caller removes on failure.

    Raises OSError.
    """
    if tokenizer is not None:
        write = getattr(tokenizer, "save_pretrained", None) or tokenizer.save
        write(folder)
    special_tokens = model.special_tokens
    config = model.saved_config
    for key, i in _special_tokens(tokenizer, config).items():
        if i is not None and i not in as_ids(special_tokens.get(key)):
            special_tokens = special_tokens | {key: i}
    if model.generation is not None:
        (folder / GENERATION).write_bytes(_dump(model.generation | special_tokens))
    if model.adapter is not None:
        tensors = dict(model.named_parameters())
        write_adapters(folder, *file_names(tensors, model.adapter, config))
        return
    content = config_to_hf(config) | special_tokens
    # the names of the tensors may match a Llama's, so other readers must reject the folder
    if model.variation:
        content |= {
            "architectures": ["Variation"],
            "model_type": "xtrain",
            VARIATION: model.variation,
            SHAPE: config.to_dict(),
        }
        content |= {CHANGE: model.change} if model.change else {}
    write_weights(folder, written_tensors(model, dtype), max_shard_bytes, content)


def written_tensors(model: Any, dtype: str = "float32") -> dict[str, Any]:
    """Return {name: tensor} as a model's file has them, sorted by name.

    dtype: as in `save`
    """
    kind = {x.name: x for x in DTYPES.values()}[dtype]
    subtracted = offset_of_norms(model)
    own_names = bool(model.variation)
    tensors = {}
    for name, tensor in model.named_parameters():
        offset = subtracted if is_norm(name) else 0.0
        if offset or dtype != "float32":
            tensor = Converted(tensor, kind, offset)
        if model.saved_config.family == "Mixtral" and not own_names:
            name = mixtral_name(name)
        tensors[name] = tensor
    return dict(sorted(tensors.items()))


def offset_of_norms(model: Any) -> float:
    """Return what is subtracted from a model's norm weights when it is written, else 0."""
    if model.variation or model.adapter is not None:
        return 0.0
    return norm_offset(model.saved_config)


def _special_tokens(tokenizer: Any, config: ModelConfig) -> dict[str, Any]:
    """Return the special token ids for config.json.

    Raises UserError if the tokenizer has more tokens than the model.
    """
    if tokenizer is None:
        return {}
    ids = {key: getattr(tokenizer, key, None) for key in SPECIAL}
    if hasattr(tokenizer, "__len__"):
        size = len(tokenizer)
    else:
        size = tokenizer.vocab_size
    if size > config.vocab_size:
        raise UserError(
            f"the tokenizer has {size} tokens, the model only {config.vocab_size} (vocab_size)"
        )
    return ids


def write_weights(
    folder: Path, tensors: dict[str, Any], max_shard_bytes: int, config: dict[str, Any]
) -> None:
    """Write config.json and the tensors, in shards if needed. Raises OSError."""
    dtype = next(iter(tensors.values())).dtype.name
    (folder / CONFIG).write_bytes(_dump(config | {"dtype": dtype, "torch_dtype": dtype}))
    shards: list[list[str]] = [[]]
    room = max_shard_bytes
    for name, tensor in tensors.items():
        if shards[-1] and tensor_bytes(tensor) > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(name)
        room -= tensor_bytes(tensor)
    if len(shards) == 1:
        write_safetensors(folder / WEIGHTS, tensors)
        return
    weight_map: dict[str, str] = {}
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(folder / file, {name: tensors[name] for name in names})
        weight_map |= dict.fromkeys(names, file)
    total = sum(map(tensor_bytes, tensors.values()))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_bytes(_dump(index))


def _dump(value: Any) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def replacing(folder: str | Path) -> contextlib.AbstractContextManager[Path]:
    """Replace a folder of weights (files.replacing) without keeping those of an earlier export."""
    is_stale = lambda name: name in (MANIFEST, ADAPTER_CONFIG) or WEIGHT_FILES.fullmatch(name)
    return files.replacing(Path(folder).resolve(), is_stale)
