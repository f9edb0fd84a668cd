"""The engine on tiny random models: the same text whatever the page size, company, chunking, overlap, pressure."""

from __future__ import annotations

import itertools
import random

import pytest

from octavo.config import ServerConfig
from octavo.engine.core import EngineCore
from octavo.engine.request import EngineRequest
from octavo.errors import ConfigError, ContextLengthExceeded, NeverFits, QueueFull, RequestError
from octavo.params import SamplingParams
from tests.tiny import EOS, VOCAB, engine

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def prompts(count: int, seed: int = 1, low: int = 3, high: int = 90) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(EOS) for _ in range(rng.randint(low, high))] for _ in range(count)]


def run(core: EngineCore, calls: list[tuple[list[int], SamplingParams]], *, close: bool = True) -> list[list[int]]:
    """Token ids of each call's first choice, in order."""
    out: dict[str, list[int]] = {}
    for i, (tokens, params) in enumerate(calls):
        core.add_request(EngineRequest(f"r{i}", tokens, params))
        out[f"r{i}"] = []
    for _ in range(20_000):
        if not core.has_work():
            break
        for output in core.step():
            assert output.error is None, output.error
            if output.index == 0:
                out[output.request_id].extend(output.token_ids)
    assert not core.has_work()
    if close:
        core.close()
    return [out[f"r{i}"] for i in range(len(calls))]


def solo(kind: str, tokens: list[int], params: SamplingParams = GREEDY) -> list[int]:
    return run(engine(kind, prefix_cache=False), [(tokens, params)])[0]


@pytest.fixture(scope="module")
def reference() -> dict[str, list[list[int]]]:
    return {kind: [solo(kind, p) for p in prompts(6)] for kind in ("llama", "gemma3", "sliding")}


@pytest.mark.parametrize("kind", ["llama", "gemma3", "sliding"])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page_size", [1, 16, 64, 256])
def test_company_pages_and_overlap_do_not_change_the_text(
    kind: str, overlap: bool, page_size: int, reference: dict[str, list[list[int]]]
) -> None:
    core = engine(kind, page_size=page_size, overlap=overlap, max_batched_tokens=64)
    assert run(core, [(p, GREEDY) for p in prompts(6)]) == reference[kind]


@pytest.mark.parametrize("kind", ["llama", "gemma3", "sliding"])
@pytest.mark.parametrize("chunk", [1, 7, 33])
def test_chunking_does_not_change_the_text(kind: str, chunk: int, reference: dict[str, list[list[int]]]) -> None:
    core = engine(kind, max_batched_tokens=64, prefill_chunk=chunk, overlap=True)
    assert run(core, [(p, GREEDY) for p in prompts(6)]) == reference[kind]


@pytest.mark.parametrize("kind", ["llama", "gemma3", "sliding"])
@pytest.mark.parametrize("overlap", [False, True])
def test_warm_text_equals_cold_text(kind: str, overlap: bool, reference: dict[str, list[list[int]]]) -> None:
    core = engine(kind, page_size=16, overlap=overlap)
    calls = [(p, GREEDY) for p in prompts(6)]
    assert run(core, calls, close=False) == reference[kind]
    before = core.stats().cache_hit_tokens
    assert run(core, calls) == reference[kind]
    assert core.stats().cache_hit_tokens > before


@pytest.mark.parametrize("kind", ["llama", "gemma3", "sliding"])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page_size", [1, 16])
def test_pressure_does_not_change_the_text(
    kind: str, overlap: bool, page_size: int, reference: dict[str, list[list[int]]]
) -> None:
    pages = {"num_pages": 160 // page_size, **({} if kind == "llama" else {"num_swa_pages": 160 // page_size})}
    core = engine(kind, page_size=page_size, overlap=overlap, max_batched_tokens=32, max_model_len=128, **pages)
    assert run(core, [(p, GREEDY) for p in prompts(6)]) == reference[kind]
    if kind != "sliding":
        assert core.scheduler.preemptions > 0


def test_pressure_with_many_requests_starves_nobody() -> None:
    core = engine(page_size=16, num_pages=24, max_running=16, overlap=True, max_batched_tokens=64, max_model_len=256)
    calls = [(p, GREEDY) for p in prompts(40, seed=3, low=20, high=120)]
    assert all(len(tokens) == 24 for tokens in run(core, calls))
    assert core.scheduler.preemptions > 0


@pytest.mark.parametrize("overlap", [False, True])
def test_abort_at_every_moment_closes_the_books(overlap: bool) -> None:
    for when in range(12):
        core = engine("gemma3", page_size=16, overlap=overlap, max_batched_tokens=32)
        for i, tokens in enumerate(prompts(4, seed=5)):
            core.add_request(EngineRequest(f"r{i}", tokens, GREEDY))
        for step in itertools.count():
            if not core.has_work():
                break
            if step == when:
                core.abort("r1")
                core.abort("r3")
            core.step()
        core.close()


def test_abort_reports_the_end_and_leaves_others_alone(reference: dict[str, list[list[int]]]) -> None:
    core = engine(overlap=True)
    given = prompts(6)
    for i in range(3):
        core.add_request(EngineRequest(f"r{i}", given[i], GREEDY))
    text: dict[str, list[int]] = {f"r{i}": [] for i in range(3)}
    ends: dict[str, str | None] = {}
    for step in range(200):
        if step == 5:
            core.abort("r1")
        for output in core.step():
            text[output.request_id].extend(output.token_ids)
            if output.finished:
                ends[output.request_id] = output.finish_reason
        if not core.has_work():
            break
    assert ends == {"r0": "length", "r1": "abort", "r2": "length"}
    assert text["r0"] == reference["llama"][0] and text["r2"] == reference["llama"][2]
    core.close()


def test_seeded_samples_do_not_depend_on_company() -> None:
    params = [
        SamplingParams(temperature=0.9, seed=i, max_tokens=16, ignore_eos=True, top_k=40, top_p=0.95,
                       repetition_penalty=1.1, presence_penalty=0.2)
        for i in range(4)
    ]  # fmt: skip
    given = prompts(4, seed=9)
    alone = [run(engine(), [(p, s)])[0] for p, s in zip(given, params, strict=True)]
    for overlap in (False, True):
        together = run(engine(overlap=overlap, max_batched_tokens=32), list(zip(given, params, strict=True)))
        assert together == alone


def test_choices_differ_and_repeat() -> None:
    params = SamplingParams(temperature=1.0, n=3, seed=7, max_tokens=12, ignore_eos=True)

    def choices() -> dict[int, list[int]]:
        core = engine()
        core.add_request(EngineRequest("r", prompts(1)[0], params))
        out: dict[int, list[int]] = {0: [], 1: [], 2: []}
        while core.has_work():
            for output in core.step():
                out[output.index].extend(output.token_ids)
        core.close()
        return out

    first = choices()
    assert first == choices()
    assert len({tuple(v) for v in first.values()}) == 3


def test_logprobs_are_those_of_the_model() -> None:
    core = engine()
    core.add_request(EngineRequest("r", prompts(1)[0], SamplingParams(temperature=0, max_tokens=5, logprobs=3)))
    seen = []
    while core.has_work():
        for output in core.step():
            seen.extend(output.logprobs or [])
    core.close()
    assert len(seen) == 5
    for entry in seen:
        assert len(entry.top) == 3 and entry.top[0][0] == entry.token_id
        assert entry.logprob == pytest.approx(entry.top[0][1]) and entry.logprob <= 0


def test_max_tokens_zero_and_huge() -> None:
    core = engine()
    core.add_request(EngineRequest("zero", [1, 2, 3], SamplingParams(max_tokens=0)))
    outputs = core.step()
    assert [(o.finish_reason, o.text) for o in outputs] == [("length", "")]
    core.add_request(EngineRequest("huge", [1, 2, 3], SamplingParams(temperature=0, max_tokens=10**9, ignore_eos=True)))
    total = 0
    while core.has_work():
        total += sum(len(o.token_ids) for o in core.step())
    assert total == core.max_model_len - 3
    core.close()


def test_bad_requests_are_refused_and_change_nothing() -> None:
    core = engine(num_pages=8, page_size=16, max_model_len=100)
    with pytest.raises(RequestError, match="empty"):
        core.add_request(EngineRequest("a", [], GREEDY))
    with pytest.raises(RequestError, match=str(VOCAB)):
        core.add_request(EngineRequest("b", [VOCAB], GREEDY))
    with pytest.raises(ContextLengthExceeded, match="100"):
        core.add_request(EngineRequest("c", [1] * 100, GREEDY))
    core.add_request(EngineRequest("d", [1, 2], GREEDY))
    with pytest.raises(RequestError, match="in use"):
        core.add_request(EngineRequest("d", [1, 2], GREEDY))
    while core.has_work():
        core.step()
    core.close()


def test_a_pool_too_small_is_refused_at_start() -> None:
    with pytest.raises(ConfigError, match="num_pages"):
        engine(num_pages=1, page_size=1)
    with pytest.raises(ConfigError, match="max_model_len"):
        engine(num_pages=4, page_size=16, max_model_len=400)
    with pytest.raises(ConfigError, match="page_size"):
        engine(page_size=3)


def test_a_request_that_can_never_fit_is_refused() -> None:
    core = engine(num_pages=8, page_size=16, max_model_len=100, overlap=True)
    core.ledger.can_ever_fit(10, 20, core.parts.reserve)
    with pytest.raises(NeverFits):
        core.ledger.can_ever_fit(99, 4000, 200)
    core.close()


def test_three_hundred_requests_at_once() -> None:
    core = engine(page_size=16, max_running=32, overlap=True)
    given = prompts(300, seed=12, low=3, high=12)
    short = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    answers = run(core, [(p, short) for p in given])
    assert all(len(answer) == 4 for answer in answers)
    assert answers[7] == solo("llama", given[7], short)


def test_more_choices_than_a_server_could_ever_take_are_a_mistake_of_the_call() -> None:
    core = engine(max_running=2)
    core.config = ServerConfig.from_options({"max_running": 2, "max_queue": 3}, environ={})
    with pytest.raises(RequestError, match="n: got 6; this server takes at most 5"):
        core.add_request(EngineRequest("r", [1, 2], SamplingParams(n=6)))
    core.add_request(EngineRequest("fits", [1, 2], SamplingParams(n=5, max_tokens=1)))
    with pytest.raises(QueueFull):
        core.add_request(EngineRequest("later", [1, 2], SamplingParams(n=1, max_tokens=1)))
    while core.has_work():
        core.step()
    core.close()
