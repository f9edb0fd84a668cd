"""Drafts do not change the text of real models: every run of draft_runs.py gives the token ids of plain decode.

Learned drafts are random networks here: what they draft is wrong, so rows are verified and thrown away. The script
drafts the right answer, a different length each time; the table is counted over the answers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import pytest

from octavo.config import EngineConfig
from octavo.engine.core import EngineCore
from octavo.engine.setup import build
from octavo.model.load import LoadedModel, load_model
from octavo.params import SamplingParams
from octavo.spec.checkpoint import random_draft, save_draft
from octavo.spec.draft_config import (
    DFlashConfig,
    EagleConfig,
    LayerShape,
    default_dflash_layers,
    default_eagle_taps,
)
from octavo.spec.table import save_table
from octavo.train.table import count_phrases
from tests.engine.test_core import run
from tests.models.draft_runs import COLUMNS, RUNS, TREES, DraftRun

pytestmark = [pytest.mark.models, pytest.mark.timeout(1800)]

TOKENS = 48
TEXTS = [
    "The history of the bread oven begins with",
    "One potato, two potato, three potato, four. One potato, two potato,",
    'def total(prices):\n    """The sum of all prices."""\n',
    "Dear Sir or Madam,\n\nI am writing to",
    "Q: What is the capital of Peru?\nA:",
    "Whales are not fish. Whales",
    "1, 2, 3, 4, 5, 6,",
    "She opened the door, and",
]
SAMPLED = [
    {"temperature": 0.8, "top_p": 0.95}, {"temperature": 1.0, "top_k": 20}, {"temperature": 0.7, "min_p": 0.05},
    {"temperature": 1.2, "top_k": 50, "top_p": 0.9},
]  # fmt: skip
MIXED = [
    {}, {"temperature": 0.9, "repetition_penalty": 1.2}, {"stop": ["ing", "ing the"]}, {"frequency_penalty": 0.6},
    {"temperature": 0.8, "presence_penalty": 0.8, "logit_bias": {400: 4.0}}, {"min_tokens": 40, "ignore_eos": False},
    {"temperature": 0.6, "logprobs": 3}, {"stop": ["\n\n"], "min_tokens": 5},
]  # fmt: skip


def settings(sampling: str) -> list[SamplingParams]:
    """One for each text."""
    special = {"greedy": [{}], "sampled": SAMPLED, "mixed": MIXED}[sampling]
    base = {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True}
    return [SamplingParams(**(base | special[i % len(special)] | {"seed": i})) for i in range(len(TEXTS))]


class Target:
    """A loaded model, what it answers without drafts, and drafts for it."""

    def __init__(self, name: str, folder: Path) -> None:
        self.loaded: LoadedModel = load_model(name, accept_license=True)
        self.prompts = [self.loaded.tokenizer.encode(text) for text in TEXTS]
        self.folder = folder
        core = self.engine(draft="none")
        self.plain = {s: run(core, self.calls(s, len(TEXTS)), close=False) for s in COLUMNS["sampling"]}
        core.close()
        self._save_drafts()

    def engine(self, **options: object) -> EngineCore:
        given = {"kv_memory": "640MiB", "max_model_len": 256, "max_running": 8, "threads": 1, **options}
        config = EngineConfig.from_options(given, environ={})
        return EngineCore(config, build(config, self.loaded))

    def calls(self, sampling: object, count: int) -> list[tuple[list[int], SamplingParams]]:
        return list(zip(self.prompts, settings(str(sampling)), strict=True))[:count]

    def _save_drafts(self) -> None:
        config = self.loaded.config
        shape, layers, vocab = LayerShape.of(config), config.num_layers, config.vocab_size
        eagle = EagleConfig(shape, vocab, 2048, default_eagle_taps(layers), target_head=True)
        mask = self.loaded.tokenizer.pad_id or 0
        block = DFlashConfig(shape, vocab, vocab, 1, default_dflash_layers(layers, 2), 9, mask, (None,), (False,))
        save_draft(self.folder / "eagle3", random_draft(eagle, seed=1))
        save_draft(self.folder / "dflash", random_draft(block, seed=2))
        written = [p + a for answers in self.plain.values() for p, a in zip(self.prompts, answers, strict=True)]
        phrases = count_phrases(written, order=3, min_count=1, vocab_size=vocab, min_probability=0.1)
        save_table(self.folder / "ngram+table", phrases, hidden_size=config.hidden_size,
                   target_sha256=self.loaded.sha256, card={})  # fmt: skip
        for sampling, answers in self.plain.items():
            right = [p + a for p, a in zip(self.prompts, answers, strict=True)]
            script = {"sequences": right, "accept_counts": [3, 0, 1, 8, 2]}
            (self.folder / f"{sampling}.json").write_text(json.dumps(script))

    def options(self, one: DraftRun) -> dict[str, object]:
        options: dict[str, object] = {"draft": one.draft, "draft_tokens": one.length + 1}
        if one.draft == "tree":
            steps, top_k, nodes = TREES[one.length]
            options = {"draft": "eagle3", "draft_steps": steps, "draft_topk": top_k, "draft_tokens": nodes}
        if one.draft == "scripted":
            options["draft_model"] = str(self.folder / f"{one.sampling}.json")
        elif one.draft != "ngram":
            options["draft_model"] = str(self.folder / str(options["draft"]))
        return options


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Target]]:
    made: dict[str, Target] = {}
    yield made
    made.clear()


def test_any_two_values_meet() -> None:
    for a, b in combinations(COLUMNS, 2):
        met = {(getattr(one, a), getattr(one, b)) for one in RUNS}
        assert met == {(x, y) for x in COLUMNS[a] for y in COLUMNS[b]}, (a, b)


@pytest.mark.parametrize("one", sorted(RUNS), ids=lambda one: "-".join(map(str, one)))
def test_drafts_do_not_show(
    one: DraftRun, targets: dict[str, Target], tmp_path_factory: pytest.TempPathFactory
) -> None:
    if one.model not in targets:
        targets.clear()  # one model at a time
        targets[one.model] = Target(one.model, tmp_path_factory.mktemp(one.model))
    target = targets[one.model]
    core = target.engine(page_size=one.page_size, overlap=one.overlap, draft_adaptive=one.adaptive,
                         max_batched_tokens=one.chunk, **target.options(one))  # fmt: skip
    answers = run(core, target.calls(one.sampling, one.streams), close=False)
    spec = core.report()["speculation"]
    core.close()
    assert answers == target.plain[one.sampling][: one.streams]
    if one.draft not in ("ngram", "scripted") and not one.adaptive:
        assert spec["drafts"] > 0
    if one.draft in ("scripted", "ngram+table") and not one.adaptive:
        assert spec["accepted_tokens"] > 0
