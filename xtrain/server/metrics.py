"""Figures of the server in the text format of Prometheus, by its client library."""

import time
from collections.abc import Iterator
from typing import Any

import prometheus_client as prometheus
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from ..serving.engine import Engine
from .engine_thread import Job


class EngineFigures(Collector):
    """Reads the engine when /metrics is asked for. Nothing is locked: figures may be one step apart."""

    def __init__(self, engine: Engine):
        self.engine = engine

    def collect(self) -> Iterator[Any]:
        """The metrics."""
        e = self.engine
        gauges = {
            "slots": ("sequences at a time, at most", e.max_batch),
            "slots_used": ("sequences that have a slot", e.max_batch - len(e.free_slots)),
            "pending": ("sequences that wait for a slot", len(e.pending_requests)),
            "blocks": ("blocks of the KV cache", e.pool.size),
            "blocks_available": ("free blocks, and those kept only for reuse", e.pool.available),
        }
        counters = {
            "steps": ("steps of the engine", e.steps),
            "prompt_tokens": ("prompt tokens computed", e.prefilled_tokens),
            "reused_tokens": ("prompt tokens found in the KV cache", e.reused_tokens),
            "decoded_tokens": ("tokens of answers, without the first of each", e.decoded_tokens),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"xtrain_{name}", text, value)
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(f"xtrain_{name}", text, value)


class Metrics:
    """The figures of one application.   media_type: of `text`"""

    media_type = prometheus.CONTENT_TYPE_LATEST

    def __init__(self, engine: Engine):
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
            "xtrain_request_seconds", "time of a request", buckets=(0.1, 0.3, 1, 3, 10, 30, 100, 300), **names
        )  # fmt: skip

    def observe(self, job: Job) -> None:
        """Count a job that has ended."""
        self.duration.observe(time.perf_counter() - job.start)
        if job.first_token:
            self.first_token.observe(job.first_token - job.start)

    def text(self) -> bytes:
        """What /metrics answers."""
        return prometheus.generate_latest(self.registry)
