"""GRPO on a GPU: reward, the share of rollouts in a step, transformers' generate for comparison.

    python bench/bench_reinforce.py [--dim 512] [--layers 8] [--batch 512] [--steps 100]

Trains a model on the texts of examples/sorting.py, fine-tunes it, and reinforces it twice from
there: in batch-invariant mode (the ratio of the first update must be exactly 1, the KL exactly 0)
and with the faster kernels, whose drift is recorded. Then transformers draws completions of the
same number of prompts from the same weights, as TRL does without vLLM. It samples until all
sequences of the batch have ended, or --max-new-tokens. ms is the median of a step, rollouts
included.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _timing import record

ROOT = Path(__file__).resolve().parents[1]
WARM_UP = 5  # steps


def xtrain(*arguments):
    """Run a command of xtrain in the root of the clone."""
    command = [sys.executable, "-m", *map(str, arguments)]
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    print(f"{arguments[0]}: {time.perf_counter() - start:.1f} s", flush=True)


def lines(path):
    """Return the records of a .jsonl file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def generate_ms(folder, prompts, group, max_new_tokens):
    """Return milliseconds of transformers' generate for `group` completions of each prompt.

    Temperature 1, median of 5.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from xtrain.data.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(folder)
    ids = [tokenizer.encode(prompt) for prompt in prompts for _ in range(group)]
    width = max(map(len, ids))
    padded = torch.tensor([[0] * (width - len(x)) + x for x in ids], device="cuda")
    mask = torch.tensor([[0] * (width - len(x)) + [1] * len(x) for x in ids], device="cuda")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).cuda().eval()
    times = []
    for _ in range(WARM_UP + 5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        with torch.no_grad():
            model.generate(
                padded,
                attention_mask=mask,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=max_new_tokens,
                pad_token_id=0,
            )
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[WARM_UP:])


def main():
    """Train, fine-tune, reinforce twice, and write two records."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--max-new-tokens", type=int, default=12)
    o = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "sorting"
        out = Path(folder) / "runs"
        subprocess.run([sys.executable, ROOT / "examples" / "sorting.py", data], check=True)
        xtrain(
            "xtrain.train",
            "--data",
            data / "text.txt",
            "--vocab-size",
            300,
            "--seq-len",
            64,
            "--batch",
            256,
            "--dim",
            o.dim,
            "--layers",
            o.layers,
            "--heads",
            o.dim // 64,
            "--kv-heads",
            o.dim // 64,
            "--hidden-dim",
            4 * o.dim,
            "--steps",
            800,
            "--lr",
            1e-3,
            "--out",
            out,
            "--name",
            "base",
        )
        xtrain(
            "xtrain.finetune",
            "--init",
            out / "base",
            "--data",
            data / "chats.jsonl",
            "--epochs",
            1,
            "--lr",
            1e-4,
            "--out",
            out,
            "--name",
            "chat",
        )
        results = {}
        for mode in ("exact", "no-exact"):
            xtrain(
                "xtrain.reinforce",
                "--init",
                out / "chat",
                "--data",
                data / "prompts.jsonl",
                "--task",
                "examples.sorting:reward",
                f"--{mode}",
                "--max-new-tokens",
                o.max_new_tokens,
                "--batch",
                o.batch,
                "--group",
                o.group,
                "--rollout-batch",
                o.batch,
                "--lr",
                1e-5,
                "--steps",
                o.steps,
                "--eval-every",
                o.steps // 2,
                "--out",
                out,
                "--name",
                mode,
            )
            metrics, timing = (
                lines(out / mode / f"{name}.jsonl") for name in ("metrics", "timing")
            )
            timing = timing[WARM_UP:]
            steps = [m for m in metrics if "reward" in m]
            results[mode] = dict(
                ms=statistics.median(t["ms"] for t in timing),
                rollout_ms=statistics.median(t["phases_ms"]["data"] for t in timing),
                reward_first=steps[0]["reward"],
                reward_last=statistics.mean(m["reward"] for m in steps[-5:]),
                val_reward=[m["val_reward"] for m in metrics if "val_reward" in m][-1],
                ratio_error_max=max(m["ratio_error"] for m in steps),
                rollout_kl_max=max(abs(m["rollout_kl"]) for m in steps),
                completion_tokens=statistics.mean(m["completion_tokens"] for m in steps),
            )
        prompts = [line["prompt"] for line in lines(data / "prompts.jsonl")]
        (final,) = sorted((out / "chat" / "checkpoints").iterdir())[-1:]
        peer = generate_ms(final, prompts[: o.batch // o.group], o.group, o.max_new_tokens)
    for mode, r in results.items():
        record(
            "bench_reinforce",
            f"dim{o.dim}x{o.layers}/{mode}",
            shape=f"{o.batch} completions in groups of {o.group}",
            dtype="bf16",
            value=100 * r["rollout_ms"] / r["ms"],
            unit="% of the step in rollouts",
            rollout_tokens_per_s=round(1e3 * o.batch * r["completion_tokens"] / r["rollout_ms"]),
            transformers_generate_ms=round(peer, 2),
            steps=o.steps,
            **r,
        )


if __name__ == "__main__":
    main()
