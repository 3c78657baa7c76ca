"""What peft's LoraConfig adds to plain LoRA, trained next to peft: losses, weights, written files."""

import numpy as np
import pytest
import torch
import twins
from checks import to_host

from xtrain import AdamW, Transformer
from xtrain.errors import UserError
from xtrain.nn.lora import TARGETS, AdaptedTransformer, Lora

peft = pytest.importorskip("peft")
from transformers import AutoModelForCausalLM  # noqa: E402

STEPS = 4
SHAPE = dict(vocab_size=90, max_seq_len=64, qkv_bias=True, qk_norm=False)
PATTERNS = dict(rank_pattern={"k_proj": 5, "layers.1.self_attn.q_proj": 2}, alpha_pattern={r"layers\.\d.mlp.up_proj": 9.0})  # fmt: skip
KINDS = {
    "patterns": PATTERNS,
    "patterns, rslora": PATTERNS | dict(rslora=True),
    "dora": dict(dora=True, rank_pattern={"v_proj": 1}),
    "dora of some": dict(dora=True, targets=("q_proj", "v_proj", "o_proj", "up_proj")),
    "biases": dict(bias="all", targets=("q_proj", "o_proj")),
    "own biases": dict(bias="lora_only", dora=True, targets=("q_proj", "o_proj")),
    "modules": dict(
        modules_to_save=("lm_head", "embed_tokens", "norm"), bias="all", targets=("up_proj",)
    ),
    "tables": dict(targets=("down_proj", "embed_tokens", "lm_head"), rank_pattern={"lm_head": 4}),
    "pissa": dict(init="pissa", alpha_pattern={"o_proj": 2.0}),
}
THEIRS = {"alpha": "lora_alpha", "targets": "target_modules", "rslora": "use_rslora", "dora": "use_dora", "init": "init_lora_weights"}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    twins.random_model(twins.small(**SHAPE), device="cpu").save_pretrained(path)
    return path


def of_peft(folder, lora):
    """Peft's model, all of whose trained tensors differ from their first values."""
    options = {THEIRS.get(k, k): v for k, v in vars(lora).items() if k not in ("base", "modules")}
    options = {
        k: list(v) if isinstance(v, tuple) else v for k, v in options.items() if v != "default"
    }
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_pretrained(folder).float()
    theirs = peft.get_peft_model(theirs, peft.LoraConfig(**options)).train()
    with torch.no_grad():
        for _, x in theirs.named_parameters():
            if x.requires_grad:
                x += 0.1 * (x.std().nan_to_num(1) + 0.3) * torch.randn(x.shape)
    return theirs


def of_ours(folder, lora, theirs):
    """Our model with the same values."""
    model = AdaptedTransformer.from_pretrained(folder, twins.DEVICE, trainable=False)
    model.adapt(lora)
    values = trained(theirs)
    assert set(values) == {name for name, _ in model.named_parameters()}
    for name, tensor in model.named_parameters():
        twins.set_weights(tensor, values[name])
    return model


def trained(theirs):
    """What peft writes, by our names."""
    state = peft.get_peft_model_state_dict(theirs, save_embedding_layers=False)
    return {n.removeprefix("base_model.model."): x.numpy().copy() for n, x in state.items()}


def logits_of(theirs, ids):
    with torch.no_grad():
        return theirs.eval()(torch.tensor(ids)).logits.numpy()


@pytest.mark.parametrize("kind", KINDS)
def test_steps_of_adamw_are_those_of_peft(folder, tmp_path, kind):
    lora = Lora(3, 5.0, **{"targets": TARGETS, "base": str(folder)} | KINDS[kind])
    theirs = of_peft(folder, lora)
    model = of_ours(folder, lora, theirs)
    before = trained(theirs)
    options = 1e-2, (0.9, 0.95), 1e-8
    their_optimizer = torch.optim.AdamW([x for x in theirs.parameters() if x.requires_grad], *options, weight_decay=0)  # fmt: skip
    optimizer = AdamW(model, *options, 0.0)
    for step in range(STEPS):
        rows = twins.batch(model.config, 2, 16, seed=step)
        model.zero_grad()
        loss = model.loss(*rows)
        loss.backward()
        their_optimizer.zero_grad()
        expected, _ = twins.torch_loss(theirs, *rows)
        expected.backward()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
        if step == 0:
            check_gradients(model, theirs)
        optimizer.step()
        their_optimizer.step()
    for name, values in trained(theirs).items():
        assert np.abs(values - before[name]).max() > 0.01
        found = to_host(dict(model.named_parameters())[name].data)
        np.testing.assert_allclose(found, values, atol=2e-3, err_msg=name)

    ids, _ = rows
    found = model(ids).numpy()
    model.save_pretrained(tmp_path / "ours")
    base = AutoModelForCausalLM.from_pretrained(folder)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "ours")
    np.testing.assert_allclose(logits_of(loaded, ids), found, atol=2e-4)
    merged = Transformer.from_pretrained(tmp_path / "ours", twins.DEVICE)
    np.testing.assert_allclose(merged(ids).numpy(), found, atol=2e-4)
    assert Lora.read(tmp_path / "ours") == vars_without_base(lora)
    if lora.init == "pissa":  # the frozen model has changed
        return
    with model.without_adapters():
        plain = Transformer.from_pretrained(folder, twins.DEVICE)
        np.testing.assert_allclose(model(ids).numpy(), plain(ids).numpy(), atol=2e-4)


def check_gradients(model, theirs):
    """All of theirs, by what they write."""
    with torch.no_grad():
        for x in theirs.parameters():
            if x.requires_grad:
                x.data, x.grad = x.grad, x.data
    expected = trained(theirs)
    for x in theirs.parameters():
        if x.requires_grad:
            x.data, x.grad = x.grad, x.data
    for name, gradient in twins.gradients(model).items():
        error = np.linalg.norm(gradient - expected[name]) / np.linalg.norm(expected[name])
        assert error < 1e-4, f"{name}: {error:.1e}"


def vars_without_base(lora):
    return Lora(**vars(lora) | {"base": ""})


@pytest.mark.parametrize("kind", KINDS)
def test_new_adapters_of_all_kinds_change_nothing(folder, kind):
    model = AdaptedTransformer.from_pretrained(folder, twins.DEVICE, trainable=False)
    ids, _ = twins.batch(model.config, 2, 16)
    before = model(ids).numpy()
    model.adapt(Lora(3, 5.0, **{"targets": TARGETS} | KINDS[kind]))
    np.testing.assert_allclose(model(ids).numpy(), before, atol=5e-5)


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(targets=("lm_head",), dora=True), "with DoRA"),
        (
            dict(targets=("embed_tokens",), modules_to_save=("embed_tokens",)),
            "leave one of them out",
        ),
        (dict(modules_to_save=("q_proj",)), "no module 'q_proj' that is trained whole"),
        (dict(rank_pattern={"[": 2}), "not a regular expression"),
        (dict(rank_pattern={"k_proj": 33}, init="pissa"), "needs a rank of at most 24, got 33"),
        (dict(rank_pattern={"q_proj": 0}), "needs a positive rank and alpha"),
    ],
)
def test_options_that_are_refused(folder, options, words):
    model = AdaptedTransformer.from_pretrained(folder, trainable=False)
    with pytest.raises(UserError, match=words):
        model.adapt(Lora(3, 5.0, **options))


@pytest.mark.parametrize("changes, words", [(dict(tie_embeddings=True), "are one matrix"), (twins.GEMMA3 | dict(tie_embeddings=False), "norms of a Gemma")])  # fmt: skip
def test_models_that_refuse_options(changes, words):
    model = AdaptedTransformer(twins.small(**changes), trainable=False)
    with pytest.raises(UserError, match=words):
        model.adapt(Lora(3, 5.0, modules_to_save=("norm", "lm_head")))
