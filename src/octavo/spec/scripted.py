"""A drafter that drafts what it was told to, right or wrong: the first one to exist, and the one most tests use.

It needs no host tokens (its script is copied to the device when the request begins and indexed by position), so
it runs under overlap exactly like a drafter with a network does.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch

from octavo.backend.relay import upload
from octavo.errors import ConfigError
from octavo.spec.drafter import Draft, DraftRequest, Observation, ProposeBatch


@dataclass(frozen=True)
class Script:
    """What to draft.

    sequences      full token lists (prompt + output) the target is expected to produce; a row follows the first
                   one its prompt is a prefix of. Without one every drafted token is `wrong_token`.
    accept_counts  how many drafted tokens of a row's 1st, 2nd, … proposal are right (cycled); None: all of them
    wrong_token    drafted where no sequence is known
    """

    sequences: tuple[tuple[int, ...], ...] = ()
    accept_counts: tuple[int, ...] | None = None
    wrong_token: int = 0

    @classmethod
    def from_file(cls, path: str | Path) -> Script:
        """Read {"sequences": [[…]], "accept_counts": […], "wrong_token": 0} (each key optional)."""
        try:
            data = json.loads(Path(path).read_text())
            if not isinstance(data, dict) or not data.keys() <= {"sequences", "accept_counts", "wrong_token"}:
                raise ValueError("other keys, or no object")
            sequences = data.get("sequences") or []
            if not isinstance(sequences, list):
                raise ValueError("sequences is no list")
            counts = data.get("accept_counts")
            (wrong_token,) = _whole("wrong_token", [data.get("wrong_token", 0)])
            return cls(
                tuple(_whole("sequences", sequence) for sequence in sequences),
                None if counts is None else _whole("accept_counts", counts),
                wrong_token,
            )
        except (OSError, ValueError, RecursionError) as error:
            allowed = f'a JSON object with "sequences", "accept_counts", "wrong_token" ({error})'
            raise ConfigError("draft_model", str(path), allowed) from error


def _whole(key: str, values: object) -> tuple[int, ...]:
    """A list of whole numbers from 0 that fit 63 bits. Raises ValueError."""
    if not isinstance(values, list) or not all(type(v) is int and 0 <= v < 1 << 63 for v in values):
        raise ValueError(f"{key}: whole numbers from 0 are needed")
    return tuple(values)


class ScriptedDrafter:
    """Drafts `draft_tokens` columns as a chain, or a comb of `width` branches a level (a tree with one true spine).

    In the comb, level d has `width` nodes, all children of the true node of level d-1; the true one sits at branch
    (position + d) % width, so an accepted path is rarely contiguous.
    """

    name = "scripted"
    needs_host_tokens = False
    needs_draft_kv = False
    kv_layers = 0
    key_mode = "token"
    taps: tuple[int, ...] = ()

    def __init__(
        self,
        script: Script,
        *,
        draft_tokens: int,
        vocab_size: int,
        max_rows: int,
        max_tokens: int,
        width: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        """`draft_tokens` levels of `width` nodes; `max_tokens` is the longest row. Raises ConfigError."""
        if draft_tokens < 1:
            raise ConfigError("draft_tokens", draft_tokens, "at least 1")
        if width < 1 or draft_tokens * width > 63:
            raise ConfigError("draft_topk", width, f"1 to {63 // draft_tokens} with {draft_tokens} levels")
        tokens = (script.wrong_token, *chain.from_iterable(script.sequences))
        beyond = next((token for token in tokens if not 0 <= token < vocab_size), None)
        if beyond is not None:
            raise ConfigError("draft_model", beyond, f"a script's tokens are 0 to {vocab_size - 1}")
        if script.accept_counts == ():
            raise ConfigError("draft_model", (), "accept_counts of a script: at least one number, or none given")
        self.script, self.vocab_size, self.width = script, vocab_size, width
        self.max_depth = draft_tokens
        self.max_draft_tokens = draft_tokens * width
        self.footprint_tokens = self.max_draft_tokens + 1
        self.commit_lag_tokens = draft_tokens + 1
        self._max_tokens = max_tokens
        # one column per position, -1 where nothing is known
        columns = max_tokens + draft_tokens + 1
        self._truth = torch.full((max_rows, columns), -1, dtype=torch.int64, device=device)
        self._steps: dict[int, int] = {}

    def begin(self, request: DraftRequest) -> None:
        self._steps[request.row] = 0
        line = [-1] * self._truth.shape[1]
        prompt = request.prompt_token_ids
        for sequence in self.script.sequences:
            if sequence[: len(prompt)] == prompt:
                known = sequence[: len(line)]
                line[: len(known)] = known
                break
        self._truth[request.row].copy_(upload(line, self._truth.device))

    def end(self, row: int) -> None:
        del self._steps[row]
        self._truth[row].fill_(-1)

    def observe(self, observation: Observation) -> None:
        """Nothing to learn: the script is fixed."""

    def propose(self, batch: ProposeBatch) -> Draft:
        depth = min(batch.draft_tokens, self.max_depth)
        lengths = tuple(min(depth, limit) for limit in batch.host_limits)
        device = batch.rows.device
        truth, right = self._levels(batch, depth, device)
        wrong = torch.where(truth >= 0, (truth + 1) % self.vocab_size, self.script.wrong_token)
        if self.width == 1:
            return Draft(torch.where(right, truth, wrong), None, None, lengths)
        return self._comb(batch, truth, right, wrong, lengths)

    def _levels(self, batch: ProposeBatch, depth: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """(true token, drafted right?) of each level: [b, depth] each."""
        at = batch.seq_lens[:, None] + torch.arange(1, depth + 1, device=device)
        truth = self._truth[batch.rows].gather(1, at.clamp(max=self._truth.shape[1] - 1))
        counts = []
        for row in batch.host_rows:
            step = self._steps.get(row, 0)
            self._steps[row] = step + 1
            script = self.script.accept_counts
            counts.append(depth if script is None else script[step % len(script)])
        accepted = upload(counts, device)[:, None]
        right = (torch.arange(depth, device=device) < accepted) & (truth >= 0)
        return truth, right

    def _comb(
        self,
        batch: ProposeBatch,
        truth: torch.Tensor,
        right: torch.Tensor,
        wrong: torch.Tensor,
        lengths: Sequence[int],
    ) -> Draft:
        b, depth = truth.shape
        k, device = self.width, truth.device
        levels = torch.arange(depth, device=device)
        spine = (batch.seq_lens[:, None] + levels) % k  # branch of the true node, [b, depth]
        branch = torch.arange(k, device=device)
        tokens = (wrong[:, :, None] + (branch - spine[:, :, None]) % k) % self.vocab_size
        on_spine = branch == spine[:, :, None]
        tokens = torch.where(on_spine, torch.where(right, truth, wrong)[:, :, None], tokens)
        # siblings must differ from the true token even where the spine was made wrong
        tokens = torch.where(~on_spine & (tokens == truth[:, :, None]), (tokens + k) % self.vocab_size, tokens)
        above = 1 + levels[:-1] * k + spine[:, :-1]
        parents = torch.cat([torch.zeros(b, 1, dtype=torch.int64, device=device), above], dim=1)
        depths = (levels + 1)[None, :, None].expand(b, depth, k)
        columns = tuple(length * k for length in lengths)
        shape = (b, depth * k)
        return Draft(
            tokens.reshape(shape),
            parents[:, :, None].expand(b, depth, k).reshape(shape),
            depths.reshape(shape),
            columns,
        )
