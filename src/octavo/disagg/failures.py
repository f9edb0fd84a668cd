"""Why a room did not end with an answer: the errors clients see, and the causes metrics count them under."""

from __future__ import annotations

from octavo.disagg.protocol import Gone
from octavo.errors import HandoverFailed, HandoverTimeout, OctavoError

CAUSES = {
    "unreachable": "the prefill server did not answer the greeting",
    "refused": "the two servers do not fit (page size, KV type, model, draft)",
    "peer_gone": "the other server was killed, stopped or cut off",
    "read_failed": "the transport could not read the pages",
    "pages_let_go": "the prefill server reused its pages before they were read",
    "prompts_differ": "the two halves made different tokens of the prompt",
    "bad_message": "an announcement or a request for pages that cannot be right",
    "peer_ended": "the other half of the request ended, by an abort or a failure there",
    "deadline": "the room's time was over",
    "other": "anything else, such as an engine that stops",
}

SAID_CHARACTERS = 2000


def failed(cause: str, text: str) -> HandoverFailed:
    """A 502 that is counted under `cause`. Raises KeyError for a cause that is not in CAUSES."""
    error = HandoverFailed(text)
    error.cause = _known(cause)
    return error


def too_late(cause: str, text: str) -> HandoverTimeout:
    """A 504 that is counted under `cause`."""
    error = HandoverTimeout(text)
    error.cause = _known(cause)
    return error


def gone(message: Gone) -> HandoverFailed:
    """What the prefill side said when it ended a room, as the decode server's client sees it."""
    cause = "deadline" if message.status == 504 else "peer_ended"
    error = failed(cause, f"room {message.room}: {said(message.reason)}")
    if 400 <= message.status <= 599:
        error.status, error.code = message.status, said(message.code)
    return error


def said(text: str) -> str:
    """What another server said, for our own messages: of any length over there, SAID_CHARACTERS here."""
    return text if len(text) <= SAID_CHARACTERS else f"{text[:SAID_CHARACTERS]}… ({len(text)} characters)"


def why(reason: str, error: OctavoError | None) -> str:
    """What the other side is told about the end of a room."""
    return "aborted" if reason == "abort" else str(error) if error is not None else reason


def result_of(reason: str, error: OctavoError | None) -> str:
    """The result of a room that was not handed over: aborted, expired or failed."""
    if reason == "abort":
        return "aborted"
    return "expired" if isinstance(error, HandoverTimeout) else "failed"


def cause_of(error: OctavoError | None) -> str:
    """A key of CAUSES."""
    return error.cause if isinstance(error, HandoverFailed) else "other"


def _known(cause: str) -> str:
    CAUSES[cause]
    return cause
