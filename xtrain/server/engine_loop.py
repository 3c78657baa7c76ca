"""The engine's side of the server: a loop that owns the engine and talks to the HTTP side
(engine_client.py) over a connection.

The HTTP side is another process (`xtrain serve`), or the loop runs in a thread next to it
(create_app with an Engine). The messages are the same. The HTTP side calls the methods below:
("submit", job, requests), ("cancel", job, index), ... The loop sends news: the new tokens of each
sequence. It does so when the HTTP side has asked for `more`, that is, has written the events of the
last news. If that takes long, tokens of several steps become one piece, and the engine does not
wait.

A step with a prefill takes the host as long for one request as for many. So while the HTTP side
reads and tokenizes requests, a step waits for them, at most ADMISSION_SECONDS: otherwise many that
arrive at once would be admitted one by one.
"""

import contextlib
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection

from ..serving.engine import Engine
from ..serving.requests import Request, TokenLogprobs
from .grammars import Grammars

ADMISSION_SECONDS = 0.01
# Seconds, unless a message comes: a step that always fails must not fill the log.
PAUSE_AFTER_ERROR = 0.1
PAUSE = 0.001  # the same, if no sequence can be admitted
# A step that fails ends its requests, and the next one frees them. If that fails so often, the
# device is lost: after some errors CUDA answers every call with the same error.
MAX_FAILED_STEPS = 20

# In a message; the others follow in the next ones. Those of a long prompt that is scored would
# occupy the other side for too long.
MAX_LOGPROBS = 1 << 13

# Prompt tokens that were in the cache, and seconds in the queue.
Start = tuple[int, float]
# job, index of the sequence in it, new tokens, how it started, the tokens' log-probabilities if
# requested, why the sequence ended: of Completion, or "error" if the step failed; None: it is not
# complete
News = tuple[int, int, list[int], Start, list[TokenLogprobs], str | None]


@dataclass(frozen=True)
class Figures:
    """The engine in numbers, for /metrics."""

    slots: int = 0
    slots_used: int = 0
    pending: int = 0
    blocks: int = 0
    blocks_available: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    decoded_tokens: int = 0
    preemptions: int = 0
    drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def cache_usage(self) -> float:
        """Return the share of the KV cache that sequences occupy."""
        return 1 - self.blocks_available / max(self.blocks, 1)

    @classmethod
    def of(cls, e: Engine) -> "Figures":
        """Return the figures of an engine."""
        s = e.scheduler
        drafts = {}
        if s.speculation is not None:
            drafts = s.speculation.figures()
        return cls(
            slots=e.max_batch,
            slots_used=e.max_batch - len(s.free_slots),
            pending=len(s.waiting),
            blocks=s.pool.size,
            blocks_available=s.pool.available,
            steps=s.steps,
            prompt_tokens=s.prefilled_tokens,
            reused_tokens=s.reused_tokens,
            decoded_tokens=s.decoded_tokens,
            preemptions=s.preemptions,
            **drafts,
        )


class EngineLoop:
    """Steps `engine` while there are requests, until the HTTP side says stop or ends.

    grammars: compiles the guides of requests that have one.
    `run` raises RuntimeError after MAX_FAILED_STEPS.
    """

    def __init__(self, engine: Engine, connection: Connection, grammars: Grammars | None = None):
        self.engine, self.connection = engine, connection
        self.grammars = grammars
        self.sequences: dict[tuple[int, int], Request] = {}  # by job and index: not complete
        self.scoring: list[Request] = []  # those whose result is Scores
        self.sent: dict[tuple[int, int], int] = {}  # tokens of each that the HTTP side knows
        self.figures: Figures | None = None  # as last sent
        self.news_requested = self.stopped = self.arriving = False
        self.failed_steps = 0  # in a row

    def run(self) -> None:
        """Run the loop."""
        try:
            with contextlib.suppress(EOFError, OSError):  # the HTTP side has ended
                while self._listen():
                    self._step()
                    self._report()
        finally:
            self.connection.close()
        for request in self.sequences.values():
            self.engine.cancel(request)
        self.engine.step()  # frees their slots

    # ----------------------------------------------------------------------- calls of the HTTP side
    def submit(self, job: int, requests: list[Request]) -> None:
        """Compute these sequences."""
        for index, request in enumerate(requests):
            if request.grammar is not None and self.grammars is not None:
                request.grammar = self.grammars.compiled(request.grammar)
            self.sequences[job, index] = request
            self.sent[job, index] = 0
        self.scoring += [request for request in requests if request.scores is not None]
        self.engine.submit(*requests)

    def cancel(self, job: int, index: int) -> None:
        """Compute no more of a sequence; the next step frees its slot."""
        if (request := self.sequences.pop((job, index), None)) is not None:
            self.engine.cancel(request)

    def arrival(self, some: bool) -> None:
        """Some requests are being tokenized, or all of them have been submitted."""
        self.arriving = some

    def more(self) -> None:
        """Note that the HTTP side wants the next news."""
        self.news_requested = True
        self._report()

    def stop(self) -> None:
        """End the loop after this message."""
        self.stopped = True

    # ------------------------------------------------------------------------- the loop
    def _listen(self) -> bool:
        """Handle the messages that have arrived; wait for one if there is nothing to compute. ->
        False: stop"""
        until = 0.0
        while not self.stopped:
            seconds: float | None = None
            if self.engine.busy:
                until = until or time.perf_counter() + ADMISSION_SECONDS
                seconds = 0.0
                if self.arriving:
                    seconds = max(0.0, until - time.perf_counter())
            if not self.connection.poll(seconds):
                return True
            method, *arguments = self.connection.recv()
            getattr(self, method)(*arguments)
        return False

    def _step(self) -> None:
        try:
            self.engine.step()
            self._take_scores()
            self.failed_steps = 0
            scheduler = self.engine.scheduler
            if 0 < len(scheduler.waiting) == len(scheduler.unfinished):
                self.connection.poll(PAUSE)  # grammars are being compiled
        except Exception as error:
            # for instance out of memory: these sequences fail, the next may work
            with contextlib.suppress(OSError, ValueError):  # the log cannot be written
                traceback.print_exc()
            for request in self.sequences.values():
                request.completion.end("error")
            self._report()
            self.failed_steps += 1
            if self.failed_steps == MAX_FAILED_STEPS:
                raise RuntimeError(
                    f"{MAX_FAILED_STEPS} steps in a row have failed: start the server again"
                ) from error
            self.connection.poll(PAUSE_AFTER_ERROR)

    def _take_scores(self) -> None:
        """Make the scores that are complete the tokens of their sequences."""
        for request in self.scoring:
            if request.completion.reason == "scored" and request.scores is not None:
                scores = request.scores
                request.completion.logprobs = list(zip(scores.logprobs.tolist(), scores.top))
                request.completion.extend(scores.tokens[scores.first :])
        self.scoring = [r for r in self.scoring if r.completion.reason is None]

    def _report(self) -> None:
        """Send the news, if the HTTP side wants some and there are any."""
        if not self.news_requested:
            return
        news: list[News] = []
        room = MAX_LOGPROBS
        for (job, index), request in self.sequences.items():
            completion = request.completion
            sent = self.sent[job, index]
            end = len(completion)
            logprobs: list[TokenLogprobs] = []
            if completion.logprobs and sent < end:
                each = 1 + len(completion.logprobs[sent][1])
                end = min(end, sent + room // each)
                logprobs = completion.logprobs[sent:end]
                room -= len(logprobs) * each
            reason = completion.reason if end == len(completion) else None
            if end > sent or reason:
                start = (completion.reused, completion.queue_seconds)
                news.append((job, index, completion[sent:end], start, logprobs, reason))
                self.sent[job, index] = end
        figures = Figures.of(self.engine)
        if news or figures != self.figures:
            self.connection.send((news, figures))
            self.news_requested = False
            self.figures = figures
        for job, index, *_, reason in news:
            if reason:
                del self.sequences[job, index]
