"""HiSparse with few logical pages: what retracted requests share is offloaded, so who runs never lacks what they keep.

Requests of up to 160 tokens, pages of 8, a host tier for all of them, and logical pages for little more than one.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.engine.request import EngineRequest
from octavo.errors import NeverFits
from octavo.kv.balance import raise_on
from octavo.kv.trace import replay
from octavo.params import SamplingParams
from tests.engine.test_core import prompts, run
from tests.engine.test_drafts import drafts
from tests.engine.test_hisparse import KINDS, draft_options, sparse

__all__ = ["drafts"]

LONG = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, seed=5, max_tokens=80, ignore_eos=True)
FEW = {"num_pages": 24, "host_memory": "8MiB", "max_model_len": 180}
Calls = list[tuple[list[int], SamplingParams]]


def prompt(seed: int, tokens: int) -> list[int]:
    return prompts(1, seed=seed, low=tokens, high=tokens + 8)[0]


def calls(name: str) -> Calls:
    """Each with a prompt of its own; all but one with a common beginning; two groups with one each."""
    if name == "own":
        return [(prompt(40 + i, 60), LONG) for i in range(4)] + [(prompt(44, 60), SAMPLED)]
    if name == "shared":
        common = prompt(21, 60)
        return [(prompt(49, 70), LONG)] + [(common + prompt(40 + i, 6), (LONG, SAMPLED)[i % 2]) for i in range(4)]
    groups = [(prompt(21, 60), 2), (prompt(49, 50), 3)]
    return [(start + prompt(40 + i, 8), LONG) for start, count in groups for i in range(count)]


NAMES = ("own", "shared", "groups")


@pytest.fixture(scope="module")
def texts() -> dict[tuple[str, str], list[list[int]]]:
    """With plenty of pages."""
    return {(kind, name): run(sparse(kind, num_pages=200, host_memory="8MiB"), calls(name))
            for kind in KINDS for name in NAMES}  # fmt: skip


class Watched:
    """Looks at the KV of every request on the device when it is retracted and when it is back: the same, in all dense
    layers and, as far as it is read, in the sliding ones."""

    def __init__(self, core: Any, *, lose_windows: bool = False) -> None:
        self.core, self.lose_windows = core, lose_windows
        self.returns = self.loaded_back = self.healed = 0
        self.looked_at = Counter[str]()
        self._saved: dict[int, tuple[torch.Tensor, torch.Tensor, int]] = {}
        self._retract, self._resume, self._preallocate = core.ledger.retract, core.tiers.resume, core.ledger.preallocate
        core.ledger.retract, core.tiers.resume = self.retract, self.resume
        core.ledger.preallocate = self.preallocate

    def _content(self, row: int, tokens: int, window_from: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[layers, 2, kv_heads, tokens, head_dim] of the full pool's dense and draft layers, and of the SWA pool from
        `window_from` on; empty for a pool that the model does not have."""
        ledger, kv = self.core.ledger, self.core.runner.kv

        def read(pool: torch.Tensor | None, table: Any, first_tokens: int) -> torch.Tensor:
            if pool is None:
                return torch.empty(0)
            first = first_tokens // ledger.page_size
            pages = table[row, first : -(-tokens // ledger.page_size)]
            found = pool[torch.from_numpy(pages.astype("int64"))].movedim(0, -3).flatten(-3, -2)
            return found[..., : tokens - first_tokens, :].clone()

        return read(kv.full, ledger.full_table, 0), read(kv.swa, ledger.swa_table, window_from)

    def retract(self, row: int) -> Any:
        ledger = self.core.ledger
        tokens, evicted = int(ledger.committed[row]), int(ledger.evicted[row])
        full, swa = self._content(row, tokens, evicted)
        ticket = self._retract(row)
        self._saved[ticket.number] = (full, swa, evicted)
        if self.lose_windows:
            ledger.tree.evict_swa(ledger.tree.evictable_swa)
        return ticket

    def preallocate(self, *args: Any, **options: Any) -> Any:
        got = self._preallocate(*args, **options)
        self.healed += len(got.healed_columns)
        self.loaded_back += got.cached_tokens < self.core.ledger.protected[got.row]
        return got

    def resume(self, request: Any, kept: Any) -> None:
        full, swa, evicted = self._saved[kept.ticket.number]
        self._resume(request, kept)
        row, tokens = request.row, kept.ticket.committed
        floor = int(self.core.ledger.evicted[row])
        now, window = self._content(row, tokens, floor)
        assert torch.equal(now, full)
        assert torch.equal(window, swa if not len(swa) else swa[..., floor - evicted :, :])
        self.looked_at += Counter(full=full.numel(), swa=swa.numel())
        self.returns += 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_everybody_ends_with_the_text_of_plenty(
    kind: str, overlap: bool, name: str, texts: dict[tuple[str, str], list[list[int]]]
) -> None:
    """Alone each would fit, so none ends with `request_too_large`, whatever the retracted ones share."""
    core = sparse(kind, overlap=overlap, check_books=True, **FEW)
    watched = Watched(core)
    assert run(core, calls(name), close=False) == texts[kind, name]
    tiers = core.report()["tiers"]
    assert tiers["retracted"] == tiers["resumed"] == watched.returns > 0
    assert tiers["offloaded_pages"] == tiers["loaded_back_pages"] > 0 and watched.loaded_back
    assert watched.looked_at["swa" if kind == "gemma3" else "full"]
    raise_on(core.ledger, at_rest=True)
    core.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_windows_that_went_while_a_request_waited_come_back(
    overlap: bool, texts: dict[tuple[str, str], list[list[int]]]
) -> None:
    """Retracted right behind their prompts, whose pages they share with the cache: every sliding-window page that
    nobody locks goes, those that they will read among them."""
    core = sparse("gemma3", overlap=overlap, check_books=True, **{**FEW, "num_pages": 60})
    watched = Watched(core, lose_windows=True)
    begun: set[str] = set()
    got: dict[str, list[int]] = {f"{i}": [] for i in range(5)}
    for i, call in enumerate(calls("groups")):
        core.add_request(EngineRequest(f"{i}", *call))
    while core.has_work():
        for output in core.step():
            assert output.error is None, output.error
            got[output.request_id] += output.token_ids
        for request in [r for r in core.scheduler.running if got[r.call_id] and r.call_id not in begun]:
            if request.inflight_steps == 0:
                begun.add(request.call_id)
                core.scheduler._give_back(request, publish=True)
    assert list(got.values()) == texts["gemma3", "groups"]
    assert watched.returns >= len(begun) > 0 and watched.healed > 0
    core.close()


@pytest.mark.parametrize("name", ["eagle3", "tree", "dflash"])
@pytest.mark.parametrize("kind", KINDS)
def test_draft_layers_come_back_too(
    kind: str, name: str, texts: dict[tuple[str, str], list[list[int]]], drafts: dict[str, str]
) -> None:
    core = sparse(kind, overlap=True, check_books=True, **{**FEW, "num_pages": 28}, **draft_options(name, kind, drafts))
    watched = Watched(core)
    run(core, calls("own"), close=False)
    assert watched.returns > 0 and watched.loaded_back and watched.looked_at["full"]
    assert core.report()["tiers"]["offloaded_pages"] > 0
    core.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_recorded_run_is_replayed_with_what_was_offloaded(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    core = sparse(kind, overlap=True, record_trace=str(path), **FEW)
    run(core, calls("groups"), close=False)
    seen = core.report()
    core.close()
    got = replay(path)
    assert (got["violations"], got["preemptions"], got["waiting_at_end"]) == (0, 0, 0)
    for count in ("offloaded_pages", "loaded_back_pages", "retracted", "resumed"):
        assert got["tiers"][count] == seen["tiers"][count] > 0
    assert got["peak_pages"] == {name: pool["peak_used"] for name, pool in seen["pools"].items()}
    for sizes in ({"page_size": 4}, {"num_pages": 21}, {"num_pages": 60}):
        other = replay(path, **sizes)
        assert (other["violations"], other["waiting_at_end"]) == (0, 0), sizes
    assert other["tiers"]["offloaded_pages"] == 0


def test_every_kept_request_is_tried_before_one_is_given_up() -> None:
    """Nobody runs, and pages that no request of this engine holds leave no room for the first of two retracted ones."""
    core = sparse("llama", **FEW)
    brief = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    long, short = (prompt(40, 100), LONG), (prompt(41, 30), brief)
    plenty = sparse("llama", num_pages=200, host_memory="8MiB", max_model_len=180)
    alone = [run(plenty, [call], close=False)[0] for call in (long, short)]
    got: dict[str, list[int]] = {"long": [], "short": []}

    def step() -> list[Any]:
        outputs = core.step()
        for output in outputs:
            assert output.error is None, output.error
            got[output.request_id] += output.token_ids
        return outputs

    for name, call in (("long", long), ("short", short)):
        core.add_request(EngineRequest(name, *call))
    while not all(got.values()):
        step()
    for request in list(core.scheduler.running):
        core.scheduler._give_back(request, publish=True)
    elsewhere = core.ledger.preallocate(list(range(100)), 100, host=True)
    while not any(output.finished for output in step()):
        assert core.ledger.live_rows().tolist() != [elsewhere.row]
    assert got["short"] == alone[1] and len(core.scheduler.waiting) == 1
    core.ledger.fail_transfer(elsewhere.row, elsewhere.generation)
    while core.has_work():
        step()
    assert got["long"] == alone[0]
    core.close()


def test_a_request_that_fits_nowhere_is_given_up_with_a_typed_error() -> None:
    core = sparse("llama", **FEW)
    core.add_request(EngineRequest("it", prompt(40, 100), LONG))
    while not core.step():
        pass
    core.scheduler._give_back(core.scheduler.running[0], publish=True)
    elsewhere = core.ledger.preallocate(list(range(100)), 100, host=True)
    ends = [output for output in core.step() if output.finished]
    assert isinstance(ends[0].error, NeverFits) and ends[0].finish_reason == "error"
    core.ledger.fail_transfer(elsewhere.row, elsewhere.generation)
    assert not core.report()["tiers"]["tickets"]
    core.close()
