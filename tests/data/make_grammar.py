"""Write grammar.txt, the text of the golden losses: sentences of a small random grammar, always the same.

python tests/data/make_grammar.py
"""

import random
from pathlib import Path

WORDS = {
    "name": ["Ada", "Blaise", "Emmy", "Kurt", "Sofia"],
    "noun": ["kernel", "gradient", "warp", "token", "matrix", "barrier"],
    "verb": ["moves", "adds", "finds", "scales", "rotates"],
    "adjective": ["small", "sparse", "causal", "fused", "odd"],
    "number": ["two", "three", "seven", "thirty-two"],
}
SENTENCES = [
    "{name} {verb} the {adjective} {noun}.",
    "Every {noun} {verb} {number} {adjective} {noun}s.",
    "If a {noun} {verb} a {noun}, {name} {verb} it too.",
    "def {noun}_{noun}({adjective}, {number_}): return {adjective} * {noun}",
]


def text(sentences: int = 1200, seed: int = 0) -> str:
    """`sentences` lines of the grammar; the same seed gives the same text."""
    rng = random.Random(seed)
    lines = []
    for _ in range(sentences):
        line = rng.choice(SENTENCES)
        while "{" in line:
            start, end = line.index("{"), line.index("}")
            kind = line[start + 1 : end]
            word = rng.choice(WORDS[kind.rstrip("_")]).replace(
                "-", "_" if kind.endswith("_") else "-"
            )
            line = line[:start] + word + line[end + 1 :]
        lines.append(line)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("grammar.txt").write_text(text(), encoding="utf-8")
