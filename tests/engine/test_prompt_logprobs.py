"""Log-probabilities of the prompt: those the same tokens have when they are generated, whatever runs beside."""

from __future__ import annotations

import math
from typing import Any

import pytest

from octavo.engine import collect
from octavo.engine.core import EngineCore
from octavo.engine.output import RequestOutput, TokenLogprob
from octavo.engine.request import EngineRequest
from octavo.errors import RequestError
from octavo.params import SamplingParams
from tests.engine.test_core import GREEDY, prompts, run
from tests.tiny import engine

SCORE = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=2)


def outputs(core: EngineCore, calls: list[tuple[list[int], SamplingParams]]) -> list[RequestOutput]:
    results = {f"r{i}": collect.empty(f"r{i}", tokens, params.n) for i, (tokens, params) in enumerate(calls)}
    for i, (tokens, params) in enumerate(calls):
        core.add_request(EngineRequest(f"r{i}", tokens, params))
    while core.has_work():
        for piece in core.step():
            assert piece.error is None, piece.error
            collect.add(results[piece.request_id], piece)
    core.close()
    return list(results.values())


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_a_generated_text_scores_as_it_was_generated(kind: str) -> None:
    prompt = prompts(1)[0]
    told = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=2)
    made = outputs(engine(kind), [(prompt, told)])[0]
    scored = outputs(engine(kind, max_batched_tokens=32, prefill_chunk=7), [(prompt + made.token_ids, SCORE)])[0]
    assert (scored.token_ids, scored.text, scored.finish_reason) == ([], "", "length")
    assert scored.prompt_logprobs is not None and scored.prompt_logprobs[0] is None
    assert [entry.token_id for entry in scored.prompt_logprobs[1:] if entry] == (prompt + made.token_ids)[1:]
    assert scored.prompt_logprobs[len(prompt) :] == made.logprobs, "fp32 products do not depend on the company"


def test_entries_are_probabilities_and_the_likeliest_come_first() -> None:
    entries = outputs(engine(), [(prompts(1)[0], SCORE.with_changes(prompt_logprobs=20))])[0].prompt_logprobs
    assert entries is not None
    for entry in entries[1:]:
        assert entry is not None and entry.logprob <= 0 and len(entry.top) == 20
        values = [value for _, value in entry.top]
        assert values == sorted(values, reverse=True) and sum(map(math.exp, values)) <= 1 + 1e-5
        assert dict(entry.top).get(entry.token_id, entry.logprob) == entry.logprob <= values[0]


def same(a: list[TokenLogprob | None] | None, b: list[TokenLogprob | None] | None) -> bool:
    return a is not None and a == b


@pytest.mark.parametrize(
    "options", [{}, {"overlap": True}, {"page_size": 1}, {"max_batched_tokens": 24}, {"draft": "ngram"}]
)
def test_company_chunks_and_a_warm_cache_do_not_change_them(options: dict[str, Any]) -> None:
    given = prompts(4, seed=8)
    alone = [outputs(engine(), [(p, SCORE)])[0].prompt_logprobs for p in given]
    mixed = [SCORE, GREEDY, SCORE.with_changes(max_tokens=9), GREEDY.with_changes(prompt_logprobs=2)]
    core = engine(**options)
    warm = [(p, GREEDY) for p in given]
    texts = run(core, warm, close=False)  # the prefix cache now holds every prompt
    got = outputs(core, list(zip(given, mixed, strict=True)))
    for number in (0, 2, 3):
        assert same(got[number].prompt_logprobs, alone[number]), number
    assert got[1].prompt_logprobs is None and got[1].token_ids == texts[1]
    assert got[2].token_ids == texts[2][:9] and got[3].token_ids == texts[3]


def test_choices_each_have_them_and_generated_tokens_do_not() -> None:
    result = outputs(engine(), [(prompts(1)[0], SamplingParams(n=2, max_tokens=5, seed=1, prompt_logprobs=0))])[0]
    assert result.prompt_logprobs is not None and len(result.prompt_logprobs) == len(prompts(1)[0])
    assert all(entry is not None and entry.top == () for entry in result.prompt_logprobs[1:])
    assert [len(o.token_ids) for o in result.outputs] == [5, 5] and result.logprobs is None


def test_retraction_keeps_them() -> None:
    long = SamplingParams(temperature=0, max_tokens=70, ignore_eos=True, prompt_logprobs=1)
    given = prompts(5, seed=4, low=20, high=40)
    core = engine(page_size=16, overlap=True, num_pages=14, max_model_len=160, max_batched_tokens=16)
    got = outputs(core, [(p, long) for p in given])
    assert core.scheduler.preemptions > 0
    for prompt, result in zip(given, got, strict=True):
        roomy = outputs(engine(page_size=16, max_model_len=160), [(prompt, long)])[0]
        assert same(result.prompt_logprobs, roomy.prompt_logprobs) and result.token_ids == roomy.token_ids


def test_they_leave_nothing_in_the_prefix_cache() -> None:
    core = engine(page_size=16)
    outputs(core, [(prompts(1, low=80)[0], SCORE)])
    assert core.report()["cache"]["nodes"] == 0


@pytest.mark.parametrize("value", [-1, 21, True, "2"])
def test_a_bad_number_is_refused(value: Any) -> None:
    with pytest.raises(RequestError, match="prompt_logprobs"):
        SamplingParams(prompt_logprobs=value)
