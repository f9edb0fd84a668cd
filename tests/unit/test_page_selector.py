"""Page selectors: the default against its definition, the example as a user would load it, and bad ones."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.engine.core import EngineCore
from octavo.engine.request import EngineRequest
from octavo.errors import ConfigError
from octavo.ops import reference
from octavo.ops.page_selector import PageBounds
from octavo.params import SamplingParams
from tests.tiny import engine

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "page_selector.py"
PROMPTS = [[(7 * i * i + 3 * j) % 250 for i in range(n)] for j, n in enumerate((150, 40, 90))]
SPARSE: dict[str, Any] = {
    "hisparse": True, "topk_pages": 2, "recent_tokens": 16, "page_size": 8, "sparse_dense_layers": 1, "num_pages": 80,
    "max_running": 3,
}  # fmt: skip


def answers(core: EngineCore, prompts: list[list[int]]) -> list[list[int]]:
    got: dict[str, list[int]] = {}
    for i, prompt in enumerate(prompts):
        core.add_request(EngineRequest(str(i), prompt, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)))
    while core.has_work():
        for out in core.step():
            got.setdefault(out.request_id, []).extend(out.token_ids)
    return [got[str(i)] for i in range(len(prompts))]


def test_page_bounds_are_the_votes_of_the_reference() -> None:
    generator = torch.Generator().manual_seed(1)
    keys = torch.randn(7, 2, 4, 16, generator=generator)
    q = torch.randn(3, 6, 16, generator=generator)
    bounds = PageBounds()
    sums = bounds.summarise(0, keys.bfloat16())
    assert sums.dtype == torch.float32 and sums.shape == (7, 2, 2, 16)
    scores = bounds.score(0, q.view(3, 2, 3, 16), sums.expand(3, 7, 2, 2, 16))
    for n in range(3):
        for page in range(7):
            want = reference.page_vote(q[n], keys[page].bfloat16())
            assert float(scores[n, page]) == pytest.approx(want, rel=1e-5, abs=1e-5)
    # an upper bound of every q·k of the page: Σ over a group of the products of one key, for each KV head
    products = torch.einsum("nhgd,mhpd->nmhp", q.view(3, 2, 3, 16), keys.bfloat16().float()).amax(dim=(2, 3))
    assert bool((products <= scores + 1e-4).all())


def test_the_example_is_short_and_scores_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 80
    monkeypatch.syspath_prepend(str(EXAMPLE.parents[1]))
    from examples.page_selector import Centroids

    keys = torch.zeros(3, 1, 4, 8)
    keys[0, 0, :, 0] = 1.0  # all keys point a little along axis 0
    keys[1, 0, 0, 0] = 4.0  # one of four points far along it: mean 1 too, and spread
    keys[2, 0, :, 1] = 9.0
    selector = Centroids()
    q = torch.zeros(1, 1, 2, 8)
    q[0, 0, 1, 0] = 1.0
    scores = selector.score(0, q, selector.summarise(0, keys)[None])[0]
    assert scores.tolist() == pytest.approx([1.0, 1.0 + 2.0 * 3.0**0.5, 0.0])


def test_the_example_runs_in_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense text where everything counts; the same text alone and in company where it does not."""
    monkeypatch.syspath_prepend(str(EXAMPLE.parents[1]))
    chosen = {**SPARSE, "page_selector": "examples.page_selector:Centroids"}
    dense = answers(engine(page_size=8), PROMPTS)
    assert answers(engine(**{**chosen, "topk_pages": 40}), PROMPTS) == dense
    core = engine(**chosen)
    together = answers(core, PROMPTS)
    assert together != dense  # it really selects
    assert [answers(core, [prompt])[0] for prompt in PROMPTS] == together
    assert sum(core.parts.runner.kv.sparse.counts.tolist()) > 0
    core.close()


@pytest.mark.parametrize("spec", ["nowhere:Class", "tests.unit.test_page_selector:Missing", "tests.tiny:RandomSource"])
def test_a_selector_that_cannot_be_loaded_is_refused_by_name(spec: str) -> None:
    assert "tests" in sys.modules
    with pytest.raises(ConfigError, match="page_selector"):
        engine(**SPARSE, page_selector=spec)
