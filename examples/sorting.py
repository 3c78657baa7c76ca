"""A task for reinforcement learning whose answers a program can check: sort digits, the smallest first.

python examples/sorting.py FOLDER      writes text.txt, chats.jsonl, prompts.jsonl and test.jsonl

The texts sort in both directions: a model that has learned from them can do the task, but no prompt says which answer is wanted.
The reward does. The whole path, each step one command: lessons/howto/after_pretraining.md.
"""

import json
import random
import sys
from pathlib import Path


def reward(record: dict, completions: list[str]) -> list[float]:
    """1 for the right answer, else 0."""
    right = record["answer"].split()
    return [float(text.split() == right) for text in completions]


def main(folder: str, seed: int = 0) -> None:
    rng, out = random.Random(seed), Path(folder)
    lists = {tuple(rng.choices("0123456789", k=rng.randint(3, 5))) for _ in range(60000)}
    problems = [
        {"prompt": f"sort {' '.join(digits)} =", "answer": " ".join(sorted(digits))}
        for digits in sorted(lists)
    ]
    rng.shuffle(problems)

    def either(x: dict) -> str:
        return " " + (x["answer"] if rng.random() < 0.5 else x["answer"][::-1])

    test, prompts, rest = problems[:200], problems[200:4200], problems[4200:]
    chats = [{"prompt": x["prompt"], "completion": either(x)} for x in rest[:1000]]
    out.mkdir(parents=True, exist_ok=True)
    (out / "text.txt").write_text("".join(f"{x['prompt']}{either(x)}\n" for x in rest[1000:]))
    for name, lines in (("chats", chats), ("prompts", prompts), ("test", test)):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (out / f"{name}.jsonl").write_text(text)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(*sys.argv[1:])
