"""A game in several turns for reinforcement learning: guess a number from 1 to 3 in two turns.

python examples/guessing.py FOLDER      writes text.txt and prompts.jsonl

The environment answers "higher" or "lower". In the texts guesses are drawn blindly: a model that has learned from them knows the
form of the game. Two guesses find every number only if the first one is 2 and the second one follows the answer: the reward
says so. The commands: lessons/howto/reinforce.md.
"""

import json
import random
import sys
from pathlib import Path

NUMBERS = range(1, 4)
PROMPT = "a number from 1 to 3\n"


def reply(record: dict, messages: list[dict]) -> str | None:
    """The answer to the last guess; None at the end of the game."""
    guess = messages[-1]["content"].strip()
    if guess not in map(str, NUMBERS) or int(guess) == record["number"]:
        return None
    return "higher\n" if int(guess) < record["number"] else "lower\n"


def reward(record: dict, completions: list[str]) -> list[float]:
    """1 for a game that ends with the number, else 0."""
    return [float(text.split()[-1:] == [str(record["number"])]) for text in completions]


def main(folder: str, seed: int = 0) -> None:
    rng, out = random.Random(seed), Path(folder)

    def game(number: int) -> str:
        text, guess = PROMPT, 0
        while guess != number:
            guess = rng.choice(NUMBERS)
            answer = reply({"number": number}, [{"content": str(guess)}])
            text += f"{guess}\n{answer or 'right' + chr(10)}"
        return text

    out.mkdir(parents=True, exist_ok=True)
    (out / "text.txt").write_text("".join(game(rng.choice(NUMBERS)) for _ in range(4000)))
    lines = [json.dumps({"prompt": PROMPT, "number": number}) + "\n" for number in NUMBERS]
    (out / "prompts.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(*sys.argv[1:])
