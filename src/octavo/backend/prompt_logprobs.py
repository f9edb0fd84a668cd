"""Log-probabilities of prompt tokens, for requests that ask for them (scoring a given text).

The hidden state at position i predicts token i + 1. A request that wants them computes its whole prompt, also what
the prefix cache could give it: a cached page has KV but no hidden states.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from octavo.backend.relay import upload
from octavo.ops.sampling import logprobs
from octavo.sched.batch import PrefillChunk

SLICE_ROWS = 64  # rows of logits at a time: a chunk's 512 by a vocabulary of 262,144 would be half a gigabyte

Logprobs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Span:
    """Part of a step's prompt tokens: `count` hidden states from `offset` on, all of one chunk."""

    chunk: int
    offset: int
    targets: list[int]


def _spans(chunks: Sequence[PrefillChunk]) -> Iterator[Span]:
    """One for every chunk that predicts prompt tokens somebody wants to know about."""
    offset = 0
    for number, chunk in enumerate(chunks):
        request = chunk.request
        if request.params.prompt_logprobs is not None:
            targets = request.tokens[chunk.start + 1 : min(chunk.end + 1, request.prompt_tokens)]
            if targets:
                yield Span(number, offset, targets)
        offset += chunk.num_tokens


def prompt_logprobs(
    network: Any, chunks: Sequence[PrefillChunk], hidden: torch.Tensor
) -> tuple[dict[int, int], Logprobs] | None:
    """(chunk → tokens, log-probabilities of those tokens one chunk behind the other), None if nobody asks.

    `hidden` [tokens of all chunks, H] is on the device; nothing here waits for it.
    """
    spans = list(_spans(chunks))
    if not spans:
        return None
    top = max(chunks[s.chunk].request.params.prompt_logprobs or 0 for s in spans)
    rows = np.concatenate([np.arange(s.offset, s.offset + len(s.targets)) for s in spans])
    targets = upload(np.concatenate([np.asarray(s.targets, dtype=np.int64) for s in spans]), hidden.device)
    index = upload(rows, hidden.device)
    parts = []
    for at in range(0, len(rows), SLICE_ROWS):
        part = slice(at, at + SLICE_ROWS)
        parts.append(logprobs(network.logits(hidden.index_select(0, index[part])), targets[part], top))
    chosen, ids, values = (torch.cat(column) for column in zip(*parts, strict=True))
    return {s.chunk: len(s.targets) for s in spans}, (chosen, ids, values)


def by_chunk(counts: Mapping[int, int]) -> dict[int, slice]:
    """Where each chunk's tokens are in what `prompt_logprobs` gave."""
    ends = np.cumsum(list(counts.values())).tolist()
    return {chunk: slice(end - count, end) for (chunk, count), end in zip(counts.items(), ends, strict=True)}
