"""Notice that a client left, and stop working for it: streaming or not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.responses import Response

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

KEEP_ALIVE_S = 15.0  # proxies and clients close a connection on which nothing comes, often after 30 to 60 s

T = TypeVar("T")


class ClientGone(Exception):
    """The connection closed before the answer was complete."""


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled if the client leaves meanwhile. Raises `ClientGone` then.

    The body must have been read: what comes next on the connection is its end.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for pending in (task, gone):
            pending.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


class EventStream(Response):
    """Server-sent events out of an iterator of ready-made blocks. Closed, with all it holds, when the client leaves.

    The headers go out at once. While no block comes (a request waits in the queue, a long prompt is computed) a comment
    goes out now and then.
    """

    media_type = "text/event-stream"
    keep_alive = b": waiting\n\n"  # a comment, which clients of event streams skip

    def __init__(
        self, blocks: AsyncGenerator[bytes, None], close: Callable[[], None], keep_alive_s: float = KEEP_ALIVE_S
    ) -> None:
        """`close` frees what the blocks come from; it is called however the response ends, also before its start."""
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._blocks, self._close, self._keep_alive_s = blocks, close, keep_alive_s
        self._sent_s = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sender = asyncio.ensure_future(self._send_all(send))
        gone = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({sender, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sender, gone):
                task.cancel()
            self._close()
            failed, _ = await asyncio.gather(sender, gone, return_exceptions=True)
        if isinstance(failed, Exception):
            raise failed

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        idle = asyncio.ensure_future(self._while_idle(send))
        try:
            async for block in self._blocks:
                if block:
                    self._sent_s = time.monotonic()
                    await send({"type": "http.response.body", "body": block, "more_body": True})
            idle.cancel()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            idle.cancel()
            await self._blocks.aclose()

    async def _while_idle(self, send: Send) -> None:
        """A comment whenever nothing has been sent for `keep_alive_s`."""
        self._sent_s = time.monotonic()
        while True:
            left_s = self._sent_s + self._keep_alive_s - time.monotonic()
            if left_s <= 0:
                self._sent_s = time.monotonic()
                await send({"type": "http.response.body", "body": self.keep_alive, "more_body": True})
            else:
                await asyncio.sleep(left_s)


class JsonLater(EventStream):
    """One JSON value whose headers go out before it is known: what fails then is in the value, not in the status."""

    media_type = "application/json"
    keep_alive = b"\n"  # JSON may begin with space
