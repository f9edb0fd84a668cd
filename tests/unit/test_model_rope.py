"""Rotation frequencies against transformers' own functions, and the tables they fill."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from octavo.errors import ModelError
from octavo.model.config import RopeConfig
from octavo.model.rope import rope_frequencies, rope_tables

HEAD_DIM, CONTEXT = 48, 512
CASES = [
    ("linear", {"factor": 4.0}),
    (
        "llama3",
        {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    (
        "llama3",
        {
            "factor": 32.0,
            "low_freq_factor": 2.0,
            "high_freq_factor": 8.0,
            "original_max_position_embeddings": 128,
        },
    ),
    ("yarn", {"factor": 4.0, "original_max_position_embeddings": 128}),
    ("yarn", {"factor": 0.5, "original_max_position_embeddings": 128}),
    ("yarn", {"factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 8.0, "beta_slow": 2.0}),
    ("yarn", {"factor": 4.0, "original_max_position_embeddings": 128, "attention_factor": 1.25}),
    ("yarn", {"factor": 4.0, "original_max_position_embeddings": 128, "mscale": 0.7, "mscale_all_dim": 1.1}),
    ("yarn", {"factor": 4.0, "original_max_position_embeddings": 128, "truncate": False}),
]


@pytest.mark.parametrize(("scaling", "params"), CASES)
@pytest.mark.parametrize("theta", [500.0, 10000.0, 1e6])
def test_frequencies_equal_transformers(scaling: str, params: dict[str, float], theta: float) -> None:
    config = LlamaConfig(
        hidden_size=96,
        num_attention_heads=2,
        head_dim=HEAD_DIM,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": scaling, "rope_theta": theta, **params},
    )
    expected, expected_factor = ROPE_INIT_FUNCTIONS[scaling](config, torch.device("cpu"))
    ours, factor = rope_frequencies(RopeConfig(theta, scaling, params), HEAD_DIM, CONTEXT)  # type: ignore[arg-type]
    torch.testing.assert_close(ours, expected, rtol=2e-6, atol=0)
    assert factor == pytest.approx(expected_factor, rel=1e-12)
    plain, _ = rope_frequencies(RopeConfig(theta), HEAD_DIM, CONTEXT)
    assert not torch.allclose(ours, plain) or factor != 1.0


def test_tables_turn_by_position_times_frequency() -> None:
    cos, sin = rope_tables(RopeConfig(theta=100.0), 8, 20)
    assert cos.shape == sin.shape == (20, 4)
    assert cos.dtype == torch.float32
    angle = 13 * 100.0 ** (-2 * 3 / 8)
    assert float(cos[13, 3]) == pytest.approx(math.cos(angle), abs=1e-6)
    assert float(sin[13, 3]) == pytest.approx(math.sin(angle), abs=1e-6)


def test_yarn_factor_is_in_the_tables() -> None:
    params = {"factor": 4.0, "original_max_position_embeddings": 128, "attention_factor": 3.0}
    cos, _ = rope_tables(RopeConfig(1e4, "yarn", params), HEAD_DIM, 4)
    assert float(cos[0, 0]) == pytest.approx(3.0)


def test_yarn_factor_defaults_to_the_ratio_of_contexts() -> None:
    given = {"original_max_position_embeddings": 128.0}
    implied, _ = rope_frequencies(RopeConfig(1e4, "yarn", given), HEAD_DIM, CONTEXT)
    explicit, _ = rope_frequencies(RopeConfig(1e4, "yarn", {**given, "factor": 4.0}), HEAD_DIM, CONTEXT)
    assert torch.equal(implied, explicit)


def test_explicit_factors_divide() -> None:
    factors = tuple(float(i + 1) for i in range(4))
    ours, factor = rope_frequencies(RopeConfig(100.0, "factors", {}, factors), 8, 16)
    plain, _ = rope_frequencies(RopeConfig(100.0), 8, 16)
    assert torch.equal(ours * torch.tensor(factors), plain) or torch.allclose(ours * torch.tensor(factors), plain)
    assert factor == 1.0


def test_wrong_numbers_are_refused_by_name() -> None:
    with pytest.raises(ModelError, match="4 given|3 given"):
        rope_frequencies(RopeConfig(100.0, "factors", {}, (1.0, 2.0, 3.0)), 8, 16)
    with pytest.raises(ModelError, match="'factor'"):
        rope_frequencies(RopeConfig(100.0, "linear"), 8, 16)
    with pytest.raises(ModelError, match="original_max_position_embeddings"):
        rope_frequencies(RopeConfig(100.0, "yarn", {"factor": 2.0}), 8, 16)
    with pytest.raises(ModelError, match="dynamic"):
        rope_frequencies(RopeConfig(100.0, "dynamic"), 8, 16)  # type: ignore[arg-type]
