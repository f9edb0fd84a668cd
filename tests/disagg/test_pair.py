"""Two engines, one text: what a prefill and a decode engine write together is what one engine writes alone."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.params import SamplingParams
from tests.disagg.pair import Pair
from tests.engine.test_core import GREEDY, prompts, solo
from tests.engine.test_drafts import drafts

__all__ = ["drafts"]

MIXED = [
    SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=11, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0.7, top_k=12, top_p=0.9, seed=5, max_tokens=20, ignore_eos=True,
                   repetition_penalty=1.3),  # fmt: skip
    SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, presence_penalty=1.0, frequency_penalty=0.5),
    SamplingParams(temperature=0.6, min_p=0.02, seed=9, max_tokens=20, logit_bias={7: 3.0}, min_tokens=15),
]
KINDS = ("llama", "gemma3", "sliding")
WINDOW = 24


@pytest.fixture(scope="module")
def alone() -> dict[str, list[list[int]]]:
    return {kind: [solo(kind, p, s) for p, s in zip(prompts(5), MIXED, strict=True)] for kind in KINDS}


def ask_all(pair: Pair, tag: str = "r") -> list[list[int]]:
    for i, (tokens, params) in enumerate(zip(prompts(5), MIXED, strict=True)):
        pair.ask(f"{tag}{i}", tokens, params)
    pair.run()
    assert all(pair.end("decode", f"{tag}{i}").error is None for i in range(5))
    return [pair.tokens(f"{tag}{i}") for i in range(5)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("overlap", [False, True])
def test_two_engines_write_what_one_writes(
    kind: str, page_size: int, overlap: bool, alone: dict[str, list[list[int]]]
) -> None:
    pair = Pair(kind, page_size=page_size, overlap=overlap, max_batched_tokens=48)
    assert ask_all(pair) == alone[kind]
    hits = pair.decode.stats().cache_hit_tokens
    assert ask_all(pair, "warm") == alone[kind]
    if page_size < 64:
        assert pair.decode.stats().cache_hit_tokens > hits, "the second time the decode side has the prefix"
    pair.close()


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("name", ["ngram", "eagle3", "dflash", "ngram+eagle3"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_with_drafts(
    kind: str, name: str, page_size: int, alone: dict[str, list[list[int]]], drafts: dict[str, str]
) -> None:
    options: dict[str, Any] = {"draft": name, "draft_adaptive": False}
    if name != "ngram":
        options["draft_model"] = drafts[f"{kind}-{name.removeprefix('ngram+')}"]
    pair = Pair(kind, page_size=page_size, max_batched_tokens=48, **options)
    assert ask_all(pair) == alone[kind]
    assert ask_all(pair, "warm") == alone[kind]
    pair.close()


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("length", [1, 2, WINDOW - 1, WINDOW, WINDOW + 1, 63, 64, 65, 128])
def test_lengths_around_window_and_page(page_size: int, length: int) -> None:
    tokens = prompts(1, seed=length, low=length, high=length)[0]
    pair = Pair("gemma3", page_size=page_size, max_batched_tokens=128)
    pair.ask("r", tokens, GREEDY)
    pair.run()
    assert pair.tokens("r") == solo("gemma3", tokens)
    pair.close()


def test_chunks_travel_while_later_ones_are_computed() -> None:
    tokens = prompts(1, seed=2, low=90, high=90)[0]
    pair = Pair("gemma3", page_size=16, prefill_chunk=20, max_batched_tokens=20)
    pair.ask("r", tokens, GREEDY)
    seen = []
    for _ in range(12):
        pair.step()
        seen.append(pair.wire.reads)
    assert len({n for n in seen if n}) > 2, "reads are spread over the chunks"
    pair.run()
    assert pair.tokens("r") == solo("gemma3", tokens)
    assert pair.end("prefill", "r").finish_reason == "length"
    pair.close()


def test_only_the_tail_of_a_window_travels() -> None:
    tokens = prompts(1, seed=2, low=96, high=96)[0]
    pair = Pair("gemma3", page_size=8)
    pair.ask("r", tokens, GREEDY)
    pair.run()
    sides = pair.decode.side
    full, swa = (sides.regions[name].page_bytes for name in ("full", "swa"))
    assert sides.tally.bytes == 12 * full + 3 * swa
    assert sides.tally.skipped_bytes == 9 * swa
    pair.close()


def test_choices_have_rooms_of_their_own() -> None:
    params = SamplingParams(temperature=1.0, n=3, seed=7, max_tokens=12, ignore_eos=True)
    tokens = prompts(1)[0]
    pair = Pair()
    pair.ask("r", tokens, params)
    pair.run()
    got = [pair.tokens("r", i) for i in range(3)]
    from tests.tiny import engine

    core, want = engine(), [[], [], []]
    from octavo.engine.request import EngineRequest

    core.add_request(EngineRequest("r", tokens, params))
    while core.has_work():
        for output in core.step():
            want[output.index].extend(output.token_ids)
    core.close()
    assert got == want and len({tuple(t) for t in got}) == 3
    pair.close()


def test_logprobs_stops_and_schema_cross_over() -> None:
    from octavo.engine.request import EngineRequest
    from tests.tiny import engine

    tokens = prompts(1)[0]
    plain = solo("llama", tokens)
    pair = Pair()
    pair.ask("lp", tokens, SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=3))
    pair.ask("one", tokens, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    pair.ask("eos", tokens, SamplingParams(temperature=0, max_tokens=9, stop_token_ids=[plain[0]]))
    pair.ask("zero", tokens, SamplingParams(temperature=0, max_tokens=0))
    pair.ask("re", tokens, SamplingParams(temperature=0, max_tokens=30, regex="[ab]{4}c"))
    pair.run()
    entries = [e for o in pair.outputs["decode", "lp"] for e in o.logprobs or []]
    assert len(entries) == 5 and all(len(e.top) == 3 and e.top[0][0] == e.token_id for e in entries)
    core, own = engine(), []
    core.add_request(EngineRequest("lp", tokens, SamplingParams(temperature=0, max_tokens=5, ignore_eos=True,
                                                                logprobs=3)))
    while core.has_work():
        own += [e for o in core.step() for e in o.logprobs or []]
    core.close()
    assert entries == own, "those of one server, the first token's included"
    assert pair.tokens("one") == plain[:1] and pair.end("decode", "one").finish_reason == "length"
    assert pair.end("decode", "eos").finish_reason == "stop" and pair.end("decode", "eos").stop_reason == plain[0]
    assert pair.end("decode", "zero").finish_reason == "length"
    text = pair.text("re")
    assert len(text) == 5 and text[4] == "c" and set(text[:4]) <= set("ab")
    pair.close()


def test_stop_strings_cross_over() -> None:
    """A stop string may begin with the token that the prefill server samples: both hold its text back."""
    shaped = {"regex": "[ab]{4}c[ab]{9}", "temperature": 0, "max_tokens": 30}
    tokens = prompts(1)[0]
    pair = Pair()
    pair.ask("whole", tokens, SamplingParams(**shaped))
    pair.run()
    whole = pair.text("whole")
    assert len(whole) == 14
    for name, stop, kept in (("first", whole[:2], ""), ("later", "c" + whole[5], whole[:4])):
        pair.ask(name, tokens, SamplingParams(**shaped, stop=[stop]))
        pair.run()
        end = pair.end("decode", name)
        assert (pair.text(name), end.finish_reason, end.stop_reason) == (kept, "stop", stop)
    pair.close()


@pytest.mark.parametrize("page_size", [4, 16])
def test_pressure_on_the_decode_side_retracts_and_resumes(page_size: int) -> None:
    given = prompts(8, seed=4, low=10, high=20)
    long = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    expected = [solo("gemma3", p, long) for p in given]
    pair = Pair("gemma3", page_size=page_size, max_model_len=128,
                decode={"num_pages": 192 // page_size, "num_swa_pages": 200 // page_size}, max_batched_tokens=64)
    for i, tokens in enumerate(given):
        pair.ask(f"r{i}", tokens, long)
    pair.run()
    assert [pair.tokens(f"r{i}") for i in range(len(given))] == expected
    assert pair.decode.scheduler.preemptions > 0
    pair.close()


def test_pressure_on_the_prefill_side_waits_for_readers() -> None:
    given = prompts(8, seed=6, low=40, high=100)
    pair = Pair(page_size=16, max_model_len=128, max_running=8, prefill={"num_pages": 17}, max_batched_tokens=32)
    for i, tokens in enumerate(given):
        pair.ask(f"r{i}", tokens, GREEDY)
    pair.run()
    assert [pair.tokens(f"r{i}") for i in range(8)] == [solo("llama", p) for p in given]
    pair.close()


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("name", ["ngram", "eagle3", "dflash", "ngram+eagle3", "ngram+dflash"])
def test_the_acceptance_is_that_of_one_server(kind: str, name: str, drafts: dict[str, str]) -> None:
    """Draft KV and seed cross over: the very first proposal is the one a single server makes."""
    from octavo.engine.request import EngineRequest
    from tests.tiny import engine

    options: dict[str, Any] = {"draft": name, "draft_adaptive": False}
    if name != "ngram":
        options["draft_model"] = drafts[f"{kind}-{name.removeprefix('ngram+')}"]
    given = [tokens * 3 for tokens in prompts(6, seed=8, low=5, high=40)]  # something to look up, pages beyond a window
    core = engine(kind, **options)
    pair = Pair(kind, **options)
    for i, tokens in enumerate(given):
        core.add_request(EngineRequest(f"r{i}", tokens, GREEDY))
        pair.ask(f"r{i}", tokens, GREEDY)
    while core.has_work():
        core.step()
    pair.run()
    theirs, ours = core.report()["speculation"], pair.decode.report()["speculation"]
    assert ours == theirs and ours["draft_tokens"] > 0
    core.close()
    pair.close()
