"""Tiny random models for tests: a real network, a real tokenizer, no files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from octavo.config import EngineConfig
from octavo.engine.core import EngineCore
from octavo.engine.setup import build
from octavo.model.config import ModelConfig, RopeConfig
from octavo.model.load.expected import expected_tensors
from octavo.model.load.loader import LoadedModel
from octavo.model.load.tokenizer import Tokenizer

VOCAB = 288
EOS = 256


class RandomSource:
    """Seeded random weights for a configuration, scaled so that logits spread (standard deviation above 2)."""

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        self._shapes = expected_tensors(config)
        self._config, self._seed = config, seed

    def names(self) -> list[str]:
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def kind(self, name: str) -> str:
        return "F32"

    def groups32(self, name: str) -> None:
        return None

    def stored(self, name: str) -> np.ndarray:
        return self.tensor(name).numpy().reshape(-1).view(np.uint8)

    def nbytes(self) -> int:
        return sum(4 * int(np.prod(s)) for s in self._shapes.values())

    def tensor(self, name: str) -> torch.Tensor:
        shape = self._shapes[name]
        generator = torch.Generator().manual_seed(self._seed * 7919 + sum(name.encode()) * 31 + len(name))
        values = torch.randn(shape, generator=generator)
        if len(shape) == 1:
            return values * 0.1 + (1.0 if name.endswith("norm.weight") else 0.0)
        gain = 1.0 if "embed_tokens" in name or "lm_head" in name else 2.0
        return values * (gain / shape[1] ** 0.5) * (6.0 if "embed_tokens" in name or "lm_head" in name else 1.0)


def config_of(kind: str = "llama", **changes: Any) -> ModelConfig:
    """A tiny model of one shape: "llama" (full attention), "gemma3" (hybrid), "sliding" (every layer has a window)."""
    base = ModelConfig(
        architecture="llama",
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        context_tokens=512,
        rope=RopeConfig(theta=10000.0),
        eos_token_ids=(EOS,),
        tie_embeddings=True,
    )
    if kind == "gemma3":
        base = replace(
            base,
            architecture="gemma3",
            qk_norm=True,
            post_norms=True,
            activation="gelu_tanh",
            num_layers=6,
            layer_windows=(24, 24, None, 24, 24, None),
            rope_local=RopeConfig(theta=1000.0),
            embed_scale=0.1,  # small, or a tied head would answer every token with itself
        )
    elif kind == "sliding":
        base = replace(base, architecture="mistral", layer_windows=(24,) * 4)
    return replace(base, **changes)


def byte_tokenizer() -> Tokenizer:
    """One token a byte, then <|end|> and unused ids up to the vocabulary's size."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: i for i, symbol in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    backend.add_tokens([f"<{i}>" for i in range(VOCAB - 257)])
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    return Tokenizer(backend, eos_ids=[EOS], eos_id=EOS, chat_template=template)


def loaded_model(kind: str = "llama", seed: int = 0, **changes: Any) -> LoadedModel:
    config = config_of(kind, **changes)
    source = RandomSource(config, seed)
    return LoadedModel(
        config=config,
        tensors=source,
        tokenizer=byte_tokenizer(),
        name=f"tiny-{kind}",
        path=Path("/nowhere"),
        format="random",
        weight_bytes=source.nbytes(),
    )


def engine(kind: str = "llama", *, seed: int = 0, model: dict[str, Any] | None = None, **options: Any) -> EngineCore:
    """An engine core on a tiny model, books checked after every step."""
    given = {"draft": "none", "kv_memory": "64MiB", "check_books": True, "threads": 1, **options}
    config = EngineConfig.from_options(given, environ={})
    return EngineCore(config, build(config, loaded_model(kind, seed, **(model or {}))))
