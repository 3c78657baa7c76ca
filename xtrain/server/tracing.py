"""A span for each request, by OpenTelemetry's own packages (the extra `otel`)."""

import os
from typing import Any

from starlette.middleware import Middleware

from ..errors import UserError
from .access_log import RequestRecord

NAMES = {  # of facts -> OpenTelemetry's, or vLLM's where it has none
    "id": "gen_ai.request.id",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
    "tokens": "gen_ai.usage.output_tokens",
    "finish": "gen_ai.response.finish_reasons",
    "first_token": "gen_ai.latency.time_to_first_token",
    "error": "error.type",
}


def tracer_provider(endpoint: str) -> Any:
    """Return what sends spans to an OTLP endpoint over HTTP, such as
    http://localhost:4318/v1/traces. Raises UserError if a package is missing."""
    try:
        import opentelemetry.instrumentation.asgi  # noqa: F401  (middleware needs it)
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise UserError(
            f"{error.name} is not installed: pip install -e '.[otel]', or leave "
            "--otlp-traces-endpoint out"
        ) from None
    name = os.environ.get("OTEL_SERVICE_NAME", "xtrain")
    provider = TracerProvider(resource=Resource.create({"service.name": name}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return provider


def middleware(provider: Any) -> Middleware:
    """Return the ASGI middleware that makes the spans. A request's traceparent is their parent."""
    from opentelemetry.instrumentation.asgi import OpenTelemetryMiddleware

    kind: Any = OpenTelemetryMiddleware
    return Middleware(kind, tracer_provider=provider, exclude_spans=["receive", "send"])


def annotate(record: RequestRecord) -> None:
    """Write what is known about a request to its span."""
    from opentelemetry.trace import get_current_span

    facts = record.facts()
    named = {name: facts[fact] for fact, name in NAMES.items() if fact in facts}
    get_current_span().set_attributes(named)
