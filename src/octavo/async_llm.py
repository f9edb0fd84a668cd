"""`AsyncLLM`: the engine in a process of its own, for programs with an asyncio loop.

    async with AsyncLLM("smollm2") as llm:
        async for piece in llm.stream("Once upon a time"):
            print(piece.text, end="")

Results are those of `LLM`: `generate` and `chat` give `RequestOutput`, `stream` gives `ChoiceOutput`.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from octavo.config import EngineConfig
from octavo.engine import collect
from octavo.engine.client import EngineClient, RequestStream
from octavo.engine.collect import Prompt
from octavo.engine.handshake import unpack_tokenizer
from octavo.engine.output import RequestOutput
from octavo.engine.process import DEFAULT_CORE
from octavo.engine.request import ChoiceOutput, EngineRequest
from octavo.errors import EngineDead, RequestError
from octavo.params import SamplingParams

if TYPE_CHECKING:
    from octavo.engine.messages import ChoiceDelta
    from octavo.model.load.tokenizer import Tokenizer

Message = Mapping[str, Any]


class AsyncLLM:
    """A model behind `await`. Belongs to the loop it is first used in. Keyword arguments are `EngineConfig`'s options.

    The engine process starts with `start()`, `async with` or the first request. Raises ConfigError or ModelError
    then, EngineDead when the process is gone.
    """

    def __init__(self, model: str | None = None, *, core: str = DEFAULT_CORE, **options: Any) -> None:
        given = {**options, **({"model": model} if model is not None else {})}
        self.config = EngineConfig.from_options(given)
        self._core = core
        self._client: EngineClient | None = None
        self._starting: asyncio.Lock | None = None
        self._tokenizer: Tokenizer | None = None
        self._numbers = itertools.count()
        self._closed = False

    # -- life ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the engine process and wait until the model is loaded. Does nothing if it runs."""
        if self._closed:
            raise EngineDead("this AsyncLLM is closed")
        if self._starting is None:
            self._starting = asyncio.Lock()
        async with self._starting:
            if self._client is not None:
                return
            client = EngineClient(self.config, core=self._core)
            try:
                await client.start()
                await client.wait_ready()
                self._tokenizer = await asyncio.to_thread(unpack_tokenizer, client.tokenizer_payload)
            except BaseException:
                await client.close()
                raise
            self._client = client

    async def close(self) -> None:
        """Abort what runs and stop the engine process. Idempotent."""
        self._closed = True
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def __aenter__(self) -> AsyncLLM:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises EngineDead before `start`."""
        if self._tokenizer is None:
            raise EngineDead("the engine has not been started: await start() first")
        return self._tokenizer

    # -- generation ----------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        request_id: str | None = None,
    ) -> list[RequestOutput]:
        """Answers in the order of the prompts; no template is applied. Cancelling the task aborts them.

        With `request_id` a single prompt can be ended by `abort(request_id)`.
        """
        await self.start()
        listed = collect.listed(prompts)
        if request_id is not None and len(listed) != 1:
            raise RequestError("request_id: it names one prompt; give one", param="request_id")
        return await self._run([await self._tokens(p) for p in listed], params, request_id)

    async def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answers of conversations, through the model's chat template. `template`: extra template arguments."""
        await self.start()
        talks = collect.conversations(messages)
        prompts = [await asyncio.to_thread(self.tokenizer.encode_chat, talk, **template) for talk in talks]
        return await self._run(prompts, params, None)

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> AsyncIterator[ChoiceOutput]:
        """Pieces of one answer as they come (`text` is the new part). Leaving the loop early aborts the request."""
        await self.start()
        (setting,) = collect.one_each(params, 1)
        stream = self._submit(await self._tokens(collect.checked(prompt)), setting, request_id)
        try:
            await stream.accepted
            async for delta in stream:
                yield _output(delta)
        finally:
            stream.close()

    async def abort(self, request_id: str) -> bool:
        """End a request with finish reason "abort". False if it is not in flight."""
        return self._client is not None and self._client.abort(request_id)

    async def kv_report(self) -> dict[str, Any]:
        """The books, as `LLM.kv_report()` gives them."""
        await self.start()
        report: dict[str, Any] = await self._running().query("report", 30.0)
        return report

    # -- parts ---------------------------------------------------------------------------------------------------

    def _running(self) -> EngineClient:
        if self._client is None:
            raise EngineDead("this AsyncLLM is closed")
        return self._client

    async def _tokens(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return await asyncio.to_thread(self.tokenizer.encode, prompt)
        return [int(t) for t in prompt]

    def _submit(self, tokens: list[int], params: SamplingParams, request_id: str | None) -> RequestStream:
        name = request_id if request_id is not None else f"async-{next(self._numbers)}"
        return self._running().submit(EngineRequest(name, tokens, params, time.monotonic()))

    async def _run(
        self,
        prompts: list[list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        request_id: str | None,
    ) -> list[RequestOutput]:
        settings = collect.one_each(params, len(prompts))
        streams: list[RequestStream] = []
        try:
            for tokens, setting in zip(prompts, settings, strict=True):
                streams.append(self._submit(tokens, setting, request_id))
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(_collect(stream, collect.empty(stream.request_id, tokens, setting.n)))
                    for stream, tokens, setting in zip(streams, prompts, settings, strict=True)
                ]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            for stream in streams:
                stream.close()
        return [task.result() for task in tasks]


async def _collect(stream: RequestStream, result: RequestOutput) -> RequestOutput:
    await stream.accepted
    async for delta in stream:
        collect.add(result, delta)
    return result


def _output(delta: ChoiceDelta) -> ChoiceOutput:
    return ChoiceOutput(
        request_id=delta.request_id,
        index=delta.index,
        text=delta.text,
        token_ids=delta.token_ids,
        logprobs=delta.logprobs,
        finished=delta.finished,
        finish_reason=delta.finish_reason,
        stop_reason=delta.stop_reason,
        prompt_tokens=delta.prompt_tokens,
        cached_tokens=delta.cached_tokens,
        metrics=delta.metrics,
        prompt_logprobs=delta.prompt_logprobs,
    )
