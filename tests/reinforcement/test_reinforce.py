"""Reinforcement learning: the same bits in rollouts and training, learning, resuming, refused input, prefixes of old weights."""

import contextlib
import json
import math
import sys
import types

import numpy as np
import pytest
import twins
from checks import GPU
from runs import SILENT, assert_same_run, metrics

from xtrain import AdamW, Engine
from xtrain.data.tokenizer import Tokenizer
from xtrain.errors import UserError
from xtrain.reinforce import main, reinforce
from xtrain.reinforcement import reinforce as module
from xtrain.reinforcement.reinforce import ReinforceConfig, seed_of
from xtrain.training import out_of_memory
from xtrain.training.preemption import StopNow


def letters(record, completions):
    """The share of characters that are letters of the alphabet."""
    assert record["prompt"].startswith("def")
    return [sum(x.isascii() and x.isalpha() for x in text) / max(len(text), 1) for text in completions]  # fmt: skip


@pytest.fixture(autouse=True)
def task(monkeypatch):
    monkeypatch.setitem(sys.modules, "a_task", types.SimpleNamespace(reward=letters))


def config_of(folder, out, **more):
    options = dict(
        init=str(folder), data=(str(folder / "prompts.jsonl"),), out=str(out), name="run", device="cpu", task="a_task:reward",
        group=4, batch=8, max_new_tokens=6, steps=4, lr=1e-3, save_every=1, eval_every=2, blas_threads=1,
    )  # fmt: skip
    return ReinforceConfig(**(options | more))


def steps_of(run):
    return [m for m in metrics(run) if "loss" in m]


@pytest.fixture(scope="module")
def whole(folder, tmp_path_factory):
    """An uninterrupted run, with a reference and two updates a step."""
    sys.modules["a_task"] = types.SimpleNamespace(reward=letters)
    return reinforce(config_of(folder, tmp_path_factory.mktemp("whole"), kl=0.05, updates=2), SILENT)  # fmt: skip


def test_the_first_ratio_is_one_and_the_kl_zero_in_every_step(whole):
    lines = steps_of(whole)
    assert len(lines) == 4
    for m in lines:
        assert m["ratio_error"] == 0.0 and m["rollout_kl"] == 0.0
        assert 0 <= m["reward"] <= 1 and m["completion_tokens"] <= 6 and "skipped" not in m
    assert lines[0]["reference_kl"] == 0.0 < lines[-1]["reference_kl"]
    assert [m["step"] for m in metrics(whole) if "val_reward" in m] == [2, 4]
    page = (whole / "report.html").read_text()
    assert "In all 4 steps the ratio of the first update was exactly 1" in page
    assert "KL to the reference" in page and "validation reward" in page


def test_completions_are_logged_whole(whole, folder, tmp_path):
    lines = [json.loads(line) for line in (whole / "rollouts.jsonl").read_text().splitlines()]
    assert [x["step"] for x in lines] == np.repeat([1, 2, 3, 4], 8).tolist()
    prompts = {json.loads(x)["prompt"] for x in (folder / "prompts.jsonl").read_text().splitlines()}
    for m in steps_of(whole):
        own = [x for x in lines if x["step"] == m["step"]]
        assert {x["prompt"] for x in own} <= prompts
        assert [x["reward"] for x in own] == [letters(x, [x["completion"]])[0] for x in own]
        rewards = np.array([x["reward"] for x in own]).reshape(2, 4)
        assert abs(m["reward"] - rewards.mean()) < 1e-12
        assert abs(m["reward_std"] - rewards.std(1).mean()) < 1e-12
        assert m["truncated"] == np.mean([x["finish"] == "length" for x in own])
        assert m["completion_tokens"] == np.mean([x["tokens"] for x in own])
        assert 0 < m["entropy"] < np.log(400)
        sums = np.array([x["advantage"] for x in own]).reshape(2, 4).sum(1)
        np.testing.assert_allclose(sums, 0, atol=1e-5)
    page = (whole / "report.html").read_text()
    assert "Completions of step 4" in page and "advantage" in page
    for every, steps in ((0, []), (3, [1, 3, 4])):
        run = reinforce(config_of(folder, tmp_path, name=f"every{every}", rollouts_every=every), SILENT)  # fmt: skip
        path = run / "rollouts.jsonl"
        text = path.read_text() if path.exists() else ""
        assert sorted({json.loads(x)["step"] for x in text.splitlines()}) == steps


def test_a_kill_in_a_step_loses_that_step_and_no_bit(whole, folder, tmp_path):
    calls = []

    def killed(record, completions):
        calls.append(record["n"])
        if len(calls) == 7:  # 2 prompts a step and a validation of 1: in the third step
            raise StopNow
        return letters(record, completions)

    sys.modules["a_task"].reward = killed
    config = config_of(folder, tmp_path, kl=0.05, updates=2)
    with pytest.raises(KeyboardInterrupt):
        reinforce(config, SILENT)
    stopped = tmp_path / "run"
    assert len(steps_of(stopped)) == 2
    sys.modules["a_task"].reward = letters
    assert main(["--out", str(tmp_path), "--name", "run", "--resume"]) == 0, "the name is enough"
    assert_same_run(whole, stopped)


def test_the_reference_stays(folder, tmp_path, capsys):
    """It is the checkpoint that a run had at the start; another one decides other numbers, so it is refused."""
    other = reinforce(config_of(folder, tmp_path, name="other", steps=1, lr=1e-2), SILENT)
    options = dict(kl=0.05, reference=str(other), stop_at=2)
    run = reinforce(config_of(folder, tmp_path, steps=3, **options), SILENT)
    reinforce(config_of(folder, tmp_path, name="other", steps=2, resume=True, allow_change=("steps",), lr=1e-2), SILENT)  # fmt: skip
    arguments = ["--out", str(tmp_path), "--name", "run", "--resume"]
    assert main([*arguments, "--reference", str(other)]) == 2
    assert "the reference is not the same (sha256 was " in capsys.readouterr().err
    assert main(arguments) == 0
    whole = reinforce(config_of(folder, tmp_path, name="whole", steps=3, kl=0.05, reference=str(other / "checkpoints/step-000001")), SILENT)  # fmt: skip
    assert_same_run(whole, run)
    more = ["--reference", str(other), "--allow-change", "reference", "steps", "--steps", "4"]
    assert main([*arguments, *more]) == 0


def test_rollouts_do_not_depend_on_what_is_generated_with_them(whole, folder, tmp_path):
    """The number of sequences at a time changes no bit of any step."""
    alone = reinforce(config_of(folder, tmp_path, kl=0.05, updates=2, rollout_batch=3), SILENT)
    assert metrics(alone) == metrics(whole)


def test_adapters_on_a_frozen_model(folder, tmp_path):
    run = reinforce(config_of(folder, tmp_path, lora=4, lr=1e-2, kl=0.01, steps=3), SILENT)
    lines = steps_of(run)
    assert [m["ratio_error"] + m["rollout_kl"] for m in lines] == [0.0] * 3
    assert lines[0]["reference_kl"] == 0.0 < lines[-1]["reference_kl"]
    assert (run / "checkpoints" / "step-000003" / "adapter_model.safetensors").is_file()
    more = reinforce(config_of(run, tmp_path, name="more", data=(str(folder / "prompts.jsonl"),), lora=4, steps=1), SILENT)  # fmt: skip
    assert steps_of(more)[0]["ratio_error"] == 0.0  # trained further


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_same_bits_on_a_gpu(folder, tmp_path, precision):
    """With cuBLAS and captured decoding steps, every step a new set of weights."""
    config = twins.small(vocab_size=290, head_dim=64, dim=128, hidden_dim=256, max_seq_len=128, qk_norm=False)  # fmt: skip
    twins.random_model(config, device="cpu").save_pretrained(tmp_path / "model", Tokenizer.load(folder))  # fmt: skip
    given = dict(init=str(tmp_path / "model"), device="gpu", precision=precision, batch=64, max_new_tokens=60)  # fmt: skip
    run = reinforce(config_of(folder, tmp_path, **given, updates=2), SILENT)
    assert [m["ratio_error"] + m["rollout_kl"] for m in steps_of(run)] == [0.0] * 4


def test_without_exact_the_drift_is_measured(folder, tmp_path):
    run = reinforce(config_of(folder, tmp_path, exact=False, steps=2), SILENT)
    drift = [m["ratio_error"] for m in steps_of(run)]
    assert 0 < max(drift) < 1e-3
    assert "the ratio of a first update was off by up to" in (run / "report.html").read_text()


def test_a_difference_of_bits_ends_an_exact_run(folder, tmp_path, monkeypatch):
    """The engine computes in batch-invariant mode, training does not."""
    monkeypatch.setattr(module, "batch_invariant", lambda on: contextlib.nullcontext())
    with pytest.raises(UserError, match=r"step 1: training computes other log-prob.*--no-exact"):
        reinforce(config_of(folder, tmp_path), SILENT)


def test_it_learns(folder, tmp_path):
    run = reinforce(
        config_of(folder, tmp_path, steps=20, batch=32, lr=1e-2, save_every=20, eval_every=20),
        SILENT,
    )
    rewards = [m["reward"] for m in steps_of(run)]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.3


def test_a_step_that_is_not_finite_changes_nothing(folder, tmp_path, monkeypatch):
    found, real = [], module.surrogate

    def broken(*arguments):
        found.append(real(*arguments))
        bad = len(found) == 2
        return types.SimpleNamespace(**{**vars(found[-1]), "loss": math.nan}) if bad else found[-1]

    monkeypatch.setattr(module, "surrogate", broken)
    run = reinforce(config_of(folder, tmp_path, steps=3), SILENT)
    assert ["skipped" in m for m in steps_of(run)] == [False, True, False]
    weights = [(run / "checkpoints" / f"step-00000{i}" / "model.safetensors").read_bytes() for i in (1, 2, 3)]  # fmt: skip
    assert weights[0] == weights[1] != weights[2]


def test_seeds_differ():
    assert len({seed_of(s, n) for s in range(3) for n in range(20)}) == 60


# ----------------------------------------------------------------------------- what is refused
def test_what_the_command_refuses(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken_task.py").write_text("1 / 0\n")
    (tmp_path / "one.jsonl").write_text('{"prompt": "x"}\n')
    (tmp_path / "none.jsonl").write_text('{"text": "x"}\n')
    (tmp_path / "chat.jsonl").write_text('{"messages": [{"role": "user", "content": "x"}]}\n')
    base = ["--device", "cpu", "--out", str(tmp_path)]
    model = ["--init", str(folder), *base]
    data = ["--data", str(folder / "prompts.jsonl")]
    given = [*model, *data, "--task", "a_task:reward"]
    for arguments, words in (
        (["--task", "a_task:reward", *data, *base], "give its folder with --init"),
        ([*model, "--task", "a_task:reward"], "give .jsonl files with --data"),
        ([*model, *data], "--task '' must be MODULE:FUNCTION"),
        ([*model, *data, "--task", "no_such_task:f"], "there is no such module here"),
        ([*model, *data, "--task", "broken_task:f"], "ZeroDivisionError: division by zero"),
        ([*model, *data, "--task", "a_task:other"], "a_task has no function 'other'"),
        ([*given, "--group", "1"], "--group must be at least 2"),
        ([*given, "--batch", "12"], "--batch 12 is not a multiple of --group 8"),
        ([*given, "--max-new-tokens", "47"], "no prompt leaves room for --max-new-tokens 47"),
        ([*given, "--graph"], "there is no option --graph: CUDA graphs are used where they can be"),
        ([*given, "--reference", "there"], "--reference needs --kl"),
        ([*given, "--seq-len", "9"], "there is no option --seq-len: the longest prompt"),
        ([*given, "--clip-ratio", "1"], "--clip-ratio must be between"),
        ([*model, "--task", "a_task:reward", "--data", "gone.jsonl"], "gone.jsonl does not exist"),
        ([*model, "--task", "a_task:reward", "--data", "none.jsonl"], 'line 1 has no field "prompt"'),
        ([*model, "--task", "a_task:reward", "--data", "chat.jsonl"], "has no chat template"),
        ([*model, "--task", "a_task:reward", "--max-new-tokens", "5", "--data", "one.jsonl"], "one prompt cannot be trained"),
    ):  # fmt: skip
        assert main(arguments) == 2, arguments
        said = capsys.readouterr().err.strip()
        assert words in said and len(said.splitlines()) == 1, said


@pytest.mark.skipif(GPU, reason="on a GPU the allocation fails")
def test_a_run_that_cannot_fit_is_refused(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(out_of_memory, "free_memory", lambda: 1 << 20)
    data = ["--data", str(folder / "prompts.jsonl"), "--task", "a_task:reward"]
    given = ["--init", str(folder), *data, "--out", str(tmp_path), "--max-new-tokens", "5"]
    assert main(given) == 2
    said = capsys.readouterr().err
    assert said.startswith("xtrain.reinforce: a run with steps of 64 x ") and "batch 1 " in said


# ----------------------------------------------------------------------------- the engine on changing weights
@pytest.mark.parametrize("way", ["AdamW", "in place"])
def test_keys_and_values_of_old_weights_are_not_reused(way):
    model = twins.random_model(twins.small(max_seq_len=48), device="cpu")
    engine = Engine(model, 4, 48, batch_invariant=True, block_tokens=16)
    prompt = [[*range(1, 40)]]
    before = engine.generate(prompt, 4, logprobs=0)
    assert engine.generate(prompt, 4, logprobs=0) == before and engine.reused_tokens > 0
    if way == "AdamW":
        model.zero_grad()
        model.loss(np.array(prompt)[:, :-1], np.array(prompt)[:, 1:]).backward()
        AdamW(model, lr=0.05).step()
    else:
        model.arena.weights[...] *= 1.5
        stale = engine.generate(prompt, 4, logprobs=0)
        engine.forget_prefixes()
    reused = engine.reused_tokens
    after = engine.generate(prompt, 4, logprobs=0)
    assert engine.reused_tokens == reused
    fresh = Engine(model, 4, 48, batch_invariant=True).generate(prompt, 4, logprobs=0)
    assert after[0].logprobs == fresh[0].logprobs != before[0].logprobs
    if way == "in place":
        assert stale[0].logprobs != fresh[0].logprobs  # so this test can fail
