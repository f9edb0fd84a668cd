"""Random Hugging Face checkpoints that use every feature of their architecture, and the reference that reads them.

Weights are scaled so that reference logits have a standard deviation of at least 2 and attention is peaked: a
feature that is missing then shows in the logits (tests/models/test_parity_random.py switches each one off).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

WINDOW = 20
COMMON: dict[str, Any] = {
    "vocab_size": 192,
    "hidden_size": 60,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 24,  # not hidden_size / heads
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
YARN_MSCALE = {**YARN, "beta_fast": 4.0, "beta_slow": 0.5, "mscale": 0.8, "mscale_all_dim": 1.2}
LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 3.0}


@dataclass(frozen=True)
class Variant:
    """One checkpoint: an architecture of transformers and what its configuration adds to COMMON."""

    name: str
    hf_class: str
    changes: dict[str, Any]


VARIANTS = {
    v.name: v
    for v in (
        Variant(
            "llama",
            "Llama",
            {
                "attention_bias": True,
                "mlp_bias": True,
                "tie_word_embeddings": False,
                "rope_parameters": LLAMA3,
            },
        ),
        Variant("llama-linear", "Llama", {"tie_word_embeddings": True, "rope_parameters": LINEAR}),
        Variant("llama-yarn", "Llama", {"rope_parameters": YARN_MSCALE}),
        Variant("mistral", "Mistral", {"sliding_window": WINDOW, "rope_parameters": {"rope_theta": 1000.0}}),
        Variant(
            "qwen2",
            "Qwen2",
            {
                "head_dim": None,
                "hidden_size": 96,
                "use_sliding_window": True,
                "sliding_window": WINDOW,
                "max_window_layers": 2,
                "tie_word_embeddings": True,
                "rope_parameters": YARN,
            },
        ),
        Variant("qwen3", "Qwen3", {"tie_word_embeddings": False, "rope_parameters": {"rope_theta": 50000.0}}),
        Variant(
            "gemma3",
            "Gemma3",
            {
                "num_hidden_layers": 6,
                "hidden_size": 66,
                "sliding_window": WINDOW,
                "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
                "query_pre_attn_scalar": 40,
                "final_logit_softcapping": 6.0,
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "rope_theta": 20000.0, "factor": 2.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
                },
            },
        ),
    )
}


def make_checkpoint(name: str, folder: Path, seed: int = 0) -> Any:
    """Build variant `name`, save it as transformers does, return the model (float32, eager attention)."""
    import transformers

    variant = VARIANTS[name]
    prefix = "Gemma3Text" if variant.hf_class == "Gemma3" else variant.hf_class
    values = {k: v for k, v in {**COMMON, **variant.changes}.items() if v is not None}
    config = getattr(transformers, f"{prefix}Config")(**values)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{variant.hf_class}ForCausalLM")(config).float().eval()
    randomise(model, seed)
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def randomise(model: Any, seed: int) -> None:
    """Give every parameter a size at which it matters."""
    generator = torch.Generator().manual_seed(seed)
    plus_one = "Gemma3" in type(model).__name__  # norms stored as w, used as 1 + w
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            gain = 1.5 if "q_norm" in name or "k_norm" in name else 1.0
            values = values * 0.4 + gain - (1.0 if plus_one else 0.0)
        elif name.endswith("bias"):
            values = values * 0.7
        elif "embed_tokens" in name:
            values = values * (2.5 / parameter.shape[1] ** 0.5)
        elif "lm_head" in name:
            values = values * (3.0 / parameter.shape[1] ** 0.5)
        else:
            gain = 2.0 if "q_proj" in name or "k_proj" in name else 1.2
            values = values * (gain / parameter.shape[1] ** 0.5)
        parameter.copy_(values)


@torch.no_grad()
def reference_logits(model: Any, ids: list[int]) -> torch.Tensor:
    """float32 [tokens, V] of one sequence."""
    logits: torch.Tensor = model(torch.tensor([ids]), use_cache=False).logits
    return logits[0].float()


def random_ids(count: int, vocab_size: int = 192, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(3, vocab_size, (count,), generator=generator).tolist()
    return ids
