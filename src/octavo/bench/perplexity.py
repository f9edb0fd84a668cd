"""What a weight format costs: perplexity on a fixed text, against exact dequantisation in float32.

The text is cut into windows that each start afresh; the first token of a window is given, the rest is scored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.model.load import LoadedModel

WINDOW_TOKENS = 512
FORMATS = ("exact", "auto", "int8", "int4", "bf16")


@dataclass(frozen=True)
class Perplexity:
    format: str
    formats_line: str  # what the network says it holds
    nll: float  # nats over all scored tokens
    tokens: int

    @property
    def value(self) -> float:
        return math.exp(self.nll / self.tokens)


def network_of(loaded: LoadedModel, weight_format: str, page_size: int) -> Any:
    """The network with its weights in one of FORMATS, activations float32 except for bf16."""
    import torch

    from octavo.model.registry import build_network

    exact = weight_format in ("exact", "bf16")
    return build_network(
        loaded,
        dtype=torch.bfloat16 if weight_format == "bf16" else torch.float32,
        quantization="none" if exact else weight_format,
        device="cpu",
        use_native=weight_format != "exact",
        page_size=page_size,
        kv_dtype=torch.bfloat16 if weight_format == "bf16" else torch.float32,
    )


def score(network: Any, ids: Sequence[int], page_size: int, progress: Callable[[int, int], None]) -> tuple[float, int]:
    """Sum of negative log-likelihoods (nats) and the number of scored tokens of `ids`, window by window."""
    import torch

    windows = [ids[i : i + WINDOW_TOKENS] for i in range(0, len(ids) - 1, WINDOW_TOKENS)]
    kv = _scratch_pages(network, page_size)
    nll, scored = 0.0, 0
    with torch.inference_mode():
        for number, window in enumerate(windows):
            if len(window) < 2:
                continue
            hidden, _ = network.forward(_window_meta(window), kv)
            logits = network.logits(hidden[:-1]).double()
            wanted = torch.tensor(window[1:])
            nll -= float(torch.log_softmax(logits, dim=-1).gather(1, wanted[:, None]).sum())
            scored += len(window) - 1
            progress(number + 1, len(windows))
    return nll, scored


def _scratch_pages(network: Any, page_size: int) -> Any:
    """Pages for one row of a window, identity tables: this never meets the ledger, nothing is shared."""
    import torch

    from octavo.ops.meta import KVView

    pages = -(-WINDOW_TOKENS // page_size)
    config = network.config
    dtype = getattr(network, "kv_dtype", torch.float32)

    def pool(layers: int) -> torch.Tensor | None:
        if layers == 0:
            return None
        return torch.zeros(pages, layers, 2, config.num_kv_heads, page_size, config.head_dim, dtype=dtype)

    table = torch.arange(pages, dtype=torch.int32)[None]
    return KVView(
        pool(network.full_layers), pool(network.swa_layers), table, table if network.swa_layers else None, page_size
    )


def _window_meta(window: Sequence[int]) -> Any:
    import torch

    from octavo.ops.meta import StepMeta

    count = len(window)
    positions = torch.arange(count)
    zero = torch.zeros(1, dtype=torch.int64)
    return StepMeta(
        token_ids=torch.tensor(window),
        positions=positions,
        write_slots=positions,
        q_seq=torch.zeros_like(positions),
        rows=zero,
        kv_start=zero,
        mask=None,
        q_indptr=(0, count),
        max_kv_tokens=count,
    )


def measure(
    loaded: LoadedModel,
    formats: Sequence[str],
    ids: Sequence[int],
    page_size: int,
    progress: Callable[[str, int, int], None],
) -> list[Perplexity]:
    """Perplexity of each format, in the order given."""
    results = []
    for name in formats:
        network = network_of(loaded, name, page_size)
        nll, tokens = score(network, ids, page_size, lambda done, total, name=name: progress(name, done, total))
        results.append(Perplexity(name, str(network.formats), nll, tokens))
    return results
