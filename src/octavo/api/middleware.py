"""What happens to a request before a handler sees it. Plain ASGI, so that a disconnect still reaches the handler.

One class: request id, API key, body type and size. Starlette's base class for middleware is not used: it hides
`http.disconnect`, and a client that left must free its pages.
"""

from __future__ import annotations

import hmac
import re
import uuid
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException

from octavo.api.errors import response_of
from octavo.errors import BadMediaType, BodyTooLarge, OctavoError, Unauthorized
from octavo.obs.context import request_id_var

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

OPEN_PATHS = frozenset({"/health", "/ready"})  # probes carry no key
PAGE_PATHS = frozenset({"/kv"})  # the page holds no data; its script asks for the key
_SAFE_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")



class Gate:
    """Request id in and out, API key (constant time), JSON content type, body limit in bytes."""

    def __init__(self, app: ASGIApp, *, api_key: str | None, max_body_bytes: int, root_path: str = "") -> None:
        self.app = app
        self._root_path = root_path.rstrip("/")
        self._key = None if api_key is None else api_key.encode()
        self._limit_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        scope["root_path"] = self._root_path
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        request_id = given if _SAFE_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        token = request_id_var.set(request_id)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            self._admit(scope, headers)
        except OctavoError as error:
            await response_of(error)(scope, receive, send_with_id)
        else:
            await self.app(scope, _Limited(receive, self._limit_bytes), send_with_id)
        finally:
            request_id_var.reset(token)

    def _admit(self, scope: MutableMapping[str, Any], headers: dict[bytes, bytes]) -> None:
        path, method = _path(scope), scope["method"]
        if self._key is not None and method != "OPTIONS" and path not in OPEN_PATHS | PAGE_PATHS:
            scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
            if scheme.lower() != b"bearer" or not hmac.compare_digest(key.strip(), self._key):
                raise Unauthorized("an API key is needed: Authorization: Bearer KEY")
        if method != "POST":
            return
        length = headers.get(b"content-length", b"")
        if length.isdigit() and (len(length) > 18 or int(length) > self._limit_bytes):
            raise BodyTooLarge(f"the request body has {length.decode()[:24]} bytes; --max-body-bytes allows "
                           f"{self._limit_bytes}")
        kind = headers.get(b"content-type", b"").decode("latin-1").partition(";")[0].strip().lower()
        if kind and kind != "application/json" and not kind.endswith("+json"):
            raise BadMediaType(f"Content-Type {kind[:80]!r} is not supported; send application/json "
                               "(curl: -H 'Content-Type: application/json')")
        if not kind:
            scope["headers"] = [*scope["headers"], (b"content-type", b"application/json")]


def _path(scope: MutableMapping[str, Any]) -> str:
    """The path without the prefix that a reverse proxy may have left on."""
    root, path = str(scope.get("root_path", "")), str(scope["path"])
    return path[len(root):] if root and path.startswith(root + "/") else path


class _Limited:
    """A `receive` that stops counting bodies at the limit, for those that come without a length."""

    def __init__(self, receive: Receive, limit_bytes: int) -> None:
        self._receive, self._left_bytes, self._limit_bytes = receive, limit_bytes, limit_bytes

    async def __call__(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._left_bytes -= len(message.get("body", b""))
            if self._left_bytes < 0:
                raise HTTPException(413, f"the request body is larger than the {self._limit_bytes} bytes that "
                                    "--max-body-bytes allows")  # the only type a body parser lets through
        return message
