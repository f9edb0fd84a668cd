"""SmolLM2 and Gemma 3 270M in float32 against transformers: 64 greedy ids of every prompt, logits within 1e-3.

The references are committed (scripts/make_references.py made them); one of them is made anew on every run.
"""

from __future__ import annotations

import datetime
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.model.load import LoadedModel, load_model
from octavo.model.registry import Network, build_network
from octavo.ops import native
from tests.models.driver import Driver

pytestmark = [pytest.mark.models, pytest.mark.timeout(1800)]

TOLERANCE = 1e-3
FOLDER = Path(__file__).parent / "references"
PATHS = ["torch", *(["native"] if native.available() else [])]
MODELS = ["smollm2", "gemma3-270m"]


def references(name: str) -> list[dict[str, Any]]:
    answers: list[dict[str, Any]] = json.loads((FOLDER / f"{name}.json").read_text())["answers"]
    return answers


@pytest.fixture(scope="module", params=MODELS)
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    return load_model(request.param, accept_license=True)


@pytest.fixture(scope="module", params=PATHS)
def network(loaded: LoadedModel, request: pytest.FixtureRequest) -> Network:
    built = build_network(
        loaded,
        dtype=torch.float32,
        quantization="none",
        use_native=request.param == "native",
        max_positions=2048,
        threads=torch.get_num_threads(),
    )
    assert built.kernels.startswith(request.param)
    return built


def test_there_are_enough_prompts(loaded: LoadedModel) -> None:
    answers = references(loaded.name)
    assert len(answers) >= 13
    assert all(len(answer["greedy_ids"]) == 64 for answer in answers)
    assert all(answer["smallest_gap"] > TOLERANCE for answer in answers)
    window = loaded.config.window_tokens or 512
    assert max(len(answer["prompt_ids"]) for answer in answers) > window


def test_greedy_ids_and_logits_equal_transformers(loaded: LoadedModel, network: Network) -> None:
    answers = references(loaded.name)
    prompts = [answer["prompt_ids"] for answer in answers]
    longest = max(len(prompt) for prompt in prompts)
    driver = Driver(network, len(prompts), longest + 64)
    last = torch.cat([driver.prefill(row, prompt, 256)[-1:] for row, prompt in enumerate(prompts)])
    logits = network.logits(last)
    for answer, row in zip(answers, logits, strict=True):
        top = torch.tensor(answer["top_logits"])
        assert float((row[answer["top_ids"]] - top).abs().max()) < TOLERANCE, answer["text"]
        assert abs(float(row.mean()) - answer["logits_mean"]) < TOLERANCE, answer["text"]
    got = driver.decode(last, 64)
    for answer, ids in zip(answers, got, strict=True):
        assert ids == answer["greedy_ids"], answer["text"]


def test_a_reference_made_today_is_the_committed_one(loaded: LoadedModel) -> None:
    script = Path(__file__).parents[2] / "scripts" / "make_references.py"
    spec = importlib.util.spec_from_file_location("make_references", script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    answers = [answer for answer in references(loaded.name) if len(answer["prompt_ids"]) < 64]
    chosen = answers[datetime.date.today().toordinal() % len(answers)]
    model, tokenizer = module.load(Path(loaded.path))
    assert tokenizer(chosen["text"])["input_ids"] == chosen["prompt_ids"]
    made = module.answer(model, chosen["prompt_ids"], tokens=8)
    assert made["greedy_ids"] == chosen["greedy_ids"][:8]
    assert made["top_ids"][:5] == chosen["top_ids"][:5]
    assert made["top_logits"] == pytest.approx(chosen["top_logits"], abs=TOLERANCE)
    assert made["logits_mean"] == pytest.approx(chosen["logits_mean"], abs=TOLERANCE)
    assert loaded.tokenizer.encode(chosen["text"]) == chosen["prompt_ids"]
