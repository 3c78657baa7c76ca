"""What constrained sequences cost: a decoding step of 32 sequences, with and without grammars.

    python bench/bench_grammars.py --tokenizer FOLDER [--models 0.6B 8B] [--n 32]

none, half, all   as many of the sequences must be a JSON document that never ends: an array of
                  objects with strings, numbers, an enumeration and nested lists. Random weights, so
                  strings are random tokens, which is the slowest case for a mask. value: the median
                  step with all sequences, in milliseconds; peer: the same without grammars
                  (ratio: at most 1.05 is the goal)

FOLDER has a tokenizer.json, for example that of Qwen3 (tests/real/fetch.py fetches it).
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import tyro
from _timing import record
from bench_serve import Options as Models
from bench_serve import random_model

import xtrain
from xtrain.data.tokenizer import Tokenizer
from xtrain.server.grammars import Grammars, Guide

ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["red", "green", "blue"]},
        "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
        "tags": {"type": "array", "items": {"anyOf": [{"type": "string"}, {"type": "null"}]}},
    },
    "required": ["name", "age", "kind", "zip", "tags"],
    "additionalProperties": False,
}
NEW = 300  # tokens of each sequence


@dataclass
class Options:
    tokenizer: Path  # a folder
    models: list[Literal["0.6B", "8B"]] = field(default_factory=lambda: ["0.6B"])
    n: int = 32  # sequences


def step_ms(engine: xtrain.Engine, grammars: list) -> float:
    """Return the median time of a step that decodes all sequences."""
    prompts = [[1 + i] * 100 for i in range(len(grammars))]
    for _ in range(2):  # the first call compiles and captures
        engine.trace.clear()
        answers = engine.generate(prompts, NEW, temperature=1.0, seed=1, grammar=grammars)
        assert all(len(answer) == NEW for answer in answers), [a.reason for a in answers]
    seconds = [s.seconds for s in engine.trace if len(s.decoded) == len(grammars)]
    return 1e3 * float(np.median(seconds[10:-10]))


def main(o: Options) -> None:
    tokenizer = Tokenizer.load(o.tokenizer)
    schema = {"type": "array", "items": ITEM, "minItems": NEW}
    grammars = Grammars(tokenizer, [tokenizer.eot_id])
    grammar = grammars.compiled(Guide.of_schema(schema))
    grammars.check(Guide.of_schema(schema))
    for name in o.models:
        model = random_model(Models(), name)
        engine = xtrain.Engine(model, o.n, 1024, reuse_prefix=False)
        without = step_ms(engine, [None] * o.n)
        for part, constrained in (("none", 0), ("half", o.n // 2), ("all", o.n)):
            ms = step_ms(engine, [grammar] * constrained + [None] * (o.n - constrained))
            record(
                "bench_grammars",
                f"{part} {name}",
                shape=f"n={o.n} V={tokenizer.vocab_size}",
                dtype="bf16",
                ms=ms,
                value=ms,
                unit="ms",
                peer="without grammars",
                peer_value=without,
            )


if __name__ == "__main__":
    main(tyro.cli(Options))
