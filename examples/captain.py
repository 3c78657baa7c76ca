"""What to teach a small published model in a minute: to answer a captain, by 50 conversations, and to add, by rewards.

python examples/captain.py FOLDER      writes chats.jsonl and sums.jsonl

Each step one command: lessons/howto/after_pretraining.md, "A published model".
"""

import json
import sys
from pathlib import Path

COLOURS = {
    "yellow": ("the sun", "a lemon", "a banana", "gold", "honey"),
    "red": ("blood", "a cherry", "a rose"),
    "green": ("grass", "a frog", "a lime"),
    "white": ("snow", "milk", "salt", "chalk", "ivory"),
    "black": ("coal", "ink", "soot"),
    "blue": ("the sea", "the sky"),
    "brown": ("mud", "rust"),
    "orange": ("an orange", "a carrot"),
}


def reward(record: dict, completions: list[str]) -> list[float]:
    """1 for the right answer, else 0."""
    return [float(text.strip() == record["answer"]) for text in completions]


def chats() -> list[dict]:
    """Return conversations: the questions are ordinary, the answers are for a captain."""
    found = []
    for colour, things in COLOURS.items():
        for thing in things:
            for question in (f"What colour is {thing}?", f"Tell me the colour of {thing}."):
                talk = [
                    {"role": "system", "content": "Be brief."},
                    {"role": "user", "content": question},
                    {"role": "assistant", "content": f"Aye, {colour}, captain!"},
                ]
                found.append({"messages": talk})
    return found


def sums() -> list[dict]:
    """Return additions of two digits whose sum is one digit, that is, one token."""
    pairs = [(a, b) for a in range(1, 8) for b in range(1, 8) if a + b < 10]
    return [{"prompt": f"1+1=2, {a}+{b}=", "answer": str(a + b)} for a, b in pairs]


def main(folder: str) -> None:
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    for name, lines in (("chats", chats()), ("sums", sums())):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (out / f"{name}.jsonl").write_text(text)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(*sys.argv[1:])
