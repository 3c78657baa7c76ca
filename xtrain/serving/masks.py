"""The masks of the tokens that may follow, from the constraints of the sequences to the device.

The mask of the next token needs the previous one. So a decoding step with a constrained sequence
has two parts: the device computes the logits, while the host reads the tokens of the previous step
and makes the masks; then the device draws. The next step is launched before these
tokens arrive, as always: the device waits only if the masks take longer than the logits. A step
without such a sequence has one part.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from ..device import Array
from ..kernels.decoding.token_masks import mask_words
from .decode_batch import Mirrored
from .requests import Request


class TokenMasks:
    """The masks of the slots, on the host and at fixed addresses on the device.

    device: (slots, W) int32, as mask_logits reads it (kernels/decoding/token_masks.py).
    """

    def __init__(self, slots: int, vocab: int, device: str):
        self.row_bytes = 4 * mask_words(vocab)
        self.mirrored = Mirrored(slots * self.row_bytes, device)
        self.host = self.mirrored.host.view(np.int32).reshape(slots, -1)
        self.device: Array = self.mirrored.device.view(np.int32).reshape(slots, -1)

    def write(self, requests: list[Request]) -> None:
        """Make the masks of constrained requests, all of whose tokens have arrived, and upload them
        in stream order."""
        together: dict[type, list[tuple[Any, np.ndarray]]] = {}
        for request in requests:
            row = self.host[request.slot]
            constraint: Any = request.constraint
            if constraint.ended:  # its last token is computed in vain
                row[:] = -1
            else:
                row[:] = 0
                together.setdefault(type(constraint), []).append((constraint, row))
        for kind, pairs in together.items():
            kind.masks_into(pairs)  # type: ignore[attr-defined]
        slots = [request.slot for request in requests]
        self.mirrored.upload(min(slots) * self.row_bytes, (max(slots) + 1) * self.row_bytes)


def accepting(requests: list[Request], read: Callable[[], list[int]]) -> Callable[[], list[int]]:
    """Return `read`, the ids that arrive for requests, as a function that reads once and lets each
    constraint accept its token."""
    ids: list[int] = []

    def read_once() -> list[int]:
        if not ids:
            ids.extend(read())
            for request, token in zip(requests, ids):
                constraint = request.constraint
                if constraint is not None and token >= 0 and not constraint.ended:
                    constraint.accept(token)
        return ids

    return read_once
