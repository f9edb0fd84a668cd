"""Faults of the host tier's file: a typed error for whom it hits, the others go on, every book closes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.engine.request import EngineRequest
from octavo.errors import HostTierLost
from octavo.kv.balance import raise_on
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


@pytest.mark.parametrize("overlap", [False, True])
def test_a_cut_file_ends_only_whom_it_held(tmp_path: Path, overlap: bool) -> None:
    """The first request's pages come first in the file and stay; the second one's are cut off."""
    path = tmp_path / "tier"
    first, second, late = *long_prompts()[:2], prompts(1, seed=12, low=60, high=70)[0]
    alone = run(sparse("llama"), [(first, LONG)])[0]
    after = run(sparse("llama"), [(late, LONG)])[0]
    core = file_core(path, overlap=overlap)
    core.add_request(EngineRequest("first", first, LONG))
    got: list[Any] = []
    while not got:
        got += core.step()  # its prompt is computed and backed up
    tiers = core.ledger.tiers
    assert tiers is not None
    row = int(core.ledger.live_rows()[0])
    core.add_request(EngineRequest("second", second, LONG))
    while len(core.ledger.live_rows()) < 2 or not min(tiers.backed[core.ledger.live_rows()]):
        got += core.step()
    held = tiers.pool.host_pages_of(core.ledger.full_table[row])
    keep = int(held.max()) + 1
    others = tiers.pool.host_pages_of(core.ledger.full_table[[r for r in core.ledger.live_rows() if r != row][0]])
    assert int(others.max()) >= keep
    os.truncate(path, keep * PAGE_BYTES)
    outputs = finish(core)
    ends = outputs["second"][-1]
    assert ends.finish_reason == "error" and isinstance(ends.error, HostTierLost) and "cut short" in str(ends.error)
    assert tokens_of([o for o in got if o.request_id == "first"]) + tokens_of(outputs["first"]) == alone
    raise_on(core.ledger)
    assert core.report()["tiers"]["file_lost"] == 1
    assert run(core, [(late, LONG)]) == [after]


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


def test_what_was_retracted_into_the_file_is_lost_with_it(tmp_path: Path) -> None:
    path = tmp_path / "tier"
    core = sparse("llama", num_pages=52, host_tier_path=str(path), host_memory=161 * PAGE_BYTES, max_model_len=260,
                  prefix_cache=False, overlap=True)  # fmt: skip
    for i, prompt in enumerate(long_prompts()):
        core.add_request(EngineRequest(f"r{i}", prompt, LONG))
    tiers = core.ledger.tiers
    assert tiers is not None
    while not tiers.tickets:
        core.step()
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
