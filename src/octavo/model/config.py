"""Architecture-neutral description of a model, filled in by the loaders and read by the networks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of one kind of layer.

    `scaling` is None, "linear", "llama3", "yarn" or "factors"; `params` holds the scaling's own numbers under
    their Hugging Face names; `factors` are per-frequency divisors (GGUF `rope_freqs`), head_dim/2 of them.
    """

    theta: float = 10000.0
    scaling: Literal["linear", "llama3", "yarn", "factors"] | None = None
    params: dict[str, float] = field(default_factory=dict)
    factors: tuple[float, ...] | None = None


@dataclass(frozen=True)
class ModelConfig:
    """Everything a network needs to be built. Lengths are tokens, sizes are elements."""

    architecture: str  # registry name: "llama", "mistral", "qwen2", "qwen3", "gemma3"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_tokens: int
    rms_eps: float = 1e-5
    rope: RopeConfig = RopeConfig()
    rope_local: RopeConfig | None = None  # sliding layers, where they differ (Gemma 3)
    layer_windows: tuple[int | None, ...] = ()  # one entry a layer; None = full attention
    activation: Literal["silu", "gelu_tanh"] = "silu"
    attention_bias: bool = False  # q, k, v biases
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False  # Gemma: norms after attention and MLP too
    norm_plus_one: bool = False  # weights stored as w, used as 1 + w (loaders that already added 1 leave False)
    embed_scale: float = 1.0
    query_scale: float | None = None  # None: head_dim ** -0.5
    tie_embeddings: bool = False
    final_logit_softcap: float | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    @property
    def attention_scale(self) -> float:
        return self.query_scale if self.query_scale is not None else self.head_dim**-0.5

    @property
    def windows(self) -> tuple[int | None, ...]:
        return self.layer_windows or (None,) * self.num_layers

    @property
    def window_tokens(self) -> int | None:
        """The one sliding window of the model, or None. (All sliding layers share it.)"""
        sizes = {w for w in self.windows if w is not None}
        return max(sizes) if sizes else None
