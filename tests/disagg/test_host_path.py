"""The direct host path: a decode server with HiSparse takes KV into its host tier and writes what one engine writes."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.errors import HandoverTimeout
from octavo.kv.balance import raise_on
from octavo.params import SamplingParams
from tests.disagg.pair import Pair
from tests.disagg.test_pair import drafts as drafts
from tests.engine.test_core import prompts, run
from tests.engine.test_hisparse import MIXED, SPARSE, draft_options, draft_prompts, long_prompts, sparse

KINDS = ("llama", "gemma3")
TIERS = {name: SPARSE[name] for name in ("hisparse", "topk_pages", "recent_tokens", "sparse_dense_layers")}
COMMON = {"page_size": 8, "max_batched_tokens": 96}


def pair(kind: str, *, decode: dict[str, Any] | None = None, **options: Any) -> Pair:
    given = {**TIERS, "device_pages": 8, "num_pages": 160, **(decode or {})}
    return Pair(kind, decode=given, **{**COMMON, **options})


def calls() -> list[tuple[list[int], SamplingParams]]:
    return list(zip(long_prompts(), MIXED, strict=True))


def ask(p: Pair, tag: str, given: list[tuple[list[int], SamplingParams]]) -> list[list[int]]:
    for i, (tokens, params) in enumerate(given):
        p.ask(f"{tag}{i}", tokens, params)
    p.run()
    assert all(p.end("decode", f"{tag}{i}").error is None for i in range(len(given)))
    return [p.tokens(f"{tag}{i}") for i in range(len(given))]


@pytest.fixture(scope="module")
def texts() -> dict[str, list[list[int]]]:
    return {kind: run(sparse(kind), calls()) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("overlap", [False, True])
def test_kv_lands_in_the_host_tier(kind: str, overlap: bool, texts: dict[str, list[list[int]]]) -> None:
    p = pair(kind, overlap=overlap)
    assert ask(p, "cold", calls()) == texts[kind]
    tiers = p.decode.report()["tiers"]
    assert tiers["loaded_pages"] > 0
    hits = p.decode.stats().cache_hit_tokens
    assert ask(p, "warm", calls()) == texts[kind]  # the prefix is here: only the rest travels
    assert p.decode.stats().cache_hit_tokens > hits
    p.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["eagle3", "tree", "dflash"])
def test_draft_kv_lands_there_too(kind: str, name: str, drafts: dict[str, str]) -> None:
    options = draft_options(name, kind, drafts)
    given = list(zip(draft_prompts(), MIXED[:2], strict=True))
    alone = run(sparse(kind, **options), given)
    p = pair(kind, decode={"device_pages": 24}, **options)
    assert ask(p, "r", given) == alone
    p.close()


def test_slots_are_taken_after_success_and_waited_for(texts: dict[str, list[list[int]]]) -> None:
    """Slots for one row: the others have landed in the host tier and decode one behind the other."""
    one = {"num_pages": None, "kv_memory": "340KiB", "host_memory": "2MiB"}
    p = pair("llama", decode=one)
    tiers = p.decode.ledger.tiers
    assert tiers is not None and tiers.slots.total < 16
    assert ask(p, "r", calls()) == texts["llama"]
    p.close()


def test_waiting_for_slots_has_a_deadline() -> None:
    """The holder of the slots takes no step while the time runs out."""
    p = pair("llama", decode={"num_pages": None, "kv_memory": "340KiB", "host_memory": "2MiB", "room_timeout_s": 3.0})
    prompt = prompts(1, seed=5, low=30, high=40)[0]
    endless = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
    p.ask("first", prompt, endless)
    for _ in range(4000):
        p.step()
        if ("decode", "first") in p.outputs:
            break
    p.ask("second", prompt[::-1], endless)
    for _ in range(20):
        p.step()
    assert ("decode", "second") not in p.outputs and not p.outputs["decode", "first"][-1].finished
    p.clock.advance(3.1)
    p.step()
    assert isinstance(p.end("decode", "second").error, HandoverTimeout)
    p.decode.abort("first")
    p.run()
    p.close()


@pytest.mark.parametrize("kind", KINDS)
def test_pressure_on_the_decode_side(kind: str, texts: dict[str, list[list[int]]]) -> None:
    p = pair(kind, decode={"num_pages": 52, "host_memory": "8MiB", "max_model_len": 260}, prefix_cache=False)
    assert ask(p, "r", calls()) == texts[kind]
    p.close()


def test_an_abort_while_kv_arrives_closes_the_tiers() -> None:
    p = pair("gemma3")
    for i, (tokens, params) in enumerate(calls()):
        p.ask(f"r{i}", tokens, params)
    while not p.leased():
        p.step()
    p.decode.abort("r0")
    p.run()
    raise_on(p.decode.ledger)
    p.close()


def test_lengths_around_window_and_page() -> None:
    """The floor of the sliding window is checked on this path with lengths, not with mocked results."""
    for length in (24, 31, 33, 48):
        prompt = prompts(1, seed=length, low=length, high=length)[0]
        alone = run(sparse("gemma3"), [(prompt, MIXED[0])])
        p = pair("gemma3")
        assert ask(p, "r", [(prompt, MIXED[0])]) == alone
        p.close()
