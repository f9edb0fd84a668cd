"""Tables of phrases for tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from octavo.spec.table import save_table
from octavo.train.table import count_phrases


def write_table(folder: Path, texts: Sequence[Sequence[int]], vocab_size: int, min_probability: float = 0.0) -> str:
    """A table of every phrase in `texts`, for any target with that vocabulary."""
    phrases = count_phrases(texts, order=3, min_count=1, vocab_size=vocab_size, min_probability=min_probability)
    save_table(folder, phrases, hidden_size=64, target_sha256=None, card={})
    return str(folder)
