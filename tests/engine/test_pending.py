"""Draft KV of steps that drafted nothing is written later, and always before it is needed.

An auditor stands at every place where pages become others' or are read: what is not written there is a failure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from octavo.engine.core import EngineCore
from octavo.engine.request import EngineRequest, Request
from octavo.params import SamplingParams
from octavo.spec.drafter import Draft, DraftRequest, Observation, ProposeBatch, kv_owner
from octavo.spec.pending import BOUND_TOKENS
from tests.engine.test_core import prompts, run
from tests.engine.test_drafts import drafts
from tests.engine.test_hisparse import SPARSE
from tests.tiny import engine

__all__ = ["drafts"]

LEARNED = pytest.mark.parametrize("name", ["eagle3", "dflash", "ngram+eagle3"])
OVERLAP = pytest.mark.parametrize("overlap", [False, True])
LONG = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


class Lengths:
    """Stands in for the adaptive length: nothing is drafted but in every `every`-th step, two tokens then."""

    def __init__(self, every: int) -> None:
        self.every, self.steps = every, 0

    def choose(self, batch: int) -> int:
        self.steps += 1
        return 2 if self.every and self.steps % self.every == 0 else 0

    def record(self, *_: object) -> None:
        """Nothing to learn."""


class Auditor:
    """Knows of each row up to where its draft KV is written; `seen` counts the places it stood at."""

    def __init__(self, core: EngineCore) -> None:
        self.core, self.seen, self.sizes = core, Counter[str](), []
        self.written: dict[int, int] = {}
        self.proposals: list[list[int]] = []
        drafter = kv_owner(core.parts.drafter)
        assert drafter is not None
        self._begin, self._observe, self._propose = drafter.begin, drafter.observe, drafter.propose
        drafter.begin, drafter.observe, drafter.propose = self.begin, self.observe, self.propose  # type: ignore
        self._publish = core.ledger.publish
        core.ledger.publish = self.publish  # type: ignore[method-assign]
        if core.tiers is not None:
            self._back_up = core.tiers._mover.back_up
            core.tiers._mover.back_up = self.back_up  # type: ignore[method-assign]

    def begin(self, request: DraftRequest) -> None:
        self.written[request.row] = request.cached_tokens
        self._begin(request)

    def observe(self, observation: Observation) -> None:
        for row, start, count in zip(
            observation.host_rows, observation.start.tolist(), observation.counts.tolist(), strict=True
        ):
            assert start == self.written[row], "positions follow each other"
            self.written[row] = start + count
        self.sizes.append(observation.indptr[-1])
        self._observe(observation)

    def propose(self, batch: ProposeBatch) -> Draft:
        for row, length in zip(batch.host_rows, batch.seq_lens.tolist(), strict=True):
            assert self.written[row] == length
        self.seen["propose"] += 1
        draft = self._propose(batch)
        self.proposals.append(
            [t for line, n in zip(draft.tokens.tolist(), draft.lengths, strict=True) for t in line[:n]]
        )
        return draft

    def publish(self, row: int, tokens: Sequence[int]) -> int:
        before = int(self.core.ledger.protected[row])
        protected = self._publish(row, tokens)
        assert self.written[row] >= protected
        self.seen["publish"] += protected > before
        return protected

    def back_up(self, rows: np.ndarray, columns: np.ndarray) -> None:
        ledger = self.core.ledger
        for row, column in zip(rows.tolist(), columns.tolist(), strict=True):
            whole = min((column + 1) * ledger.page_size, int(ledger.committed[row]))
            assert self.written[row] >= whole
            self.seen["backup"] += 1
        self._back_up(rows, columns)


def audited(
    name: str, drafts: dict[str, str], every: int = 0, kind: str = "llama", **options: Any
) -> tuple[EngineCore, Auditor]:
    weights = drafts[f"{kind}-{name.removeprefix('ngram+')}"]
    core = engine(kind, draft=name, draft_model=weights, **{"page_size": 4, **options})
    core._adaptive = Lengths(every)  # type: ignore[assignment]
    return core, Auditor(core)


def texts(calls: list[tuple[list[int], SamplingParams]], **options: Any) -> list[list[int]]:
    return run(engine(**options), calls)


@LEARNED
@OVERLAP
def test_a_release_publishes_whole_draft_kv(name: str, overlap: bool, drafts: dict[str, str]) -> None:
    core, auditor = audited(name, drafts, overlap=overlap)
    calls = [(p, LONG) for p in prompts(4, seed=5, high=30)]
    assert run(core, calls) == texts(calls)
    assert auditor.seen["publish"] >= 4
    assert max(auditor.sizes) > 8  # steps were shown together


@LEARNED
@OVERLAP
def test_a_probe_finds_it_written(name: str, overlap: bool, drafts: dict[str, str]) -> None:
    core, auditor = audited(name, drafts, every=7, overlap=overlap, max_batched_tokens=32)
    calls = [(p, LONG) for p in prompts(5, seed=6, high=50)]
    assert run(core, calls) == texts(calls)
    assert auditor.seen["propose"] >= 6


@LEARNED
@OVERLAP
def test_an_abort_in_flight(name: str, overlap: bool, drafts: dict[str, str]) -> None:
    """What the aborted request had computed is found by the next one, and drafted from as if it were cold."""
    prompt = prompts(1, seed=7, low=20, high=21)[0]
    core, auditor = audited(name, drafts, overlap=overlap)
    core.add_request(EngineRequest("gone", prompt, LONG))
    said: list[int] = []
    for _ in range(25):
        said.extend(t for output in core.step() for t in output.token_ids)
    core.abort("gone")
    published = auditor.seen["publish"]
    assert published > 1
    while core.has_work():
        core.step()
    core._adaptive = Lengths(1)  # type: ignore[assignment]
    longer = prompt + said[:20]
    auditor.proposals.clear()
    warm = run(core, [(longer, LONG)])
    cold, cold_auditor = audited(name, drafts, every=1, overlap=overlap, prefix_cache=False)
    assert run(cold, [(longer, LONG)]) == warm
    assert cold_auditor.proposals == auditor.proposals


@LEARNED
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_warm_drafts_equal_cold_drafts(name: str, kind: str, drafts: dict[str, str]) -> None:
    """A prefix whose draft KV was written late drafts like one that was never cached, proposal by proposal."""
    prompt = prompts(1, seed=8, low=30, high=31)[0]
    core, _ = audited(name, drafts, kind=kind)
    answer = run(core, [(prompt, LONG)], close=False)[0]
    second = prompt + answer
    core._adaptive = Lengths(1)  # type: ignore[assignment]
    warm_auditor = Auditor(core)
    warm = run(core, [(second, LONG)])
    cold, cold_auditor = audited(name, drafts, every=1, kind=kind, prefix_cache=False)
    assert run(cold, [(second, LONG)]) == warm
    assert warm_auditor.proposals == cold_auditor.proposals
    assert warm_auditor.sizes[0] < len(prompt)  # it was warm


@LEARNED
@OVERLAP
def test_retraction(name: str, overlap: bool, drafts: dict[str, str]) -> None:
    core, auditor = audited(
        name, drafts, every=9, overlap=overlap, page_size=16, num_pages=14, max_model_len=160, max_batched_tokens=48
    )
    calls = [(p, SamplingParams(temperature=0, max_tokens=70, ignore_eos=True))
             for p in prompts(6, seed=4, low=3, high=20)]  # fmt: skip
    assert run(core, calls, close=False) == texts(calls)
    assert core.scheduler.preemptions > 0 and auditor.seen["publish"] > 0
    core.close()


@LEARNED
@OVERLAP
def test_backups_and_retraction_into_the_host_tier(name: str, overlap: bool, drafts: dict[str, str]) -> None:
    calls = [((prompts(1, seed=s, low=120, high=130)[0] * 3)[:300], LONG) for s in (3, 4)]
    options = {**SPARSE, "num_pages": 84, "host_memory": "8MiB", "max_model_len": 365, "prefix_cache": False}
    core, auditor = audited(name, drafts, every=11, overlap=overlap, **options)
    assert run(core, calls, close=False) == texts(calls, **{**SPARSE, "draft": "none"})
    assert core.report()["tiers"]["resumed"] > 0
    assert auditor.seen["backup"] > 80 and auditor.seen["propose"] > 0
    core.close()


class Side:
    """The core's half of a pair that watches what could be transferred."""

    waiting = 0

    def __init__(self, core: EngineCore) -> None:
        self.core, self.computed_chunks, self.waited = core, 0, 0

    def check(self, call: EngineRequest) -> None: ...

    def arrive(self, request: Request, call: EngineRequest) -> None:
        self.core.scheduler.enqueue(request)

    def poll(self) -> None: ...

    def computed(self, request: Request, token: int | None, logprobs: Any) -> bool:
        self.computed_chunks += 1
        assert not self.core.runner.pending.holds([request.row])
        return False

    def left(self, request: Request, reason: str, error: Any) -> None: ...

    def busy_elsewhere(self) -> bool:
        return False

    def has_news(self) -> bool:
        return False

    def close(self) -> None: ...


@pytest.mark.parametrize("name", ["eagle3", "dflash"])
def test_nothing_waits_when_a_chunk_may_be_transferred(
    name: str, drafts: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under overlap the first decode step of a row is launched before its last chunk is announced."""
    core, auditor = audited(name, drafts, overlap=True, max_batched_tokens=24)
    core.side = side = Side(core)
    shown = core.runner.write_pending

    def watched(rows: Sequence[int]) -> None:
        side.waited += core.runner.pending.holds(rows)
        shown(rows)

    monkeypatch.setattr(core.runner, "write_pending", watched)
    calls = [(p, LONG) for p in prompts(4, seed=9, low=20, high=50)]
    assert run(core, calls) == texts(calls)
    assert side.computed_chunks > 4 and side.waited >= 4


@LEARNED
def test_the_bound(name: str, drafts: dict[str, str]) -> None:
    core, auditor = audited(name, drafts, page_size=16, max_model_len=400)
    bound = core.runner.pending.bound_tokens = 128
    calls = [(p, SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)) for p in prompts(2, seed=2, high=9)]
    for i, (prompt, params) in enumerate(calls):
        core.add_request(EngineRequest(f"r{i}", prompt, params))
    while core.has_work():
        core.step()
        assert core.runner.pending.tokens < bound
    assert auditor.sizes.count(bound) >= 2
    core.close()


@LEARNED
def test_a_request_that_fails_leaves_nothing_behind(name: str, drafts: dict[str, str]) -> None:
    core, _ = audited(name, drafts)
    core.add_request(EngineRequest("r", prompts(1, seed=3)[0], LONG))
    for _ in range(12):
        core.step()
    request = core.scheduler.running[0]
    row = request.row
    assert core.runner.pending.holds([row])
    core.fail(request, RuntimeError("planted"))  # type: ignore[arg-type]
    assert not core.runner.pending.holds([row])
    core.close()


@LEARNED
def test_late_equals_at_once_in_every_page(name: str, drafts: dict[str, str]) -> None:
    """The whole pool, bit for bit: the same run with a bound of one token writes every token at once."""
    pools = []
    for bound in (1, BOUND_TOKENS):
        core, _ = audited(name, drafts, every=13)
        core.runner.pending.bound_tokens = bound
        run(core, [(p, LONG) for p in prompts(3, seed=12, high=40)], close=False)
        assert core.runner.kv.full is not None
        pools.append(core.runner.kv.full.clone())
        core.close()
    assert torch.equal(*pools)
