"""Convert Meta's Llama checkpoints to the Hugging Face layout.

    SOURCE    consolidated.00.pth, consolidated.01.pth, ... and params.json
    TARGET    config.json, model.safetensors (or shards and an index)

Three things differ.

Names.      layers.0.attention.wq.weight is model.layers.0.self_attn.q_proj.weight, and so on.
Shards.     Each file holds the shard of one GPU in Megatron's tensor parallelism (Shoeybi et al.
            2019): layers divided by outputs are joined by rows, layers divided by inputs by
            columns; norms are the same in every file.
Rotation.   Meta rotates neighbours (x_0, x_1), (x_2, x_3), ..., Hugging Face rotates the halves
            (x_r, x_{r+D/2}) of a head. To keep the rotation the same, the rows of wq and wk are
            reordered: row 2r + i of a head becomes row i D/2 + r.

The dtype is kept. Only weights are read, never pickled code (torch.load with weights_only=True, in a
version of torch that keeps this promise). The checksums of the files are checked here: torch.load ignores them.
"""

import functools
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import ml_dtypes
import numpy as np
import tyro

from ..config import ModelConfig
from ..data.tokenizer import COMPANION_FILES
from ..errors import UserError
from ..json_files import is_folder, listed, read_json
from .architectures import config_to_hf, tensor_shapes
from .huggingface import GENERATION, MAX_SHARD_BYTES, replacing, write_weights
from .tensor_file import DTYPES

ROWS, COLUMNS, SAME = 0, 1, None  # the axis along which the shards of a tensor are joined
LAYER = {  # Meta's name -> (Hugging Face's name, axis)
    "attention.wq": ("self_attn.q_proj", ROWS),
    "attention.wk": ("self_attn.k_proj", ROWS),
    "attention.wv": ("self_attn.v_proj", ROWS),
    "attention.wo": ("self_attn.o_proj", COLUMNS),
    "feed_forward.w1": ("mlp.gate_proj", ROWS),
    "feed_forward.w2": ("mlp.down_proj", COLUMNS),
    "feed_forward.w3": ("mlp.up_proj", ROWS),
    "attention_norm": ("input_layernorm", SAME),
    "ffn_norm": ("post_attention_layernorm", SAME),
}
LEAST_TORCH = (2, 6)  # before, a file could run code in spite of weights_only (CVE-2025-32434)
CHECKED_AT_ONCE = 1 << 20  # bytes
EMBEDDING, HEAD, NORM = "tok_embeddings.weight", "output.weight", "norm.weight"
LLAMA3_VOCABULARY = 128_000  # a vocabulary of at least this size is Llama 3's
# Missing in params.json. Source: the configs that Meta published with its Hugging Face releases.
LLAMA3_SCALING: dict[str, Any] = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@dataclass(frozen=True)
class Options:
    """Turn a folder of Meta's consolidated.*.pth and params.json into the Hugging Face layout."""

    source: Annotated[str, tyro.conf.Positional]  # folder with consolidated.*.pth and params.json
    target: Annotated[str, tyro.conf.Positional]  # folder to write
    # context length, which params.json lacks; none: 4096 for Llama 2, 8192 for 3, 131072 from 3.1 on
    max_seq_len: int | None = None
    # of Llama 3.1's RoPE scaling, if params.json lacks it; none: 8, or 32 if dim < 4096
    rope_factor: float | None = None


@dataclass(frozen=True)
class Tensor:
    """A tensor to write; `make` joins its shards when the tensor is written."""

    shape: tuple[int, ...]
    dtype: np.dtype
    make: Callable[[], np.ndarray]

    def numpy(self) -> np.ndarray:
        """The complete tensor, joined from its shards."""
        return self.make()


def convert(options: Options) -> ModelConfig:
    """Write options.target. -> the model's config. Raises UserError; nothing is written then."""
    if options.max_seq_len is not None and options.max_seq_len < 1:
        raise UserError(f"--max-seq-len {options.max_seq_len} must be a positive number of tokens")
    if not options.source or not options.target:  # "$UNSET": Path("") would be the current folder
        raise UserError("the name of a folder is empty: give SOURCE and TARGET")
    source = Path(options.source)
    params = read_params(source)
    shards = read_shards(source)
    config = read_config(params, shards, options)
    tensors = dict(sorted(make_tensors(config, shards).items()))
    with replacing(options.target) as new:
        write_weights(new, tensors, MAX_SHARD_BYTES, config_to_hf(config))
        for file in ("tokenizer.json", *COMPANION_FILES, GENERATION):
            if (source / file).is_file():
                shutil.copyfile(source / file, new / file)
    return config


# ----------------------------------------------------------------------------- reading
def read_params(folder: Path) -> dict[str, Any]:
    """The content of params.json. Raises UserError."""
    if not is_folder(folder):
        raise UserError(
            f"{folder} is not a folder: give one with params.json and consolidated.*.pth"
        )
    if not (folder / "params.json").is_file():
        raise UserError(f"{folder} has no params.json: it is not a checkpoint from Meta")
    return read_json(folder / "params.json")


def read_shards(folder: Path) -> list[dict[str, Any]]:
    """-> one {name: memory-mapped torch tensor} per consolidated.*.pth. Raises UserError."""
    try:
        import torch
    except ImportError:
        raise UserError(
            "reading .pth files needs PyTorch: pip install torch --index-url https://download.pytorch.org/whl/cpu"
        ) from None
    if tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < LEAST_TORCH:
        raise UserError(
            f"PyTorch {torch.__version__} may run code that is hidden in a .pth file: "
            f"install version {'.'.join(map(str, LEAST_TORCH))} or later"
        )
    files = sorted(p for p in folder.glob("consolidated.*.pth") if p.is_file())
    numbers = [re.fullmatch(r"consolidated\.(\d+)\.pth", file.name) for file in files]
    if not files or [m and int(m[1]) for m in numbers] != list(range(len(files))):
        raise UserError(
            f"{folder} must contain consolidated.00.pth, .01 and so on without a gap, it has: "
            f"{listed([file.name for file in files]) or 'none'}"
        )
    shards = []
    for file in files:
        check_archive(file)
        try:
            shard = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except PermissionError as error:
            raise UserError(f"{file} cannot be read: {error.strerror}") from None
        # torch raises many types of errors, also for objects that it does not unpickle
        except Exception as error:
            raise UserError(
                f"{file} is damaged or holds more than weights: {_reason(error)}"
            ) from None
        if not isinstance(shard, dict) or not all(
            isinstance(k, str) and torch.is_tensor(v) for k, v in shard.items()
        ):
            raise UserError(f"{file} must hold tensors by name, and nothing else")
        shard = {k: v for k, v in shard.items() if k != "rope.freqs"}  # follows from theta
        for name, tensor in shard.items():
            _check_values(name, tensor)
        shards.append(shard)
    if any(shard.keys() != shards[0].keys() for shard in shards):
        raise UserError(
            f"the files in {folder} hold different tensors: give the files of one checkpoint"
        )
    return shards


def check_archive(file: Path) -> None:
    """Raises UserError unless a .pth file is a zip archive, as torch.save writes it, whose checksums are right."""
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
                raise zipfile.BadZipFile("torch.save does not compress its entries")
            if len(archive.NameToInfo) < len(entries):
                raise zipfile.BadZipFile("two entries have the same name")
            for entry in entries:
                with archive.open(entry) as content:
                    while content.read(CHECKED_AT_ONCE):  # raises BadZipFile at the end
                        pass
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror or error}") from None
    except Exception as error:  # zipfile raises many types for damaged headers
        raise UserError(f"{file} is damaged or holds more than weights: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    return listed([str(error).strip().split("\n")[0] or type(error).__name__], longest=200)


def _check_values(name: str, tensor: Any) -> None:
    """Raises UserError unless a torch tensor is an ordinary array of a dtype that xtrain reads."""
    import torch

    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in {d.name for d in DTYPES.values()}:
        raise UserError(
            f"{listed([name])} is stored as {dtype}, xtrain reads float32, float16 and bfloat16"
        )
    dense = tensor.layout == torch.strided and not tensor.is_nested and tensor.device.type == "cpu"
    # a view with stride 0 claims more elements than the file has
    if not dense or tensor.numel() * tensor.itemsize > tensor.untyped_storage().nbytes():
        raise UserError(f"{listed([name])} is not stored as an array of {tuple(tensor.shape)}")


def read_config(params: dict, shards: list[dict], options: Options) -> ModelConfig:
    """ModelConfig from params.json, and from the shapes of the tensors where params.json lacks a value. Raises UserError."""
    file = Path(options.source) / "params.json"
    missing = [key for key in ("dim", "n_layers", "n_heads", "norm_eps") if params.get(key) is None]
    if missing:
        raise UserError(f"{file} lacks {', '.join(missing)}")
    unsupported = sorted(
        {"moe", "lora_args", "quantization_args", "vision_chunk_size"} & params.keys()
    )
    if unsupported:
        raise UserError(f"{file} needs {', '.join(unsupported)}, which xtrain does not support")
    dim, n = params["dim"], len(shards)
    table, gate = (shards[0].get(name) for name in (EMBEDDING, "layers.0.feed_forward.w1.weight"))
    if table is None or gate is None or table.ndim != 2 or gate.ndim != 2:
        raise UserError(f"{options.source} lacks {EMBEDDING} or layers.0.feed_forward.w1.weight")
    vocab_size = table.shape[0] * (n if table.shape[1] == dim else 1)
    scaling = read_scaling(params, options)
    length = options.max_seq_len
    if length is None:
        length = 131072 if scaling else 8192 if vocab_size >= LLAMA3_VOCABULARY else 4096
    try:
        return ModelConfig(
            vocab_size=vocab_size,
            dim=dim,
            n_layers=params["n_layers"],
            n_heads=params["n_heads"],
            n_kv_heads=_given(params, "n_kv_heads", params["n_heads"]),
            hidden_dim=gate.shape[0] * n,
            max_seq_len=length,
            rope_theta=_given(params, "rope_theta", 10000.0),
            rope_scaling=scaling,
            norm_eps=params["norm_eps"],
            qk_norm=False,
            tie_embeddings=HEAD not in shards[0] or _equal(shards, HEAD, EMBEDDING),
        )
    except UserError as error:
        raise UserError(f"{file} cannot be used: {error}") from None


def read_scaling(params: dict, options: Options) -> dict[str, Any] | None:
    """rope_scaling for config.json: Llama 3.1's if params.json has use_scaled_rope, else None."""
    factor = options.rope_factor
    if not params.get("use_scaled_rope"):
        if factor is not None:
            raise UserError(
                f"--rope-factor {factor}: params.json in {options.source} has no use_scaled_rope"
            )
        return None
    if factor is None:
        large = isinstance(params["dim"], int) and params["dim"] >= 4096
        factor = _given(params, "rope_scaling_factor", 8.0 if large else 32.0)
    high = _given(params, "rope_high_freq_factor", LLAMA3_SCALING["high_freq_factor"])
    return LLAMA3_SCALING | {"factor": factor, "high_freq_factor": high}


def _given(params: dict[str, Any], key: str, default: Any) -> Any:
    return default if params.get(key) is None else params[key]


def _equal(shards: list[dict], a: str, b: str) -> bool:
    return all(s[a].shape == s[b].shape and bool((s[a] == s[b]).all()) for s in shards)


# ----------------------------------------------------------------------------- joining
def meta_names(config: ModelConfig) -> Iterator[tuple[str, str, int | None]]:
    """Yield (Meta's name, Hugging Face's name, axis along which the shards are joined)."""
    yield EMBEDDING, "model.embed_tokens.weight", ROWS
    yield NORM, "model.norm.weight", SAME
    if not config.tie_embeddings:
        yield HEAD, "lm_head.weight", ROWS
    for i in range(config.n_layers):
        for theirs, (name, axis) in LAYER.items():
            yield f"layers.{i}.{theirs}.weight", f"model.layers.{i}.{name}.weight", axis


def make_tensors(config: ModelConfig, shards: list[dict]) -> dict[str, Tensor]:
    """-> {Hugging Face name: tensor}. Raises UserError if names, shapes or dtypes do not fit the config."""
    if config.n_layers * len(LAYER) > len(shards[0]):
        raise UserError(
            f"params.json says n_layers {config.n_layers}, the files hold only {len(shards[0])} tensors"
        )
    names = list(meta_names(config))
    expected = {theirs for theirs, _, _ in names} | ({HEAD} if HEAD in shards[0] else set())
    missing, extra = sorted(expected - shards[0].keys()), sorted(shards[0].keys() - expected)
    faults = [f"missing tensors: {listed(missing)}"] if missing else []
    faults += [f"unexpected tensors: {listed(extra)}"] if extra else []
    if faults:
        raise UserError(f"the files do not fit params.json: {'; '.join(faults)}")
    shapes = tensor_shapes(config)
    return {
        name: _tensor(config, shards, theirs, shapes[name], axis) for theirs, name, axis in names
    }


def _tensor(
    config: ModelConfig,
    shards: list[dict[str, Any]],
    theirs: str,
    shape: tuple[int, ...],
    axis: int | None,
) -> Tensor:
    """One tensor to write. theirs: Meta's name. shape: of the complete tensor. Raises UserError."""
    own, heads = [shard[theirs] for shard in shards], None
    sizes = {tuple(p.shape) for p in own}
    misfit = UserError(
        f"{theirs}: shards of shapes {listed(sorted(map(str, sizes)))} do not make up {shape}"
    )
    if any(len(size) != len(shape) for size in sizes):
        raise misfit
    if theirs == EMBEDDING and own[0].shape[1] != config.dim:
        axis = COLUMNS  # Llama 2 divided the embedding by columns, Llama 3 by rows
    # if there are more files than key heads, some files hold the same head
    if "wk" in theirs or "wv" in theirs:
        copies = sum(p.shape[0] for p in own) // shape[0]
        own = own[::copies] if copies > 1 else own
    dtypes = {str(p.dtype).removeprefix("torch.") for p in own}
    joined = list(next(iter(sizes)))
    if axis is not SAME:
        joined[axis] *= len(own)
    if len(sizes) > 1 or tuple(joined) != shape:
        raise misfit
    if len(dtypes) > 1:
        raise UserError(f"{theirs} is stored as {listed(sorted(dtypes))}: give files of one dtype")
    if "wq" in theirs or "wk" in theirs:
        heads = config.n_heads if "wq" in theirs else config.n_kv_heads
    dtype = next(d for d in DTYPES.values() if d.name in dtypes)
    return Tensor(shape, dtype, functools.partial(_join, own, axis, heads))


def _join(shards: list[Any], axis: int | None, heads: int | None) -> np.ndarray:
    """Join the shards of one tensor. heads: reorder the rows of that many heads (wq, wk)."""
    arrays = [_numpy(shard) for shard in (shards[:1] if axis is None else shards)]
    joined = np.concatenate(arrays, axis or 0) if len(arrays) > 1 else arrays[0]
    return joined if heads is None else halves_from_pairs(joined, heads)


def _numpy(tensor: Any) -> np.ndarray:
    """A torch tensor as a NumPy array. torch cannot convert bfloat16, so its bits go through int16."""
    import torch

    tensor = tensor.detach().resolve_neg()  # of a parameter, and of a view of an imaginary part
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def halves_from_pairs(w_OI: np.ndarray, heads: int) -> np.ndarray:
    """(O, I) -> (O, I): rows 2r, 2r + 1 of every head become rows r, D/2 + r."""
    O, I = w_OI.shape  # noqa: E741
    return w_OI.reshape(heads, O // heads // 2, 2, I).swapaxes(1, 2).reshape(O, I)
