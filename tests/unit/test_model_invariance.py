"""A request's hidden states, bit for bit, alone and in company, in chunks and token by token, for every page size."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from octavo.model.config import ModelConfig, RopeConfig
from octavo.model.registry import Network, build_network
from octavo.ops import native
from octavo.ops.meta import StepMeta
from tests.models.driver import Driver
from tests.random_checkpoints import random_ids
from tests.tiny import RandomSource, config_of

PATHS = ["torch", *(["native"] if native.available() else [])]
SHAPES: dict[str, ModelConfig] = {
    "llama": config_of(head_dim=20, num_heads=6, intermediate_size=100, attention_bias=True),
    "gemma3": config_of("gemma3", final_logit_softcap=20.0),
    "sliding": config_of("sliding", rope=RopeConfig(theta=500.0)),
    "qwen3": config_of(architecture="qwen3", qk_norm=True, num_heads=2, num_kv_heads=1),
}


@functools.cache
def network(shape: str, path: str, page_size: int = 16, kv_dtype: torch.dtype = torch.float32) -> Network:
    config = SHAPES[shape]
    built = build_network(
        (config, RandomSource(config)),
        quantization="none",
        use_native=path == "native",
        page_size=page_size,
        kv_dtype=kv_dtype,
        threads=1,
    )
    assert built.kernels.startswith(path)
    return built


@functools.cache
def alone(shape: str, path: str, kv_dtype: torch.dtype = torch.float32) -> dict[int, torch.Tensor]:
    """Hidden states of prompts of several lengths, each prefilled alone in one go."""
    found = {}
    for n in (1, 2, 23, 25, 65, 150):
        found[n] = Driver(network(shape, path, kv_dtype=kv_dtype), 1, 160).prefill(0, prompt(n))
    return found


def prompt(n: int) -> list[int]:
    return random_ids(n, 256, seed=n)


every = pytest.mark.parametrize(("shape", "path"), [(s, p) for s in SHAPES for p in PATHS])


@every
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16])
def test_chunks_do_not_show(shape: str, path: str, kv_dtype: torch.dtype) -> None:
    whole = alone(shape, path, kv_dtype)[150]
    for chunk in (1, 7, 64, 149):
        got = Driver(network(shape, path, kv_dtype=kv_dtype), 1, 160).prefill(0, prompt(150), chunk)
        assert torch.equal(got, whole), chunk


@pytest.mark.skipif("native" not in PATHS, reason="the compiled operations are not there")
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_a_long_prompt_shared_out_by_rows_does_not_show(quantization: Any, threads: int) -> None:
    """From 96 rows a thread on, threads take rows through whole layers; below, outputs are shared out."""
    config = config_of("gemma3")
    built = build_network((config, RandomSource(config)), quantization=quantization, threads=threads)
    ids = random_ids(401, 256, seed=5)
    whole = Driver(built, 1, 410).prefill(0, ids)
    assert torch.equal(Driver(built, 1, 410).prefill(0, ids, 61), whole)


@every
def test_company_does_not_show(shape: str, path: str) -> None:
    lengths = [1, 150, 2, 25, 23, 65]
    driver = Driver(network(shape, path), len(lengths), 160)
    together = driver.run([(row, prompt(n)) for row, n in enumerate(lengths)])
    for n, got in zip(lengths, together, strict=True):
        assert torch.equal(got, alone(shape, path)[n]), n


@every
def test_decode_among_chunks_does_not_show(shape: str, path: str) -> None:
    """Row 0 decodes token by token while row 1 is prefilled beside it in chunks and row 2 joins late."""
    driver = Driver(network(shape, path), 3, 160)
    mine, other = prompt(65), prompt(150)
    parts = [driver.prefill(0, mine[:40])]
    for step, token in enumerate(mine[40:]):
        batch = [(0, [token])]
        if step * 6 < 150:
            batch.append((1, other[step * 6 : step * 6 + 6]))
        if step >= 20:
            batch.append((2, [other[step]]))
        parts.append(driver.run(batch)[0])
    assert torch.equal(torch.cat(parts), alone(shape, path)[65])


@every
@pytest.mark.parametrize("page_size", [1, 64, 256])
def test_page_size_does_not_show(shape: str, path: str, page_size: int) -> None:
    driver = Driver(network(shape, path, page_size), 1, 160)
    assert torch.equal(driver.prefill(0, prompt(150), 31), alone(shape, path)[150])


@every
def test_a_tree_path_does_not_show(shape: str, path: str) -> None:
    """Verify a tree of three branches; along each root-to-leaf path the hidden states are those of plain decode."""
    net = network(shape, path)
    start = 40
    driver = Driver(net, 1, 160)
    driver.prefill(0, prompt(150)[:start])
    tokens = [11, 22, 33, 44, 55, 66]
    parents = [-1, 0, 0, 1, 2, 4]
    hidden = run_tree(driver, start, tokens, parents)
    for leaf in (3, 5):
        nodes: list[int] = []
        node = leaf
        while node >= 0:
            nodes.insert(0, node)
            node = parents[node]
        plain = Driver(net, 1, 160)
        plain.prefill(0, prompt(150)[:start])
        for i in nodes:
            assert torch.equal(plain.run([(0, [tokens[i]])])[0][0], hidden[i]), (leaf, i)


def run_tree(driver: Driver, start: int, tokens: list[int], parents: list[int]) -> torch.Tensor:
    depths, masks = [], []
    for node, parent in enumerate(parents):
        depths.append(0 if parent < 0 else depths[parent] + 1)
        masks.append((0 if parent < 0 else masks[parent]) | 1 << node)
    n = len(tokens)
    meta = StepMeta(
        token_ids=torch.tensor(tokens),
        positions=torch.tensor([start + d for d in depths]),
        write_slots=torch.arange(start, start + n),
        q_seq=torch.zeros(n, dtype=torch.int64),
        rows=torch.tensor([0]),
        kv_start=torch.tensor([start]),
        mask=torch.tensor(masks),
        q_indptr=(0, n),
        max_kv_tokens=start + n,
    )
    return driver.network.forward(meta, driver.kv)[0]


@every
def test_logits_and_arg_max_of_a_row_do_not_depend_on_other_rows(shape: str, path: str) -> None:
    net = network(shape, path)
    hidden = alone(shape, path)[65]
    whole, best = net.logits(hidden), net.argmax(hidden)
    assert whole.dtype == torch.float32 and whole.shape == (65, net.config.vocab_size)
    for rows in (slice(0, 1), slice(3, 5), slice(10, 23), slice(64, 65)):
        assert torch.equal(net.logits(hidden[rows]), whole[rows])
        assert torch.equal(net.argmax(hidden[rows]), best[rows])
    assert torch.equal(best, whole.argmax(-1))


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_packed_weights_are_row_invariant_too(quantization: Any) -> None:
    config = replace(SHAPES["llama"], hidden_size=64, head_dim=16, num_heads=4, intermediate_size=96)
    net = build_network((config, RandomSource(config)), quantization=quantization, use_native=False)
    whole = Driver(net, 1, 160).prefill(0, prompt(65))
    assert torch.equal(Driver(net, 1, 160).prefill(0, prompt(65), 7), whole)
    together = Driver(net, 2, 160).run([(0, prompt(25)), (1, prompt(65))])
    assert torch.equal(together[1], whole)
