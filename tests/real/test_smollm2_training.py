"""SmolLM2-135M-Instruct learns what examples/captain.py teaches: adapters from conversations or pairs, addition from rewards."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from published import NEEDS, SMOLLM2, answers, prompt
from runs import SILENT, metrics

from xtrain import Engine
from xtrain.finetune import finetune
from xtrain.prefer import prefer
from xtrain.reinforce import reinforce
from xtrain.reinforcement.reinforce import ReinforceConfig
from xtrain.reinforcement.rewards import Task
from xtrain.serving.pretrained import load
from xtrain.tuning.finetune import FinetuneConfig
from xtrain.tuning.prefer import PreferConfig

torch = pytest.importorskip("torch")
pytestmark = NEEDS
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def example(monkeypatch):
    """The names in examples/captain.py."""
    monkeypatch.syspath_prepend(str(ROOT))
    return Task("examples.captain:reward").function.__globals__


def test_fifty_conversations_teach_adapters(example, tmp_path):
    """A way to answer, which then also holds for other questions; PEFT reads the adapters."""
    example["main"](str(tmp_path))
    assert len(example["chats"]()) == 50
    options = dict(lora=8, lr=2e-3, epochs=1, pack=True, seq_len=256, batch=1, save_every=6)
    config = FinetuneConfig(
        init=str(SMOLLM2), data=(str(tmp_path / "chats.jsonl"),), out=str(tmp_path), name="run",
        device="cpu", **options,
    )  # fmt: skip
    run = finetune(config, SILENT)
    losses = [line["loss"] for line in metrics(run) if "loss" in line]
    assert losses[0] > 3.5 and losses[-1] < 1
    taught = load(run, "cpu")
    engine = Engine(taught.model, 4, 256)
    questions = ["What colour is a tomato?", "What is the capital of France?"]
    colour, capital = answers(taught, engine, questions, 12)
    said = taught.tokenizer.decode(colour)
    assert re.fullmatch(rf"Aye, ({'|'.join(example['COLOURS'])}), captain!<\|im_end\|>", said), said
    said = taught.tokenizer.decode(capital)
    assert said.startswith("Aye, Paris"), said
    with_peft(taught, questions[1], list(capital))


def with_peft(taught, question, expected):
    """The adapters, read by PEFT on transformers' model, give the same answer."""
    peft = pytest.importorskip("peft")
    base = pytest.importorskip("transformers").AutoModelForCausalLM.from_pretrained(
        SMOLLM2, dtype=torch.float32
    )
    model = peft.PeftModel.from_pretrained(base, taught.folder).eval()
    ids = torch.tensor([prompt(taught, question)])
    whole = model.generate(input_ids=ids, max_new_tokens=12, do_sample=False)
    assert whole[0, ids.shape[1] :].tolist() == expected


def test_preferences_teach_adapters(example, tmp_path):
    """Pairs of a captain's answer and a plain one, which is more likely before: the order of held-out pairs changes."""
    pairs = []
    for talk in example["chats"]()[::5]:
        *asked, answer = talk["messages"]
        plain = answer["content"].removeprefix("Aye, ").replace(", captain!", ".")
        pairs.append({"prompt": asked, "chosen": [answer], "rejected": plain})
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    options = dict(lora=8, lr=5e-4, steps=4, batch=4, seq_len=64, eval_every=4, sample_every=0)
    config = PreferConfig(
        init=str(SMOLLM2), data=(str(tmp_path / "pairs.jsonl"),), out=str(tmp_path), name="run",
        device="cpu", val_share=0.2, **options,
    )  # fmt: skip
    run = prefer(config, SILENT)
    steps = [line for line in metrics(run) if "loss" in line]
    (validation,) = [line for line in metrics(run) if "val_margin" in line]
    assert abs(steps[0]["loss"] - np.log(2)) < 1e-4
    assert steps[0]["logprob_chosen"] < steps[0]["logprob_rejected"] - 20
    assert validation["val_accuracy"] == 1 and validation["val_margin"] > 0.5


def right_answers(pretrained, problems):
    """Return the mean probability of the right answers."""
    encode = pretrained.tokenizer.encode
    asked = [encode(x["prompt"]) for x in problems]
    right = [encode(x["answer"]) for x in problems]
    scores = Engine(pretrained.model, 8, 64).logprobs(asked, right)
    return float(np.mean([np.exp(x.total) for x in scores]))


def test_rewards_teach_addition(example, tmp_path):
    """From 4 right answers in 10 to most. Rollouts and training have the same bits."""
    example["main"](str(tmp_path))
    before = right_answers(load(SMOLLM2, "cpu"), example["sums"]())
    options = dict(lora=8, lr=1e-3, steps=6, batch=16, group=8, max_new_tokens=1, val_share=0.1)
    config = ReinforceConfig(
        init=str(SMOLLM2), data=(str(tmp_path / "sums.jsonl"),), out=str(tmp_path), name="run",
        device="cpu", task="examples.captain:reward", eval_every=6, save_every=6, **options,
    )  # fmt: skip
    run = reinforce(config, SILENT)
    steps = [line for line in metrics(run) if "loss" in line]
    assert len(steps) == 6
    assert all(x["ratio_error"] == 0 and x["rollout_kl"] == 0 for x in steps)
    after = right_answers(load(run, "cpu"), example["sums"]())
    assert 0.2 < before < 0.6 and after > before + 0.1, (before, after)
