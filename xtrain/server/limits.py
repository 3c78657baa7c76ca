"""What requests may cost."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """What one request, and all together, may cost."""

    body_bytes: int = 4 << 20
    queue: int = 256  # sequences that wait for a slot
    answers: int | None = None  # sequences of one request; None: as many as there is room for
    seconds: float = 600.0  # per request, waiting included


STANDARD = Limits()
