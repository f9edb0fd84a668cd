"""Wrong requests get the right 4xx with a message that names the field: never a 5xx, never silence."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.api.serving import Server

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"messages": HELLO, "max_tokens": 2, **fields}


def text(**fields: Any) -> tuple[str, dict[str, Any]]:
    return TEXT, {"prompt": "x", "max_tokens": 2, **fields}


# (path, body), status, param, part of the message
TABLE: list[tuple[tuple[str, Any], int, str | None, str]] = [
    ((CHAT, []), 400, None, "JSON object"),
    ((CHAT, "text"), 400, None, "JSON object"),
    ((CHAT, None), 400, None, "JSON object"),
    ((CHAT, {}), 400, "messages", "needed"),
    ((CHAT, {"messages": []}), 400, "messages", "non-empty"),
    ((CHAT, {"messages": "hi"}), 400, "messages", "list"),
    ((CHAT, {"messages": [{"content": "hi"}]}), 400, "messages[0].role", "needed"),
    ((CHAT, {"messages": [{"role": "robot", "content": "hi"}]}), 400, "messages[0].role", "assistant"),
    ((CHAT, {"messages": [{"role": "user", "content": 5}]}), 400, "messages[0].content", "string"),
    ((CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}), 400,
     "messages[0].content", "text"),
    ((CHAT, {"messages": [{"role": "user", "content": "hi", "colour": "red"}]}), 400, "messages[0].colour", "unknown"),
    (chat(colour="red"), 400, "colour", "unknown"),
    (chat(temprature=0.5), 400, "temprature", "unknown"),
    (chat(temperature=-0.1), 400, "temperature", "from 0"),
    (chat(temperature="hot"), 400, "temperature", "number"),
    (chat(temperature=True), 400, "temperature", "number"),
    (chat(top_p=0), 400, "top_p", "above 0"),
    (chat(top_p=1.5), 400, "top_p", "at most 1"),
    (chat(top_k=-2), 400, "top_k", "integer"),
    (chat(top_k=1.5), 400, "top_k", "integer"),
    (chat(min_p=2), 400, "min_p", "0 to 1"),
    (chat(presence_penalty=3), 400, "presence_penalty", "-2 to 2"),
    (chat(frequency_penalty=-3), 400, "frequency_penalty", "-2 to 2"),
    (chat(repetition_penalty=0), 400, "repetition_penalty", "above 0"),
    (chat(logit_bias={"5": 101}), 400, "logit_bias", "-100 to 100"),
    (chat(logit_bias={"x": 1}), 400, "logit_bias", "token ids"),
    (chat(logit_bias={"999999": 1}), 400, "logit_bias", "0 to"),
    (chat(logit_bias=[1]), 400, "logit_bias", "token ids"),
    (chat(seed=2**64), 400, "seed", "64-bit"),
    (chat(seed=0.5), 400, "seed", "64-bit"),
    (chat(n=0), 400, "n", "1 to 128"),
    (chat(n=1000), 400, "n", "1 to 128"),
    (chat(stop=""), 400, "stop", "non-empty"),
    (chat(stop=["a", 1]), 400, "stop", "list"),
    (chat(max_tokens=-1), 400, "max_tokens", "from 0"),
    (chat(max_completion_tokens=-1), 400, "max_completion_tokens", "from 0"),
    (chat(min_tokens=3), 400, "min_tokens", "max_tokens"),
    (chat(stream="yes"), 400, "stream", "true or false"),
    (chat(stream_options={"include_usage": True}), 400, "stream_options", "stream: true"),
    (chat(stream=True, stream_options={"colour": 1}), 400, "stream_options.colour", "unknown"),
    (chat(stream=True, stream_options={"continuous_usage_stats": True}), 400, "stream_options.continuous_usage_stats",
     "include_usage"),
    (chat(top_logprobs=2), 400, "top_logprobs", "logprobs: true"),
    (chat(logprobs=True, top_logprobs=21), 400, "top_logprobs", "0 to 20"),
    (chat(logprobs=1), 400, "logprobs", "true or false"),
    (chat(response_format={"type": "xml"}), 400, "response_format.type", "json_schema"),
    (chat(response_format={"type": "json_schema"}), 400, "response_format.json_schema", "needed"),
    (chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}), 400,
     "response_format", "schema"),
    (chat(regex="("), 400, "regex", "regex"),
    (chat(grammar="start: ("), 400, "grammar", "grammar"),
    (chat(regex="a", grammar='start: "a"'), 400, "grammar", "exclude"),
    (chat(regex="a", response_format={"type": "json_object"}), 400, "response_format", "exclude"),
    (chat(tool_choice="required"), 400, "tool_choice", "needs tools"),
    (chat(tools=[TOOL], tool_choice="always"), 400, "tool_choice", "required"),
    (chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "g"}}), 400, "tool_choice", "'g'"),
    (chat(tools=[TOOL, TOOL]), 400, "tools", "two tools"),
    (chat(tools=[{"type": "function", "function": {"name": "bad name!"}}]), 400, "tools[0].function.name", "letters"),
    (chat(tools=[TOOL], tool_choice="required", regex="a"), 400, "tool_choice", "contradicts"),
    (chat(chat_template_kwargs={"messages": []}), 400, "chat_template_kwargs", "messages"),
    (chat(continue_final_message=True, add_generation_prompt=True), 400, "continue_final_message", "exclude"),
    (chat(bootstrap_host="1.2.3.4"), 400, "bootstrap_host", "--role"),
    (chat(bootstrap_room=5), 400, "bootstrap_room", "--role"),
    (chat(no_stop_trim=True), 400, "no_stop_trim", "allowed"),
    (chat(return_hidden_states=True), 400, "return_hidden_states", "allowed"),
    (chat(lora_path="x"), 400, "lora_path", "allowed"),
    (chat(best_of=4), 400, "best_of", "allowed"),
    (chat(guided_json={}), 400, "guided_json", "allowed"),
    (chat(priority="high"), 400, "priority", "integer"),
    (chat(priority=2**40), 400, "priority", "32-bit"),
    (chat(model="gpt-4"), 404, "model", "tiny"),
    (chat(model=5), 400, "model", "name"),
    (chat(seed=1, sampling_seed=2), 400, "sampling_seed", "one"),
    (chat(request_id=""), 400, "request_id", "128"),
    ((TEXT, {}), 400, "prompt", "needed"),
    (text(prompt=""), 400, "prompt", "at least one token"),
    (text(prompt=[]), 400, "prompt", "at least one"),
    (text(prompt=[[]]), 400, "prompt", "at least one"),
    (text(prompt=["a", 1]), 400, "prompt", "list"),
    (text(prompt={"a": 1}), 400, "prompt", "string"),
    (text(prompt=["x"] * 200), 400, "prompt", "128"),
    (text(prompt=[-1]), 400, "prompt", "-1"),
    (text(prompt=[10**9]), 400, "prompt", "vocabulary"),
    (text(prompt="x" * 513), 400, "prompt", "context"),
    (text(logprobs=True), 400, "logprobs", "0 to 20"),
    (text(logprobs=21), 400, "logprobs", "0 to 20"),
    (text(echo="yes"), 400, "echo", "true"),
    (text(suffix="tail"), 400, "suffix", "allowed"),
    (text(messages=HELLO), 400, "messages", "unknown"),
    (("/tokenize", {}), 400, "prompt", "either"),
    (("/tokenize", {"prompt": "a", "messages": HELLO}), 400, "prompt", "either"),
    (("/tokenize", {"prompt": 5}), 400, "prompt", "string"),
    (("/tokenize", {"prompt": "a", "content": "b"}), 400, "prompt", "either"),
    (text(prompt=[2**70]), 400, "prompt", "64 bits"),
    (text(json_schema={"const": 2**70}), 400, "json_schema", "64 bits"),
    (text(grammar="start: start"), 400, "grammar", "grammar"),
    (("/detokenize", {"tokens": "abc"}), 400, "tokens", "list"),
    (("/detokenize", {"tokens": [10**6]}), 400, "tokens", "token ids"),
    (("/detokenize", {"tokens": [-1]}), 400, "tokens", "token ids"),
    (("/abort_request", {}), 400, "rid", "abort_all"),
]


@pytest.mark.parametrize(("request_", "status", "param", "words"), TABLE, ids=lambda v: None)
def test_malformed(server: Server, request_: tuple[str, Any], status: int, param: str | None, words: str) -> None:
    path, body = request_
    response = server.post(path, body)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert words in error["message"]
    if param is not None:
        assert param.split(".")[-1].split("[")[0] in error["message"]
    assert error["type"] == ("not_found_error" if status == 404 else "invalid_request_error")


def test_the_table_is_long_enough() -> None:
    assert len(TABLE) >= 40


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"\xff\xfe", b'{"messages": [}', b"[" * 100_000, b'{"a":' * 50_000, b'{"prompt": "\\ud800"}',
     b'{"prompt": "x", "temperature": NaN}', b'{"prompt": "x", "seed": ' + b"9" * 6000 + b"}", b"null", b"0"],
    ids=["empty", "open", "not utf-8", "broken", "deep list", "deep object", "lone surrogate", "nan", "long integer",
         "null", "zero"],
)  # fmt: skip
@pytest.mark.parametrize("path", [CHAT, TEXT, "/tokenize"])
def test_broken_json(server: Server, path: str, raw: bytes) -> None:
    response = httpx.post(server.url + path, content=raw, headers={"Content-Type": "application/json"}, timeout=30)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["message"]


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", ["temperature", "top_k", "logit_bias", "json_schema", "response_format", "stop"])
def test_numbers_that_are_none(server: Server, field: str, value: str) -> None:
    """JSON has no NaN, but Python's parser reads it: no field with an effect takes it, however deep it lies."""
    inner = value if field in ("temperature", "top_k") else f'{{"1": [{value}]}}'
    raw = f'{{"prompt": "x", "max_tokens": 1, "{field}": {inner}}}'.encode()
    response = httpx.post(server.url + TEXT, content=raw, headers={"Content-Type": "application/json"}, timeout=30)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == field and "finite" in response.json()["error"]["message"]


def test_lone_surrogates_anywhere(server: Server) -> None:
    """JSON can spell half a surrogate pair; no tokenizer can."""
    for raw in (
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": "user", "content": "x", "name": "\\udfff"}]}',
        b'{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"a": "\\ud800"}, "max_tokens": 1}',
        b'{"messages": [{"role": "user", "content": "x"}], "\\ud800": 1}',
        b'{"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", "function":'
        b' {"name": "f", "parameters": {"a": "\\ud800"}}}], "max_tokens": 1}',
    ):
        response = httpx.post(server.url + CHAT, content=raw, headers={"Content-Type": "application/json"}, timeout=30)
        assert response.status_code in (200, 400), response.text


def test_content_type(server: Server) -> None:
    body = b'{"prompt": "x", "max_tokens": 1}'
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        response = httpx.post(server.url + TEXT, content=body, headers={"Content-Type": kind}, timeout=30)
        assert response.status_code == 415, kind
        assert "application/json" in response.json()["error"]["message"]
    kinds = ("application/json; charset=utf-8", "application/vnd.x+json")
    for headers in ({}, *({"Content-Type": kind} for kind in kinds)):
        assert httpx.post(server.url + TEXT, content=body, headers=headers, timeout=30).status_code == 200, headers


def test_unknown_path_lists_the_endpoints(server: Server) -> None:
    response = server.get("/v1/chat/completion")
    assert response.status_code == 404
    assert "/v1/chat/completions" in response.json()["error"]["message"]
    assert server.post("/v1/embeddings", {}).json()["error"]["code"] == "unknown_path"


def test_wrong_method(server: Server) -> None:
    response = server.get(CHAT)
    assert response.status_code == 405 and response.headers["allow"] == "POST"
    assert "POST" in response.json()["error"]["message"]
    assert server.post("/health", {}).status_code == 405
    assert httpx.delete(server.url + "/v1/models", timeout=30).status_code == 405


def test_numbers_beyond_64_bits_are_refused(server: Server) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": [2**70], "max_tokens": 1}),
        ("/v1/completions", {"prompt": [[1, 2**64]], "max_tokens": 1}),
        ("/v1/completions", {"prompt": "x", "stop_token_ids": [2**65], "max_tokens": 1}),
        ("/detokenize", {"tokens": [2**70]}),
    ):
        answer = server.post(path, body)
        assert answer.status_code == 400, (path, body, answer.text)
