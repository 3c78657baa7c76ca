"""One thread owns the engine and turns tokens into text; asyncio code submits jobs and reads their pieces.

A job is one HTTP request: some sequences. After every step of the engine the thread appends what is new to the jobs and wakes
the event loop, which wakes the requests. Closing a job, which any thread may do, frees its slots and blocks in the next step.

Both threads run Python, so a loop that sends an event for every token of 256 streams would slow the engine down. The loop
therefore takes at most a part of the time, LOOP_SHARE: after a round it is not woken again before the engine had the rest. Pieces
of a sequence that arrive until then become one. With few streams a round is so short that each token is sent as a separate event.

A step with a prefill takes the host as long for one request as for many. So while requests are being read and tokenized, a step
waits for them, at most ADMISSION_SECONDS: otherwise many that arrive at once would be admitted one by one.
"""

import asyncio
import contextlib
import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass, field

from ..data.tokenizer import Tokenizer
from ..serving.engine import Engine
from ..serving.requests import Request, TokenLogprobs
from ..serving.text_stream import TextStream

LOOP_SHARE = 0.1  # of the time, for the event loop's rounds
LONGEST_PAUSE = 0.1  # seconds between two rounds
ADMISSION_SECONDS = 0.01


@dataclass
class Piece:
    """The next part of one sequence."""

    index: int  # of the sequence in its job
    text: str = ""  # may be empty
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # one per token, if requested
    # of Completion, if the sequence is complete with this piece; "error": the step failed
    reason: str | None = None

    def append(self, later: "Piece") -> None:
        """Add the part that follows."""
        self.text += later.text
        self.tokens += later.tokens
        self.logprobs += later.logprobs
        self.reason = later.reason


class Job:
    """The sequences of one HTTP request. Made and read in the event loop; the engine's thread feeds it.

    requests: as make_requests returns them.  stop: strings that end a sequence.
    """

    def __init__(self, requests: list[Request], tokenizer: Tokenizer, stop: Iterable[str] = ()):
        self.requests = requests
        self.texts = [TextStream(tokenizer, stop) for _ in requests]
        self.sent, self.running = [0] * len(requests), set(range(len(requests)))
        self.start, self.first_token = time.perf_counter(), 0.0  # seconds of a clock; 0: none yet
        self.closed = False
        self.pieces, self.news = deque[Piece](), asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[Piece]:
        """The pieces of all sequences as they arrive, until all are complete."""
        left = len(self.requests)
        while left:
            await self.news.wait()
            self.news.clear()
            found: dict[int, Piece] = {}
            while self.pieces:
                piece = self.pieces.popleft()
                if piece.index in found:
                    found[piece.index].append(piece)
                else:
                    found[piece.index] = piece
            for piece in found.values():
                left -= piece.reason is not None
                yield piece

    def close(self) -> None:
        """End what is not complete. Never waits."""
        self.closed = True
        for request in self.requests:
            request.completion.end("cancelled")

    def collect(self) -> list[Piece]:
        """In the engine's thread: what is new since the last call."""
        pieces = []
        for i in sorted(self.running):
            completion, text = self.requests[i].completion, self.texts[i]
            reason, tokens, new = completion.reason, completion[self.sent[i] :], ""
            used = 0
            for token in tokens:
                new, used = new + text.feed(token), used + 1
                if text.stopped:
                    reason = "stop"
                    completion.end("cancelled")  # the next step frees its slot
                    break
            if not (used or reason):
                continue
            first, self.sent[i] = self.sent[i], self.sent[i] + used
            logprobs = (completion.logprobs or [])[first : self.sent[i]]
            if reason:
                new += text.finish()
                self.running.remove(i)
            pieces.append(Piece(i, new, tokens[:used], logprobs, reason))
        if pieces and not self.first_token:
            self.first_token = time.perf_counter()
        return pieces


class EngineThread:
    """Steps an engine while there are jobs. Use it as a context manager, or call start and stop."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.inbox: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self.jobs: list[Job] = []
        self.loop: asyncio.AbstractEventLoop | None = None
        self.with_news = deque[Job]()  # jobs with pieces that their requests do not know of
        self.waking = False  # the loop is in a round, or in the pause after it
        self.arriving = 0  # requests that are tokenized and checked; changed in the event loop
        self.thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self.thread.start()

    def stop(self) -> None:
        """End the thread after the step that is running; jobs that are not complete get no more tokens."""
        self.inbox.put(None)
        self.thread.join()

    @property
    def alive(self) -> bool:
        """True between start and stop."""
        return self.thread.is_alive()

    def submit(self, job: Job) -> None:
        """Let the engine compute a job. Called in the event loop."""
        self.loop = asyncio.get_running_loop()
        self.inbox.put(job)

    def put(self, job: Job, pieces: list[Piece]) -> None:
        """In the engine's thread: append pieces to a job."""
        if pieces:
            job.pieces.extend(pieces)
            self.with_news.append(job)

    def hand_over(self) -> None:
        """In the engine's thread, after a step: wake the event loop, unless it will look by itself."""
        if self.with_news and not self.waking and self.loop is not None:
            self.waking = True
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self.loop.call_soon_threadsafe(self._round)

    def _round(self) -> None:
        """In the event loop: wake the requests that have news, and measure how long they take."""
        while self.with_news:
            self.with_news.popleft().news.set()
        asyncio.get_running_loop().call_soon(self._after_round, time.perf_counter())

    def _after_round(self, start: float) -> None:
        seconds = time.perf_counter() - start
        pause = min(LONGEST_PAUSE, seconds * (1 / LOOP_SHARE - 1))
        asyncio.get_running_loop().call_later(pause, self._after_pause)

    def _after_pause(self) -> None:
        self.waking = False
        if self.with_news:  # else the engine's thread calls hand_over
            self.waking = True
            self._round()

    @contextlib.contextmanager
    def arrival(self) -> Iterator[None]:
        """In the event loop, around what precedes `submit`: a step waits a little for this request."""
        self.arriving += 1
        try:
            yield
        finally:
            self.arriving -= 1

    def _admit(self) -> bool:
        """Submit the jobs in the inbox; wait for one if there is nothing to compute. -> False: stop"""
        until = time.perf_counter() + ADMISSION_SECONDS
        while True:
            busy = self.engine.unfinished_requests or self.engine.steps_in_flight
            left = until - time.perf_counter() if self.arriving else 0.0
            try:
                job = self.inbox.get(not busy or left > 0, left if busy and left > 0 else None)
            except queue.Empty:
                return True
            if job is None:
                return False
            self.jobs.append(job)
            self.engine.submit(*job.requests)

    def _run(self) -> None:
        while self._admit():
            try:
                self.engine.step()
            except Exception:  # for instance out of memory: these jobs fail, the next may work
                traceback.print_exc()
                for job in self.jobs:
                    self.put(job, [Piece(i, reason="error") for i in job.running])
                    job.close()
            for job in self.jobs:
                if not job.closed:
                    self.put(job, job.collect())
            self.hand_over()
            self.jobs = [job for job in self.jobs if job.running and not job.closed]
        for job in self.jobs:
            job.close()
        self.engine.step()  # frees their slots
