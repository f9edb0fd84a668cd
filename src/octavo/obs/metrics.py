"""Prometheus metrics of the server. One table declares them all; docs/metrics.md is written from it.

Counters and gauges of the engine come from its statistics at the time of the scrape; counts and times of requests
are observed in the API process. Names have the prefix `octavo:` and the stems that existing dashboards use.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

PREFIX = "octavo:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

TIME_BUCKETS_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
                  40.0, 80.0, 160.0, 640.0)
TOKEN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5,
                   0.75, 1.0, 2.5, 5.0)


@dataclass(frozen=True)
class Spec:
    """One metric: its stem, type, label names and what it means. `source` is its key in the engine's statistics."""

    stem: str
    kind: str  # "gauge", "counter" or "histogram"
    help: str
    labels: tuple[str, ...] = ()
    source: str | None = None
    buckets: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        return PREFIX + self.stem


SPECS: tuple[Spec, ...] = (
    Spec("num_requests_running", "gauge", "Choices that hold KV pages", source="running"),
    Spec("num_requests_waiting", "gauge", "Choices that wait for pages or a row", source="waiting"),
    Spec("kv_cache_usage_perc", "gauge", "Share of the KV pages held by requests, 0 to 1, of the fullest pool",
         source="kv_usage"),
    Spec("prefix_cache_queries_total", "counter", "Prompt tokens looked up in the prefix cache",
         source="prefix_queries_tokens"),
    Spec("prefix_cache_hits_total", "counter", "Prompt tokens whose KV was found in the prefix cache",
         source="prefix_hits_tokens"),
    Spec("prompt_tokens_total", "counter", "Prompt tokens of accepted requests", source="prompt_tokens"),
    Spec("generation_tokens_total", "counter", "Tokens generated", source="generation_tokens"),
    Spec("num_preemptions_total", "counter", "Times a request gave its pages back to let others go on",
         source="preemptions"),
    Spec("request_success_total", "counter", "Choices that ended, by the reason why", ("finished_reason",)),
    Spec("time_to_first_token_seconds", "histogram", "From the arrival of a request to its first token",
         buckets=TIME_BUCKETS_S),
    Spec("inter_token_latency_seconds", "histogram", "Between tokens of a choice; a step that gives k tokens counts k",
         buckets=TOKEN_BUCKETS_S),
    Spec("e2e_request_latency_seconds", "histogram", "From the arrival of a request to its last token",
         buckets=TIME_BUCKETS_S),
    Spec("request_queue_time_seconds", "histogram", "From arrival to the first step of a choice",
         buckets=TIME_BUCKETS_S),
    Spec("request_prefill_time_seconds", "histogram", "From the first step of a choice to its first token",
         buckets=TIME_BUCKETS_S),
    Spec("request_decode_time_seconds", "histogram", "From the first token of a choice to its last",
         buckets=TIME_BUCKETS_S),
    Spec("spec_decode_num_drafts_total", "counter", "Verify steps that had drafted tokens", source="drafts"),
    Spec("spec_decode_num_draft_tokens_total", "counter", "Tokens drafted", source="draft_tokens"),
    Spec("spec_decode_num_accepted_tokens_total", "counter", "Drafted tokens accepted", source="accepted_tokens"),
    Spec("spec_decode_num_accepted_tokens_per_pos", "counter", "Drafted tokens accepted, by position in the draft",
         ("position",), source="accepted_per_position"),
    Spec("kv_pages", "gauge", "KV pages of a pool by state; the states of a pool sum to its total",
         ("pool", "state"), source="kv_pages"),
    Spec("kv_pool_pages", "gauge", "KV pages a pool has", ("pool",), source="kv_pool_pages"),
    Spec("kv_balance_violations_total", "counter", "Laws of the KV books found broken", source="balance_violations"),
    Spec("kv_leases", "gauge", "KV pages under a transfer or an operation in flight, by pool", ("pool",),
         source="kv_leases"),
    Spec("kv_tier_pages", "gauge", "KV pages by tier (device, host) and state", ("tier", "state"),
         source="kv_tier_pages"),
    Spec("kv_tier_hits_total", "counter", "Pages a sparse layer needed that were in a request's device buffer",
         source="kv_tier_hits"),
    Spec("kv_tier_swaps_total", "counter", "Pages a sparse layer needed that were loaded from the host tier",
         source="kv_tier_swaps"),
    Spec("kv_tier_bytes_total", "counter", "Bytes of KV moved from the host tier (in) and to it (out)", ("direction",),
         source="kv_tier_bytes"),
    Spec("kv_tier_backups_waiting", "gauge", "Pages on their way to the host tier", source="kv_tier_backups_waiting"),
    Spec("kv_tier_retracted", "gauge", "Retracted requests whose KV waits in the host tier",
         source="kv_tier_retracted"),
    Spec("kv_transfers_total", "counter", "KV transfers by result", ("result",), source="kv_transfers"),
    Spec("kv_transfer_failures_total", "counter", "Rooms that failed, by cause", ("cause",),
         source="kv_transfer_failures"),
    Spec("kv_transfer_bytes_total", "counter", "Bytes of KV moved by transfers", source="kv_transfer_bytes"),
    Spec("engine_steps_total", "counter", "Steps the engine has run", source="steps"),
    Spec("engine_up", "gauge", "1 while the engine process answers its heartbeat", source="up"),
    Spec("engine_restarts_total", "counter", "Times the engine process was started again", source="restarts"),
    Spec("process_resident_memory_bytes", "gauge", "Resident memory by process (api, engine)", ("process",),
         source="rss_bytes"),
    Spec("info", "gauge", "Always 1; what is served", ("model_name", "version"), source="info"),
)


@dataclass
class Snapshot:
    """What the engine says at the time of a scrape: values by `Spec.source`; labelled ones are mappings whose keys
    are one label's value, or a tuple of them."""

    values: Mapping[str, Any] = field(default_factory=dict)


class ServerMetrics(Collector):
    """All metrics of one server. Not a global: tests and several servers in one process do not share counts."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.snapshot = Snapshot()
        self.finished: dict[str, int] = dict.fromkeys(("stop", "length", "abort", "error", "tool_calls"), 0)
        self._histograms = {
            spec.stem: Histogram(spec.name, spec.help, registry=None, buckets=spec.buckets)
            for spec in SPECS if spec.kind == "histogram"
        }
        self.registry.register(self)

    def observe(self, stem: str, value_s: float, times: int = 1) -> None:
        """Count a duration in seconds, `times` times."""
        histogram = self._histograms[stem]
        for _ in range(times):
            histogram.observe(max(0.0, value_s))

    def count_finish(self, reason: str) -> None:
        self.finished[reason] = self.finished.get(reason, 0) + 1

    def render(self, values: Mapping[str, Any]) -> bytes:
        """The text exposition; `values` are the engine's statistics now (see `Spec.source`)."""
        self.snapshot = Snapshot(values)
        return generate_latest(self.registry)

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        for spec in SPECS:
            if spec.kind == "histogram":
                for metric in self._histograms[spec.stem].collect():
                    metric.samples = [s for s in metric.samples if not s.name.endswith("_created")]
                    yield metric
                continue
            value = self.snapshot.values.get(spec.source) if spec.source is not None else self.finished
            if value is not None:
                yield _metric(spec, value)


def _metric(spec: Spec, value: Any) -> Metric:
    """Samples keep the declared name: the library would add `_total` to the one counter that has none."""
    plain = spec.kind == "counter" and not spec.stem.endswith("_total")
    metric = Metric(spec.name.removesuffix("_total") if spec.kind == "counter" else spec.name, spec.help,
                    "unknown" if plain else spec.kind)
    if not spec.labels:
        metric.add_sample(spec.name, {}, float(value))
        return metric
    for key, number in value.items():
        keys = key if isinstance(key, tuple) else (key,)
        metric.add_sample(spec.name, dict(zip(spec.labels, (str(k) for k in keys), strict=True)), float(number))
    return metric


def document() -> str:
    """The text of docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "`GET /metrics` of `octavo serve` in Prometheus text format. This file is generated:",
        "`python -m octavo.obs.metrics_doc` rewrites it, and `--check` fails when it is out of step.",
        "",
        "| metric | type | labels | meaning |",
        "|---|---|---|---|",
    ]
    for spec in SPECS:
        lines.append(f"| `{spec.name}` | {spec.kind} | {', '.join(f'`{x}`' for x in spec.labels)} | {spec.help} |")
    lines += ["", "Histograms have `_bucket`, `_sum` and `_count`. Times are in seconds.", "",
              "The states of `octavo:kv_pages` sum to `octavo:kv_pool_pages` for every pool."]
    return "\n".join(lines) + "\n"
