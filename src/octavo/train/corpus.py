"""Training text as token ids: kept compressed with its recipe, and cleaned of loops, copies and benchmark text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from octavo.errors import ModelError

FORMAT_VERSION = 1
NGRAM_WORDS = 8


@dataclass(frozen=True)
class Sample:
    """One sequence: `tokens[:generated_start]` is template, the target wrote the rest; the answer begins later."""

    tokens: tuple[int, ...]
    generated_start: int
    answer_start: int

    @property
    def answer_tokens(self) -> int:
        return len(self.tokens) - self.answer_start


@dataclass
class Corpus:
    """Samples and how they were made."""

    samples: list[Sample] = field(default_factory=list)
    recipe: dict[str, Any] = field(default_factory=dict)

    @property
    def answer_tokens(self) -> int:
        return sum(s.answer_tokens for s in self.samples)

    def __len__(self) -> int:
        return len(self.samples)

    def __iter__(self) -> Iterator[Sample]:
        return iter(self.samples)

    def save(self, path: Path) -> None:
        """Write a compressed .npz: 2 bytes a token where the vocabulary allows; whole or not at all."""
        flat = np.fromiter((t for s in self.samples for t in s.tokens), dtype=np.int64)
        narrow = np.uint16 if flat.max(initial=0) < 1 << 16 else np.uint32
        partial = path.with_name(path.name + ".part")
        with partial.open("wb") as out:
            np.savez_compressed(
                out,
                version=np.int64(FORMAT_VERSION),
                tokens=flat.astype(narrow),
                lengths=np.array([len(s.tokens) for s in self.samples], dtype=np.uint32),
                generated=np.array([s.generated_start for s in self.samples], dtype=np.uint32),
                answers=np.array([s.answer_start for s in self.samples], dtype=np.uint32),
                recipe=np.array(json.dumps(self.recipe)),
            )
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> Corpus:
        """Read what `save` wrote. Raises ModelError naming the file."""
        try:
            with np.load(path, allow_pickle=False) as data:
                if int(data["version"]) != FORMAT_VERSION:
                    raise ModelError(f"corpus format {int(data['version'])}: build it again", file=path)
                tokens = data["tokens"].astype(np.int64).tolist()
                lengths = data["lengths"].tolist()
                generated, answers = data["generated"].tolist(), data["answers"].tolist()
                recipe = json.loads(str(data["recipe"]))
        except (OSError, ValueError, KeyError, BadZipFile) as error:
            raise ModelError(f"not a corpus ({type(error).__name__}: {error})", file=path) from error
        samples, at = [], 0
        for length, first, answer in zip(lengths, generated, answers, strict=True):
            samples.append(Sample(tuple(tokens[at : at + length]), first, answer))
            at += length
        return cls(samples, recipe)

    def split(self, held_out: int) -> tuple[Corpus, Corpus]:
        """(training, held out): the last `held_out` samples are never trained on."""
        held_out = min(held_out, len(self.samples) // 10)
        cut = len(self.samples) - held_out
        return Corpus(self.samples[:cut], self.recipe), Corpus(self.samples[cut:], self.recipe)


def loops(tokens: Sequence[int]) -> bool:
    """Whether an answer repeats itself: a periodic tail, or few different 4-grams in all."""
    n = len(tokens)
    for period in range(1, min(48, n // 3) + 1):
        span = max(3 * period, 12)
        if span <= n and all(tokens[-i] == tokens[-i - period] for i in range(1, span - period + 1)):
            return True
    if n < 48:
        return False
    grams = {tuple(tokens[i : i + 4]) for i in range(n - 3)}
    return len(grams) < 0.6 * (n - 3)


def word_ngrams(text: str, n: int = NGRAM_WORDS) -> set[tuple[str, ...]]:
    words = "".join(c.lower() if c.isalnum() else " " for c in text).split()
    return {tuple(words[i : i + n]) for i in range(len(words) - n + 1)}


def benchmark_ngrams(folder: Path) -> set[tuple[str, ...]]:
    """8-grams of words of every prompt in a folder of JSON lines with a `prompt` key."""
    grams: set[tuple[str, ...]] = set()
    for file in sorted(folder.glob("*.jsonl")):
        for line in file.read_text().splitlines():
            if line.strip():
                grams |= word_ngrams(str(json.loads(line)["prompt"]))
    return grams


@dataclass
class Filter:
    """Accepts a sample once: not empty, not looping, not seen, sharing no 8-gram with the benchmarks."""

    forbidden: set[tuple[str, ...]] = field(default_factory=set)
    min_answer_tokens: int = 16
    dropped: dict[str, int] = field(default_factory=dict)
    _seen: set[tuple[int, ...]] = field(default_factory=set)

    def question(self, tokens: Sequence[int], text: str) -> bool:
        """Whether a question may be answered: not a copy (same first 12 tokens) and not a benchmark's."""
        key = tuple(tokens[:12])
        if len(tokens) < 3 or not text.strip():
            return self._drop("empty question")
        if key in self._seen:
            return self._drop("copy of a question")
        if loops(tokens):
            return self._drop("looping question")
        if self.forbidden & word_ngrams(text):
            return self._drop("benchmark text")
        self._seen.add(key)
        return True

    def answer(self, tokens: Sequence[int], text: str) -> bool:
        if len(tokens) < self.min_answer_tokens:
            return self._drop("short answer")
        if loops(tokens):
            return self._drop("looping answer")
        if self.forbidden & word_ngrams(text):
            return self._drop("benchmark text")
        return True

    def remember(self, samples: Iterable[Sample]) -> None:
        """Questions of a corpus that is being continued."""
        for sample in samples:
            self._seen.add(sample.tokens[sample.generated_start :][:12])

    def _drop(self, why: str) -> bool:
        self.dropped[why] = self.dropped.get(why, 0) + 1
        return False
