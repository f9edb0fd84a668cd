"""The server on a real model: SmolLM2 through the openai client, constrained output, tools, drafts, 200 clients."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from octavo.engine.process import DEFAULT_CORE
from tests.api.serving import IDLE_S, Server, running

pytestmark = [pytest.mark.models, pytest.mark.timeout(1800)]

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather in a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "unit": {"enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
TIME = {
    "type": "function",
    "function": {
        "name": "get_time",
        "parameters": {"type": "object", "properties": {"zone": {"enum": ["UTC", "CET"]}}, "required": ["zone"],
                       "additionalProperties": False},
    },
}  # fmt: skip
ASK = [{"role": "user", "content": "What is the weather in Paris?"}]
CITY = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 24}, "population": {"type": "integer", "maximum": 99999999}},
    "required": ["name", "population"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=["none", "ngram"])
def smol(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """SmolLM2 from its GGUF as `octavo serve` runs it, with and without drafts."""
    folder = tmp_path_factory.mktemp("smol")
    with running(folder, core=DEFAULT_CORE, model="smollm2", draft=request.param, threads=2, kv_memory="1GiB",
                 max_queue=400, check_books=True, env={"OMP_NUM_THREADS": "2"}) as server:  # fmt: skip
        yield server
        assert server.metric("kv_balance_violations_total") == 0


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def greedy_text() -> dict[str, str]:
    """Answers seen so far by prompt: a draft must not change them."""
    return {}


def test_chat_is_the_same_with_and_without_drafts(smol: Server, greedy_text: dict[str, str]) -> None:
    for question in ("Name three colours.", "Repeat after me: one two three one two three one two three"):
        answer = client_of(smol).chat.completions.create(
            model="smollm2", messages=[{"role": "user", "content": question}], temperature=0, max_tokens=32,
            logprobs=True, extra_body={"include_metrics": True},
        )  # fmt: skip
        text = answer.choices[0].message.content or ""
        assert text.strip()
        assert greedy_text.setdefault(question, text) == text
        assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.content is not None
        assert len(answer.choices[0].logprobs.content) == answer.usage.completion_tokens  # type: ignore[union-attr]


def test_the_model_is_in_its_right_mind(smol: Server) -> None:
    """What transformers makes of the same file and the same chat."""
    body = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0,
            "max_tokens": 16}  # fmt: skip
    choice = smol.post("/v1/chat/completions", body).json()["choices"][0]
    assert choice["message"]["content"] == "The capital of France is Paris." and choice["finish_reason"] == "stop"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_time"}}],
                         ids=["required", "named"])  # fmt: skip
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_a_forced_tool_call_is_valid(smol: Server, choice: Any, stream: bool) -> None:
    client = client_of(smol)
    asked: dict[str, Any] = dict(model="smollm2", messages=ASK, tools=[WEATHER, TIME], tool_choice=choice,
                                 max_tokens=120, temperature=0, parallel_tool_calls=False)  # fmt: skip
    if stream:
        name, arguments, reason = "", "", None
        for chunk in client.chat.completions.create(stream=True, **asked):
            part = chunk.choices[0]
            reason = part.finish_reason or reason
            for call in part.delta.tool_calls or []:
                assert call.function is not None
                name += call.function.name or ""
                arguments += call.function.arguments or ""
    else:
        answer = client.chat.completions.create(**asked).choices[0]
        calls = answer.message.tool_calls
        assert calls is not None and len(calls) == 1 and calls[0].id
        name, arguments, reason = calls[0].function.name, calls[0].function.arguments, answer.finish_reason
    assert reason == "tool_calls"
    assert name in (("get_weather", "get_time") if choice == "required" else ("get_time",))
    schema = next(t["function"]["parameters"] for t in (WEATHER, TIME) if t["function"]["name"] == name)  # type: ignore[index]
    jsonschema.validate(json.loads(arguments), schema)


def test_a_conversation_with_a_tool_result(smol: Server) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    talk = [*ASK, {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "sunny, 21 degrees"}]  # fmt: skip
    answer = smol.post("/v1/chat/completions", {"messages": talk, "tools": [WEATHER], "max_tokens": 20})
    assert answer.status_code == 200, answer.text


def test_json_schema_and_json_object(smol: Server) -> None:
    messages = [{"role": "user", "content": "Describe the city of Berlin as JSON."}]
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    for extra in ({"temperature": 0}, {"temperature": 1.0, "seed": 4}):
        body = {"messages": messages, "max_tokens": 150, "response_format": form, **extra}
        choice = smol.post("/v1/chat/completions", body).json()["choices"][0]
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(choice["message"]["content"]), CITY)
    body = {"messages": messages, "max_tokens": 200, "response_format": {"type": "json_object"}, "temperature": 0}
    choice = smol.post("/v1/chat/completions", body).json()["choices"][0]
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(choice["message"]["content"]), dict)
    else:
        assert choice["message"]["content"].lstrip().startswith("{")


def test_regex_and_grammar(smol: Server) -> None:
    for extra in ({}, {"n": 3, "temperature": 1.2, "seed": 1}):
        body = {"prompt": "My phone number is", "max_tokens": 30, "regex": r" \d{3}-\d{4}", "temperature": 0, **extra}
        for choice in smol.post("/v1/completions", body).json()["choices"]:
            assert re.fullmatch(r" \d{3}-\d{4}", choice["text"]) and choice["finish_reason"] == "stop"
    body = {"prompt": "The answer is", "max_tokens": 10, "grammar": 'start: " yes" | " no"', "temperature": 0}
    assert smol.post("/v1/completions", body).json()["choices"][0]["text"] in (" yes", " no")


def test_unicode_streams_whole_characters(smol: Server) -> None:
    body = {"messages": [{"role": "user", "content": "Write three emoji: 🙂 🎉 🚀"}], "max_tokens": 24, "stream": True,
            "temperature": 0}  # fmt: skip
    with httpx.stream("POST", smol.url + "/v1/chat/completions", json=body, timeout=60) as response:
        text = "".join(
            json.loads(line[6:])["choices"][0]["delta"].get("content", "")
            for line in response.iter_lines() if line.startswith("data: {")
        )  # fmt: skip
    assert "\ufffd" not in text


def test_200_streaming_clients(smol: Server) -> None:
    """Every answer is complete and the one given alone; all within a bounded time; the books close."""
    prompts = [f"Write about {thing}." for thing in ("rain", "iron", "bees", "tea", "maps", "salt", "wool", "jazz")]

    def body_of(number: int) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": prompts[number % len(prompts)]}], "max_tokens": 8,
                "temperature": 0, "stream": True}  # fmt: skip

    async def ask(client: httpx.AsyncClient, number: int) -> str:
        text, done = "", False
        async with client.stream("POST", smol.url + "/v1/chat/completions", json=body_of(number)) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                done = done or line == "data: [DONE]"
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["delta"].get("content", "")
        assert done
        return text

    async def run() -> None:
        async with httpx.AsyncClient(timeout=900, limits=httpx.Limits(max_connections=200)) as client:
            solo = [await ask(client, number) for number in range(len(prompts))]
            started = time.monotonic()
            crowd = await asyncio.gather(*(ask(client, number) for number in range(200)))
            print(f"200 clients in {time.monotonic() - started:.1f} s")
        for number, text in enumerate(crowd):
            assert text == solo[number % len(prompts)], number

    asyncio.run(run())
    assert smol.wait_idle() < IDLE_S
    pool = smol.get("/kv.json").json()["pools"]["full"]
    assert pool["held"] == pool["leased"] == 0
