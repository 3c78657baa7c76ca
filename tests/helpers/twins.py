"""A model of xtrain and the same model in transformers, with random weights, for tests that compare the two."""

import numpy as np
import torch
from checks import rng, to_host
from transformers import AutoConfig, AutoModelForCausalLM

from xtrain import ModelConfig, Transformer, device
from xtrain.formats.huggingface import config_to_hf, written_tensors

torch.set_num_threads(1)  # more threads are slower for models this small
DEVICE = "gpu" if device.gpu_available() else "cpu"
# A head is wider than dim / n_heads, and no size is a multiple of another by accident.
SHAPE = dict(
    vocab_size=61, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=12, hidden_dim=40, max_seq_len=48,
)  # fmt: skip
GEMMA3 = dict(
    sandwich_norms=True, gelu=True, scaled_embedding=True, query_pre_attn_scalar=20, local_rope_theta=100.0,
    sliding_window=9,
)  # fmt: skip
LLAMA3 = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)


def small(**changes) -> ModelConfig:
    """SHAPE with some fields changed."""
    return ModelConfig(**(SHAPE | changes))


def random_model(config: ModelConfig, seed: int = 0, device: str = DEVICE) -> Transformer:
    """A model whose random weights give logits of order 1; norm weights are never 1."""
    model = Transformer(config, device=device)
    for i, (_, tensor) in enumerate(model.named_parameters()):
        values = rng(seed, i).standard_normal(tensor.shape)
        values = 1 + 0.3 * values if tensor.ndim == 1 else values * tensor.shape[1] ** -0.5
        set_weights(tensor, values.astype(np.float32))
    return model


def set_weights(tensor, values: np.ndarray) -> None:
    """Assign host values to a parameter, on its device."""
    tensor.data = device.to_device(values, "gpu" if device.is_gpu(tensor.data) else "cpu")


def weights(model: Transformer) -> dict[str, np.ndarray]:
    """Copies of all weights on the host, by name."""
    return {name: to_host(tensor.data).copy() for name, tensor in model.named_parameters()}


def gradients(model: Transformer) -> dict[str, np.ndarray]:
    """Copies of all gradients on the host, by name."""
    return {name: to_host(tensor.grad).copy() for name, tensor in model.named_parameters()}


def empty_twin(config: ModelConfig) -> torch.nn.Module:
    """A transformers model of this shape: fp32, eager attention, its own random weights."""
    theirs = AutoConfig.for_model(**config_to_hf(config))
    return AutoModelForCausalLM.from_config(theirs, attn_implementation="eager").float().eval()


def twin(model: Transformer) -> torch.nn.Module:
    """The same model with the same weights in transformers: fp32, eager attention."""
    other = empty_twin(model.config)
    state = {n: torch.from_numpy(x.numpy()) for n, x in written_tensors(model).items()}
    missing, unexpected = other.load_state_dict(state, strict=False)
    assert not unexpected and missing == (["lm_head.weight"] if model.config.tie_embeddings else [])
    return other


def batch(config: ModelConfig, B: int, T: int, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Random ids and targets (B, T); some targets are ignored."""
    draw = rng(seed)
    ids = draw.integers(0, config.vocab_size, (B, T))
    targets = draw.integers(0, config.vocab_size, (B, T))
    targets[draw.random((B, T)) < 0.2] = -100
    return ids, targets


def torch_loss(other: torch.nn.Module, ids: np.ndarray, targets: np.ndarray):
    """-> (loss, logits)"""
    logits = other(input_ids=torch.from_numpy(ids)).logits
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), torch.from_numpy(targets).flatten()
    )
    return loss, logits
