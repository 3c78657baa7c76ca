"""Answers that must have a form: which tokens may follow, for one sequence after the other.

The engine knows tokens only. What a JSON schema or a grammar allows is decided by an object that
comes with the request; server/grammars.py makes such objects, masks.py asks them.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np


class Constraint(Protocol):
    """What the next token of one sequence may be. One thread at a time uses it."""

    @property
    def ended(self) -> str | None:
        """Why no token may follow, a key of REASONS (requests.py): "stop" if the answer is
        complete, "constraint" if it cannot be completed; None: some may."""

    @property
    def ready(self) -> bool:
        """Return False while it is being prepared: the sequence waits."""

    def accept(self, token: int) -> None:
        """Append a token to the sequence, also one that is not allowed."""

    @staticmethod
    def masks_into(pairs: "Sequence[tuple[Any, np.ndarray]]") -> None:
        """Write the masks of several sequences of this class, whose `ended` is None.

        pairs: a Constraint and its row (W,) int32, all zero: bit v mod 32 of row[v // 32] becomes 1
            if token v may follow.
        """


class Grammar(Protocol):
    """A form of answers."""

    def start(self) -> Constraint:
        """Return a Constraint before the first token, for one sequence."""
