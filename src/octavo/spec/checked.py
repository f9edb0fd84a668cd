"""A drafter out of somebody else's module, watched: a fault of its own ends its drafts, never a request.

Text does not depend on drafts, so the engine goes on without them. What is proposed is looked at before the target
verifies it: a length beyond a row's limit would write where nothing is reserved, an impossible parent would read
another row's positions. Values lie on the device: on a CPU they are looked at; elsewhere that would wait for
the device, so only shapes and lengths are, and tokens are clamped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from octavo.spec.drafter import Draft, Drafter, DraftRequest, Observation, ProposeBatch

logger = logging.getLogger("octavo.spec")


class CheckedDrafter:
    """`inner` with every call guarded. Its numbers are its own."""

    def __init__(self, inner: Drafter, path: str, vocab_size: int) -> None:
        self._inner, self._path, self._vocab_size = inner, path, vocab_size
        self._off = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def begin(self, request: DraftRequest) -> None:
        self._guarded(lambda: self._inner.begin(request))

    def observe(self, observation: Observation) -> None:
        self._guarded(lambda: self._inner.observe(observation))

    def end(self, row: int) -> None:
        self._guarded(lambda: self._inner.end(row))

    def propose(self, batch: ProposeBatch) -> Draft:
        draft = self._guarded(lambda: self._proposed(batch))
        if draft is not None:
            return draft
        b = len(batch.host_rows)
        return Draft(batch.rows.new_zeros((b, 0)), None, None, (0,) * b)

    def _guarded(self, call: Callable[[], Draft | None]) -> Draft | None:
        if self._off:
            return None
        try:
            return call()
        except Exception as error:  # code of somebody else
            self._off = True
            kind = "" if isinstance(error, BadDraft) else f"{type(error).__name__}: "
            logger.error("draft %s: %s%s; from now on nothing is drafted", self._path, kind, error)
            return None

    def _proposed(self, batch: ProposeBatch) -> Draft:
        # copies: the verify goes on from the originals
        rows, seq_lens, last_tokens = (given.clone() for given in (batch.rows, batch.seq_lens, batch.last_tokens))
        draft = self._inner.propose(replace(batch, rows=rows, seq_lens=seq_lens, last_tokens=last_tokens))
        check(draft, batch, self._inner.max_draft_tokens, self._inner.max_depth)
        if draft.tokens.device.type == "cpu":
            check_values(draft, batch, self._vocab_size)
            return draft
        tokens = draft.tokens.clamp(0, self._vocab_size - 1)
        return Draft(tokens, draft.parents, draft.depths, draft.lengths, draft.sources)


class BadDraft(ValueError):
    """What was proposed cannot be verified."""


def check(draft: Draft, batch: ProposeBatch, max_tokens: int, max_depth: int) -> None:
    """Kinds, shapes and lengths. Raises BadDraft."""
    if not isinstance(draft, Draft):
        raise BadDraft(f"propose returned {type(draft).__name__}, not a Draft")
    b = len(batch.host_rows)
    for name in ("tokens", "parents", "depths"):
        value = getattr(draft, name)
        if name != "tokens" and draft.parents is None and draft.depths is None:
            continue
        if not isinstance(value, torch.Tensor) or value.dtype != torch.int64 or value.dim() != 2 or len(value) != b:
            got = f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)[:80]
            raise BadDraft(f"{name} of a draft for {b} rows are int64 [{b}, m], got {got}")
        if value.shape != draft.tokens.shape or value.device != batch.rows.device:
            raise BadDraft(f"{name} are {list(value.shape)} on {value.device}, tokens {list(draft.tokens.shape)}, rows "
                           f"on {batch.rows.device}")
    m = draft.tokens.shape[1]
    lengths: object = draft.lengths
    if not isinstance(lengths, tuple) or len(lengths) != b or any(type(n) is not int for n in lengths):
        raise BadDraft(f"lengths of a draft for {b} rows are {b} whole numbers, got {lengths!r}")
    chain = draft.parents is None
    for row, (length, limit) in enumerate(zip(draft.lengths, batch.host_limits, strict=True)):
        most = min(m, max_tokens, *((limit, max_depth, batch.draft_tokens) if chain else ()))
        if not 0 <= length <= most:
            raise BadDraft(f"row {row} drafts {length} tokens, allowed: 0 to {most}")


def check_values(draft: Draft, batch: ProposeBatch, vocab_size: int) -> None:
    """Tokens of the vocabulary, and a tree whose nodes stand behind their parents. Raises BadDraft."""
    for row, (tokens, length) in enumerate(zip(draft.tokens.tolist(), draft.lengths, strict=True)):
        for token in tokens[:length]:
            if not 0 <= token < vocab_size:
                raise BadDraft(f"row {row} drafts token {token}, allowed: 0 to {vocab_size - 1}")
    if draft.parents is None or draft.depths is None:
        return
    rows = zip(draft.parents.tolist(), draft.depths.tolist(), draft.lengths, batch.host_limits, strict=True)
    for row, (parents, depths, length, limit) in enumerate(rows):
        for column in range(length):
            parent = parents[column]
            if not 0 <= parent <= column:
                raise BadDraft(f"row {row}: parent of column {column} is node {parent}, allowed: 0 to {column}")
            depth = 1 + (depths[parent - 1] if parent else 0)
            if depths[column] != depth or depth > limit:
                raise BadDraft(f"row {row}: depth of column {column} is {depths[column]}, behind its parent it is "
                               f"{depth}, and at most {limit}")
