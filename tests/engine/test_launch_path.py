"""The decode launch path never waits for the device: guarded on a CPU, and run on a CUDA device that is not there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from octavo.engine.core import EngineCore
from octavo.engine.request import EngineRequest
from octavo.params import SamplingParams
from tests.engine.test_drafts import drafts, options
from tests.guard import DeviceSync, no_device_sync
from tests.tiny import engine

__all__ = ["drafts"]

VIOLATIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda x: x[0].item(),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "array": lambda x: __import__("numpy").asarray(x),
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu"),
    "data_ptr": lambda x: x.data_ptr(),
    "dlpack": lambda x: x.__dlpack__(),
    "bool": lambda x: bool(x[0] > 0),
    "int": lambda x: int(x[0]),
    "float": lambda x: float(x[0]),
    "range": lambda x: range(x[0]),
    "nonzero": lambda x: torch.nonzero(x),
    "where": lambda x: torch.where(x > 0),
    "unique": lambda x: torch.unique(x),
    "unique_consecutive": lambda x: torch.unique_consecutive(x),
    "masked_select": lambda x: torch.masked_select(x, x > 0),
    "boolean index": lambda x: x[x > 0],
    "boolean index_put": lambda x: x.__setitem__(x > 0, torch.tensor([7, 8])),
    "repeat_interleave": lambda x: torch.repeat_interleave(x, x),
    "equal": lambda x: torch.equal(x, x),
    "bincount": lambda x: torch.bincount(x),
}


@pytest.mark.parametrize("kind", sorted(VIOLATIONS))
def test_the_guard_sees_every_kind_of_violation(kind: str) -> None:
    x = torch.tensor([1, 0, 2])
    with pytest.raises((DeviceSync, TypeError, RuntimeError)), no_device_sync():
        VIOLATIONS[kind](x)
    VIOLATIONS[kind](x)  # and only the guard objects


def test_the_guard_lets_the_rest_pass() -> None:
    with no_device_sync():
        x = torch.arange(4).float()
        y = x.to(torch.int64)[torch.tensor([0, 1])]
        assert y.shape == (2,)


def guarded(core: EngineCore) -> EngineCore:
    launch = core.runner.launch

    def checked(plan: Any) -> Any:
        with no_device_sync():
            return launch(plan)

    core.runner.launch = checked  # type: ignore[method-assign]
    return core


@pytest.mark.parametrize("kind", ["llama", "gemma3", "sliding"])
@pytest.mark.parametrize("draft", ["none", "scripted", "ngram"])
def test_the_launch_path_does_not_sync(kind: str, draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launch_all(kind, monkeypatch, draft=draft)


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize(
    "name", ["scripted tree", "eagle3", "tree", "dflash", "ngram+eagle3", "ngram+dflash", "ngram+table"]
)
def test_no_drafter_syncs(name: str, adaptive: bool, drafts: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Adaptive: steps that draft nothing too, whose draft KV is written later."""
    given = {**options(name, "llama", drafts), "draft_adaptive": adaptive}
    launch_all("llama", monkeypatch, **given)


def launch_all(kind: str, monkeypatch: pytest.MonkeyPatch, **given: Any) -> None:
    """Requests of mixed settings from start to end, every launch guarded."""
    monkeypatch.setenv("OCTAVO_NATIVE", "0")
    core = guarded(engine(kind, overlap=True, max_batched_tokens=32, **given))
    mixed = [
        SamplingParams(temperature=0, max_tokens=8, ignore_eos=True),
        SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=3, max_tokens=8, logprobs=2),
        SamplingParams(temperature=0.5, repetition_penalty=1.2, presence_penalty=0.5, logit_bias={5: 2.0},
                       min_tokens=4, max_tokens=8, prompt_logprobs=3),
    ]  # fmt: skip
    for i, params in enumerate(mixed):
        core.add_request(EngineRequest(f"r{i}", list(range(10 + 30 * i)), params))
    while core.has_work():
        core.step()
    core.close()
