"""POST /v1/completions: raw prompts in, text out; several prompts and `n` choices each, side by side."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

from octavo.api import sse
from octavo.api.convert import blame_field, bootstrap_of, completion_params, completion_prompts, request_id_of
from octavo.api.logprobs import CompletionLogprobs, merge_completion
from octavo.api.merge import merged
from octavo.api.tally import StreamUsage, Tally
from octavo.errors import OctavoError, RequestError
from octavo.obs import logs

if TYPE_CHECKING:
    from octavo.api.schema import CompletionRequest
    from octavo.api.service import Call, Service
    from octavo.engine.messages import ChoiceDelta
    from octavo.params import SamplingParams


class Completion:
    """One completions call from body to answer."""

    def __init__(self, service: Service, body: CompletionRequest, params: SamplingParams,
                 prompts: list[list[int]]) -> None:
        self.service, self.body, self.params, self.prompts = service, body, params, prompts
        self.id = request_id_of(body, "cmpl")
        self.created = int(time.time())
        self.tally = Tally()
        self.calls: list[Call] = []
        self._echo = [service.tokenizer.decode(ids, params.skip_special_tokens) if body.echo else "" for ids in prompts]

    async def start(self) -> None:
        """Submit every prompt. If one is refused, those before it are taken back."""
        many = len(self.prompts) > 1
        bootstrap = bootstrap_of(self.body, self.service.config.role, self.params.n)
        if many and bootstrap is not None:
            raise RequestError("prompt: a prefill/decode pair takes one prompt a call", param="prompt")
        try:
            for number, ids in enumerate(self.prompts):
                request_id = f"{self.id}-{number}" if many else self.id
                self.tally.prompt(request_id, len(ids))
                priority = self.body.priority or 0
                self.calls.append(self.service.submit(request_id, ids, self.params, priority, bootstrap))
            for call in self.calls:
                await call.accepted()
        except BaseException as error:
            self.close()
            if isinstance(error, RequestError):
                raise blame_field(error, self.body, forced_call=False) from None
            raise

    def close(self) -> None:
        for call in self.calls:
            call.close()

    def _index(self, number: int, delta: ChoiceDelta) -> int:
        return number * self.params.n + delta.index

    def _writers(self) -> dict[int, CompletionLogprobs]:
        n = self.params.n
        skip = self.params.skip_special_tokens
        return {i: CompletionLogprobs(self.service.token_text, skip_special_tokens=skip)
                for i in range(len(self.prompts) * n)}

    def _logprobs(self, writer: CompletionLogprobs, number: int, delta: ChoiceDelta) -> dict[str, Any] | None:
        """`logprobs` of one delta; those of the prompt come with the first one, if it is echoed."""
        parts = [writer.add(delta.prompt_logprobs, self.prompts[number]), writer.add(delta.logprobs)]
        there = [part for part in parts if part is not None]
        return merge_completion(there) if there else None

    async def answer(self) -> dict[str, Any]:
        """The whole answer."""
        n = self.params.n
        writers = self._writers()
        choices: list[dict[str, Any]] = [
            {"index": i, "text": self._echo[i // n], "logprobs": None, "finish_reason": None, "stop_reason": None}
            for i in range(len(self.prompts) * n)
        ]
        logprobs: dict[int, list[dict[str, Any]]] = {i: [] for i in writers}
        async with contextlib.aclosing(merged(self.calls)) as deltas:
            async for number, delta in deltas:
                self.tally.add(delta)
                index = self._index(number, delta)
                choice = choices[index]
                choice["text"] += delta.text
                part = self._logprobs(writers[index], number, delta)
                if part is not None:
                    logprobs[index].append(part)
                if delta.finished:
                    choice["finish_reason"], choice["stop_reason"] = delta.finish_reason, delta.stop_reason
        for index, choice in enumerate(choices):
            if self.params.logprobs is not None:
                choice["logprobs"] = merge_completion(logprobs[index])
            logs.prompts.info("answer %s[%d]: %r", self.id, index, choice["text"])
        out = {**self._head("text_completion"), "choices": choices, "usage": self.tally.usage()}
        if self.body.include_metrics:
            out["metrics"] = self.tally.metrics()
        return out

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.service.model,
                "system_fingerprint": self.service.fingerprint}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events."""
        head = self._head("text_completion")
        usage = StreamUsage(self.tally, self.body)
        writers = self._writers()
        waiting_echo = set(writers) if self.body.echo else set()
        try:
            async with contextlib.aclosing(merged(self.calls)) as deltas:
                async for number, delta in deltas:
                    self.tally.add(delta)
                    index = self._index(number, delta)
                    text = delta.text
                    if index in waiting_echo:
                        waiting_echo.discard(index)
                        text = self._echo[number] + text
                    logprobs = self._logprobs(writers[index], number, delta)
                    choice = {"index": index, "text": text, "logprobs": logprobs,
                              "finish_reason": delta.finish_reason if delta.finished else None,
                              "stop_reason": delta.stop_reason if delta.finished else None}
                    yield sse.event({**head, "choices": [choice], **usage.of_chunk()})
        except OctavoError as error:
            yield sse.error_event(error)
        else:
            end = usage.of_end()
            if end is not None:
                yield sse.event({**head, **end})
        yield sse.DONE


async def prepare(service: Service, body: CompletionRequest) -> Completion:
    """Check and tokenise; nothing has been submitted yet. Raises `RequestError`."""
    service.check_model(body.model)
    tokenizer = service.tokenizer
    params = completion_params(body)
    prompts = await service.in_thread(completion_prompts, tokenizer, body)
    if logs.prompts.isEnabledFor(20):
        for ids in prompts:
            logs.prompts.info("prompt: %r", tokenizer.decode(ids, False))
    return Completion(service, body, params, prompts)
