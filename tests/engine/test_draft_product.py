"""Full product on tiny models: every drafter, draft length and page size, adaptive on and off, batches of 1 to 8.

Token ids are those of plain decode, whether a draft is right, wrong, random or right now and then. `make test` runs
three batch sizes with every combination, in turn; `make soak` all eight.
"""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest
import torch

from octavo.params import SamplingParams
from octavo.spec.checkpoint import random_draft, save_draft
from octavo.spec.draft_config import DFlashConfig, EagleConfig, LayerShape, default_eagle_taps
from tests.engine.test_core import prompts, run, solo
from tests.tables import write_table
from tests.tiny import VOCAB, config_of, engine

PAGE_SIZES = (1, 16, 64, 256)
LENGTHS = (1, 3, 5, 8)
SOME = ((1, 4, 7), (2, 5, 8), (3, 6, 8))
HOW_MANY = pytest.mark.parametrize("sizes", ["some", pytest.param("all", marks=pytest.mark.soak)])
TREES = ((1, 4, 5), (2, 2, 6), (3, 3, 12), (5, 8, 64))  # steps, top-k, nodes
PROMPTS = prompts(8, seed=21, low=3, high=40)
SETTINGS = [
    SamplingParams(max_tokens=8, ignore_eos=True, seed=i, temperature=0.9 * (i % 2), top_k=9 if i % 3 == 1 else 0,
                   repetition_penalty=1.0 if i < 5 else 1.2)
    for i in range(8)
]  # fmt: skip


@pytest.fixture(scope="module")
def plain() -> dict[str, list[list[int]]]:
    return {kind: [solo(kind, p, s) for p, s in zip(PROMPTS, SETTINGS, strict=True)] for kind in ("llama", "gemma3")}


@pytest.fixture(scope="module")
def files(plain: dict[str, list[list[int]]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Random learned drafts, tables and scripts for both targets."""
    root = tmp_path_factory.mktemp("product")
    made = {}
    for kind, answers in plain.items():
        target = config_of(kind)
        shape = LayerShape.of(target)
        eagle = EagleConfig(shape, VOCAB, VOCAB, default_eagle_taps(target.num_layers))
        block = DFlashConfig(shape, VOCAB, VOCAB, 1, (1, 2), 9, VOCAB - 1, (None,), (False,))
        for name, config in (("eagle3", eagle), ("dflash", block)):
            save_draft(root / f"{kind}-{name}", random_draft(config, seed=3), dtype=torch.float32)
            made[f"{kind}-{name}"] = str(root / f"{kind}-{name}")
        right = [p + a for p, a in zip(PROMPTS, answers, strict=True)]
        made[f"{kind}-table"] = write_table(root / f"{kind}-table", right, VOCAB)
        for name, counts in (("right", None), ("sometimes", [2, 0, 1, 8])):
            file = root / f"{kind}-{name}.json"
            file.write_text(json.dumps({"sequences": right, "accept_counts": counts}))
            made[f"{kind}-{name}"] = str(file)
    return made


def check(
    kind: str, plain: dict[str, list[list[int]]], page_size: int, adaptive: bool, sizes: str, **options: Any
) -> None:
    """Batches of several sizes through one engine; what came before is in its prefix cache."""
    batches = range(1, 9) if sizes == "all" else SOME[(PAGE_SIZES.index(page_size) + adaptive) % 3]
    core = engine(kind, page_size=page_size, draft_adaptive=adaptive, overlap=page_size in (16, 256),
                  max_batched_tokens=48 if adaptive else 512, **options)  # fmt: skip
    for size in batches:
        calls = list(zip(PROMPTS[:size], SETTINGS[:size], strict=True))
        assert run(core, calls, close=False) == plain[kind][:size], (page_size, adaptive, size, options)
    core.close()


@HOW_MANY
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(
    "name",
    [
        "wrong", "right", "sometimes", "ngram", "table", "eagle3", "dflash",
        "ngram+table", "ngram+eagle3", "ngram+dflash",
    ],
)
def test_chains_and_blocks(
    name: str, length: int, sizes: str, plain: dict[str, list[list[int]]], files: dict[str, str]
) -> None:
    options: dict[str, Any] = {"draft": name, "draft_tokens": length + 1}
    if name in ("wrong", "right", "sometimes"):
        options["draft"] = "scripted"
    if name not in ("ngram", "wrong"):
        options["draft_model"] = files[f"llama-{name.removeprefix('ngram+')}"]
    for page_size, adaptive in product(PAGE_SIZES, (False, True)):
        check("llama", plain, page_size, adaptive, sizes, **options)


@HOW_MANY
@pytest.mark.parametrize("tree", TREES, ids=str)
@pytest.mark.parametrize("name", ["eagle3", "scripted"])
def test_trees(
    name: str, tree: tuple[int, int, int], sizes: str, plain: dict[str, list[list[int]]], files: dict[str, str]
) -> None:
    steps, top_k, nodes = tree
    options: dict[str, Any] = {"draft": name, "draft_steps": steps, "draft_topk": top_k}
    options |= {"draft_tokens": nodes} if name == "eagle3" else {}
    options["draft_model"] = files["llama-eagle3" if name == "eagle3" else "llama-sometimes"]
    for page_size, adaptive in product(PAGE_SIZES, (False, True)):
        check("llama", plain, page_size, adaptive, sizes, **options)


@HOW_MANY
@pytest.mark.parametrize(
    "name", ["sometimes", "ngram", "eagle3", "dflash", "ngram+table", "ngram+eagle3", "ngram+dflash"]
)
def test_a_hybrid_model(name: str, sizes: str, plain: dict[str, list[list[int]]], files: dict[str, str]) -> None:
    """Sliding windows: the longest draft at every page size; lengths and trees are those of the tests above."""
    options: dict[str, Any] = {"draft": "scripted" if name == "sometimes" else name, "draft_tokens": 9}
    if name != "ngram":
        options["draft_model"] = files[f"gemma3-{name.removeprefix('ngram+')}"]
    for page_size in PAGE_SIZES:
        check("gemma3", plain, page_size, page_size > 16, sizes, **options)
