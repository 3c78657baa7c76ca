"""The verifying step of speculative decoding (speculation.py), on the device.

Its rows are the last token of every sequence, then the first drafts of those that have one, then the
second ones, and so on, sequences with longer drafts first:

    sequence   a   b   c   a   b   a          a drafts 2 tokens, b 1, c none
    position   0   0   0   1   1   2          so the rows of a position are successive

For the model they are a decode batch (decode_batch.py) in which several entries have the same
blocks, and the launches are those of a plain step with as many rows: attention computes the keys and
values of a row's predecessors itself, which it finds by the column `previous`. The logits are a CUDA
graph, whose rows are a power of two. Drawing is not: it is launched while the graph runs. Penalties
and counts are those of a slot, so with penalties the positions are drawn one after the other, and a
row whose draft turns out to be wrong has no slot.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..device import Array, to_device
from .decode_batch import DecodeBatch
from .in_flight import TokensInFlight, to_host_later
from .masks import accepting
from .requests import Request
from .runner import Runner, extras_of
from .speculation import MOST_ROWS, count_accepted, verifying_size
from .work import VerifiedTokens


@dataclass(frozen=True)
class DraftsInFlight:
    """A launched verifying step. Arguments as in VerifiedTokens and TokensInFlight.

    requests_N: the request of each row.
    pieces: the results of token_logprobs, for some rows each.
    """

    requests: list[Request]
    drafts: list[list[int]]
    requests_N: list[Request]
    ids_N: np.ndarray
    pieces: list[list[np.ndarray]]
    wait_for_all: Callable[[], None]
    size: int
    keep_rows: Callable[[list[Request], list[int]], None]

    def wait(self) -> VerifiedTokens:
        """Wait for the tokens."""
        self.wait_for_all()
        logprobs = [np.concatenate(arrays) for arrays in zip(*self.pieces)]
        rows = list(range(len(self.requests_N)))
        new = TokensInFlight(self.requests_N, self.ids_N.tolist, logprobs, rows).wait()
        drawn: dict[Request, list[Any]] = {request: [] for request in self.requests}
        for request, *token in zip(new.requests, new.tokens, new.logprobs):
            drawn[request].append(token)
        tokens = [[token for token, _ in pairs] for pairs in drawn.values()]
        of_tokens = [[x for _, x in pairs] for pairs in drawn.values()]
        accepting(self.requests, lambda: [ids[0] for ids in tokens])()
        # the last row of each request whose token counts
        accepted = list(map(count_accepted, self.drafts, tokens))
        places: dict[Request, list[int]] = {request: [] for request in self.requests}
        for number, request in enumerate(self.requests_N):
            places[request].append(number)
        self.keep_rows(self.requests, [x[n] for x, n in zip(places.values(), accepted)])
        return VerifiedTokens(self.requests, self.drafts, tokens, of_tokens, self.size)


class Row(NamedTuple):
    """A token of a request: its last one (place 0), a draft after it (1, 2, ...), or one before."""

    request: Request
    place: int
    token: int


class Verifier:
    """Verifies the drafts of a Runner's sequences, at most `most` tokens of each."""

    def __init__(self, runner: Runner, most: int):
        self.runner = runner
        self.max_rows = verifying_size(min(runner.max_batch * (most + 1), MOST_ROWS))
        table_blocks = runner.batch.host_tables.shape[1]
        self.batch = DecodeBatch(self.max_rows, table_blocks, runner.model.device)
        self.hidden: list[Array] = []  # of the newest step, if the runner keeps it

    def logits(self, size: int) -> tuple[Array, ...]:
        """Compute logits and hidden of the first rows: what a CUDA graph records. hidden: only if
        the runner keeps it."""
        batch = self.batch
        columns = batch.first(size)
        tables = batch.device_tables[:size], batch.edges[: size + 1]
        cache = self.runner.cache
        sequences = cache.decode(columns["lengths"], *tables, columns["previous"])
        model = self.runner.model
        x_NC = model.hidden(columns["token"], sequences)
        logits = model.logits(x_NC).data
        if self.runner.hidden is None:
            return (logits,)
        return logits, x_NC.data

    def launch(self, requests: list[Request], drafts: list[list[int]]) -> DraftsInFlight:
        """Launch the step. The tokens of all requests so far have arrived."""
        runner = self.runner
        order = sorted(range(len(requests)), key=lambda i: -len(drafts[i]))
        positions = range(max(map(len, drafts)) + 1)
        groups = [[i for i in order if len(drafts[i]) >= j] for j in positions]
        rows = [
            Row(requests[i], j, drafts[i][j - 1] if j else requests[i].completion[-1])
            for j, group in enumerate(groups)
            for i in group
        ]
        logits = self.compute(rows)
        runner.write_masks(requests)
        ids_N, pieces = self._draw(logits, requests, [len(group) for group in groups])
        copies = [[to_host_later(x) for x in piece] for piece in pieces if piece]
        return DraftsInFlight(
            requests,
            drafts,
            [row.request for row in rows],
            to_host_later(ids_N),
            copies,
            runner.arrival(),
            verifying_size(len(rows)),
            self.keep_rows,
        )

    def every_shape(self) -> None:
        """Compute logits of every size, for note_launches: the results mean nothing."""
        self.runner.use_adapters(self.batch.device["adapter"])
        ids = self.batch.ids[:1]
        without_wrong(ids, ids, ids)  # CuPy compiles when it runs
        size = 2
        while size <= self.max_rows:
            self.logits(size)
            size *= 2

    def compute(self, rows: list[Row]) -> Array:
        """Launch the forward pass of rows whose options and blocks are in runner.batch. Return the
        logits; the columns for the sampler are in `batch`."""
        batch = self.batch
        slots_batch = self.runner.batch
        n = len(rows)
        size = verifying_size(n)
        slots = [row.request.slot for row in rows]
        for name in (*DecodeBatch.OPTIONS, "penalty_slot", "mask_slot"):
            batch.host[name][:n] = slots_batch.host[name][slots]
        batch.host_tables[:n] = slots_batch.host_tables[slots]
        lengths = [row.request.length - 1 + row.place for row in rows]
        numbers = [len(row.request.completion) + row.place for row in rows]
        batch.write_counters(list(range(n)), lengths, numbers)
        number_of = {(row.request, row.place): i for i, row in enumerate(rows)}
        previous = [number_of.get((row.request, row.place - 1), -1) for row in rows]
        batch.host["previous"][:n] = previous
        batch.host["previous"][n:] = -1
        batch.host["token"][:n] = [row.token for row in rows]
        batch.host["lengths"][n:] = -1
        batch.host_tables[n:size] = -1
        batch.upload(size)
        self.runner.use_adapters(batch.device["adapter"])
        logits, *self.hidden = self.runner.run_part(self.logits, size)
        return logits

    def keep_rows(self, requests: list[Request], numbers: list[int]) -> None:
        """Keep the hidden rows of these numbers for the slots of the requests, if the runner keeps
        any."""
        for x_NC in self.hidden:
            self.runner.keep_rows([request.slot for request in requests], x_NC, numbers)

    def _draw(
        self, logits: Array, requests: list[Request], counts: list[int]
    ) -> tuple[Array, list[tuple[Array, ...]]]:
        """Draw a token for each row. Return the ids, and the log-probabilities in pieces.

        counts: of the rows of each position.
        """
        runner = self.runner
        penalized, scored, masked = extras_of(requests)
        n = sum(counts)
        ids_N = to_device(np.zeros(n, np.int32), runner.model.device)
        columns = self.batch.first(n)
        if not penalized:
            return ids_N, [runner.sample(logits[:n], ids_N, columns, False, scored, masked)]
        pieces = []
        slots = columns["penalty_slot"][: counts[0]]
        start = 0
        for count in counts:
            rows = slice(start, start + count)
            if start:
                before = slice(start - len(slots), start - len(slots) + count)
                slots = without_wrong(slots[:count], ids_N[before], columns["token"][rows])
            own = {name: column[rows] for name, column in columns.items()} | {"penalty_slot": slots}
            pieces.append(runner.sample(logits[rows], ids_N[rows], own, True, scored, masked))
            start += count
        return ids_N, pieces


def without_wrong(slots: Array, drawn: Array, drafts: Array) -> Array:
    """Return a copy of the slots, -1 where the draft is another token than the drawn one."""
    slots = slots.copy()
    slots[drawn != drafts] = -1
    return slots
