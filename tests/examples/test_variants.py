"""examples/change_the_model: each variant trains like plain PyTorch; saving and rejecting variants."""

import copy
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as TF
from checks import normal, rng
from observed import check as check_bits
from observed import tight
from runs import SILENT, assert_same_run, metrics, options
from transformers import AutoModelForCausalLM
from twins import set_weights, small

from xtrain import AdamW, Engine, TrainConfig, Transformer, UserError
from xtrain.inspect import compare
from xtrain.inspect.gradcheck import check
from xtrain.nn import functional as F
from xtrain.nn import modules as nn
from xtrain.nn.model import Attention, Block
from xtrain.nn.modules import RMSNorm
from xtrain.nn.tensor import Tensor
from xtrain.train import train
from xtrain.training.model_summary import parameter_table
from xtrain.training.run import Run

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "change_the_model"))

import variants

CONFIG = small(n_layers=3, max_seq_len=16)
IDS = np.arange(12).reshape(2, 6)


def random_weights(model):
    for i, (_, tensor) in enumerate(model.named_parameters()):
        values = normal([3, i], *tensor.shape)
        values = 1 + 0.2 * values if tensor.ndim == 1 else values * tensor.shape[1] ** -0.5
        set_weights(tensor, values.astype(np.float32))
    return model


HEADS, KEYS = CONFIG.n_heads * CONFIG.head_dim, CONFIG.n_kv_heads * CONFIG.head_dim
PACKED = {  # the module that holds a matrix, its first row there
    "q_proj": ("qkv", 0), "k_proj": ("qkv", HEADS), "v_proj": ("qkv", HEADS + KEYS),
    "gate_proj": ("gate_up", 0), "up_proj": ("gate_up", CONFIG.hidden_dim),
}  # fmt: skip


def batch(seed, B=3, T=10):
    ids = rng(seed).integers(0, CONFIG.vocab_size, (B, T + 1))
    return ids[:, :-1], np.where(ids[:, 1:] % 5 == 0, -100, ids[:, 1:])


def norm(x, w):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + CONFIG.norm_eps) * w


class Twin:
    """The same model in plain PyTorch. The attributes below select the variant."""

    def __init__(self, model):
        self.p = {
            n: torch.tensor(t.numpy(), requires_grad=t.requires_grad)
            for n, t in model.named_parameters()
        }
        self.no_positions, self.parallel, self.cap, self.act, self.lora = (), (), None, None, 0
        D = CONFIG.head_dim
        angles = torch.arange(16).double()[:, None] * 10000.0 ** (
            -torch.arange(0, D, 2).double() / D
        )
        self.cos, self.sin = (f(angles).float()[:, None] for f in (torch.cos, torch.sin))

    def linear(self, x, name):
        w = self.p[name + ".weight"]
        *path, last = name.split(".")
        packed, first = PACKED.get(last, (last, 0))
        adapter = ".".join([*path, packed])
        if adapter + ".lora_a" not in self.p:
            return x @ w.T
        rows = self.p[adapter + ".lora_b"][first : first + len(w)]
        return x @ w.T + self.lora * (x @ self.p[adapter + ".lora_a"].T @ rows.T)

    def rotate(self, x, i):
        (a, b), T = x.chunk(2, -1), x.shape[1]
        c, s = self.cos[:T], self.sin[:T]
        return x if i in self.no_positions else torch.cat([a * c - b * s, b * c + a * s], -1)

    def attention(self, x, i):
        (B, T, _), at = x.shape, f"model.layers.{i}.self_attn."
        q, k, v = (
            self.linear(x, at + n).view(B, T, -1, CONFIG.head_dim)
            for n in ("q_proj", "k_proj", "v_proj")
        )
        if at + "q_norm.weight" in self.p:
            q, k = (
                norm(x, self.p[at + n]) for x, n in ((q, "q_norm.weight"), (k, "k_norm.weight"))
            )
        q, k = self.rotate(q, i), self.rotate(k, i)
        k, v = (x.repeat_interleave(CONFIG.n_heads // CONFIG.n_kv_heads, 2) for x in (k, v))
        s = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(CONFIG.head_dim)
        p = s.masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf).softmax(-1)
        self.maps = {**getattr(self, "maps", {}), f"layer {i}": p}
        o = torch.einsum("bhts,bshd->bthd", p, v).flatten(2)
        return self.linear(o, at + "o_proj")

    def mlp(self, x, i):
        at = f"model.layers.{i}.mlp."
        up = self.linear(x, at + "up_proj")
        u = self.act(up) if self.act else TF.silu(self.linear(x, at + "gate_proj")) * up
        return self.linear(u, at + "down_proj")

    def __call__(self, ids):
        h = self.p["model.embed_tokens.weight"][torch.tensor(ids)]
        for i in range(CONFIG.n_layers):
            first, second = (
                self.p[f"model.layers.{i}.{n}.weight"]
                for n in ("input_layernorm", "post_attention_layernorm")
            )
            attended = h + self.attention(norm(h, first), i)
            h = attended + self.mlp(norm(h if i in self.parallel else attended, second), i)
        self.hidden = norm(h, self.p["model.norm.weight"])
        logits = self.linear(self.hidden, "lm_head")
        return self.cap * torch.tanh(logits / self.cap) if self.cap else logits

    def loss(self, ids, targets):
        return TF.cross_entropy(self(ids).flatten(0, 1), torch.tensor(targets).flatten())

    def adamw(self, lr, only=lambda name: True):
        p = {n: x for n, x in self.p.items() if x.requires_grad and only(n)}
        groups = [
            ([x for x in p.values() if (x.ndim > 1) is d], w)
            for d, w in ((True, 0.1), (False, 0.0))
        ]
        groups = [dict(params=x, weight_decay=w) for x, w in groups]
        return torch.optim.AdamW(groups, lr, betas=(0.9, 0.95), eps=1e-8)


def train_both(model, twin, loss=None, their_loss=None, optimizer=None, step=None, steps=5):
    optimizer = optimizer or AdamW(model, lr=3e-3)
    step = step or twin.adamw(3e-3).step
    for i in range(steps):
        model.zero_grad()
        ours = (loss or model.loss)(*batch(i))
        ours.backward()
        optimizer.step()
        for p in twin.p.values():
            p.grad = None
        theirs = (their_loss or twin.loss)(*batch(i))
        theirs.backward()
        step()
        assert ours.item() == pytest.approx(theirs.item(), rel=1e-5), f"step {i}"


# ----------------------------------------------------------------------------- models
def test_another_mlp():
    model = random_weights(variants.with_plain_mlps(Transformer(CONFIG), F.silu))
    twin = Twin(model)
    twin.act = TF.silu
    train_both(model, twin)


def test_capped_logits():
    model = random_weights(variants.Capped(CONFIG))
    head = model.lm_head
    head.data = head.data * 20  # so that the cap has an effect
    twin = Twin(model)
    twin.cap = 30.0
    train_both(model, twin)
    ids = batch(0)[0]
    assert np.abs(model(ids).data).max() <= 30
    last = model.generate(ids[:1], 1)[0, -1]
    assert last == twin(ids[:1])[0, -1].argmax()


def test_a_second_term_of_the_loss():
    model = random_weights(Transformer(CONFIG))
    twin = Twin(model)

    def their_loss(ids, targets):
        logits = twin(ids).flatten(0, 1)
        z = logits.logsumexp(-1).square().mean()
        return TF.cross_entropy(logits, torch.tensor(targets).flatten()) + 0.1 * z

    train_both(model, twin, lambda *b: variants.loss_with_z(model, *b, weight=0.1), their_loss)


def test_layers_of_different_kinds():
    model = random_weights(variants.mixed(Transformer(CONFIG)))
    twin = Twin(model)
    twin.no_positions, twin.parallel = (1,), (2,)
    assert "model.layers.0.self_attn.q_norm.weight" not in twin.p
    train_both(model, twin)


PLACES = ["self_attn.qkv", "self_attn.o_proj", "mlp.gate_up", "mlp.down_proj"]


@pytest.mark.parametrize("places", [*([place] for place in PLACES), PLACES], ids=" ".join)
def test_lora_leaves_the_rest_alone(places):
    model = random_weights(Transformer(CONFIG))
    before = {name: p.numpy().copy() for name, p in model.named_parameters()}
    variants.with_lora(model, r=4, alpha=8, places=places)
    twin = Twin(model)
    twin.lora = 2.0
    train_both(model, twin)
    after = {name: p.numpy() for name, p in model.named_parameters()}
    assert all(np.array_equal(after[name], x) for name, x in before.items())
    adapters = {name: x for name, x in after.items() if "lora" in name}
    assert len(adapters) == 2 * CONFIG.n_layers * len(places)
    assert all(x.any() for x in adapters.values())


@pytest.mark.parametrize("f, shape", [(lambda x: variants.SoftCap.apply(x, 3.0), (3, 4)), (variants.SquaredLogSum.apply, (5, 7))])  # fmt: skip
def test_gradcheck(f, shape):
    assert max(check(f, [normal(1, *shape).astype(np.float64)])) < 1e-6


# ----------------------------------------------------------------------------- optimizers
def test_lion():
    model = random_weights(Transformer(CONFIG))
    model.model.norm.weight.requires_grad = False  # so that there are two ranges
    twin, optimizer = Twin(model), variants.Lion(model, lr=1e-3)
    momenta = {n: torch.zeros_like(p) for n, p in twin.p.items()}

    @torch.no_grad()
    def step():
        for name, p in twin.p.items():
            if p.requires_grad:
                m, g = momenta[name], p.grad
                p -= 1e-3 * ((0.9 * m + 0.1 * g).sign() + (0.1 * p if p.ndim > 1 else 0))
                m.mul_(0.95).add_(g, alpha=0.05)

    train_both(model, twin, optimizer=optimizer, step=step)
    before = model.arena.weights.copy()
    optimizer.step(np.full(1, np.nan, np.float32))  # a skipped step
    assert np.array_equal(model.arena.weights, before)


def test_muon():
    model = random_weights(Transformer(CONFIG))
    twin, matrix = Twin(model), lambda name: ".layers." in name and "norm" not in name
    adamw, momenta = twin.adamw(3e-3, lambda name: not matrix(name)), {}

    @torch.no_grad()
    def step():
        adamw.step()
        for name, p in twin.p.items():
            if matrix(name):
                m = momenta[name] = 0.95 * momenta.get(name, 0) + p.grad
                x = p.grad + 0.95 * m
                x = x / (x.norm() + 1e-7)
                x = x if x.shape[0] <= x.shape[1] else x.T
                for _ in range(5):
                    a = x @ x.T
                    x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
                x = x if x.shape == p.shape else x.T
                p -= 0.02 * max(1, p.shape[0] / p.shape[1]) ** 0.5 * x

    train_both(model, twin, optimizer=variants.Muon(model, lr=3e-3), step=step)


# ----------------------------------------------------------------------------- looking inside
def test_hidden_states_attention_and_log_probabilities():
    model, (ids, _) = random_weights(Transformer(CONFIG)), batch(0)
    twin = Twin(model)
    logs = twin(ids)[:, :-1].log_softmax(-1).gather(-1, torch.tensor(ids[:, 1:, None]))[..., 0]
    close = lambda ours, theirs: np.testing.assert_allclose(ours, theirs.detach(), atol=2e-5)
    close(variants.log_probabilities(model, ids), logs)
    close(model.hidden(ids).numpy().reshape(*ids.shape, -1), twin.hidden)
    maps = variants.attention_weights(model, ids)
    assert maps.keys() == twin.maps.keys()
    for layer, p in maps.items():
        close(p, twin.maps[layer])


# ----------------------------------------------------------------------------- saving, loading, rejecting
@pytest.mark.parametrize(
    "make, found",
    [
        (lambda: variants.with_plain_mlps(Transformer(CONFIG), F.silu), "mlp.PlainMLP"),
        (lambda: variants.Capped(CONFIG), "logits of Capped"),
        (lambda: variants.mixed(Transformer(CONFIG)), "layers.0.self_attn.config"),
        (lambda: variants.with_lora(Transformer(CONFIG)), "o_proj.LoRA"),
    ],
)
def test_a_variant_is_not_taken_for_a_llama(make, found, tmp_path):
    model, other = random_weights(make()), make()
    model.save_pretrained(tmp_path)
    assert found in model.variation and found in other.variation
    with pytest.raises(UserError, match="none that other programs know"):
        Transformer.from_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "xtrain"
    other.load_weights(tmp_path)
    ids = batch(0)[0]
    assert np.array_equal(other(ids).data, model(ids).data)


class OwnHidden(Transformer):
    """The hidden states are doubled."""

    def hidden(self, ids, sequences=None):
        return super().hidden(ids, sequences) * 2.0


LONG = replace(CONFIG, max_seq_len=32)


class Twice(Block):
    """A block whose attention runs twice, so it stores two sets of keys and values."""

    def __call__(self, h, sequences):
        return super().__call__(super().__call__(h, sequences), sequences)


def with_twice():
    model = Transformer(LONG)
    model.model.layers[1] = Twice(LONG)
    model.renew_arena()
    return model


def with_other_heads():
    """Layers whose keys and values have different shapes, and norms of the user's own."""

    class Squared(RMSNorm):
        def __call__(self, *inputs, **options):
            return super().__call__(*inputs, **options) * 1.5

    model = Transformer(LONG)
    layers = model.model.layers
    layers[0].self_attn = Attention(replace(LONG, n_kv_heads=LONG.n_heads))
    layers[1].self_attn = Attention(replace(LONG, n_kv_heads=1))
    layers[2].self_attn.q_norm = Squared(LONG.head_dim, LONG.norm_eps)
    layers[2].input_layernorm = Squared(LONG.dim, LONG.norm_eps)
    model.renew_arena()
    return model


SERVED = {
    "plain mlps": lambda: variants.with_plain_mlps(Transformer(LONG), F.silu),
    "capped logits": lambda: variants.Capped(LONG),
    "mixed layers": lambda: variants.mixed(Transformer(LONG)),
    "lora everywhere": lambda: variants.with_lora(Transformer(LONG), places=PLACES),
    "own hidden": lambda: OwnHidden(LONG),
    "attention twice": with_twice,
    "other heads and norms": with_other_heads,
}


@pytest.mark.parametrize("make", SERVED.values(), ids=SERVED)
def test_what_can_be_trained_can_be_served(make):
    """The engine gives the tokens of the full forward pass, in prefill, chunks, decoding and after preemption."""
    model, prompts = random_weights(make()), [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11]]
    engine = Engine(model, 3, 32, prefill_tokens=4, block_tokens=16)
    tight = Engine(model, 3, 32, block_tokens=16, cache_bytes=3 * engine.cache.block_bytes)
    for served in (engine, tight):
        for prompt, completion in zip(prompts, served.generate(prompts, 18)):
            full = model.generate(np.array(prompt), 18)[len(prompt) :].tolist()
            assert full == list(completion)
    assert any(step.preempted for step in tight.trace)


class Mean(nn.Module):
    """Adds the mean of the rows so far: another way to mix tokens than attention."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def __call__(self, x_NC, *args):
        rows_N1 = np.arange(1, len(x_NC.data) + 1, dtype=np.float32)[:, None]
        return self.inner(x_NC, *args) + Tensor(np.cumsum(x_NC.data, 0) / rows_N1)


@pytest.mark.parametrize("place", ["self_attn", "mlp"])
def test_a_layer_that_mixes_tokens_without_the_cache_is_refused(place):
    """Next to layers that use the cache, its tokens would be wrong without a word."""
    model = random_weights(Transformer(LONG))
    layer = model.model.layers[1]
    setattr(layer, place, Mean(getattr(layer, place)))
    model.renew_arena()
    with pytest.raises(UserError, match="one of whose layers reads other tokens without the KV"):
        Engine(model)


@pytest.mark.parametrize("make", SERVED.values(), ids=SERVED)
def test_served_in_batch_invariant_mode_with_the_bits_of_training(make):
    model, prompts = random_weights(make()), [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11]]
    engine = tight(model, 4, 16, 32, max_batch=3, prefill_tokens=4)
    check_bits(model, engine, prompts, engine.generate(prompts, 16, 1.0, seed=[1, 2, 3]))
    assert any(step.preempted for step in engine.trace)


def test_models_without_a_variation(tmp_path):
    class OwnLoss(Transformer):
        def loss(self, ids, targets, inv_count=None):
            return super().loss(ids, targets, inv_count) * 2

    model = OwnLoss(CONFIG)
    assert model.variation == Transformer(replace(CONFIG, qk_norm=False)).variation == ""
    model.save_pretrained(tmp_path)
    assert Transformer.from_pretrained(tmp_path).variation == ""
    model.lm_head = model.model.embed_tokens.weight  # a tensor would be missing in its file
    assert model.variation == "parameters in two places"


@pytest.mark.parametrize(
    "changes, found, n",
    [
        ({}, dict(n_layers=2), 2),
        (dict(qk_norm=False, no_rope_layers=(0, 2)), dict(no_rope_layers=(0, 1)), 2),
        (dict(sliding_window=4, full_attention_layers=(1, 2)), dict(full_attention_layers=(1,)), 2),
        ({}, dict(n_layers=4), 4),
    ],
)
def test_layers_that_are_removed_or_added_leave_a_plain_model(tmp_path, changes, found, n):
    model = Transformer(replace(CONFIG, **changes))
    if n == 2:
        del model.model.layers[1]
    else:
        model.model.layers.append(copy.deepcopy(model.model.layers[0]))
    model.renew_arena()
    logits = model(IDS).data
    model.save_pretrained(tmp_path)
    again = Transformer.from_pretrained(tmp_path)
    assert model.variation == "" and again.config == model.saved_config
    assert again.config.n_layers == n and vars(again.config).items() >= found.items()
    assert np.array_equal(again(IDS).data, logits)
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path)(torch.tensor(IDS)).logits
    assert abs(theirs.numpy() - logits).max() < 1e-4
    assert Engine(model).generate([[1, 2, 3]], 4) == Engine(again).generate([[1, 2, 3]], 4)


def test_a_change_that_removes_a_layer_is_made_again(tmp_path, monkeypatch):
    code = "def shorter(model):\n    model.model.layers.pop()\n    model.renew_arena()\n    return model"
    (tmp_path / "changed_layers.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    model = Transformer(CONFIG).changed("changed_layers:shorter")
    assert model.variation == "2 layers" and model.saved_config == CONFIG
    model.save_pretrained("m")
    again = Transformer.from_pretrained("m", change="changed_layers:shorter")
    assert np.array_equal(again(IDS).data, model(IDS).data)
    model = Transformer(CONFIG)
    model.model.layers.clear()
    assert model.variation == "0 layers" and model.saved_config == CONFIG


def test_a_custom_run_resumes_bit_for_bit(tmp_path, monkeypatch):
    monkeypatch.setenv("XTRAIN_CACHE", str(tmp_path / "cache"))
    kind = dict(steps=6, eval_every=4, save_every=3, sample_every=6, device="cpu")
    mine = lambda out, **more: train(
        options(tmp_path / out, **kind, **more), SILENT, make_run=variants.MyRun
    )
    whole = mine("a")
    mine("b", stop_at=3)
    assert_same_run(whole, mine("b", resume=True))
    rates = [step["lr"] for step in metrics(whole) if "loss" in step]
    assert rates[0] == 5e-4 and rates[-1] == pytest.approx(5e-4 * 5 / 6)
    with pytest.raises(UserError, match=r"variation was .*PlainMLP"):
        train(options(tmp_path / "b", **kind, resume=True), SILENT)


def test_stages_of_a_variant():
    """Blocks of several classes, one of which inherits its __call__, in what compare and the report use."""
    model = variants.mixed(Transformer(CONFIG))
    model.model.layers[1] = type("Heir", (type(model.model.layers[1]),), {})(CONFIG)
    model.renew_arena()
    ids = batch(0)[0]
    assert set(variants.attention_weights(model, ids)) == {"layer 0", "layer 1", "layer 2"}
    assert "layer 2 output" in compare.stages(model, ids)


def test_custom_modules_have_a_line_in_the_tables():
    model = Transformer(CONFIG)
    model.gate = nn.Parameter((3, 4), 0.1, {"gate.weight": 3})
    model.model.extra = nn.Linear(4, 4, 0.1)
    model.renew_arena()
    parts, numbers, _ = (list(column.cells) for column in parameter_table(model).columns)
    assert parts[:6] == ["embedding", "attention", "MLP", "norms", "head", "other"]
    assert numbers[5] == "28" and parts[-2].startswith("core")
    counts = [int(number.replace(",", "")) for number in numbers]
    assert counts[-1] == sum(counts[:6]) == counts[-2] + counts[0] + counts[4]
    c = TrainConfig(batch=2, micro_batch=2, seq_len=8, steps=2, lr=1e-3, warmup=0)
    run = Run(c, model, SimpleNamespace(loader=lambda *_: None))
    for _, p in model.storage():
        p.grad = np.ones(p.shape, np.float32)
    norms = run.layer_norms()
    assert norms["other"] == pytest.approx(28**0.5)
    assert norms["head"] == pytest.approx((CONFIG.padded_vocab_size * CONFIG.dim) ** 0.5)
