"""Two drafters as one: prompt lookup where the text repeats itself, a draft with weights where nothing matches.

A looked-up draft costs no draft forward and is mostly right where there is one; a draft with weights always has
one. Both write into the same verify rows, so the books, the verify path and the acceptance rule see one drafter.
The draft KV and the seed are those of the drafter with weights, which is shown every true token as ever.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from octavo.backend.relay import upload
from octavo.errors import ConfigError
from octavo.spec.adaptive import SourceLengths
from octavo.spec.drafter import Draft, DraftRequest, Observation, ProposeBatch
from octavo.spec.ngram import NgramDrafter

# Sources of a row's draft. A long match is right far more often than a short one, so each has its own length.
LEARNED, SHORT_MATCH, LONG_MATCH = range(3)
LONG_MATCH_TOKENS = 4


class LookupFirstDrafter:
    """`lookup`, and `learned` (a chain or a block) where it finds nothing. Raises ConfigError for a tree."""

    needs_host_tokens = True
    needs_draft_kv = True
    catches_up = True

    def __init__(self, lookup: NgramDrafter, learned: Any) -> None:
        if learned.max_depth < learned.max_draft_tokens:
            raise ConfigError("draft_topk", learned.top_k, "1 beside n-gram drafts: a tree and a chain do not mix")
        self.lookup, self.learned = lookup, learned
        self.name = f"{lookup.name}+{learned.name}"
        self.max_draft_tokens = self.max_depth = max(lookup.max_draft_tokens, learned.max_draft_tokens)
        self.footprint_tokens = max(lookup.footprint_tokens, learned.footprint_tokens)
        self.commit_lag_tokens = max(lookup.commit_lag_tokens, learned.commit_lag_tokens)
        self.kv_layers: int = learned.kv_layers
        self.key_mode: str = learned.key_mode
        self.taps: tuple[int, ...] = learned.taps
        self.lengths: SourceLengths | None = None  # None: both draft as much as they may

    # -- life of a row -----------------------------------------------------------------------------------------------

    def begin(self, request: DraftRequest) -> None:
        self.lookup.begin(request)
        self.learned.begin(request)

    def observe(self, observation: Observation) -> None:
        self.learned.observe(observation)

    def end(self, row: int) -> None:
        self.lookup.end(row)
        self.learned.end(row)

    # -- propose -----------------------------------------------------------------------------------------------------

    def adapt(self) -> SourceLengths:
        """From now on each source drafts as much as pays for it."""
        looked_up = self.lookup.max_draft_tokens
        self.lengths = SourceLengths((self.learned.max_draft_tokens, looked_up, looked_up))
        return self.lengths

    def propose(self, batch: ProposeBatch) -> Draft:
        if batch.host_tokens is None:
            raise ValueError("looking up needs the tokens on the host: settle the rows first")
        found = self._found(batch, batch.host_tokens)
        sources = [self._source(row) if draft else LEARNED for row, draft in zip(batch.host_rows, found, strict=True)]
        for source in (SHORT_MATCH, LONG_MATCH):
            if source in sources:
                most = self._length(source, batch, self.lookup.max_draft_tokens)
                found = [draft[:most] if s == source else draft for draft, s in zip(found, sources, strict=True)]
        sources = [s if draft else LEARNED for draft, s in zip(found, sources, strict=True)]
        learned = self._learned(batch, sources) if LEARNED in sources else None
        return replace(_joined(found, learned, batch.rows.device), sources=tuple(sources))

    def _found(self, batch: ProposeBatch, texts: tuple[list[int], ...]) -> list[list[int]]:
        """What follows in each row's own text, [] where nothing matches."""
        limits = (min(batch.draft_tokens, limit) for limit in batch.host_limits)
        rows = zip(batch.host_rows, texts, limits, strict=True)
        return [self.lookup.lookup(row, tokens, limit) for row, tokens, limit in rows]

    def _source(self, row: int) -> int:
        return LONG_MATCH if self.lookup.match_tokens(row) >= LONG_MATCH_TOKENS else SHORT_MATCH

    def _learned(self, batch: ProposeBatch, sources: list[int]) -> Draft | None:
        """Drafts of the rows where nothing matched; None: nothing pays."""
        count = self._length(LEARNED, batch, self.learned.max_draft_tokens)
        if count == 0:
            return None
        limits = tuple(
            limit if source == LEARNED else 0 for limit, source in zip(batch.host_limits, sources, strict=True)
        )
        batch.catch_up()
        draft: Draft = self.learned.propose(replace(batch, draft_tokens=count, host_limits=limits))
        return draft

    def _length(self, source: int, batch: ProposeBatch, most: int) -> int:
        chosen = most if self.lengths is None else self.lengths.choose_for(source, len(batch.host_rows))
        return min(chosen, most, batch.draft_tokens)


def _joined(found: list[list[int]], learned: Draft | None, device: torch.device) -> Draft:
    """One chain a row: what was looked up, else what was drafted with weights."""
    if learned is not None and not any(found):
        return learned
    width = max(map(len, found))
    flat = [token for draft in found for token in (*draft, *[0] * (width - len(draft)))]
    tokens = upload(flat, device).reshape(len(found), width)
    lengths = tuple(map(len, found))
    if learned is not None:
        drafted = learned.tokens.shape[1]
        pad = torch.nn.functional.pad
        width = max(width, drafted)
        by_lookup = upload([len(draft) for draft in found], device)[:, None] > 0
        tokens = torch.where(
            by_lookup, pad(tokens, (0, width - tokens.shape[1])), pad(learned.tokens, (0, width - drafted))
        )
        lengths = tuple(a + b for a, b in zip(lengths, learned.lengths, strict=True))
    return Draft(tokens, None, None, lengths)
