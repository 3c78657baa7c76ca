"""examples/dpo.py: loss and derivative against PyTorch, and a run that learns an order."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import twins
from checks import rng
from runs import metrics

from xtrain.data.tokenizer import Tokenizer
from xtrain.nn import functional as F

PATH = Path(__file__).resolve().parents[2] / "examples" / "dpo.py"


@pytest.fixture(scope="module")
def dpo():
    spec = importlib.util.spec_from_file_location("dpo", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_loss_and_gradients_are_those_of_pytorch(dpo):
    config = twins.small(qk_norm=False)
    model, other = (twins.random_model(config, seed, "cpu") for seed in (0, 1))
    ids, targets = (x.astype(np.int32) for x in twins.batch(config, 3, 12))
    starts = np.repeat(
        np.array([[0] * 5 + [5] * 7], np.int32), 3, 0
    )  # chosen: 5 tokens, rejected: 7
    logprobs = model.logprobs(ids, targets, starts)
    reference = other.logprobs(ids, targets, starts).data
    loss, derivative, _ = dpo.dpo(logprobs.data, reference, targets, starts)
    F.with_gradient(logprobs, loss, derivative).backward()
    theirs, scores = twins.twin(model), []
    for part in (slice(0, 5), slice(5, 12)):  # each text alone
        counted, logits = targets[:, part] != -100, theirs(torch.tensor(ids[:, part]).long()).logits
        chosen = torch.tensor(np.where(counted, targets[:, part], 0)).long()[..., None]
        now = torch.log_softmax(logits, -1).gather(-1, chosen)[..., 0]
        before = torch.tensor(np.nan_to_num(reference[:, part]))
        scores.append(((now - before) * torch.tensor(counted)).sum(1))
    want = -torch.nn.functional.logsigmoid(dpo.BETA * (scores[0] - scores[1])).mean()
    want.backward()
    assert abs(loss - want.item()) < 1e-5
    ours = twins.gradients(model)
    for name, parameter in theirs.named_parameters():
        np.testing.assert_allclose(ours[name], parameter.grad.numpy(), rtol=1e-4, atol=1e-6)


def test_a_run_learns_which_answer_is_preferred(dpo, tmp_path, monkeypatch):
    tokenizer = Tokenizer.train(["def f(x):\n    return x + 1\n" * 50], 290)
    config = twins.small(vocab_size=tokenizer.vocab_size, qk_norm=False)
    twins.random_model(config, device="cpu").save_pretrained(tmp_path / "model", tokenizer)
    draw, pairs = rng(1), []
    for _ in range(60):
        words = ["".join(draw.choice(list("xyz1"), 4)) for _ in range(2)]
        pairs.append({"prompt": "def f", "chosen": words[0] + "a", "rejected": words[1] + "b"})
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(x) + "\n" for x in pairs))
    run = dpo.main(str(tmp_path / "model"), str(tmp_path / "pairs.jsonl"), 20, str(tmp_path))
    lines = metrics(run)
    losses = [m["loss"] for m in lines if "loss" in m]
    assert (
        abs(losses[0] - np.log(2)) < 1e-6 and losses[-1] < losses[0] - 0.05
    )  # the first margin is 0
    assert [m["val_right"] for m in lines if "val_right" in m][-1] == 1
    assert (run / "report.html").is_file()
