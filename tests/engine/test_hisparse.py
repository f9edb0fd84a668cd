"""HiSparse in the engine: exact where it must be, the same text whatever company, drafts, cache, pressure; books close.

The tiny models are long enough in these tests that most queries select pages; what a selection itself may change of
the text is not tested here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo.engine.request import EngineRequest
from octavo.errors import ConfigError, ContextLengthExceeded
from octavo.kv.trace import replay
from octavo.params import SamplingParams
from tests.engine.test_core import prompts, run
from tests.engine.test_drafts import drafts
from tests.engine.test_launch_path import guarded
from tests.tiny import engine

__all__ = ["drafts"]

LONG = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
MIXED = [
    LONG,
    SamplingParams(temperature=0.9, seed=11, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, presence_penalty=1.0),
]
SPARSE = {
    "hisparse": True, "device_pages": 24, "topk_pages": 2, "recent_tokens": 32, "page_size": 8,
    "sparse_dense_layers": 1, "max_batched_tokens": 96, "num_pages": 160,
}  # fmt: skip
KINDS = ("llama", "gemma3")


def sparse(kind: str, **options: Any) -> Any:
    return engine(kind, **{**SPARSE, "device_pages": 8 if "draft" not in options else 24, **options})


def long_prompts() -> list[list[int]]:
    """Two that are longer than a buffer of 8 pages of 8 tokens before they decode, one that grows past it."""
    long = prompts(2, seed=3, low=150, high=200)
    return [*long, prompts(1, seed=8, low=40, high=50)[0]]


@pytest.fixture(scope="module")
def texts() -> dict[str, list[list[int]]]:
    """What each request says alone, on a small buffer, without drafts."""
    made = {}
    for kind in KINDS:
        core = sparse(kind)
        made[kind] = [run(core, [call], close=False)[0] for call in zip(long_prompts(), MIXED, strict=True)]
        core.close()
    return made


@pytest.fixture(scope="module")
def dense() -> dict[str, list[list[int]]]:
    return {
        kind: run(engine(kind, page_size=16, num_pages=100), list(zip(long_prompts(), MIXED, strict=True)))
        for kind in KINDS
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("page_size", "topk_pages", "device_pages"), [(16, 6, 16), (32, 3, 9)])
@pytest.mark.parametrize("overlap", [False, True])
def test_with_all_pages_selected_the_text_is_dense(
    kind: str, page_size: int, topk_pages: int, device_pages: int, overlap: bool, dense: dict[str, list[list[int]]]
) -> None:
    """topk_pages >= all candidates behind the length at which selection begins: every token as without --hisparse."""
    core = engine(
        kind, page_size=page_size, overlap=overlap, num_pages=100, hisparse=True, topk_pages=topk_pages,
        device_pages=device_pages, recent_tokens=128, max_batched_tokens=96, sparse_dense_layers=0,
    )  # fmt: skip
    lengths = [len(prompt) + 40 for prompt in long_prompts()]
    assert core.ledger.tiers is not None
    assert core.ledger.tiers.dense_limit < max(lengths) <= (topk_pages + 1) * page_size + 128
    assert run(core, list(zip(long_prompts(), MIXED, strict=True))) == dense[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_what_fits_the_buffer_is_dense(kind: str, dense: dict[str, list[list[int]]]) -> None:
    """length <= buffer, one page selected: the text is dense, and drops to selection exactly at the limit."""
    core = engine(kind, page_size=16, num_pages=100, hisparse=True, topk_pages=1, device_pages=20, recent_tokens=64)
    assert core.ledger.tiers is not None and core.ledger.tiers.dense_limit == 256
    assert run(core, list(zip(long_prompts(), MIXED, strict=True))) == dense[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_selection_is_at_work(kind: str, texts: dict[str, list[list[int]]], dense: dict[str, list[list[int]]]) -> None:
    assert texts[kind] != dense[kind]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("overlap", [False, True])
def test_company_chunks_and_cache_do_not_change_the_text(
    kind: str, overlap: bool, texts: dict[str, list[list[int]]]
) -> None:
    core = sparse(kind, overlap=overlap)
    calls = list(zip(long_prompts(), MIXED, strict=True))
    assert run(core, calls, close=False) == texts[kind]
    hits = core.stats().cache_hit_tokens
    assert run(core, calls[::-1], close=False) == texts[kind][::-1]  # warm
    assert core.stats().cache_hit_tokens > hits
    assert core.report()["tiers"]["backed_up_pages"] > 0
    core.close()
    other = sparse(kind, overlap=overlap, max_batched_tokens=33)
    assert run(other, calls) == texts[kind]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("overlap", [False, True])
def test_pressure_does_not_change_the_text(kind: str, overlap: bool, texts: dict[str, list[list[int]]]) -> None:
    """Logical pages are short, the host tier is not: requests are retracted into it and nothing is computed twice."""
    core = sparse(kind, overlap=overlap, num_pages=52, host_memory="8MiB", max_model_len=260, prefix_cache=False)
    calls = list(zip(long_prompts(), MIXED, strict=True))
    assert run(core, calls, close=False) == texts[kind]
    tiers = core.report()["tiers"]
    assert tiers["retracted"] > 0 and tiers["resumed"] == tiers["retracted"]
    core.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("overlap", "pressure"), [(False, True), (True, True), (True, False)])
def test_a_recorded_run_is_replayed_with_its_tiers(kind: str, overlap: bool, pressure: bool, tmp_path: Path) -> None:
    """On the same books the same figures, warm requests or retractions included; on others no law breaks."""
    path = tmp_path / "trace.jsonl"
    sizes: dict[str, Any] = {"num_pages": 52, "prefix_cache": False} if pressure else {}
    sizes |= {"device_pages": 12, "host_memory": "8MiB", "max_model_len": 260}
    core = sparse(kind, overlap=overlap, record_trace=str(path), **sizes)
    calls = list(zip(long_prompts(), MIXED, strict=True))
    texts = run(core, calls, close=False)
    run(core, [(calls[2][0] + texts[2], LONG)], close=False)  # warm
    seen, stats = core.report(), core.stats()
    core.close()
    got = replay(path)
    assert (got["violations"], got["preemptions"], got["waiting_at_end"]) == (0, 0, 0)
    names = ("backed_up_pages", "retracted", "resumed", "dropped_tickets", "offloaded_pages", "loaded_back_pages")
    assert got["tiers"] == {name: seen["tiers"][name] for name in names} | {
        "recorded_hits": seen["tiers"]["hits"], "recorded_swaps": seen["tiers"]["swaps"],
    }  # fmt: skip
    assert got["tiers"]["recorded_swaps"] > 0 and (got["tiers"]["retracted"] > 0) == pressure
    assert got["hits"] == stats.cache_hit_tokens and (got["hits"] > 0) != pressure
    assert got["peak_pages"] == {name: pool["peak_used"] for name, pool in seen["pools"].items()}
    for other_sizes in ({"page_size": 4}, {"page_size": 16}, {"num_pages": 36}, {"host_pages": 40}):
        other = replay(path, **other_sizes)
        assert (other["violations"], other["waiting_at_end"]) == (0, 0), other_sizes
    assert other["peak_pages"]["host"] <= 40
    assert replay(path, num_pages=36)["preemptions"] > 0


def test_too_few_slots_make_a_request_wait(texts: dict[str, list[list[int]]]) -> None:
    core = sparse("llama", num_pages=None, kv_memory="440KiB", max_running=4, host_memory="2MiB")
    calls = list(zip(long_prompts(), MIXED, strict=True))
    assert core.ledger.tiers is not None
    slots = core.ledger.tiers.slots.total
    assert slots < 3 * 8
    assert run(core, calls) == texts["llama"]


def test_host_pages_are_promised(texts: dict[str, list[list[int]]]) -> None:
    """A host tier for one long request at a time: the others wait, nobody is retracted or fails."""
    core = sparse("llama", num_pages=32, max_model_len=245)
    calls = list(zip(long_prompts(), MIXED, strict=True))
    assert run(core, calls, close=False) == texts["llama"]
    assert core.scheduler.preemptions == 0
    core.close()


def test_the_host_tier_bounds_the_context() -> None:
    """39 pages and the spare one: the context is cut to what they hold, a longer prompt is refused at arrival."""
    core = sparse("llama", num_pages=80, host_memory=40 * 8 * 4 * 2 * 2 * 16 * 4)
    assert core.max_model_len == 39 * 8
    with pytest.raises(ContextLengthExceeded):
        core.add_request(EngineRequest("long", list(range(200)) * 2, LONG))
    core.close()


# --- drafts ------------------------------------------------------------------------------------------------------


def draft_options(name: str, kind: str, drafts: dict[str, str]) -> dict[str, Any]:
    if name in ("eagle3", "dflash"):
        return {"draft": name, "draft_model": drafts[f"{kind}-{name}"], "draft_adaptive": False}
    if name.startswith("ngram+"):
        return {"draft": name, "draft_model": drafts[f"{kind}-{name.removeprefix('ngram+')}"]}
    if name == "tree":
        return {"draft": "eagle3", "draft_model": drafts[f"{kind}-eagle3"], "draft_adaptive": False,
                "draft_steps": 3, "draft_topk": 3, "draft_tokens": 8}  # fmt: skip
    if name == "scripted tree":
        return {"draft": "scripted", "draft_topk": 3, "draft_steps": 3, "draft_adaptive": False}
    return {"draft": name, "draft_adaptive": False}


@pytest.fixture(scope="module")
def wide_texts() -> dict[str, list[list[int]]]:
    """Without drafts, on the buffer the drafts get: longer prompts, so that queries select on it too."""
    made = {}
    for kind in KINDS:
        core = sparse(kind, draft="none")
        made[kind] = run(core, list(zip(draft_prompts(), MIXED[:2], strict=True)))
    return made


def draft_prompts() -> list[list[int]]:
    return [(prompts(1, seed=s, low=120, high=130)[0] * 3)[:300] for s in (3, 4)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", ["scripted", "scripted tree", "ngram", "eagle3", "tree", "dflash", "ngram+eagle3"])
def test_drafts_do_not_change_the_text(
    kind: str, overlap: bool, name: str, wide_texts: dict[str, list[list[int]]], drafts: dict[str, str]
) -> None:
    core = sparse(kind, overlap=overlap, **draft_options(name, kind, drafts))
    calls = list(zip(draft_prompts(), MIXED[:2], strict=True))
    assert run(core, calls, close=False) == wide_texts[kind]
    assert core.stats().drafts > 0
    assert run(core, calls) == wide_texts[kind]  # warm


@pytest.mark.parametrize("name", ["scripted", "eagle3", "tree", "dflash"])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_under_pressure(
    kind: str, name: str, wide_texts: dict[str, list[list[int]]], drafts: dict[str, str]
) -> None:
    core = sparse(kind, overlap=True, num_pages=84, host_memory="8MiB", max_model_len=345, prefix_cache=False,
                  **draft_options(name, kind, drafts))  # fmt: skip
    assert run(core, list(zip(draft_prompts(), MIXED[:2], strict=True)), close=False) == wide_texts[kind]
    assert core.report()["tiers"]["resumed"] > 0
    core.close()


def test_drafts_are_as_long_as_their_pages_fit() -> None:
    """m rows of 2 pages and what always counts: 8 pages of 8 tokens hold one row, so nothing is drafted."""
    prompt = draft_prompts()[0]
    for device_pages, most in ((8, 0), (11, 1), (24, 5)):
        core = engine(**{**SPARSE, "device_pages": device_pages}, draft="ngram", draft_adaptive=False)
        assert core.tiers is not None
        assert min(core.tiers.max_draft_tokens, core.parts.drafter.max_draft_tokens) == most
        run(core, [(prompt, LONG)], close=False)
        assert (core.stats().drafts > 0) == (most > 0)
        core.close()


# --- options -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"device_pages": 3}, ["device_pages", "3", "at least"]),
        ({"recent_tokens": 4, "draft": "ngram"}, ["recent_tokens", "4", "at least", "reserve"]),
        ({"sparse_dense_layers": 4}, ["hisparse", "sparse-dense-layers"]),
        ({"host_memory": "1KiB"}, ["host_memory", "1024", "at least"]),
        ({"page_selector": "octavo.nothing:Here"}, ["page_selector", "octavo.nothing:Here", "module:Class"]),
        ({"page_selector": "octavo.errors:ConfigError"}, ["page_selector", "module:Class"]),
        ({"num_pages": None, "kv_memory": "64KiB"}, ["kv_memory", "64.0 KiB", "buffer"]),
        ({"role": "prefill"}, ["hisparse", "role"]),
        ({"max_model_len": 500, "num_pages": 20}, ["max_model_len", "500", "host tier"]),
        ({"hisparse": False}, ["device_pages", "--hisparse"]),
        ({"host_tier_path": "/nowhere/at/all"}, ["host_tier_path", "/nowhere/at/all"]),
    ],
)
def test_a_bad_option_names_itself(options: dict[str, Any], names: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        engine(**{**SPARSE, "draft": "none", "device_pages": 8, **options})
    assert all(name in str(refused.value) for name in names), refused.value


def test_the_buffer_does_not_depend_on_the_draft() -> None:
    """Where selection begins is a matter of text: options and the model's context alone decide it."""
    found = set()
    for options in ({"draft": "none"}, {"draft": "ngram"}, {"draft": "ngram", "overlap": True}):
        core = engine(**options, hisparse=True, topk_pages=2, page_size=8, recent_tokens=32)
        assert core.ledger.tiers is not None
        found.add(core.ledger.tiers.dense_limit)
        core.close()
    assert len(found) == 1


def test_hisparse_alone_works() -> None:
    core = engine(hisparse=True)
    assert any(line.startswith("tiers ") for line in core.parts.startup_lines)
    assert run(core, [(long_prompts()[0], LONG)]) == run(engine(), [(long_prompts()[0], LONG)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("draft", ["none", "scripted", "ngram"])
def test_the_launch_path_does_not_sync(kind: str, draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables, slots and frontiers are written, selection and swap-in run, and nothing waits for the device."""
    monkeypatch.setenv("OCTAVO_NATIVE", "0")
    core = guarded(sparse(kind, draft=draft, overlap=True, device_pages=12))
    short = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    run(core, [(prompt[:160], short) for prompt in long_prompts()], close=False)
    assert core.report()["tiers"]["swaps"] > 0
    core.close()
