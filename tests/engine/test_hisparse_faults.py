"""Faults of the host tier's file: a typed error for whom it hits, the others go on, every book closes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.backend import host_tier
from octavo.engine.request import EngineRequest
from octavo.errors import HostTierLost
from octavo.kv.balance import raise_on
from octavo.ops import native
from octavo.params import SamplingParams
from tests.engine.test_core import prompts, run
from tests.engine.test_hisparse import LONG, MIXED, long_prompts, sparse

PAGE_BYTES = 4 * 2 * 2 * 8 * 16 * 4


def finish(core: Any) -> dict[str, list[Any]]:
    outputs: dict[str, list[Any]] = {}
    for _ in range(5000):
        if not core.has_work():
            break
        for output in core.step():
            outputs.setdefault(output.request_id, []).append(output)
    assert not core.has_work()
    return outputs


def tokens_of(outputs: list[Any]) -> list[int]:
    return [t for o in outputs for t in o.token_ids]


def file_core(path: Path, **options: Any) -> Any:
    return sparse("llama", num_pages=160, host_tier_path=str(path), host_memory=161 * PAGE_BYTES, **options)


def test_a_file_holds_what_memory_holds(tmp_path: Path) -> None:
    calls = list(zip(long_prompts(), MIXED, strict=True))
    core = file_core(tmp_path / "tier", overlap=True)
    assert run(core, calls) == run(sparse("llama"), calls)
    assert not (tmp_path / "tier").exists()


class TwoInAFile:
    """The first request's pages come first in the file and stay; the second one's lie behind `keep_bytes`."""

    def __init__(self, path: Path, *, decoding: bool = False, **options: Any) -> None:
        self.path, self.options = path, options
        first, second, self.late = *long_prompts()[:2], prompts(1, seed=12, low=60, high=70)[0]
        self.alone = run(sparse("llama", **options), [(first, LONG)])[0]
        self.core = core = file_core(path, **options)
        core.add_request(EngineRequest("first", first, LONG))
        self.got: list[Any] = []
        while not self.got:
            self.got += core.step()  # its prompt is computed and backed up
        tiers = core.ledger.tiers
        assert tiers is not None
        row = int(core.ledger.live_rows()[0])
        core.add_request(EngineRequest("second", second, LONG))
        while len(core.ledger.live_rows()) < 2 or not min(tiers.backed[core.ledger.live_rows()]):
            self.got += core.step()
        while decoding and not any(o.request_id == "second" for o in self.got):
            self.got += core.step()
        held = tiers.pool.host_pages_of(core.ledger.full_table[row])
        keep = int(held.max()) + 1
        others = tiers.pool.host_pages_of(core.ledger.full_table[[r for r in core.ledger.live_rows() if r != row][0]])
        assert int(others.max()) >= keep
        self.keep_bytes = keep * PAGE_BYTES

    def cut(self) -> None:
        os.truncate(self.path, self.keep_bytes)

    def ends_as_it_should(self) -> None:
        outputs = finish(self.core)
        ends = outputs["second"][-1]
        assert ends.finish_reason == "error" and isinstance(ends.error, HostTierLost) and "cut short" in str(ends.error)
        assert tokens_of([o for o in self.got if o.request_id == "first"]) + tokens_of(outputs["first"]) == self.alone
        raise_on(self.core.ledger)
        assert self.core.report()["tiers"]["file_lost"] == 1
        after = run(sparse("llama", **self.options), [(self.late, LONG)])
        assert run(self.core, [(self.late, LONG)]) == after


@pytest.mark.parametrize("overlap", [False, True])
def test_a_cut_file_ends_only_whom_it_held(tmp_path: Path, overlap: bool) -> None:
    two = TwoInAFile(tmp_path / "tier", overlap=overlap)
    two.cut()
    two.ends_as_it_should()


@pytest.mark.skipif(not native.available(), reason="bus errors are caught by the compiled module")
@pytest.mark.parametrize("selector", ["bounds", "examples.page_selector:Centroids"])  # compiled; torch operations
@pytest.mark.parametrize("decoding", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_file_cut_in_the_middle_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overlap: bool, decoding: bool, selector: str
) -> None:
    """After the look at the file, before the forward pass: its reads behind the cut find empty pages, and nobody hears
    what was made of them."""
    two = TwoInAFile(tmp_path / "tier", overlap=overlap, decoding=decoding, page_selector=selector)
    launch, cuts = two.core.runner.launch, []

    def cut_and_launch(plan: Any) -> Any:
        if not cuts:
            two.cut()
            cuts.append(plan)
        return launch(plan)

    monkeypatch.setattr(two.core.runner, "launch", cut_and_launch)
    two.ends_as_it_should()
    assert cuts


@pytest.mark.skipif(not native.available(), reason="bus errors are caught by the compiled module")
@pytest.mark.parametrize("selector", ["bounds", "examples.page_selector:Centroids"])  # compiled; torch operations
def test_a_page_that_is_swapped_in_from_behind_the_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, selector: str
) -> None:
    """A first run tells which step of decoding loads pages; in the second the whole file is gone when it begins."""
    path, swaps = tmp_path / "tier", []

    def core_that(at_launch: Callable[[Any, int], None]) -> Any:
        core = file_core(path, page_selector=selector)
        launch, launches = core.runner.launch, []

        def watched(plan: Any) -> Any:
            launches.append(plan)
            at_launch(core, len(launches))
            return launch(plan)

        monkeypatch.setattr(core.runner, "launch", watched)
        core.add_request(EngineRequest("it", long_prompts()[0], LONG))
        return core

    core = core_that(lambda core, _: swaps.append(core.report()["tiers"]["swaps"]))
    finish(core)
    core.close()
    step = next(i for i in range(8, len(swaps)) if swaps[i] > swaps[i - 1])
    core = core_that(lambda _, number: os.truncate(path, 0) if number == step else None)
    ends = finish(core)["it"][-1]
    assert isinstance(ends.error, HostTierLost) and "cut short" in str(ends.error)
    assert core.report()["tiers"]["missed_accesses"] > 0
    raise_on(core.ledger)
    call = (long_prompts()[0], LONG)
    assert run(core, [call]) == run(sparse("llama", page_selector=selector), [call])


@pytest.mark.skipif(not native.available(), reason="bus errors are caught by the compiled module")
@pytest.mark.parametrize("overlap", [False, True])
def test_a_file_cut_before_the_stores_of_a_backup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    two = TwoInAFile(tmp_path / "tier", overlap=overlap)
    copy, cuts = host_tier.back_up, []

    def cut_and_copy(*of: Any) -> None:
        if not cuts:
            two.cut()
            cuts.append(of)
        copy(*of)

    monkeypatch.setattr(host_tier, "back_up", cut_and_copy)
    two.ends_as_it_should()
    assert cuts and two.core.report()["tiers"]["missed_accesses"] > 0


@pytest.mark.skipif(not native.available(), reason="bus errors are caught by the compiled module")
@pytest.mark.parametrize("place", ["load_dense", "load_slots"])
def test_a_file_cut_while_a_request_is_brought_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    path = tmp_path / "tier"
    core = retracting_core(path)
    copy, cuts = getattr(host_tier, place), []

    def cut_and_copy(*of: Any) -> None:
        if not cuts:
            os.truncate(path, 0)
            cuts.append(of)
        copy(*of)

    monkeypatch.setattr(host_tier, place, cut_and_copy)
    outputs = finish(core)
    assert cuts and all(o[-1].finished for o in outputs.values())
    assert any(isinstance(o[-1].error, HostTierLost) for o in outputs.values())
    assert core.report()["tiers"]["missed_accesses"] > 0
    raise_on(core.ledger)
    core.close()


def test_a_request_whose_kv_is_lost_before_it_is_brought_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the step's look at the file and its plan: the request ends with the error, the step goes on."""
    path = tmp_path / "tier"
    core = retracting_core(path)
    revive, cuts = core.scheduler.revive, []

    def cut_and_revive(request: Any) -> None:
        os.truncate(path, 0)
        cuts.append(request)
        revive(request)

    monkeypatch.setattr(core.scheduler, "revive", cut_and_revive)
    outputs = finish(core)
    assert cuts and isinstance(outputs[cuts[0].call_id][-1].error, HostTierLost)
    assert core.report()["tiers"]["resumed"] == 0
    raise_on(core.ledger)
    core.close()


def test_a_removed_file_ends_who_is_in_it_and_later_ones_run(tmp_path: Path) -> None:
    path = tmp_path / "tier"
    first, late = long_prompts()[0], long_prompts()[1]
    after = run(sparse("llama"), [(late, LONG)])
    core = file_core(path)
    core.add_request(EngineRequest("first", first, LONG))
    while not core.step():
        pass
    core.add_request(EngineRequest("waiting", late, LONG))
    path.unlink()
    outputs = finish(core)
    assert isinstance(outputs["first"][-1].error, HostTierLost)
    assert tokens_of(outputs["waiting"]) == after[0]
    assert run(core, [(late, LONG)]) == after


def retracting_core(path: Path) -> Any:
    """Three requests of which one is retracted into the file."""
    core = sparse("llama", num_pages=52, host_tier_path=str(path), host_memory=161 * PAGE_BYTES, max_model_len=260,
                  prefix_cache=False, overlap=True)  # fmt: skip
    for i, prompt in enumerate(long_prompts()):
        core.add_request(EngineRequest(f"r{i}", prompt, LONG))
    tiers = core.ledger.tiers
    assert tiers is not None
    while not tiers.tickets:
        core.step()
    return core


def test_what_was_retracted_into_the_file_is_lost_with_it(tmp_path: Path) -> None:
    path = tmp_path / "tier"
    core = retracting_core(path)
    path.unlink()
    outputs = finish(core)
    assert all(o[-1].finished for o in outputs.values())
    assert sum(isinstance(o[-1].error, HostTierLost) for o in outputs.values()) >= 2
    raise_on(core.ledger)
    core.close()


def test_a_lost_folder_fails_requests_one_by_one_and_the_engine_stays(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    core = file_core(folder / "tier")
    shutil.rmtree(folder)
    for name in ("one", "two"):
        core.add_request(EngineRequest(name, long_prompts()[0], LONG))
        ends = finish(core)[name][-1]
        assert isinstance(ends.error, HostTierLost) and "No such file" in str(ends.error)
    folder.mkdir()
    assert run(core, [(long_prompts()[0], LONG)]) == run(sparse("llama"), [(long_prompts()[0], LONG)])


@pytest.mark.parametrize("way", ["abort", "stop", "length"])
def test_every_way_out_closes_the_tiers(way: str) -> None:
    core = sparse("gemma3", overlap=True)
    params: dict[str, Callable[[], SamplingParams]] = {
        "abort": lambda: LONG,
        "stop": lambda: SamplingParams(temperature=0.9, seed=3, max_tokens=60, stop_token_ids=list(range(0, 256, 9))),
        "length": lambda: SamplingParams(temperature=0, max_tokens=1),
    }
    for i, prompt in enumerate(long_prompts()):
        core.add_request(EngineRequest(f"r{i}", prompt, params[way]()))
    for _ in range(4):
        core.step()
    if way == "abort":
        for i in range(3):
            core.abort(f"r{i}")
    finish(core)
    core.flush_cache()
    tiers = core.ledger.tiers
    assert tiers is not None
    raise_on(core.ledger, at_rest=True)
    assert (tiers.pool.host.free, tiers.slots.free) == (tiers.pool.host.total, tiers.slots.total)
    core.close()
