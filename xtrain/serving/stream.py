"""The answers of an engine, token by token."""

import contextlib
from collections.abc import Generator, Iterator
from typing import Any

from .requests import Request


class Stream:
    """Iterates over (prompt number, token). Leaving the loop early cancels the unfinished requests.

    engine: an Engine, which this file must not import.
    completions: one per prompt; each grows while it is generated and gets a `reason` when it ends.
    """

    def __init__(self, engine: Any, requests: list[Request]):
        self.engine, self.requests = engine, requests
        self.completions = [request.completion for request in requests]
        # It has no reference to this Stream, so deleting the Stream closes it.
        self._iterator = _tokens(engine, requests)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return self

    def __next__(self) -> tuple[int, int]:
        return next(self._iterator)

    def cancel(self, number: int) -> None:
        """Generate no more tokens for prompt `number`."""
        self.engine.cancel(self.requests[number])

    def close(self) -> None:
        """Cancel the unfinished requests, as leaving the loop does. Any thread may call it."""
        for request in self.requests:
            self.engine.cancel(request)
        with contextlib.suppress(ValueError):  # another thread is iterating: its loop ends
            self._iterator.close()


def _tokens(engine: Any, requests: list[Request]) -> Generator[tuple[int, int], None, None]:
    try:
        # Some may have been cancelled before the first token.
        engine.submit(*[r for r in requests if r.completion.reason is None])
        completions = [request.completion for request in requests]
        sent = [0] * len(requests)
        unfinished = list(range(len(requests)))
        # Read the completions, not what `step` returns: another stream may have made the step.
        while unfinished:
            # First the reasons: another thread may append the last tokens after this line.
            remaining = [i for i in unfinished if completions[i].reason is None]
            fresh = [i for i in unfinished if sent[i] < len(completions[i])]
            fresh = [i for i in fresh if completions[i].reason != "cancelled"]
            for i in fresh:
                sent[i] += 1
                yield i, completions[i][sent[i] - 1]
            if fresh:
                continue
            unfinished = remaining
            if unfinished:
                engine.step()
    finally:
        for request in requests:
            engine.cancel(request)
