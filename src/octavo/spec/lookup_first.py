"""Two drafters as one: prompt lookup where the text repeats itself, and another: a table of phrases, or a draft with
weights where nothing matches.

A looked-up draft costs no draft forward and is mostly right where there is one; a draft with weights always has
one. All write into the same verify rows, so the books, the verify path and the acceptance rule see one drafter.
The draft KV and the seed, if any, are those of the other, which is shown every true token as ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from octavo.backend.relay import upload
from octavo.errors import ConfigError
from octavo.spec.adaptive import AdaptiveLength
from octavo.spec.columns import ColumnChooser, Found, Worth
from octavo.spec.drafter import Draft, DraftRequest, Observation, ProposeBatch
from octavo.spec.ngram import NgramDrafter, drafted
from octavo.spec.table import TableDrafter

LEARNED, LOOKED_UP = range(2)  # sources of a row's draft


def no_tree(top_k: int) -> ConfigError:
    return ConfigError("draft_topk", top_k, "1 beside n-gram drafts: a tree and a chain do not mix")


class LookupFirstDrafter:
    """`lookup` and a table of phrases, whichever is expected to be right for longer; or `lookup`, and a chain or a
    block of a draft with weights where nothing that was found is worth verifying. Raises ConfigError for a tree.
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
        self.columns: ColumnChooser | None = None  # None: everything that was found is drafted
        self.lengths: AdaptiveLength | None = None  # None: the weights draft as much as they may

    # -- life of a row -----------------------------------------------------------------------------------------------

    def begin(self, request: DraftRequest) -> None:
        self.lookup.begin(request)
        self.learned.begin(request)
        if self.columns is not None:
            self.columns.begin(request.row)

    def observe(self, observation: Observation) -> None:
        self.learned.observe(observation)

    def end(self, row: int) -> None:
        self.lookup.end(row)
        self.learned.end(row)

    # -- propose -----------------------------------------------------------------------------------------------------

    def adapt(self) -> ColumnChooser | TwoSources:
        """From now on each source drafts as much as pays for it."""
        if isinstance(self.learned, TableDrafter):
            self.columns = ColumnChooser(self.max_draft_tokens)
            return self.columns
        self.columns = ColumnChooser(self.lookup.max_draft_tokens)
        self.lengths = AdaptiveLength(self.learned.max_draft_tokens)
        return TwoSources(self.columns, self.lengths)

    def propose(self, batch: ProposeBatch) -> Draft:
        if isinstance(self.learned, TableDrafter):
            return drafted(batch, self._find, self.columns)
        looked_up = drafted(batch, self.lookup.find, self.columns)
        sources = tuple(LOOKED_UP if length else LEARNED for length in looked_up.lengths)
        alone = self.columns is not None and self.columns.measuring
        learned = self._learned(batch, sources) if LEARNED in sources and not alone else None
        return replace(_joined(looked_up, learned), sources=sources)

    def _find(self, batch: ProposeBatch, worth: Worth | None) -> list[Found]:
        own = self.lookup.find(batch, worth)
        if worth is not None and not worth.phrases:
            return own
        phrases = self.learned.find(batch, worth)
        return [self._better(*pair) for pair in zip(own, phrases, strict=True)]

    def _better(self, own: Found, phrase: Found) -> Found:
        """What the row's own text says, or the table where that is expected to be right for longer."""
        if not own.tokens or self.columns is None or not phrase.tokens:
            return own if own.tokens else phrase
        return phrase if self.columns.value(phrase) > self.columns.value(own) else own

    def _learned(self, batch: ProposeBatch, sources: Sequence[int]) -> Draft | None:
        """Drafts of the rows where nothing was looked up; None: nothing pays."""
        most: int = self.learned.max_draft_tokens
        count = min(most, batch.draft_tokens)
        if self.lengths is not None:
            count = min(count, self.lengths.choose(len(batch.host_rows)))
        if count == 0:
            return None
        limits = tuple(
            limit if source == LEARNED else 0 for limit, source in zip(batch.host_limits, sources, strict=True)
        )
        batch.catch_up()
        draft: Draft = self.learned.propose(replace(batch, draft_tokens=count, host_limits=limits))
        return draft


class TwoSources:
    """What a drafter of two sources is asked and told: a step in which the weights drafted is theirs, one of looked-up
    tokens alone is the lookup's, a plain one counts for both."""

    def __init__(self, columns: ColumnChooser, lengths: AdaptiveLength) -> None:
        self._columns, self._lengths = columns, lengths

    def choose(self, batch: int) -> int:
        """Upper bound of the next step's draft length: the drafter asks both when it drafts."""
        return max(self._columns.most_tokens, self._lengths.max_draft_tokens)

    def record(
        self,
        batch: int,
        drafted: Sequence[int],
        accepted: Sequence[int],
        step_s: float | None,
        sources: Sequence[int] = (),
    ) -> None:
        """As `AdaptiveLength.record`; `sources` per row, () where nothing was proposed."""
        own = [columns if source == LEARNED else 0 for columns, source in zip(drafted, sources, strict=False)]
        if any(own):
            self._lengths.record(batch, own, accepted, step_s)
            return
        self._columns.record(batch, drafted, accepted, step_s)
        if not any(drafted):
            self._lengths.record(batch, drafted, accepted, step_s)


def _joined(looked_up: Draft, learned: Draft | None) -> Draft:
    """One chain a row: what was looked up, else what was drafted with weights."""
    if learned is None:
        return looked_up
    if not any(looked_up.lengths):
        return learned
    width = max(looked_up.tokens.shape[1], learned.tokens.shape[1])
    own, by_weights = (
        torch.nn.functional.pad(draft.tokens, (0, width - draft.tokens.shape[1])) for draft in (looked_up, learned)
    )
    by_lookup = upload(list(looked_up.lengths), own.device)[:, None] > 0
    lengths = tuple(a + b for a, b in zip(looked_up.lengths, learned.lengths, strict=True))
    return Draft(torch.where(by_lookup, own, by_weights), None, None, lengths)
