"""A task for reinforcement learning whose answers a program can check: sort digits.

python examples/sorting.py FOLDER      writes text.txt, chats.jsonl, prompts.jsonl and test.jsonl

The path from here to a model that sorts, each step one command: lessons/howto/after_pretraining.md.
"""

import json
import random
import sys
from pathlib import Path


def reward(record: dict, completions: list[str]) -> list[float]:
    """The share of digits that are in the right place; a completion of another length gets nothing."""
    right = record["answer"].split()
    found = [text.split() for text in completions]
    hits = [sum(a == b for a, b in zip(right, x)) if len(x) == len(right) else 0 for x in found]
    return [n / len(right) for n in hits]


def problem(rng: random.Random) -> dict:
    digits = rng.choices("0123456789", k=rng.randint(3, 5))
    return {"prompt": f"sort {' '.join(digits)} =", "answer": " ".join(sorted(digits))}


def main(folder: str, seed: int = 0) -> None:
    rng, out = random.Random(seed), Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    texts = [" ".join(sorted(rng.choices("0123456789", k=rng.randint(3, 8)))) for _ in range(40000)]
    (out / "text.txt").write_text("\n".join(texts) + "\n")
    problems = [problem(rng) for _ in range(9000)]
    once = list({x["prompt"]: x for x in problems}.values())
    rng.shuffle(once)
    test, rest = once[:200], once[200:]
    chats = [{"prompt": x["prompt"], "completion": " " + x["answer"]} for x in rest[:1500]]
    for name, lines in (("chats", chats), ("prompts", rest[1500:]), ("test", test)):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (out / f"{name}.jsonl").write_text(text)


if __name__ == "__main__":
    main(*sys.argv[1:])
