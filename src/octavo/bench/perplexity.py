"""What a weight format costs: perplexity on a fixed text, against exact dequantisation in float32.

The text is cut into windows that each start afresh; the first token of a window is given, the rest is scored. "exact"
computes in torch, the independent reference; "float32" has the same weights and precision in the compiled operations,
where there are any, and is several times as fast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.model.load import LoadedModel

WINDOW_TOKENS = 512
FORMATS = ("exact", "float32", "auto", "int8", "int4", "bf16")


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

    as_they_are = weight_format in ("exact", "float32", "bf16")
    return build_network(
        loaded,
        dtype=torch.bfloat16 if weight_format == "bf16" else torch.float32,
        quantization="none" if as_they_are else weight_format,
        device="cpu",
        use_native=weight_format != "exact",
        page_size=page_size,
        kv_dtype=torch.bfloat16 if weight_format == "bf16" else torch.float32,
    )


def score(network: Any, ids: Sequence[int], page_size: int, progress: Callable[[int, int], None]) -> tuple[float, int]:
    """Sum of negative log-likelihoods (nats) and the number of scored tokens of `ids`, window by window."""
    import torch

    from octavo.bench.scratch import chunk_step, scratch_pages

    windows = [ids[i : i + WINDOW_TOKENS] for i in range(0, len(ids) - 1, WINDOW_TOKENS)]
    kv = scratch_pages(network, 1, WINDOW_TOKENS, page_size)
    nll, scored = 0.0, 0
    with torch.inference_mode():
        for number, window in enumerate(windows):
            if len(window) < 2:
                continue
            hidden, _ = network.forward(chunk_step(window), kv)
            logits = network.logits(hidden[:-1])
            wanted = torch.tensor(window[1:])
            chosen = logits.gather(1, wanted[:, None])[:, 0].double()
            nll += float((torch.logsumexp(logits, dim=-1).double() - chosen).sum())
            scored += len(window) - 1
            progress(number + 1, len(windows))
    return nll, scored


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
