"""Tracing: an OpenTelemetry span for every request, within its client's trace."""

from __future__ import annotations

import time
from typing import Any

from ..core import SettingsError
from .version import Version


class Tracing:
    """Create spans when requests have ended, so that requests in flight cost nothing.

    If the program has no tracer provider, spans are sent to OTEL_EXPORTER_OTLP_ENDPOINT.
    """

    def __init__(self) -> None:
        try:
            from opentelemetry import propagate, trace
            from opentelemetry.sdk.trace import TracerProvider
        except ModuleNotFoundError as error:
            raise SettingsError(
                "traces need additional packages",
                got=f"no {error.name}",
                remedy="install them with pip install 'manyhands[traces]'",
            ) from None
        self._trace, self._propagate = trace, propagate
        provider: Any = trace.get_tracer_provider()
        self._own: Any = None
        if not isinstance(provider, TracerProvider):
            provider = self._own = _exporting()
        self._tracer = provider.get_tracer("manyhands.serving")

    def over(self, version: Version, rows: int, code: str, began: float, parent: bytes) -> None:
        """Create the span of a request that has just ended."""
        now = time.time_ns()
        start = now - int((time.perf_counter() - began) * 1e9)
        carrier = {"traceparent": parent.decode("latin1")} if parent else {}
        attributes = {"manyhands.model": version.model, "manyhands.version": version.number, "manyhands.rows": rows}
        span = self._tracer.start_span(
            f"infer {version.model}",
            context=self._propagate.extract(carrier),
            kind=self._trace.SpanKind.SERVER,
            start_time=start,
            attributes={**attributes, "manyhands.code": code},
        )
        if code != "OK":
            span.set_status(self._trace.StatusCode.ERROR, code)
        span.end(now)

    def close(self) -> None:
        """Send pending spans."""
        if self._own is not None:
            self._own.shutdown()


def _exporting() -> Any:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": "manyhands"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider
