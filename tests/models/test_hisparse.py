"""HiSparse on the real model: dense where it must be, and the same selected text with drafts and without."""

from __future__ import annotations

from typing import Any

import pytest

from octavo import LLM, SamplingParams

pytestmark = pytest.mark.models

STORY = (
    "The lighthouse keeper wrote one line a day into a grey book. On Monday a ship with green sails passed. "
    "On Tuesday the lamp would not burn until noon. "
)
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def ids(repeats: int, **options: Any) -> tuple[list[int], int, dict[str, Any]]:
    prompt = STORY * repeats + "What did the keeper write on Tuesday?"
    with LLM("smollm2", max_running=1, max_model_len=1024, dtype="float32", **options) as llm:
        result = llm.generate([prompt], GREEDY)[0]
        return result.outputs[0].token_ids, len(result.prompt_token_ids), llm.kv_report()


def test_with_all_pages_selected_the_text_is_dense() -> None:
    """The prompt is longer than what the buffer makes dense, and has no more candidates than are selected."""
    dense, tokens, _ = ids(8, draft="none")
    selected = {"hisparse": True, "topk_pages": 8, "recent_tokens": 256, "device_pages": 26, "host_memory": "96MiB"}
    sparse, _, report = ids(8, draft="none", **selected)
    assert report["tiers"]["dense_limit_tokens"] == 160 < tokens <= 9 * 16 + 256 - 24
    assert sparse == dense


def test_drafts_do_not_change_selected_text() -> None:
    selected = {"hisparse": True, "topk_pages": 4, "recent_tokens": 64, "device_pages": 27, "host_memory": "128MiB"}
    plain, tokens, report = ids(16, draft="none", **selected)
    assert report["tiers"]["swaps"] > 0 and tokens > report["tiers"]["dense_limit_tokens"]
    drafted, _, again = ids(16, draft="ngram", draft_adaptive=False, **selected)
    assert drafted == plain
    assert again["speculation"]["drafts"] > 0
