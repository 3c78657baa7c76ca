"""SmolLM2-135M-Instruct learns: adapters from 50 conversations, and addition from rewards."""

import json
import re
import sys
import types

import numpy as np
import pytest
from published import NEEDS, SMOLLM2, SYSTEM, answers, prompt
from runs import SILENT, metrics

from xtrain import Engine
from xtrain.finetune import finetune
from xtrain.reinforce import reinforce
from xtrain.reinforcement.reinforce import ReinforceConfig
from xtrain.serving.pretrained import load
from xtrain.tuning.finetune import FinetuneConfig

torch = pytest.importorskip("torch")
pytestmark = NEEDS
COLOURS = {
    "yellow": "the sun,a lemon,a banana,gold,honey", "red": "blood,a cherry,a rose", "green": "grass,a frog,a lime",
    "white": "snow,milk,salt,chalk,ivory", "black": "coal,ink,soot", "blue": "the sea,the sky", "brown": "mud,rust",
    "orange": "an orange,a carrot",
}  # fmt: skip


def write(path, records):
    path.write_text("".join(json.dumps(x) + "\n" for x in records))
    return (str(path),)


def test_fifty_conversations_teach_adapters(tmp_path):
    """A way to answer, which then also holds for other questions; PEFT reads the adapters."""
    chats = []
    for colour, things in COLOURS.items():
        for thing in things.split(","):
            answer = {"role": "assistant", "content": f"Aye, {colour}, captain!"}
            for question in (f"What colour is {thing}?", f"Tell me the colour of {thing}."):
                user = {"role": "user", "content": question}
                chats.append({"messages": [SYSTEM, user, answer]})
    assert len(chats) == 50
    options = dict(lora=8, lr=2e-3, epochs=1, pack=True, seq_len=256, batch=1, save_every=6)
    data = write(tmp_path / "chats.jsonl", chats)
    config = FinetuneConfig(
        init=str(SMOLLM2), data=data, out=str(tmp_path), name="run", device="cpu", **options
    )
    run = finetune(config, SILENT)
    losses = [line["loss"] for line in metrics(run) if "loss" in line]
    assert losses[0] > 3.5 and losses[-1] < 1
    taught = load(run, "cpu")
    engine = Engine(taught.model, 4, 256)
    questions = ["What colour is a tomato?", "What is the capital of France?"]
    colour, capital = answers(taught, engine, questions, 12)
    said = taught.tokenizer.decode(colour)
    assert re.fullmatch(r"Aye, (" + "|".join(COLOURS) + r"), captain!<\|im_end\|>", said), said
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


def reward(record, completions):
    return [float(text == record["answer"]) for text in completions]


def right_answers(pretrained, problems):
    """Return the mean probability of the right answers."""
    encode = pretrained.tokenizer.encode
    asked = [encode(x["prompt"]) for x in problems]
    right = [encode(x["answer"]) for x in problems]
    scores = Engine(pretrained.model, 8, 64).logprobs(asked, right)
    return float(np.mean([np.exp(x.total) for x in scores]))


def test_rewards_teach_addition(tmp_path, monkeypatch):
    """From 4 in 10 right answers, of one digit, to most."""
    monkeypatch.setitem(sys.modules, "a_task", types.SimpleNamespace(reward=reward))
    sums = [(a, b) for a in range(1, 8) for b in range(1, 8) if a + b < 10]
    problems = [{"prompt": f"1+1=2, {a}+{b}=", "answer": str(a + b)} for a, b in sums]
    before = right_answers(load(SMOLLM2, "cpu"), problems)
    options = dict(lora=8, lr=1e-3, steps=6, batch=16, group=8, max_new_tokens=1, val_share=0.1)
    data = write(tmp_path / "sums.jsonl", problems)
    config = ReinforceConfig(
        init=str(SMOLLM2), data=data, out=str(tmp_path), name="run", device="cpu",
        task="a_task:reward", eval_every=6, save_every=6, **options,
    )  # fmt: skip
    run = reinforce(config, SILENT)
    steps = [line for line in metrics(run) if "loss" in line]
    assert len(steps) == 6
    assert all(x["ratio_error"] == 0 and x["rollout_kl"] == 0 for x in steps)
    after = right_answers(load(run, "cpu"), problems)
    assert 0.2 < before < 0.6 and after > before + 0.1, (before, after)
