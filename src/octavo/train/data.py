"""From samples and features to padded batches, in an order that a seed fixes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.train.corpus import Corpus
from octavo.train.features import FeatureStore


@dataclass(frozen=True)
class Batch:
    """Padded to the longest: tokens [B, T] int64, features [B, T, taps * H], hidden [B, T, H]; answers [B] first
    answer token; lengths [B]."""

    tokens: Tensor
    features: Tensor
    hidden: Tensor
    answers: Tensor
    lengths: Tensor


def plan_batches(lengths: Sequence[int], batch_tokens: int, rng: random.Random) -> list[list[int]]:
    """Sample indices in batches of similar length and about `batch_tokens` padded tokens, in random order."""
    order = list(range(len(lengths)))
    rng.shuffle(order)
    batches: list[list[int]] = []
    for start in range(0, len(order), 256):  # sorted inside windows: little padding, still random
        window = sorted(order[start : start + 256], key=lambda i: lengths[i])
        group: list[int] = []
        for i in window:
            if group and (len(group) + 1) * lengths[i] > batch_tokens:
                batches.append(group)
                group = []
            group.append(i)
        if group:
            batches.append(group)
    rng.shuffle(batches)
    return batches


def make_batch(store: FeatureStore, indices: Sequence[int], taps: tuple[int, ...], max_tokens: int) -> Batch:
    rows = [store.sample(i, taps) for i in indices]
    samples = [store.corpus.samples[i] for i in indices]
    lengths = [min(len(s.tokens), max_tokens) for s in samples]
    longest = max(lengths)
    tokens = torch.zeros(len(rows), longest, dtype=torch.int64)
    features = torch.zeros(len(rows), longest, rows[0][0].shape[1])
    hidden = torch.zeros(len(rows), longest, rows[0][1].shape[1])
    for b, (length, sample, (taps_rows, final)) in enumerate(zip(lengths, samples, rows, strict=True)):
        tokens[b, :length] = torch.tensor(sample.tokens[:length])
        features[b, :length] = taps_rows[:length]
        hidden[b, :length] = final[:length]
    answers = torch.tensor([s.answer_start for s in samples])
    return Batch(tokens, features, hidden, answers, torch.tensor(lengths))


@dataclass(frozen=True)
class DraftVocabulary:
    """The ids a draft can say, ascending, and the share of answer tokens they cover: it caps acceptance."""

    token_ids: Tensor
    coverage: float


def choose_vocabulary(corpus: Corpus, size: int, vocab_size: int) -> DraftVocabulary:
    """The `size` most frequent answer tokens (ties to the lowest id). Raises ConfigError for a bad size."""
    if not 1 <= size <= vocab_size:
        raise ConfigError("draft_vocab", size, f"1 to {vocab_size}")
    counts = _answer_counts(corpus, vocab_size)
    return covered_by(corpus, torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:size])), vocab_size)


def covered_by(corpus: Corpus, token_ids: Tensor, vocab_size: int) -> DraftVocabulary:
    """A vocabulary of these ids, and what it covers of this corpus."""
    counts = _answer_counts(corpus, vocab_size)
    total = int(counts.sum())
    return DraftVocabulary(token_ids, float(counts[token_ids.numpy()].sum() / total) if total else 0.0)


def _answer_counts(corpus: Corpus, vocab_size: int) -> np.ndarray:
    counts = np.zeros(vocab_size, dtype=np.int64)
    for sample in corpus:
        np.add.at(counts, np.asarray(sample.tokens[sample.answer_start :], dtype=np.int64), 1)
    return counts
