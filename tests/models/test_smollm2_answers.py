"""Text, stops and constrained answers on the real model and its real tokenizer."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator

import numpy as np
import pytest
from jsonschema import validate

from octavo import LLM, SamplingParams
from octavo.api.tools import CallArguments, CallBegin, call_grammar, inline_tools, make_parser
from octavo.engine.detokenizer import Detokenizer
from octavo.engine.grammar import GrammarCompiler
from octavo.model.load import load_model
from octavo.model.load.tokenizer import Tokenizer

pytestmark = pytest.mark.models

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "degrees": {"enum": [10, 20, 30]}},
    "required": ["city", "degrees"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "Look up", "parameters": SCHEMA}}
ASK = [{"role": "user", "content": "What is the weather in Paris?"}]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_model("smollm2").tokenizer


@pytest.fixture(scope="module", params=["none", "ngram"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM("smollm2", draft=request.param, kv_memory="256MiB", max_running=8) as engine:
        yield engine


_first_answers: dict[str, list[int]] = {}


def same_with_and_without_drafts(params: SamplingParams, token_ids: list[int]) -> None:
    """The first engine of the module has no drafts, the second has: drafts must not show in any token."""
    assert _first_answers.setdefault(repr(params), token_ids) == token_ids


def test_streamed_text_is_the_decode(tokenizer: Tokenizer) -> None:
    shared = Detokenizer(tokenizer)
    assert shared.byte_level
    rng = random.Random(5)
    runs = [[rng.randrange(tokenizer.vocab_size) for _ in range(200)] for _ in range(20)]
    texts = ("naïve 🙂👩‍👩‍👧‍👦 日本語 Ελλάδα\n\n\tdef f(x):  return x", " a  b ", "")
    runs += [tokenizer.encode(text) for text in texts]
    for ids in runs:
        for skip in (True, False):
            stream = shared.stream(skip_special_tokens=skip)
            text = "".join([*(stream.push(token) for token in ids), stream.flush()])
            assert text == tokenizer.decode(ids, skip_special_tokens=skip)


def test_masks_follow_real_tokens(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer, 49_152)
    matcher = compiler.compile(SamplingParams(json_schema=SCHEMA)).matcher()
    answer = tokenizer.encode('{"city": "Paris", "degrees": 20}')
    masks = matcher.masks_for_draft([*answer[:-1], 0])
    for token, mask in zip(answer, masks, strict=False):
        assert (int(mask[token // 32]) >> (token % 32)) & 1
    assert np.all(masks[-1] == -1), "behind a forbidden token nothing is masked"
    done = [matcher.advance(token) for token in answer]
    assert done == [False] * (len(answer) - 1) + [True] and matcher.error is None


def test_a_schema_holds_at_any_temperature(llm: LLM) -> None:
    settings = [{"temperature": 0.0}, *({"temperature": 1.3, "seed": seed} for seed in range(2))]
    params = [SamplingParams(json_schema=SCHEMA, max_tokens=120, **s) for s in settings]
    for one in params:
        out = llm.chat(ASK, one)[0]
        same_with_and_without_drafts(one, out.token_ids)
        assert out.finish_reason == "stop"
        validate(json.loads(out.text), SCHEMA)


def test_a_forced_call_is_schema_valid(llm: LLM) -> None:
    forced = call_grammar("hermes", [WEATHER], name="get_weather")
    params = SamplingParams(grammar=forced, temperature=0, max_tokens=120)
    out = llm.chat(inline_tools(ASK, [WEATHER]), params)[0]
    same_with_and_without_drafts(params, out.token_ids)
    parser = make_parser("hermes", [WEATHER])
    begin, arguments = [*parser.push(out.text), *parser.finish()]
    assert isinstance(begin, CallBegin) and begin.name == "get_weather"
    assert isinstance(arguments, CallArguments)
    validate(json.loads(arguments.text), SCHEMA)


def test_a_regex_holds_inside_a_mixed_batch(llm: LLM) -> None:
    prompts = ["Is water wet? Answer:", "Count: one two three one two three one two", "A number:"]
    params = [
        SamplingParams(regex=" (yes|no)[.!]", max_tokens=20, temperature=1.0, seed=1),
        SamplingParams(temperature=0, max_tokens=12),
        SamplingParams(regex=" [0-9]{3}", max_tokens=20, temperature=0),
    ]
    together = llm.generate(prompts, params)
    assert re.fullmatch(" (yes|no)[.!]", together[0].text) and re.fullmatch(" [0-9]{3}", together[2].text)
    for prompt, one, out in zip(prompts, params, together, strict=True):
        assert llm.generate(prompt, one)[0].token_ids == out.token_ids


def test_a_stop_string_ends_the_text_and_the_books_close(llm: LLM) -> None:
    free = llm.chat(ASK, SamplingParams(temperature=0, max_tokens=40))[0]
    middle = free.text[10:14]
    out = llm.chat(ASK, SamplingParams(temperature=0, max_tokens=40, stop=[middle, "never to be seen"]))[0]
    assert out.text == free.text[: free.text.index(middle)]
    assert (out.finish_reason, out.stop_reason) == ("stop", middle)
    assert out.token_ids == free.token_ids[: len(out.token_ids)]
