"""examples/change_the_model/olmo2.py against transformers: logits, gradients, training, serving, and back."""

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from checks import to_host
from runs import DATA
from transformers import AutoModelForCausalLM, AutoTokenizer, Olmo2Config
from twins import DEVICE, gradients, torch_loss

from xtrain import AdamW, Engine, Transformer, UserError
from xtrain.data.tokenizer import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "change_the_model"))

import olmo2

IDS = np.random.default_rng(1).integers(0, 61, (2, 41))


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """-> a folder as transformers writes it, and its model: tiny, random, no norm weight is 1"""
    tokenizer = Tokenizer.train([(DATA / "grammar.txt").read_text()], 280)
    config = Olmo2Config(
        vocab_size=tokenizer.vocab_size, hidden_size=32, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, eos_token_id=tokenizer.eot_id,
        rope_parameters=dict(rope_type="default", rope_theta=500000.0),
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    for p in model.parameters():
        x = torch.randn(p.shape)
        p.data = x * p.shape[1] ** -0.5 if p.ndim > 1 else 1 + 0.3 * x
    folder = tmp_path_factory.mktemp("olmo2")
    model.save_pretrained(folder)
    tokenizer.save(folder)
    return folder, model


def logits_of(theirs, ids):
    with torch.no_grad():
        return theirs(torch.from_numpy(ids)).logits.numpy()


def test_logits_and_every_gradient(published):
    folder, theirs = published
    model = olmo2.load(folder, DEVICE)
    expected = logits_of(theirs, IDS)
    assert expected.std() > 0.5
    assert np.abs(to_host(model(IDS).data) - expected).max() <= 1e-5 * np.abs(expected).max()
    loss, _ = torch_loss(theirs, IDS[:, :-1].copy(), IDS[:, 1:].copy())
    theirs.zero_grad()
    loss.backward()
    ours = model.loss(IDS[:, :-1], IDS[:, 1:])
    ours.backward()
    assert ours.item() == pytest.approx(loss.item(), rel=1e-5)
    known = {name: p.grad.numpy() for name, p in theirs.named_parameters()}
    found = gradients(model)
    assert found.keys() == known.keys()
    for name, want in known.items():
        assert np.linalg.norm(found[name] - want) <= 1e-4 * np.linalg.norm(want), name


def test_greedy_tokens_are_those_of_transformers(published):
    folder, theirs = published
    prompts = [IDS[0, :5].tolist(), IDS[1, :17].tolist(), [7]]
    engine = Engine(olmo2.load(folder, "cpu"), 3, block_tokens=16)  # a GPU's has no heads of 8
    answers = engine.generate(prompts, 24, stop=[theirs.config.eos_token_id])
    for prompt, answer in zip(prompts, answers):
        given = torch.tensor([prompt])
        mask = torch.ones_like(given)
        out = theirs.generate(given, attention_mask=mask, max_new_tokens=24, do_sample=False)
        assert answer == out[0, len(prompt) :].tolist()


def test_it_trains_and_goes_back_to_transformers(published, tmp_path):
    folder, _ = published
    model = olmo2.load(folder, DEVICE)
    optimizer, losses = AdamW(model, lr=1e-2), []
    for _ in range(20):
        model.zero_grad()
        loss = model.loss(IDS[:, :-1], IDS[:, 1:])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]
    with pytest.raises(UserError, match="PostNormBlock"):
        model.save_pretrained(tmp_path)
        Transformer.from_pretrained(tmp_path)
    shutil.copy(folder / "config.json", tmp_path)
    theirs, found = AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(found.values()), found
    expected = logits_of(theirs.eval(), IDS)
    assert np.abs(to_host(model(IDS).data) - expected).max() <= 1e-5 * np.abs(expected).max()


def test_the_program(published, capsys):
    folder, theirs = published
    olmo2.main(folder, "the dog", 8)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    given = tokenizer("the dog", return_tensors="pt")
    out = theirs.generate(**given, max_new_tokens=8, do_sample=False)
    assert capsys.readouterr().out == tokenizer.decode(out[0]) + "\n"


def test_another_model_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UserError, match="not an OLMo 2 model"):
        olmo2.load(tmp_path)
