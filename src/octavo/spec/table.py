"""Drafts from a table of phrases: what the target itself mostly wrote behind the last few tokens.

Prompt lookup (spec/ngram.py) knows a request's own text only. The table knows how the target writes: it is counted
once, over text that the target wrote (`octavo train-draft --algorithm table`), and ships like a draft with weights.
Drafting from it is a few dictionary lookups on the host: no weights, no draft KV, no draft forward.
Sources: n-gram models with back-off to shorter contexts (S. Katz, 1987); llama.cpp's static lookup cache is the same
idea.

A folder holds `config.json` and `model.safetensors`:

    contexts  [n, order] int32   the last tokens before, newest last; -1 where the context is shorter
    next      [n] int32          the token that most often followed
    counts    [n, 2] int32       how often it did, and how often the context occurred
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from octavo.errors import ConfigError, ModelError
from octavo.kv.sizing import DecodeReserve
from octavo.spec.columns import ColumnChooser, Found, Worth, kind_of_chance
from octavo.spec.draft_config import FORMAT_VERSION, algorithm_of, read_draft_json
from octavo.spec.draft_keys import Keys
from octavo.spec.drafter import Draft, DraftRequest, Observation, ProposeBatch
from octavo.spec.ngram import drafted
from octavo.spec.tensor_file import read_tensors, write_tensors

if TYPE_CHECKING:
    from octavo.spec.choose import DraftPlan

MAX_ORDER = 3  # three token ids of 21 bits are one key of 63
MAX_VOCAB = 1 << 21


@dataclass(frozen=True)
class Phrases:
    """What a table file holds: contexts [n, order], next [n], counts [n, 2] (followed by `next`, in all), int32.

    A draft ends where the chance that all of it is right falls below `min_probability`.
    """

    contexts: np.ndarray
    next: np.ndarray
    counts: np.ndarray
    vocab_size: int
    min_probability: float

    def __post_init__(self) -> None:
        n, order = self.contexts.shape if self.contexts.ndim == 2 else (-1, 0)
        if not 1 <= order <= MAX_ORDER:
            raise ModelError(f"contexts {list(self.contexts.shape)}: n rows of 1 to {MAX_ORDER} tokens are needed")
        if self.next.shape != (n,) or self.counts.shape != (n, 2):
            raise ModelError(
                f"{n} contexts, next {list(self.next.shape)}, counts {list(self.counts.shape)}: one line for each"
            )
        if not 1 <= self.vocab_size <= MAX_VOCAB:
            raise ModelError(f"vocab_size {self.vocab_size}: 1 to {MAX_VOCAB}")
        if not 0 <= self.min_probability <= 1:
            raise ModelError(f"min_probability {self.min_probability}: 0 to 1")
        known = self.contexts >= 0
        if (self.contexts < -1).any() or (self.contexts >= self.vocab_size).any() or not known[:, -1].all():
            raise ModelError(f"contexts: token ids below {self.vocab_size}, -1 only in front")
        if (known[:, :-1] & ~known[:, 1:]).any():
            raise ModelError("contexts: -1 only in front")
        if ((self.next < 0) | (self.next >= self.vocab_size)).any():
            raise ModelError(f"next: token ids below {self.vocab_size}")
        if (self.counts < 1).any() or (self.counts[:, 0] > self.counts[:, 1]).any():
            raise ModelError("counts: at least 1, the first at most the second")


class NgramTable:
    """`Phrases` made ready for lookups."""

    def __init__(self, phrases: Phrases) -> None:
        self.order = int(phrases.contexts.shape[1])
        self.vocab_size, self.min_probability = phrases.vocab_size, phrases.min_probability
        self.entries = len(phrases.next)
        lengths = (phrases.contexts >= 0).sum(axis=1)
        # one occurrence more than there was: what was seen twice is less certain than what was seen a hundred times
        chance = phrases.counts[:, 0] / (phrases.counts[:, 1] + 1.0)
        self._by_length: list[dict[int, tuple[int, float]]] = []
        for length in range(1, self.order + 1):
            at = np.flatnonzero(lengths == length)
            keys = np.zeros(len(at), dtype=np.int64)
            for column in phrases.contexts[at, self.order - length :].T:
                keys = keys * self.vocab_size + column
            values = zip(phrases.next[at].tolist(), chance[at].tolist(), strict=True)
            self._by_length.append(dict(zip(keys.tolist(), values, strict=True)))

    def draft(self, tokens: Sequence[int], limit: int, worth: Worth | None = None) -> Found:
        """Up to `limit` tokens that may follow `tokens`: each the likeliest behind the longest known context; behind
        the first only as far as it is worth finding."""
        context = list(tokens[-self.order :])
        found = Found([], [])
        together = learned = 1.0
        while len(found.tokens) < limit:
            following = self._next(context)
            if following is None:
                break
            token, chance = following
            together *= chance
            kind = kind_of_chance(chance)
            if worth is not None:
                learned *= worth.chances[kind]
            if together < self.min_probability or (found.tokens and worth is not None and learned < worth.floor):
                break
            found.tokens.append(token)
            found.kinds.append(kind)
            context = [*context, token][-self.order :]
        return found

    def _next(self, context: list[int]) -> tuple[int, float] | None:
        for length in range(len(context), 0, -1):
            key = 0
            for token in context[-length:]:
                key = key * self.vocab_size + token
            found = self._by_length[length - 1].get(key)
            if found is not None:
                return found
        return None


class TableDrafter:
    """One chain a row from an `NgramTable`. Keeps nothing per row."""

    name = "table"
    needs_host_tokens = True
    needs_draft_kv = False
    kv_layers = 0
    key_mode = "token"
    taps: tuple[int, ...] = ()

    def __init__(self, table: NgramTable, *, draft_tokens: int) -> None:
        if not 1 <= draft_tokens <= 63:
            raise ConfigError("draft_tokens", draft_tokens, "1 to 63")
        self.table = table
        self.max_draft_tokens = self.max_depth = draft_tokens
        self.footprint_tokens = self.commit_lag_tokens = draft_tokens + 1
        self.columns: ColumnChooser | None = None  # None: every token that was found is drafted

    def begin(self, request: DraftRequest) -> None:
        """Of the text there is nothing to forget: every `propose` brings all of it."""
        if self.columns is not None:
            self.columns.begin(request.row)

    def end(self, row: int) -> None:
        """Nothing to free."""

    def observe(self, observation: Observation) -> None:
        """Nothing to do: the tokens come with the next `propose`."""

    def adapt(self) -> ColumnChooser:
        """From now on only the tokens that pay are drafted."""
        self.columns = ColumnChooser(self.max_draft_tokens)
        return self.columns

    def propose(self, batch: ProposeBatch) -> Draft:
        return drafted(batch, self.find, self.columns)

    def find(self, batch: ProposeBatch, worth: Worth | None = None) -> list[Found]:
        """What may follow in each row as far as it is worth finding."""
        if batch.host_tokens is None:
            raise ValueError("a table needs the tokens on the host: settle the rows first")
        rows = zip(batch.host_tokens, batch.host_limits, strict=True)
        return [self.table.draft(tokens, min(batch.draft_tokens, limit), worth) for tokens, limit in rows]


def read_table(path: str | Path, vocab_size: int, target_sha256: str | None = None) -> Phrases:
    """The phrases of a table folder. Raises ModelError naming the file, ModelNotFound if there is none."""
    file, data = read_draft_json(path)
    try:
        if algorithm_of(data) != "table":
            raise ModelError("not a table of phrases")
        keys = Keys(data)
        version = keys.whole("octavo_format", FORMAT_VERSION)
        if version != FORMAT_VERSION:
            raise ModelError(f"draft format {version}; this version reads {FORMAT_VERSION}: make it again")
        sha = keys.text("target_sha256")
        if sha is not None and target_sha256 is not None and sha != target_sha256:
            raise ModelError(
                f"the table is for the target with SHA-256 {sha[:16]}…, this one is {target_sha256[:16]}…"
            )
        size = keys.whole("vocab_size", 0)
        if size != vocab_size:
            raise ModelError(f"the table's vocabulary has {size} tokens, the target's {vocab_size}")
        least = keys.number("min_probability", -1.0)  # what is not said is refused like what cannot be
    except ModelError as error:
        raise ModelError(str(error), file=file) from error
    tensors, _, tensor_file = read_tensors(Path(path))
    arrays = {}
    for name in ("contexts", "next", "counts"):
        tensor = tensors.get(name)
        if tensor is None or tensor.dtype != torch.int32:
            found = "missing" if tensor is None else f"type {tensor.dtype}"
            raise ModelError(f"{found}; int32 expected", file=tensor_file, tensor=name)
        arrays[name] = tensor.numpy()
    try:
        return Phrases(**arrays, vocab_size=vocab_size, min_probability=least)
    except ModelError as error:
        raise ModelError(str(error), file=tensor_file) from error


def save_table(
    folder: str | Path, phrases: Phrases, *, hidden_size: int, target_sha256: str | None, card: dict[str, Any]
) -> None:
    """Write `model.safetensors` and `config.json`; `hidden_size` is the target's, `card` is kept under "octavo"."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    config = {
        "octavo_format": FORMAT_VERSION,
        "architectures": ["OctavoNgramTable"],
        "hidden_size": hidden_size,
        "vocab_size": phrases.vocab_size,
        "min_probability": phrases.min_probability,
        "target_sha256": target_sha256,
        "octavo": card,
    }
    tensors = {name: torch.from_numpy(getattr(phrases, name)) for name in ("contexts", "next", "counts")}
    partial = path / "config.json.part"
    partial.write_text(json.dumps(config, indent=1) + "\n")
    write_tensors(path / "model.safetensors", tensors, {})
    partial.replace(path / "config.json")


def plan_table(path: str | Path, draft_tokens: int, vocab_size: int, sha256: str | None, *, overlap: bool) -> DraftPlan:
    """What the books must know of a table of phrases, and how to make its drafter."""
    from octavo.spec.choose import DraftPlan

    table = NgramTable(read_table(path, vocab_size, sha256))
    return DraftPlan(
        "table",
        DecodeReserve.ngram(max_draft=draft_tokens, overlap=overlap),
        make=lambda bound: TableDrafter(table, draft_tokens=draft_tokens),
        description=f"up to {draft_tokens} tokens from a table of {table.entries} phrases ({Path(path).name})",
    )
