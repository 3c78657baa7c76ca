"""Figures of the server in the text format of Prometheus, by its client library, and a line of them
for the log.

Metrics named vllm:... have the names, labels, buckets and meaning of vLLM's, so its dashboards show
them. A sequence counts there as a request does in vLLM. xtrain_... are further figures of the
engine.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import prometheus_client as prometheus
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from ..cli import say
from .engine_client import EngineClient, Job, Piece
from .engine_loop import Figures

LOG_SECONDS = 10  # between two lines of throughput
GAUGES = {
    "slots": "sequences at a time, at most",
    "slots_used": "sequences that have a slot",
    "pending": "sequences that wait for a slot",
    "blocks": "blocks of the KV cache",
    "blocks_available": "free blocks, and those kept only for reuse",
}
COUNTERS = {
    "steps": "steps of the engine",
    "prompt_tokens": "prompt tokens computed",
    "reused_tokens": "prompt tokens found in the KV cache",
    "decoded_tokens": "tokens of answers, without the first of each",
}
Figure = Callable[[Figures], float]
VLLM_GAUGES: dict[str, tuple[str, Figure]] = {
    "num_requests_running": ("sequences that have a slot", lambda f: f.slots_used),
    "num_requests_waiting": ("sequences that wait for a slot", lambda f: f.pending),
    "kv_cache_usage_perc": ("share of the KV cache in use, 1: all of it", lambda f: f.cache_usage),
}
VLLM_COUNTERS: dict[str, tuple[str, Figure]] = {
    "num_preemptions": ("sequences that gave up their blocks", lambda f: f.preemptions),
    "prefix_cache_queries": (
        "prompt tokens looked up in the KV cache",
        lambda f: f.prompt_tokens + f.reused_tokens,
    ),
    "prefix_cache_hits": ("prompt tokens found there", lambda f: f.reused_tokens),
    "spec_decode_num_drafts": ("drafts, of one sequence in one step", lambda f: f.drafts),
    "spec_decode_num_draft_tokens": ("drafted tokens", lambda f: f.drafted_tokens),
    "spec_decode_num_accepted_tokens": ("drafted tokens accepted", lambda f: f.accepted_tokens),
}
# vLLM's upper bounds of buckets, in seconds
FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
NEXT_TOKEN = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
REQUEST = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
PARTS_OF_A_REQUEST = {  # seconds
    "e2e_request_latency": "from the request to the last token",
    "request_queue_time": "until a sequence gets a slot",
    "request_inference_time": "from then to the last token",
    "request_prefill_time": "from then to the first token",
    "request_decode_time": "from the first token to the last one",
}
# the engine's reasons -> vLLM's; "abort": the client has gone, or the time is over
FINISHED = {"stop": "stop", "length": "length", "full": "length", None: "abort"}


class EngineFigures(Collector):
    """The figures that the engine has sent last.   labels: of vLLM's metrics"""

    def __init__(self, engine: EngineClient, labels: dict[str, str]):
        self.engine = engine
        self.labels = labels

    def collect(self) -> Iterator[Any]:
        """Return the metrics."""
        figures = self.engine.figures
        for kind, names in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
            for name, text in names.items():
                yield kind(f"xtrain_{name}", text, getattr(figures, name))
        both = ((GaugeMetricFamily, VLLM_GAUGES), (CounterMetricFamily, VLLM_COUNTERS))
        for kind, table in both:
            for name, (text, value) in table.items():
                family = kind(f"vllm:{name}", text, labels=list(self.labels))
                family.add_metric(list(self.labels.values()), value(figures))
                yield family


def _one_two_five(largest: int) -> list[int]:
    """Return 1, 2, 5, 10, ... up to `largest`."""
    powers = [10**i for i in range(len(str(largest)))]
    return [m * power for power in powers for m in (1, 2, 5) if m * power <= largest]


class Metrics:
    """The figures of one application.   name: of the model.  media_type: of `text`"""

    media_type = prometheus.CONTENT_TYPE_LATEST

    def __init__(self, engine: EngineClient, name: str):
        self.engine = engine
        self.registry = prometheus.CollectorRegistry()
        labels = {"model_name": name, "engine": "0"}
        self.registry.register(EngineFigures(engine, labels))
        names: dict[str, Any] = dict(registry=self.registry)

        def histogram(name: str, text: str, buckets: Any) -> Any:
            metric = prometheus.Histogram(
                f"vllm:{name}", text, list(labels), buckets=buckets, **names
            )
            return metric.labels(**labels)

        def counter(name: str, text: str) -> Any:
            return prometheus.Counter(f"vllm:{name}", text, list(labels), **names).labels(**labels)

        self.refused = prometheus.Counter(
            "xtrain_refused", "requests refused by a full queue", **names
        )
        # as prometheus_fastapi_instrumentator has it in vLLM
        self.responses = prometheus.Counter(
            "http_requests", "answers", ["handler", "method", "status"], **names
        )
        success = prometheus.Counter(
            "vllm:request_success", "sequences that ended", [*labels, "finished_reason"], **names
        )
        self.finished = {
            reason: success.labels(**labels, finished_reason=reason)
            for reason in ("stop", "length", "abort", "error")
        }
        self.first_token = histogram(
            "time_to_first_token_seconds", "from the request to its first token", FIRST_TOKEN
        )
        self.next_token = histogram(
            "inter_token_latency_seconds", "from a token to the next one", NEXT_TOKEN
        )
        self.mean_token = histogram(
            "request_time_per_output_token_seconds", "the mean of a sequence", NEXT_TOKEN
        )
        self.parts = {
            name: histogram(f"{name}_seconds", text, REQUEST)
            for name, text in PARTS_OF_A_REQUEST.items()
        }
        sizes = _one_two_five(engine.max_seq_len)
        self.prompt_sizes = histogram("request_prompt_tokens", "tokens of a prompt", sizes)
        self.answer_sizes = histogram("request_generation_tokens", "tokens of an answer", sizes)
        self.longest = histogram(
            "request_max_num_generation_tokens", "the longest answer of a request", sizes
        )
        self.max_tokens = histogram("request_params_max_tokens", "their limit", sizes)
        self.samples = histogram("request_params_n", "answers of a request", (1, 2, 5, 10, 20))
        self.prompt_tokens = counter("prompt_tokens", "tokens of the prompts that were computed")
        self.generation_tokens = counter("generation_tokens", "tokens of answers")
        self.generated = 0  # the same number, for log_throughput

    def observe_piece(self, job: Job, piece: Piece) -> None:
        """Count new tokens of an answer."""
        n = len(piece.tokens)
        if not n:
            return
        self.generation_tokens.inc(n)
        self.generated += n
        if piece.first:
            self.first_token.observe(piece.seconds)
            self.prompt_tokens.inc(len(job.requests[piece.index].prompt))
            return
        for _ in range(n):  # the steps of tokens that came together
            self.next_token.observe(piece.seconds / n)

    def observe(self, job: Job) -> None:
        """Count a job that has ended."""
        self.samples.observe(len(job.requests))
        self.longest.observe(max(sequence.tokens for sequence in job.sequences))
        for request, sequence in zip(job.requests, job.sequences):
            self.finished[FINISHED.get(sequence.reason, "error")].inc()
            self.prompt_sizes.observe(len(request.prompt))
            self.max_tokens.observe(request.max_new_tokens)
            if sequence.reason not in FINISHED or not sequence.tokens:
                continue
            self.answer_sizes.observe(sequence.tokens)
            admitted = job.start + sequence.queue_seconds
            seconds = {
                "e2e_request_latency": sequence.last - job.start,
                "request_queue_time": sequence.queue_seconds,
                "request_inference_time": sequence.last - admitted,
                "request_prefill_time": sequence.first - admitted,
                "request_decode_time": sequence.last - sequence.first,
            }
            for name, value in seconds.items():
                self.parts[name].observe(value)
            if sequence.tokens > 1:
                mean = (sequence.last - sequence.first) / (sequence.tokens - 1)
                self.mean_token.observe(mean)

    def text(self) -> bytes:
        """Return what /metrics answers."""
        return prometheus.generate_latest(self.registry)

    async def log_throughput(self) -> None:
        """Print a line every LOG_SECONDS, unless nothing happens."""
        before = self.engine.figures
        generated = self.generated
        then = time.perf_counter()
        while True:
            await asyncio.sleep(LOG_SECONDS)
            figures = self.engine.figures
            now = time.perf_counter()
            if figures.steps != before.steps:
                say(throughput(before, figures, self.generated - generated, now - then))
            before = figures
            generated = self.generated
            then = now


def throughput(before: Figures, after: Figures, generated: int, seconds: float) -> str:
    """Return a line about the time between two figures, in which so many tokens were generated."""
    since = lambda name: getattr(after, name) - getattr(before, name)
    prompts = since("prompt_tokens") + since("reused_tokens")
    reused = 100 * since("reused_tokens") / max(prompts, 1)
    return (
        f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {since('prompt_tokens') / seconds:.1f} prompt "
        f"tokens/s, {generated / seconds:.1f} tokens/s; {after.slots_used} sequences "
        f"running, {after.pending} waiting, {since('preemptions')} preempted; KV cache "
        f"{100 * after.cache_usage:.1f} % in use, {reused:.1f} % of prompt tokens found in it"
    )
