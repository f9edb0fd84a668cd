"""One span a request for whoever collects them; nothing in it that a prompt said."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry import trace

from octavo.engine.output import RequestMetrics
from octavo.obs import traces


class Recorder(trace.TracerProvider):
    """A provider that keeps what it is told."""

    def __init__(self) -> None:
        self.spans: list[dict[str, Any]] = []

    def get_tracer(self, *names: Any, **options: Any) -> Any:
        return self

    def start_span(self, name: str, attributes: dict[str, Any]) -> Any:
        span: dict[str, Any] = {"name": name, "attributes": attributes, "events": [], "ends": 0}
        self.spans.append(span)

        class Span:
            def add_event(self, event: str, facts: dict[str, Any]) -> None:
                span["events"].append((event, facts))

            def end(self) -> None:
                span["ends"] += 1

        return Span()


def test_one_span_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    monkeypatch.setattr(trace, "get_tracer", recorder.get_tracer)
    traces._tracer.cache_clear()
    try:
        span = traces.begin("r1", 12, 2)
        for index in range(2):
            span.choice(index, "stop", RequestMetrics(arrival_s=1.0, scheduled_s=1.5, output_tokens=3))
        span.end()
        span.end()
    finally:
        traces._tracer.cache_clear()
    (seen,) = recorder.spans
    assert seen["name"] == "octavo.request" and seen["ends"] == 1
    assert seen["attributes"]["gen_ai.usage.input_tokens"] == 12
    assert [facts["index"] for _, facts in seen["events"]] == [0, 1]
    assert seen["events"][0][1]["queue_s"] == 0.5 and seen["events"][0][1]["output_tokens"] == 3


def test_without_the_package_there_is_no_span(monkeypatch: pytest.MonkeyPatch) -> None:
    import builtins

    real = builtins.__import__

    def without(name: str, *rest: Any, **options: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ImportError(name)
        return real(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    traces._tracer.cache_clear()
    try:
        span = traces.begin("r1", 1, 1)
        span.choice(0, "stop", None)
        span.end()
    finally:
        traces._tracer.cache_clear()
