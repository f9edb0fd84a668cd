"""Counters of the engine: what metrics, the KV page and a request's own figures are made from."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from octavo.engine.output import RequestMetrics

if TYPE_CHECKING:
    from octavo.engine.request import Request
    from octavo.kv.ledger import Ledger
    from octavo.sched.scheduler import Scheduler

RATE_WINDOW_S = 10.0


@dataclass(frozen=True)
class EngineStats:
    """A snapshot. Counters only grow; gauges are of now. `pools`: pool -> state -> pages."""

    running: int
    waiting: int
    preemptions: int
    prompt_tokens: int
    generation_tokens: int
    generation_tokens_per_s: float
    cache_query_tokens: int
    cache_hit_tokens: int
    finished: dict[str, int]
    drafts: int
    draft_tokens: int
    accepted_tokens: int
    accepted_per_position: list[int]
    balance_violations: int
    pools: dict[str, dict[str, int]]
    requests: list[dict[str, Any]] = field(default_factory=list)
    transfers: dict[str, Any] = field(default_factory=dict)  # between prefill and decode servers: see disagg/tally.py
    tiers: dict[str, Any] = field(default_factory=dict)  # with HiSparse: TierControl.report()


class StatsKeeper:
    """Adds up what happened. One per engine."""

    def __init__(self) -> None:
        self.violations = 0
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._finished: dict[str, int] = {}
        self._drafts = 0
        self._draft_tokens = 0
        self._accepted: list[int] = []
        self._recent: deque[tuple[float, int]] = deque()

    def prompt(self, tokens: int) -> None:
        self._prompt_tokens += tokens

    def tokens(self, request: Request, count: int, now: float) -> None:
        if request.first_token_s is None:
            request.first_token_s = now
        self._generation_tokens += count
        self._recent.append((now, count))
        while self._recent and self._recent[0][0] < now - RATE_WINDOW_S:
            self._recent.popleft()

    def draft(self, drafted: int, accepted: int) -> None:
        self._drafts += 1
        self._draft_tokens += drafted
        self._accepted.extend([0] * (drafted - len(self._accepted)))
        for position in range(accepted):
            self._accepted[position] += 1

    def finished(self, request: Request, reason: str) -> None:
        self._finished[reason] = self._finished.get(reason, 0) + 1

    def speculation(self) -> dict[str, Any]:
        """Drafts verified, tokens drafted and accepted, by position; mean accept length counts the bonus token."""
        accepted = sum(self._accepted)
        return {
            "drafts": self._drafts,
            "draft_tokens": self._draft_tokens,
            "accepted_tokens": accepted,
            "accepted_per_position": list(self._accepted),
            "mean_accept_length": 1 + accepted / self._drafts if self._drafts else None,
        }

    def request_metrics(self, request: Request, page_size: int) -> RequestMetrics:
        """One finished request's own figures."""
        metrics = request.output.output.metrics
        metrics.arrival_s = request.arrival_s
        metrics.scheduled_s = request.scheduled_s
        metrics.first_token_s = request.first_token_s
        metrics.finished_s = time.monotonic()
        metrics.prompt_tokens = request.prompt_tokens
        metrics.output_tokens = request.num_outputs
        metrics.cached_tokens = request.cached_tokens
        metrics.preemptions = request.preemptions
        metrics.kv_pages = -(-max(0, len(request.tokens) - 1) // page_size)
        return metrics

    def snapshot(self, ledger: Ledger, scheduler: Scheduler) -> EngineStats:
        now = time.monotonic()
        recent = [count for at, count in self._recent if at >= now - RATE_WINDOW_S]
        span = min(RATE_WINDOW_S, now - self._recent[0][0]) if recent else 0.0
        books = ledger.report()
        spec = self.speculation()
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            preemptions=scheduler.preemptions,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            generation_tokens_per_s=sum(recent) / span if span > 0 else 0.0,
            cache_query_tokens=ledger.stats["queried_tokens"],
            cache_hit_tokens=ledger.stats["hit_tokens"],
            finished=dict(self._finished),
            drafts=spec["drafts"],
            draft_tokens=spec["draft_tokens"],
            accepted_tokens=spec["accepted_tokens"],
            accepted_per_position=spec["accepted_per_position"],
            balance_violations=self.violations,
            pools=books["pools"],
        )
