"""The arena: where parameters lie, how they are called, how they begin."""

import math

import numpy as np
import pytest
import torch
import transformers
from checks import to_host

from xtrain import AdamW, ModelConfig, Tensor, Transformer, UserError, config, no_grad
from xtrain.nn import modules as nn
from xtrain.nn.arena import ALIGN
from xtrain.nn.model import MLP, Attention
from xtrain.nn.modules import Module, Parameter
from xtrain.nn.optim import clip

DEVICES = ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)]
KINDS = [(qk_norm, tied) for qk_norm in (False, True) for tied in (False, True)]


def small(**changes):
    shape = dict(vocab_size=100, dim=24, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8)
    return ModelConfig(**{**shape, "hidden_dim": 40, "max_seq_len": 32, **changes})


def weights(model):
    return {name: to_host(p.data) for name, p in model.named_parameters()}


def address(array):
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr


# ----------------------------------------------------------------------------- names and shapes
@pytest.mark.parametrize("qk_norm, tied", KINDS)
def test_names_and_shapes_are_those_of_hugging_face(qk_norm, tied):
    family = "Qwen3" if qk_norm else "Llama"
    their_config = getattr(transformers, f"{family}Config")(
        vocab_size=100, hidden_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, intermediate_size=40, max_position_embeddings=32, tie_word_embeddings=tied,
    )  # fmt: skip
    with torch.device("meta"):
        theirs = getattr(transformers, f"{family}ForCausalLM")(their_config)
    want = {name: tuple(p.shape) for name, p in theirs.named_parameters()}
    if tied:  # transformers 5.0 does not tie on the meta device
        want.pop("lm_head.weight", None)
    model = Transformer(small(qk_norm=qk_norm, tie_embeddings=tied))
    assert {name: p.shape for name, p in model.named_parameters()} == want
    assert len(list(model.named_parameters())) == len(want)
    assert ("lm_head.weight" in want) == (not tied)


# ----------------------------------------------------------------------------- where they lie
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("qk_norm, tied", KINDS)
def test_every_parameter_and_gradient_is_a_view_of_the_arena(qk_norm, tied, device):
    model = Transformer(small(qk_norm=qk_norm, tie_embeddings=tied), device=device)
    arena, end, order = model.arena, 0, []
    for _, p in model.storage():
        for array, whole in ((p.data, arena.weights), (p.grad, arena.grads)):
            assert address(array) == address(whole) + 4 * p.offset and array.flags.c_contiguous
            assert array.shape == p.declared_shape and array.dtype == np.float32
        assert p.offset % ALIGN == 0
        order.append((p.offset, p.offset + math.prod(p.shape), p.decay))
    for start, stop, _ in sorted(order):
        assert start >= end  # no overlap
        end = stop
    assert end <= arena.weights.size < end + ALIGN
    assert arena.weights.shape == arena.grads.shape and arena.n_decay % ALIGN == 0
    for start, stop, decay in order:
        assert stop <= arena.n_decay if decay else start >= arena.n_decay


def test_matrices_decay_and_norms_do_not():
    model = Transformer(small())
    decayed = {prefix: p.decay for prefix, p in model.storage() if len(p.parts) == 1}
    assert not any(decay for prefix, decay in decayed.items() if "norm" in prefix)
    assert all(decay for prefix, decay in decayed.items() if "norm" not in prefix)
    # in the order of the forward pass, so that backward finishes the end first
    matrices = [p.offset for _, p in model.storage() if p.decay]
    assert matrices == sorted(matrices) and matrices[0] == 0


@pytest.mark.parametrize("device", DEVICES)
def test_hugging_face_tensors_are_views_too(device):
    model = Transformer(small(), device=device)
    first, size = address(model.arena.weights), 4 * model.arena.weights.size
    for name, p in model.named_parameters():
        assert first <= address(p.data) < first + size, name
        assert address(p.grad) - address(model.arena.grads) == address(p.data) - first
        assert p.shape == p.data.shape == p.grad.shape and p.requires_grad
    views = dict(model.views(model.arena.weights))
    for name, p in model.named_parameters():
        assert address(views[name]) == address(p.data) and views[name].shape == p.shape


def test_packed_matrices_are_row_blocks():
    model = Transformer(small())
    layer = model.model.layers[1]
    names = [f"model.layers.1.self_attn.{x}_proj.weight" for x in "qkv"]
    w = weights(model)
    assert np.array_equal(np.concatenate([w[n] for n in names]), layer.self_attn.qkv.weight.data)
    names = [f"model.layers.1.mlp.{x}_proj.weight" for x in ("gate", "up")]
    assert np.array_equal(np.concatenate([w[n] for n in names]), layer.mlp.gate_up.weight.data)


@pytest.mark.parametrize("device", DEVICES)
def test_writing_through_a_name_reaches_the_model(device):
    model = Transformer(small(), device=device)
    ids = np.arange(10).reshape(2, 5)
    before = model(ids).numpy()
    parameters = dict(model.named_parameters())
    v = parameters["model.layers.0.self_attn.v_proj.weight"]
    v.data *= 2
    doubled = model(ids).numpy()
    assert not np.allclose(doubled, before, rtol=1e-4)
    v.data = v.data / 2
    np.testing.assert_allclose(model(ids).numpy(), before, rtol=1e-5, atol=1e-7)
    v.data[...] = 0
    assert not to_host(model.model.layers[0].self_attn.qkv.weight.data[48:]).any()
    v.grad[...] = 3
    assert to_host(model.arena.grads).sum() == 3 * v.size
    with pytest.raises(ValueError, match=r"\(16, 24\) cannot hold data of shape \(24, 16\)"):
        v.data = v.data.T


def test_nothing_lies_between_the_parameters():
    model = Transformer(small(dim=20, head_dim=2))  # 5-row matrices and the like: gaps up to ALIGN
    used = np.zeros(model.arena.weights.size, bool)
    for _, p in model.storage():
        used[p.offset : p.offset + p.size] = True
    assert not used.all() and not model.arena.weights[~used].any()


# ----------------------------------------------------------------------------- how they begin
@pytest.mark.parametrize("n_layers", [1, 4])
def test_standard_deviations(n_layers):
    w = weights(Transformer(small(dim=128, hidden_dim=256, head_dim=32, n_layers=n_layers)))
    for name, x in w.items():
        if "norm" in name:
            assert (x == 1).all(), name
            continue
        residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        std = 0.02 / math.sqrt(2 * n_layers) if residual else 0.02
        assert abs(x.std() / std - 1) < 0.05 and abs(x.mean()) < 0.05 * std, name


def test_every_tensor_has_numbers_of_its_own():
    w = weights(Transformer(small(dim=32, n_kv_heads=4)))
    matrices = [x.reshape(-1)[:256] / x.std() for name, x in w.items() if x.ndim == 2]
    for i, a in enumerate(matrices):
        assert all(abs(np.corrcoef(a, b)[0, 1]) < 0.35 for b in matrices[:i])


@pytest.mark.parametrize("device", ["sim", *DEVICES[1:]])
def test_the_same_seed_gives_the_same_weights_everywhere(device):
    want, got = weights(Transformer(small(), 3)), weights(Transformer(small(), 3, device=device))
    assert all(np.array_equal(want[name], got[name]) for name in want)
    other = weights(Transformer(small(), 4))
    assert all((want[n] != other[n]).all() for n in want if "norm" not in n)


def test_the_weights_depend_neither_on_padding_nor_on_depth(monkeypatch):
    want = weights(Transformer(small()))
    deeper = weights(Transformer(small(n_layers=3)))
    monkeypatch.setattr(config, "VOCAB_MULTIPLE", 1)
    model = Transformer(small())
    assert model.model.embed_tokens.weight.shape == (100, 24)
    got = weights(model)
    for name in want:
        assert np.array_equal(want[name], got[name]), name
        if not name.endswith(("o_proj.weight", "down_proj.weight")):  # their scale knows the depth
            assert np.array_equal(want[name], deeper[name]), name


@pytest.mark.parametrize("tied", [False, True])
def test_rows_beyond_the_vocabulary_are_zero(tied):
    model = Transformer(small(tie_embeddings=tied))
    assert model.model.embed_tokens.weight.shape == (128, 24)
    assert not model.model.embed_tokens.weight.data[100:].any()
    if not tied:
        assert model.lm_head.shape == (128, 24) and not model.lm_head.data[100:].any()


# ----------------------------------------------------------------------------- user-defined modules
class Layer(Module):
    def __init__(self):
        self.norm = nn.RMSNorm(5, 1e-6)
        self.up = nn.Linear(5, 7, 0.1)


class Own(Module):
    def __init__(self):
        self.table = nn.Embedding(10, 16, 5, 0.1)
        self.blocks = [Layer(), Layer()]
        self.scale = Parameter((7,), None)
        self.width = 7  # not a parameter
        self.arena = self.make_arena("cpu", seed=0)

    def __call__(self, ids):
        x = self.table(ids)
        return [block.up(block.norm(x)) for block in self.blocks]


def test_a_module_of_ones_own():
    model = Own()
    shapes = {name: p.shape for name, p in model.named_parameters()}
    layer = {"norm.weight": (5,), "up.weight": (7, 5)}
    want = {"table.weight": (10, 5), "weight": (7,)}
    want |= {f"blocks.{i}.{name}": shape for i in (0, 1) for name, shape in layer.items()}
    assert shapes == want
    a, b = model(np.array([1, 2, 2]))
    (a + b).backward(np.ones((3, 7), np.float32))
    grads = {name: p.grad for name, p in model.named_parameters()}
    assert grads["blocks.0.up.weight"].any() and grads["table.weight"][2].any()
    assert not grads["table.weight"][0].any() and not grads["weight"].any()


class Arrays(MLP):
    def __call__(self, x_NC):
        return super().__call__(x_NC).data


class ArrayAttention(Attention):
    def attend(self, sequences, qkv):
        return super().attend(sequences, qkv).data


class ArrayLoss(Transformer):
    def loss(self, *arguments):
        return super().loss(*arguments).data


class Nothing(nn.RMSNorm):
    def __call__(self, x_NC):
        super().__call__(x_NC)


def replaced(module):
    """A model with a module of a user's class in its first layer, or of that class itself."""
    if isinstance(module, Transformer):
        return module
    model = Transformer(small())
    layer = model.model.layers[0]
    name = {Arrays: "mlp", ArrayAttention: "self_attn", Nothing: "input_layernorm"}[type(module)]
    setattr(layer, name, module)
    model.renew_arena()
    return model


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda: Arrays(small()), "^Arrays returned ndarray, .* and return a Tensor"),
        (lambda: ArrayAttention(small()), "^ArrayAttention.attend returned ndarray"),
        (lambda: ArrayLoss(small()), "^ArrayLoss.loss returned ndarray"),
        (lambda: Nothing(24, 1e-6), "^Nothing returned NoneType"),
    ],
)
def test_an_array_in_place_of_a_tensor_is_refused(make, says):
    """It would be a constant: training would go on with gradients of zero."""
    model = replaced(make())
    ids = np.zeros((1, 4), np.int32)
    with pytest.raises(UserError, match=says):
        model.loss(ids, ids)
    if not isinstance(model, ArrayLoss) and "None" not in says:
        with no_grad():  # where nothing is trained
            model.loss(ids, ids)


def test_modules_are_found_wherever_they_are():
    model = Own()
    model.experts = {"a": [nn.Linear(2, 3, 0.1)], "b": (Parameter((4,), None), "no module")}
    model.again = model.experts["a"][0]  # one parameter in two places: one memory, one name
    before = weights(model.blocks[0])["up.weight"].copy()
    model.blocks[0].up.weight.data = before + 1
    model.renew_arena()
    shapes = {name: p.shape for name, p in model.named_parameters()}
    assert shapes.keys() >= {"experts.a.0.weight", "experts.b.0.weight"}
    assert not any(name.startswith("again") for name in shapes)
    assert np.array_equal(weights(model)["blocks.0.up.weight"], before + 1)  # kept
    assert np.array_equal(weights(model)["experts.b.0.weight"], np.ones(4))  # initialised
    assert [path for path, _ in model.modules()][:3] == ["", "table.", "blocks.0."]
    assert np.shares_memory(model.again.weight.data, model.arena.weights)


def test_parameters_that_cannot_be():
    with pytest.raises(UserError, match="at least one axis"):
        Parameter((), None)
    with pytest.raises(UserError, match="needs a shape"):
        Parameter(np.ones((3, 4), np.float32), None)
    with pytest.raises(UserError, match="more rows"):
        Parameter((3, 4), 0.1, {"a": 2, "b": 2})
    with pytest.raises(UserError, match=r"has no memory: call model\.renew_arena"):
        nn.Linear(4, 3, 0.1)(Tensor(np.ones((2, 4), np.float32)))
    with pytest.raises(UserError, match=r"has no memory: call model\.renew_arena"):
        Parameter((3, 4), 0.1).data = np.ones((3, 4), np.float32)
    model = Own()
    model.offset = Parameter((7,), None)
    with pytest.raises(UserError, match="two parameters are called weight"):
        model.renew_arena()


def test_freezing():
    model = Own()
    for name, p in model.storage():
        p.requires_grad = "up" not in name
    model.renew_arena()  # does not thaw
    a, b = model(np.array([1, 2]))
    (a + b).backward(np.ones((2, 7), np.float32))
    for name, p in model.named_parameters():
        assert p.grad.any() == (name == "table.weight" or "norm" in name), name
    with pytest.raises(UserError, match=r"model\.storage"):  # it would have no effect
        next(p for name, p in model.named_parameters() if "norm" in name).requires_grad = False


def test_a_gradient_stays_in_the_arena():
    """`p.grad = None` empties it; as an attribute it would leave the optimizer an old one."""
    model = Own()
    model.arena.grads.fill(3)
    for _, p in model.storage():
        p.grad = None
    assert all(not p.grad.any() for _, p in model.named_parameters())
    for _, p in model.named_parameters():
        p.grad = np.full(p.shape, 2, np.float32)
        p.grad *= 2
    assert all((p.grad == 4).all() for _, p in model.named_parameters())
    assert np.shares_memory(model.table.weight.grad, model.arena.grads)
    model.arena.grads = np.full_like(model.arena.weights, 3)
    model.arena.grads *= 2
    assert all((p.grad == 6).all() for _, p in model.named_parameters())
    for p in (model.table.weight, next(iter(model.named_parameters()))[1]):
        with pytest.raises(ValueError, match=r"cannot have a gradient of shape \(1,\)"):
            p.grad = np.ones(1, np.float32)  # NumPy would write it everywhere


# ----------------------------------------------------------------------------- to compute with only
def test_without_training_there_are_no_gradients():
    config = small()
    model, other = Transformer(config, seed=3, trainable=False), Transformer(config, seed=3)
    assert model.arena.grads is None and all(p.grad is None for _, p in model.named_parameters())
    ids = np.arange(10).reshape(2, 5)
    assert np.array_equal(model(ids).data, other(ids).data)
    assert not model(ids).requires_grad
    for fails in (
        model.zero_grad,
        model.arena.zero_grad,
        lambda: setattr(model.arena, "grads", other.arena.grads),
        lambda: clip(model, 1.0),
        lambda: AdamW(model, lr=1e-3),
    ):
        with pytest.raises(
            UserError, match="this model has no gradients: make it with trainable=True"
        ):
            fails()


def test_in_bf16_without_training_matrices_have_no_float32_memory():
    shape = small(dim=16, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=16, hidden_dim=24)
    served, trained = (
        Transformer(shape, seed=3, device="sim", precision="bf16", trainable=t)
        for t in (False, True)
    )
    arena = served.arena
    assert arena.half.size == arena.n_decay and arena.half.nbytes == 2 * arena.n_decay
    assert arena.weights.size == trained.arena.weights.size - arena.n_decay
    assert dict(served.named_parameters()).keys() == dict(trained.named_parameters()).keys()
    ids = np.arange(6).reshape(2, 3)
    a, b = (to_host(m(ids).data).astype(np.float32) for m in (served, trained))
    assert np.abs(a - b).max() <= 0.02 * np.abs(b).max()  # embedding rows: bf16 here, float32 there
    name, tensor = next(iter(served.named_parameters()))
    tensor.data = tensor.data * 0  # a change reaches the next forward pass
    assert not np.array_equal(to_host(served(ids).data).astype(np.float32), a), name


def test_the_tree_of_a_model():
    shape = dict(vocab_size=300, dim=64, n_layers=4, n_heads=4, n_kv_heads=2, hidden_dim=96)
    model = Transformer(ModelConfig(**shape))
    model.model.layers[2].mlp = MLP(ModelConfig(**(shape | {"hidden_dim": 32})))
    model.renew_arena()
    parameters = sum(tensor.size for _, tensor in model.named_parameters())
    lines = repr(model).splitlines()
    assert lines[0] == f"Transformer: {parameters:,}, lm_head.weight (300, 64)"
    assert lines[2] == "        embed_tokens: Embedding: 19,200, weight (300, 64)"
    assert lines[3].startswith("        layers.0 to layers.1: 2 x Block: ")
    qkv = "q_proj.weight (64, 64), k_proj.weight (32, 64), v_proj.weight (32, 64)"
    assert f"                qkv: Linear: 8,192, {qkv}" in lines
    assert [line.split(":")[0].strip() for line in lines if "Block" in line] == [
        "layers.0 to layers.1", "layers.2", "layers.3",
    ]  # fmt: skip
