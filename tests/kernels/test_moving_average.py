"""A moving average of the weights: the kernel in the simulator against the reference, the optimizer against float64."""

import json

import numpy as np
import pytest
from checks import normal, to_host, to_kernel
from runs import metrics, options, run

from xtrain import AdamW, ModelConfig, Transformer, UserError
from xtrain.formats.saved_runs import model_folder
from xtrain.kernels.moving_average import averaging_rest, moving_average, moving_average_ref
from xtrain.nn.optim import Muon

TINY = ModelConfig(vocab_size=50, dim=16, n_layers=1, n_heads=2, hidden_dim=24, max_seq_len=16)


@pytest.mark.parametrize("factor", [1.0, np.nan])
@pytest.mark.parametrize("n", [1, 37, 4160])
def test_the_kernel_has_the_bits_of_the_reference(n, factor):
    e, w, rest = normal(1, n), normal(2, n), np.full(1, 0.3, np.float32)
    factor = np.full(1, factor, np.float32)
    got, want = to_kernel(e), e.copy()
    moving_average(got, to_kernel(w), to_kernel(factor), to_kernel(rest))
    moving_average_ref(want, w, factor, rest)
    assert np.array_equal(to_host(got), want)
    assert np.array_equal(want, e) == np.isnan(factor[0])


def test_the_decay_grows():
    assert [averaging_rest(0.999, t) for t in (0, 10)] == pytest.approx([0.9, 0.45])
    assert averaging_rest(0.5, 8) == 0.5 and averaging_rest(0.999, 10**6) == pytest.approx(1e-3)


@pytest.mark.parametrize("kind", [AdamW, Muon])
def test_against_float64(kind):
    """Step 3 is skipped: it counts for the decay, but is not averaged in. The update of the weights is the same as without."""
    model, plain = Transformer(TINY), Transformer(TINY)
    optimizer, other = kind(model, 1e-2, ema_decay=0.8), kind(plain, 1e-2)
    want = model.arena.weights.astype(np.float64)
    for step in range(30):
        gradients = normal(step, model.arena.grads.size)
        factor = np.full(1, np.nan if step == 3 else 1.0, np.float32)
        for m, o in ((model, optimizer), (plain, other)):
            m.arena.grads[...] = gradients
            o.step(factor)
        if step != 3:
            decay = min(0.8, (1 + step) / (10 + step))
            want = decay * want + (1 - decay) * model.arena.weights
    assert np.array_equal(model.arena.weights, plain.arena.weights)
    np.testing.assert_allclose(optimizer.ema, want, atol=1e-6)
    assert other.ema is None and np.abs(want - model.arena.weights).max() > 1e-3


def test_frozen_parameters_keep_their_value():
    model = Transformer(TINY)
    model.model.embed_tokens.weight.requires_grad = False
    before, optimizer = (
        model.model.embed_tokens.weight.data.copy(),
        AdamW(model, 0.1, ema_decay=0.9),
    )
    for _ in range(2):
        model.arena.grads[...] = 1
        optimizer.step()
    averages = dict(model.views(optimizer.ema))
    assert np.array_equal(averages["model.embed_tokens.weight"], before[: TINY.vocab_size])


def test_the_average_is_saved_resumed_and_a_model_of_its_own(tmp_path):
    """The same bytes as without the interruption; a damaged file in the average's folder is noticed."""
    ema = dict(steps=6, save_every=3, ema=0.9)
    run(tmp_path / "a", **ema)
    run(tmp_path / "b", **ema, stop_at=3)
    with pytest.raises(UserError, match=r"ema was 0\.9, is 0\.0"):
        run(tmp_path / "b", steps=6, save_every=3, resume=True)
    run(tmp_path / "b", **ema, resume=True)
    last = [tmp_path / name / "run/checkpoints/step-000006" for name in "ab"]
    for name in (
        "model.safetensors",
        "optimizer.safetensors",
        "ema/model.safetensors",
        "manifest.json",
    ):
        assert (last[0] / name).read_bytes() == (last[1] / name).read_bytes(), name
    assert metrics(tmp_path / "a/run") == metrics(tmp_path / "b/run")
    averaged, model = (Transformer.from_pretrained(last[0] / x) for x in ("ema", ""))
    assert model_folder(tmp_path / "a/run/ema") == last[0] / "ema"
    difference = np.abs(averaged.arena.weights - model.arena.weights).max()
    assert 0 < difference < 0.1
    with open(last[1] / "ema/model.safetensors", "r+b") as file:
        file.seek(-3, 2)
        file.write(b"\x55")
    said = []
    assert model_folder(tmp_path / "b/run", said.append).name == "step-000003"
    assert "ema: model.safetensors is damaged" in said[0]


def test_a_run_without_one(tmp_path):
    """Begins the average with the weights when it is allowed to; and has no folder ema."""
    folder = run(tmp_path, steps=4, stop_at=2)
    with pytest.raises(UserError, match="has no moving average of the weights: train with --ema"):
        model_folder(folder / "ema")
    run(tmp_path, steps=4, resume=True, ema=0.9, allow_change=("ema",), keep=1, save_every=1)
    averaged, model = (Transformer.from_pretrained(folder / x) for x in ("ema", ""))
    assert 0 < np.abs(averaged.arena.weights - model.arena.weights).max() < 1e-2
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert "step-000002" not in names, "an old checkpoint with a folder inside is removed"


def test_skipped_steps_of_a_run_are_not_averaged(tmp_path, monkeypatch):
    from xtrain.nn import functional as F

    forward, calls = F.LinearCrossEntropy.forward, []

    def sometimes(ctx, *args):
        loss = forward(ctx, *args)
        calls.append(len(calls))
        if len(calls) == 2:
            loss[...] = np.nan
        return loss

    monkeypatch.setattr(F.LinearCrossEntropy, "forward", staticmethod(sometimes))
    monkeypatch.setattr("xtrain.training.out_of_memory.check_fits", lambda *_: None)  # a forward
    kind = dict(steps=2, eval_every=9, sample_every=9, ema=0.9, save_every=1, device="cpu")
    folder = run(tmp_path, **kind)
    assert [line["step"] for line in metrics(folder) if "skipped" in line] == [2]
    first, second = (folder / f"checkpoints/step-00000{i}/ema/model.safetensors" for i in (1, 2))
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize("ema", [1.0, -0.1, float("nan")])
def test_a_decay_out_of_range(ema):
    with pytest.raises(UserError, match="--ema must be"):
        options("out", ema=ema).validate()
    with pytest.raises(UserError, match="ema_decay is out of range"):
        AdamW(Transformer(TINY), 1e-3, ema_decay=ema)


def test_state_json_names_the_options(tmp_path):
    folder = run(tmp_path, steps=1, ema=0.5)
    state = json.loads((folder / "checkpoints/step-000001/state.json").read_text())
    names = ("ema", "schedule", "decay_fraction", "decay_shape")
    assert [state["options"][name] for name in names] == [0.5, "cosine", 0.2, "sqrt"]
