"""LoRA on the matrices of experts: next to peft, whose adapters of packed experts are read, in runs, merged, served."""

import json

import numpy as np
import pytest
import torch
import twins
from checks import rng, to_host
from runs import SILENT, assert_same_run, metrics
from safetensors.numpy import load_file, save_file

from xtrain import Transformer
from xtrain.data.tokenizer import Tokenizer
from xtrain.errors import UserError
from xtrain.export import main as export
from xtrain.finetune import finetune, main
from xtrain.formats.adapters import A, read_adapters
from xtrain.kernels.four_bits import FOUR_BITS
from xtrain.kernels.quantize import KINDS, dequantize, quantize
from xtrain.nn.lora import TARGETS, AdaptedTransformer, Lora
from xtrain.nn.quantized import linear_weights, quantize_weights
from xtrain.serving.adapters import add_adapters
from xtrain.serving.engine import Engine
from xtrain.tuning.finetune import FinetuneConfig

peft = pytest.importorskip("peft")
from transformers import AutoModelForCausalLM  # noqa: E402

EXPERTS = dict(
    vocab_size=300, max_seq_len=64, n_experts=4, experts_per_token=2, expert_hidden_dim=24
)
FAMILIES = {
    "qwen3_moe": dict(),
    "mixtral": dict(qk_norm=False, renormalized_experts=True),
    "olmoe": dict(joint_qk_norm=True, n_kv_heads=4, head_dim=8),
}
ONE_LAYER = "model.layers.1.mlp.experts."
E, F, R = 4, 24, 3


def mixture(kind, **changes):
    return twins.random_model(twins.small(**EXPERTS | FAMILIES[kind] | changes), device="cpu")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """{model_type: the folder of a model}"""
    path = tmp_path_factory.mktemp("models")
    for kind in FAMILIES:
        tokenizer = Tokenizer.train(["def f(x): return x + 1\n" * 50], 290)
        mixture(kind).save_pretrained(path / kind, tokenizer)
        assert json.loads((path / kind / "config.json").read_text())["model_type"] == kind
    return {kind: path / kind for kind in FAMILIES}


def adapted(folder, lora):
    """The model in a folder with adapters that are not zero."""
    model = AdaptedTransformer.from_pretrained(folder, twins.DEVICE, trainable=False)
    model.adapt(lora)
    for i, (_, tensor) in enumerate(model.named_parameters()):
        twins.set_weights(tensor, (0.3 * rng(0, i).standard_normal(tensor.shape)).astype("f4"))
    return model


def of_peft(folder, adapters, trainable=False):
    base = AutoModelForCausalLM.from_pretrained(folder).float()
    return peft.PeftModel.from_pretrained(base, adapters, is_trainable=trainable).eval()


def packed_gradients(theirs):
    """peft's gradients of layer 1's experts, by the end of our names: cut from its packed ones."""
    grads = {
        n.split("experts.")[1].replace(".default", ""): p.grad.numpy()
        for n, p in theirs.named_parameters()
        if "layers.1.mlp.experts" in n and "lora" in n
    }
    found = {}
    a_E2rC = grads["base_layer.lora_A.weight"].reshape(E, 2 * R, -1)
    b_EOr = grads["base_layer.lora_B.weight"].reshape(2 * F, 2 * R, E).transpose(2, 0, 1)
    a_ErF = grads["lora_A.weight"].reshape(E, R, F)
    b_ECr = grads["lora_B.weight"].reshape(-1, R, E).transpose(2, 0, 1)
    for e in range(E):
        found |= {
            f"{e}.gate_proj.lora_A.weight": a_E2rC[e, :R],
            f"{e}.up_proj.lora_A.weight": a_E2rC[e, R:],
            f"{e}.gate_proj.lora_B.weight": b_EOr[e, :F, :R],
            f"{e}.up_proj.lora_B.weight": b_EOr[e, F:, R:],
            f"{e}.down_proj.lora_A.weight": a_ErF[e],
            f"{e}.down_proj.lora_B.weight": b_ECr[e],
        }
    return found


@pytest.mark.parametrize("kind", FAMILIES)
def test_loss_and_gradients_are_those_of_peft(folders, tmp_path, kind):
    folder = folders[kind]
    model = adapted(folder, Lora(R, 5.0, TARGETS, str(folder)))
    model.save_pretrained(tmp_path)
    names = {"gate_proj", "up_proj", "down_proj"}
    if kind == "mixtral":
        names = {"w1", "w2", "w3"}
    content = json.loads((tmp_path / "adapter_config.json").read_text())
    assert names < set(content["target_modules"])
    theirs = of_peft(folder, tmp_path, trainable=True)
    rows = twins.batch(model.config, 2, 16)
    loss = model.loss(*rows)
    loss.backward()
    expected, _ = twins.torch_loss(theirs, *rows)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    ours = {name: to_host(tensor.grad) for name, tensor in model.named_parameters()}
    wanted = packed_gradients(theirs)
    assert len(wanted) == sum(name.startswith(ONE_LAYER) for name in ours)
    for name, grad in wanted.items():
        scale = np.abs(grad).max()
        assert scale > 0
        np.testing.assert_allclose(ours[ONE_LAYER + name], grad, atol=1e-4 * scale, err_msg=name)
    ids, _ = rows
    merged = Transformer.from_pretrained(tmp_path, twins.DEVICE)
    np.testing.assert_allclose(merged(ids).numpy(), model(ids).numpy(), atol=2e-4)
    assert Lora.read(tmp_path).targets == TARGETS


PACKED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
# of single layers: one has adapters on one matrix only
FIRST_LAYER = [f"model.layers.0.{name}" for name in PACKED]
ONLY_ONE = [f"model.layers.{layer}.{PACKED[0]}" for layer in range(2)]


@pytest.mark.parametrize(
    "kind, parameters, more",
    [
        ("qwen3_moe", PACKED, dict(rank_pattern={"down_proj": 2}, alpha_pattern={"down_proj": 3})),
        ("mixtral", PACKED, dict(use_rslora=True)),
        ("qwen3_moe", [*FIRST_LAYER, ONLY_ONE[1]], {}),
        ("qwen3_moe", ONLY_ONE, {}),
        ("olmoe", PACKED[:1], {}),
        ("olmoe", PACKED[1:], {}),
    ],
)
def test_packed_adapters_of_peft_are_merged(folders, tmp_path, kind, parameters, more):
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(folders[kind]).float()
    options = dict(r=R, lora_alpha=5, target_modules=["q_proj"], target_parameters=parameters)
    theirs = peft.get_peft_model(base, peft.LoraConfig(**options | more)).eval()
    ids, _ = twins.batch(mixture(kind).config, 2, 12)
    with torch.no_grad():
        for name, x in theirs.named_parameters():
            if "lora" in name:
                x.normal_(std=0.3)
        expected = theirs(torch.tensor(ids)).logits.numpy()
    theirs.save_pretrained(tmp_path)
    content = json.loads((tmp_path / "adapter_config.json").read_text())
    content["base_model_name_or_path"] = str(folders[kind])
    (tmp_path / "adapter_config.json").write_text(json.dumps(content))
    plain = Transformer.from_pretrained(folders[kind], twins.DEVICE)(ids).numpy()
    found = Transformer.from_pretrained(tmp_path, twins.DEVICE)(ids).numpy()
    assert np.abs(found - plain).max() > 0.1
    np.testing.assert_allclose(found, expected, atol=2e-4)
    with pytest.raises(UserError, match=r"target_parameters .* with `xtrain export --merge`"):
        Lora.read(tmp_path)
    content["r"] = 7
    (tmp_path / "adapter_config.json").write_text(json.dumps(content | {"rank_pattern": {}}))
    with pytest.raises(UserError, match=r"expected rank 7 for each expert"):
        Transformer.from_pretrained(tmp_path)


def test_ranks_and_targets(folders):
    folder = folders["qwen3_moe"]
    lora = Lora(R, 5.0, ("up_proj", "down_proj"), rank_pattern={r"experts\.\d+\.up_proj": 1})
    model = adapted(folder, lora)
    shapes = {name.removeprefix(ONE_LAYER): x.shape for name, x in model.named_parameters()}
    assert shapes["0.up_proj.lora_A.weight"] == (1, 32)
    assert shapes["3.down_proj.lora_B.weight"] == (32, R)
    assert len(shapes) == 2 * 2 * 2 * E
    ids, _ = twins.batch(model.config, 2, 9)
    with model.without_adapters():
        plain = Transformer.from_pretrained(folder, twins.DEVICE)(ids).numpy()
        np.testing.assert_allclose(model(ids).numpy(), plain, atol=1e-5)
    assert np.abs(model(ids).numpy() - plain).max() > 0.1
    refused = AdaptedTransformer.from_pretrained(folder, trainable=False)
    with pytest.raises(
        UserError, match=r"experts of model\.layers\.0\.mlp would have .* on up_proj"
    ):
        refused.adapt(Lora(R, 5.0, ("up_proj",), rank_pattern={r"experts\.1\.up_proj": 1}))


def keep_adapters(folder, kept):
    """Remove the adapters in a folder whose names lack `kept`."""
    path = folder / "adapter_model.safetensors"
    tensors = {name: x for name, x in load_file(path).items() if kept in name}
    assert tensors
    save_file(tensors, path)


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_adapters_on_some_layers_are_trained_further(folders, tmp_path, kind):
    folder = folders[kind]
    adapted(folder, Lora(R, 5.0, TARGETS, str(folder))).save_pretrained(tmp_path)
    keep_adapters(tmp_path, ".layers.1.")
    lora = Lora.read(tmp_path)
    model = AdaptedTransformer.from_pretrained(folder, twins.DEVICE, trainable=False)
    model.adapt(lora)
    model.load_weights(tmp_path)
    assert {name.split(".")[2] for name, _ in model.named_parameters()} == {"1"}
    ids, targets = twins.batch(model.config, 2, 9)
    expected = Transformer.from_pretrained(tmp_path, twins.DEVICE)(ids).numpy()
    np.testing.assert_allclose(model(ids).numpy(), expected, atol=2e-4)
    model.loss(ids, targets).backward()
    for name, tensor in model.named_parameters():
        assert np.abs(to_host(tensor.grad)).max() > 0, name
    model.save_pretrained(tmp_path / "again")
    content = json.loads((tmp_path / "again" / "adapter_config.json").read_text())
    name = {"mixtral": "block_sparse_moe.experts.3.w1"}.get(kind, "mlp.experts.3.gate_proj")
    assert f"model.layers.1.{name}" in content["target_modules"]
    assert Lora.read(tmp_path / "again").modules == lora.modules


def test_adapters_of_some_experts_are_merged_only(folders, tmp_path):
    folder = folders["olmoe"]
    adapted(folder, Lora(R, 5.0, TARGETS, str(folder))).save_pretrained(tmp_path)
    keep_adapters(tmp_path, ".experts.2.")
    assert Transformer.from_pretrained(tmp_path, trainable=False).config.n_experts == E
    model = AdaptedTransformer.from_pretrained(folder, twins.DEVICE, trainable=False)
    words = r"only 1 of the 4 experts of model\.layers\.0\.mlp have adapters of gate_proj, .* merge"
    with pytest.raises(UserError, match=words):
        model.adapt(Lora.read(tmp_path))


@pytest.mark.parametrize("lora, what", [(dict(dora=True), "DoRA"), (dict(init="pissa"), "PiSSA")])
def test_what_experts_do_not_have_is_refused(folders, lora, what):
    model = AdaptedTransformer.from_pretrained(folders["olmoe"], trainable=False)
    words = f"experts cannot have {what}, but the targets are gate_proj, up_proj, down_proj: leave"
    with pytest.raises(UserError, match=words + ".* --lora-targets q_proj k_proj v_proj o_proj"):
        model.adapt(Lora(R, 5.0, **lora))


def test_new_adapters_change_nothing_and_adapters_are_not_switched(folders, tmp_path):
    folder = folders["olmoe"]
    model = AdaptedTransformer.from_pretrained(folder, twins.DEVICE, trainable=False)
    ids, _ = twins.batch(model.config, 1, 9)
    before = model(ids).numpy()
    model.adapt(Lora(R, 5.0, TARGETS, str(folder)))
    np.testing.assert_allclose(model(ids).numpy(), before, atol=1e-5)
    model.save_pretrained(tmp_path)
    served = Transformer.from_pretrained(folder, trainable=False)
    with pytest.raises(UserError, match=r"adapters of experts, which are not switched .* --model"):
        add_adapters(served, {"a": tmp_path})


@pytest.mark.parametrize("kind, family", list(zip(KINDS, [*FAMILIES, "mixtral"])))
def test_a_quantized_base_gives_the_gradients_of_what_it_stands_for(folders, kind, family):
    """Bit for bit on a CPU, with adapters on all matrices and on some."""
    for targets in (TARGETS, ("q_proj", "down_proj"), ("q_proj",)):
        losses = []
        gradients = []
        for quantized in (False, True):
            model = adapted(folders[family], Lora(R, 5.0, targets))
            if quantized:
                quantize_weights(model, kind)
            else:
                for _, parameter in linear_weights(model):
                    parameter.data = dequantize(quantize(parameter.data, kind))
                if kind in FOUR_BITS:
                    model.lm_head.data = dequantize(quantize(model.lm_head.data, "int8"))
            loss = model.loss(*twins.batch(model.config, 2, 20))
            loss.backward()
            losses.append(loss.item())
            gradients.append(twins.gradients(model))
        tolerance = dict(rtol=1e-4, atol=1e-6) if twins.DEVICE == "gpu" else dict(rtol=0, atol=0)
        np.testing.assert_allclose(losses[1], losses[0], **tolerance)
        for name, expected in gradients[0].items():
            np.testing.assert_allclose(gradients[1][name], expected, err_msg=name, **tolerance)
        assert any(np.abs(x).max() > 0 for x in gradients[1].values())


@pytest.mark.parametrize("recompute", ["attention", "block"])
def test_recomputed_layers_have_the_same_gradients(folders, recompute):
    gradients = []
    for how in ("none", recompute):
        model = adapted(folders["mixtral"], Lora(R, 5.0))
        model.recompute = how
        model.loss(*twins.batch(model.config, 2, 12)).backward()
        gradients.append(twins.gradients(model))
    for name, grad in gradients[0].items():
        np.testing.assert_allclose(gradients[1][name], grad, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    "kind, changes, weights",
    [
        ("mixtral", {}, "full"),
        ("mixtral", {}, "int4"),
        ("qwen3_moe", dict(dense_layers=(0,)), "full"),
        ("qwen3_moe", dict(dense_layers=(0,)), "nf4"),
    ],
)
def test_a_run_learns_resumes_and_is_merged(tmp_path, kind, changes, weights):
    """A Qwen3-MoE here has a layer with an MLP, whose adapters are ordinary ones. The base may be in codes: what is
    merged is the base as it was."""
    folder = tmp_path / "model"
    tokenizer = Tokenizer.train(["def f(x): return x + 1\n" * 50], 290)
    mixture(kind, **changes).save_pretrained(folder, tokenizer)
    data = tmp_path / "d.jsonl"
    lines = [{"prompt": f"def f{i}", "completion": "(x): return x + 1"} for i in range(12)]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = dict(
        init=str(folder), data=(str(data),), name="run", device="cpu", batch=3, steps=6, lora=4,
        save_every=3, eval_every=3, lr=5e-3, sample_tokens=4, weights=weights,
    )  # fmt: skip
    whole = finetune(FinetuneConfig(out=str(tmp_path / "a"), **options), SILENT)
    half = finetune(FinetuneConfig(out=str(tmp_path / "b"), stop_at=3, **options), SILENT)
    more = ["--data", str(data), "--out", str(tmp_path / "b"), "--name", "run", "--resume"]
    assert main(more) == 0
    assert_same_run(whole, half)
    losses = [m["val_loss"] for m in metrics(whole) if "val_loss" in m]
    assert losses[-1] < losses[0]
    last = whole / "checkpoints" / "step-000006"
    assert Lora.read(last).targets == TARGETS
    assert any(".experts.3." in name for name in read_adapters(last) if name.endswith(A))
    merged = tmp_path / "merged"
    assert export(["--model", str(whole), "--merge", str(merged)]) == 0
    tuned = Transformer.from_pretrained(whole, trainable=False)
    theirs = AutoModelForCausalLM.from_pretrained(merged).float().eval()
    ids, _ = twins.batch(tuned.config, 1, 12)
    with torch.no_grad():
        np.testing.assert_allclose(
            tuned(ids).numpy(), theirs(torch.tensor(ids)).logits.numpy(), atol=2e-4
        )
    engine = Engine(tuned, max_batch=2, max_seq_len=32)
    (answer,) = engine.generate([ids[0].tolist()], 4)
    assert next(iter(answer)) == int(np.argmax(tuned(ids).numpy()[0, -1]))
    continued = FinetuneConfig(out=str(tmp_path / "c"), **options | {"init": str(whole)})
    assert finetune(continued, SILENT).is_dir()
