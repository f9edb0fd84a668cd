"""The architectures Octavo runs, and the one way to build a network of any of them.

Adding an architecture is one file with a layer class (see llama.py) and one entry of `ARCHITECTURES`; the loaders
translate its configuration and tensor names (model/load).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch

from octavo.errors import ModelError
from octavo.model.config import ModelConfig
from octavo.model.gemma3 import Gemma3Layer
from octavo.model.layers import WeightReader, place_layers
from octavo.model.llama import LlamaLayer
from octavo.model.network import Network, build_ops
from octavo.model.qwen import Qwen2Layer, Qwen3Layer
from octavo.ops.meta import KVView, SparseView
from octavo.ops.weights import Quantization, TensorSource


@dataclass(frozen=True)
class Architecture:
    """One entry of docs/models.md. `tested` is what parity with transformers is checked on."""

    name: str
    title: str
    layer: Callable[..., Any]
    hf_names: tuple[str, ...]
    features: str
    tested: Literal["real weights", "random weights", "no"]
    tested_on: str


ARCHITECTURES: dict[str, Architecture] = {
    a.name: a
    for a in (
        Architecture(
            "llama",
            "Llama",
            LlamaLayer,
            ("LlamaForCausalLM",),
            "grouped heads, RoPE scaling (linear, llama3, yarn, GGUF factors), tied or own head",
            "real weights",
            "SmolLM2-135M-Instruct",
        ),
        Architecture(
            "mistral",
            "Mistral",
            LlamaLayer,
            ("MistralForCausalLM",),
            "Llama with a sliding window on every layer, or none",
            "random weights",
            "",
        ),
        Architecture(
            "qwen2", "Qwen2", Qwen2Layer, ("Qwen2ForCausalLM",), "biases on q, k, v; window", "random weights", ""
        ),
        Architecture(
            "qwen3", "Qwen3", Qwen3Layer, ("Qwen3ForCausalLM",), "q/k norms, own head size", "random weights", ""
        ),
        Architecture(
            "gemma3",
            "Gemma 3 (text)",
            Gemma3Layer,
            ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
            "hybrid sliding window, two rotation bases, four norms a layer, q/k norms, GELU, soft cap",
            "real weights",
            "Gemma-3-270M",
        ),
    )
}


class Loaded(Protocol):
    """The part of model/load's `LoadedModel` that a network is built from."""

    config: ModelConfig
    tensors: Any


def build_network(
    loaded: Loaded | tuple[ModelConfig, TensorSource],
    *,
    dtype: torch.dtype = torch.float32,
    quantization: Quantization = "auto",
    device: torch.device | str = "cpu",
    use_native: bool = True,
    draft_kv_layers: int = 0,
    page_size: int = 16,
    kv_dtype: torch.dtype | None = None,
    max_positions: int | None = None,
    threads: int | None = None,
    sparse_dense_layers: int | None = None,
) -> Network:
    """Read the weights and build a network. Native where it can run (CPU, compiled module there), else torch.

    dtype          of activations on the torch path, and of weights that stay dense
    kv_dtype       float32 or bfloat16; None: `dtype`
    max_positions  length of the rotation tables (longest request plus reserve); None: the model's context
    threads        of the native operations; None: all this process may use
    sparse_dense_layers  with HiSparse: leading layers that stay dense; None: no layer is sparse
    Raises ModelError for an architecture that is not registered.
    """
    config, source = loaded if isinstance(loaded, tuple) else (loaded.config, loaded.tensors)
    architecture = ARCHITECTURES.get(config.architecture)
    if architecture is None:
        raise ModelError(f"architecture {config.architecture!r} is not supported: {', '.join(ARCHITECTURES)} are")
    device = torch.device(device)
    ops, native = build_ops(device, dtype, use_native=use_native, threads=threads)
    reader = WeightReader(config, source, ops, dtype, quantization, native, device)
    return Network(
        config,
        ops,
        reader,
        architecture.layer,
        place_layers(config.windows, sparse_dense_layers),
        draft_kv_layers=draft_kv_layers,
        page_size=page_size,
        kv_dtype=kv_dtype or dtype,
        max_positions=max_positions or config.context_tokens,
    )


def kv_page_bytes(
    config: ModelConfig,
    page_size: int,
    kv_dtype: torch.dtype,
    draft_layers: int = 0,
    sparse_dense_layers: int | None = None,
) -> tuple[int, int]:
    """Bytes of one page of the full pool (draft layers included) and of the sliding-window pool; 0 = no such pool."""
    pools = Counter(place.pool for place in place_layers(config.windows, sparse_dense_layers))
    layer_bytes = _layer_bytes(config, page_size, kv_dtype)
    return (pools["full"] + draft_layers) * layer_bytes, pools["swa"] * layer_bytes


def _layer_bytes(config: ModelConfig, page_size: int, kv_dtype: torch.dtype) -> int:
    return 2 * config.num_kv_heads * page_size * config.head_dim * kv_dtype.itemsize


@dataclass(frozen=True)
class TierBytes:
    """Bytes of a device slot, of a host page, and of a host page's bounds, which lie on the device."""

    slot: int
    host: int
    bounds: int


def tier_bytes(
    config: ModelConfig, page_size: int, kv_dtype: torch.dtype, draft_layers: int, sparse_dense_layers: int
) -> TierBytes:
    """What HiSparse keeps for a page, where. `slot` 0: this model has no layer that could be sparse."""
    pools = Counter(place.pool for place in place_layers(config.windows, sparse_dense_layers))
    layer = _layer_bytes(config, page_size, kv_dtype)
    bounds = pools["sparse"] * 2 * config.num_kv_heads * config.head_dim * 4
    return TierBytes(pools["sparse"] * layer, (pools["sparse"] + pools["full"] + draft_layers) * layer, bounds)


class Sizes(Protocol):
    """Pages of each pool (kv/sizing.PoolSizes)."""

    @property
    def full_pages(self) -> int: ...

    @property
    def swa_pages(self) -> int: ...


def make_kv(
    network: Network,
    sizes: Sizes,
    *,
    max_rows: int,
    width_pages: int,
    device: torch.device | str = "cpu",
    sparse: SparseView | None = None,
) -> KVView:
    """Zeroed page pools and empty page tables (-1) of `max_rows` rows on `device`.

    Each pool has one page more than the ledger hands out: it is what table entry -1 leads to, so that a write
    outside every plan could not reach a page somebody owns. `sparse`: the tiers of HiSparse, made before.
    """
    c = network.config

    def pool(pages: int, layers: int) -> torch.Tensor | None:
        if layers == 0:
            return None
        shape = (pages + 1, layers, 2, c.num_kv_heads, network.page_size, c.head_dim)
        if torch.device(device).type == "cpu":
            # memory of the operating system is zero when first touched: pages nobody has used cost nothing
            words = np.zeros(shape, dtype=np.float32 if network.kv_dtype.itemsize == 4 else np.uint16)
            return torch.from_numpy(words).view(network.kv_dtype)
        return torch.zeros(shape, dtype=network.kv_dtype, device=device)

    def table() -> torch.Tensor:
        return torch.full((max_rows, width_pages), -1, dtype=torch.int32, device=device)

    full = pool(sizes.full_pages, network.full_layers + network.draft_kv_layers)
    swa = pool(sizes.swa_pages, network.swa_layers)
    return KVView(full, swa, table(), table() if swa is not None else None, network.page_size, sparse)


__all__ = ["ARCHITECTURES", "Architecture", "Network", "build_network", "kv_page_bytes", "make_kv", "tier_bytes"]
