"""Server-sent events: one JSON object a block."""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.api.errors import body_of
from octavo.errors import OctavoError

DONE = b"data: [DONE]\n\n"
_encoder = msgspec.json.Encoder()


def event(value: dict[str, Any]) -> bytes:
    return b"data: " + _encoder.encode(value) + b"\n\n"


def error_event(error: OctavoError) -> bytes:
    """An error behind the headers: clients of the OpenAI API raise on an event with `error`."""
    return event(body_of(error))
