"""POST /v1/chat/completions: a conversation in, a message (or tool calls) out."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

from octavo.api import sse
from octavo.api.convert import blame_field, bootstrap_of, chat_ids, chat_params, request_id_of
from octavo.api.logprobs import chat_logprobs
from octavo.api.tally import StreamUsage, Tally
from octavo.api.tooling import ToolPlan, ToolReader, plan_tools
from octavo.errors import OctavoError, RequestError
from octavo.obs import logs

if TYPE_CHECKING:
    from octavo.api.schema import ChatRequest
    from octavo.api.service import Call, Service
    from octavo.engine.messages import ChoiceDelta
    from octavo.params import SamplingParams


class Chat:
    """One chat call from body to answer."""

    def __init__(self, service: Service, body: ChatRequest, params: SamplingParams, prompt: list[int],
                 tools: ToolPlan) -> None:
        self.service, self.body, self.params, self.prompt, self.tools = service, body, params, prompt, tools
        self.id = request_id_of(body, "chatcmpl")
        self.created = int(time.time())
        self.tally = Tally()
        self._call: Call | None = None

    async def start(self) -> None:
        self.tally.prompt(self.id, len(self.prompt))
        bootstrap = bootstrap_of(self.body, self.service.config.role, self.params.n)
        self._call = self.service.submit(self.id, self.prompt, self.params, self.body.priority or 0, bootstrap)
        try:
            await self._call.accepted()
        except BaseException as error:
            self.close()
            if isinstance(error, RequestError):
                raise blame_field(error, self.body, forced_call=self.tools.constraint is not None) from None
            raise

    def close(self) -> None:
        if self._call is not None:
            self._call.close()

    async def _deltas(self) -> AsyncGenerator[ChoiceDelta, None]:
        if self._call is None:
            return
        try:
            async for delta in self._call:
                self.tally.add(delta)
                yield delta
        finally:
            self.close()

    def _readers(self) -> list[ToolReader]:
        return [self.tools.reader() for _ in range(self.params.n)]

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.service.model,
                "system_fingerprint": self.service.fingerprint}

    async def answer(self) -> dict[str, Any]:
        """The whole answer."""
        readers = self._readers()
        entries: list[list[Any]] = [[] for _ in readers]
        ends: list[tuple[str | None, int | str | None]] = [(None, None)] * len(readers)
        async with contextlib.aclosing(self._deltas()) as deltas:
            async for delta in deltas:
                readers[delta.index].push(delta.text)
                entries[delta.index].extend(delta.logprobs or ())
                if delta.finished:
                    readers[delta.index].finish()
                    ends[delta.index] = (delta.finish_reason, delta.stop_reason)
        choices = []
        for index, reader in enumerate(readers):
            reason, stop = ends[index]
            logprobs = chat_logprobs(entries[index], self.service.token_text) if self.body.logprobs else None
            choices.append({"index": index, "message": reader.message(), "logprobs": logprobs,
                            "finish_reason": reader.finish_reason(reason), "stop_reason": stop})
            logs.prompts.info("answer %s[%d]: %r", self.id, index, reader.text)
        out = {**self._head("chat.completion"), "choices": choices, "usage": self.tally.usage()}
        if self.body.include_metrics:
            out["metrics"] = self.tally.metrics()
        return out

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events: a role chunk a choice, deltas, a finish chunk a choice, the usage."""
        head = self._head("chat.completion.chunk")
        usage = StreamUsage(self.tally, self.body)
        readers = self._readers()

        def chunk(index: int, delta: dict[str, Any], *, logprobs: Any = None, reason: str | None = None,
                  stop: int | str | None = None) -> bytes:
            choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
            if reason is not None:
                choice["stop_reason"] = stop
            return sse.event({**head, "choices": [choice], **usage.of_chunk()})

        yield b"".join(chunk(i, {"role": "assistant", "content": ""}) for i in range(len(readers)))
        try:
            async with contextlib.aclosing(self._deltas()) as deltas:
                async for delta in deltas:
                    yield self._delta_events(delta, readers[delta.index], chunk)
        except OctavoError as error:
            yield sse.error_event(error)
        else:
            end = usage.of_end()
            if end is not None:
                yield sse.event({**head, **end})
        yield sse.DONE

    def _delta_events(self, delta: ChoiceDelta, reader: ToolReader, chunk: Any) -> bytes:
        parts = reader.push(delta.text)
        if delta.finished:
            parts += reader.finish()
        logprobs = chat_logprobs(delta.logprobs, self.service.token_text) if self.body.logprobs else None
        if logprobs is not None and not logprobs["content"]:
            logprobs = None
        if not parts and logprobs is not None:
            parts = [{"content": ""}]  # text that is held back still has its log-probabilities
        blocks = []
        for part in parts:
            blocks.append(chunk(delta.index, part, logprobs=logprobs))
            logprobs = None
        if delta.finished:
            reason = reader.finish_reason(delta.finish_reason)
            blocks.append(chunk(delta.index, {}, reason=reason, stop=delta.stop_reason))
            logs.prompts.info("answer %s[%d]: %r", self.id, delta.index, reader.text)
        return b"".join(blocks)


async def prepare(service: Service, body: ChatRequest) -> Chat:
    """Check, apply the template and tokenise; nothing has been submitted yet. Raises `RequestError`."""
    service.check_model(body.model)
    tokenizer = service.tokenizer
    tools = plan_tools(body, tokenizer)
    params = chat_params(body, tools.constraint)
    prompt = await service.in_thread(chat_ids, tokenizer, body, tools.shown)
    if logs.prompts.isEnabledFor(20):
        logs.prompts.info("prompt: %r", tokenizer.decode(prompt, False))
    return Chat(service, body, params, prompt, tools)
