"""Growing an EAGLE draft tree: K branches a step, the N - 1 best candidates at the end.

Every step expands the K most probable of the K² children of the last frontier; at the end the best candidates of
all steps by cumulative log-probability are kept. A child is never more probable than its parent and ties keep the
earlier candidate, so the kept ones are closed under parents. Candidates are numbered level by level, so sorting
the kept ones by number puts parents first (EAGLE-2, arXiv 2406.16858).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from octavo.spec.drafter import Draft


@dataclass(frozen=True)
class Frontier:
    """The K branches that the next draft step runs.

    tokens, scores [b, K]; source [b, K] index of each branch's parent in the former frontier (step 1: all 0);
    candidate [b, K] their candidate numbers.
    """

    tokens: torch.Tensor
    scores: torch.Tensor
    source: torch.Tensor
    candidate: torch.Tensor


class TreeGrower:
    """Collects the candidates of b rows. `top_k` draft ids per branch come from the caller's logits."""

    def __init__(self, top_k: int) -> None:
        self.top_k = top_k
        self._tokens: list[torch.Tensor] = []
        self._scores: list[torch.Tensor] = []
        self._parents: list[torch.Tensor] = []  # candidate number of the parent, -1 = root
        self._count = 0

    def first(self, tokens: torch.Tensor, log_probs: torch.Tensor) -> Frontier:
        """Children of the root: [b, K] each, best first."""
        b, k = tokens.shape
        device = tokens.device
        self._add(tokens, log_probs, torch.full((b, k), -1, dtype=torch.int64, device=device))
        numbers = torch.arange(k, device=device).expand(b, k)
        return Frontier(tokens, log_probs, torch.zeros(b, k, dtype=torch.int64, device=device), numbers)

    def grow(self, frontier: Frontier, tokens: torch.Tensor, log_probs: torch.Tensor) -> Frontier:
        """`tokens`, `log_probs` [b, K, K]: the K best children of every branch of `frontier`."""
        b, k, _ = tokens.shape
        start = self._count
        scores = (frontier.scores.unsqueeze(2) + log_probs).reshape(b, k * k)
        flat = tokens.reshape(b, k * k)
        parents = frontier.candidate.unsqueeze(2).expand(b, k, k).reshape(b, k * k)
        self._add(flat, scores, parents)
        best, index = scores.topk(k, dim=1)
        return Frontier(flat.gather(1, index), best, index // k, index + start)

    def _add(self, tokens: torch.Tensor, scores: torch.Tensor, parents: torch.Tensor) -> None:
        self._tokens.append(tokens)
        self._scores.append(scores)
        self._parents.append(parents)
        self._count += tokens.shape[1]

    def draft(self, columns: int, lengths: tuple[int, ...]) -> Draft:
        """The best `columns` candidates as a draft."""
        tokens = torch.cat(self._tokens, dim=1)
        scores = torch.cat(self._scores, dim=1)
        parents = torch.cat(self._parents, dim=1)
        b, count = tokens.shape
        device = tokens.device
        order = scores.sort(dim=1, descending=True, stable=True).indices
        kept = order.narrow(1, 0, columns).sort(dim=1).values
        nodes = torch.zeros(b, count + 1, dtype=torch.int64, device=device)  # last column: the root, node 0
        numbers = torch.arange(1, columns + 1, device=device).expand(b, columns)
        nodes.scatter_(1, kept, numbers)
        parent = parents.gather(1, kept)
        parent_nodes = nodes.gather(1, torch.where(parent < 0, count, parent))
        levels = [torch.full_like(level, i + 1) for i, level in enumerate(self._tokens)]
        depths = torch.cat(levels, dim=1).gather(1, kept)
        return Draft(tokens.gather(1, kept), parent_nodes, depths, lengths)
