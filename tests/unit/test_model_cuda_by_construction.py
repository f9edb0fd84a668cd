"""Every architecture's prefill, decode, verify and sampling head on a CUDA device that is not there, and without
a host read on the launch path where values exist."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octavo.model.config import ModelConfig
from octavo.model.registry import ARCHITECTURES, Network, build_network, make_kv
from octavo.ops.meta import StepMeta
from tests.fake_cuda import fake_cuda
from tests.guard import no_device_sync
from tests.models.driver import Driver, Pages
from tests.tiny import RandomSource, config_of

# Few layers: fake tensors cost a millisecond an operation, and layers of one kind are alike.
CONFIGS: dict[str, ModelConfig] = {
    "llama": config_of("llama", num_layers=1),
    "mistral": config_of("sliding", num_layers=1, layer_windows=(24,)),
    "qwen2": config_of(architecture="qwen2", attention_bias=True, num_layers=2, layer_windows=(None, 24)),
    "qwen3": config_of(architecture="qwen3", qk_norm=True, tie_embeddings=False, num_layers=1),
    "gemma3": config_of("gemma3", final_logit_softcap=30.0, num_layers=2, layer_windows=(24, None)),
}


def test_every_architecture_is_here() -> None:
    assert set(CONFIGS) == set(ARCHITECTURES)


class _OnDevice:
    """Fake weights: shapes without values."""

    def __init__(self, config: ModelConfig) -> None:
        self._real = RandomSource(config)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def tensor(self, name: str) -> torch.Tensor:
        return torch.empty(self._real.shape(name))


def step(device: torch.device, lengths: list[int], starts: list[int], *, masked: bool) -> StepMeta:
    indptr = [0]
    for length in lengths:
        indptr.append(indptr[-1] + length)
    n, b = indptr[-1], len(lengths)

    def ints(count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int64, device=device)

    return StepMeta(
        token_ids=ints(n),
        positions=ints(n),
        write_slots=ints(n),
        q_seq=ints(n),
        rows=ints(b),
        kv_start=ints(b),
        mask=ints(n) if masked else None,
        q_indptr=tuple(indptr),
        max_kv_tokens=max(s + x for s, x in zip(starts, lengths, strict=True)),
    )


STEPS = {
    "prefill": ([90, 7], [0, 64], False),
    "decode": ([1, 1, 1], [90, 5, 300], False),
    "mixed": ([1, 1, 30, 3], [90, 5, 0, 40], False),
    "tree verify": ([6, 6], [90, 300], True),
    "block": ([16], [31], True),
}


@pytest.mark.parametrize(("name", "dtype"), [*((name, torch.float32) for name in CONFIGS), ("gemma3", torch.bfloat16)])
def test_forward_and_head_run_on_fake_cuda(name: str, dtype: torch.dtype) -> None:
    config = CONFIGS[name]
    with fake_cuda() as device:
        network = build_network((config, _OnDevice(config)), dtype=dtype, quantization="none", device=device)
        assert network.kernels == "torch cuda"
        kv = make_kv(network, Pages(64, 64), max_rows=8, width_pages=32, device=device)
        for lengths, starts, masked in STEPS.values():
            meta = step(device, lengths, starts, masked=masked)
            hidden, features = network.forward(meta, kv, (0, 1, config.num_layers))
            assert hidden.shape == (meta.num_tokens, config.hidden_size)
            assert features is not None and features.shape == (meta.num_tokens, 3 * config.hidden_size)
            assert hidden.dtype == features.dtype == dtype
            assert hidden.device.type == features.device.type == "cuda"
            logits = network.logits(hidden[:3])
            assert logits.shape == (3, config.vocab_size) and logits.dtype == torch.float32
            assert logits.device.type == "cuda"
            best = network.argmax(hidden[:3])
            assert best.shape == (3,) and best.dtype == torch.int64 and best.device.type == "cuda"
            assert network.embed(best).shape == (3, config.hidden_size)


def test_fake_cuda_notices_a_host_tensor() -> None:
    config = CONFIGS["llama"]
    with fake_cuda() as device:
        network = build_network((config, _OnDevice(config)), quantization="none", device=device)
        kv = make_kv(network, Pages(64, 64), max_rows=8, width_pages=32, device=device)
        meta = step(torch.device("cpu"), [1], [5], masked=False)
        with pytest.raises(RuntimeError, match="device"):
            network.forward(meta, kv)


def guarded(network: Network) -> Driver:
    """A warmed driver: what is tried once per shape has been tried when the network was built."""
    driver = Driver(network, 3, 160)
    metas = [
        driver.meta([(0, list(range(5, 95))), (1, [7])]),
        driver.meta([(0, [1]), (1, [2]), (2, [3, 4, 5])]),
    ]
    tree = driver.meta([(0, [1, 2, 3])])
    masked = StepMeta(**{**vars(tree), "mask": torch.tensor([1, 3, 5])})
    with no_device_sync():
        for meta in [*metas, masked]:
            hidden, _ = network.forward(meta, driver.kv, (1,))
            network.logits(hidden)
            network.argmax(hidden)
            network.embed(meta.token_ids)
    return driver


@pytest.mark.parametrize("name", CONFIGS)
def test_no_host_read_on_the_torch_path(name: str) -> None:
    config = CONFIGS[name]
    guarded(build_network((config, RandomSource(config)), quantization="none", use_native=False))


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_no_host_read_with_packed_weights(quantization: Any) -> None:
    config = CONFIGS["llama"]
    guarded(build_network((config, RandomSource(config)), quantization=quantization, use_native=False))
