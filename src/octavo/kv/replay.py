"""Replaying recorded ledger calls on other books: another page size, pool size or eviction policy.

Requests are followed, not calls: where the new pools are too small, a request is preempted as an engine would do it
(fewest outputs first), waits, and is recomputed when there is room; calls about it meanwhile only move its target.
With a host tier (replay_tiers.py) a preempted request's KV stays there, where an engine would have kept it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from octavo.errors import OutOfPages, UserError
from octavo.kv import balance
from octavo.kv.books import LedgerConfig, OutOfRows
from octavo.kv.ledger import Ledger
from octavo.kv.policy import load_policy
from octavo.kv.replay_tiers import TierReplay, scaled_tiers
from octavo.kv.tiers import Ticket

CHECK_EVERY_CALLS = 64


class TraceError(UserError):
    """A file that is not a trace of this version."""

    code = "invalid_trace"


@dataclass(eq=False)
class _Request:
    tokens: list[int]  # what its key was when it was admitted
    namespace: str | None
    committed: int = 0
    known: int = 0
    row: int = -1  # -1: preempted, waiting
    generation: int = 0
    fill: int = 0
    budget: int = 0  # host pages promised to it
    ticket: Ticket | None = None  # waiting, and its KV is in the host tier

    @property
    def outputs(self) -> int:
        return max(0, self.committed - len(self.tokens))


class _Replay(TierReplay):
    def __init__(self, config: LedgerConfig, policy: Any, recorded_page_size: int) -> None:
        super().__init__(Ledger(config, evict_policy=policy), recorded_page_size)
        self.leased: dict[int, _Request] = {}  # as by_row, while its transfer is not final
        self.ops: dict[int, int] = {}
        self.preemptions = self.resumed = self.requests = self.violations = 0
        self.calls = 0

    def run(self, calls: Iterable[dict[str, Any]]) -> None:
        for call in calls:
            self.calls += 1
            self.follow(call)
            if self.calls % CHECK_EVERY_CALLS == 0:
                self.violations += len(balance.check(self.ledger, deep=False))
        self.violations += len(balance.check(self.ledger))

    def follow(self, call: dict[str, Any]) -> None:
        name = call.get("call")
        entry = getattr(self, f"on_{name}", None)
        if entry is None:
            raise TraceError(f"call {self.calls} of the trace: {name!r} is no call of a ledger")
        try:
            entry(call)
        except (KeyError, TypeError, ValueError) as error:
            reason = f"call {self.calls} of the trace, {name}: a field is missing or wrong ({error})"
            raise TraceError(reason) from error

    # --- one method per recorded call ----------------------------------------------------------------------------

    def on_admit(self, call: dict[str, Any]) -> None:
        request = _Request(call["tokens"], call.get("namespace"), budget=self.budget_of(call))
        self.requests += 1
        self.by_row[call["row"]] = request
        self.open(request)

    def on_extend(self, call: dict[str, Any]) -> None:
        for request in self.live([call["row"]]):
            request.known = max(request.known, call["upto"])
            self.extend_until_it_fits(request)

    def on_plan(self, call: dict[str, Any]) -> None:
        self.resume()
        reserve = min(call["reserve"], self.ledger.config.largest_reserve_tokens)
        while requests := self.live(call["rows"]):
            try:
                self.ledger.plan_decode([request.row for request in requests], reserve)
                return
            except OutOfPages as short:
                if not self.preempt(short, keep=None):
                    return

    def on_commit(self, call: dict[str, Any]) -> None:
        for row, committed in zip(call["rows"], call["committed"], strict=True):
            if (request := self.by_row.get(row)) is None:
                continue
            request.committed = max(request.committed, committed)
            if request.row < 0:
                continue
            upto = max(request.committed, int(self.ledger.committed[request.row]))
            if upto > self.ledger.allocated[request.row]:  # preempted since the step was planned: computed again
                request.known = max(request.known, upto)
                self.extend_until_it_fits(request)
            if request.row >= 0:
                self.ledger.commit([request.row], [request.generation], [upto])

    def on_publish(self, call: dict[str, Any]) -> None:
        for request in self.live([call["row"]]):
            self.ledger.publish(request.row, call["tokens"])

    def on_evict(self, call: dict[str, Any]) -> None:
        self.ledger.evict([request.row for request in self.live(call["rows"]) if not request.fill])

    def on_release(self, call: dict[str, Any]) -> None:
        request = self.by_row.pop(call["row"], None)
        if request is None:
            return
        if request.row >= 0:
            self.ledger.release(request.row)  # of a row in transfer the lease remains
        self.drop(request)
        self.resume()

    def on_begin_op(self, call: dict[str, Any]) -> None:
        rows = [request.row for request in self.live(call["rows"])]
        if rows:
            self.ops[call["op"]] = self.ledger.begin_op(rows, call["kind"])

    def on_end_op(self, call: dict[str, Any]) -> None:
        op = self.ops.pop(call["op"], None)
        if op is not None:
            self.ledger.end_op(op)

    def on_preallocate(self, call: dict[str, Any]) -> None:
        if call.get("ticket") is not None:
            self.on_return(call)
            return
        request = _Request(
            call["tokens"], call.get("namespace"), committed=call["fill"], known=call["fill"],
            budget=self.budget_of(call),
        )  # fmt: skip
        self.requests += 1
        self.by_row[call["row"]] = request
        try:
            got = self.ledger.preallocate(
                request.tokens, call["fill"], namespace=request.namespace, host=self.ledger.tiers is not None,
                budget_pages=request.budget,
            )  # fmt: skip
        except (OutOfPages, OutOfRows):
            self.waiting.append(request)
            return
        request.row, request.generation, request.fill = got.row, got.generation, call["fill"]
        self.leased[call["row"]] = request

    def on_land(self, call: dict[str, Any]) -> None:
        if (request := self.leased.pop(call["row"], None)) is None:
            return
        request.fill = 0
        try:
            self.ledger.land(request.row, request.generation)
        except OutOfPages:  # no slots: it is computed here when there are
            self.ledger.fail_transfer(request.row, request.generation)
            request.row = -1
            self.waiting.append(request)

    def on_fail_transfer(self, call: dict[str, Any]) -> None:
        self.forget(call["row"])
        if (request := self.leased.get(call["row"])) is not None:
            self.ledger.fail_transfer(request.row, request.generation, final=call["final"])
            if call["final"]:
                del self.leased[call["row"]]

    def on_quarantine(self, call: dict[str, Any]) -> None:
        self.forget(call["row"])
        if (request := self.leased.pop(call["row"], None)) is not None:
            self.ledger.quarantine(request.row, request.generation)

    def on_end_quarantine(self, call: dict[str, Any]) -> None:
        self.ledger.end_quarantine()

    def forget(self, row: int) -> None:
        if (request := self.by_row.pop(row, None)) is not None:
            self.drop(request)

    def on_reset_cache(self, call: dict[str, Any]) -> None:
        self.ledger.reset_cache()

    def on_forget_cache(self, call: dict[str, Any]) -> None:
        self.ledger.forget_cache()

    # --- pressure ------------------------------------------------------------------------------------------------

    def open(self, request: _Request) -> bool:
        """Give a request a row and, if it has been further already, pages up to there."""
        if request.ticket is not None:
            return self.reopen(request, request.ticket)
        try:
            got = self.ledger.admit(request.tokens, namespace=request.namespace, budget_pages=request.budget)
        except (OutOfRows, OutOfPages):
            self.waiting.append(request)
            return False
        request.row, request.generation = got.row, got.generation
        request.known = max(request.known, request.committed, got.cached_tokens)
        request.committed = max(request.committed, got.cached_tokens)
        try:
            self.recompute(request)
        except OutOfPages as short:
            self.close(request, short)
            return False
        return True

    def recompute(self, request: _Request) -> None:
        """Chunk by chunk up to where the request has been, as a scheduler would. Raises `OutOfPages`."""
        at, chunk = int(self.ledger.committed[request.row]), self.ledger.config.chunk_tokens or request.known
        while at < request.known:
            at = min(request.known, at + chunk)
            self.ledger.extend(request.row, at)
            self.ledger.commit([request.row], [request.generation], [at])
            self.ledger.evict([request.row])

    def extend_until_it_fits(self, request: _Request) -> None:
        while request.row >= 0:
            try:
                self.ledger.extend(request.row, request.known)
                return
            except OutOfPages as short:
                self.preempt(short, keep=request)

    def preempt(self, short: OutOfPages, keep: _Request | None) -> bool:
        """Fewest outputs first, then the youngest; `keep` only if there is nobody else. False: nobody can go."""
        live = [r for r in self.by_row.values() if r.row >= 0 and not r.fill]
        others = [r for r in live if r is not keep] or live
        if not others:
            return False
        self.preemptions += 1
        self.close(min(reversed(others), key=lambda r: r.outputs), short)
        return True

    def resume(self) -> None:
        """Oldest first, as long as the oldest fits."""
        while self.waiting:
            request = self.waiting.pop(0)
            if not self.open(request):
                self.waiting.remove(request)
                self.waiting.insert(0, request)
                return
            self.resumed += 1

    def summary(self) -> dict[str, Any]:
        stats = self.ledger.stats
        pools = self.ledger.report(page_map=False)["pools"]
        queried = stats["queried_tokens"]
        return {
            "calls": self.calls,
            "requests": self.requests,
            "hits": stats["hit_tokens"],
            "queried_tokens": queried,
            "hit_rate": stats["hit_tokens"] / queried if queried else 0.0,
            "preemptions": self.preemptions,
            "resumed": self.resumed,
            "waiting_at_end": len(self.waiting),
            "peak_pages": {name: pool["peak_used"] for name, pool in pools.items()},
            "evicted_pages": self.ledger.tree.evicted_full,
            **self.tier_summary(),
            "violations": self.violations,
        }


def replay_calls(
    config: LedgerConfig,
    calls: Iterable[dict[str, Any]],
    *,
    page_size: int | None = None,
    num_pages: int | None = None,
    swa_pages: int | None = None,
    host_pages: int | None = None,
    evict_policy: str | Any | None = None,
) -> dict[str, Any]:
    """Replay calls. Pools, tiers and slots keep their size in tokens when only the page size changes.

    Returns calls, requests, hits (tokens), queried_tokens, hit_rate, preemptions, resumed, waiting_at_end,
    peak_pages per pool, evicted_pages, violations, and the sizes used; with a host tier `tiers`: pages backed up,
    requests retracted into it and resumed from it, tickets dropped, pages offloaded and loaded back (no calls of their
    own: they follow from the others), and the hits and swaps of the buffers in the recorded run (what a query selects
    is the device's own, the books do not know it). Raises `ConfigError`, `TraceError`.
    """
    p = config.page_size if page_size is None else page_size
    full = max(1, config.full_pages * config.page_size // max(p, 1)) if num_pages is None else num_pages
    # Two pages of slack in the sliding pool's bound do not scale with the page size.
    swa = swa_pages
    if swa is None:
        scaled = -(-config.swa_pages * config.page_size // max(p, 1)) + 2 if config.swa_pages else 0
        swa = config.swa_pages if page_size is None else scaled
    tiers = scaled_tiers(config, p, host_pages)
    sized = replace(config, page_size=p, full_pages=full, swa_pages=swa, tiers=tiers)
    policy = load_policy(evict_policy) if isinstance(evict_policy, str) else evict_policy
    state = _Replay(sized, policy, config.page_size)
    state.run(calls)
    sizes = {"page_size": p, "num_pages": full, "swa_pages": swa}
    if tiers is not None:
        sizes["host_pages"] = tiers.host_pages
    return {**sizes, **state.summary()}
