"""Prefill, decode, verify and sampling of every architecture and drafter run on a CUDA device that is not there."""

from __future__ import annotations

from typing import Any

import pytest
from torch._subclasses.fake_tensor import unset_fake_temporarily

from octavo.config import EngineConfig
from octavo.engine.core import EngineCore
from octavo.engine.request import EngineRequest, State
from octavo.engine.setup import Parts, build
from octavo.params import SamplingParams
from octavo.sched.batch import DecodeRow, PrefillChunk, StepPlan
from octavo.spec.choose import plan_draft
from tests.engine.test_drafts import drafts, options
from tests.fake_cuda import fake_cuda
from tests.tiny import loaded_model

__all__ = ["drafts"]

SETTINGS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=3, logprobs=2),
    SamplingParams(temperature=0.5, repetition_penalty=1.2, presence_penalty=0.5, logit_bias={5: 2.0}, min_tokens=4),
]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mistral": ("sliding", {}),
    "qwen2": ("llama", {"architecture": "qwen2", "attention_bias": True}),
    "qwen3": ("llama", {"architecture": "qwen3", "qk_norm": True}),
    "gemma3": ("gemma3", {}),
}


def fake_parts(device: Any, kind: str, model: dict[str, Any], **given: Any) -> Parts:
    settings = {"draft": "none", "overlap": True, "kv_memory": "8MiB", "dtype": "bfloat16", "threads": 1, **given}
    config = EngineConfig.from_options(settings, environ={})
    loaded = loaded_model(kind, **model)
    with unset_fake_temporarily():  # a checkpoint is checked before it is used, and that reads its values
        draft = plan_draft(config, loaded)
    return build(config, loaded, device=device, draft=draft)


def launch_all(parts: Parts) -> None:
    """Through the real ledger and runner: a prefill of all rows, decode mixed with a chunk, decode of whole drafts
    and of none, and what the steps without drafts left to be written."""
    core = EngineCore(EngineConfig.from_options({"overlap": True}, environ={}), parts)
    for i, params in enumerate(SETTINGS):
        prompt = [token % 7 if i == 0 else token for token in range(20 + i)]  # the first one repeats itself
        core.add_request(EngineRequest(f"r{i}", prompt, params))
    drafted = parts.drafter.max_draft_tokens if parts.drafter is not None else 0
    first = core.scheduler.plan(drafted, inflight=False)
    assert first is not None and len(first.prefills) == len(SETTINGS)
    core._launch(first)
    decodes = tuple(DecodeRow(c.request, c.row, c.generation, 8) for c in first.prefills)
    assert all(d.request.state is State.DECODE for d in decodes)
    parts.ledger.plan_decode(first.rows, parts.reserve)
    core.add_request(EngineRequest("late", [1, 2, 3, 4, 5], SETTINGS[0]))
    assert core.scheduler._admit(core.scheduler.waiting[0])
    late = core.scheduler.running[-1]
    parts.ledger.extend(late.row, 5)
    chunk = PrefillChunk(late, late.row, late.generation, 0, 5, True)
    core._launch(StepPlan(decodes, (chunk,), drafted, int(parts.ledger.allocated.max())))
    for count in (drafted, 0, 0):
        parts.ledger.plan_decode(first.rows, parts.reserve)
        core._launch(StepPlan(decodes, (), count, int(parts.ledger.allocated.max())))
    parts.runner.write_pending(tuple(first.rows.tolist()))


@pytest.mark.parametrize("architecture", sorted(MODELS))
def test_every_architecture(architecture: str) -> None:
    kind, model = MODELS[architecture]
    with fake_cuda() as device:
        launch_all(fake_parts(device, kind, model))


DRAFTERS = (
    "scripted", "scripted tree", "ngram", "eagle3", "tree", "dflash", "ngram+eagle3", "ngram+dflash", "ngram+table",
)  # fmt: skip


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter(kind: str, name: str, drafts: dict[str, str]) -> None:
    with fake_cuda() as device:
        launch_all(fake_parts(device, kind, {}, **options(name, kind, drafts)))
