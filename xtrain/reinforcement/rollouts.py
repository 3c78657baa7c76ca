"""The rollouts of a step as arrays, and how a checkpoint keeps those of the next step."""

import base64
import json
from typing import Any, NamedTuple

import numpy as np


class Rollouts(NamedTuple):
    """Completions of this rank's prompts, one a row. All arrays: (batch / ranks, longest of the
    batch).

    ids, targets: prompt and completion; the targets of what the model has not drawn are -100.
    drawn: the log-probability of each token when it was drawn.
    advantages: of each token.
    weights: (batch / ranks,) of each token of a completion, in the sum that is the loss.
    reference: the log-probabilities of the reference; None without --kl.
    kept: the tokens that sampling keeps, bits (batch / ranks, longest, W) as of
        Transformer.kept_tokens; None if only the first update needs them, which finds them itself.
    """

    ids: Any
    targets: Any
    drawn: Any
    advantages: Any = None
    weights: Any = None
    reference: Any = None
    kept: Any = None


class Drawn(NamedTuple):
    """What a step trains, and what it logs.

    weights_of: the step whose weights have drawn it; 0: those of --init.
    tokens: of the rows of all ranks.  numbers: for metrics.jsonl.  lines: of rollouts.jsonl.
    """

    batch: Rollouts
    weights_of: int
    tokens: int
    numbers: dict[str, float]
    lines: list[dict[str, Any]]

    def to_json(self) -> dict[str, Any]:
        """Return it as state.json has it."""
        arrays = {
            name: [str(x.dtype), x.shape, base64.b64encode(x.tobytes()).decode()]
            for name, x in self.batch._asdict().items()
            if x is not None
        }
        # as a text, because state.json sorts names, and logs must have theirs in this order
        return {"batch": arrays, "rest": json.dumps(self[1:])}

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> "Drawn":
        """Return what `to_json` has returned."""
        arrays = {
            name: np.frombuffer(base64.b64decode(data), dtype).reshape(shape)
            for name, (dtype, shape, data) in saved["batch"].items()
        }
        return cls(Rollouts(**arrays), *json.loads(saved["rest"]))
