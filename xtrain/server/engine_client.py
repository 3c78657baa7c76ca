"""The HTTP side of the connection to an engine (engine_loop.py): asyncio code submits jobs and
reads their pieces.

A job is one HTTP request: some sequences. In a round, the event loop hands the engine's news to the
jobs and wakes the requests that wait for them; then it asks for more. Tokens become text here, so
that the engine's side has little to do for a token.

If both sides are in one process, only one of them can run Python at a time: a loop that writes an
event for each token of 256 streams would slow the engine down. There the loop takes at most a part
of the time, LOOP_SHARE: it asks for more only after the engine had the rest. With few streams a
round is so short that each token is still an event of its own.
"""

import asyncio
import contextlib
import itertools
import multiprocessing
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from ..config import ModelConfig
from ..data.tokenizer import Tokenizer
from ..serving.engine import Engine
from ..serving.requests import Request, TokenLogprobs
from ..serving.text_stream import TextStream
from .engine_loop import EngineLoop, Figures, News
from .grammars import Grammars

LOOP_SHARE = 0.1  # of the time, for the rounds of an event loop in the engine's process
LONGEST_PAUSE = 0.1  # seconds between two rounds
STALLED_SECONDS = 60  # without the end of a step, though there are requests


@dataclass
class Piece:
    """The next part of one sequence.

    first: it has the first tokens.  seconds: since the previous tokens, or since the request.
    """

    index: int  # of the sequence in its job
    text: str = ""  # may be empty
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # one per token, if requested
    reason: str | None = None  # as in News
    first: bool = False
    seconds: float = 0.0


@dataclass
class Sequence:
    """How far a sequence of a job is.

    cached_tokens: tokens of its prompt that were in the cache; None: it has not begun.
    queue_seconds: until it got a slot.
    tokens: of the answer so far.  first, last: when they arrived, in seconds of a clock.
    reason: why it ended; None: it has not.
    """

    cached_tokens: int | None = None
    queue_seconds: float = 0.0
    tokens: int = 0
    first: float = 0.0
    last: float = 0.0
    reason: str | None = None


class Job:
    """The sequences of one HTTP request. Made and read in the event loop.

    requests: as make_requests returns them.  stop: strings that end a sequence.
    """

    def __init__(self, requests: list[Request], tokenizer: Tokenizer, stop: Iterable[str] = ()):
        self.requests = requests
        stop = list(stop)
        self.texts = [TextStream(tokenizer, stop, r.penalties.min_tokens) for r in requests]
        self.running = set(range(len(requests)))
        self.sequences = [Sequence() for _ in requests]
        # seconds of a clock; 0: none yet
        self.start = time.perf_counter()
        self.first_token = 0.0
        self.news = deque[News]()
        self.arrived = asyncio.Event()
        # Set by `submit`: its number, and what ends a sequence.
        self.number = -1
        self.cancel: Callable[[int], None] = lambda index: None

    async def __aiter__(self) -> AsyncIterator[Piece]:
        """Return the pieces of all sequences as they arrive, until all are complete."""
        while self.running:
            await self.arrived.wait()
            self.arrived.clear()
            pieces: dict[int, Piece] = {}
            while self.news:
                _, index, tokens, start, logprobs, reason = self.news.popleft()
                if index in self.running:
                    sequence = self.sequences[index]
                    if sequence.cached_tokens is None:
                        sequence.cached_tokens, sequence.queue_seconds = start
                    piece = pieces.setdefault(index, Piece(index))
                    self._add(piece, tokens, logprobs, reason)
            for piece in pieces.values():
                self._note(piece)
                yield piece

    def _note(self, piece: Piece) -> None:
        """Bring the sequence of a new piece up to date."""
        sequence = self.sequences[piece.index]
        sequence.reason = piece.reason
        if piece.tokens:
            now = time.perf_counter()
            piece.first = not sequence.tokens
            piece.seconds = now - (sequence.last or self.start)
            sequence.first = sequence.first or now
            sequence.last = now
            sequence.tokens += len(piece.tokens)

    @property
    def cached_tokens(self) -> int:
        """Return how many tokens of the prompts, once each, were in the cache."""
        least: dict[int, int] = {}  # by prompt, which its requests share
        for request, sequence in zip(self.requests, self.sequences):
            cached = sequence.cached_tokens
            if cached is not None:
                prompt = id(request.prompt)
                least[prompt] = min(cached, least.get(prompt, cached))
        return sum(least.values())

    def _add(
        self, piece: Piece, tokens: list[int], logprobs: list[TokenLogprobs], reason: str | None
    ) -> None:
        text = self.texts[piece.index]
        used = 0
        shown = tokens
        if reason == "stop" and tokens and tokens[-1] in self.requests[piece.index].stop:
            shown = tokens[:-1]  # the text does not contain the end token
        if not text.stop:
            each = [shown]
        else:
            each = [[token] for token in shown]
        for some in each:
            piece.text += text.feed(*some)
            used += len(some)
            if text.stopped:
                reason = "stop"
                self.cancel(piece.index)  # the engine may have computed some tokens after it
                break
        else:
            used = len(tokens)
        piece.tokens += tokens[:used]
        piece.logprobs += logprobs[:used]
        piece.reason = reason
        if reason:
            piece.text += text.finish()
            if text.stopped and reason == "length":  # by an unfinished character at its end
                piece.reason = "stop"
            self.running.remove(piece.index)


class EngineClient:
    """Submits jobs to the engine at the other end of `connection`. Call every method in the event
    loop.

    config, max_seq_len, max_batch: of the engine.  share: of the time, at most, for this side.
    lost: called when the other end is closed.
    """

    def __init__(
        self,
        connection: Connection,
        config: ModelConfig,
        max_seq_len: int,
        max_batch: int,
        share: float = 1.0,
        lost: Callable[[], Any] = lambda: None,
    ):
        self.connection = connection
        self.share = share
        self.lost = lost
        self.config = config
        self.max_seq_len = max_seq_len
        self.max_batch = max_batch
        self.figures = Figures(slots=max_batch)
        self.jobs: dict[int, Job] = {}
        self.numbers = itertools.count()
        self.last_step = 0.0  # when news came, or the first of several jobs
        self.arriving = 0
        self.outbox: queue.SimpleQueue[tuple | None] = queue.SimpleQueue()
        self.threads = [threading.Thread(target=f, daemon=True) for f in (self._write, self._read)]

    def start(self) -> None:
        """Start to read and write."""
        self.loop = asyncio.get_running_loop()
        for thread in self.threads:
            thread.start()
        self.outbox.put(("more",))

    def stop(self) -> None:
        """End the engine's loop; jobs that are not complete get no more tokens. Waits for the step
        that is running."""
        self.outbox.put(("stop",))
        self.outbox.put(None)
        for thread in self.threads:
            thread.join()

    @property
    def alive(self) -> bool:
        """Return True while the other end listens."""
        return all(thread.is_alive() for thread in self.threads)

    @property
    def stalled(self) -> bool:
        """Return True if requests wait and no step has ended for STALLED_SECONDS."""
        return bool(self.jobs) and time.perf_counter() - self.last_step > STALLED_SECONDS

    @contextlib.contextmanager
    def arrival(self) -> Iterator[None]:
        """Surround the preparation of a request, until it is submitted: a step waits a little for
        it."""
        self._arrivals(1)
        try:
            yield
        finally:
            self._arrivals(-1)

    def _arrivals(self, change: int) -> None:
        before = self.arriving
        self.arriving = self.arriving + change
        if bool(before) != bool(self.arriving):
            self.outbox.put(("arrival", bool(self.arriving)))

    def submit(self, job: Job) -> None:
        """Let the engine compute a job."""
        if not self.jobs:
            self.last_step = time.perf_counter()
        job.number = next(self.numbers)
        job.cancel = lambda index: self.outbox.put(("cancel", job.number, index))
        self.jobs[job.number] = job
        self.outbox.put(("submit", job.number, job.requests))

    def close(self, job: Job) -> None:
        """Forget a job, and end what is not complete. Never waits."""
        del self.jobs[job.number]
        for index in job.running:
            job.cancel(index)

    # ------------------------------------------------------------------------- news
    def _write(self) -> None:
        """Send messages, in a thread, because the other end reads between its steps only."""
        with contextlib.suppress(OSError):
            while (message := self.outbox.get()) is not None:
                self.connection.send(message)

    def _read(self) -> None:
        """Receive news, in a thread."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._call(self._round, *self.connection.recv())
        self._call(self._end)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            self.loop.call_soon_threadsafe(function, *arguments)

    def _round(self, news: list[News], figures: Figures) -> None:
        """Wake the requests that have news, and measure how long they take."""
        start = self.last_step = time.perf_counter()
        self.figures = figures
        for one in news:
            if (job := self.jobs.get(one[0])) is not None:
                job.first_token = job.first_token or start
                job.news.append(one)
                job.arrived.set()
        self.loop.call_soon(self._after_round, start)

    def _after_round(self, start: float) -> None:
        """Ask for more, after a pause if this side has had its share of the time."""
        seconds = time.perf_counter() - start
        pause = min(LONGEST_PAUSE, seconds * (1 / self.share - 1))
        self.loop.call_later(pause, self.outbox.put, ("more",))

    def _end(self) -> None:
        self.outbox.put(None)
        self.end_all("error")
        self.lost()

    def end_all(self, reason: str) -> None:
        """End every job with this reason."""
        for number, job in self.jobs.items():
            job.news.extend((number, index, [], (0, 0.0), [], reason) for index in job.running)
            job.arrived.set()


class EngineThread(EngineClient):
    """An engine in a thread of this process, between start and stop.   grammars: see EngineLoop"""

    def __init__(self, engine: Engine, grammars: Grammars | None = None):
        ours, theirs = multiprocessing.Pipe()
        super().__init__(ours, engine.config, engine.max_seq_len, engine.max_batch, LOOP_SHARE)
        loop = EngineLoop(engine, theirs, grammars)
        self.threads.append(threading.Thread(target=loop.run, name="engine", daemon=True))
