"""LoRA: gradients against torch, PEFT's files both ways, a run stopped and resumed, the engine on a model with adapters."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import twins
from checks import rng, to_host
from runs import SILENT, assert_same_run, metrics

from xtrain import Transformer, batch_invariant
from xtrain.config import ModelConfig
from xtrain.data.tokenizer import Tokenizer
from xtrain.errors import UserError
from xtrain.export import main as export
from xtrain.finetune import finetune, main
from xtrain.formats.tensor_file import read_header
from xtrain.kernels.quantize import KINDS, dequantize, quantize
from xtrain.nn.lora import TARGETS, AdaptedTransformer, Lora
from xtrain.nn.quantized import linear_weights, quantize_onto, quantize_weights
from xtrain.serving.adapters import add_adapters
from xtrain.serving.engine import Engine
from xtrain.serving.pretrained import load as load_for_serving
from xtrain.training.memory_plan import OUTSIDE, plan
from xtrain.tuning.finetune import FinetuneConfig, check_further

SHAPE = dict(vocab_size=300, max_seq_len=64, tie_embeddings=True)
SOME = ("q_proj", "v_proj", "down_proj", "up_proj")
# (out, in) of q, k, v, o, gate, up and down of a Llama of 1.1 B parameters
MATRICES = [(2048, 2048), (256, 2048), (256, 2048), (2048, 2048), *[(5632, 2048)] * 2, (2048, 5632)]


def adapted(model_of, lora, seed=0):
    """A model with adapters that are not zero, frozen with the weights of model_of."""
    model = AdaptedTransformer(model_of.config, None, twins.DEVICE, trainable=False)
    for (_, mine), (_, theirs) in zip(model.named_parameters(), model_of.named_parameters()):
        twins.set_weights(mine, to_host(theirs.data))
    model.adapt(lora)
    for i, (_, tensor) in enumerate(model.named_parameters()):
        twins.set_weights(tensor, (0.2 * rng(seed, i).standard_normal(tensor.shape)).astype("f4"))
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantized_base_gives_the_gradients_of_what_it_stands_for(kind):
    """Bit for bit on a CPU: products and their backward multiply by the dequantized matrix."""
    base = twins.random_model(twins.small(**SHAPE))
    gradients = []
    losses = []
    for quantized in (False, True):
        model = adapted(base, Lora(4, 6.0, SOME))
        if quantized:
            quantize_weights(model, kind)
        else:
            for _, parameter in linear_weights(model):
                parameter.data = dequantize(quantize(parameter.data, kind))
        loss = model.loss(*twins.batch(base.config, 2, 20))
        loss.backward()
        losses.append(loss.item())
        gradients.append(twins.gradients(model))
    assert gradients[0].keys() == gradients[1].keys() and len(gradients[0]) == 4 * len(SOME)
    tolerance = dict(rtol=1e-4, atol=1e-6) if twins.DEVICE == "gpu" else dict(rtol=0, atol=0)
    np.testing.assert_allclose(losses[1], losses[0], **tolerance)
    for name, expected in gradients[0].items():
        np.testing.assert_allclose(gradients[1][name], expected, err_msg=name, **tolerance)


def test_a_model_is_quantized_onto_a_device():
    shape = dict(
        vocab_size=16, dim=16, n_layers=1, n_heads=1, n_kv_heads=1, head_dim=16, hidden_dim=8
    )
    base = twins.random_model(twins.small(**shape), device="cpu")
    model = Transformer(base.config, None, "cpu", trainable=False)
    for (_, mine), (_, theirs) in zip(model.named_parameters(), base.named_parameters()):
        mine.data = theirs.data
    device = "gpu" if twins.DEVICE == "gpu" else "sim"
    quantize_onto(model, "int8", device, "bf16")
    assert (model.device, model.precision, model.arena.kind[:2]) == (device, "bf16", (device, True))
    table = to_host(model.model.embed_tokens.weight.data).astype("f")
    np.testing.assert_allclose(table, to_host(base.model.embed_tokens.weight.data), rtol=1 / 256)
    for (name, mine), (_, theirs) in zip(linear_weights(model), linear_weights(base)):
        expected = dequantize(quantize(theirs.data, "int8"))
        found = to_host(dequantize(mine.quantized)).astype("f")
        np.testing.assert_allclose(found, expected, rtol=1 / 256, err_msg=name)


@pytest.mark.parametrize("recompute", ["none", "block"])
@pytest.mark.parametrize(
    "targets, changes",
    [(TARGETS, dict(qkv_bias=True, qk_norm=False)), (SOME, twins.GEMMA3)],
    ids=["all", "some, gemma3"],
)
def test_loss_and_gradients_are_those_of_torch(targets, changes, recompute):
    """torch differentiates the model whose matrices are w + f b a."""
    base = twins.random_model(twins.small(**SHAPE, **changes))
    model, f = adapted(base, Lora(4, 6.0, targets)), 1.5
    model.recompute = recompute
    ids, targets_BT = twins.batch(base.config, 2, 20)
    loss = model.loss(ids, targets_BT)
    loss.backward()
    found = twins.gradients(model)
    assert {name.split(".")[-3] for name in found} == set(targets) and len(found) == 4 * len(
        targets
    )
    theirs = twins.twin(base).requires_grad_(False)
    ours = {n: torch.tensor(w, requires_grad=True) for n, w in twins.weights(model).items()}
    changed = {}
    for name in (n for n in ours if ".lora_A." in n):
        w = theirs.get_parameter(target := name.replace(".lora_A.", "."))
        changed[target] = w + f * ours[name.replace("lora_A", "lora_B")] @ ours[name]
    logits = torch.func.functional_call(theirs, changed, (torch.tensor(ids),)).logits
    labels = torch.tensor(targets_BT).reshape(-1)
    want = torch.nn.functional.cross_entropy(logits.reshape(len(labels), -1), labels)
    want.backward()
    assert abs(loss.item() - want.item()) < 1e-5
    for name, gradient in found.items():
        expected = ours[name].grad.numpy()
        np.testing.assert_allclose(gradient, expected, rtol=1e-3, atol=1e-5 * abs(expected).max())
    assert all(p.grad is None for p in model.base_arena.parameters)


def test_new_adapters_change_nothing():
    base = twins.random_model(twins.small(**SHAPE))
    model = AdaptedTransformer(base.config, None, twins.DEVICE, trainable=False)
    for (_, mine), (_, theirs) in zip(model.named_parameters(), base.named_parameters()):
        mine.data = theirs.data
    model.adapt(Lora(8, 16))
    ids, _ = twins.batch(base.config, 2, 9)
    np.testing.assert_allclose(model(ids).numpy(), base(ids).numpy(), atol=1e-5)
    a = dict(model.named_parameters())["model.layers.0.self_attn.q_proj.lora_A.weight"]
    assert np.std(a.numpy()) == pytest.approx((3 * base.config.dim) ** -0.5, rel=0.2)


def test_without_adapters_a_model_is_its_base():
    base = twins.random_model(twins.small(**SHAPE))
    model = adapted(base, Lora(4, 8))
    ids, _ = twins.batch(base.config, 2, 9)
    with_them = model(ids).numpy()
    with model.without_adapters():
        assert np.array_equal(model(ids).numpy(), base(ids).numpy())
    assert np.array_equal(model(ids).numpy(), with_them)
    assert not np.array_equal(with_them, base(ids).numpy())


def test_rows_do_not_depend_on_other_rows():
    model = adapted(twins.random_model(twins.small(**SHAPE)), Lora(4, 8))
    ids, _ = twins.batch(model.config, 5, 21)
    with batch_invariant():
        together = model(ids).numpy()
        alone = np.concatenate([model(ids[i : i + 1]).numpy() for i in range(5)])
    assert np.array_equal(together, alone)


@pytest.mark.parametrize(
    "changes, options",
    [
        ({}, dict(dora=True)),
        (dict(tie_embeddings=False), dict(targets=("q_proj", "lm_head", "embed_tokens"), modules_to_save=("norm",))),
        (twins.GEMMA3, {}),
    ],
    ids=["qwen3, dora", "tables", "gemma3"],
)  # fmt: skip
def test_the_engine_serves_a_model_with_adapters(tmp_path, changes, options):
    base = twins.random_model(twins.small(**SHAPE | changes, head_dim=16))
    base.save_pretrained(tmp_path / "base")
    model = adapted(base, Lora(4, 8, **dict(targets=SOME, base=str(tmp_path / "base")) | options))
    model.save_pretrained(tmp_path / "adapter")
    merged = Transformer.from_pretrained(tmp_path / "adapter", twins.DEVICE)
    prompts = [list(range(1, 9)), [5, 4, 3]]
    answers = [Engine(m, 2).generate(prompts, 12) for m in (model, merged)]
    assert answers[0] == answers[1]


def test_a_model_of_a_billion_parameters_fits_into_6_gb():
    shape = dict(dim=2048, n_layers=22, n_heads=32, n_kv_heads=4, head_dim=64, hidden_dim=5632)
    config = ModelConfig(vocab_size=32000, max_seq_len=2048, qk_norm=False, **shape)
    for rows, recompute in (((1, 1024), "none"), ((2, 2048), "block")):
        found = plan(config, *rows, "bf16", recompute, lora=16)
        assert found.reserved + OUTSIDE < 6e9
        trained = 16 * sum(22 * (o + i) for o, i in MATRICES) * 4  # bytes in float32
        assert found.kinds["gradients"] < 1.01 * trained and found.kinds["moments"] < 2.02 * trained


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with a tokenizer."""
    path = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer.train(["def f(x):\n    return x + 1\n" * 50], 290)
    config = twins.small(vocab_size=tokenizer.vocab_size, max_seq_len=64)
    twins.random_model(config, device="cpu").save_pretrained(path, tokenizer)
    return path


def test_adapters_of_peft_both_ways(folder, tmp_path):
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids, _ = twins.batch(Transformer.from_pretrained(folder).config, 2, 15)
    logits = lambda model: model(torch.tensor(ids)).logits.detach().numpy()
    model = adapted(
        Transformer.from_pretrained(folder, twins.DEVICE), Lora(4, 6, TARGETS, str(folder))
    )
    model.save_pretrained(tmp_path / "ours")
    loaded = peft.PeftModel.from_pretrained(theirs, tmp_path / "ours").eval()
    np.testing.assert_allclose(logits(loaded), model(ids).numpy(), atol=2e-5)

    theirs = AutoModelForCausalLM.from_pretrained(folder)
    options = peft.LoraConfig(
        r=3, lora_alpha=5, use_rslora=True, target_modules=["k_proj", "o_proj", "gate_proj"],
        init_lora_weights=False,
    )  # fmt: skip
    other = peft.get_peft_model(theirs, options).eval()
    other.save_pretrained(tmp_path / "theirs")
    mine = Transformer.from_pretrained(tmp_path / "theirs")
    np.testing.assert_allclose(mine(ids).numpy(), logits(other), atol=2e-5)


OF_PEFT = {
    "patterns": dict(rank_pattern={"k_proj": 5, "layers.1.self_attn.q_proj": 2}, alpha_pattern={r"layers\.\d.mlp.up_proj": 9}),
    "patterns, rslora": dict(rank_pattern={"o_proj": 4}, alpha_pattern={"o_proj": 1.5}, use_rslora=True),
    "dora": dict(use_dora=True, rank_pattern={"v_proj": 1}),
    "modules": dict(modules_to_save=["lm_head", "embed_tokens"]),
    "head": dict(target_modules=["lm_head", "down_proj"]),
    "embedding": dict(target_modules=["embed_tokens", "q_proj"]),
    "pissa": dict(init_lora_weights="pissa"),
    "bias": dict(bias="all", target_modules=["q_proj", "o_proj"]),
    "one layer": dict(layers_to_transform=[1]),
    "others of each layer": dict(target_modules=r".*layers\.0\..*(q|o)_proj|.*layers\.1\..*(up|down)_proj"),
    "all but some": dict(exclude_modules=r".*layers\.1.*proj|.*k_proj"),
}  # fmt: skip

SWITCHED = ("patterns", "patterns, rslora", "one layer", "others of each layer", "all but some")


@pytest.mark.parametrize("kind", OF_PEFT)
def test_what_peft_adds_to_a_model(folder, tmp_path, kind):
    """With other values than at first: of the adapters, magnitudes, biases and saved modules."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    base = folder
    if kind == "bias":
        base = tmp_path / "base"
        twins.random_model(twins.small(vocab_size=290, qkv_bias=True, qk_norm=False), device="cpu").save_pretrained(base)  # fmt: skip
    options = dict(r=3, lora_alpha=5, target_modules=list(TARGETS), init_lora_weights=False)
    options = peft.LoraConfig(**options | OF_PEFT[kind])
    theirs = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), options).eval()
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if parameter.requires_grad and "lora_A" not in name:
                noise = torch.randn(parameter.shape, generator=draw)
                parameter += 0.1 * parameter.std().nan_to_num(1) * noise
    theirs.save_pretrained(tmp_path / "theirs")
    mine = Transformer.from_pretrained(tmp_path / "theirs", "cpu")
    ids, _ = twins.batch(mine.config, 2, 15)
    expected = theirs(torch.tensor(ids)).logits.detach().numpy()
    found = mine(ids).numpy()
    np.testing.assert_allclose(found, expected, atol=1e-4)
    plain = Transformer.from_pretrained(base, "cpu")(ids).numpy()
    assert abs(plain - expected).max() > 0.05
    further = AdaptedTransformer.from_pretrained(base, "cpu", trainable=False)
    further.adapt(replace(Lora.read(tmp_path / "theirs"), base=str(base)))
    further.load_weights(tmp_path / "theirs")
    np.testing.assert_allclose(further(ids).numpy(), expected, atol=1e-4)
    further.save_pretrained(tmp_path / "ours")
    loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "ours")  # fmt: skip
    np.testing.assert_allclose(loaded(torch.tensor(ids)).logits.detach().numpy(), expected, atol=1e-4)  # fmt: skip
    if kind in SWITCHED:  # chosen by a request
        served = Transformer.from_pretrained(base, "cpu")
        add_adapters(served, {"a": tmp_path / "theirs"})
        (answer,) = Engine(served, 1).generate([[1, 2, 3]], 9, adapter="a")
        assert answer == Engine(mine, 1).generate([[1, 2, 3]], 9)[0]
        return
    with pytest.raises(UserError, match=r"merge it with `xtrain export --merge`|no matrices for the adapters"):  # fmt: skip
        add_adapters(Transformer.from_pretrained(base, "cpu"), {"a": tmp_path / "theirs"})


def test_an_embedding_of_peft_that_is_not_the_models(folder, tmp_path):
    """Peft writes the embedding next to its adapter: it may have been changed before."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    options = peft.LoraConfig(r=3, target_modules=["embed_tokens", "q_proj"])
    theirs = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder), options)
    with torch.no_grad():
        theirs.get_input_embeddings().base_layer.weight[3] += 1
    theirs.save_pretrained(tmp_path)
    further = AdaptedTransformer.from_pretrained(folder, "cpu", trainable=False)
    further.adapt(Lora.read(tmp_path))
    with pytest.raises(UserError, match=r"holds another model.embed_tokens than its model .*--merge"):  # fmt: skip
        further.load_weights(tmp_path)


def test_tied_weights_have_no_adapters_of_their_own(tmp_path):
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    twins.random_model(twins.small(tie_embeddings=True), device="cpu").save_pretrained(tmp_path / "base")  # fmt: skip
    for i, options in enumerate((dict(modules_to_save=["embed_tokens"]), dict(modules_to_save=["lm_head"]))):  # fmt: skip
        options = peft.LoraConfig(r=3, target_modules=["q_proj"], **options)
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        peft.get_peft_model(theirs, options).save_pretrained(tmp_path / str(i))
        with pytest.raises(UserError, match="no matrices for the adapters"):
            Transformer.from_pretrained(tmp_path / str(i))


@pytest.mark.parametrize(
    "change, words",
    [
        ({"peft_type": "IA3"}, "'IA3' is not supported"),
        ({"lora_bias": True}, "lora_bias True is not supported"),
        ({"rank_pattern": {"q_proj": 0}}, "must be positive numbers"),
        ({"rank_pattern": {"q_proj": 5}}, "do not fit the model: .* with rank 5"),
        ({"init_lora_weights": "olora"}, "init_lora_weights 'olora' is not supported"),
        ({"r": 0}, "must be positive numbers"),
        ({"r": 8}, "do not fit the model: .* with rank 8"),
        ({"base_model_name_or_path": None}, "names no model"),
        ({"base_model_name_or_path": "gone/away"}, "gone/away does not exist"),
    ],
)
def test_adapters_that_are_refused(folder, tmp_path, change, words):
    model = adapted(Transformer.from_pretrained(folder, "cpu"), Lora(4, 6, TARGETS, str(folder)))
    model.save_pretrained(tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError, match=words):
        Transformer.from_pretrained(tmp_path)


def test_adapters_of_another_model_are_refused(folder, tmp_path):
    other = twins.random_model(twins.small(vocab_size=300, hidden_dim=48), device="cpu")
    adapted(other, Lora(4, 6, TARGETS, str(folder))).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"do not fit the model: model\.layers\.0\.mlp"):
        Transformer.from_pretrained(tmp_path)


def config_of(folder, out, data, **more):
    shape = dict(batch=3, steps=6, save_every=3, eval_every=3, lr=5e-3, sample_tokens=4, lora=4)
    return FinetuneConfig(
        init=str(folder),
        data=(str(data),),
        out=str(out),
        name="run",
        device="cpu",
        **(shape | more),
    )


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "d.jsonl"
    lines = [{"prompt": f"def f{i}", "completion": "(x): return x + 1"} for i in range(12)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_average_of_adapters_is_an_adapter(tmp_path, folder, data):
    run = finetune(config_of(folder, tmp_path, data, steps=3, ema=0.5), SILENT)
    assert (run / "checkpoints/step-000003/ema/adapter_model.safetensors").is_file()
    averaged, last = (Transformer.from_pretrained(run / name).arena.weights for name in ("ema", ""))
    assert 0 < np.abs(averaged - last).max() < 0.1


def test_a_run_learns_and_resumes_bit_for_bit(tmp_path, folder, data, capsys):
    whole = finetune(config_of(folder, tmp_path / "a", data), SILENT)
    half = finetune(config_of(folder, tmp_path / "b", data, stop_at=3), SILENT)
    arguments = ["--data", str(data), "--out", str(tmp_path / "b"), "--name", "run", "--resume"]
    assert main(arguments) == 0
    assert_same_run(whole, half)
    losses = [m["val_loss"] for m in metrics(whole) if "val_loss" in m]
    assert losses[-1] < losses[0]
    last = whole / "checkpoints" / "step-000006"
    assert not (last / "model.safetensors").exists()
    assert (last / "adapter_model.safetensors").stat().st_size < 100_000
    written = json.loads((last / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == str(folder.resolve()) and written["r"] == 4
    base, tuned = Transformer.from_pretrained(folder), Transformer.from_pretrained(whole)
    assert all(
        np.array_equal(a.data, b.data) != ("_proj" in name)
        for (name, a), (_, b) in zip(base.named_parameters(), tuned.named_parameters())
    )
    merge = ["--model", str(whole), "--merge"]
    assert export([*merge, str(tmp_path / "merged")]) == 0
    merged = Transformer.from_pretrained(tmp_path / "merged")
    for (_, a), (_, b) in zip(merged.named_parameters(), tuned.named_parameters(), strict=True):
        assert np.array_equal(a.data, b.data)
    assert "return" in load_for_serving(whole, "cpu").tokenizer.decode(
        load_for_serving(tmp_path / "merged", "cpu").tokenizer.encode("return")
    )
    assert export([*merge, str(folder)]) == 2
    capsys.readouterr()
    assert main([*arguments, "--lora", "8", "--steps", "9", "--allow-change", "steps"]) == 2
    error = capsys.readouterr().err
    assert "lora was 4, is 8" in error and "--allow-change" not in error


def test_all_kinds_of_adapters_resume_with_the_same_bits(tmp_path, folder, data):
    options = dict(lora_dora=True, lora_init="pissa", lora_rank_pattern=("v_proj=2",), lora_modules_to_save=("lm_head", "norm"), lora_targets=("v_proj", "down_proj"), lora_rslora=True)  # fmt: skip
    options |= dict(steps=4, save_every=2)
    whole = finetune(config_of(folder, tmp_path / "a", data, **options), SILENT)
    half = finetune(config_of(folder, tmp_path / "b", data, stop_at=2, **options), SILENT)
    arguments = ["--data", str(data), "--out", str(tmp_path / "b"), "--name", "run", "--resume"]
    assert main(arguments) == 0
    assert_same_run(whole, half)
    more = finetune(config_of(whole, tmp_path / "more", data, steps=1, lr=1e-12), SILENT)
    before, after = (dict(Transformer.from_pretrained(x).named_parameters()) for x in (whole, more))
    for name, tensor in after.items():
        np.testing.assert_allclose(tensor.data, before[name].data, atol=1e-6)


def test_adapters_are_trained_further(tmp_path, folder, data, capsys):
    """From where they were, with their alpha and targets; stopped and resumed with the same bits; on a base of four bits."""
    options = dict(weights="nf4", lora_alpha=3.0, lora_targets=("v_proj", "up_proj"))
    first = finetune(config_of(folder, tmp_path / "first", data, steps=3, **options), SILENT)
    more = finetune(
        config_of(first, tmp_path / "more", data, steps=1, lr=1e-9, weights="nf4"), SILENT
    )
    one, two = (json.loads((run / "checkpoints" / f"step-00000{n}" / "adapter_config.json").read_text()) for run, n in ((first, 3), (more, 1)))  # fmt: skip
    assert two["lora_alpha"] == 3 and sorted(two["target_modules"]) == ["up_proj", "v_proj"]
    assert one["base_model_name_or_path"] == two["base_model_name_or_path"]
    before, after = (dict(Transformer.from_pretrained(run).named_parameters()) for run in (first, more))  # fmt: skip
    for name, tensor in after.items():
        np.testing.assert_allclose(tensor.data, before[name].data, atol=1e-6)
    whole = finetune(config_of(first, tmp_path / "a", data, steps=4, weights="nf4"), SILENT)
    half = finetune(
        config_of(first, tmp_path / "b", data, steps=4, stop_at=2, weights="nf4"), SILENT
    )
    arguments = ["--data", str(data), "--out", str(tmp_path / "b"), "--name", "run", "--resume"]
    assert main([*arguments, "--weights", "int8"]) == 2
    assert "weights was nf4, is int8" in capsys.readouterr().err
    assert main(arguments) == 0
    assert_same_run(whole, half)
    again = ["--init", str(first), "--data", str(data), "--out", str(tmp_path / "c"), "--lora", "8"]
    assert main(again) == 2
    assert "holds adapters of rank 4: give that to --lora" in capsys.readouterr().err
    again[-1] = "4"
    for more in (
        ["--lora-targets", "v_proj"],
        ["--lora-dora"],
        ["--lora-rank-pattern", "v_proj=2"],
    ):
        assert main([*again, *more]) == 2
        assert f"holds adapters with another {more[0]}: leave the option" in capsys.readouterr().err


def test_names_of_adapters_that_are_trained_further_have_no_order(tmp_path, monkeypatch):
    there = Lora(4, 8.0, ("q_proj", "v_proj"), modules_to_save=("embed_tokens", "norm"))
    monkeypatch.setattr(Lora, "read", lambda folder: there)
    same = replace(there, targets=("v_proj", "q_proj"), modules_to_save=("norm", "embed_tokens"))
    check_further(tmp_path, same)
    with pytest.raises(UserError, match="another --lora-modules-to-save: leave the option out"):
        check_further(tmp_path, replace(there, modules_to_save=("norm",)))


def test_a_model_is_written_in_the_dtype_of_the_base_or_another(tmp_path, folder, capsys):
    import ml_dtypes

    dtype_of = lambda path: read_header(path / "model.safetensors")["model.norm.weight"].dtype.name
    model = Transformer.from_pretrained(folder, "cpu")
    base = tmp_path / "base"
    adapters = tmp_path / "adapters"
    out = tmp_path / "out"
    assert export(["--model", str(folder), "--folder", str(base), "--dtype", "bfloat16"]) == 0
    assert dtype_of(base) == "bfloat16" and dtype_of(folder) == "float32"
    assert json.loads((base / "config.json").read_text())["torch_dtype"] == "bfloat16"
    rounded = Transformer.from_pretrained(base)
    for (_, a), (_, b) in zip(model.named_parameters(), rounded.named_parameters(), strict=True):
        assert np.array_equal(a.data.astype(ml_dtypes.bfloat16).astype(np.float32), b.data)
    adapted(rounded, Lora(4, 6, TARGETS, str(base))).save_pretrained(adapters)
    assert export(["--model", str(adapters), "--merge", str(out)]) == 0
    assert dtype_of(out) == "bfloat16" and "merged, bfloat16" in capsys.readouterr().out
    assert (out / "model.safetensors").stat().st_size < 1.1 * (base / "model.safetensors").stat().st_size  # fmt: skip
    assert export(["--model", str(adapters), "--merge", str(out), "--dtype", "float32"]) == 0
    assert dtype_of(out) == "float32"
    twins.set_weights(model.model.norm.weight, np.full(32, 1e6, np.float32))
    model.save_pretrained(tmp_path / "large", Tokenizer.load(folder))
    arguments = ["--model", str(tmp_path / "large"), "--folder", str(tmp_path / "half")]
    assert export([*arguments, "--dtype", "float16"]) == 2
    assert "a weight is too large for float16" in capsys.readouterr().err
    assert not (tmp_path / "half").exists()
    for arguments, words in (
        (["--merge", str(tmp_path / "x")], "there is nothing to merge"),
        (["--folder", str(folder)], "holds the model: give another folder"),
        (["--gguf", "x", "--folder", "y"], "give one of --gguf"),
        (["--gguf", "x", "--dtype", "float16"], "--dtype is for --merge and --folder"),
    ):
        assert export(["--model", str(folder), *arguments]) == 2
        assert words in capsys.readouterr().err


def test_adapters_without_a_tokenizer(tmp_path, folder, data):
    """As peft writes them: the tokenizer is that of the model."""
    model = adapted(Transformer.from_pretrained(folder, "cpu"), Lora(4, 6, TARGETS, str(folder)))
    model.save_pretrained(tmp_path / "adapters")
    assert not (tmp_path / "adapters" / "tokenizer.json").exists()
    run = finetune(config_of(tmp_path / "adapters", tmp_path / "a", data, lora=0), SILENT)
    assert load_for_serving(run, "cpu").tokenizer.vocab_size == model.config.vocab_size
    gguf = pytest.importorskip("gguf")
    assert export(["--model", str(tmp_path / "adapters"), "--gguf", str(tmp_path / "x.gguf")]) == 0
    tokens = gguf.GGUFReader(tmp_path / "x.gguf").get_field("tokenizer.ggml.tokens").contents()
    assert len(tokens) == model.config.vocab_size


def test_what_the_command_refuses(tmp_path, folder, data, capsys):
    model = ["--init", str(folder), "--device", "cpu", "--out", str(tmp_path), "--data", str(data)]
    for arguments, words in (
        (["--lora", "-1"], "--lora must be a positive rank"),
        (["--lora-alpha", "4"], "--lora-alpha needs --lora"),
        (["--lora", "4", "--lora-rank-pattern", "k_proj"], "must be NAME=NUMBER"),
        (["--lora", "4", "--lora-alpha-pattern", "qproj=8"], "'qproj' of --lora-rank-pattern or"),
        (["--weights", "nf4"], "--weights nf4 needs --lora"),
        (["--lora", "4", "--lora-alpha", "0"], "LoRA needs a positive rank and alpha"),
        (
            ["--lora", "4", "--lora-targets", "q_proj", "head"],
            "LoRA targets ['head'] are not known",
        ),
    ):
        assert main([*model, *arguments]) == 2
        assert words in capsys.readouterr().err
