"""GRPO teaches additions to a published model: reward per minute of `xtrain reinforce` and of TRL.

    python bench/bench_addition.py --model FOLDER [--seconds 60] [--only xtrain trl trl-bf16]

FOLDER: in Hugging Face format (of a GGUF file: `xtrain export --model FILE --folder FOLDER`).
Prompts have three solved additions of two digits and one to solve; the reward is 1 if the completion
begins with the sum, else 0. Both train all weights on the same prompts, with the same batch, group,
constant rate and loss (the mean over the tokens of the batch), in bf16 on a GPU, from the same
weights: xtrain with float32 master weights in batch-invariant mode, TRL with float32 weights under
autocast (its default), and with bf16 weights (trl-bf16), both with transformers' rollouts. The
seconds count from the end of the first two steps, which compile. `value`: the mean reward of the
last tenth of the steps. before, after: the share of --test other additions that are right at
temperature 0, by xtrain's engine for all. curve: [seconds, mean reward] of ten equal parts.
"""

import functools
import json
import os
import re
import signal
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tyro
from _timing import record
from rich.console import Console

from xtrain import Engine
from xtrain.device import free_cached, resolve_device
from xtrain.reinforce import reinforce
from xtrain.reinforcement.reinforce import ReinforceConfig
from xtrain.serving.pretrained import load

DEVICE = resolve_device("auto")
SOLVED = "11+12=23, 34+25=59, 47+38=85, "
TOKENS = 4  # of a completion
WARM_UP = 2  # steps


@dataclass
class Options:
    model: str
    only: list[Literal["xtrain", "trl", "trl-bf16"]] = field(
        default_factory=lambda: ["xtrain", "trl", "trl-bf16"]
    )
    seconds: float = 60.0  # of training
    batch: int = 256
    group: int = 16
    lr: float = 1e-5
    train: int = 4096  # additions
    test: int = 512
    micro_batch: int = 256


def reward(record: dict[str, Any], completions: list[str]) -> list[float]:
    """Return 1 for a completion that begins with the sum, else 0."""
    return [score(text, record["answer"]) for text in completions]


def stop_after(seconds: float, metrics: Path) -> None:
    """Stop the run of this process, as Ctrl-C would, when it has trained so long after WARM_UP."""
    while not (metrics.exists() and len(by_step(metrics, "reward")) >= WARM_UP):
        time.sleep(0.1)
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGTERM)


def score(text: str, answer: str) -> float:
    found = re.match(r"\s*(\d+)", text)
    return float(found is not None and found[1] == answer)


def additions(n: int) -> list[dict[str, str]]:
    """Return n additions of two numbers of two digits in random order, always the same."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    order = np.random.default_rng(0).permutation(len(pairs))[:n]
    return [
        {"prompt": f"{SOLVED}{a}+{b}=", "answer": str(a + b)} for a, b in (pairs[i] for i in order)
    ]


def right(folder: Path, lines: list[dict[str, str]]) -> float:
    """Return the share of additions that a model has right at temperature 0."""
    pretrained = load(folder, DEVICE)
    engine = Engine(pretrained.model, 64, 64)
    prompts = [pretrained.tokenizer.encode(line["prompt"]) for line in lines]
    texts = [pretrained.tokenizer.decode(list(x)) for x in engine.generate(prompts, TOKENS)]
    del engine, pretrained
    free_cached(DEVICE)
    return float(np.mean([score(t, line["answer"]) for t, line in zip(texts, lines)]))


def by_xtrain(o: Options, data: Path, out: Path) -> tuple[Path, list[tuple[float, float]]]:
    """Train. Return the folder of the run, and (time of its end, mean reward) of each step."""
    config = ReinforceConfig(
        init=o.model,
        data=(str(data),),
        out=str(out),
        name="run",
        device=DEVICE,
        task="bench_addition:reward",
        steps=10**6,
        batch=o.batch,
        group=o.group,
        micro_batch=o.micro_batch,
        rollout_batch=o.batch,
        max_new_tokens=TOKENS,
        lr=o.lr,
        min_lr_ratio=1.0,
        algorithm="bnpo",
        val_share=0.01,
        eval_every=0,
        sample_every=0,
        save_every=0,
    )
    metrics = out / "run" / "metrics.jsonl"
    threading.Thread(target=stop_after, args=(o.seconds, metrics), daemon=True).start()
    run = reinforce(config, Console(quiet=True))
    rewards = by_step(run / "metrics.jsonl", "reward")
    seconds = by_step(run / "timing.jsonl", "seconds")
    return run, [(seconds[step], rewards[step]) for step in sorted(rewards)]


def by_step(file: Path, key: str) -> dict[int, float]:
    """Return {step: value} of a log."""
    lines = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    return {line["step"]: line[key] for line in lines if key in line}


def by_trl(
    o: Options, data: Path, out: Path, weights: str = "float32"
) -> tuple[Path, list[tuple[float, float]]]:
    """Do the same with trl.GRPOTrainer. weights: their dtype."""
    import datasets
    import torch
    import transformers
    import trl

    steps: list[tuple[float, float]] = []
    drawn: list[float] = []

    class Watch(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            torch.cuda.synchronize()
            steps.append((time.perf_counter(), float(np.mean(drawn))))
            drawn.clear()
            if len(steps) > WARM_UP and steps[-1][0] - steps[WARM_UP - 1][0] > o.seconds:
                control.should_training_stop = True

    def rewarded(completions, answer, **_):
        rewards = [score(text, right) for text, right in zip(completions, answer)]
        drawn.extend(rewards)
        return rewards

    lines = [json.loads(line) for line in data.read_text().splitlines()]
    options = trl.GRPOConfig(
        output_dir=str(out),
        per_device_train_batch_size=o.batch,
        num_generations=o.group,
        max_completion_length=TOKENS,
        temperature=1.0,
        top_k=0,
        beta=0.0,
        loss_type="bnpo",
        learning_rate=o.lr,
        lr_scheduler_type="constant",
        max_steps=10**6,
        bf16=True,
        gradient_checkpointing=False,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        o.model, dtype=weights, attn_implementation="sdpa"
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(o.model)
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=rewarded,
        args=options,
        train_dataset=datasets.Dataset.from_list(lines),
        processing_class=tokenizer,
        callbacks=[Watch()],
    )
    trainer.train()
    folder = out / "trl"
    trainer.model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder, steps


def main(o: Options) -> None:
    lines = additions(o.train + o.test)
    test = lines[o.train :]
    before = right(Path(o.model), test)
    by_trl_bf16 = functools.partial(by_trl, weights="bfloat16")
    for name, train in (("xtrain", by_xtrain), ("trl", by_trl), ("trl-bf16", by_trl_bf16)):
        if name not in o.only:
            continue
        with tempfile.TemporaryDirectory() as folder:
            data = Path(folder) / "additions.jsonl"
            data.write_text("".join(json.dumps(line) + "\n" for line in lines[: o.train]))
            trained, steps = train(o, data, Path(folder))
            start = steps[WARM_UP - 1][0]
            steps = [(t - start, x) for t, x in steps[WARM_UP:] if t - start <= o.seconds]
            parts = [part.mean(0).round(3).tolist() for part in np.array_split(steps, 10)]
            last = parts[-1][1]
            record(
                "bench_addition",
                f"{name}: {len(steps)} steps of {o.batch} in {o.seconds:.0f} s",
                shape=f"groups of {o.group}, completions of {TOKENS} tokens",
                dtype="bf16" if DEVICE == "gpu" else "fp32",
                ms=1e3 * steps[-1][0] / len(steps),
                value=last,
                unit="mean reward at the end",
                before=before,
                after=right(trained, test),
                curve=parts,
            )
        free_cached(DEVICE)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
