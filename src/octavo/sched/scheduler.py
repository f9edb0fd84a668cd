"""Continuous batching on exact books: what runs in the next step, decided from host state alone.

One call of `plan` does, in this order:
  1. decode rows: one vectorised ledger call raises the watermark of all of them, all or nothing (law 11)
  2. prefill chunks of admitted requests, first come first served, under the token budget
  3. admission of waiting requests: prefix match, budget in pages of each pool, first chunk

When pages are short the ledger itself drops unlocked cached pages and, with a host tier, offloads what only retracted
requests lock. If that is not enough, the step in flight is settled first (it may finish requests), and only then are
requests retracted: fewest outputs first. They requeue with their tokens and lose nothing.
"""

from __future__ import annotations

import bisect
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from octavo.engine.request import Request, State
from octavo.errors import NeverFits, OctavoError, OutOfPages
from octavo.kv.books import OutOfRows
from octavo.kv.ledger import Ledger
from octavo.kv.pages import ceil_pages
from octavo.kv.sizing import DecodeReserve, full_budget_pages
from octavo.sched.batch import DecodeRow, PrefillChunk, StepPlan


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of one step. `max_batched_tokens` counts drafted, decoded and prefilled tokens together."""

    max_running: int
    max_batched_tokens: int
    context_tokens: int
    prefill_chunk_tokens: int
    reserve: DecodeReserve
    settle_first: bool = False  # the drafter looks at host tokens (n-gram): rows are settled before they are planned


class SettleFirst(Exception):
    """The plan needs the result of the step in flight: settle it and plan again."""


class Scheduler:
    """Owns the queue and the running set; the ledger owns every length."""

    def __init__(
        self,
        config: SchedulerConfig,
        ledger: Ledger,
        *,
        on_fail: Callable[[Request, OctavoError], None],
        on_leave: Callable[[int], None],
    ) -> None:
        """`on_fail` ends a request that cannot go on; `on_leave` hears of a row whose request was retracted."""
        self.config = config
        self.ledger = ledger
        self.waiting: list[Request] = []  # sorted by Request.order
        self.running: list[Request] = []  # rows held, in order of admission
        self.parked: list[Request] = []  # rows held while their KV moves between servers: never planned
        self.busy_elsewhere: Callable[[], bool] = lambda: False  # rows or pages will come back without a step
        self.before_publish: Callable[[int], None] = lambda row: None  # pages of this row are about to enter the tree
        self.keep: Callable[[Request], None] | None = None  # with a host tier: retract, KV stays there
        self.revive: Callable[[Request], None] | None = None  # … and bring it back; raises OutOfRows, OutOfPages
        self._revived = False  # a request came back while this step was planned
        self.preemptions = 0
        self._on_fail = on_fail
        self._on_leave = on_leave
        self._started: deque[Request] = deque()  # admitted since the last launch: the core prepares their rows

    # -- queue ---------------------------------------------------------------------------------------------------

    def enqueue(self, request: Request) -> None:
        bisect.insort(self.waiting, request, key=lambda r: r.order)

    def remove(self, request: Request) -> None:
        """Forget a request that was aborted or finished."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        elif request in self.parked:
            self.parked.remove(request)

    def park(self, request: Request) -> None:
        """The request holds a row and nothing is to be computed for it now."""
        self.remove(request)
        self.parked.append(request)

    def unpark(self, request: Request) -> None:
        """The KV of a parked request is here: it decodes from now on."""
        self.parked.remove(request)
        request.move(State.DECODE)
        self.running.append(request)

    def take_started(self) -> list[Request]:
        started = list(self._started)
        self._started.clear()
        return started

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    # -- planning ------------------------------------------------------------------------------------------------

    def plan(self, draft_tokens: int, *, inflight: bool) -> StepPlan | None:
        """The next step, or None if nothing can run now.

        Raises SettleFirst when a step is in flight and its result is needed to find pages or rows.
        """
        self._revived = False
        draft_tokens = self._beside_prompts(draft_tokens)
        while True:
            decodes = self._decode_rows(draft_tokens)
            try:
                if decodes:
                    rows = np.fromiter((d.row for d in decodes), dtype=np.int64, count=len(decodes))
                    self.ledger.plan_decode(rows, self.config.reserve)
                break
            except OutOfPages as short:
                if inflight:
                    raise SettleFirst from short
                self._retract_one(short)
        draft = min(draft_tokens, max((d.draft_limit for d in decodes), default=0))
        budget = self.config.max_batched_tokens - len(decodes) * (1 + draft)
        prefills = self._prefill_chunks(budget)
        if not decodes and not prefills:
            if self._revived:
                return self.plan(draft_tokens, inflight=inflight)
            return self._nothing_planned(draft_tokens, inflight)
        return StepPlan(tuple(decodes), tuple(prefills), draft, self._max_kv_tokens(decodes, prefills))

    def _beside_prompts(self, draft_tokens: int) -> int:
        """Where prompts want a part of the step, drafts leave them half of it: many long ones would take all."""
        decoding = self._num_decoding()
        prompts = len(self.running) > decoding or (self.waiting and self._has_slot())
        if decoding == 0 or not prompts:
            return draft_tokens
        return max(0, min(draft_tokens, self.config.max_batched_tokens // 2 // decoding - 1))

    def _decode_rows(self, draft_tokens: int) -> list[DecodeRow]:
        context = self.config.context_tokens
        rows: list[DecodeRow] = []
        for request in self.running:
            if request.state is not State.DECODE or request.remaining_tokens <= 0:
                continue
            if request.inflight_steps and (self.config.settle_first or request.grammar is not None):
                continue
            if self.ledger.tiers is not None and self.ledger.known[request.row] > self.ledger.committed[request.row]:
                continue  # its last chunk is in flight and not backed up: no room for selected pages beside it
            room = context - len(request.tokens) - request.inflight_outputs
            limit = max(0, min(draft_tokens, request.remaining_tokens - 1, room))
            rows.append(DecodeRow(request, request.row, request.generation, limit))
        return rows

    def _prefill_chunks(self, budget_tokens: int) -> list[PrefillChunk]:
        chunks: list[PrefillChunk] = []
        for request in self.running:
            if request.state is State.PREFILL and budget_tokens > 0:
                chunk = self._next_chunk(request, budget_tokens)
                if chunk is None:
                    return chunks
                chunks.append(chunk)
                budget_tokens -= chunk.num_tokens
        while budget_tokens > 0 and self.waiting and self._has_slot():
            request = self.waiting[0]
            if request.kept is not None:
                if not self._revive(request):
                    break
                continue
            if not self._admit(request):
                break
            chunk = self._next_chunk(request, budget_tokens)
            if chunk is None:
                self._give_back(request, publish=False)
                break
            chunks.append(chunk)
            budget_tokens -= chunk.num_tokens
        return chunks

    def _num_decoding(self) -> int:
        return sum(1 for r in self.running if r.state is State.DECODE)

    def _has_slot(self) -> bool:
        return len(self.running) + len(self.parked) < self.config.max_running

    def _next_chunk(self, request: Request, budget_tokens: int) -> PrefillChunk | None:
        """Pages for the request's next chunk, or None if the pools are short now."""
        start = request.launched_tokens
        end = min(request.prefill_target, start + min(budget_tokens, self.config.prefill_chunk_tokens))
        try:
            self.ledger.extend(request.row, end)
        except OutOfPages:
            return None
        return PrefillChunk(request, request.row, request.generation, start, end, end == request.prefill_target)

    def _admit(self, request: Request) -> bool:
        """Give the head of the queue a row if its whole prompt and the prompts being computed fit."""
        needed: dict[str, int] = {}
        for tokens, held in [*self._prefilling(), (len(request.tokens), 0)]:
            for pool, pages in self.ledger.pages_to_admit(tokens, self.config.reserve, cached_tokens=held).items():
                needed[pool] = needed.get(pool, 0) + pages
        decoding = self._num_decoding()
        for pool, pages in needed.items():
            # one page of growth for each decoding row: admitting somebody only to retract them helps nobody
            if self.running and pages + decoding > self.ledger.available(pool):
                return False
        try:
            budget = self.budget_pages(request) if self.ledger.tiers is not None else 0
            admission = self.ledger.admit(request.tokens, namespace=request.namespace, budget_pages=budget)
        except (OutOfRows, OutOfPages):
            return False
        self.waiting.pop(0)
        request.attach(admission.row, admission.generation, admission.cached_tokens)
        if request.scheduled_s is None:
            request.scheduled_s = time.monotonic()
        self.running.append(request)
        self._started.append(request)
        return True

    def budget_pages(self, request: Request) -> int:
        """Host pages that the request may come to hold: they are promised to it, for KV is never computed twice."""
        reserve, p = self.config.reserve.tokens, self.ledger.page_size
        return full_budget_pages(request.prompt_tokens, request.max_tokens, self.config.context_tokens, reserve, p)

    def _revive(self, request: Request) -> bool:
        """Bring a retracted request's KV back if there is room for it and a page of growth for everybody."""
        decoding = self._num_decoding()
        reserve = ceil_pages(self.config.reserve.tokens, self.ledger.page_size) + 1
        if self.running and request.kept is not None and self.ledger.tiers is not None:
            need = self.ledger.tiers.pages_to_resume(request.kept.ticket) + reserve + decoding
            if need > self.ledger.available("logical"):
                return False
        try:
            if self.revive is not None:
                self.revive(request)
        except (OutOfRows, OutOfPages):
            return False
        if request in self.waiting:
            self.waiting.remove(request)
            self.running.append(request)
            self._revived = True
        return True

    def _prefilling(self) -> list[tuple[int, int]]:
        """(tokens to compute, tokens that have pages) of the prompts being computed."""
        return [
            (r.prefill_target, int(self.ledger.allocated[r.row])) for r in self.running if r.state is State.PREFILL
        ]

    def _max_kv_tokens(self, decodes: list[DecodeRow], prefills: list[PrefillChunk]) -> int:
        """Upper bound of every slot the step touches: what is allocated is what may be written (law 9)."""
        rows = [d.row for d in decodes]
        longest = int(self.ledger.allocated[rows].max()) if rows else 0
        return max(longest, max((c.end for c in prefills), default=0))

    # -- pressure ------------------------------------------------------------------------------------------------

    def _nothing_planned(self, draft_tokens: int, inflight: bool) -> StepPlan | None:
        """Nobody could move: fine if something is in flight or nobody is here, else make room and try again."""
        if inflight or self.busy_elsewhere():
            return None
        stuck = [r for r in self.running if r.state is State.PREFILL]
        if stuck:
            self._retract_one(OutOfPages("full", 1, self.ledger.available("full")))
            return self.plan(draft_tokens, inflight=False)
        kept = [r for r in self.waiting if r.kept is not None] if not self.running else []
        if any(self._revive(request) for request in kept):
            return self.plan(draft_tokens, inflight=False)  # it holds the host pages that the head of the queue needs
        if self.waiting and not self.running:
            # an idle engine that cannot admit its head of queue never will
            request = self.waiting.pop(0)
            self._on_fail(request, NeverFits(f"request {request.call_id}: {len(request.tokens)} tokens do not fit"))
            return self.plan(draft_tokens, inflight=False)
        return None

    def _retract_one(self, short: OutOfPages) -> None:
        """Take the pages of the active request with the fewest outputs (ties: the latest to arrive)."""
        active = [r for r in self.running if r.active]
        if len(active) == 1 and self.busy_elsewhere():
            self._give_back(active[0], publish=True)  # it goes on when the pages that others wait for are back
            active[0].preemptions += 1
            self.preemptions += 1
            return
        if len(active) == 1:
            request = active[0]
            self.running.remove(request)
            self._on_fail(
                request,
                NeverFits(
                    f"request {request.call_id} has {len(request.tokens)} tokens and cannot grow: {short};"
                    " raise --num-pages or --kv-memory, or lower max_tokens"
                ),
            )
            return
        oldest = min(active, key=lambda r: r.order)  # always spared: somebody makes progress
        victim = min(
            (r for r in active if r is not oldest), key=lambda r: (r.num_outputs, tuple(-x for x in r.order))
        )
        self._give_back(victim, publish=True)
        victim.preemptions += 1
        self.preemptions += 1

    def _give_back(self, request: Request, *, publish: bool) -> None:
        row = request.row
        if self.keep is not None and publish and request.state is State.DECODE:
            self.keep(request)
            if request not in self.running:
                return  # it ended: the host tier could not take it
        else:
            if publish:
                self.before_publish(row)
            self.ledger.release(row, request.tokens if publish else None)
        self.running.remove(request)
        if request in self._started:
            self._started.remove(request)  # the runner has not heard of it yet
        else:
            self._on_leave(row)
        request.detach(State.WAITING)
        self.enqueue(request)
