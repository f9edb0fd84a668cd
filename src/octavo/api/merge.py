"""Several calls read as one: the prompts of a completions request run side by side."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.api.service import Call
    from octavo.engine.messages import ChoiceDelta


async def merged(calls: Sequence[Call]) -> AsyncGenerator[tuple[int, ChoiceDelta], None]:
    """(number of the call, delta) in order of arrival. The first error ends all; leaving early closes all calls."""
    if len(calls) == 1:
        try:
            async for delta in calls[0]:
                yield 0, delta
        finally:
            calls[0].close()
        return
    queue: asyncio.Queue[tuple[int, ChoiceDelta] | BaseException | None] = asyncio.Queue()

    async def pump(number: int, call: Call) -> None:
        try:
            async for delta in call:
                queue.put_nowait((number, delta))
        except Exception as error:
            queue.put_nowait(error)
        else:
            queue.put_nowait(None)

    tasks = [asyncio.create_task(pump(number, call)) for number, call in enumerate(calls)]
    running = len(tasks)
    try:
        while running:
            item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)
        for call in calls:
            call.close()
