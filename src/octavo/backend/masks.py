"""Grammar masks of one step: one bit mask for every node that a constrained request may sample at.

A constrained row is settled before it is planned (02, Overlap), so its matcher stands at its newest token. Masks of
drafted nodes come from walking the draft and rolling back, which needs the drafted tokens on the host: that
read-back happens only in steps that hold a constrained row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from octavo.sched.batch import DecodeRow, PrefillChunk
from octavo.spec.drafter import Draft


def mask_words(vocab_size: int) -> int:
    """int32 words of a mask over the vocabulary."""
    return (vocab_size + 31) // 32


def draft_masks(
    decodes: Sequence[DecodeRow], lengths: Sequence[int], draft: Draft | None, vocab_size: int
) -> np.ndarray | None:
    """int32 [Σ(1 + lengths), words] in node order, all bits set for free rows; None if no row is constrained."""
    if all(d.request.grammar is None for d in decodes):
        return None
    masks = np.full((len(lengths) + sum(lengths), mask_words(vocab_size)), -1, dtype=np.int32)
    tokens = draft.tokens.tolist() if draft is not None else None
    parents = draft.parents.tolist() if draft is not None and draft.parents is not None else None
    at = 0
    for i, (decode, length) in enumerate(zip(decodes, lengths, strict=True)):
        if decode.request.grammar is not None:
            line = tokens[i][:length] if tokens is not None else []
            tree = parents[i][:length] if parents is not None else None
            masks[at : at + 1 + length] = decode.request.grammar.masks_for_draft(line, tree)
        at += 1 + length
    return masks


def first_masks(chunks: Sequence[PrefillChunk], vocab_size: int) -> np.ndarray | None:
    """int32 [chunks, words] for the first token of finished prompts; None if no row is constrained."""
    if all(c.request.grammar is None for c in chunks):
        return None
    masks = np.full((len(chunks), mask_words(vocab_size)), -1, dtype=np.int32)
    for i, chunk in enumerate(chunks):
        if chunk.request.grammar is not None:
            masks[i] = chunk.request.grammar.masks_for_draft([], None)[0]
    return masks


def to_device(masks: np.ndarray | None, device: torch.device) -> torch.Tensor | None:
    if masks is None:
        return None
    return torch.from_numpy(masks).to(device, non_blocking=True)
