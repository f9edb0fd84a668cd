"""Chat and completions as clients use them: plain HTTP and the openai client, streaming and not."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from tests.api.serving import Server

HELLO = [{"role": "user", "content": "Say hello"}]


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60)


def events(server: Server, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream; checks its frame."""
    with httpx.stream("POST", server.url + path, json=body | {"stream": True}, timeout=60) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        blocks = "".join(response.iter_text()).split("\n\n")
    assert blocks[-1] == "" and blocks[-2] == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


def test_openai_client_chat(server: Server) -> None:
    answer = client_of(server).chat.completions.create(model="tiny", messages=HELLO, max_tokens=12, temperature=0)
    assert answer.object == "chat.completion" and answer.model == "tiny"
    choice = answer.choices[0]
    assert choice.message.role == "assistant" and choice.finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.completion_tokens <= 12


def test_openai_client_stream_equals_plain(server: Server) -> None:
    client = client_of(server)
    plain = client.chat.completions.create(model="alias", messages=HELLO, max_tokens=20, temperature=0)
    stream = client.chat.completions.create(
        model="alias", messages=HELLO, max_tokens=20, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == plain.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == plain.choices[0].finish_reason
    assert chunks[-1].choices == [] and chunks[-1].usage is not None and plain.usage is not None
    assert chunks[-1].usage.completion_tokens == plain.usage.completion_tokens
    assert all(c.usage is None for c in chunks[:-1])


def test_chat_stream_without_usage(server: Server) -> None:
    chunks = events(server, "/v1/chat/completions", {"messages": HELLO, "max_tokens": 4})
    assert all("usage" not in chunk for chunk in chunks)
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}


@pytest.mark.parametrize(("path", "ask"), [("/v1/chat/completions", {"messages": HELLO}),
                                           ("/v1/completions", {"prompt": ["a", "b"]})])  # fmt: skip
def test_usage_in_every_chunk(server: Server, path: str, ask: dict[str, Any]) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**ask, "max_tokens": 6, "ignore_eos": True, "n": 2, "seed": 3, "stream_options": options}
    usages = [chunk["usage"] for chunk in events(server, path, body)]
    counts = [usage["completion_tokens"] for usage in usages]
    assert counts == sorted(counts) and counts[-1] == 12 * len(ask.get("prompt", [1]))
    assert len(set(counts)) > 3 and {usage["prompt_tokens"] for usage in usages} == {usages[-1]["prompt_tokens"]}


def test_choices_have_identities_of_their_own(server: Server) -> None:
    body = {"messages": HELLO, "max_tokens": 24, "n": 3, "temperature": 1.0, "seed": 7}
    first, second = (server.post("/v1/chat/completions", body).json() for _ in range(2))
    texts = [c["message"]["content"] for c in first["choices"]]
    assert [c["index"] for c in first["choices"]] == [0, 1, 2]
    assert texts == [c["message"]["content"] for c in second["choices"]], "the same seed gives the same choices"
    assert len(set(texts)) == 3, "choices of one request differ"
    assert first["usage"]["completion_tokens"] >= 3
    streamed = events(server, "/v1/chat/completions", body)
    for index, text in enumerate(texts):
        deltas = [c["choices"][0] for c in streamed if c["choices"] and c["choices"][0]["index"] == index]
        assert "".join(d["delta"].get("content", "") for d in deltas) == text


def test_chat_logprobs(server: Server) -> None:
    body = {"messages": HELLO, "max_tokens": 6, "temperature": 0, "logprobs": True, "top_logprobs": 3}
    answer = server.post("/v1/chat/completions", body).json()["choices"][0]
    content = answer["logprobs"]["content"]
    assert len(content) == 6
    for entry in content:
        assert len(entry["top_logprobs"]) == 3 and entry["logprob"] <= 0
        assert entry["top_logprobs"][0]["logprob"] == pytest.approx(entry["logprob"]), "greedy takes the likeliest"
        assert bytes(entry["bytes"]).decode("utf-8", "replace") == entry["token"]
    assert b"".join(bytes(e["bytes"]) for e in content).decode("utf-8", "replace") == answer["message"]["content"]
    chunks = events(server, "/v1/chat/completions", body)
    streamed = [e for c in chunks if c["choices"] and c["choices"][0]["logprobs"]
                for e in c["choices"][0]["logprobs"]["content"]]
    assert streamed == content


def test_completion_logprobs(server: Server) -> None:
    body = {"prompt": "abc", "max_tokens": 5, "temperature": 0, "logprobs": 2}
    logprobs = server.post("/v1/completions", body).json()["choices"][0]["logprobs"]
    assert {len(v) for v in logprobs.values()} == {5}
    assert logprobs["text_offset"][0] == 0 and logprobs["text_offset"] == sorted(logprobs["text_offset"])
    for token, value, top in zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        assert top[token] == pytest.approx(value)
    chunks = events(server, "/v1/completions", body)
    streamed = [x for c in chunks for x in (c["choices"][0]["logprobs"] or {"text_offset": []})["text_offset"]]
    assert streamed == logprobs["text_offset"]


@pytest.mark.parametrize(
    ("prompt", "count"),
    [("one", 1), (["one", "two"], 2), ([65, 66, 67], 1), ([[65, 66], [67], [68, 69, 70]], 3)],
    ids=["string", "strings", "ids", "lists of ids"],
)
def test_completion_prompts(server: Server, prompt: Any, count: int) -> None:
    body = {"prompt": prompt, "max_tokens": 5, "temperature": 0}
    answer = server.post("/v1/completions", body).json()
    assert answer["object"] == "text_completion"
    assert [c["index"] for c in answer["choices"]] == list(range(count))
    texts = [c["text"] for c in answer["choices"]]
    chunks = events(server, "/v1/completions", body)
    for index, text in enumerate(texts):
        assert text == "".join(c["choices"][0]["text"] for c in chunks if c["choices"][0]["index"] == index)
    items = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    solo = [server.post("/v1/completions", {**body, "prompt": item}).json()["choices"][0]["text"] for item in items]
    assert texts == solo, "several prompts are answered as one by one"


def test_several_prompts_and_choices_are_numbered_by_prompt(server: Server) -> None:
    body = {"prompt": ["aa", "bb"], "n": 2, "max_tokens": 8, "seed": 3}
    choices = server.post("/v1/completions", body).json()["choices"]
    assert [c["index"] for c in choices] == [0, 1, 2, 3]
    alone = server.post("/v1/completions", body | {"prompt": "bb"}).json()["choices"]
    assert [c["text"] for c in choices[2:]] == [c["text"] for c in alone]


def test_echo(server: Server) -> None:
    body = {"prompt": ["left ", "right "], "max_tokens": 4, "temperature": 0, "echo": True}
    texts = [c["text"] for c in server.post("/v1/completions", body).json()["choices"]]
    assert texts[0].startswith("left ") and texts[1].startswith("right ")
    chunks = events(server, "/v1/completions", body)
    for index, text in enumerate(texts):
        assert text == "".join(c["choices"][0]["text"] for c in chunks if c["choices"][0]["index"] == index)
    nothing = server.post("/v1/completions", {**body, "max_tokens": 0}).json()
    assert [c["text"] for c in nothing["choices"]] == ["left ", "right "]
    assert nothing["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("max_tokens", [0, 1, 6])
@pytest.mark.parametrize("prompt", ["score é me", [70, 71, 72, 73]], ids=["text", "ids"])
def test_echo_with_logprobs_scores_the_prompt(server: Server, prompt: Any, max_tokens: int) -> None:
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "echo": True, "logprobs": 1, "seed": 1234}
    answer = server.post("/v1/completions", body).json()
    choice, size = answer["choices"][0], answer["usage"]["prompt_tokens"]
    logprobs = choice["logprobs"]
    assert {len(column) for column in logprobs.values()} == {size + answer["usage"]["completion_tokens"]}
    assert answer["usage"]["completion_tokens"] == max_tokens and choice["finish_reason"] == "length"
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    for value, top in list(zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True))[1:]:
        assert len(top) == 1 and value <= max(top.values())
    assert logprobs["text_offset"][0] == 0 and logprobs["text_offset"] == sorted(logprobs["text_offset"])
    plain = server.post("/v1/completions", body | {"echo": False, "max_tokens": 6}).json()["choices"][0]
    assert choice["text"] == server.post("/v1/completions", body | {"logprobs": None}).json()["choices"][0]["text"]
    assert logprobs["tokens"][size:] == plain["logprobs"]["tokens"][:max_tokens]
    chunks = events(server, "/v1/completions", body)
    parts = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
    assert [x for part in parts for x in part["token_logprobs"]] == logprobs["token_logprobs"]
    assert "".join(c["choices"][0]["text"] for c in chunks) == choice["text"]


def _labels(server: Server) -> list[str]:
    """How completions name each token id."""
    body = {"prompt": list(range(288)), "max_tokens": 0, "echo": True, "logprobs": 0}
    labels: list[str] = server.post("/v1/completions", body).json()["choices"][0]["logprobs"]["tokens"]
    return labels


def test_a_greedy_answer_scores_as_the_likeliest(server: Server) -> None:
    """What an evaluation harness does: the likelihood of a continuation, and whether greedy decoding gives it."""
    prompt = server.post("/tokenize", {"prompt": "begin"}).json()["tokens"]
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "logprobs": 1, "ignore_eos": True}
    made = server.post("/v1/completions", body).json()["choices"][0]["logprobs"]
    names = {text: i for i, text in enumerate(_labels(server))}
    ids = [names[label] for label in made["tokens"]]
    whole = [prompt + ids, prompt + [*ids[:-1], (ids[-1] + 1) % 288]]
    score = {"prompt": whole, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1}
    good, bad = (c["logprobs"] for c in server.post("/v1/completions", score).json()["choices"])
    span = slice(len(prompt), -1)
    assert good["token_logprobs"][span] == pytest.approx(made["token_logprobs"], abs=1e-6)
    likeliest = [[max(top.values()) for top in one["top_logprobs"][span]] for one in (good, bad)]
    assert good["token_logprobs"][span] == likeliest[0] and bad["token_logprobs"][span] != likeliest[1]


def test_max_tokens_zero_huge_and_absent(server: Server) -> None:
    zero = server.post("/v1/chat/completions", {"messages": HELLO, "max_tokens": 0}).json()
    assert zero["choices"][0]["finish_reason"] == "length" and zero["choices"][0]["message"]["content"] == ""
    for limit in ({}, {"max_completion_tokens": 10**9}):
        body = {"messages": HELLO, "ignore_eos": True, **limit}
        usage = server.post("/v1/chat/completions", body).json()["usage"]
        assert usage["total_tokens"] == 512, "the rest of the context"


def test_stop_string_is_not_shown(server: Server) -> None:
    body = {"prompt": "stop", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    text = server.post("/v1/completions", body).json()["choices"][0]["text"]
    stop = text[10:13]
    cut = server.post("/v1/completions", body | {"stop": [stop]}).json()["choices"][0]
    assert cut["text"] == text[: text.index(stop)]
    assert cut["finish_reason"] == "stop" and cut["stop_reason"] == stop
    kept = server.post("/v1/completions", body | {"stop": stop, "include_stop_str_in_output": True}).json()
    assert kept["choices"][0]["text"] == text[: text.index(stop) + len(stop)]
    streamed = events(server, "/v1/completions", body | {"stop": stop})
    assert "".join(c["choices"][0]["text"] for c in streamed) == cut["text"]


def test_fields_that_change_nothing_are_accepted(server: Server) -> None:
    """What the router, OpenAI's and other clients send at their defaults."""
    body = {
        "messages": HELLO, "model": "tiny", "max_completion_tokens": 3, "temperature": 0.800000011920929, "n": 1,
        "top_p": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "user": "me", "store": False,
        "metadata": {"a": "b"}, "service_tier": "auto", "modalities": ["text"], "parallel_tool_calls": True,
        "no_stop_trim": False, "skip_special_tokens": True, "separate_reasoning": True, "stream_reasoning": True,
        "return_hidden_states": False, "continue_final_message": False, "ignore_eos": False, "lora_path": None,
        "session_params": None, "bootstrap_host": None, "bootstrap_port": None, "bootstrap_room": None, "top_k": -1,
        "min_p": 0.0, "min_tokens": 0, "repetition_penalty": 1.0, "stop": None, "tools": None, "audio": None,
        "response_format": {"type": "text"}, "chat_template_kwargs": {"enable_thinking": False}, "logprobs": False,
        "use_beam_search": False, "length_penalty": 1.0, "prompt_cache_key": "k", "safety_identifier": "s",
        "verbosity": "medium", "reasoning_effort": "medium", "sampling_seed": 5, "cache_prompt": True,
    }  # fmt: skip
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text


def test_metrics_of_one_answer_on_request(server: Server) -> None:
    body = {"prompt": "figures", "max_tokens": 8}
    assert "metrics" not in server.post("/v1/completions", body).json()
    figures = server.post("/v1/completions", body | {"include_metrics": True}).json()["metrics"]
    wanted = {"drafts", "draft_tokens", "accepted_tokens", "accepted_per_position", "mean_accept_length"}
    assert set(figures["speculative_decoding"]) == wanted
    assert figures["ttft_s"] > 0 and figures["kv_pages"] >= 1
    last = events(server, "/v1/completions", body | {"include_metrics": True})[-1]
    assert set(last["metrics"]["speculative_decoding"]) == wanted


def test_warm_prompt_is_counted_and_answers_the_same(server: Server) -> None:
    body = {"prompt": "a prefix that is longer than a page or two, so that it is cached " * 2, "max_tokens": 16,
            "temperature": 0}  # fmt: skip
    server.post("/flush_cache", {})
    cold, warm = (server.post("/v1/completions", body).json() for _ in range(2))
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] >= 96
    assert cold["choices"][0]["text"] == warm["choices"][0]["text"]


def test_continue_final_message_and_content_parts(server: Server) -> None:
    talk = [*HELLO, {"role": "assistant", "content": "Hello, my"}]
    tokens = server.post("/tokenize", {"messages": talk, "continue_final_message": True}).json()["tokens"]
    assert server.post("/detokenize", {"tokens": tokens}).json()["prompt"].endswith("assistant: Hello, my")
    body = {"messages": talk, "continue_final_message": True, "max_tokens": 5}
    assert server.post("/v1/chat/completions", body).json()["usage"]["prompt_tokens"] == len(tokens)
    parts = [{"role": "user", "content": [{"type": "text", "text": "Say hello"}]}]
    one, other = (server.post("/tokenize", {"messages": m}).json()["tokens"] for m in (HELLO, parts))
    assert one == other


def test_own_request_id_and_abort(server: Server) -> None:
    body = {"prompt": "x", "request_id": "mine-1", "max_tokens": 2}
    answer = server.post("/v1/completions", body)
    assert answer.json()["id"] == "mine-1"
    assert server.post("/abort_request", {"rid": "mine-1"}).json() == {"aborted": 0}


def test_priority_is_accepted(server: Server) -> None:
    for priority in (-5, 0, 9):
        assert server.post("/v1/completions", {"prompt": "p", "max_tokens": 1, "priority": priority}).status_code == 200


def test_openai_client_errors_are_typed(server: Server) -> None:
    client = client_of(server)
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-4", messages=HELLO)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="tiny", messages=HELLO, temperature=-1)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="tiny", prompt="x" * 600)
    assert long.value.code == "context_length_exceeded"
