"""A request (one choice of one call) and the moves its state may make."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from octavo.engine.grammar import Matcher
from octavo.engine.output import PromptLogprobs, RequestMetrics, RequestOutputState, TokenLogprob
from octavo.errors import OctavoError
from octavo.params import SamplingParams

if TYPE_CHECKING:
    from octavo.engine.tiers import Kept


class State(Enum):
    WAITING = "waiting"  # in the queue, holds no row (also after a retraction)
    PREFILL = "prefill"  # holds a row, part of its known tokens has no KV yet
    DECODE = "decode"  # every known token but the newest has KV, or that is in flight
    TRANSFER = "transfer"  # holds a row whose KV comes from a prefill server
    HANDOVER = "handover"  # prompt computed; the row is held until a decode server has read it
    FINISHED = "finished"


LEGAL_MOVES: dict[State, frozenset[State]] = {
    State.WAITING: frozenset({State.PREFILL, State.TRANSFER, State.FINISHED}),
    State.PREFILL: frozenset({State.DECODE, State.WAITING, State.FINISHED}),
    State.DECODE: frozenset({State.WAITING, State.HANDOVER, State.FINISHED}),
    State.TRANSFER: frozenset({State.DECODE, State.FINISHED}),
    State.HANDOVER: frozenset({State.FINISHED}),
    State.FINISHED: frozenset(),
}


class IllegalMove(OctavoError):
    """A request was asked to make a move its state does not allow: a fault of the engine, never of a user."""

    code = "illegal_request_move"


@dataclass(frozen=True)
class Bootstrap:
    """Where the two halves of a prefill/decode pair meet: the prefill server's address, one room a choice."""

    host: str
    port: int
    rooms: list[int]


@dataclass(frozen=True)
class EngineRequest:
    """What a caller hands in: one prompt, `params.n` choices."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival_s: float = field(default_factory=time.monotonic)
    priority: int = 0  # smaller runs earlier
    bootstrap: Bootstrap | None = None  # with --role prefill and decode


@dataclass(frozen=True, slots=True)
class ChoiceOutput:
    """What one step made known about one choice: new text and tokens, and at the end why it ended.

    `text`, `token_ids`, `logprobs` are the new parts. `metrics` is there when `finished`; `error` when
    `finish_reason` is "error".
    """

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None
    finished: bool
    finish_reason: str | None
    stop_reason: str | int | None
    prompt_tokens: int
    cached_tokens: int
    metrics: RequestMetrics | None = None
    error: OctavoError | None = None
    prompt_logprobs: PromptLogprobs | None = None  # once, with the first output of a choice that asked for them

    @property
    def delta(self) -> str:
        """The new text."""
        return self.text


class Request:
    """One choice while it is in the engine. `tokens` is prompt + output; KV exists for a prefix of it."""

    __slots__ = (
        "answered",
        "arrival_s",
        "cached_tokens",
        "call_id",
        "choice",
        "finish_reason",
        "first_token_s",
        "generation",
        "grammar",
        "inflight_outputs",
        "inflight_steps",
        "kept",
        "launched_tokens",
        "max_tokens",
        "namespace",
        "output",
        "params",
        "prefill_target",
        "preemptions",
        "priority",
        "prompt_logprobs",
        "prompt_tokens",
        "row",
        "scheduled_s",
        "seed",
        "sequence",
        "state",
        "tokens",
    )

    def __init__(self, call: EngineRequest, choice: int, *, max_tokens: int, seed: int, sequence: int) -> None:
        self.call_id = call.request_id
        self.choice = choice
        self.params = call.params
        self.priority = call.priority
        self.arrival_s = call.arrival_s
        self.sequence = sequence  # order of arrival, breaks ties
        self.tokens: list[int] = list(call.prompt_token_ids)
        self.prompt_tokens = len(self.tokens)
        self.max_tokens = max_tokens
        self.seed = seed
        self.state = State.WAITING
        self.row = -1
        self.generation = -1
        self.launched_tokens = 0  # tokens whose KV is written or in flight, during prefill
        self.prefill_target = len(self.tokens)
        self.inflight_steps = 0
        self.inflight_outputs = 0  # output tokens that steps in flight are sure to add
        self.cached_tokens = 0
        self.preemptions = 0
        self.scheduled_s: float | None = None
        self.first_token_s: float | None = None
        self.finish_reason: str | None = None
        self.answered = False  # its client has the last word already; the row is held for a decode server
        self.output: RequestOutputState  # set by the core
        self.grammar: Matcher | None = None
        self.namespace: str | None = None
        self.kept: Kept | None = None  # retracted into the host tier: what it left there
        self.prompt_logprobs: PromptLogprobs | None = None  # of the first tokens of the prompt; None when handed out
        if self.params.prompt_logprobs is not None:
            self.prompt_logprobs = [None]
            # Nobody's pages match it and its own match nobody: every position is computed, for its hidden state.
            self.namespace = f"prompt logprobs {self.call_id}/{choice}"

    def move(self, state: State) -> None:
        if state not in LEGAL_MOVES[self.state]:
            raise IllegalMove(f"request {self.call_id}/{self.choice}: {self.state.value} -> {state.value}")
        self.state = state

    def learn_prompt(self, start: int, entries: list[TokenLogprob]) -> None:
        """Log-probabilities of the prompt tokens behind position `start` (some may be known from a former life)."""
        if self.prompt_logprobs is not None:
            self.prompt_logprobs[start + 1 :] = entries

    def take_prompt_logprobs(self) -> PromptLogprobs | None:
        """The log-probabilities of the whole prompt, once."""
        taken, self.prompt_logprobs = self.prompt_logprobs, None
        return taken

    @property
    def num_outputs(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def remaining_tokens(self) -> int:
        """Output tokens still wanted beyond those that steps in flight are sure to add."""
        return self.max_tokens - self.num_outputs - self.inflight_outputs

    @property
    def order(self) -> tuple[int, float, int]:
        """First come first served within a priority."""
        return (self.priority, self.arrival_s, self.sequence)

    @property
    def active(self) -> bool:
        return self.state in (State.PREFILL, State.DECODE)

    def attach(self, row: int, generation: int, cached_tokens: int) -> None:
        """The ledger gave the request a row; `cached_tokens` of its known tokens have KV already."""
        self.move(State.PREFILL)
        self.row, self.generation = row, generation
        self.launched_tokens = cached_tokens
        self.prefill_target = len(self.tokens)
        if self.preemptions == 0:
            self.cached_tokens = cached_tokens

    def lease(self, row: int, generation: int, fill_tokens: int) -> None:
        """The ledger gave the request a row that a transfer will fill with the KV of `fill_tokens` tokens."""
        self.move(State.TRANSFER)
        self.row, self.generation = row, generation
        self.launched_tokens = self.prefill_target = fill_tokens
        if self.scheduled_s is None:
            self.scheduled_s = time.monotonic()

    def detach(self, state: State) -> None:
        """The row is given back (release): to the queue after a retraction, or finished."""
        self.move(state)
        self.row = self.generation = -1
        self.launched_tokens = 0
        self.inflight_outputs = 0
