"""A whole training run of a minute at most: the target writes its own data, a draft learns, the engine serves it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM
from octavo.config import EngineConfig
from octavo.engine.core import EngineCore
from octavo.engine.setup import build
from octavo.errors import ConfigError, ModelNotFound
from octavo.params import SamplingParams
from octavo.spec.checkpoint import load_draft
from octavo.train.corpus import Corpus, Filter
from octavo.train.generate import SelfPrompter, question_prefix
from octavo.train.main import train_draft
from octavo.train.options import TrainOptions
from tests.tiny import loaded_model


class TinyLLM(LLM):
    """The library's LLM on a tiny random model that has no file."""

    def __init__(self, **options: Any) -> None:
        self.config = EngineConfig.from_options({"kv_memory": "64MiB", "threads": 1, **options}, environ={})
        self._attach(EngineCore(self.config, build(self.config, loaded_model("llama"))))


def options(algorithm: str, folder: Path, **changes: Any) -> TrainOptions:
    values: dict[str, Any] = {
        "algorithm": algorithm, "out": folder / algorithm, "answer_tokens": 400, "epochs": 3, "unroll": 2,
        "draft_vocab": 128, "layers": 1, "features": 2, "block_size": 4, "anchors": 8, "batch_tokens": 256,
        "max_tokens": 160, "held_out": 2, "cache_dir": folder / "cache", "max_question_tokens": 24,
        "max_answer_tokens": 32, "generate_batch": 96, "dtype": "float32", "learning_rate": 3e-3,
    }  # fmt: skip
    return TrainOptions(**{**values, **changes})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("training")


@pytest.mark.parametrize("algorithm", ["eagle3", "dflash"])
def test_a_draft_is_trained_saved_and_served(algorithm: str, folder: Path) -> None:
    loaded = loaded_model("llama")
    (folder / "prompts").mkdir(exist_ok=True)
    (folder / "prompts" / "two.jsonl").write_text('{"prompt": "Why is it so?"}\n{"prompt": "Write a poem."}\n')
    chosen = options(algorithm, folder, prompts=folder / "prompts")
    figures = train_draft(chosen, loaded=loaded, llm_factory=TinyLLM)
    history = figures["history"]
    assert figures["epochs_done"] == 3 and history[-1]["loss"] <= history[0]["loss"]
    assert figures["corpus"]["answer_tokens"] >= 400
    assert set(figures["served"]) == {"held_out T=0.0", "held_out T=0.8", "benchmark T=0.0", "benchmark T=0.8"}
    assert all(1.0 <= s["accept_length"] <= 4.0 for s in figures["served"].values())
    card = json.loads((chosen.out / "config.json").read_text())["octavo"]
    assert card["served"] == figures["served"] and card["options"]["seed"] == 1
    weights = load_draft(chosen.out, loaded.config)
    assert weights.token_ids is not None and len(weights.token_ids) == 128
    params = SamplingParams(temperature=0, max_tokens=24)
    prompt = list(range(40, 60))
    with TinyLLM(draft="none") as plain:
        expected = plain.generate([prompt], params)[0].token_ids
    with TinyLLM(draft=algorithm, draft_model=str(chosen.out)) as served:
        assert served.generate([prompt], params)[0].token_ids == expected


def test_phrases_are_counted_saved_and_served(folder: Path) -> None:
    loaded = loaded_model("llama")
    figures = train_draft(options("table", folder, min_count=1), loaded=loaded, llm_factory=TinyLLM)
    assert figures["phrases"] > 100 and figures["held_out"]["accept_length"] >= 1.0
    assert set(figures["served"]) == {"held_out T=0.0", "held_out T=0.8"}
    card = json.loads((folder / "table" / "config.json").read_text())["octavo"]
    assert card["served"] == figures["served"] and card["options"]["min_count"] == 1
    assert "epochs" not in card["options"]
    prompt, params = list(range(40, 60)), SamplingParams(temperature=0, max_tokens=24)
    with TinyLLM(draft="none") as plain:
        expected = plain.generate([prompt], params)[0].token_ids
    for draft in ("table", "ngram+table", "auto"):
        with TinyLLM(draft=draft, draft_model=str(folder / "table")) as served:
            assert served.generate([prompt], params)[0].token_ids == expected
            assert served.core.parts.drafter.name == ("table" if draft == "table" else "ngram+table")


@pytest.mark.parametrize("algorithm", ["eagle3", "dflash"])
def test_an_interrupted_run_goes_on_exactly(algorithm: str, tmp_path: Path, folder: Path) -> None:
    """Training stopped by the clock and continued gives the weights of a run that was never stopped."""
    from octavo.train import main as module

    loaded = loaded_model("llama")
    data = next((folder / "cache").rglob("corpus.npz"), None)
    common = {"data": data, "measure": False, "epochs": 2, "answer_tokens": 200}
    whole = options(algorithm, tmp_path / "whole", **common)
    train_draft(whole, loaded=loaded, llm_factory=TinyLLM)
    parts = options(algorithm, tmp_path / "parts", **common)
    real = module._short  # the same work folder layout for both
    assert real("a") != real("b")
    from octavo.train.loop import Trainer

    steps = iter(range(3))
    stopped = Trainer._out_of_time

    def soon(self: Trainer) -> bool:
        return next(steps, None) is None

    Trainer._out_of_time = soon  # type: ignore[method-assign]
    try:
        cut = train_draft(parts, loaded=loaded, llm_factory=TinyLLM)
    finally:
        Trainer._out_of_time = stopped  # type: ignore[method-assign]
    assert cut["steps"] < 3
    train_draft(parts, loaded=loaded, llm_factory=TinyLLM)
    first = load_draft(whole.out, loaded.config).tensors
    second = load_draft(parts.out, loaded.config).tensors
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_self_prompting_is_deterministic_and_skips_what_it_has(tmp_path: Path) -> None:
    def grow(tokens: int, corpus: Corpus) -> Corpus:
        with TinyLLM(draft="none", max_running=16) as llm:
            prompter = SelfPrompter(
                llm, seed=5, filter_=Filter(min_answer_tokens=4), batch=32, max_question_tokens=20, max_answer_tokens=12
            )
            prompter.fill(corpus, tokens, save=tmp_path / "c.npz")
        return corpus

    once = grow(40, Corpus())
    assert once.answer_tokens >= 40 and once.recipe["rounds"] >= 1
    assert Corpus.load(tmp_path / "c.npz") == once
    again = grow(40, Corpus())
    assert again.samples == once.samples
    with TinyLLM(draft="none") as llm:
        prefix = question_prefix(llm.tokenizer)
        assert llm.tokenizer.decode(prefix) == "user: "
    starts = [s.tokens[s.generated_start :][:12] for s in once]
    assert len(set(starts)) == len(starts)


def test_training_goes_on_from_an_earlier_draft(folder: Path) -> None:
    loaded = loaded_model("llama")
    first = options("eagle3", folder, out=folder / "first", measure=False)
    before = train_draft(first, loaded=loaded, llm_factory=TinyLLM)
    more = options("eagle3", folder, out=folder / "second", init=first.out, draft_vocab=64, seed=2, measure=False)
    after = train_draft(more, loaded=loaded, llm_factory=TinyLLM)
    earlier, later = (load_draft(o.out, loaded.config, loaded.sha256) for o in (first, more))
    assert after["went_on_from"] == earlier.fingerprint != later.fingerprint and before["went_on_from"] is None
    assert torch.equal(earlier.token_ids, later.token_ids)  # its vocabulary, not one of 64
    assert after["history"][0]["loss"] < before["history"][0]["loss"]
    card = json.loads((more.out / "config.json").read_text())["octavo"]["options"]
    assert "draft_vocab" not in card and card["seed"] == 2  # the earlier draft's vocabulary was taken


def test_an_earlier_draft_of_the_other_kind_is_refused(folder: Path) -> None:
    first = options("eagle3", folder, out=folder / "kind", measure=False)
    train_draft(first, loaded=loaded_model("llama"), llm_factory=TinyLLM)
    with pytest.raises(ConfigError, match="dflash"):
        train_draft(options("dflash", folder, init=first.out), loaded=loaded_model("llama"), llm_factory=TinyLLM)
    with pytest.raises(ModelNotFound):
        train_draft(options("eagle3", folder, init=folder / "none"), loaded=loaded_model("llama"), llm_factory=TinyLLM)
