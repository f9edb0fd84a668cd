"""Optional OpenTelemetry traces: one span a request, if the package `opentelemetry-api` is there.

Octavo only speaks to the API package; what happens to spans is the SDK's configuration, from outside:
`opentelemetry-instrument octavo serve`, with `OTEL_EXPORTER_OTLP_ENDPOINT` and the like. Without an SDK nothing is
collected and nothing is sent. Prompts and answers are never part of a span.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.engine.output import RequestMetrics


@lru_cache(maxsize=1)
def _tracer() -> Any | None:
    try:
        from opentelemetry import trace
    except ImportError:
        return None
    return trace.get_tracer("octavo")


class RequestSpan:
    """The span of one prompt, or nothing where there is no OpenTelemetry. `end` may be called twice."""

    def __init__(self, span: Any | None) -> None:
        self._span = span

    def choice(self, index: int, reason: str | None, metrics: RequestMetrics | None) -> None:
        """A choice has ended: one event with its reason and figures (seconds, counts)."""
        if self._span is None:
            return
        facts = {} if metrics is None else {
            name: value for name, value in metrics.to_dict().items() if isinstance(value, int | float)
        }
        self._span.add_event("choice ended", {"index": index, "finish_reason": reason or "", **facts})

    def end(self) -> None:
        span, self._span = self._span, None
        if span is not None:
            span.end()


def begin(request_id: str, prompt_tokens: int, n: int) -> RequestSpan:
    """Start the span of a request, under the caller's span if there is one."""
    tracer = _tracer()
    if tracer is None:
        return RequestSpan(None)
    attributes = {"gen_ai.request.id": request_id, "gen_ai.usage.input_tokens": prompt_tokens,
                  "gen_ai.request.choice.count": n}
    return RequestSpan(tracer.start_span("octavo.request", attributes=attributes))
