"""A drafter of your own: it drafts what followed the newest token the last time it was seen.

    PYTHONPATH=examples octavo generate "…" --draft drafter:Bigram

A drafter proposes; the target decides. Whatever is drafted, the text stays the one without drafts.
"""

from __future__ import annotations

import torch

from octavo.spec.drafter import Draft, DraftRequest, Observation, ProposeBatch


class Bigram:
    """Remembers, for each row, which token followed which. No weights, no draft KV."""

    name = "bigram"
    needs_host_tokens = True  # rows are settled before they are drafted: we look at their tokens on the host
    needs_draft_kv = False
    kv_layers = 0  # layers of draft KV in a page
    key_mode = "token"  # how the prefix cache is keyed
    taps: tuple[int, ...] = ()  # hidden states of the target we want to see

    def __init__(self, *, draft_tokens: int, vocab_size: int) -> None:
        """Octavo passes the length of a draft (root not included) and the target's vocabulary."""
        self.max_draft_tokens = draft_tokens
        self.max_depth = draft_tokens  # longest run that can be accepted
        self.footprint_tokens = draft_tokens + 1  # KV positions one step may write
        self.commit_lag_tokens = draft_tokens + 1  # what a step in flight may still commit
        self._followers: dict[int, dict[int, int]] = {}
        self._seen: dict[int, int] = {}

    def begin(self, request: DraftRequest) -> None:
        """A request got its row: nothing of the row's former owner may be left."""
        self._followers[request.row] = {}
        self._seen[request.row] = 0

    def end(self, row: int) -> None:
        """The request left its row."""
        del self._followers[row], self._seen[row]

    def observe(self, observation: Observation) -> None:
        """After every forward of the target; features would come here if we had asked for `taps`."""

    def propose(self, batch: ProposeBatch) -> Draft:
        """A chain for every row, as long as we know how it goes on."""
        if batch.host_tokens is None:
            raise ValueError("needs_host_tokens is set, so the tokens should be here")
        drafts = []
        for row, tokens, limit in zip(batch.host_rows, batch.host_tokens, batch.host_limits, strict=True):
            self._learn(row, tokens)
            drafts.append(self._chain(row, tokens[-1], min(limit, batch.draft_tokens)))
        lengths = tuple(len(d) for d in drafts)
        width = max(lengths)
        padded = [d + [0] * (width - len(d)) for d in drafts]
        columns = torch.tensor(padded, dtype=torch.int64).reshape(len(drafts), width)
        return Draft(columns.to(batch.rows.device, non_blocking=True), None, None, lengths)

    def _learn(self, row: int, tokens: list[int]) -> None:
        followers = self._followers[row]
        for i in range(max(1, self._seen[row]), len(tokens)):
            followers[tokens[i - 1]] = tokens[i]
        self._seen[row] = len(tokens)

    def _chain(self, row: int, token: int, limit: int) -> list[int]:
        chain: list[int] = []
        while len(chain) < limit and (follower := self._followers[row].get(token)) is not None:
            chain.append(follower)
            token = follower
        return chain
