"""A mixture of experts: the module against PyTorch, the losses of its routers, recomputed layers, micro-batches."""

import numpy as np
import pytest
import torch
from checks import normal, on_sim, rng, same_bytes

from xtrain import ModelConfig, Transformer
from xtrain.kernels.cross_entropy import count_targets
from xtrain.kernels.experts import expert_gemv
from xtrain.kernels.four_bits import FOUR_BITS
from xtrain.kernels.quantize import KINDS, quantize
from xtrain.kernels.runtime.invariance import batch_invariant
from xtrain.kernels.runtime.launch import note_launches
from xtrain.nn.autograd import Tensor, inference, no_grad
from xtrain.nn.deferred import Stream
from xtrain.nn.expert_bias import ExpertBiases
from xtrain.nn.experts import MixtureOfExperts
from xtrain.nn.modules import RMSNorm
from xtrain.nn.router_losses import RouterLosses
from xtrain.simulator import sim

SHAPE = dict(vocab_size=64, dim=12, n_layers=2, n_heads=2, hidden_dim=20, max_seq_len=16)


def config(**fields):
    return ModelConfig(**SHAPE | {"n_experts": 5, "experts_per_token": 2} | fields)


def batch(B=2, T=8, seed=0):
    ids = rng(seed).integers(0, 64, (B, T)).astype(np.int32)
    return ids, np.where(ids % 5 == 0, -100, np.roll(ids, -1, 1))


def torch_mixture(x, gate, gate_up, down, K, renormalized):
    """Every expert for every token, then the weights: written from the definition."""
    p, chosen = torch.softmax(x @ gate.T, -1).topk(K)
    if renormalized:
        p = p / p.sum(-1, keepdim=True)
    E = gate.shape[0]
    g, u = torch.einsum("nc,efc->nef", x, gate_up.reshape(E, -1, x.shape[1])).chunk(2, -1)
    y = torch.einsum(
        "nef,ecf->nec", torch.nn.functional.silu(g) * u, down.reshape(E, x.shape[1], -1)
    )
    return (p[..., None] * y.gather(1, chosen[..., None].expand(-1, -1, x.shape[1]))).sum(1)


@pytest.mark.parametrize("renormalized", [False, True])
def test_the_module_against_pytorch(renormalized):
    mixture = MixtureOfExperts(config(renormalized_experts=renormalized))
    mixture.arena = mixture.make_arena("cpu", 0)
    for _, parameter in mixture.storage():
        parameter.data = normal(1, *parameter.shape, mean=0.0, scale=0.5)
    weights = [mixture.gate.weight, mixture.gate_up, mixture.down]
    x, dy = normal(2, 9, 12), normal(3, 9, 12)
    ours = Tensor(x, requires_grad=True)
    y = mixture(ours)
    y.backward(dy)
    theirs = [torch.tensor(a, requires_grad=True) for a in (x, *(w.data for w in weights))]
    want = torch_mixture(*theirs, 2, renormalized)
    want.backward(torch.tensor(dy))
    np.testing.assert_allclose(y.data, want.detach().numpy(), rtol=1e-4, atol=1e-5)
    for got, t in zip([ours, *weights], theirs, strict=True):
        np.testing.assert_allclose(got.grad, t.grad.numpy(), rtol=1e-4, atol=1e-5)


def test_names_are_those_of_the_layout_with_one_tensor_for_each_expert():
    names = {
        n.removeprefix("model.layers.0.mlp."): t.shape
        for n, t in Transformer(config()).named_parameters()
    }
    assert names["gate.weight"] == (5, 12) and names["experts.4.down_proj.weight"] == (12, 20)
    assert names["experts.3.gate_proj.weight"] == names["experts.3.up_proj.weight"] == (20, 12)


def routers_terms(model, ids):
    """-> the mean over the layers of 0.3 balance + 0.2 z, from the logits of each router"""
    terms = []
    for layer in model.model.layers:
        logits = layer.mlp.logits

        def noted(x, logits=logits):
            y = logits(x)
            p = torch.softmax(torch.tensor(y.data), -1)
            chosen = torch.nn.functional.one_hot(p.topk(2).indices, 5).float().mean(0)
            z = torch.logsumexp(torch.tensor(y.data), -1).square().mean()
            terms.append(0.3 * 5 * (chosen * p.mean(0)).sum() + 0.2 * z)
            return y

        layer.mlp.logits = noted
    with no_grad():
        model.hidden(ids)
    for layer in model.model.layers:
        del layer.mlp.logits
    return float(sum(terms) / len(terms))


def whole_loss(model, share, *arguments):
    """The loss with 0.3 balance + 0.2 z; share: of the batch."""
    with RouterLosses(0.3, 0.2).collected() as losses:
        loss = model.loss(*arguments)
    return losses.added_to(loss, np.full(1, share, np.float32))


def test_the_losses_of_the_routers_are_added_in_training_alone():
    model = Transformer(config())
    plain = model.loss(*batch()).item()
    terms = routers_terms(model, batch()[0])
    assert whole_loss(model, 1, *batch()).item() == pytest.approx(plain + terms, rel=1e-5)
    assert whole_loss(model, 0.5, *batch()).item() == pytest.approx(plain + terms / 2, rel=1e-5)
    with no_grad():
        assert whole_loss(model, 1, *batch()).item() == plain


def gradients(model, *parts):
    """-> the sum of the losses of the parts, (share, *arguments), and its gradient"""
    model.zero_grad()
    losses = []
    for part in parts:
        loss = whole_loss(model, *part)
        loss.backward()
        losses.append(loss.item())
    return sum(losses), model.arena.grads.copy()


def test_the_gradient_of_the_whole_loss():
    """Along the gradient of the routers, with a step that changes no expert; in float32, so roughly."""
    model = Transformer(config())
    weights = model.arena.weights
    weights += normal(5, weights.size, mean=0.0, scale=0.2)
    _, gradient = gradients(model, (20, *batch()))
    direction = np.zeros_like(weights)
    for layer in model.model.layers:
        gate = layer.mlp.gate.weight
        where = slice(gate.offset, gate.offset + gate.size)
        direction[where] = gradient[where] / np.linalg.norm(gradient[where])
    start = weights.copy()
    step = 1e-3
    losses = []
    for e in (step, -step):
        model.arena.weights[...] = start + e * direction
        losses.append(whole_loss(model, 20, *batch()).item())
    assert (losses[0] - losses[1]) / (2 * step) == pytest.approx(gradient @ direction, rel=5e-3)


@pytest.mark.parametrize("recompute", ["attention", "block"])
def test_recomputed_layers_give_the_same_bits(recompute):
    results = []
    for way in ("none", recompute):
        model = Transformer(config(dense_layers=(0,)), recompute=way)
        results.append(gradients(model, (1, *batch())))
    assert results[0][0] == results[1][0] and same_bytes(results[0][1], results[1][1])


def test_micro_batches_share_the_losses_of_the_routers():
    """Two equal halves have half of the weight each."""
    model = Transformer(config())
    half = batch(1)
    whole = gradients(model, (1, *half))
    inverse = count_targets(np.concatenate([half[1]] * 2).reshape(-1))
    parts = gradients(model, (0.5, *half, inverse), (0.5, *half, inverse))
    assert parts[0] == pytest.approx(whole[0], rel=1e-6)
    np.testing.assert_allclose(parts[1], whole[1], rtol=1e-4, atol=1e-7)


def test_the_bias_levels_the_load_and_counts_every_row_once():
    """Also where layers are recomputed, and over micro-batches."""
    model = Transformer(config(expert_bias=True), recompute="block")
    biases = ExpertBiases(model, 0.0003)
    largest = []
    for _ in range(40):
        biases.begin_step()
        for seed in (0, 1):
            with RouterLosses(0.0, 0.0).collected() as routers:
                model.loss(*batch(seed=seed)).backward()
            biases.count(routers)
        assert (biases.load_LE.sum(1) == 2 * 16 * 2).all()
        largest.append(biases.load_LE.max())
        biases.move(lambda load_LE: None)
    assert np.mean(largest[-5:]) < 0.8 * largest[0], largest
    assert model.variation == "qk_norm with n_experts with expert_bias"


def noted(call):
    """-> the kernels that call() launches in the simulator; they are not run"""
    with note_launches() as found:
        call()
    return {kernel.py_func.__name__ for kernel, _ in found}


def test_few_rows_in_inference_read_their_experts_alone():
    """More rows, rows in training and batch-invariant mode have grouped products, whose bits are the same for any rows."""
    mixture = MixtureOfExperts(config(dim=16, hidden_dim=24))
    mixture.arena = mixture.make_arena("sim", 0)
    rows = lambda N: Tensor(sim(normal(1, N, 16)))
    with inference():
        few = noted(lambda: mixture(rows(expert_gemv.MOST_ROWS)))
        assert (
            few >= {"expert_gate_up_kernel", "expert_down_kernel"}
            and "expert_scan_kernel" not in few
        )
        many = noted(lambda: mixture(rows(expert_gemv.MOST_ROWS + 1)))
        assert "expert_scan_kernel" in many and not many & few - {"routing_kernel"}
        with batch_invariant(True):
            assert noted(lambda: mixture(rows(1))) >= many - few
    assert noted(lambda: mixture(rows(1))) >= many - few


@pytest.mark.parametrize("kind", KINDS)
def test_few_rows_read_the_codes_of_their_experts(kind, monkeypatch):
    """More rows, training and batch-invariant mode dequantize the matrices of experts with tokens."""
    monkeypatch.setattr(expert_gemv, "MOST_ROWS_QUANTIZED", 3)  # the simulator is slow
    mixture = MixtureOfExperts(config(dim=16, hidden_dim=32))
    mixture.arena = mixture.make_arena("sim", 0)
    for matrix in (mixture.gate_up, mixture.down):
        codes = quantize(np.asarray(matrix.data), kind)
        matrix.quantized = on_sim(codes)
    rows = lambda N: Tensor(sim(normal(1, N, 16)))
    dequantizing = {"dequantize_four_kernel" if kind in FOUR_BITS else "dequantize_kernel"}
    with inference():
        few = noted(lambda: mixture(rows(3)))
        assert few >= {"expert_gate_up_kernel", "expert_down_kernel"} and not few & dequantizing
        many = noted(lambda: mixture(rows(4)))
        assert many >= {"expert_scan_kernel"} | dequantizing and "expert_down_kernel" not in many
        with batch_invariant(True):
            assert noted(lambda: mixture(rows(1))) >= many - few
    assert noted(lambda: mixture(rows(1))) >= many - few


@pytest.mark.parametrize("pending", [False, True])
def test_few_rows_are_routed_in_the_pass_of_the_norm(pending):
    """The kernels of decoding in the simulator, a whole branch: against the same branch on the CPU."""
    results = []
    for kind in ("sim", "cpu"):
        mixture = MixtureOfExperts(config(dim=16, hidden_dim=24, expert_bias=True))
        mixture.norm = RMSNorm(16, 1e-6)
        mixture.arena = mixture.make_arena(kind, 0)
        for i, (_, parameter) in enumerate(mixture.storage()):
            parameter.data = (sim if kind == "sim" else np.array)(normal(i, *parameter.shape))
        new = lambda seed, kind=kind: Tensor(
            (sim if kind == "sim" else np.array)(normal(seed, 2, 16))
        )
        with inference():
            h = Stream(new(8), new(9) if pending else None)
            y = h + mixture(mixture.norm(h))
            results.append(np.asarray(y.data))
            if kind == "sim":
                again = Stream(new(8), new(9) if pending else None)
                names = noted(lambda mixture=mixture, h=again: mixture(mixture.norm(h)).data)
                expected = {"expert_router_kernel", "expert_gate_up_kernel", "expert_down_kernel"}
                assert names == expected
    np.testing.assert_allclose(*results, rtol=2e-5, atol=2e-5)
