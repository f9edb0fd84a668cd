"""The engine: plan → run → commit, once per `step`.

    step()                        non-overlap                     overlap (one-step lag)
      plan     scheduler+ledger   N                               N+1, while N is in flight
      launch   runner             N                               N+1
      settle   commit to books    N                               N

`settle` is the only place where results become host knowledge: it advances the books, appends tokens to requests,
finds stops and releases rows. A request may end while a later step names its row: the ledger keeps its pages until
that step has drained (law 14), and the step's result is dropped by its generation.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from octavo.backend.results import HostLogprobs, StepHandle, StepResult
from octavo.config import EngineConfig
from octavo.engine.output import Delta, OutputProcessor, TokenLogprob
from octavo.engine.request import ChoiceOutput, EngineRequest, Request, State
from octavo.engine.setup import Parts, build
from octavo.engine.stats import EngineStats, StatsKeeper
from octavo.errors import (
    ContextLengthExceeded,
    HostTierLost,
    LawViolation,
    OctavoError,
    QueueFull,
    RequestError,
)
from octavo.kv.balance import check as check_books
from octavo.kv.report import held_pages, sliding_report
from octavo.kv.sizing import PoolSizes
from octavo.ops.random_bits import request_seed
from octavo.sched.batch import StepPlan
from octavo.sched.scheduler import Scheduler, SchedulerConfig, SettleFirst
from octavo.spec.metas import past_draft_limit


class EngineCore:
    """One model, one set of books, one loop. Not thread-safe: one thread calls it."""

    def __init__(
        self, config: EngineConfig, parts: Parts | None = None, *, side: Callable[[EngineCore], Any] | None = None
    ) -> None:
        """Load the model and size the pools. Raises ConfigError or ModelError. `parts` injects a built model, `side`
        the half of a prefill/decode pair that `config.role` would make."""
        self.config = config
        parts = build(config) if parts is None else parts
        self.parts = parts
        self.ledger, self.runner = parts.ledger, parts.runner
        self.tokenizer = parts.tokenizer
        self.model_name = parts.model_name
        self.max_model_len = parts.max_model_len
        self.vocab_size = parts.vocab_size
        self._overlap = config.overlap_on
        self._adaptive = parts.adaptive
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_running=config.max_running,
                max_batched_tokens=config.max_batched_tokens,
                prefill_chunk_tokens=parts.chunk_tokens or config.prefill_chunk_tokens,
                context_tokens=parts.max_model_len,
                reserve=parts.reserve,
                settle_first=parts.drafter is not None and parts.drafter.needs_host_tokens,
            ),
            parts.ledger,
            on_fail=self._fail,
            on_leave=parts.runner.end,
        )
        self.scheduler.before_publish = self._before_publish
        self._requests: dict[str, list[Request]] = {}
        self._inflight: StepHandle | None = None
        self._ready: list[ChoiceOutput] = []  # outputs made outside a settle: failures, aborts
        self._sequence = 0
        self._settled_s: float | None = None  # when the last decode step was settled
        self._stats = StatsKeeper()
        self._peak = PoolSizes(0, 0)  # pages held when the full pool's were most; kept for two pools only
        self._outputs = OutputProcessor(parts.tokenizer, parts.tokenizer.eos_ids)
        self.tiers = parts.tiers
        if self.tiers is not None:
            self.scheduler.keep, self.scheduler.revive = self._keep, self._revive
        self._stalled = False  # nothing moves before a message, a transfer or a call comes in
        self.side: Any = None
        if side is None and config.role != "both":
            from octavo.disagg.setup import make_side

            side = make_side
        if side is not None:
            self.side = side(self)
            self.scheduler.busy_elsewhere = self.side.busy_elsewhere

    # -- requests ------------------------------------------------------------------------------------------------

    def add_request(self, call: EngineRequest) -> None:
        """Queue a call. Raises RequestError, ContextLengthExceeded, NeverFits or QueueFull; then nothing changed."""
        params = call.params
        params.check(self.vocab_size)
        prompt = len(call.prompt_token_ids)
        if call.request_id in self._requests:
            raise RequestError(f"request id {call.request_id!r} is in use", param="request_id")
        if prompt == 0:
            raise RequestError("the prompt is empty: at least one token is needed", param="prompt")
        bad = next((t for t in call.prompt_token_ids if not 0 <= t < self.vocab_size), None)
        if bad is not None:
            raise RequestError(f"token id {bad} is outside the vocabulary (0 … {self.vocab_size - 1})", param="prompt")
        if self.side is not None:
            self.side.check(call)
            if params.prompt_logprobs is not None:
                raise RequestError(f"prompt_logprobs: not with --role {self.config.role}", param="prompt_logprobs")
        elif call.bootstrap is not None:
            raise RequestError("bootstrap_room: this server has --role both", param="bootstrap_room")
        room = self.max_model_len - prompt
        if room < 1:
            raise ContextLengthExceeded(
                f"the prompt has {prompt} tokens; the context holds {self.max_model_len}, the answer included",
                param="prompt",
            )
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        if self.config.role == "prefill":
            max_tokens = min(max_tokens, 1)  # the decode server takes it from there
        limit = getattr(self.config, "max_queue", None)  # a server's limit; a library call waits as long as it likes
        free_slots = max(0, self.config.max_running - len(self.scheduler.running))  # these do not wait
        waiting = len(self.scheduler.waiting) + (self.side.waiting if self.side is not None else 0)
        if limit is not None and params.n > limit + self.config.max_running:
            most = limit + self.config.max_running
            raise RequestError(f"n: got {params.n}; this server takes at most {most} choices of a call", param="n")
        if limit is not None and waiting + params.n > limit + free_slots:
            raise QueueFull(f"{waiting} requests wait; at most {limit} may")
        self.ledger.can_ever_fit(prompt, max_tokens, self.parts.reserve)
        grammar = self.parts.grammars.compile(params) if params.structured is not None else None
        choices = []
        for choice in range(params.n):
            seed = params.seed if params.seed is not None else request_seed(self.config.seed, call.request_id)
            request = Request(call, choice, max_tokens=max_tokens, seed=seed, sequence=self._sequence)
            self._sequence += 1
            request.output = self._outputs.start(
                params, max_tokens=max_tokens, prompt_token_ids=call.prompt_token_ids, index=choice
            )
            request.grammar = grammar.matcher() if grammar is not None else None
            choices.append(request)
        self._requests[call.request_id] = choices
        self._stalled = False
        self._stats.prompt(prompt)
        for request in choices:
            if max_tokens == 0 and params.prompt_logprobs is None:
                self._finish(request, "length")
            elif self.side is not None:
                self.side.arrive(request, call)
            else:
                self.scheduler.enqueue(request)

    def abort(self, request_id: str) -> None:
        """End every choice of a call now; its pages return when its steps in flight have drained. Unknown: nothing."""
        self._stalled = False
        for request in self._requests.get(request_id, ()):
            if request.state is not State.FINISHED:
                self._finish(request, "abort")

    def has_work(self) -> bool:
        if self._ready or self._inflight is not None or (self.scheduler.has_work and not self._stalled):
            return True
        return self.side is not None and bool(self.side.has_news())

    def patience_s(self) -> float | None:
        """While there is no work: seconds until there may be some without anybody calling. None: never."""
        return None if self.side is None else self.side.patience_s()

    # -- the loop ------------------------------------------------------------------------------------------------

    def step(self) -> list[ChoiceOutput]:
        """One iteration; returns what became known: text, tokens, ends. [] when there is nothing to do."""
        if self.side is not None:
            self.side.poll()
        if self.tiers is not None:
            self.tiers.check(self._everybody(), self.fail)
        plan = self._plan()
        handle = self._launch(plan) if plan is not None else None
        if self._overlap:
            settled, self._inflight = self._inflight, handle
        else:
            settled = handle
        if settled is not None:
            self._settle(settled)
        self._stalled = self.side is not None and plan is None and settled is None
        if self.parts.capacity is not None:
            self._peak = max(self._peak, held_pages(self.ledger))
        if self.config.check_books:
            self._check_books()
        outputs, self._ready = self._ready, []
        return outputs

    def _plan(self) -> StepPlan | None:
        if not self.scheduler.has_work:
            return None
        drafts = self._draft_tokens()
        try:
            return self.scheduler.plan(drafts, inflight=self._inflight is not None)
        except SettleFirst:
            self._settle_inflight()
            return self.scheduler.plan(drafts, inflight=False)

    def _draft_tokens(self) -> int:
        if self.parts.drafter is None:
            return 0
        decoding = [r for r in self.scheduler.running if r.state is State.DECODE]
        most = self.parts.drafter.max_draft_tokens
        drafts = most if self._adaptive is None else self._adaptive.choose(len(decoding))
        if self.tiers is not None:
            longest = max((len(r.tokens) for r in decoding), default=0)
            drafts = min(drafts, self.tiers.draft_limit(longest + self.parts.reserve.tokens))
        return drafts

    def _launch(self, plan: StepPlan) -> StepHandle:
        for request in self.scheduler.take_started():
            self.runner.begin(request, request.output.ban_ids)
        op = self.ledger.begin_op(plan.rows, "step")
        started_s = time.perf_counter()
        handle = self.runner.launch(plan)
        handle.op, handle.started_s = op, started_s
        for decode in plan.decodes:
            decode.request.inflight_steps += 1
            decode.request.inflight_outputs += 1
        for chunk in plan.prefills:
            request = chunk.request
            request.inflight_steps += 1
            request.launched_tokens = chunk.end
            if chunk.final:
                request.move(State.DECODE)
                request.inflight_outputs += 1
        return handle

    def _settle_inflight(self) -> None:
        handle, self._inflight = self._inflight, None
        if handle is not None:
            self._settle(handle)

    # -- results become knowledge --------------------------------------------------------------------------------

    def _settle(self, handle: StepHandle) -> None:
        result = handle.wait()
        if self.tiers is not None:  # before anybody hears of what was read from a file that is gone
            self.tiers.check(self._everybody(), self.fail)
        plan = handle.plan
        now = time.monotonic()
        lengths = [self._committed(d.row) + len(t) for d, t in zip(plan.decodes, result.tokens, strict=True)]
        lengths += [c.end for c in plan.prefills]
        limit = self.max_model_len
        applied = self.ledger.commit(plan.rows, plan.generations, np.minimum(lengths, limit))
        self.ledger.end_op(handle.op)
        self._back_up(plan.rows)
        self._measure(handle, result)
        for i, decode in enumerate(plan.decodes):
            request = decode.request
            self._land(request, applied[i], outputs=1)
            if applied[i] and request.state is State.DECODE:
                logprobs = self._logprobs(request, result, i)
                self._count_draft(request, result.drafted[i], result.accepted[i])
                self._append(request, result.tokens[i], logprobs, now)
        first = 0
        for i, chunk in enumerate(plan.prefills):
            request = chunk.request
            kept = bool(applied[len(plan.decodes) + i])
            self._land(request, kept, outputs=int(chunk.final))
            if kept and request.active:
                self.runner.write_pending((request.row,))  # pages become others' here: draft KV included
                if request.namespace is None:
                    self.ledger.publish(request.row, request.tokens)
                if i in result.prompts:
                    known, wanted = request.tokens[chunk.start + 1 :], request.params.prompt_logprobs
                    request.learn_prompt(chunk.start, result.prompts[i].entries(known, wanted or 0))
                token = [result.first[i]] if chunk.final else []
                logprobs = _entries(result.first_logprobs, [first] * len(token), token, request)
                held = self.side is not None and self.side.computed(request, token[0] if token else None, logprobs)
                if token and not held:
                    self._first_token(request, token, logprobs, now)
            first += int(chunk.final)
        self.ledger.evict(np.array([r.row for r in self.scheduler.running], dtype=np.int64))

    # -- the host tier (HiSparse) ----------------------------------------------------------------------------------

    def _everybody(self) -> list[Request]:
        return [request for choices in self._requests.values() for request in choices]

    def _back_up(self, rows: np.ndarray) -> None:
        """Bring what has become final into the host tier; what it can no longer hold ends with an error."""
        if self.tiers is None:
            return
        try:
            self.tiers.back_up(rows)
        except HostTierLost as lost:
            self.tiers.mend(lost, self._everybody(), self.fail)
            self._back_up(rows)

    def _keep(self, request: Request) -> None:
        """Retract a decoding request: its KV stays in the host tier."""
        if self.tiers is None:
            return
        try:
            request.kept = self.tiers.retract(request)
        except HostTierLost as lost:
            self.tiers.mend(lost, self._everybody(), self.fail)
            if request.state is not State.FINISHED:
                self._keep(request)

    def _revive(self, request: Request) -> None:
        if self.tiers is not None and request.kept is not None:
            try:
                self.tiers.resume(request, request.kept)
            except HostTierLost as lost:
                self.fail(request, lost)

    def _logprobs(self, request: Request, result: StepResult, index: int) -> list[TokenLogprob] | None:
        nodes = None if result.nodes is None else result.nodes[index]
        return _entries(result.logprobs, nodes, result.tokens[index], request)

    def _committed(self, row: int) -> int:
        return int(self.ledger.committed[row])

    def _land(self, request: Request, applied: bool, *, outputs: int) -> None:
        """A step that named the request has drained. After a retraction the counters belong to a later life."""
        request.inflight_steps = max(0, request.inflight_steps - 1)
        if applied:
            request.inflight_outputs = max(0, request.inflight_outputs - outputs)

    def _first_token(self, request: Request, token: list[int], logprobs: list[TokenLogprob] | None, now: float) -> None:
        """The prompt is done. With max_tokens 0 it was computed for its log-probabilities alone."""
        if request.max_tokens == 0:
            self._finish(request, "length")
        else:
            self._append(request, token, logprobs, now)

    def _append(self, request: Request, tokens: list[int], logprobs: list[TokenLogprob] | None, now: float) -> None:
        """Give a request its accepted run; the earliest stop inside it wins, the rest is dropped."""
        delta, reason, error = self._grow(request, tokens, logprobs, now)
        if reason is not None:
            self._release(request, reason, publish=True, error=error)
        if reason is not None or delta.text or delta.token_ids:
            self._emit(request, delta, reason, error)

    def _grow(
        self, request: Request, tokens: list[int], logprobs: list[TokenLogprob] | None, now: float
    ) -> tuple[Delta, str | None, OctavoError | None]:
        """Tokens into the answer: what is new in it, why it ends (None: it does not), and with which error."""
        delta = request.output.append(tokens, logprobs, request.grammar)
        request.tokens.extend(tokens[: delta.kept_tokens])
        self._stats.tokens(request, delta.kept_tokens, now)
        reason = delta.finish_reason
        error: OctavoError | None = None
        if reason == "error" and request.grammar is not None:
            error = request.grammar.failure(request.call_id)
        elif reason is None and len(request.tokens) >= self.max_model_len:
            delta, reason = self._full(request, delta)
        return delta, reason, error

    def _full(self, request: Request, delta: Delta) -> tuple[Delta, str]:
        """End an answer at the end of the context, which its output cannot see."""
        tail = request.output.finish("length")
        return replace(delta, text=delta.text + tail.text, finished=True, finish_reason="length"), "length"

    def _emit(self, request: Request, delta: Delta, reason: str | None, error: OctavoError | None = None) -> None:
        if request.answered:
            return
        self._ready.append(
            ChoiceOutput(
                request_id=request.call_id,
                index=request.choice,
                text=delta.text,
                token_ids=list(delta.token_ids),
                logprobs=None if delta.logprobs is None else list(delta.logprobs),
                finished=reason is not None,
                finish_reason=reason,
                stop_reason=delta.stop_reason,
                prompt_tokens=request.prompt_tokens,
                cached_tokens=request.cached_tokens,
                metrics=self._stats.request_metrics(request, self.config.page_size) if reason is not None else None,
                error=error,
                prompt_logprobs=request.take_prompt_logprobs(),
            )
        )

    def _finish(self, request: Request, reason: str, error: OctavoError | None = None) -> None:
        """End a request outside its own settle: abort, failure, nothing to generate."""
        delta = request.output.finish(reason)
        self._release(request, reason, publish=reason == "abort", error=error)
        self._emit(request, delta, reason, error)

    def _before_publish(self, row: int) -> None:
        """Pages of the row are about to enter the tree: their draft KV must be whole."""
        if self.ledger.config.prefix_cache:
            self.runner.write_pending((row,))

    def _release(
        self, request: Request, reason: str, *, publish: bool, error: OctavoError | None = None
    ) -> None:
        self.scheduler.remove(request)
        row = request.row
        if row >= 0:
            published = publish and request.namespace is None
            if published:
                self._before_publish(row)
            self.ledger.release(row, request.tokens if published else None)
            if request.state is not State.TRANSFER:
                self.runner.end(row)
        elif request.kept is not None and self.tiers is not None:
            self.tiers.drop(request.kept)
            request.kept = None
        request.finish_reason = reason
        request.detach(State.FINISHED)
        choices = self._requests[request.call_id]
        if all(r.state is State.FINISHED for r in choices):
            del self._requests[request.call_id]
        self._stats.finished(request, reason)
        if self.side is not None:
            self.side.left(request, reason, error)

    # -- prefill and decode on different servers (octavo.disagg) -------------------------------------------------

    def fail(self, request: Request, error: OctavoError) -> None:
        """End one choice with an error, whatever it is doing. Finished already: nothing."""
        if request.state is not State.FINISHED:
            self._finish(request, "error", error)

    def answer_handover(self, request: Request, token: int, logprobs: list[TokenLogprob] | None) -> str:
        """The prompt is computed: the client of this half has its answer now, the row stays until it has been read.
        Returns the finish reason."""
        delta, reason, error = self._grow(request, [token], logprobs, time.monotonic())
        reason = reason or "length"
        self._emit(request, delta, reason, error)
        request.answered = True
        return reason

    def finish_handover(self, request: Request, reason: str) -> None:
        """A decode server has read the row."""
        self._release(request, reason, publish=True)

    def start_landed(self, request: Request, token: int, logprobs: list[TokenLogprob] | None) -> None:
        """The KV of a parked request has landed in the books: decode behind its first token."""
        if self.tiers is not None:
            try:
                self.tiers.load_landed(request)
            except HostTierLost as lost:
                self.fail(request, lost)
                return
        self.scheduler.unpark(request)
        self.runner.resume(request, request.output.ban_ids, token)
        self._append(request, [token], logprobs, time.monotonic())
        if request.active:
            self.ledger.publish(request.row, request.tokens)

    def _fail(self, request: Request, error: OctavoError) -> None:
        self._finish(request, "error", error)

    # -- measuring -----------------------------------------------------------------------------------------------

    def _count_draft(self, request: Request, drafted: int, accepted: int) -> None:
        metrics = request.output.output.metrics
        metrics.decode_steps += 1
        if drafted:
            metrics.speculation.add(drafted, accepted)
            self._stats.draft(drafted, accepted)

    def _measure(self, handle: StepHandle, result: StepResult) -> None:
        """Tell the adaptive length what a decode step cost; under overlap that is the time between two results."""
        if self._adaptive is None or not handle.plan.decodes:
            self._settled_s = None
            return
        now = time.perf_counter()
        begun = self._settled_s if self._overlap else handle.started_s
        self._settled_s = now
        usual = not handle.plan.prefills and not handle.caught_up_tokens  # neither prompts nor what others left behind
        timed = now - begun if begun is not None and usual else None
        self._adaptive.record(len(handle.plan.decodes), result.drafted, result.accepted, timed, handle.sources)

    def _check_books(self) -> None:
        for violation in check_books(self.ledger):
            self._stats.violations += 1
            raise violation

    def report(self) -> dict[str, Any]:
        """The books, the queue and the speculation, JSON-able."""
        books = self.ledger.report()
        by_row = {r.row: r for r in (*self.scheduler.running, *self.scheduler.parked)}
        for line in books["rows"]:
            owner = by_row.get(line["row"])
            line["request_id"] = owner.call_id if owner is not None else None
            line["choice"] = owner.choice if owner is not None else None
            line["tokens"] = len(owner.tokens) if owner is not None else None
        capacity = self.parts.capacity
        return {
            **books,
            **({} if capacity is None else {
                "sliding": sliding_report(self.ledger, self.parts.page_bytes, self._peak, capacity)
            }),
            **({} if self.tiers is None else {"tiers": self.tiers.report()}),
            "scheduler": {
                "running": len(self.scheduler.running),
                "waiting": len(self.scheduler.waiting),
                "preemptions": self.scheduler.preemptions,
            },
            "speculation": {**self._stats.speculation(), "past_draft_limit": past_draft_limit(self.parts.drafter)},
            **({} if self.side is None else {"disaggregation": {**self.side.report(), **self.side.tally.snapshot()}}),
        }

    def stats(self) -> EngineStats:
        stats = self._stats.snapshot(self.ledger, self.scheduler)
        if self.tiers is not None:
            stats = replace(stats, tiers=self.tiers.report())
        if self.side is None:
            return stats
        return replace(stats, waiting=stats.waiting + self.side.waiting, transfers=self.side.tally.snapshot())

    def flush_cache(self) -> bool:
        """Drop every cached prefix. False while requests run (their prefixes stay)."""
        if self.scheduler.running or self.scheduler.parked:
            return False
        self._settle_inflight()
        self.ledger.reset_cache()
        return True

    def close(self) -> None:
        """Abort what runs, drain what is in flight and check that the books close. Raises LawViolation if not."""
        for request_id in list(self._requests):
            self.abort(request_id)
        self._settle_inflight()
        if self.side is not None:
            self.side.close()
        self._check_books()
        held = self.ledger.live_rows()
        if len(held):
            raise LawViolation(5, "rows are still held at rest", row=int(held[0]), rows=held.tolist())
        if self.tiers is not None:
            self.tiers.close()
        if self.parts.trace is not None:
            if self.tiers is not None:
                self.tiers.record_counters(self.parts.trace)
            self.parts.trace.close()


def _entries(
    logprobs: HostLogprobs | None, nodes: list[int] | None, tokens: list[int], request: Request
) -> list[TokenLogprob] | None:
    """The log-probabilities of the given flat nodes, in order; None if the request wants none."""
    wanted = request.params.logprobs
    if logprobs is None or nodes is None or wanted is None:
        return None
    return logprobs.entries(tokens, wanted, nodes)
