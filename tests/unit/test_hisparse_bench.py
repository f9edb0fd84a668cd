"""benchmarks/hisparse.py: one prefill serves every number of pages and any equal beginning; a stopped run goes on."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny import loaded_model

BENCHMARKS = str(Path(__file__).resolve().parents[2] / "benchmarks")
TEXT = [(7 * i * i + 3 * i) % 251 for i in range(1000)]


@pytest.fixture
def modules() -> Iterator[tuple[Any, Any]]:
    sys.path.insert(0, BENCHMARKS)
    try:
        with torch.inference_mode():
            yield importlib.import_module("hisparse"), importlib.import_module("hisparse_runs")
    finally:
        sys.path.remove(BENCHMARKS)


def bench(modules: tuple[Any, Any], kind: str, *options: str) -> Any:
    main, runs = modules
    args = main.parse(["--page-size", "8", "--sparse-dense-layers", "1", "--threads", "1", "--scored", "64", *options])
    return runs.Bench(args, loaded_model(kind), 1, 400)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_what_earlier_runs_left_does_not_change_a_unit(kind: str, modules: tuple[Any, Any]) -> None:
    """Units behind one another share beginnings of prompts; each is as if it had been the first, bit for bit."""
    _, runs = modules
    used = bench(modules, kind, "--fractions", "2,8")
    for depth in (0.75, 0.25):
        fresh = runs.needle(bench(modules, kind, "--fractions", "2,8"), TEXT, 400, depth, 1)
        assert runs.needle(used, TEXT, 400, depth, 1) == fresh
        assert len({entry["answer"] for entry in fresh}) > 1
    alone, prompt = bench(modules, kind), runs.needle_prompt(used, TEXT, 380, 0.25, 1)[0]
    assert torch.equal(used.prefill(prompt), alone.prefill(prompt))
    assert used.held == prompt
    pages = len(prompt) // 8
    assert torch.equal(used.host[:pages], alone.host[:pages])
    first = runs.perplexity(used, TEXT, 320, 0)
    assert first == runs.perplexity(bench(modules, kind, "--fractions", "2,8"), TEXT, 320, 0)
    assert len({entry["nll"] for entry in first}) == 3


def test_with_every_page_selected_the_score_is_the_dense_one(modules: tuple[Any, Any]) -> None:
    dense, every = modules[1].perplexity(bench(modules, "llama", "--fractions", "1"), TEXT, 320, 0)
    assert every["topk_pages"] == 32
    assert every["nll"] == dense["nll"]


def test_a_stopped_run_goes_on_where_it_was(tmp_path: Path, modules: tuple[Any, Any]) -> None:
    main, _ = modules
    options = ["--parts", "perplexity", "--contexts", "48", "--windows", "3", "--json", str(tmp_path / "r.json")]
    seen: list[int] = []

    class Counting:
        def run(self, unit: dict[str, Any]) -> list[dict[str, Any]]:
            seen.append(unit["window"])
            return [{"setting": "dense", "topk_pages": 0, "nll": 2.0 + unit["window"], "tokens": 2}]

    args = main.parse(options)
    wanted = list(main.units(args, TEXT))
    main.work(main.Results(args, "text"), Counting(), wanted, limit_s=0.0)
    assert seen == [0]
    main.work(main.Results(args, "text"), Counting(), wanted, limit_s=float("inf"))
    assert seen == [0, 1, 2]
    result = json.loads((tmp_path / "r.json").read_text())
    assert [unit["session"] for unit in result["units"].values()] == [0, 1, 1]
    assert [(line["nll"], line["tokens"]) for line in result["perplexity"]] == [(9.0, 6)]
    with pytest.raises(SystemExit, match=r"scored = 256, not 64"):
        main.Results(main.parse([*options, "--scored", "64"]), "text")
    assert main.Results(main.parse([*options, "--scored", "64", "--fresh"]), "text").data["units"] == {}
