"""`LLM`: what callers may pass, streams that take turns, and books that close whatever they do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from octavo import LLM, RequestOutput, SamplingParams
from octavo.errors import EngineDead, RequestError
from tests.tiny import engine

GREEDY = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)


@pytest.fixture(params=[False, True], ids=["plain", "overlap"])
def llm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    monkeypatch.setattr("octavo.llm.EngineCore", lambda config: engine(draft="ngram", overlap=request.param))
    with LLM(draft="none") as made:
        yield made


def test_prompts_of_every_kind(llm: LLM) -> None:
    (text,) = llm.generate("hello", GREEDY)
    ids = llm.tokenizer.encode("hello")
    for prompts in (ids, [ids], ["hello"], tuple(ids), np.array(ids), [np.array(ids)], [[np.int64(i) for i in ids]]):
        (out,) = llm.generate(prompts, GREEDY)  # type: ignore[arg-type]
        assert isinstance(out, RequestOutput) and out.token_ids == text.token_ids
        assert out.prompt_token_ids == ids and all(type(i) is int for i in out.prompt_token_ids)
    both = llm.generate(["hello", ids], [GREEDY, GREEDY])
    assert [out.token_ids for out in both] == [text.token_ids] * 2
    assert llm.generate([], GREEDY) == []
    assert {"text", "token_ids", "prompt_token_ids", "finish_reason", "logprobs", "metrics"} <= set(dir(text))


@pytest.mark.parametrize(
    ("prompts", "words"),
    [(5, "got int"), (None, "got NoneType"), (b"bytes", "got bytes"), ({"a": 1}, "got dict"), ([1.5], "got float"),
     ([[1, 2.5]], "got 2.5"), ([[1, "x"]], "got 'x'"), ([[True]], "got True"), ([None], "got NoneType"),
     ([[]], "empty"), ("", "empty"), ([[10**9]], "1000000000"), ([[-1]], "-1"), ("a\ud800", "not valid Unicode")],
    ids=str,
)  # fmt: skip
def test_what_is_no_prompt_is_named(llm: LLM, prompts: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        llm.generate(prompts, GREEDY)
    assert not llm.core.has_work()


def test_params_that_are_none(llm: LLM) -> None:
    for params in ({"temperature": 0}, [GREEDY, {"n": 2}], "greedy"):
        with pytest.raises(RequestError, match="SamplingParams are allowed"):
            llm.generate(["a", "b"], params)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="3 params for 2 prompts"):
        llm.generate(["a", "b"], [GREEDY] * 3)
    with pytest.raises(RequestError, match="SamplingParams are allowed"):
        next(llm.stream("a", {"n": 2}))  # type: ignore[arg-type]
    assert not llm.core.has_work()


def test_streams_that_take_turns_lose_nothing(llm: LLM) -> None:
    """One engine step moves every open stream; each hears its own pieces, and `generate` in between harms none."""
    alone = {p: llm.generate(p, GREEDY)[0] for p in ("one", "another", "third")}
    streams = {p: llm.stream(p, GREEDY) for p in ("one", "another")}
    heard: dict[str, list[int]] = {p: [] for p in streams}
    heard["one"] += next(streams["one"]).token_ids
    heard["another"] += next(streams["another"]).token_ids
    assert llm.generate("third", GREEDY)[0].token_ids == alone["third"].token_ids
    for p, stream in streams.items():
        for piece in stream:
            heard[p] += piece.token_ids
    assert heard == {p: alone[p].token_ids for p in streams}


def test_a_stream_that_is_left_early_leaves_others_alone(llm: LLM) -> None:
    answer = llm.generate("one", GREEDY)[0].token_ids
    kept, left = llm.stream("one", GREEDY), llm.stream("another", GREEDY)
    heard = list(next(kept).token_ids)
    next(left)
    left.close()
    heard += [token for piece in kept for token in piece.token_ids]
    assert heard == answer and not llm.core.has_work()
    rows = llm.kv_report()["rows"]
    assert rows == []


def test_a_closed_llm_says_so(llm: LLM) -> None:
    stream = llm.stream("one", GREEDY)
    next(stream)
    llm.close()
    with pytest.raises(EngineDead):
        next(stream)
    with pytest.raises(EngineDead):
        llm.generate("one", GREEDY)
    llm.close()
