"""AsyncLLM: results as LLM gives them, several at once, aborted by id, by leaving and by cancelling."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from octavo import AsyncLLM, SamplingParams
from octavo.errors import ContextLengthExceeded, EngineDead, RequestError
from tests.tiny import engine

SLOW_S = "0.01"  # of a step: an answer of 400 tokens takes 4 s on any machine
OPTIONS: dict[str, Any] = {"draft": "none", "kv_memory": "64MiB", "threads": 1, "check_books": True}


def with_llm(work: Callable[[AsyncLLM], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        async with AsyncLLM(core="tests.api.cores:tiny", **OPTIONS) as llm:
            await work(llm)
            books = await llm.kv_report()
            assert books["pools"]["full"]["held"] == 0 and books["rows"] == []

    asyncio.run(run())


def test_generates_what_the_engine_does() -> None:
    core = engine(**OPTIONS)
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    prompts = ["first prompt", [66, 67, 68]]

    async def work(llm: AsyncLLM) -> None:
        together = await llm.generate(prompts, params)
        alone = [(await llm.generate([prompt], params))[0] for prompt in prompts]
        assert [r.text for r in together] == [r.text for r in alone]
        pieces = [piece async for piece in llm.stream(prompts[0], params)]
        assert "".join(p.text for p in pieces) == together[0].text and pieces[-1].finished
        assert together[0].finish_reason == "length" and len(together[0].token_ids) == 10
        assert together[0].metrics.ttft_s is not None
        chat = await llm.chat([{"role": "user", "content": "hi"}], params)
        assert len(chat) == 1 and chat[0].token_ids
        assert llm.tokenizer.encode("ab") == core.tokenizer.encode("ab")

    with_llm(work)


def test_aborts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_TEST_STEP_S", SLOW_S)
    long = SamplingParams(max_tokens=400, ignore_eos=True)

    async def work(llm: AsyncLLM) -> None:
        task = asyncio.ensure_future(llm.generate("x", long, request_id="mine"))
        while not await llm.abort("mine"):
            await asyncio.sleep(0.005)
        assert (await task)[0].finish_reason == "abort"
        async for _ in llm.stream("y", long):
            break
        cancelled = asyncio.ensure_future(llm.generate(["a", "b"], long))
        await asyncio.sleep(0.05)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        while (await llm.kv_report())["rows"]:
            await asyncio.sleep(0.02)

    with_llm(work)


def test_errors_are_typed() -> None:
    async def work(llm: AsyncLLM) -> None:
        with pytest.raises(ContextLengthExceeded):
            await llm.generate("x" * 600)
        with pytest.raises(RequestError):
            await llm.generate(["a", "b"], [SamplingParams()])
        with pytest.raises(RequestError):
            await llm.generate("")

    with_llm(work)


def test_a_killed_engine_is_an_error_and_close_is_final(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_TEST_STEP_S", SLOW_S)

    async def run() -> None:
        llm = AsyncLLM(core="tests.api.cores:tiny", **OPTIONS)
        await llm.start()
        task = asyncio.ensure_future(llm.generate("x", SamplingParams(max_tokens=450, ignore_eos=True)))
        await asyncio.sleep(0.02)
        client = llm._client
        assert client is not None and client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        with pytest.raises(EngineDead):
            await task
        await llm.close()
        await llm.close()
        with pytest.raises(EngineDead, match="closed"):
            await llm.generate("y")

    asyncio.run(run())
