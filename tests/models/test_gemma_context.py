"""Gemma 3 270M over a prompt of 3,960 tokens: the text of transformers, few window pages, and what the window saves.

The reference is committed; scripts/make_references.py made it with transformers in float32, all in one forward.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.config import EngineConfig
from octavo.engine.core import EngineCore
from octavo.engine.request import EngineRequest
from octavo.engine.setup import build
from octavo.kv.sizing import swa_decode_bound_pages, swa_prefill_bound_pages
from octavo.model.load import load_model
from octavo.params import SamplingParams
from tests.engine.test_core import run

pytestmark = [pytest.mark.models, pytest.mark.timeout(1800)]

REFERENCE = Path(__file__).parent / "references" / "gemma3-270m-4k.json"
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
WINDOW, CHUNK, PAGE = 512, 512, 16
# Bytes of a page, 2 (K, V) · 1 head · 16 tokens · 256 · 4 bytes a layer: 3 full layers, 15 sliding ones.
FULL_BYTES, SWA_BYTES = 3 * 32_768, 15 * 32_768
# (full, SWA) pages held after each step. A chunk in flight and the one before it are held beside the window: the floor
# follows what is committed, floor_p(floor_p(n) − 512).
PREFILL = [(32, 32), (64, 64), (96, 64), (128, 64), (160, 64), (192, 64), (224, 64), (248, 56)]
# The plan of decode step k knows 3,960 + max(0, k − 2) tokens and reserves two more.
DECODE = [(248, 33)] * 8 + [(249, 33)] * 16 + [(250, 33)] * 7


@pytest.fixture(scope="module")
def answer() -> dict[str, Any]:
    (only,) = json.loads(REFERENCE.read_text())["answers"]
    assert len(only["prompt_ids"]) == 3960 and len(only["greedy_ids"]) == 32 and only["smallest_gap"] > 1e-3
    return dict(only)


@pytest.fixture(scope="module")
def core(answer: dict[str, Any]) -> EngineCore:
    loaded = load_model("gemma3-270m", accept_license=True)
    assert loaded.tokenizer.encode(answer["text"]) == answer["prompt_ids"]
    given = {
        "draft": "none", "dtype": "float32", "quantization": "none", "kv_memory": "512MiB", "max_model_len": 4096,
        "max_running": 2, "page_size": PAGE, "prefill_chunk": CHUNK, "overlap": True, "check_books": True,
    }  # fmt: skip
    config = EngineConfig.from_options(given, environ={})
    return EngineCore(config, build(config, loaded))


def saving(full_pages: int, swa_pages: int) -> dict[str, int]:
    two, one = full_pages * FULL_BYTES + swa_pages * SWA_BYTES, full_pages * (FULL_BYTES + SWA_BYTES)
    return {"full_pages": full_pages, "swa_pages": swa_pages, "two_pools_bytes": two, "one_pool_bytes": one,
            "saved_bytes": one - two}  # fmt: skip


def row_pages(core: EngineCore) -> list[tuple[int, int]]:
    """(full, SWA) pages in the tables of each live row."""
    full, swa = core.ledger.full_table, core.ledger.swa_table
    assert swa is not None
    return [(int((full[row] >= 0).sum()), int((swa[row] >= 0).sum())) for row in core.ledger.live_rows().tolist()]


def test_text_pages_and_saving(core: EngineCore, answer: dict[str, Any]) -> None:
    reserve = core.parts.reserve
    most_prefill = swa_prefill_bound_pages(WINDOW, CHUNK, PAGE, overlap=True)
    most_decode = swa_decode_bound_pages(WINDOW, reserve, PAGE)
    assert (most_prefill, most_decode, reserve.tokens) == (98, 35, 2)
    core.add_request(EngineRequest("r", answer["prompt_ids"], GREEDY))
    ids: list[int] = []
    held: list[tuple[int, int]] = []
    while core.has_work():
        for output in core.step():
            assert output.error is None
            ids += output.token_ids
        rows = row_pages(core)
        held += rows
        now = core.report()["sliding"]["now"]
        assert now == saving(*(rows[0] if rows else (0, 0)))
        assert now["swa_pages"] <= (most_prefill if len(held) <= len(PREFILL) else most_decode)
    assert ids == answer["greedy_ids"]
    assert held == PREFILL + DECODE
    sliding = core.report()["sliding"]
    assert sliding["now"] == saving(0, 0)
    assert sliding["peak"] == saving(250, 33)
    assert sliding["peak"]["saved_bytes"] == 217 * 491_520 == 106_659_840
    # Two requests of 4,096 tokens: ceil((4096 − 1 + 2)/16) = 257 full pages each; 98 SWA pages of the one in prefill
    # and 35 of the one that decodes.
    assert sliding["capacity"] == {"requests": 2, "context_tokens": 4096, **saving(514, 133)}
    fits = next(line for line in core.parts.startup_lines if line.startswith("fits "))
    assert "2 of them take 110.5 MiB in two pools, 289.1 MiB in one for all layers (178.6 MiB saved)" in fits


def test_the_answer_comes_from_behind_the_window(core: EngineCore, answer: dict[str, Any]) -> None:
    """More than the window, but not what the question asks about: another text. Else the ids would prove little."""
    (alone,) = run(core, [(answer["prompt_ids"][-600:], GREEDY)])
    assert alone != answer["greedy_ids"]
