"""Two drafters as one: prompt lookup where the text repeats itself, another where nothing matches: a draft with
weights, or a table of phrases.

A looked-up draft costs no draft forward and is mostly right where there is one; a draft with weights always has
one. Both write into the same verify rows, so the books, the verify path and the acceptance rule see one drafter.
The draft KV and the seed, if any, are those of the other, which is shown every true token as ever.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from octavo.backend.relay import upload
from octavo.errors import ConfigError
from octavo.spec.adaptive import SourceLengths
from octavo.spec.drafter import Draft, DraftRequest, Observation, ProposeBatch
from octavo.spec.ngram import NgramDrafter, chains

# Sources of a row's draft. A long match is right far more often than a short one, so each has its own length.
LEARNED, SHORT_MATCH, LONG_MATCH = range(3)
LONG_MATCH_TOKENS = 4


def source_of(match_tokens: int) -> int:
    """The source of what was looked up behind a match of so many tokens."""
    return LONG_MATCH if match_tokens >= LONG_MATCH_TOKENS else SHORT_MATCH


def no_tree(top_k: int) -> ConfigError:
    return ConfigError("draft_topk", top_k, "1 beside n-gram drafts: a tree and a chain do not mix")


class LookupFirstDrafter:
    """`lookup`, and `learned` (a chain, a block, a table of phrases) where it finds nothing.

    Raises ConfigError for a tree.
    """

    needs_host_tokens = True
    catches_up = True

    def __init__(self, lookup: NgramDrafter, learned: Any) -> None:
        if learned.max_depth < learned.max_draft_tokens:
            raise no_tree(learned.top_k)
        self.lookup, self.learned = lookup, learned
        self.name = f"{lookup.name}+{learned.name}"
        self.max_draft_tokens = self.max_depth = max(lookup.max_draft_tokens, learned.max_draft_tokens)
        self.footprint_tokens = max(lookup.footprint_tokens, learned.footprint_tokens)
        self.commit_lag_tokens = max(lookup.commit_lag_tokens, learned.commit_lag_tokens)
        self.needs_draft_kv: bool = learned.needs_draft_kv
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
        found = self.lookup.find(batch)
        matches = map(self.lookup.match_tokens, batch.host_rows)
        sources = [source_of(match) if draft else LEARNED for match, draft in zip(matches, found, strict=True)]
        for source in (SHORT_MATCH, LONG_MATCH):
            if source in sources:
                most = self._length(source, batch, self.lookup.max_draft_tokens)
                found = [draft[:most] if s == source else draft for draft, s in zip(found, sources, strict=True)]
        sources = [s if draft else LEARNED for draft, s in zip(found, sources, strict=True)]
        learned = self._learned(batch, sources) if LEARNED in sources else None
        return replace(_joined(found, learned, batch.rows.device), sources=tuple(sources))

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
    looked_up = chains(found, device)
    if learned is None:
        return looked_up
    width = max(looked_up.tokens.shape[1], learned.tokens.shape[1])
    own, drafted = (
        torch.nn.functional.pad(draft.tokens, (0, width - draft.tokens.shape[1])) for draft in (looked_up, learned)
    )
    by_lookup = upload(list(looked_up.lengths), device)[:, None] > 0
    lengths = tuple(a + b for a, b in zip(looked_up.lengths, learned.lengths, strict=True))
    return Draft(torch.where(by_lookup, own, drafted), None, None, lengths)
