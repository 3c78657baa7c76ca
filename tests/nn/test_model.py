"""The model: shapes, the padding of the vocabulary, gradients that accumulate, bad input. (Parity: test_parity.py.)"""

import numpy as np
import pytest
import torch
from checks import to_host
from flash_attention_cases import small_tiles
from test_modules import DEVICES, small, weights

from xtrain import AdamW, Transformer, UserError, config
from xtrain.device import to_device
from xtrain.kernels.cross_entropy import count_targets
from xtrain.kernels.runtime import launch as _launch
from xtrain.nn.modules import Linear, Module

KINDS = [dict(qk_norm=q, tie_embeddings=t) for q in (False, True) for t in (False, True)]


def batch(B=3, T=7, V=100, ignored=True):
    rng = np.random.default_rng([B, T])
    ids, targets = rng.integers(0, V, (2, B, T))
    if ignored:
        targets[rng.random((B, T)) < 0.3] = -100
        targets[0, 0] = 1
    return ids, targets


def lively(seed=0, device="cpu", **changes):
    """Weights large enough that logits and gradients are of order 1, norms that are not 1."""
    model = Transformer(small(**changes), seed, device=device)
    for i, (name, p) in enumerate(model.named_parameters()):
        noise = 0.3 * np.random.default_rng([seed, i]).standard_normal(p.shape)
        values = 1 + noise if "norm" in name else noise
        p.data = to_device(values.astype(np.float32), device)
    return model


def gradients(model):
    return {name: to_host(p.grad).copy() for name, p in model.named_parameters()}


def close(a, b, limit):
    """Every gradient within `limit` of its norm."""
    for name in a:
        error = np.linalg.norm(a[name] - b[name]) / max(np.linalg.norm(b[name]), 1e-30)
        assert error <= limit, f"{name}: {error:.2e}"


# ----------------------------------------------------------------------------- logits and loss
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_shapes_and_the_meaning_of_the_loss(kind, device):
    model = lively(device=device, **kind)
    ids, targets = batch()
    logits, loss = model(ids), model.loss(ids, targets)
    assert logits.shape == (3, 7, 100) and logits.dtype == np.float32
    assert loss.shape == () and loss.dtype == np.float32
    want = torch.nn.functional.cross_entropy(
        torch.tensor(logits.numpy()).double().reshape(-1, 100), torch.tensor(targets).reshape(-1)
    )
    assert loss.item() == pytest.approx(want.item(), rel=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_a_new_model_knows_nothing(device):
    model = Transformer(small(dim=64, vocab_size=1000), device=device)
    ids, targets = batch(V=1000)
    assert abs(model.loss(ids, targets).item() - np.log(1000)) < 0.15


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint16, np.uint8])
def test_any_integer_type_and_layout(dtype):
    model, (ids, targets) = lively(), batch(ignored=False)
    want = model.loss(ids, targets).item()
    assert model.loss(ids.astype(dtype), targets.astype(dtype)).item() == want
    assert model.loss(np.asfortranarray(ids), np.asfortranarray(targets)).item() == want
    wide = np.repeat(ids, 2, axis=1)
    assert model.loss(wide[:, ::2], targets).item() == want


@pytest.mark.gpu
def test_ids_that_are_on_the_gpu():
    model, (ids, targets) = lively(device="gpu"), batch()
    there = to_device(ids, "gpu"), to_device(targets, "gpu")
    assert model.loss(*there).item() == model.loss(ids, targets).item()
    assert np.array_equal(model(there[0]).numpy(), model(ids).numpy())
    out = model.generate(there[0], 3)
    assert not isinstance(out, np.ndarray)
    assert np.array_equal(out.get(), model.generate(ids, 3))
    with pytest.raises(UserError, match="on the GPU, the model on the CPU"):
        lively()(there[0])


# ----------------------------------------------------------------------------- padding
@pytest.mark.parametrize("kind", KINDS)
def test_the_padding_cannot_be_seen(kind, monkeypatch):
    padded, (ids, targets) = lively(**kind), batch()
    monkeypatch.setattr(config, "VOCAB_MULTIPLE", 1)
    plain = lively(**kind)
    assert padded.config.vocab_size == 100 == plain.model.embed_tokens.weight.shape[0]
    assert padded.model.embed_tokens.weight.shape[0] == 128
    np.testing.assert_allclose(padded(ids).data, plain(ids).data, rtol=1e-5, atol=1e-6)
    losses = [model.loss(ids, targets) for model in (padded, plain)]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6)
    for loss in losses:
        loss.backward()
    close(gradients(padded), gradients(plain), 1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tied", [False, True])
def test_the_padding_stays_zero_in_training(tied, device):
    model = lively(tie_embeddings=tied, device=device)
    optimizer = AdamW(model, lr=0.1, weight_decay=0.5)
    ids, targets = batch()
    for _ in range(4):
        model.zero_grad()
        model.loss(ids, targets).backward()
        optimizer.step()
    tables = [model.model.embed_tokens.weight] + ([] if tied else [model.lm_head])
    for table in tables:
        assert not to_host(table.data[100:]).any() and not to_host(table.grad[100:]).any()
        assert to_host(table.data[:100]).all()
    for moment in (optimizer.m, optimizer.v):
        padding = moment[100 * 24 : 128 * 24]  # the embedding is the first in the arena
        assert not to_host(padding).any() and to_host(moment).any()


# ----------------------------------------------------------------------------- gradients
@pytest.mark.parametrize("device", DEVICES)
def test_backward_accumulates(device):
    model, (ids, targets) = lively(device=device), batch()
    model.loss(ids, targets).backward()
    once = gradients(model)
    assert all(g.any() for g in once.values())
    model.loss(ids, targets).backward()
    close({name: g / 2 for name, g in gradients(model).items()}, once, 1e-6)
    model.zero_grad()
    assert not any(g.any() for g in gradients(model).values())
    model.loss(ids, targets).backward()
    again = gradients(model)
    assert all(np.array_equal(again[name], once[name]) for name in once)  # the same bits


@pytest.mark.parametrize("device", DEVICES)
def test_micro_batches_add_up_to_the_batch(device):
    model, (ids, targets) = lively(device=device), batch(B=6)
    whole = model.loss(ids, targets)
    whole.backward()
    want = gradients(model)
    model.zero_grad()
    inv_count = count_targets(to_device(targets.reshape(-1), device))
    total = 0.0
    for rows in (slice(0, 1), slice(1, 4), slice(4, 6)):
        part = model.loss(ids[rows], targets[rows], inv_count)
        part.backward()
        total += part.item()
    assert total == pytest.approx(whole.item(), rel=1e-6)
    got = gradients(model)
    close(got, want, 5e-6)  # k_norm's gradient is a sum that cancels; all together:
    flat = lambda g: np.concatenate([x.reshape(-1) for x in g.values()])
    assert np.linalg.norm(flat(got) - flat(want)) <= 1e-6 * np.linalg.norm(flat(want))


@pytest.mark.parametrize("device", DEVICES)
def test_a_tied_table_gets_both_gradients(device):
    """Tied, the table's gradient is the sum of what an untied embedding and an untied head get."""
    ids, targets = batch()
    tied, untied = (lively(tie_embeddings=t, device=device) for t in (True, False))
    parameters = dict(untied.named_parameters())
    for name, p in tied.named_parameters():
        parameters[name].data = p.data
    parameters["lm_head.weight"].data = parameters["model.embed_tokens.weight"].data
    for model in (tied, untied):
        model.loss(ids, targets).backward()
    got, want = gradients(tied), gradients(untied)
    want["model.embed_tokens.weight"] += want.pop("lm_head.weight")
    close(got, want, 1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_ignored_targets(device):
    model, (ids, targets) = lively(device=device), batch()
    loss = model.loss(ids, np.full_like(targets, -100))
    loss.backward()
    assert loss.item() == 0 and not any(g.any() for g in gradients(model).values())
    # the last rows hold nothing but ignored targets: they might as well not be there
    targets[2] = -100
    model.loss(ids, targets).backward()
    got = gradients(model)
    model.zero_grad()
    short = model.loss(ids[:2], targets[:2])
    short.backward()
    assert model.loss(ids, targets).item() == pytest.approx(short.item(), rel=1e-6)
    close(got, gradients(model), 1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_unwritten_memory_is_never_read(device, monkeypatch):
    allocate = _launch._allocate

    def poisoned(like, shape, dtype):
        new = allocate(like, shape, dtype)
        new.fill(np.nan) if new.dtype.kind == "f" else new.fill(1 << 24)
        return new

    monkeypatch.setattr(_launch, "_allocate", poisoned)
    model = lively(device=device)
    optimizer = AdamW(model, lr=1e-3)
    ids, targets = batch(2, 5)
    for _ in range(2):
        model.loss(ids, targets).backward()
        optimizer.step()
    assert np.isfinite(to_host(model.arena.weights)).all()
    logits = model(ids)
    logits.backward(to_device(np.ones(logits.shape, np.float32), device))
    assert np.isfinite(to_host(model.arena.grads)).all()
    assert model.generate(ids, 2).shape == (2, 7)


def test_sequences_do_not_see_each_other_nor_the_future():
    model, (ids, _) = lively(), batch()
    before = model(ids).numpy().copy()
    other = ids.copy()
    other[1], other[2, 4:] = 5, 6
    after = model(other).numpy()
    assert np.array_equal(before[0], after[0]) and np.array_equal(before[2, :4], after[2, :4])
    assert not np.allclose(before[2, 4], after[2, 4])


# ----------------------------------------------------------------------------- generate
@pytest.mark.parametrize("device", DEVICES)
def test_greedy_is_the_argmax_of_the_full_forward(device):
    model, (ids, _) = lively(device=device), batch(2, 3)
    out = model.generate(ids, 6)
    assert out.shape == (2, 9) and out.dtype == ids.dtype and np.array_equal(out[:, :3], ids)
    for t in range(3, 9):
        assert np.array_equal(out[:, t], model(out[:, :t]).numpy()[:, -1].argmax(-1))
    assert (out < 100).all()


def test_shapes_and_types_are_kept():
    model, (ids, _) = lively(), batch(2, 3)
    one = model.generate(ids[0].astype(np.int32), 4)
    assert one.shape == (7,) and one.dtype == np.int32
    assert np.array_equal(one, model.generate(ids[:1], 4)[0])
    assert np.array_equal(model.generate(ids, 0), ids)
    assert model.generate(ids.astype(np.uint16), 29).shape == (2, 32)  # up to max_seq_len
    assert not any(to_host(model.arena.grads))


def test_sampling_is_reproducible():
    model, (ids, _) = lively(), batch(2, 3)
    draw = lambda seed, **options: model.generate(ids, 12, temperature=1.0, seed=seed, **options)
    assert np.array_equal(draw(1), draw(1)) and not np.array_equal(draw(1), draw(2))
    same = np.repeat(ids[:1], 2, axis=0)
    rows = model.generate(same, 12, temperature=1.5)
    assert not np.array_equal(rows[0], rows[1])  # equal prompts, numbers of their own


def test_top_k():
    model, (ids, _) = lively(), batch(2, 3)
    greedy = model.generate(ids, 8)
    assert np.array_equal(model.generate(ids, 8, temperature=2.0, top_k=1, seed=5), greedy)
    assert np.array_equal(model.generate(ids, 8, temperature=1e-6, seed=5), greedy)
    free = model.generate(ids, 8, temperature=2.0, seed=5)
    assert np.array_equal(model.generate(ids, 8, temperature=2.0, top_k=1000, seed=5), free)
    out = model.generate(ids, 8, temperature=5.0, top_k=3)
    for t in range(3, 11):
        logits = model(out[:, :t]).numpy()[:, -1]
        chosen = np.take_along_axis(logits, out[:, t : t + 1].astype(int), axis=1)[:, 0]
        assert (chosen >= np.sort(logits, axis=1)[:, -3]).all()


def test_a_row_does_not_depend_on_its_neighbours():
    model, (ids, _) = lively(), batch(3, 4)
    other = ids.copy()
    other[1:] = 7
    a, b = (model.generate(x, 10, temperature=1.0, seed=3) for x in (ids, other))
    assert np.array_equal(a[0], b[0]) and not np.array_equal(a[1], b[1])


def test_generation_ends_with_the_last_sequence():
    model, (ids, _) = lively(), batch(2, 3)
    whole = model.generate(ids, 12, temperature=5.0)
    new = whole[:, 3:].tolist()
    stop = [new[0][2], new[1][5]]
    last = max(next(i for i, x in enumerate(row) if x in stop) for row in new)
    assert 0 < last < 11
    ended = model.generate(ids, 12, temperature=5.0, stop=stop)
    assert np.array_equal(ended, whole[:, : 3 + last + 1])


def test_sampling_follows_the_distribution():
    from xtrain.nn.generation import pick

    logits = np.log(np.array([0.5, 0.3, 0.0001, 0.2], np.float32))
    rng = np.random.default_rng(0)
    counts = np.bincount([pick(logits, 1.0, None, rng) for _ in range(4000)], minlength=4) / 4000
    np.testing.assert_allclose(counts, [0.5, 0.3, 0, 0.2], atol=0.03)
    flat = np.bincount([pick(logits, 1e6, 2, rng) for _ in range(4000)], minlength=4) / 4000
    np.testing.assert_allclose(flat, [0.5, 0.5, 0, 0], atol=0.03)
    assert pick(np.array([1.0, 3.0, 3.0], np.float32), 0, None, rng) == 1  # a tie: the lower id


# ----------------------------------------------------------------------------- bad input
IDS = np.zeros((2, 4), int)


@pytest.mark.parametrize("call", ["model", "loss", "generate"])
@pytest.mark.parametrize(
    "ids, message",
    [
        (np.zeros((2, 33), int), "ids have 33 tokens per sequence, the model supports 32"),
        (IDS + 100, r"ids hold 100: give ids from 0 to 99 \(vocab_size is 100\)$"),
        (IDS - 1, "ids hold -1"),
        (IDS - 100, "ids hold -100"),  # that is allowed for targets only
        (IDS.astype(np.float32), "ids must be whole numbers .* got float32"),
        (IDS.astype(bool), "ids must be whole numbers .* got bool"),
        (np.zeros((1, 2, 3), int), r"of shape \(B, T\), got int64 of shape \(1, 2, 3\)"),
        (np.zeros((0, 4), int), "empty"),
        (np.zeros((2, 0), int), "empty"),
    ],
)
def test_bad_ids(call, ids, message):
    model = Transformer(small())
    with pytest.raises(UserError, match=message):
        if call == "model":
            model(ids)
        elif call == "loss":
            model.loss(ids, ids)
        else:
            model.generate(ids, 0)


@pytest.mark.parametrize(
    "targets, message",
    [
        (IDS[:1], r"targets have shape \(1, 4\), ids \(2, 4\)"),
        (IDS + 100, "targets hold 100"),
        (IDS - 1, r"targets hold -1: .*, or -100 to ignore a position$"),
        (IDS.astype(np.float64), "targets must be whole numbers"),
    ],
)
def test_bad_targets(targets, message):
    with pytest.raises(UserError, match=message):
        Transformer(small()).loss(IDS, targets)


def test_ids_of_one_axis_are_for_generate_only():
    with pytest.raises(UserError, match=r"shape \(B, T\), got int64 of shape \(4,\)"):
        Transformer(small())(IDS[0])


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(max_new_tokens=29), "4 prompt tokens and 29 new ones do not fit into max_seq_len 32"),
        (dict(max_new_tokens=-1), "4 prompt tokens and -1 new ones"),
        (dict(max_new_tokens=1, temperature=-0.5), "temperature"),
        (dict(max_new_tokens=1, temperature=float("nan")), "temperature"),
        (dict(max_new_tokens=1, temperature=1.0, top_k=0), "top_k"),
        (dict(max_new_tokens=1, temperature=1.0, top_k=-3), "top_k"),
    ],
)
def test_bad_generation(arguments, message):
    with pytest.raises(UserError, match=message):
        Transformer(small()).generate(IDS, **arguments)


@pytest.mark.parametrize("prompt", [np.zeros(0, int), np.zeros((1, 0), int), np.zeros((0, 3), int)])
def test_an_empty_prompt(prompt):
    with pytest.raises(UserError, match="prompt is empty"):
        Transformer(small()).generate(prompt, 3)


def test_a_device_that_is_not_there():
    with pytest.raises(UserError, match="'tpu' is not known: choose auto, cpu or gpu"):
        Transformer(small(), device="tpu")


def test_no_seed_no_weights():
    assert not any(x.any() for x in weights(Transformer(small(), None)).values())


# ----------------------------------------------------------------------------- other modules in the places of the library's own
class Wrapped(Module):
    """A module that is not the library's Linear or RMSNorm, and computes the same."""

    def __init__(self, inner):
        self.inner, self.calls = inner, 0

    def __call__(self, x_NC):
        self.calls += 1
        return self.inner(x_NC)


PLACES = ["self_attn.qkv", "self_attn.o_proj", "mlp.gate_up", "mlp.down_proj"]
NORMS = ["input_layernorm", "post_attention_layernorm"]


def wrap(model, place):
    """Wrap the module in this place of every layer. -> the wrappers"""
    found = []
    for layer in model.model.layers:
        *path, name = place.split(".")
        owner = getattr(layer, path[0]) if path else layer
        found.append(Wrapped(getattr(owner, name)))
        setattr(owner, name, found[-1])
    model.renew_arena()
    return found


def step_of(model, ids, targets):
    """-> loss, every gradient as it lies in memory, in the order of the modules"""
    loss = model.loss(ids, targets)
    loss.backward()
    return loss.item(), [to_host(p.grad) for _, p in model.storage()]


@pytest.mark.parametrize("recompute", ["none", "attention", "block"])
@pytest.mark.parametrize("place", [*PLACES, *NORMS])
def test_any_module_is_called(place, recompute):
    """The ops that join a norm or SwiGLU to a product, and these one after the other: the same bits."""
    plain, changed = lively(), lively()
    wrappers = wrap(changed, place)
    for model in (plain, changed):
        model.recompute = recompute
    (want, gradients), (got, changed_gradients) = (step_of(m, *batch()) for m in (plain, changed))
    assert all(w.calls for w in wrappers)
    assert got == want
    assert len(gradients) == len(changed_gradients)
    for a, b in zip(gradients, changed_gradients):
        assert a.any() and np.array_equal(a, b)
    assert np.array_equal(plain(batch()[0]).data, changed(batch()[0]).data)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@small_tiles()
def test_any_module_is_called_in_the_simulator(precision):
    shape = dict(dim=16, n_layers=1, n_heads=1, n_kv_heads=1, head_dim=16, hidden_dim=16)
    plain, changed = (
        Transformer(small(vocab_size=21, **shape), device="sim", precision=precision)
        for _ in range(2)
    )
    for place in (*PLACES, "post_attention_layernorm"):
        wrap(changed, place)
    changed.model.norm = Wrapped(changed.model.norm)
    changed.renew_arena()
    (want, gradients), (got, changed_gradients) = (
        step_of(m, *batch(1, 3, 21)) for m in (plain, changed)
    )
    # bf16: a norm that is not fused rounds its result, not what it computes with
    assert got == pytest.approx(want, rel=1e-6 if precision == "fp32" else 2e-3)
    for a, b in zip(gradients, changed_gradients):
        error = np.linalg.norm(a - b) / np.linalg.norm(a)
        assert error <= (1e-6 if precision == "fp32" else 2e-2)


def test_packed_matrices_are_named_in_place_of_their_module():
    names = lambda model: [name for name, _ in model.named_parameters()]
    model = Transformer(small())
    assert "model.layers.0.self_attn.q_proj.weight" in names(model)
    assert "model.layers.1.mlp.up_proj.weight" in names(model)
    assert not any("qkv" in name or "gate_up" in name for name in names(model))
    paths = [path for path, _ in model.modules()]
    assert "model.layers.0.self_attn.qkv." in paths  # modules keep their own names
    model.extra = [Linear(4, 6, 0.1, {"a.weight": 2, "b.weight": 3})]
    model.other = Linear(4, 6, 0.1, {"c.weight": 6})
    model.renew_arena()
    assert {"extra.a.weight", "extra.b.weight", "c.weight"} <= set(names(model))


def test_nan_logits_end_generation_with_a_sentence():
    """As in the engine, which ends such a sequence with the reason "nan"."""
    model, (ids, _) = lively(), batch(2, 3)
    model.model.embed_tokens.weight.data[ids[0, 0]] = np.nan
    for temperature in (0, 1.0):
        with pytest.raises(UserError, match="the model's logits are NaN"):
            model.generate(ids, 2, temperature=temperature)
    assert np.array_equal(model.generate(ids, 0), ids)


def test_infinite_logits():
    """The same choice as sample_ref of the engine, at every temperature."""
    from xtrain.kernels.decoding.sampling import sample_ref
    from xtrain.nn.generation import pick

    for row in ([1, np.inf, 2, np.inf], [-np.inf] * 4, [-np.inf, 3, -np.inf, 2]):
        logits = np.array(row, np.float32)
        for temperature in (0, 1e-3):
            expected = sample_ref(logits, temperature, 0, 1.0, 1, 0, 0)
            assert expected == logits.argmax()
            assert pick(logits, temperature, None, np.random.default_rng(0)) == expected
