"""Engine(weights="int8"), fp8, int4 and nf4: a trained model keeps its perplexity and its greedy tokens,
memory is freed, every kind of model can be served, and what cannot be is refused."""

import gc
import json
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cached import Cached
from checks import on_sim, pairwise, to_host
from evaluating import results
from flash_attention_cases import small_tiles
from observed import Observed, check
from serving import OPTIONS, make_folder, run
from twins import DEVICE, random_model, small

from xtrain import AdamW, Engine, ModelConfig, Transformer, UserError
from xtrain.device import to_device
from xtrain.kernels.experts import expert_gemv
from xtrain.kernels.four_bits import FOUR_BITS
from xtrain.kernels.quantize import KINDS, dense, dequantize, quantize
from xtrain.nn.arena import arena_of
from xtrain.nn.lora import AdaptedTransformer, Lora
from xtrain.nn.optim import clip
from xtrain.nn.quantized import linear_weights, quantize_weights
from xtrain.options import parse
from xtrain.server.listen import Options as ServeOptions
from xtrain.serving.conversation import Options as ChatOptions

GRAMMAR = Path(__file__).parents[1] / "data" / "grammar.txt"
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11, 12, 13], [14, 15]]
SHAPES = {
    "qwen3": small(head_dim=16),
    "qwen2, bias": small(head_dim=16, qk_norm=False, qkv_bias=True),
    "tied, one key head": small(head_dim=32, n_kv_heads=1, tie_embeddings=True),
}
EXPERTS = dict(head_dim=16, n_experts=4, experts_per_token=2, expert_hidden_dim=32)
MIXTURES = {
    "qwen3-moe, an mlp": small(**EXPERTS, dense_layers=(0,), renormalized_experts=True),
    "mixtral": small(**EXPERTS, qk_norm=False, renormalized_experts=True),
    "olmoe": small(**EXPERTS, joint_qk_norm=True, n_kv_heads=4),
    "biases of the router": small(**EXPERTS, expert_bias=True),
}
if DEVICE == "cpu":  # a GPU serves heads of certain widths only
    SHAPES["odd widths"] = small(dim=37, hidden_dim=41, head_dim=6)


def copy_of(model, kind=Transformer, device=DEVICE, precision="fp32"):
    """The same weights in a model that cannot be trained."""
    other = kind(model.config, None, device, precision, trainable=False)
    for (_, a), (_, b) in zip(other.named_parameters(), model.named_parameters()):
        a.data = to_device(to_host(b.data).astype(a.dtype), device)
    return other


def round_weights(model, kind):
    """Replace the matrices of Linear modules, and what else is quantized, by what their codes stand for."""
    for _, parameter in linear_weights(model):
        parameter.data = dequantize(quantize(parameter.data, kind))
    if quantizes_head(model, kind):
        model.lm_head.data = dequantize(quantize(model.lm_head.data, "int8"))
    return model


def quantizes_head(model, kind):
    return kind in FOUR_BITS and not model.config.tie_embeddings


# ----------------------------------------------------------------------------- a trained model
@pytest.fixture(scope="module")
def trained():
    """-> a model trained for some seconds, tokens that it has not seen"""
    text = GRAMMAR.read_text(encoding="utf-8")
    ids = np.unique(list(text), return_inverse=True)[1].astype(np.int32)
    config = ModelConfig(
        vocab_size=int(ids.max()) + 1, dim=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16,
        hidden_dim=128, max_seq_len=64,
    )  # fmt: skip
    model, random, cut = (
        Transformer(config, 0, DEVICE),
        np.random.default_rng(0),
        len(ids) * 9 // 10,
    )
    optimizer = AdamW(model, 4e-3, weight_decay=0.1)
    for _ in range(70):
        rows = np.stack([ids[i : i + 65] for i in random.integers(0, cut - 65, 12)])
        model.zero_grad()
        model.loss(rows[:, :-1].copy(), rows[:, 1:].copy()).backward()
        clip(model, 1.0)
        optimizer.step()
    return model, ids[cut:]


def perplexity(model, ids):
    rows = np.stack([ids[i * 64 : i * 64 + 65] for i in range(len(ids) // 65)])
    return float(np.exp(float(model.loss(rows[:, :-1].copy(), rows[:, 1:].copy()))))


@pytest.mark.parametrize("kind", KINDS)
def test_perplexity_and_greedy_tokens_of_a_trained_model(trained, kind):
    model, ids = trained
    full, served = copy_of(model), copy_of(model)
    before = perplexity(full, ids)
    assert before < 3 < perplexity(Transformer(model.config, 0, DEVICE), ids)  # it has learned
    prompts = [ids[i : i + 12].tolist() for i in range(0, 400, 50)]
    expected = Engine(full, 8).generate(prompts, 40)
    found = Engine(served, 8, weights=kind).generate(prompts, 40)
    rise = abs(perplexity(served, ids) / before - 1)
    if kind in FOUR_BITS:
        assert 0.0005 < rise < 0.05 and len(found) == 8
        return
    assert rise < 0.005
    same = [a == b for x, y in zip(expected, found) for a, b in zip(x, y)]
    assert np.mean(same) >= 0.8 and len(same) == 8 * 40
    # after the first different token the texts are different ones: until then nearly all agree
    first = [next((i for i, (a, b) in enumerate(zip(x, y)) if a != b), 40) for x, y in zip(expected, found)]  # fmt: skip
    assert np.mean(first) > 30


# ----------------------------------------------------------------------------- every kind of model
@pairwise({"shape": [*SHAPES, *MIXTURES], "kind": list(KINDS)})
def test_tokens_are_those_of_the_rounded_weights(shape, kind):
    """Any model that can be served, bit for bit on a CPU; embedding, norms, routers and biases have not been rounded, and the
    head only with weights of four bits."""
    config = (SHAPES | MIXTURES)[shape]
    model = random_model(config)
    rounded, served = round_weights(copy_of(model), kind), copy_of(model)
    options = dict(max_new_tokens=12, temperature=[0.0, 1.0, 0.0, 1.3], logprobs=2)
    expected = Engine(rounded, 4).generate(PROMPTS, **options)
    found = Engine(served, 4, weights=kind).generate(PROMPTS, **options)
    assert found == expected
    if DEVICE == "cpu":
        assert [c.logprobs for c in found] == [c.logprobs for c in expected]
    assert all(p.quantized.kind == kind for _, p in linear_weights(served))
    assert len(linear_weights(served)) == 4 * config.n_layers
    quantized = 4 * config.n_layers + quantizes_head(served, kind)
    assert len(served.arena.parameters) == len(list(served.storage())) - quantized
    table = served.model.embed_tokens.weight.data
    assert np.array_equal(to_host(table), to_host(model.model.embed_tokens.weight.data))
    assert Engine(served, 4, weights=kind).generate(PROMPTS, **options) == found  # again: no change


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_on_quantized_weights(kind):
    """LoRA adapters stay in full precision, on top of the quantized matrices."""
    config, models = SHAPES["qwen3"], []
    for prepare in (round_weights, None):
        model = copy_of(random_model(config), AdaptedTransformer)
        if prepare:
            prepare(model, kind)
        model.adapt(Lora(2, 8), 3)
        for i, (_, tensor) in enumerate(model.named_parameters()):
            values = np.random.default_rng(i).standard_normal(tensor.shape) * 0.3
            tensor.data = to_device(values.astype(np.float32), DEVICE)
        models.append(model)
    rounded, served = models
    base = sum(p.size for p in served.base_arena.parameters)
    expected = Engine(rounded, 4).generate(PROMPTS, 12)
    assert Engine(served, 4, weights=kind).generate(PROMPTS, 12) == expected
    assert Engine(round_weights(copy_of(random_model(config)), kind), 4).generate(PROMPTS, 12) != expected  # fmt: skip
    left = sum(p.size for p in served.base_arena.parameters)
    assert left < base / 2


@pytest.mark.parametrize(
    "shape, kind", [*(("qwen3", kind) for kind in KINDS), ("mixtral", "int4"), ("olmoe", "int8")]
)
def test_batch_invariant(shape, kind):
    """The logits have the bits of the training forward with the same codes."""
    model = copy_of(random_model((SHAPES | MIXTURES)[shape]))
    quantize_weights(model, kind)
    engine = Observed(model, 3)
    out = engine.generate(PROMPTS, [12] * 4, 0.0, seed=[0] * 4)
    check(model, engine, PROMPTS, out)


# ----------------------------------------------------------------------------- in the simulator, as on a GPU
SIM = dict(dim=64, n_layers=1, n_heads=4, n_kv_heads=2, head_dim=16, hidden_dim=64, vocab_size=21)


@pytest.mark.parametrize(
    "kind, precision, most, experts",
    [("int8", "bf16", 0.05, {}), ("fp8", "fp32", 1e-5, {}), ("int4", "bf16", 0.05, {})]
    + [("int4", "fp32", 1e-5, dict(dim=16, n_experts=3, experts_per_token=2, expert_hidden_dim=8))],
)
@small_tiles()
def test_logits_in_the_simulator(kind, precision, most, experts, monkeypatch):
    """Prefill and decoding with the kernels of a GPU against the reference on the CPU, with biases.

    Of experts prefill has grouped products of dequantized matrices, decoding reads the codes.
    """
    monkeypatch.setattr(expert_gemv, "MOST_ROWS_QUANTIZED", 2 if experts else 16)
    widths = {} if precision == "bf16" else dict(dim=32, n_heads=2, n_kv_heads=1, hidden_dim=32)
    widths |= experts
    model = random_model(small(**SIM | widths, qk_norm=False, qkv_bias=True), device="cpu")
    logits = []
    for device, p in (("sim", precision), ("cpu", "fp32")):
        served = copy_of(model, device=device, precision=p)
        for (name, _), (_, tensor) in zip(linear_weights(model), linear_weights(served)):
            codes = quantize(
                dict(linear_weights(model))[name].data, kind
            )  # the kernel for it is slow here
            if device != "cpu":
                codes = on_sim(codes)
            tensor.quantized = replace(codes, dtype=tensor.dtype)
        served.arena = arena_of(served.arena.parameters, served.arena.kind)
        cached = Cached(served, 2, 16)
        prefill = cached.prefill([[1, 2, 3]], [0], [1])
        logits.append((prefill, cached.decode([7, 0], [3, 0], [1, -1])[:1]))
    for got, expected in zip(*logits):
        assert np.abs(got - expected).max() / np.abs(expected).max() <= most


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("slots", [1, 3, 8, 12, 32, 40])
def test_a_graph_changes_no_token(kind, slots):
    """Every kind of decoding step: fused products, products of up to 32 rows, dequantized ones."""
    config = small(**SIM | {"vocab_size": 61}, max_seq_len=48)
    captured, eager = (copy_of(random_model(config), device="gpu", precision="bf16") for _ in "ab")
    prompts = [[1 + i % 50, 2, 3] for i in range(slots + 3)]
    options = dict(max_new_tokens=9, temperature=1.1, seed=4)
    found = Engine(captured, slots, weights=kind).generate(prompts, **options)
    assert found == Engine(eager, slots, weights=kind, graph=False).generate(prompts, **options)


# ----------------------------------------------------------------------------- memory
def bytes_of(arena):
    return sum(a.nbytes for a in (arena.weights, arena.half) if a is not None)


@pytest.mark.parametrize("precision, each", [("fp32", 4), ("bf16", 2)])
def test_a_weight_takes_one_byte(precision, each):
    device = "gpu" if DEVICE == "gpu" else "sim" if precision == "bf16" else "cpu"
    config = small(
        dim=16, hidden_dim=16, head_dim=16, n_heads=1, n_kv_heads=1, n_layers=1, vocab_size=9
    )
    model = copy_of(random_model(config, device="cpu"), device=device, precision=precision)
    whole, matrices = bytes_of(model.arena), [p for _, p in linear_weights(model)]
    elements, rows = sum(p.size for p in matrices), sum(p.shape[0] for p in matrices)
    Engine(model, 2, weights="int8")
    assert bytes_of(model.arena) == whole - each * elements
    assert sum(p.quantized.nbytes for p in matrices) == elements + 4 * rows


def test_the_old_arena_is_freed():
    model = copy_of(random_model(small(dim=64, hidden_dim=256, head_dim=16, n_layers=3)))
    whole, arena, memory = bytes_of(model.arena), weakref.ref(model.arena), weakref.ref(model.arena.weights)  # fmt: skip
    Engine(model, 2, weights="fp8")
    gc.collect()
    assert arena() is None and memory() is None
    codes = sum(p.quantized.nbytes for _, p in linear_weights(model))
    assert bytes_of(model.arena) + codes < 0.35 * whole


# ----------------------------------------------------------------------------- refused
def test_refused():
    model = random_model(SHAPES["qwen3"])
    with pytest.raises(UserError, match=r"weights 'int8' is for serving, .* trainable=False"):
        Engine(model, 2, weights="int8")
    with pytest.raises(UserError, match="weights 'int3' is not known: choose full, int8, fp8"):
        Engine(model, 2, weights="int3")
    served = copy_of(model)
    quantize_weights(served, "int8")
    with pytest.raises(
        UserError, match="is quantized to int8 already: load it again for weights 'fp8'"
    ):
        Engine(served, 2, weights="fp8")
    quantize_weights(served, "full")
    Engine(served, 2)
    weight = served.model.layers[0].mlp.down_proj.weight
    for use in (
        lambda: weight.data,
        lambda: weight.numpy(),
        lambda: list(served.named_parameters()),
    ):
        with pytest.raises(
            UserError, match="is quantized to int8, so only products can use it: load"
        ):
            use()
    with pytest.raises(UserError, match="quantized weights cannot get a new arena"):
        served.renew_arena()
    assert weight.shape == (32, 40) and isinstance(
        dense(weight.value), type(to_device(np.ones(1), DEVICE))
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_weights_that_are_not_numbers_change_nothing(bad):
    model = copy_of(random_model(SHAPES["qwen3"]))
    model.model.layers[1].mlp.gate_up.weight.data[45, 3] = bad
    with pytest.raises(
        UserError, match=r"layers\.1\.mlp\.gate_up\.weight holds NaN or infinity in row 45"
    ):
        Engine(model, 2, weights="int8")
    assert all(p.quantized is None and p.data.size for _, p in linear_weights(model))


def test_experts_that_are_not_numbers_are_named():
    model = copy_of(random_model(MIXTURES["mixtral"]))
    model.model.layers[1].mlp.gate_up.data[45, 3] = np.nan
    with pytest.raises(
        UserError, match=r"layers\.1\.mlp\.experts\.gate_up_proj\.weight holds NaN .* in row 45"
    ):
        Engine(model, 2, weights="int4")


def test_a_quantized_model_is_not_saved(tmp_path):
    model = copy_of(random_model(SHAPES["qwen3"]))
    quantize_weights(model, "int8")
    with pytest.raises(UserError, match="is quantized to int8"):
        model.save_pretrained(tmp_path / "model")


# ----------------------------------------------------------------------------- commands
def test_commands(tmp_path, capsys):
    folder = make_folder(tmp_path / "model", dim=64, hidden_dim=64)
    texts = {}
    for kind in ("full", *KINDS):
        code, texts[kind], err = run(
            capsys, "--model", folder, *OPTIONS, "--weights", kind, "def f(x)"
        )
        assert code == 0, err
    assert all(text.startswith("def f(x)") for text in texts.values())
    code, text, _ = run(capsys, "--model", folder, *OPTIONS, "--quantization=fp8_e4m3", "def f(x)")
    assert (code, text) == (0, texts["fp8"])
    code, _, err = run(capsys, "--model", folder, "--load-in-8bit", "def f(x)")
    assert code == 2 and "use --weights int8" in err
    for kind in (ChatOptions, ServeOptions):
        line = ["--model", "m", "--weights", "int8"]
        assert parse(kind, "command", None, line).weights == "int8"
        assert parse(kind, "command", None, line[:2]).weights == "full"


def test_evaluate(tmp_path, capsys):
    folder = make_folder(tmp_path / "model", dim=64, hidden_dim=64)
    text = tmp_path / "text.txt"
    text.write_text("def f(x):\n    return x + 1\n" * 8, encoding="utf-8")
    found = {
        k: results(capsys, tmp_path, folder, text, "--weights", k)[0] for k in ("full", "int8")
    }
    a, b = (json.dumps(x, sort_keys=True) for x in found.values())
    assert a != b and found["full"].keys() == found["int8"].keys()
