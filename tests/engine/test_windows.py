"""Sliding windows: bounded pages, the reference's text, and prefixes reused while their window is alive."""

from __future__ import annotations

import random

import pytest

from octavo.engine.request import EngineRequest
from octavo.kv.sizing import swa_decode_bound_pages, swa_prefill_bound_pages
from octavo.model.registry import build_network
from octavo.params import SamplingParams
from tests.engine.test_core import GREEDY, run, solo
from tests.models.driver import Driver
from tests.tiny import EOS, engine, loaded_model

WINDOW = 24


def reference(kind: str, prompt: list[int], count: int, **model: object) -> list[int]:
    """The network alone over pages nobody evicts: only the mask makes the window."""
    loaded = loaded_model(kind, **model)
    network = build_network(loaded, page_size=16, threads=1)
    return Driver(network, max_tokens=len(prompt) + count).greedy([prompt], count)[0]


def tokens(count: int, seed: int = 2) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(EOS) for _ in range(count)]


@pytest.mark.parametrize("kind", ["gemma3", "sliding"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("overlap", [False, True])
def test_four_thousand_tokens_hold_few_window_pages(kind: str, page_size: int, overlap: bool) -> None:
    chunk, prompt = 256, tokens(3900)
    model = {"context_tokens": 4096}
    core = engine(kind, model=model, page_size=page_size, overlap=overlap, prefill_chunk=chunk, prefix_cache=False)
    core.add_request(EngineRequest("r", prompt, SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)))
    reserve = core.parts.reserve.tokens
    prefill = swa_prefill_bound_pages(WINDOW, chunk, page_size, overlap=overlap)
    decode = swa_decode_bound_pages(WINDOW, reserve, page_size)
    out: list[int] = []
    peak = {True: 0, False: 0}
    settled = 0
    while core.has_work():
        decoding = len(out) > 0
        for output in core.step():
            out.extend(output.token_ids)
        held = core.ledger.report(page_map=False)["pools"]["swa"]["held"]
        settled = settled + 1 if decoding else 0
        # the last chunk's pages leave with the first steps that are settled behind it
        peak[settled > 2] = max(peak[settled > 2], held)
    core.close()
    assert 0 < peak[False] <= prefill
    assert 0 < peak[True] <= decode
    if page_size == 16 and not overlap:
        assert out == reference(kind, prompt, 100, **model)


@pytest.mark.parametrize("kind", ["gemma3", "sliding"])
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("length", [WINDOW - 1, WINDOW, WINDOW + 1, 15, 16, 17, 32, 63, 64, 65, 128])
def test_warm_equals_cold_at_every_edge(kind: str, page_size: int, length: int) -> None:
    prompt = tokens(length, seed=length)
    core = engine(kind, page_size=page_size)
    cold = run(core, [(prompt, GREEDY)], close=False)[0]
    assert cold == solo(kind, prompt)
    assert run(core, [(prompt, GREEDY)], close=False)[0] == cold
    turn = prompt + cold + tokens(9, seed=3)
    assert run(core, [(turn, GREEDY)])[0] == solo(kind, turn)


@pytest.mark.parametrize("kind", ["llama", "gemma3", "sliding"])
@pytest.mark.parametrize("overlap", [False, True])
def test_turn_two_reuses_turn_one(kind: str, overlap: bool) -> None:
    core = engine(kind, page_size=16, overlap=overlap)
    first = tokens(100)
    answer = run(core, [(first, GREEDY)], close=False)[0]
    known = len(first) + len(answer)
    core.add_request(EngineRequest("two", [*first, *answer, *tokens(7, seed=8)], GREEDY))
    cached = {o.cached_tokens for _ in range(60) for o in core.step()}
    assert cached == {(known - 1) // 16 * 16}  # the newest token has no KV yet
    core.close()


def fresh_character(text: str) -> int | None:
    """Index of an ASCII character behind the first few that did not occur before: a stop that cuts there."""
    return next((i for i in range(4, len(text)) if text[i].isascii() and text.index(text[i]) == i), None)


@pytest.mark.parametrize("kind", ["llama", "gemma3", "sliding"])
def test_warm_text_after_a_stop_string(kind: str) -> None:
    core = engine(kind, page_size=16)
    for seed in range(40):
        prompt = tokens(50, seed)
        varied = SamplingParams(temperature=1.0, seed=seed, max_tokens=24, ignore_eos=True)
        free = run(core, [(prompt, varied)], close=False)[0]
        text = core.tokenizer.decode(free)
        at = fresh_character(text)
        if at is not None:
            break
    assert at is not None, "no prompt gave an answer with a new character in it"
    stopped = varied.with_changes(stop=[text[at]])
    for draft in ("none", "scripted"):
        other = engine(kind, page_size=16, draft=draft)
        cut = run(other, [(prompt, stopped)], close=False)[0]
        assert cut == free[: len(cut)] and len(cut) < len(free)
        follow = prompt + cut + tokens(20, seed=5)
        assert run(other, [(follow, GREEDY)])[0] == solo(kind, follow)


@pytest.mark.parametrize("kind", ["llama", "gemma3", "sliding"])
@pytest.mark.parametrize("overlap", [False, True])
def test_identical_cold_prompts_together_and_odd_shared_prefixes(kind: str, overlap: bool) -> None:
    shared = tokens(53)
    given = [shared + tokens(n, seed=n) for n in (0, 0, 0, 5, 11, 30)]
    core = engine(kind, page_size=16, overlap=overlap, max_batched_tokens=96)
    assert run(core, [(p, GREEDY) for p in given]) == [solo(kind, p) for p in given]
    remapped = core.ledger.report()["stats"]["remapped_pages"]
    assert remapped > 0
