"""Figures of the server in the text format of Prometheus, by its client library."""

import time
from collections.abc import Iterator
from typing import Any

import prometheus_client as prometheus
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from .engine_client import EngineClient, Job

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


class EngineFigures(Collector):
    """The figures that the engine has sent last."""

    def __init__(self, engine: EngineClient):
        self.engine = engine

    def collect(self) -> Iterator[Any]:
        """Return the metrics."""
        for kind, names in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
            for name, text in names.items():
                yield kind(f"xtrain_{name}", text, getattr(self.engine.figures, name))


class Metrics:
    """The figures of one application.   media_type: of `text`"""

    media_type = prometheus.CONTENT_TYPE_LATEST

    def __init__(self, engine: EngineClient):
        self.registry = prometheus.CollectorRegistry()
        self.registry.register(EngineFigures(engine))
        names: dict[str, Any] = dict(registry=self.registry)
        self.refused = prometheus.Counter(
            "xtrain_refused", "requests refused by a full queue", **names
        )
        self.first_token = prometheus.Histogram(
            "xtrain_first_token_seconds", "time to the first token", **names
        )
        self.duration = prometheus.Histogram(
            "xtrain_request_seconds",
            "time of a request",
            buckets=(0.1, 0.3, 1, 3, 10, 30, 100, 300),
            **names,
        )

    def observe(self, job: Job) -> None:
        """Count a job that has ended."""
        self.duration.observe(time.perf_counter() - job.start)
        if job.first_token:
            self.first_token.observe(job.first_token - job.start)

    def text(self) -> bytes:
        """Return what /metrics answers."""
        return prometheus.generate_latest(self.registry)
