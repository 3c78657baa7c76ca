"""One thread owns the engine and turns tokens into text; asyncio code submits jobs and reads queues.

A job is one HTTP request: some sequences. After every step of the engine the thread puts what is new into the queues of the
jobs. Closing a job, which any thread may do, frees its slots and blocks in the next step.
"""

import asyncio
import contextlib
import queue
import threading
import time
import traceback
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field

from ..data.tokenizer import Tokenizer
from ..serving.engine import Engine
from ..serving.requests import Request, TokenLogprobs
from ..serving.text_stream import TextStream


@dataclass(frozen=True)
class Piece:
    """The next part of one sequence."""

    index: int  # of the sequence in its job
    text: str = ""  # may be empty
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # one per token, if requested
    # of Completion, if the sequence is complete with this piece; "error": the step failed
    reason: str | None = None


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
        self.loop, self.pieces = asyncio.get_running_loop(), asyncio.Queue[list[Piece]]()

    async def __aiter__(self) -> AsyncIterator[Piece]:
        """The pieces of all sequences as they arrive, until all are complete."""
        left = len(self.requests)
        while left:
            for piece in await self.pieces.get():
                left -= piece.reason is not None
                yield piece

    def close(self) -> None:
        """End what is not complete. Never waits."""
        self.closed = True
        for request in self.requests:
            request.completion.end("cancelled")

    def put(self, pieces: list[Piece]) -> None:
        """In the engine's thread: hand pieces to the event loop."""
        if pieces:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self.loop.call_soon_threadsafe(self.pieces.put_nowait, pieces)

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
        """Let the engine compute a job."""
        self.inbox.put(job)

    def _run(self) -> None:
        while True:
            busy = self.engine.unfinished_requests or self.engine.steps_in_flight
            with contextlib.suppress(queue.Empty):
                job = self.inbox.get(block=not busy)
                if job is None:
                    break
                self.jobs.append(job)
                self.engine.submit(*job.requests)
                continue  # until the inbox is empty
            try:
                self.engine.step()
            except Exception:  # for instance out of memory: these jobs fail, the next may work
                traceback.print_exc()
                for job in self.jobs:
                    job.put([Piece(i, reason="error") for i in job.running])
                    job.close()
            for job in self.jobs:
                if not job.closed:
                    job.put(job.collect())
            self.jobs = [job for job in self.jobs if job.running and not job.closed]
        for job in self.jobs:
            job.close()
        self.engine.step()  # frees their slots
