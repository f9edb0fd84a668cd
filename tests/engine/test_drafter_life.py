"""begin and end come in pairs for every row a request holds, also over retractions and aborts."""

from __future__ import annotations

import pytest

from octavo.engine.request import EngineRequest
from octavo.params import SamplingParams
from octavo.spec.drafter import DraftRequest
from tests.engine.test_core import prompts
from tests.tiny import engine


@pytest.mark.parametrize("overlap", [False, True])
def test_begin_and_end_come_in_pairs(overlap: bool) -> None:
    core = engine(draft="ngram", page_size=16, num_pages=14, max_model_len=160, overlap=overlap, max_batched_tokens=48)
    drafter = core.parts.drafter
    assert drafter is not None
    held: set[int] = set()
    begin, end = drafter.begin, drafter.end

    def checked_begin(request: DraftRequest) -> None:
        assert request.row not in held, "a row began again before it ended"
        held.add(request.row)
        begin(request)

    def checked_end(row: int) -> None:
        assert row in held, "a row ended that had not begun"
        held.remove(row)
        end(row)

    drafter.begin, drafter.end = checked_begin, checked_end  # type: ignore[method-assign]
    params = SamplingParams(temperature=0, max_tokens=70, ignore_eos=True)
    for i, tokens in enumerate(prompts(6, seed=4, low=3, high=20)):
        core.add_request(EngineRequest(f"r{i}", tokens, params))
    for step in range(5000):
        if not core.has_work():
            break
        if step == 9:
            core.abort("r2")
        core.step()
    assert core.scheduler.preemptions > 0
    assert not held
    core.close()
