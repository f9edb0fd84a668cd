"""From accepted tokens to what a user sees: text, stops, finish reason, log-probabilities.

A step may accept several tokens. They are read one by one and the earliest end wins; what comes after it is
discarded together with its log-probabilities, and `Delta.kept_tokens` tells the engine how far the run counts
(a published key ends there).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from octavo.engine.detokenizer import Detokenizer, HasBackend
from octavo.engine.stops import StopMatcher
from octavo.params import SamplingParams

FINISH_REASONS = ("stop", "length", "abort", "error")


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one chosen token and, best first, of the alternatives asked for."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


PromptLogprobs = list[TokenLogprob | None]  # one a token of the prompt; nothing predicts the first: None


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step added to one answer.

    kept_tokens  how many of the tokens given to `append` count, the one that ended the answer included
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    finished: bool = False
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    kept_tokens: int = 0


@dataclass
class SpeculationMetrics:
    """Drafting figures of one request. accepted_per_position[i]: verifies that accepted at least i + 1 tokens."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)

    def add(self, drafted_tokens: int, accepted_tokens: int) -> None:
        """Count one verify."""
        if drafted_tokens == 0:
            return
        self.drafts += 1
        self.draft_tokens += drafted_tokens
        self.accepted_tokens += accepted_tokens
        missing = accepted_tokens - len(self.accepted_per_position)
        self.accepted_per_position.extend([0] * missing)
        for i in range(accepted_tokens):
            self.accepted_per_position[i] += 1

    @property
    def mean_accept_length(self) -> float:
        """Tokens per verify, bonus token included; 0 without a draft."""
        return 1 + self.accepted_tokens / self.drafts if self.drafts else 0.0


@dataclass
class RequestMetrics:
    """Times (seconds, one monotonic clock) and counts of one answer. None: not reached yet."""

    arrival_s: float = 0.0
    scheduled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    kv_pages: int = 0
    decode_steps: int = 0
    speculation: SpeculationMetrics = field(default_factory=SpeculationMetrics)

    @property
    def queue_s(self) -> float | None:
        return None if self.scheduled_s is None else self.scheduled_s - self.arrival_s

    @property
    def ttft_s(self) -> float | None:
        """Time to first token."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def prefill_s(self) -> float | None:
        if self.scheduled_s is None or self.first_token_s is None:
            return None
        return self.first_token_s - self.scheduled_s

    @property
    def decode_s(self) -> float | None:
        if self.first_token_s is None or self.finished_s is None:
            return None
        return self.finished_s - self.first_token_s

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Tokens after the first, over the time since the first."""
        if not self.decode_s or self.output_tokens < 2:
            return None
        return (self.output_tokens - 1) / self.decode_s

    @property
    def accept_length(self) -> float | None:
        """Tokens per decode step, bonus token included: 1.0 without drafts."""
        return (self.output_tokens - 1) / self.decode_steps if self.decode_steps else None

    def to_dict(self) -> dict[str, object]:
        """Durations in seconds and counts, JSON-able."""
        spec = self.speculation
        return {
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "cached_tokens": self.cached_tokens,
            "queue_s": self.queue_s,
            "prefill_s": self.prefill_s,
            "ttft_s": self.ttft_s,
            "decode_s": self.decode_s,
            "e2e_s": None if self.finished_s is None else self.finished_s - self.arrival_s,
            "decode_tokens_per_s": self.decode_tokens_per_s,
            "decode_steps": self.decode_steps,
            "accept_length": self.accept_length,
            "kv_pages": self.kv_pages,
            "preemptions": self.preemptions,
            "drafts": spec.drafts,
            "draft_tokens": spec.draft_tokens,
            "accepted_tokens": spec.accepted_tokens,
            "accepted_per_position": list(spec.accepted_per_position),
        }


@dataclass
class CompletionOutput:
    """One answer so far. `delta` is what the newest step added."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    delta: Delta = field(default_factory=Delta)
    metrics: RequestMetrics = field(default_factory=RequestMetrics)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """A request's answers. The plain fields are those of the first answer; `outputs` holds all n."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt: str | None = None
    prompt_logprobs: PromptLogprobs | None = None
    error: str | None = None  # message where finish_reason is "error"

    @property
    def index(self) -> int:
        return self.outputs[0].index

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        return self.outputs[0].finish_reason

    @property
    def stop_reason(self) -> str | int | None:
        return self.outputs[0].stop_reason

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        return self.outputs[0].logprobs

    @property
    def metrics(self) -> RequestMetrics:
        return self.outputs[0].metrics

    @property
    def delta(self) -> Delta:
        """What the newest step added to the first answer."""
        return self.outputs[0].delta

    @property
    def finished(self) -> bool:
        return all(output.finished for output in self.outputs)


class AnswerGrammar(Protocol):
    """What is asked of `engine.grammar.Matcher` here."""

    @property
    def error(self) -> str | None: ...

    def advance(self, token: int) -> bool: ...


class RequestOutputState:
    """One answer being written: text, stops and finish reason of one choice of one request."""

    def __init__(
        self,
        detokenizer: Detokenizer | None,
        params: SamplingParams,
        *,
        max_tokens: int,
        eos_ids: Iterable[int],
        prompt_token_ids: Sequence[int] = (),
        index: int = 0,
    ) -> None:
        """`max_tokens` is the request's own limit or what the context leaves, whichever is less.

        Without a detokenizer there is no text (and stop strings are never found).
        """
        self.output = CompletionOutput(index=index, logprobs=None if params.logprobs is None else [])
        self._max_tokens = max_tokens
        self._min_tokens = params.min_tokens
        self._structured = params.structured is not None
        self._eos_ids = frozenset() if params.ignore_eos and not self._structured else frozenset(eos_ids)
        self._stop_ids = frozenset(params.stop_token_ids or ())
        self._show_stop_token = params.include_stop_str_in_output
        self._stops = StopMatcher(params.stop or (), include_stop=params.include_stop_str_in_output)
        self._stream = None
        if detokenizer is not None:
            self._stream = detokenizer.stream(
                skip_special_tokens=params.skip_special_tokens, prompt_token_ids=prompt_token_ids
            )

    @property
    def ban_ids(self) -> list[int]:
        """Tokens that may not be sampled before min_tokens: for `SamplingState.set_row`."""
        return sorted(self._eos_ids | self._stop_ids)

    def append(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprob] | None = None,
        grammar: AnswerGrammar | None = None,
    ) -> Delta:
        """Read one accepted run. After the answer has ended nothing is kept (the step behind a finished one).

        `grammar` moves along. The token that completes it ends the answer with "stop": no end token follows, even
        if the run holds one. If it cannot go on the reason is "error" (see `grammar.error`).
        """
        pieces: list[str] = []
        kept = 0
        for token in token_ids:
            if self.output.finished:
                break
            kept += 1
            self.output.token_ids.append(token)
            self._read_token(token, pieces, grammar)
        return self._delta(pieces, list(token_ids[:kept]), logprobs, kept)

    def finish(self, reason: str) -> Delta:
        """End the answer from outside: "abort", "error", "length" (max_tokens 0, context full)."""
        if reason not in FINISH_REASONS:
            raise ValueError(f"finish reason {reason!r}; {', '.join(FINISH_REASONS)} are allowed")
        pieces: list[str] = []
        if not self.output.finished:
            self._end(reason, None, pieces)
        return self._delta(pieces, [], None, 0)

    def _read_token(self, token: int, pieces: list[str], grammar: AnswerGrammar | None) -> None:
        count = len(self.output.token_ids)
        # where a grammar allows an end token it may allow nothing else: min_tokens cannot go on then
        may_stop = count > self._min_tokens or (self._structured and token in self._eos_ids)
        if may_stop and (token in self._eos_ids or token in self._stop_ids):
            if self._show_stop_token and token in self._stop_ids:
                self._show(self._push(token), pieces, enabled=False)
            self._end("stop", token if token in self._stop_ids else None, pieces)
            return
        self._show(self._push(token), pieces, enabled=may_stop)
        if not self.output.finished and grammar is not None and grammar.advance(token):
            self._end("stop" if grammar.error is None else "error", None, pieces)
        if not self.output.finished and count >= self._max_tokens:
            self._end("length", None, pieces)

    def _push(self, token: int) -> str:
        return self._stream.push(token) if self._stream is not None else ""

    def _show(self, text: str, pieces: list[str], *, enabled: bool) -> None:
        shown, stop = self._stops.push(text, enabled=enabled)
        pieces.append(shown)
        if stop is not None:
            self.output.finish_reason, self.output.stop_reason = "stop", stop

    def _end(self, reason: str, stop_reason: int | None, pieces: list[str]) -> None:
        if self._stream is not None:  # an incomplete character or byte run comes out now, and may complete a stop
            self._show(self._stream.flush(), pieces, enabled=reason in ("stop", "length"))
        if self.output.finished:
            return
        pieces.append(self._stops.flush())
        self.output.finish_reason, self.output.stop_reason = reason, stop_reason

    def _delta(
        self, pieces: list[str], token_ids: list[int], logprobs: Sequence[TokenLogprob] | None, kept: int
    ) -> Delta:
        output = self.output
        text = "".join(pieces)
        output.text += text
        kept_logprobs = None
        if output.logprobs is not None and logprobs is not None:
            kept_logprobs = tuple(logprobs[:kept])
            output.logprobs.extend(kept_logprobs)
        output.delta = Delta(
            text=text,
            token_ids=tuple(token_ids),
            logprobs=kept_logprobs,
            finished=output.finished,
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            kept_tokens=kept,
        )
        return output.delta


class OutputProcessor:
    """Makes `RequestOutputState`s for one model: its detokenizer and its end tokens."""

    def __init__(self, tokenizer: HasBackend | None, eos_ids: Iterable[int]) -> None:
        self.detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self.eos_ids = frozenset(eos_ids)

    def start(
        self, params: SamplingParams, *, max_tokens: int, prompt_token_ids: Sequence[int] = (), index: int = 0
    ) -> RequestOutputState:
        """State of one choice. `max_tokens`: see `RequestOutputState`."""
        return RequestOutputState(
            self.detokenizer,
            params,
            max_tokens=max_tokens,
            eos_ids=self.eos_ids,
            prompt_token_ids=prompt_token_ids,
            index=index,
        )
