"""copy.deepcopy and pickle: the parameters of a copy are views of another arena, and it computes the same bits."""

import copy
import pickle
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from checks import to_host

from xtrain import AdamW, ModelConfig, Tensor, Transformer, UserError, no_grad
from xtrain.nn.lora import AdaptedTransformer, Lora
from xtrain.nn.modules import Linear
from xtrain.nn.optim import Muon
from xtrain.nn.quantized import quantize_weights

TINY = ModelConfig(vocab_size=50, dim=32, n_layers=2, n_heads=2, max_seq_len=16, tie_embeddings=True)  # fmt: skip
IDS = np.arange(12).reshape(2, 6)
WAYS = {"deepcopy": copy.deepcopy, "pickle": lambda x: pickle.loads(pickle.dumps(x))}
DEVICES = ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)]
pytestmark = pytest.mark.parametrize("copied", WAYS.values(), ids=WAYS)


def step(model, optimizer):
    model.zero_grad()
    loss = model.loss(IDS, IDS)
    loss.backward()
    optimizer.step()
    return loss.item()


def address(array):
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [AdamW, Muon])
def test_a_copy_trains_on_with_the_same_bits(kind, device, copied):
    model = Transformer(TINY, device=device)
    optimizer = kind(model, 1e-2)
    step(model, optimizer)
    model.model.norm.weight.requires_grad = False
    twin, twins_optimizer = copied((model, optimizer))
    assert twins_optimizer.model is twin and twins_optimizer.arena is twin.arena
    for _, p in twin.storage():
        for array, whole in ((p.data, twin.arena.weights), (p.grad, twin.arena.grads)):
            assert address(array) == address(whole) + 4 * p.offset
    before = to_host(twin.arena.weights).copy()
    losses = [step(model, optimizer) for _ in range(3)]
    assert np.array_equal(to_host(twin.arena.weights), before)  # a reference stays what it was
    assert [step(twin, twins_optimizer) for _ in range(3)] == losses
    assert np.array_equal(to_host(twin.arena.weights), to_host(model.arena.weights))


def test_copies_in_bf16(copied):
    for trainable in (True, False):
        model = Transformer(replace(TINY, n_layers=1), 0, "sim", "bf16", trainable=trainable)
        model.arena.refresh()
        twin = copied(model)
        twin.arena.refresh()
        for (_, p), (_, q) in zip(model.storage(), twin.storage()):
            assert not np.shares_memory(p.value, q.value) and p.value.dtype == q.value.dtype
            assert np.asarray(p.value).tobytes() == np.asarray(q.value).tobytes()
            assert not p.decay or np.shares_memory(q.value, twin.arena.half)


def test_copies_in_fp8_keep_the_scales(copied):
    shape = ModelConfig(
        vocab_size=50, dim=128, n_layers=1, n_heads=2, hidden_dim=128, max_seq_len=16
    )
    model = Transformer(shape, 0, "sim", "fp8")
    assert not copied(model).fp8.ready
    scales = np.arange(model.fp8.scale_S.size, dtype=np.float32)
    model.fp8.load(scales)
    twin = copied(model)
    assert twin.fp8.ready and np.array_equal(twin.fp8.scale_S, scales)
    assert all(w.fp8.scales is twin.fp8 for _, w in twin.fp8.weights)
    assert [w for _, w in twin.fp8.weights] == [
        p for name, p in twin.storage() if p.fp8 is not None
    ]


def test_copies_with_adapters_and_quantized_weights(copied):
    model = AdaptedTransformer(TINY, trainable=False)
    model.adapt(Lora(2, 4.0))
    for _, p in model.named_parameters():
        p.data = np.full(p.shape, 0.1, np.float32)
    for prepare in (lambda _: None, lambda model: quantize_weights(model, "int8")):
        prepare(model)
        twin = copied(model)
        with no_grad():
            assert np.array_equal(twin(IDS).numpy(), model(IDS).numpy())
        for p in twin.base_arena.parameters:
            assert np.shares_memory(p.data, twin.base_arena.weights)


def test_a_copied_block_joins_a_model(copied):
    model = Transformer(TINY)
    model.model.layers.append(copied(model.model.layers[0]))
    model.renew_arena()
    first, last = model.model.layers[0], model.model.layers[2]
    assert np.array_equal(first.mlp.down_proj.weight.data, last.mlp.down_proj.weight.data)
    assert np.shares_memory(last.mlp.down_proj.weight.data, model.arena.weights)


def test_copies_of_tensors(copied):
    model = Transformer(TINY)
    with no_grad():
        x = model.hidden(IDS)
        for original in (model.logits(x), model(IDS), Tensor(np.arange(3), False)):
            twin = copied(original)
            assert type(twin) is Tensor and np.array_equal(twin.data, original.data)
    for name, twin in copied(dict(model.named_parameters())).items():
        original = dict(model.named_parameters())[name]
        assert np.array_equal(twin.data, original.data) and twin.requires_grad
        assert not np.shares_memory(twin.data, original.data)
    with pytest.raises(TypeError, match=r"a computed Tensor cannot be copied .* use \.detach"):
        copied(model.loss(IDS, IDS))
    hook = SimpleNamespace(weight=Linear(2, 3, 0.1).weight)
    hook.weight.on_gradient = lambda parameter: None  # of a run
    assert copied(hook).weight.on_gradient is None
    assert copied(TINY) == TINY


def test_weights_that_are_divided_among_the_ranks_are_not_copied(copied):
    model = Transformer(TINY)
    model.arena.weights = None  # as parallel.zero.ShardedAdamW.release leaves it
    with pytest.raises(UserError, match=r"divided among the ranks \(--zero\)"):
        copied(model)
