"""Drafts never change the text: every drafter, page size, overlap, pressure, at any sampling setting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.engine.request import EngineRequest, State
from octavo.errors import ConfigError
from octavo.params import SamplingParams
from octavo.spec.checkpoint import random_draft, save_draft
from octavo.spec.draft_config import (
    DFlashConfig,
    EagleConfig,
    LayerShape,
    default_dflash_layers,
    default_eagle_taps,
)
from tests.engine.test_core import GREEDY, prompts, run, solo
from tests.tables import write_table
from tests.tiny import VOCAB, config_of, engine

MIXED = [
    SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=11, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0.7, top_k=12, top_p=0.9, seed=5, max_tokens=20, ignore_eos=True,
                   repetition_penalty=1.3),  # fmt: skip
    SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, presence_penalty=1.0, frequency_penalty=0.5),
    SamplingParams(temperature=0.6, min_p=0.02, seed=9, max_tokens=20, logit_bias={7: 3.0}, min_tokens=15),
    SamplingParams(temperature=0.9, seed=2, max_tokens=20, regex="(ab|[c-f]{2,3}){1,6}[.;]"),
]

NAMES = ["scripted", "scripted tree", "ngram", "table", "eagle3", "tree", "dflash", "ngram+eagle3", "ngram+table"]


@pytest.fixture(scope="module")
def plain() -> dict[str, list[list[int]]]:
    calls = list(zip(prompts(len(MIXED)), MIXED, strict=True))
    return {kind: [solo(kind, prompt, params) for prompt, params in calls] for kind in ("llama", "gemma3")}


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of random EAGLE-3 and DFlash drafts and tables of random phrases for both tiny targets."""
    root = tmp_path_factory.mktemp("drafts")
    made = {}
    for kind in ("llama", "gemma3"):
        target = config_of(kind)
        shape = LayerShape.of(target)
        eagle = EagleConfig(shape, VOCAB, 128, default_eagle_taps(target.num_layers))
        dflash = DFlashConfig(shape, VOCAB, VOCAB, 2, default_dflash_layers(target.num_layers, 2), 6, VOCAB - 1,
                              (None, None), (False, False))  # fmt: skip
        for name, config in (("eagle3", eagle), ("dflash", dflash)):
            folder = root / f"{kind}-{name}"
            save_draft(folder, random_draft(config, seed=3), dtype=torch.float32)
            made[f"{kind}-{name}"] = str(folder)
        made[f"{kind}-table"] = write_table(root / f"{kind}-table", prompts(40, seed=8, high=60), VOCAB)
    return made


def options(name: str, kind: str, drafts: dict[str, str]) -> dict[str, Any]:
    if name in ("eagle3", "dflash", "table"):
        return {"draft": name, "draft_model": drafts[f"{kind}-{name}"], "draft_adaptive": False}
    if name.startswith("ngram+"):
        return {"draft": name, "draft_model": drafts[f"{kind}-{name.removeprefix('ngram+')}"]}
    if name == "tree":
        return {"draft": "eagle3", "draft_model": drafts[f"{kind}-eagle3"], "draft_adaptive": False,
                "draft_steps": 3, "draft_topk": 3, "draft_tokens": 12}  # fmt: skip
    if name == "scripted tree":
        return {"draft": "scripted", "draft_topk": 3, "draft_steps": 3, "draft_adaptive": False}
    return {"draft": name, "draft_adaptive": name == "ngram"}


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("page_size", [1, 16])
def test_text_with_drafts_equals_plain_text(
    kind: str, overlap: bool, name: str, page_size: int, plain: dict[str, list[list[int]]], drafts: dict[str, str]
) -> None:
    core = engine(kind, page_size=page_size, overlap=overlap, max_batched_tokens=64, **options(name, kind, drafts))
    calls = list(zip(prompts(len(MIXED)), MIXED, strict=True))
    assert run(core, calls, close=False) == plain[kind]
    assert run(core, calls) == plain[kind]  # and warm


@pytest.mark.parametrize(
    "name", ["scripted", "eagle3", "tree", "dflash", "ngram+eagle3", "ngram+dflash", "ngram+table"]
)
def test_text_with_drafts_under_pressure(name: str, drafts: dict[str, str]) -> None:
    long = SamplingParams(temperature=0, max_tokens=70, ignore_eos=True)
    given = prompts(5, seed=4, low=3, high=20)
    core = engine("llama", page_size=16, overlap=True, num_pages=14, max_model_len=160, max_batched_tokens=48,
                  **options(name, "llama", drafts))  # fmt: skip
    assert run(core, [(p, long) for p in given]) == [solo("llama", p, long) for p in given]
    assert core.scheduler.preemptions > 0


@pytest.mark.parametrize("overlap", [False, True])
def test_long_drafts_of_many_rows_leave_room_for_a_prompt(overlap: bool) -> None:
    """Six rows that draft five tokens each would fill the step and more; who comes then need not wait for their end."""
    core = engine(draft="scripted", draft_tokens=5, draft_adaptive=False, overlap=overlap, max_batched_tokens=24,
                  max_running=7)  # fmt: skip
    given = prompts(7, seed=3, low=20, high=30)
    long = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    for i, prompt in enumerate(given[:6]):
        core.add_request(EngineRequest(f"r{i}", prompt, long))
    for _ in range(40):  # several have come when others decode already
        if sum(r.state is State.DECODE for r in core.scheduler.running) == 6:
            break
        core.step()
    else:
        pytest.fail("nobody takes the later prompts in")
    core.add_request(EngineRequest("late", given[6], long))
    first_after = next(n for n in range(60) if any(out.request_id == "late" for out in core.step()))
    assert first_after <= 4, "30 tokens of prompt at 12 or more a step"
    while core.has_work():
        core.step()
    core.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_right_script_is_accepted_whole(tmp_path: Path, overlap: bool) -> None:
    prompt = prompts(1)[0]
    answer = solo("llama", prompt)
    script = tmp_path / "script.json"
    script.write_text(f'{{"sequences": [{prompt + answer}]}}')
    core = engine(draft="scripted", draft_model=str(script), draft_tokens=5, draft_adaptive=False, overlap=overlap)
    assert run(core, [(prompt, GREEDY)]) == [answer]
    spec = core.report()["speculation"]
    assert spec["accepted_tokens"] / spec["draft_tokens"] > 0.9
    assert core.stats().drafts <= 7


@pytest.mark.parametrize("overlap", [False, True])
def test_drafting_stops_at_the_drafts_own_position_limit(tmp_path: Path, overlap: bool) -> None:
    """A row that grows past the limit, and one that begins past it: plain text, counted, no more drafts."""
    target = config_of("llama")
    short = EagleConfig(LayerShape.of(target), VOCAB, VOCAB, default_eagle_taps(4), context_tokens=40)
    save_draft(tmp_path, random_draft(short, seed=3), dtype=torch.float32)
    forty = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    calls = [(prompts(1, low=20, high=20)[0], forty), (prompts(1, seed=5, low=45, high=50)[0], forty)]
    core = engine(draft="eagle3", draft_model=str(tmp_path), draft_adaptive=False, overlap=overlap)
    assert run(core, calls, close=False) == [solo("llama", p, s) for p, s in calls]
    spec = core.report()["speculation"]
    assert spec["past_draft_limit"] == 2
    assert 0 < spec["drafts"] <= 40 - len(calls[0][0])
    core.close()


def test_ngram_looks_a_shared_text_up_too(tmp_path: Path) -> None:
    """`--draft ngram --draft-model FILE`: what a request has never said is drafted from the file."""
    (tmp_path / "shared.txt").write_text("nothing\n\nfaxxxxx")
    drafted = {}
    for shared in (None, str(tmp_path / "shared.txt")):
        core = engine(draft="ngram", draft_model=shared, draft_adaptive=False)
        (x,) = core.tokenizer.encode("x")
        only_x = SamplingParams(temperature=0, max_tokens=3, logit_bias={x: 100.0})
        assert run(core, [(core.tokenizer.encode("fa"), only_x)], close=False) == [[x] * 3]
        drafted[shared] = core.report()["speculation"]["accepted_tokens"]
        core.close()
    assert list(drafted.values()) == [0, 1]
    for wrong in (tmp_path, tmp_path / "nowhere.txt"):
        with pytest.raises(ConfigError, match="UTF-8 text file"):
            engine(draft="ngram", draft_model=str(wrong))


def test_ngram_finds_repetition() -> None:
    tokens = [5, 6, 7, 8, 9, 10] * 8
    answer = solo("llama", tokens)
    core = engine(draft="ngram", draft_adaptive=False)
    assert run(core, [(tokens, GREEDY)]) == [answer]
