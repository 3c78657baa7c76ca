"""Every algorithm's loss and gradient, from rewards on, against its formula in PyTorch and against TRL, on fixed rollouts."""

import json
import sys
import threading
import types
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from checks import rng
from runs import SILENT, assert_same_run, checkpoints, metrics

from examples import high_entropy
from xtrain.errors import UserError
from xtrain.reinforce import main, reinforce
from xtrain.reinforcement.algorithms import ALGORITHMS, find_algorithm
from xtrain.reinforcement.grpo import GRPO, of_tokens
from xtrain.reinforcement.options import ReinforceConfig
from xtrain.reinforcement.surrogate import Objective, Rewarded, surrogate

P, G, T = (3, 4, 7)
LIMIT = 9
BETA = 0.05
DRAW = rng(5)
REWARDS = DRAW.normal(1, 2, (P, G))
COUNTED = np.arange(T) < DRAW.integers(1, T + 1, (P, G, 1))
COUNTED[1, 2] = False  # a completion that was cut off
THEN, REFERENCE = (DRAW.normal(-2, 0.5, (P, G, T)) for _ in range(2))
NOW = THEN + DRAW.normal(0, 0.3, THEN.shape)  # some ratios leave [0.8, 1.2] on each side

NEEDED = {"init": "a model", "data": ("prompts",), "task": "rewards:f"}  # to be a config


def options_of(name, **given):
    return ReinforceConfig(algorithm=name, **(NEEDED | given)).with_algorithm(find_algorithm(name))


def ours(name, parts=2):
    """-> loss, gradient (P, G, T), as the command computes them, in micro-batches."""
    algorithm, c = ALGORITHMS[name], options_of(name)
    in_reward = algorithm.kl == "reward"
    penalty = np.where(COUNTED, BETA * (THEN - REFERENCE), 0) * in_reward
    step = Rewarded(REWARDS, COUNTED, penalty, True, LIMIT)
    of_tokens = np.reshape(algorithm.advantages(step), (P, G, -1))
    advantages = np.broadcast_to(of_tokens, COUNTED.shape)
    rows = [x.reshape(P * G, -1) for x in (NOW, THEN, advantages, COUNTED, algorithm.weights(step), REFERENCE)]  # fmt: skip
    rows[4] = rows[4].ravel()
    clip = c.clip_ratio, c.clip_ratio_high or c.clip_ratio
    found = []
    for part in np.array_split(np.arange(P * G), parts):
        now, then, a, counted, weights, reference = (x[part] for x in rows)
        found.append(surrogate(algorithm.objective, now, then, a, counted, weights, clip, 0 if in_reward else BETA, reference))  # fmt: skip
    return sum(x.loss for x in found), np.concatenate([x.dlogprobs for x in found]).reshape(NOW.shape)  # fmt: skip


def formula(name):
    """-> loss, gradient: of the papers' formulas, on tensors with a mask."""
    now = torch.tensor(NOW, requires_grad=True)
    then, reference, mask, R = map(torch.tensor, (THEN, REFERENCE, COUNTED, REWARDS))
    length = mask.sum(-1)
    k1, d = (then - reference) * mask, reference - now
    k3 = torch.exp(d) - d - 1
    if name == "rloo":
        R = R - BETA * k1.sum(-1)
        A = torch.stack([R[:, i] - torch.cat([R[:, :i], R[:, i + 1 :]], 1).mean(1) for i in range(G)], 1)  # fmt: skip
    elif name == "reinforce++":
        A = R[..., None] - BETA * torch.stack([k1[..., t:].sum(-1) for t in range(T)], -1)
        A = (A - A[mask].mean()) / A[mask].std(correction=0)
    elif name == "dr_grpo":
        A = R - R.mean(1, keepdim=True)
    else:
        A = (R - R.mean(1, keepdim=True)) / (R.std(1, correction=name != "grpo", keepdim=True) + 1e-4)  # fmt: skip
    A = A if A.dim() == 3 else A[..., None]
    low, high = {"dapo": (0.2, 0.28), "gspo": (3e-4, 4e-4)}.get(name, (0.2, 0.2))
    total = ((now - then) * mask).sum(-1, keepdim=True)
    ratio = torch.exp({"rloo": total, "gspo": total / length.clamp(min=1)[..., None]}.get(name, now - then))  # fmt: skip
    gain = torch.min(ratio * A, ratio.clamp(1 - low, 1 + high) * A)
    if name == "cispo":
        gain = ratio.clamp(max=5).detach() * A * now
    if name == "rloo":
        loss = -(gain[..., 0] * (length > 0)).mean()
    else:
        of_token = (BETA * (name != "reinforce++") * k3 - gain) * mask
        if name in ("grpo_paper", "gspo"):
            loss = (of_token.sum(-1) / length.clamp(min=1)).mean()
        elif name == "dr_grpo":
            loss = of_token.sum() / (P * G * LIMIT)
        else:
            loss = of_token.sum() / mask.sum()
    loss.backward()
    return loss.item(), now.grad.numpy()


def trl_loss(name, advantages):
    """-> loss, gradient: of TRL's trainers, whose loss is called without a model."""
    trainer = pytest.importorskip("trl").GRPOTrainer
    now = torch.tensor(NOW.reshape(P * G, T), requires_grad=True)
    mask = torch.tensor(COUNTED.reshape(P * G, T)).long()
    then = torch.tensor(THEN.reshape(P * G, T))
    c = options_of(name)
    high = 5.0 if name == "cispo" else c.clip_ratio_high or c.clip_ratio
    ones = torch.ones(P * G, 1).long()
    itself = types.SimpleNamespace(
        max_completion_length=LIMIT, top_entropy_quantile=1.0, off_policy_mask_threshold=None, beta=BETA,
        importance_sampling_level="sequence" if name == "gspo" else "token", epsilon_low=c.clip_ratio, epsilon_high=high,
        args=types.SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        loss_type={"gspo": "grpo", "grpo_paper": "grpo"}.get(name, name), current_gradient_accumulation_steps=1,
        accelerator=types.SimpleNamespace(num_processes=1, reduce=lambda x, reduction: x, gather=lambda x: x),
        model=types.SimpleNamespace(training=True), _metrics={"train": defaultdict(list)}, aux_loss_enabled=False,
        use_vllm=False, _entropy_bonus_enabled=False,
        _get_per_token_logps_and_entropies=lambda *a, **k: (now, torch.zeros_like(now), None),
    )  # fmt: skip
    inputs = dict(
        prompt_ids=ones, prompt_mask=ones, completion_ids=mask, completion_mask=mask, num_items_in_batch=mask.sum(),
        advantages=torch.tensor(advantages.reshape(-1)), old_per_token_logps=then, old_logps=(then * mask).sum(1),
        ref_per_token_logps=torch.tensor(REFERENCE.reshape(P * G, T)),
    )  # fmt: skip
    if name == "rloo":
        trainer = pytest.importorskip("trl").RLOOTrainer
    loss = trainer._compute_loss(itself, None, inputs)
    loss.backward()
    return loss.item(), now.grad.numpy().reshape(NOW.shape)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_loss_and_gradient_are_those_of_the_formula(name):
    loss, gradient = formula(name)
    found, derivative = ours(name)
    assert abs(found - loss) < 1e-12
    np.testing.assert_allclose(derivative, gradient, rtol=2e-7, atol=1e-12)
    assert not derivative[~COUNTED].any() and abs(gradient).max() > 1e-3


@pytest.mark.parametrize("name", [x for x in ALGORITHMS if x not in ("grpo", "reinforce++")])
def test_loss_and_gradient_are_those_of_trl(name):
    penalty = np.where(COUNTED, BETA * (THEN - REFERENCE), 0) * (name == "rloo")
    advantages = ALGORITHMS[name].advantages(Rewarded(REWARDS, COUNTED, penalty))
    loss, gradient = trl_loss(name, advantages)
    found, derivative = ours(name, parts=1)
    if name == "rloo":  # TRL counts exp(0) A of a completion without tokens; it has no gradient
        loss += advantages[1, 2] / (P * G)
    assert abs(found - loss) < 1e-12
    np.testing.assert_allclose(derivative, gradient, rtol=2e-7, atol=1e-12)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_two_ranks_compute_what_one_does(name):
    """Each has some of the prompts."""
    algorithm, penalty = ALGORITHMS[name], np.where(COUNTED, BETA * (THEN - REFERENCE), 0)
    both = threading.Barrier(2)
    numbers = [0.0, 0.0]

    def on_rank(rank, rows):
        def sum_ranks(x):
            numbers[rank] = x
            both.wait(10)
            total = sum(numbers)
            both.wait(10)
            return total

        step = Rewarded(REWARDS[rows], COUNTED[rows], penalty[rows], True, LIMIT, sum_ranks)
        return algorithm.advantages(step), algorithm.weights(step)

    whole = Rewarded(REWARDS, COUNTED, penalty, True, LIMIT)
    with ThreadPoolExecutor(2) as pool:
        parts = list(pool.map(on_rank, (0, 1), (slice(0, 1), slice(1, P))))
    for i, expected in enumerate((algorithm.advantages(whole), algorithm.weights(whole))):
        np.testing.assert_allclose(np.concatenate([x[i] for x in parts]), expected, rtol=1e-12)


# ----------------------------------------------------------------------------- in a run
def letters(record, completions):
    return [sum(x.isascii() and x.isalpha() for x in text) / max(len(text), 1) for text in completions]  # fmt: skip


def run_of(folder, out, reward=letters, **options):
    sys.modules["a_task"] = types.SimpleNamespace(reward=reward)
    base = dict(
        init=str(folder), data=(str(folder / "prompts.jsonl"),), out=str(out), device="cpu", task="a_task:reward",
        group=4, batch=8, max_new_tokens=6, steps=2, lr=1e-3, eval_every=0, sample_every=0, blas_threads=1,
    )  # fmt: skip
    run = reinforce(ReinforceConfig(**(base | options)), SILENT)
    return run, [m for m in metrics(run) if "loss" in m]


def test_an_algorithm_of_yours(folder, tmp_path, monkeypatch):
    """examples/high_entropy.py: four fifths of the tokens have no gradient."""
    seen = []
    monkeypatch.setattr(high_entropy, "of_tokens", lambda tokens: seen.append(tokens) or of_tokens(tokens))  # fmt: skip
    monkeypatch.setattr(high_entropy, "other", 3, raising=False)
    name = "examples.high_entropy:ALGORITHM"
    run, lines = run_of(folder, tmp_path, algorithm=name, micro_batch=4)
    assert [m["ratio_error"] for m in lines] == [0, 0] and lines[0]["grad_norm"] > 0
    assert all(0.7 < m["clipped"] < 0.85 for m in lines)
    assert len(seen) == 4 and abs(np.mean([x.entropies.mean() + x.then.mean() for x in seen])) < 0.5
    with pytest.raises(
        UserError, match=r"high_entropy:other is not an xtrain.*Algorithm: name one"
    ):
        find_algorithm("examples.high_entropy:other")
    with pytest.raises(UserError, match=r"'ppo' is not known: choose from grpo, .*MODULE:NAME"):
        find_algorithm("ppo")
    assert main(["--resume", "--out", str(tmp_path), "--name", run.name, "--algorithm", "rloo"]) == 2  # fmt: skip


BAD_ALGORITHMS = {
    r"objective raised ZeroDivisionError \(.*\) at test_algorithms.py:\d+": {"objective": lambda x: 1 / 0},
    r"objective returned an array of shape \(3,\), not \(\d+,\)": {"objective": lambda x: (x.now, x.now[:3])},
    r"objective returned 5, not an Objective": {"objective": lambda x: 5},
    r"objective returned numbers that are not finite": {"objective": lambda x: (x.now, x.now * np.nan)},
    r"advantages returned an array of shape \(2,\), not \(2, 4\) or \(2, 4, \d+\)": {"advantages": lambda x: x.rewards[:, 0]},
    r"advantages returned 'a', not an array of numbers": {"advantages": lambda x: "a"},
    r"weights returned numbers that are not finite": {"weights": lambda x: x.rewards * np.nan},
    r"kl is 'no': choose 'loss' or 'reward'": {"kl": "no"},
    r"sets clip, lr: it may set clip_ratio, ": {"options": {"lr": 1, "clip": 2}},
    r"--clip-ratio must be between 0 and 1, got 3": {"options": {"clip_ratio": 3}},
}  # fmt: skip


@pytest.mark.parametrize("words", BAD_ALGORITHMS)
def test_a_bad_algorithm_is_one_sentence(words, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(high_entropy, "ALGORITHM", replace(GRPO, **BAD_ALGORITHMS[words]))
    with pytest.raises(UserError, match=words) as caught:
        run_of(folder, tmp_path, algorithm="examples.high_entropy:ALGORITHM")
    assert "\n" not in str(caught.value)


def test_an_algorithm_may_change_what_it_gets(folder, tmp_path, monkeypatch):
    """The numbers that are logged, and those of the other functions, stay."""

    def objective(tokens):
        np.subtract(tokens.now, tokens.then, out=tokens.now)
        return Objective(-tokens.advantages * np.exp(tokens.now), -tokens.advantages)

    def advantages(step):
        step.counted[:] = False
        return GRPO.advantages(step)

    own = replace(GRPO, objective=objective, advantages=advantages)
    monkeypatch.setattr(high_entropy, "ALGORITHM", own)
    _, lines = run_of(folder, tmp_path, algorithm="examples.high_entropy:ALGORITHM")
    assert [m["ratio_error"] for m in lines] == [0, 0] and lines[0]["grad_norm"] > 0


@pytest.mark.parametrize(
    "field, calls, more",
    [("objective", 1, {}), ("weights", 1, {}), ("advantages", 2, dict(off_policy=1, steps=3))],
)
def test_a_run_is_saved_before_an_algorithm_ends_it(field, calls, more, folder, tmp_path, monkeypatch):  # fmt: skip
    """The function fails in the second step; when it is fixed, the run continues as if it had not."""
    function = getattr(GRPO, field)
    own = lambda f: monkeypatch.setattr(high_entropy, "ALGORITHM", replace(GRPO, **{field: f}))
    left = iter(range(calls))
    options = dict(algorithm="examples.high_entropy:ALGORITHM", save_every=0, sample_every=None, micro_batch=8) | more  # fmt: skip
    own(function)
    whole, _ = run_of(folder, tmp_path / "a", **options)
    own(lambda x: function(x) if next(left, None) is not None else 1 / 0)
    with pytest.raises(UserError, match=f"{field} raised ZeroDivisionError"):
        run_of(folder, tmp_path / "b", **options)
    half = tmp_path / "b" / whole.name
    assert checkpoints(half) == ["step-000001"]
    own(function)
    assert main(["--resume", "--out", str(tmp_path / "b"), "--name", whole.name]) == 0
    assert_same_run(whole, half)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_first_ratio_of_each_is_one_and_micro_batches_do_not_matter(name, folder, tmp_path):
    _, whole = run_of(folder, tmp_path, algorithm=name, mask_truncated=False, kl=0.05, name="a", batch=16)  # fmt: skip
    _, parts = run_of(folder, tmp_path, algorithm=name, mask_truncated=False, kl=0.05, name="b", batch=16, micro_batch=4)  # fmt: skip
    for m, n in zip(whole, parts, strict=True):
        assert m["ratio_error"] == 0 and m["rollout_kl"] == 0 and m["grad_norm"] > 0
        assert abs(m["loss"] - n["loss"]) < 1e-6 and abs(m["grad_norm"] - n["grad_norm"]) < 1e-4


def test_completions_that_were_cut_off_are_not_trained(folder, tmp_path):
    """With a limit that no completion reaches the end of, nothing is left."""
    for name in ("dapo", "gspo", "rloo", "reinforce++", "dr_grpo"):
        _, lines = run_of(folder, tmp_path, algorithm=name, mask_truncated=True, max_new_tokens=1, steps=1)  # fmt: skip
        (m,) = lines
        assert m["truncated"] == 1 and m["loss"] == 0 and m["grad_norm"] == 0 and m["clipped"] == 0


def test_groups_of_equal_rewards_are_replaced(folder, tmp_path):
    """Rewards that differ in the last bit are equal, too."""

    def reward(record, completions):
        if record["n"] % 3:
            return [1.0, 1.0 + 2**-52] * (len(completions) // 2)
        return letters(record, completions)

    options = dict(reward=reward, steps=3, seed=1)
    _, plain = run_of(folder, tmp_path, algorithm="grpo", name="plain", **options)
    run, lines = run_of(folder, tmp_path, algorithm="dapo", dynamic_sampling=4, name="dynamic", mask_truncated=False, **options)  # fmt: skip
    assert any(m["equal_groups"] > 0 for m in plain) and "drawn" not in plain[0]
    assert any(m["drawn"] > 8 for m in lines) and all(m["drawn"] in (8, 16, 24, 32) for m in lines)
    rows = [json.loads(x) for x in (run / "rollouts.jsonl").read_text().splitlines()]
    for step, m in enumerate(lines, 1):
        own = [x["reward"] for x in rows if x["step"] == step]
        assert len(own) == 8
        if m["drawn"] < 32:
            assert np.ptp(np.reshape(own, (2, 4)), axis=1).min() > 1e-6
