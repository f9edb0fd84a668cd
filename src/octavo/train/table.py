"""The table of phrases (spec/table.py), counted over a corpus; no gradient anywhere."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from octavo.errors import ConfigError
from octavo.spec.table import NgramTable, Phrases
from octavo.train.corpus import Sample

_Context = tuple[int, ...]


def count_phrases(
    texts: Iterable[Sequence[int]], *, order: int, min_count: int, vocab_size: int, min_probability: float
) -> Phrases:
    """For every context of 1 to `order` tokens the token that most often follows (ties to the lowest id).

    Kept are those that did so `min_count` times. Raises ConfigError if nothing is left.
    """
    followers: defaultdict[_Context, Counter[int]] = defaultdict(Counter)
    for text in texts:
        for i in range(1, len(text)):
            for length in range(1, min(order, i) + 1):
                followers[tuple(text[i - length : i])][text[i]] += 1
    contexts: list[_Context] = []
    following: list[int] = []
    counts: list[tuple[int, int]] = []
    for context in sorted(followers, key=lambda c: (len(c), c)):
        seen = followers[context]
        token, times = min(seen.items(), key=lambda item: (-item[1], item[0]))
        if times >= min_count:
            contexts.append((-1,) * (order - len(context)) + context)
            following.append(token)
            counts.append((times, seen.total()))
    if not contexts:
        raise ConfigError("min_count", min_count, "no phrase occurs so often: a larger corpus or a smaller number")
    return Phrases(
        np.array(contexts, dtype=np.int32),
        np.array(following, dtype=np.int32),
        np.array(counts, dtype=np.int32),
        vocab_size,
        min_probability,
    )


def accept_length(table: NgramTable, samples: Iterable[Sample], draft_tokens: int) -> float:
    """Tokens a step, bonus included, of a chain of `draft_tokens` that walks through the answers as they are."""
    tokens = steps = 0
    for sample in samples:
        at, end = sample.answer_start, len(sample.tokens)
        while at < end:
            draft = table.draft(sample.tokens[:at], draft_tokens).tokens
            truth = sample.tokens[at : at + len(draft)]
            right = next((i for i, (a, b) in enumerate(zip(draft, truth, strict=False)) if a != b), len(truth))
            run = min(right + 1, end - at)
            at, tokens, steps = at + run, tokens + run, steps + 1
    return tokens / max(1, steps)
