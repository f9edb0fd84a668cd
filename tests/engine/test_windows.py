"""Sliding windows: bounded pages, the reference's text, and prefixes reused while their window is alive."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
from jsonschema import validate

from octavo.cli.books import print_books
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


SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "schemas" / "generate.json").read_text())


@pytest.mark.parametrize("kind", ["gemma3", "sliding"])
def test_the_report_says_what_the_second_pool_saves(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """W = 24, p = 16. A page of a layer takes 2 (K, V) · 2 heads · 16 tokens · 16 · 4 bytes = 4,096 bytes."""
    full_bytes, swa_bytes = {"gemma3": (2 * 4096, 4 * 4096), "sliding": (0, 4 * 4096)}[kind]
    core = engine(kind, page_size=16, overlap=False, max_running=3, prefill_chunk=64, max_model_len=400)

    def saving(full: int, swa: int) -> dict[str, int]:
        two, one = full * full_bytes + swa * swa_bytes, full * (full_bytes + swa_bytes)
        return {"full_pages": full, "swa_pages": swa, "two_pools_bytes": two, "one_pool_bytes": one,
                "saved_bytes": (full - swa) * swa_bytes}  # fmt: skip

    # 400 tokens: ceil(400/16) = 25 full pages each. SWA pages: ceil((24 + 64)/16) + 2 = 8 of the one in prefill,
    # ceil((24 + 1)/16) + 2 = 4 of the two that decode.
    capacity = {"requests": 3, "context_tokens": 400, **saving(75, 16)}
    sizes = {"gemma3": ("856.0 KiB", "1.8 MiB", "944.0 KiB"), "sliding": ("256.0 KiB", "1.2 MiB", "944.0 KiB")}[kind]
    fits = next(line for line in core.parts.startup_lines if line.startswith("fits "))
    assert fits.endswith(
        f"at most 3 run together; 3 of them take {sizes[0]} in two pools, {sizes[1]} in one for all layers "
        f"({sizes[2]} saved)"
    )
    core.add_request(EngineRequest("r", tokens(130), SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)))
    seen = []
    while core.has_work():
        core.step()
        seen.append(core.report()["sliding"]["now"])
    # chunks of 64, 64 and 2 tokens; floors floor_p(floor_p(64) − 24) = 32, then 96 of 128
    assert seen[:3] == [saving(4, 2), saving(8, 2), saving(9, 3)]
    # 169 tokens have KV at the last plan, one more is reserved: 11 pages; the floor of 160 is 128
    assert seen[-2:] == [saving(11, 3), saving(0, 0)]
    sliding = core.report()["sliding"]
    assert sliding == {"full_page_bytes": full_bytes, "swa_page_bytes": swa_bytes, "now": saving(0, 0),
                       "peak": saving(11, 3), "capacity": capacity}  # fmt: skip
    validate(core.report(), {"$ref": "#/$defs/books", "$defs": SCHEMA["$defs"]})
    print_books(SimpleNamespace(kv_report=core.report))  # type: ignore[arg-type]
    shown = capsys.readouterr().out.splitlines()[-4:]
    assert shown[0] == "KV of requests in two pools, and in one pool for all layers"
    assert shown[1].split() == ("now 0 full and 0 sliding-window pages, 0 B; in one pool 0 B: 0 B saved".split())
    assert shown[2].startswith("  at the peak       11 full and 3 sliding-window pages, ")
    assert shown[2].endswith("KiB: 128.0 KiB saved")
    assert shown[3].startswith("  3 × 400 tokens    75 full and 16 sliding-window pages, ")
    core.close()


def test_with_one_pool_nothing_is_said_of_a_second() -> None:
    core = engine("llama", page_size=16)
    assert "sliding" not in core.report() and not any("two pools" in line for line in core.parts.startup_lines)
    core.close()
