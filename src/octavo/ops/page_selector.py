"""Page bounds: the default `PageSelector`, and loading another one.

A page is summed up by the element-wise minimum and maximum of its keys. No key k of the page can score above
Σ_d max(q_d·min_d, q_d·max_d) (J. Tang et al., "Quest: query-aware sparsity for efficient long-context LLM inference",
2024). The query heads of one KV head vote together (their bounds add), a page takes the best vote of any KV head.
"""

from __future__ import annotations

import torch

from octavo.ops.meta import PageSelector, SparseView


class PageBounds:
    """max over KV heads of Σ over the group's heads of the upper bound of q·k."""

    def summarise(self, layer: int, keys: torch.Tensor) -> torch.Tensor:
        wide = keys.float()
        return torch.stack([wide.amin(dim=2), wide.amax(dim=2)], dim=1)

    def score(self, layer: int, queries: torch.Tensor, summaries: torch.Tensor) -> torch.Tensor:
        # Σ_h Σ_d max(q·min, q·max) = Σ_d (Σ_h min(q, 0))·min + (Σ_h max(q, 0))·max, since min <= max
        below = queries.clamp(max=0.0).sum(dim=2)[:, None]
        above = queries.clamp(min=0.0).sum(dim=2)[:, None]
        votes = (below * summaries[:, :, 0] + above * summaries[:, :, 1]).sum(dim=-1)
        return votes.amax(dim=-1)


_DEFAULT = PageBounds()


def selector_of(view: SparseView) -> PageSelector:
    return _DEFAULT if view.selector is None else view.selector
