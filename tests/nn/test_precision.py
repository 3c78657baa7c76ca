"""bf16 training against fp32 from the same weights: how far apart may they be, and does bf16 leave fp32 alone?"""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import runs
import torch

from xtrain import AdamW, ModelConfig, Transformer, UserError, device
from xtrain.config import PRESETS, Preset
from xtrain.data.tokenizer import Tokenizer
from xtrain.device import cupy, to_device, to_numpy
from xtrain.kernels.cast import BFLOAT16
from xtrain.nn import model as model_module
from xtrain.nn.model import choose_precision
from xtrain.nn.optim import clip
from xtrain.serving import pretrained
from xtrain.training import start
from xtrain.training.memory_plan import planning

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))

SHAPE = dict(
    vocab_size=2000, dim=384, n_layers=12, n_heads=12, head_dim=32, hidden_dim=1536, max_seq_len=256
)


def batch(seed, B=8, T=256):
    rng = np.random.default_rng(seed)
    ids = (SHAPE["vocab_size"] * rng.random((B, T + 1)) ** 3).astype(np.int32)
    return np.ascontiguousarray(ids[:, :-1]), np.ascontiguousarray(ids[:, 1:])


def norm(x):
    return float(np.linalg.norm(to_numpy(x).astype(np.float64)))


def test_bf16_needs_a_gpu():
    with pytest.raises(UserError, match="choose fp32, or bf16 on a GPU"):
        Transformer(ModelConfig(vocab_size=8, dim=8, n_layers=1, n_heads=1), precision="bf16")
    with pytest.raises(UserError, match="fp8"):
        Transformer(ModelConfig(vocab_size=8, dim=8, n_layers=1, n_heads=1), precision="fp8")


def test_what_bf16_cannot_do_is_said_before_anything_runs(monkeypatch):
    """With MetaArrays: heads without a kernel, a card without the instructions."""
    config = lambda D: ModelConfig(vocab_size=8, dim=32, n_layers=1, n_heads=1, head_dim=D)
    with planning(128):
        Transformer(config(32), None, "gpu", "bf16")
        Transformer(config(24), None, "gpu", "fp32")
        with pytest.raises(
            UserError, match=r"head_dim 16, 32, 64, 128, 256, this model has 24.*fp32"
        ):
            Transformer(config(24), None, "gpu", "bf16")
        for capability, there in (("75", False), ("80", True), ("120", True)):
            card = SimpleNamespace(compute_capability=capability)
            monkeypatch.setattr(device.cupy().cuda, "Device", lambda card=card: card)
            assert device.has_bf16() == there
            if not there:
                with pytest.raises(UserError, match=r"compute capability 8\.0.*precision fp32"):
                    Transformer(config(32), None, "gpu", "bf16")


@pytest.mark.parametrize(
    "where, there, precision",
    [("cpu", True, "fp32"), ("gpu", True, "bf16"), ("gpu", False, "fp32")],
)
def test_serving_takes_bf16_where_it_is(tmp_path, monkeypatch, where, there, precision):
    model = Transformer(ModelConfig(vocab_size=300, dim=16, n_layers=1, n_heads=1, head_dim=16))
    model.save_pretrained(tmp_path)
    Tokenizer.train(["some text"], 300).save(tmp_path)
    asked = []
    monkeypatch.setattr(pretrained, "resolve_device", lambda _: where)
    monkeypatch.setattr(model_module, "has_bf16", lambda: there)
    monkeypatch.setattr(
        pretrained.Transformer, "from_pretrained", lambda folder, *rest, **_: asked.append(rest)
    )
    pretrained.load(tmp_path)
    assert asked == [(where, precision)]


def test_a_head_that_bf16_does_not_support_is_served_in_fp32(tmp_path, monkeypatch, capsys):
    model = Transformer(ModelConfig(vocab_size=300, dim=16, n_layers=1, n_heads=1, head_dim=12))
    model.save_pretrained(tmp_path)
    Tokenizer.train(["some text"], 300).save(tmp_path)
    asked = []
    monkeypatch.setattr(pretrained, "resolve_device", lambda _: "gpu")
    monkeypatch.setattr(model_module, "has_bf16", lambda: True)
    monkeypatch.setattr(
        pretrained.Transformer, "from_pretrained", lambda folder, *rest, **_: asked.append(rest)
    )
    pretrained.load(tmp_path)
    assert asked == [("gpu", "fp32")]
    assert "precision fp32: attention in bf16 supports head_dim 16, 32" in capsys.readouterr().err


def test_what_auto_means(monkeypatch):
    for there in (True, False):
        monkeypatch.setattr(model_module, "has_bf16", lambda there=there: there)
        assert choose_precision("auto", "gpu", 64)[0] == ("bf16" if there else "fp32")
        assert ("compute capability 8.0" in choose_precision("auto", "gpu", 64)[1]) is not there
        assert choose_precision("auto", "cpu", 64)[0] == "fp32"
        precision, why = choose_precision("auto", "gpu", 40)
        assert precision == "fp32" and "this model has 40" in why
        for given in ("fp32", "bf16"):  # Transformer refuses what is not supported
            assert choose_precision(given, "gpu", 40) == (given, "")


def test_words_of_other_libraries():
    """In Python as on the command line."""
    shape = ModelConfig(vocab_size=300, dim=16, n_layers=1, n_heads=1)
    for precision in ("float32", torch.float32, "auto"):
        model = Transformer(shape, device=torch.device("cpu"), precision=precision)
        assert (model.device, model.precision) == ("cpu", "fp32")
    for precision in ("bfloat16", torch.bfloat16):
        assert Transformer(shape, None, "sim", precision).precision == "bf16"
    for precision in ("half", torch.float16):
        with pytest.raises(UserError, match=r"is not supported: use bf16, or fp32$"):
            Transformer(shape, precision=precision)
    with pytest.raises(UserError, match=r"choose a GPU with CUDA_VISIBLE_DEVICES=1 "):
        Transformer(shape, device="cuda:1")


def test_training_takes_bf16_where_it_is(tmp_path, monkeypatch):
    """Up to the making of the model, which needs a GPU."""
    asked = []

    class Enough(Exception): ...

    def made(config, seed, device, precision, *rest, share=None):
        asked.append((config.head_dim, device, precision))
        raise Enough

    monkeypatch.setenv("XTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(start, "resolve_device", lambda _: "gpu")
    monkeypatch.setattr(start, "Transformer", made)
    monkeypatch.setattr(model_module, "has_bf16", lambda: True)
    monkeypatch.setitem(
        PRESETS, "odd", Preset(dict(runs.SHAPE, head_dim=24), PRESETS["test"].train)
    )
    for preset, precision in (("test", "auto"), ("odd", "auto"), ("test", "fp32")):
        with pytest.raises(Enough):
            runs.run(tmp_path, preset=preset, precision=precision)
    assert asked == [(32, "gpu", "bf16"), (24, "gpu", "fp32"), (32, "gpu", "fp32")]


def pair(**changes):
    """-> the same model in fp32 and in bf16"""
    config = ModelConfig(**(SHAPE | changes))
    return [Transformer(config, device="gpu", precision=p) for p in ("fp32", "bf16")]


def round_matrices(model):
    """To numbers that bf16 can represent: its copy of them is then exact."""
    matrices = model.arena.weights[: model.arena.n_decay]
    matrices[...] = matrices.astype(BFLOAT16).astype(np.float32)
    model.arena.version.count += 1


def logits_apart(fp32, bf16, ids):
    """-> mean and 99th percentile of how far logits are apart, and their standard deviation"""
    exact, got = (to_numpy(model(ids).data) for model in (fp32, bf16))
    assert got.dtype == np.float32  # a logit of 1 as bf16 would err by 2e-3 alone
    off = np.abs(exact - got)
    return off.mean(), np.quantile(off, 0.99), exact.std()


KINDS = {
    "qwen3": {},
    "llama": {"qk_norm": False},
    "gqa-tied": {"n_kv_heads": 4, "tie_embeddings": True},
}


def check_gates(models, most_mean, most_p99):
    ids, targets = batch(0)
    losses = [model.loss(ids, targets) for model in models]
    for loss in losses:
        loss.backward()
    assert abs(losses[0].item() - losses[1].item()) < 2e-4
    mean, p99, _ = logits_apart(*models, ids[:2])
    assert mean < most_mean and p99 < most_p99, (mean, p99)
    grads = [model.arena.grads for model in models]
    assert norm(grads[0] - grads[1]) < 1.2e-2 * norm(grads[0])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_gates(kind):
    """From the same weights, which both have exactly: what the arithmetic in bf16 costs."""
    models = pair(**KINDS[kind])
    for model in models:
        round_matrices(model)
    check_gates(models, 2e-3, 8e-3)


@pytest.mark.gpu
def test_gates_with_the_rounding_of_the_weights():
    """Weights of 24 bits, copies of 8. Rounding them alone, and nothing that is computed, moves logits by 1.7e-3."""
    check_gates(pair(), 2.6e-3, 8.5e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("layers, dim, heads, hidden", [(12, 384, 12, 1536), (18, 768, 24, 2048)])
def test_logits_are_as_good_as_those_of_torch(layers, dim, heads, hidden):
    """The error grows with depth and with the size of the logits: torch's autocast, on the same weights, says what is usual."""
    torch = pytest.importorskip("torch")
    from torch_model import Model, load_weights

    models = pair(n_layers=layers, dim=dim, n_heads=heads, hidden_dim=hidden)
    ids = batch(0)[0][:2]
    ours = logits_apart(*models, ids)
    other = Model(models[0].config, ids.shape[1], padded=True)
    load_weights(other, models[0])
    other, there = other.cuda(), torch.from_numpy(ids).long().cuda()

    def logits():
        x = other.embed(there)
        for block in other.blocks:
            x = block(x, other.cos, other.sin)
        return other.head(other.norm(x))[..., : SHAPE["vocab_size"]].float()

    with torch.no_grad():
        exact = logits()
        with torch.autocast("cuda", torch.bfloat16):
            off = (logits() - exact).abs().flatten().cpu().numpy()
    theirs = off.mean(), np.quantile(off, 0.99)
    assert ours[0] < 1.05 * theirs[0] and ours[1] < 1.05 * theirs[1], (ours, theirs)


@pytest.mark.gpu
def test_150_steps_end_together():
    ends = []
    for precision in ("fp32", "bf16"):
        model = Transformer(ModelConfig(**SHAPE), device="gpu", precision=precision)
        optimizer = AdamW(model, lr=5e-4)
        tail = []
        for step in range(150):
            model.zero_grad()
            loss = model.loss(*batch(step))
            loss.backward()
            optimizer.step(clip(model, 1.0)[1])
            tail.append(loss.data)
        ends.append(np.mean([float(to_numpy(x)) for x in tail[-10:]]))
    assert abs(ends[0] - ends[1]) < 0.01, ends


@pytest.mark.gpu
def test_the_copy_follows_the_weights():
    model = Transformer(ModelConfig(**{**SHAPE, "n_layers": 1}), device="gpu", precision="bf16")
    optimizer = AdamW(model, lr=1e-2)
    ids, targets = batch(1, 2, 16)
    same = lambda: np.array_equal(
        to_numpy(model.arena.half).astype(np.float32),
        to_numpy(model.arena.weights.astype(model.arena.half.dtype)).astype(np.float32),
    )
    for _ in range(2):
        model.zero_grad()
        model.loss(ids, targets).backward()
        optimizer.step()
        assert same()  # written by AdamW itself
    name, weight = next(model.named_parameters())
    weight.data = to_device(np.ones(weight.shape, np.float32), "gpu")
    before = model.loss(ids, targets).item()  # refreshed on the way
    assert same() and np.isfinite(before)
    assert cupy() is not None and name == "model.embed_tokens.weight"
