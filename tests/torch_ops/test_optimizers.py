"""AdamW and Muon of xtrain.torch: against torch's AdamW and the formula, saved and loaded, in the simulator."""

import pytest
import torch
import torch.distributed as dist
from torch_cases import on, random

import xtrain.torch as xt
from xtrain.kernels.muon import EPS, RMS, orthogonalize_ref

GPU = pytest.param("cuda", marks=pytest.mark.gpu)
places = pytest.mark.parametrize("place", ["cpu", "simulator", GPU])
SHAPES = [(6, 9), (7,), (6, 9), (9, 6)]


def parameters(place, dtype=torch.float32, shapes=SHAPES):
    device = "cuda" if place == "cuda" else "cpu"
    return [random(i, *s).to(device, dtype).requires_grad_() for i, s in enumerate(shapes)]


def train(optimizer, params, steps=3, first=0):
    for t in range(first, first + steps):
        for i, p in enumerate(params):
            p.grad = random(10 * t + i, *p.shape).to(p)
        optimizer.step()
    return [p.detach().clone() for p in params]


@places
def test_adamw(place):
    """As torch's, two groups, one parameter without a gradient."""
    results = []
    for kind in (torch.optim.AdamW, xt.AdamW):
        params, idle = parameters(place), random(9, 3).requires_grad_()
        groups = [
            {"params": params[:2]},
            {"params": [*params[2:], idle], "lr": 0.1, "weight_decay": 0.0},
        ]
        optimizer = kind(groups, lr=0.01, betas=(0.9, 0.95), weight_decay=0.2)
        with on(place):
            results.append(train(optimizer, params))
        assert torch.equal(idle, random(9, 3))
    for theirs, ours in zip(*results):
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-6)


@places
def test_bf16_parameters_are_rounded_float32_weights(place):
    half = parameters(place, torch.bfloat16, [(6, 9)])
    full = [p.detach().float().requires_grad_() for p in half]
    for params in (half, full):
        optimizer = xt.AdamW(params, lr=1e-4)
        for t in range(2):
            for i, p in enumerate(params):
                p.grad = random(10 * t + i, *p.shape).to(torch.bfloat16).to(p)
            with on(place):
                optimizer.step()
    assert all(torch.equal(a, b.bfloat16()) for a, b in zip(half, full))


@places
def test_muon(place):
    """As the formula at the top of kernels/muon.py; matrices of one shape together."""
    shapes = [(6, 9), (9, 6), (6, 9)]
    params = parameters(place, shapes=shapes)
    expected = [p.detach().cpu().clone() for p in params]
    moments = [torch.zeros(s) for s in shapes]
    for t in range(2):
        for i, (w, m) in enumerate(zip(expected, moments)):
            g = random(10 * t + i, *w.shape)
            m += 0.05 * (g - m)
            x = g + 0.95 * (m - g)
            x /= x.norm().clamp(min=EPS)
            x = torch.from_numpy(orthogonalize_ref(x.numpy()[None])[0])
            w.mul_(1 - 0.02 * 0.1).sub_(0.02 * RMS * max(w.shape) ** 0.5 * x)
    with on(place):
        found = train(xt.Muon(params, lr=0.02), params, 2)
    size = 1e-5 if place == "cpu" else 0.02 * RMS * 0.2  # bf16 in the kernels
    for ours, theirs in zip(found, expected):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=0, atol=size)


@pytest.mark.parametrize("kind", [xt.AdamW, xt.Muon])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("place", ["cpu", GPU])
def test_saved_and_loaded(kind, dtype, place):
    """The next steps have the same bits."""
    shapes = [(6, 9), (9, 6)]
    params = parameters(place, dtype, shapes)
    optimizer = kind(params)
    train(optimizer, params)
    copies = [p.detach().clone().requires_grad_() for p in params]
    loaded = kind(copies)
    loaded.load_state_dict(optimizer.state_dict())
    expected = train(optimizer, params, first=3)
    assert all(torch.equal(a, b) for a, b in zip(train(loaded, copies, first=3), expected))


@pytest.mark.parametrize("place", ["cpu", GPU])
def test_opcheck(place):
    with torch.no_grad():
        lists = [[p.detach() for p in parameters(place)] for _ in range(5)]
        lists[4] = [v.abs() for v in lists[4]]
        hyper = torch.tensor([0.1, 0.2, 0.3], device=place)
        arguments = (*lists, hyper, 0.9, 0.95, 1e-8, 0.1)
        torch.library.opcheck(torch.ops.xtrain.adamw_.default, arguments)


@places
def test_a_gradient_that_comes_later(place):
    """Each parameter counts its own updates, as in torch: a layer that is unfrozen begins with the first."""
    results = []
    for kind in (torch.optim.AdamW, xt.AdamW):
        first, late = parameters(place, shapes=[(6, 9), (7,)])
        optimizer = kind([first, late], lr=0.01)
        with on(place):
            train(optimizer, [first])
            results.append(train(optimizer, [first, late], first=3))
    for theirs, ours in zip(*results):
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("kind", [xt.AdamW, xt.Muon])
def test_loaded_for_parameters_of_another_dtype(kind):
    """float32 parameters are the weights; bf16 ones get weights."""
    for saved, loaded in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        old = kind(parameters("cpu", saved, [(6, 9)]))
        train(old, old.param_groups[0]["params"])
        params = parameters("cpu", loaded, [(6, 9)])
        before = params[0].detach().clone()
        new = kind(params)
        new.load_state_dict(old.state_dict())
        new.param_groups[0]["lr"] = 0.1
        train(new, params, 1, first=3)
        assert (params[0] - before).abs().max() > 0.01


def test_divided_by_fsdp2():
    """AdamW updates this rank's part and keeps state that can be divided again; Muon refuses."""
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        layer = torch.nn.Linear(9, 6)
        fully_shard(layer, mesh=dist.init_device_mesh("cpu", (1,)))
        params = list(layer.parameters())
        expected = [p.full_tensor().detach().clone().requires_grad_() for p in params]
        layer(random(1, 4, 9)).sum().backward()
        for p, q in zip(params, expected):
            q.grad = p.grad.full_tensor()
        optimizer = xt.AdamW(params)
        optimizer.step()
        xt.AdamW(expected).step()
        assert all(torch.equal(p.full_tensor(), q) for p, q in zip(params, expected))
        assert all(hasattr(optimizer.state[p]["m"], "full_tensor") for p in params)
        with pytest.raises(ValueError, match=r"^Muon: a parameter is divided among ranks, and an"):
            xt.Muon([layer.weight])
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("kind", [xt.AdamW, xt.Muon])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transposed_parameters(kind, dtype):
    """The update of the contiguous ones, also with a state that was saved by those."""
    plain = parameters("cpu", dtype, [(6, 9), (6, 9)])
    turned = [p.detach().t().contiguous().t().requires_grad_(i == 0) for i, p in enumerate(plain)]
    mixed = [turned[0], plain[1].detach().clone().requires_grad_()]
    optimizers = kind(plain), kind(mixed)
    results = [train(o, params) for o, params in zip(optimizers, (plain, mixed))]
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    results += [train(o, params, first=3) for o, params in zip(optimizers, (plain, mixed))]
    size = 0 if kind is xt.AdamW else 2e-5 if dtype == torch.float32 else 1e-2
    for ours, theirs in zip(results[1] + results[3], results[0] + results[2]):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=size)
    assert not mixed[0].is_contiguous()


def test_channels_last():
    layer = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    params = list(layer.parameters())
    copies = [p.detach().clone(memory_format=torch.contiguous_format) for p in params]
    copies = [p.requires_grad_() for p in copies]
    results = [train(xt.AdamW(some), some) for some in (params, copies)]
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_closure():
    (p,) = parameters("cpu", shapes=[(3,)])

    def loss():
        p.grad = None
        value = (p * p).sum()
        value.backward()
        return value

    optimizer = xt.AdamW([p], lr=0.1)
    first = optimizer.step(loss)
    assert optimizer.step(loss) < first


def test_mistakes():
    with pytest.raises(
        ValueError,
        match=r"^Muon: a parameter has shape \(7,\) and is not a matrix: give it to AdamW$",
    ):
        xt.Muon(parameters("cpu"))
    muon = xt.Muon(parameters("cpu", shapes=[(6, 9)]))
    with pytest.raises(ValueError, match=r"is not a matrix: give it to AdamW$"):
        muon.add_param_group({"params": parameters("cpu", shapes=[(7,)])})
    assert len(muon.param_groups) == 1
    half = parameters("cpu", torch.float16)
    with pytest.raises(
        TypeError, match=r"^AdamW: a parameter is torch.float16, expected float32 or bf"
    ):
        train(xt.AdamW(half), half)
    params = parameters("cpu", shapes=[(6, 9)])
    for saves, loads, words in (
        (torch.optim.AdamW, xt.AdamW, "AdamW: the state holds step, exp_avg, exp_avg_sq, expected"),
        (xt.Muon, xt.AdamW, "AdamW: the state holds m, expected step, m, v: another optimizer"),
        (xt.AdamW, xt.Muon, "Muon: the state holds step, m, v, expected m: another optimizer"),
    ):
        other = saves(params)
        train(other, params)
        with pytest.raises(ValueError, match=f"^{words}"):
            loads(params).load_state_dict(other.state_dict())
    for options in (dict(lr=-1.0), dict(eps=-1.0), dict(weight_decay=-1.0)):
        with pytest.raises(ValueError, match=r"^AdamW: \w+ is -1.0, below 0$"):
            xt.AdamW(params, **options)
    with pytest.raises(ValueError, match=r"^AdamW: a rate of a moment is 1.5, expected 0 to below"):
        xt.AdamW(params, betas=(0.9, 1.5))
    table = torch.nn.Embedding(5, 3, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(
        TypeError, match=r"^AdamW: a gradient is sparse: make the embedding sparse="
    ):
        xt.AdamW(table.parameters()).step()
    w = [torch.ones(2, requires_grad=True)]
    hyper = torch.ones(3)
    with pytest.raises(
        RuntimeError, match=r"^xtrain::adamw_ changes tensors in place and has no gradient: call"
    ):
        torch.ops.xtrain.adamw_(w, w, w, w, w, hyper, 0.9, 0.9, 1e-8, 0.0)
    strided = [torch.ones(4, 2)[:, 0]]
    with pytest.raises(ValueError, match=r"has shape \(4,\) and is not contiguous: copy it first$"):
        torch.ops.xtrain.adamw_(*[strided] * 5, hyper, 0.9, 0.9, 1e-8, 0.0)
