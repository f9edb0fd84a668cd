"""Logits against transformers on random checkpoints, and the proof that every feature is looked at.

For each feature a test switches it off (in the configuration or in the weights) and must see the comparison fail.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.model.config import ModelConfig, RopeConfig
from octavo.model.load.safetensors import SafetensorsSource
from octavo.model.registry import ARCHITECTURES, build_network
from octavo.ops import native
from tests.models.driver import Driver
from tests.random_checkpoints import VARIANTS, WINDOW, make_checkpoint, random_ids, reference_logits

TOLERANCE = 1e-3
TOKENS = 90
PATHS = ["torch", *(["native"] if native.available() else [])]


class _Kept:
    """A checkpoint and what transformers says about it; made once per variant."""

    def __init__(self, name: str) -> None:
        folder = Path(tempfile.mkdtemp(prefix="octavo-parity-"))
        model = make_checkpoint(name, folder)
        self.ids = random_ids(TOKENS)
        self.logits = reference_logits(model, self.ids)
        self.source = SafetensorsSource(folder)
        self.config = self.source.config
        with torch.no_grad():
            states = model(torch.tensor([self.ids]), output_hidden_states=True).hidden_states
        self.states = [state[0] for state in states]
        self.model = model


@functools.cache
def kept(name: str) -> _Kept:
    return _Kept(name)


def our_logits(config: ModelConfig, source: Any, ids: list[int], path: str, chunk: int = 37) -> torch.Tensor:
    network = build_network((config, source), quantization="none", use_native=path == "native", page_size=16, threads=1)
    return network.logits(Driver(network, 1, 128).prefill(0, ids, chunk))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_transformers(name: str, path: str) -> None:
    case = kept(name)
    assert float(case.logits.std()) >= 2
    ours = our_logits(case.config, case.source, case.ids, path)
    assert float((ours - case.logits).abs().max()) < TOLERANCE


def test_every_architecture_has_a_variant() -> None:
    assert {v.hf_class.lower() for v in VARIANTS.values()} == set(ARCHITECTURES)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "gemma3"])
def test_greedy_ids_and_hidden_states_equal_transformers(name: str, path: str) -> None:
    case = kept(name)
    network = build_network((case.config, case.source), quantization="none", use_native=path == "native", threads=1)
    driver = Driver(network, 1, 128)
    taps = (0, 2, case.config.num_layers - 1, case.config.num_layers)
    driver.run([(0, case.ids)], taps)
    expected = torch.cat([case.states[tap] for tap in taps], dim=-1)
    torch.testing.assert_close(driver.features, expected, rtol=1e-3, atol=1e-3)
    prompts = [case.ids[:n] for n in (1, 9, 33)]
    ours = Driver(network, 3, 128).greedy(prompts, 24)
    for prompt, got in zip(prompts, ours, strict=True):
        ids, wanted = list(prompt), []
        for _ in range(24):
            best = reference_logits(case.model, ids)[-1].topk(2)
            if float(best.values[0] - best.values[1]) < 2 * TOLERANCE:
                break  # from here on either answer is right
            wanted.append(int(best.indices[0]))
            ids.append(wanted[-1])
        assert len(wanted) >= 4
        assert got[: len(wanted)] == wanted


class _Changed:
    """A source with some tensors replaced."""

    def __init__(self, source: Any, change: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
        self._source, self._change = source, change

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def tensor(self, name: str) -> torch.Tensor:
        return self._change(name, self._source.tensor(name))


def _ones(part: str) -> Callable[[str, torch.Tensor], torch.Tensor]:
    return lambda name, value: torch.ones_like(value) if part in name else value


def _no_bias(part: str) -> Callable[[str, torch.Tensor], torch.Tensor]:
    return lambda name, value: torch.zeros_like(value) if name.endswith(part + ".bias") else value


Switch = Callable[[ModelConfig, Any], tuple[ModelConfig, Any]]


def _config(**changes: Any) -> Switch:
    return lambda config, source: (replace(config, **changes), source)


def _weights(change: Callable[[str, torch.Tensor], torch.Tensor]) -> Switch:
    return lambda config, source: (config, _Changed(source, change))


def _rope(**changes: Any) -> Switch:
    return lambda config, source: (replace(config, rope=replace(config.rope, **changes)), source)


def _rope_params(**changes: float) -> Switch:
    return lambda config, source: (
        replace(config, rope=replace(config.rope, params={**config.rope.params, **changes})),
        source,
    )


def _window(size: int | None) -> Switch:
    def switch(config: ModelConfig, source: Any) -> tuple[ModelConfig, Any]:
        windows = tuple(None if w is None else size for w in config.windows)
        return replace(config, layer_windows=windows), source

    return switch


def _every_layer_slides(config: ModelConfig, source: Any) -> tuple[ModelConfig, Any]:
    return replace(config, layer_windows=(WINDOW,) * config.num_layers), source


SWITCHES: dict[str, tuple[str, Switch]] = {
    "llama: q/k/v biases": ("llama", _config(attention_bias=False)),
    "llama: q bias alone": ("llama", _weights(_no_bias("q_proj"))),
    "llama: v bias alone": ("llama", _weights(_no_bias("v_proj"))),
    "llama: output bias": ("llama", _config(attention_out_bias=False)),
    "llama: MLP biases": ("llama", _config(mlp_bias=False)),
    "llama: down bias alone": ("llama", _weights(_no_bias("down_proj"))),
    "llama: own head": ("llama", _config(tie_embeddings=True)),
    "llama: llama3 scaling": ("llama", _rope(scaling=None)),
    "llama: low_freq_factor": ("llama", _rope_params(low_freq_factor=1.6)),
    "llama: input norm weights": ("llama", _weights(_ones("input_layernorm"))),
    "llama: MLP norm weights": ("llama", _weights(_ones("post_attention_layernorm"))),
    "llama: final norm weights": ("llama", _weights(_ones("model.norm"))),
    "llama: SiLU": ("llama", _config(activation="gelu_tanh")),
    "llama: attention scale": ("llama", _config(query_scale=16**-0.5)),
    "linear: scaling": ("llama-linear", _rope(scaling=None)),
    "linear: base": ("llama-linear", _rope(theta=10000.0)),
    "yarn: scaling": ("llama-yarn", _rope(scaling=None)),
    "yarn: attention factor": ("llama-yarn", _rope_params(attention_factor=1.0)),
    "yarn: beta_fast": ("llama-yarn", _rope_params(beta_fast=16.0)),
    "yarn: beta_slow": ("llama-yarn", _rope_params(beta_slow=2.0)),
    "mistral: window off": ("mistral", _window(None)),
    "mistral: window + 1": ("mistral", _window(WINDOW + 1)),
    "mistral: window - 1": ("mistral", _window(WINDOW - 1)),
    "qwen2: biases": ("qwen2", _config(attention_bias=False)),
    "qwen2: window off": ("qwen2", _window(None)),
    "qwen2: window on every layer": ("qwen2", _every_layer_slides),
    "qwen2: yarn": ("qwen2", _rope(scaling=None)),
    "qwen3: q/k norms off": ("qwen3", _config(qk_norm=False)),
    "qwen3: q norm weights": ("qwen3", _weights(_ones("q_norm"))),
    "qwen3: k norm weights": ("qwen3", _weights(_ones("k_norm"))),
    "qwen3: own head": ("qwen3", _config(tie_embeddings=True)),
    "qwen3: base": ("qwen3", _rope(theta=10000.0)),
    "gemma3: q/k norms off": ("gemma3", _config(qk_norm=False)),
    "gemma3: norm after attention": ("gemma3", _weights(_ones("post_attention_layernorm"))),
    "gemma3: norm before MLP": ("gemma3", _weights(_ones("pre_feedforward_layernorm"))),
    "gemma3: norm after MLP": ("gemma3", _weights(_ones("post_feedforward_layernorm"))),
    "gemma3: embedding scale": ("gemma3", _config(embed_scale=1.0)),
    "gemma3: query scale": ("gemma3", _config(query_scale=None)),
    "gemma3: GELU": ("gemma3", _config(activation="silu")),
    "gemma3: soft cap": ("gemma3", _config(final_logit_softcap=None)),
    "gemma3: local base": ("gemma3", _config(rope_local=None)),
    "gemma3: local base's value": ("gemma3", _config(rope_local=RopeConfig(theta=10000.0))),
    "gemma3: global scaling": ("gemma3", _rope(scaling=None)),
    "gemma3: window off": ("gemma3", _window(None)),
    "gemma3: window + 1": ("gemma3", _window(WINDOW + 1)),
    "gemma3: window on every layer": ("gemma3", _every_layer_slides),
    "gemma3: epsilon": ("gemma3", _config(rms_eps=1e-2)),
    "gemma3: norms stored as w": ("gemma3", _config(norm_plus_one=True)),
}


@pytest.mark.parametrize("switch", SWITCHES)
def test_a_feature_switched_off_is_noticed(switch: str) -> None:
    name, change = SWITCHES[switch]
    case = kept(name)
    config, source = change(case.config, case.source)
    difference = float((our_logits(config, source, case.ids, "torch", chunk=TOKENS) - case.logits).abs().max())
    assert difference > 10 * TOLERANCE


def test_explicit_factors_are_those_of_llama3() -> None:
    """GGUF's rope_freqs are divisors: the llama3 checkpoint read with them gives the same logits."""
    from octavo.model.rope import rope_frequencies

    case = kept("llama")
    scaled, _ = rope_frequencies(case.config.rope, case.config.head_dim, case.config.context_tokens)
    plain, _ = rope_frequencies(RopeConfig(case.config.rope.theta), case.config.head_dim, 0)
    rope = RopeConfig(case.config.rope.theta, "factors", {}, tuple((plain / scaled).tolist()))
    for path in PATHS:
        ours = our_logits(replace(case.config, rope=rope), case.source, case.ids, path)
        assert float((ours - case.logits).abs().max()) < TOLERANCE
