"""Training draft heads: the loss against torch, and a run whose heads draft."""

import json

import numpy as np
import pytest
import torch
import twins
from checks import rng, to_host
from run_ahead import Drafting
from runs import assert_same_run, metrics, write_lines
from test_finetune import config_of, folder, tokenizer

from xtrain import Engine, UserError
from xtrain.finetune import finetune, main
from xtrain.nn.draft_heads import DraftHeads, HeadedTransformer, targets_ahead
from xtrain.serving.pretrained import load

__all__ = ["folder", "tokenizer"]


def test_targets_of_the_heads():
    targets = np.array([[1, 2, 3, 4], [5, -100, 7, 8]], np.int32)
    assert targets_ahead(targets, 1).tolist() == [[2, 3, 4, -100], [-100, 7, 8, -100]]
    assert targets_ahead(targets, 4).tolist() == [[-100] * 4] * 2
    starts = np.array([[0, 0, 2, 2], [0, 0, 0, 0]], np.int32)  # the first row has two documents
    assert targets_ahead(targets, 1, starts).tolist() == [[2, -100, 4, -100], [-100, 7, 8, -100]]


def test_loss_and_gradients_are_those_of_torch():
    base = twins.random_model(twins.small(vocab_size=61, max_seq_len=32))
    headed = HeadedTransformer(base.config, None, twins.DEVICE, trainable=False)
    for (_, mine), (_, theirs) in zip(headed.named_parameters(), base.named_parameters()):
        twins.set_weights(mine, to_host(theirs.data))
    ids, targets = twins.batch(base.config, 2, 20)
    headed.add_heads(2)
    first = headed.loss(ids, targets).item()
    for i, (_, tensor) in enumerate(headed.named_parameters()):
        twins.set_weights(tensor, (0.2 * rng(0, i).standard_normal(tensor.shape)).astype("f4"))
    loss = headed.loss(ids, targets)
    loss.backward()
    theirs = twins.twin(base).requires_grad_(False)
    h = theirs.model(torch.tensor(ids)).last_hidden_state
    ours = {n: torch.tensor(w, requires_grad=True) for n, w in twins.weights(headed).items()}
    assert list(ours) == ["heads.0.weight", "heads.1.weight"]

    def torch_loss(heads):
        total = 0
        for k, w in enumerate(heads, 1):
            logits = theirs.lm_head(h + torch.nn.functional.silu(h @ w.T))
            ahead = torch.tensor(targets_ahead(targets, k)).long().reshape(-1)
            flat = logits.reshape(len(ahead), -1)
            sums = torch.nn.functional.cross_entropy(flat, ahead, reduction="sum")
            total = total + sums / (targets != -100).sum() / 2
        return total

    want = torch_loss(ours.values())
    want.backward()
    assert abs(loss.item() - want.item()) < 1e-5
    assert abs(first - torch_loss([torch.zeros_like(w) for w in ours.values()]).item()) < 1e-5
    for name, gradient in twins.gradients(headed).items():
        expected = ours[name].grad.numpy()
        np.testing.assert_allclose(gradient, expected, rtol=1e-3, atol=1e-5 * abs(expected).max())
    assert all(p.grad is None for p in headed.base_arena.parameters)


REPETITIVE = [dict(text="abcdefgh" * 3 + "xyz" * i) for i in range(12)]


def test_a_run_trains_heads_that_serve(tmp_path, folder, capsys):
    """The loss falls; the folder of the run drafts, often rightly, and changes no answer."""
    data = write_lines(tmp_path / "d.jsonl", *REPETITIVE)
    quiet = dict(steps=30, batch=4, eval_every=0, sample_every=0)
    tuned = finetune(config_of(folder, tmp_path / "model", data, **quiet, lr=1e-2))
    options = quiet | dict(lr=3e-2, draft_heads=2, save_every=15, sample_every=30)
    run = finetune(config_of(tuned, tmp_path / "heads", data, **options))
    half = finetune(config_of(tuned, tmp_path / "half", data, **options, stop_at=15))
    assert main(["--out", str(half.parent), "--name", "run", "--resume"]) == 0
    assert_same_run(run, half)
    losses = [x["loss"] for x in metrics(run) if "loss" in x]
    assert losses[-1] < 0.8 * losses[0]
    (newest,) = (run / "checkpoints").glob("step-000030")
    content = json.loads((newest / "adapter_config.json").read_text())
    assert content["num_heads"] == 2 and content["peft_type"] == "XTRAIN_DRAFT_HEADS"
    pretrained = load(tuned, "cpu")
    heads = pretrained.draft(str(run))
    assert isinstance(heads, DraftHeads) and len(heads.heads) == 2
    prompts = [pretrained.tokenizer.encode_prompt(x["text"][:9]) for x in REPETITIVE[:3]]
    options = dict(batch_invariant=True, max_seq_len=48)
    plain = Engine(pretrained.model, 2, **options)
    engine = Drafting(pretrained.model, 2, speculate=2, draft_model=heads, **options)
    wanted = plain.generate(prompts, 20, logprobs=1)
    answers = engine.generate(prompts, 20, logprobs=1)
    assert answers == wanted and [x.logprobs for x in answers] == [x.logprobs for x in wanted]
    figures = engine.scheduler.speculation.figures()
    assert figures["accepted_tokens"] > 0.3 * figures["drafted_tokens"] > 5
    with pytest.raises(UserError, match="holds draft heads, not a model: give the folder of"):
        load(run, "cpu")
    assert (
        main(["--init", str(folder), "--data", str(data), "--draft-heads", "2", "--lora", "2"]) == 2
    )
    assert "cannot be combined" in capsys.readouterr().err
