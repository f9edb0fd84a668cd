"""Rotary position tables: cos and sin of every position, with the scalings checkpoints use.

Half-split convention: element i of a head turns together with element i + head_dim/2 by the angle
position · frequency[i]. Sources: linear scaling (Chen et al. 2023, arXiv:2306.15595), YaRN (Peng et al. 2023,
arXiv:2309.00071, section 3.2–3.4), llama3 (the piecewise rule published with Llama 3.1).
"""

from __future__ import annotations

import math

import torch

from octavo.errors import ModelError
from octavo.model.config import RopeConfig


def rope_tables(rope: RopeConfig, head_dim: int, context_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin), float32 [context_tokens, head_dim/2]; YaRN's attention factor is already multiplied in."""
    frequencies, attention_factor = rope_frequencies(rope, head_dim, context_tokens)
    positions = torch.arange(context_tokens, dtype=torch.float32)
    angles = positions[:, None] * frequencies[None, :]
    return angles.cos() * attention_factor, angles.sin() * attention_factor


def rope_frequencies(rope: RopeConfig, head_dim: int, context_tokens: int) -> tuple[torch.Tensor, float]:
    """(radians per position, float32 [head_dim/2], factor on cos and sin).

    Raises ModelError for a scaling whose numbers are missing or of the wrong length.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    base = 1.0 / (rope.theta**exponents)
    if rope.scaling is None:
        return base, 1.0
    if rope.scaling == "linear":
        return base / _number(rope, "factor"), 1.0
    if rope.scaling == "llama3":
        return _llama3(base, rope), 1.0
    if rope.scaling == "yarn":
        return _yarn(base, rope, head_dim, context_tokens)
    if rope.scaling == "factors":
        return base / _divisors(rope, head_dim), rope.params.get("attention_factor", 1.0)
    raise ModelError(f"RoPE scaling {rope.scaling!r} is not supported: linear, llama3, yarn and explicit factors are")


def _number(rope: RopeConfig, name: str) -> float:
    value = rope.params.get(name)
    if value is None:
        raise ModelError(f"RoPE scaling {rope.scaling!r} needs {name!r}, which the configuration does not give")
    return float(value)


def _divisors(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    factors = rope.factors or ()
    if len(factors) != head_dim // 2:
        raise ModelError(f"RoPE factors: {len(factors)} given, head_dim/2 = {head_dim // 2} needed")
    return torch.tensor(factors, dtype=torch.float32)


def _llama3(base: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Long waves are slowed by `factor`, short ones kept, those between blended by how often they fit."""
    factor, original = _number(rope, "factor"), _number(rope, "original_max_position_embeddings")
    low, high = _number(rope, "low_freq_factor"), _number(rope, "high_freq_factor")
    turns = original / (2 * math.pi / base)  # full turns inside the original context
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - keep) * (base / factor) + keep * base


def _yarn(base: torch.Tensor, rope: RopeConfig, head_dim: int, context_tokens: int) -> tuple[torch.Tensor, float]:
    """Frequencies that turn often inside the original context are kept, the slow ones interpolated."""
    original = _number(rope, "original_max_position_embeddings")
    factor = float(rope.params.get("factor") or context_tokens / original)
    beta_fast = float(rope.params.get("beta_fast") or 32.0)
    beta_slow = float(rope.params.get("beta_slow") or 1.0)

    def dimension_of(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(beta_fast), dimension_of(beta_slow)
    if rope.params.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = high - low if high != low else 0.001
    slow = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / span).clamp(0.0, 1.0)
    return (base / factor) * slow + base * (1 - slow), _yarn_attention_factor(rope, factor)


def _yarn_attention_factor(rope: RopeConfig, factor: float) -> float:
    """Explicit, or from `mscale`/`mscale_all_dim`, or the paper's 0.1 ln(s) + 1."""
    explicit = rope.params.get("attention_factor")
    if explicit is not None:
        return float(explicit)

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    over, under = rope.params.get("mscale"), rope.params.get("mscale_all_dim")
    return mscale(over) / mscale(under) if over and under else mscale(1.0)
