"""What the API process and the engine process say to each other: msgpack-encoded structs over two ZMQ sockets.

API -> engine: `Submit`, `Abort`, `Query`, `Shutdown`.
Engine -> API: `Beat`, `Ready`, `Fatal`, `Accepted`, `Rejected`, `Outputs`, `Reply`.

Order is kept per direction, so `Accepted` (or `Rejected`) of a request precedes its outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from typing import Any

import msgspec

from octavo import errors
from octavo.engine.output import RequestMetrics, TokenLogprob
from octavo.engine.request import EngineRequest


class ErrorInfo(msgspec.Struct, array_like=True):
    """An error that crosses the process border: enough to raise the same type again on the other side."""

    kind: str
    message: str
    status: int
    code: str
    exit_code: int = 1
    details: dict[str, Any] = {}  # the error's own attributes: option, param, file, tensor, …

    @classmethod
    def of(cls, error: BaseException) -> ErrorInfo:
        """Describe `error`; what is not an `OctavoError` becomes an internal error that names its type."""
        if isinstance(error, errors.OctavoError):
            return cls(
                kind=type(error).__name__,
                message=_text(str(error)),
                status=error.status,
                code=error.code,
                exit_code=error.exit_code,
                details={name: _plain(value) for name, value in vars(error).items()},
            )
        return cls("OctavoError", _text(f"{type(error).__name__}: {error}"), 500, errors.OctavoError.code)

    def error(self) -> errors.OctavoError:
        """The error to raise on this side. Types with arguments of their own are rebuilt without calling them."""
        cls = getattr(errors, self.kind, errors.OctavoError)
        rebuilt: errors.OctavoError = cls.__new__(cls)
        Exception.__init__(rebuilt, self.message)
        vars(rebuilt).update(self.details)
        rebuilt.status, rebuilt.code, rebuilt.exit_code = self.status, self.code, self.exit_code
        return rebuilt


def _text(text: str) -> str:
    """Half a surrogate pair, which JSON files can hold, has no encoding: it is spelled out."""
    return text.encode("utf-8", "backslashreplace").decode()


def _plain(value: object) -> Any:
    """What msgpack can carry of an error's attribute; the rest as text."""
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, Integral):
        whole = int(value)
        return whole if -(1 << 63) <= whole < 1 << 64 else str(whole)
    if isinstance(value, Mapping):
        return {_text(str(key)): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return _text(str(value))


class ChoiceDelta(msgspec.Struct, array_like=True):
    """News of one choice: text and tokens since the last delta; the last one says why it ended."""

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    finished: bool = False
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    error: ErrorInfo | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None


# API -> engine


class Submit(msgspec.Struct, tag="submit", array_like=True):
    request: EngineRequest


class Abort(msgspec.Struct, tag="abort", array_like=True):
    request_ids: list[str]


class Query(msgspec.Struct, tag="query", array_like=True):
    """`what` is "report", "stats", "flush_cache" or "abort_all"; the answer is a `Reply` with the same number."""

    number: int
    what: str


class Shutdown(msgspec.Struct, tag="shutdown", array_like=True):
    """Close the engine and leave. Requests still running are aborted."""


Command = Submit | Abort | Query | Shutdown


# engine -> API


class Beat(msgspec.Struct, tag="beat", array_like=True):
    """Sign of life, sent by a thread so that a long step does not look like death.

    `loop_age_s` is the time since the engine loop last went round: that is how a hung step is told from a long life.
    """

    busy: bool
    steps: int
    loop_age_s: float
    rss_bytes: int


class Ready(msgspec.Struct, tag="ready", array_like=True):
    """The model is loaded. `info` describes it, `tokenizer` lets the API process rebuild the same tokenizer."""

    info: dict[str, Any]
    tokenizer: bytes


class Fatal(msgspec.Struct, tag="fatal", array_like=True):
    """The last words of an engine that cannot start or go on."""

    error: ErrorInfo


class Accepted(msgspec.Struct, tag="accepted", array_like=True):
    request_id: str


class Rejected(msgspec.Struct, tag="rejected", array_like=True):
    request_id: str
    error: ErrorInfo


class Outputs(msgspec.Struct, tag="outputs", array_like=True):
    deltas: list[ChoiceDelta]


class Reply(msgspec.Struct, tag="reply", array_like=True):
    number: int
    value: Any = None
    error: ErrorInfo | None = None


Event = Beat | Ready | Fatal | Accepted | Rejected | Outputs | Reply

encoder = msgspec.msgpack.Encoder()


def too_wide(command: Command) -> str:
    """The field of a command that `encoder` refuses because a number in it has more than 64 bits. What is sent is
    otherwise checked before, so it is a token id or something in a schema."""
    if not isinstance(command, Submit) or any(not 0 <= t < 2**63 for t in command.request.prompt_token_ids):
        return "prompt"
    structured = command.request.params.structured
    return "prompt" if structured is None else structured[0]
