"""Plain decode steps that a drafter with draft KV has not been shown yet.

A step that drafts nothing needs no draft KV: only the next draft does, and whoever is given the row's pages. So the
features of such steps wait here and are shown together, as one `Observation` like a prompt chunk's. The draft KV of
a token is a function of its own features and position, and the operations give every row the same bits in any
company: what is written late equals what would have been written at once.

    shown before      the next draft (spec: propose), a publish or release that keeps pages, a transfer, a backup into
                      the host tier, a retraction
    shown at          `BOUND_TOKENS` waiting tokens
    forgotten with    the row (its pages are nobody's then)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from octavo.backend.relay import upload
from octavo.spec.drafter import Observation

# Over all rows. From 128 on a token's share of the batched forward no longer falls, but a row that ends before is free.
# So many are 14 MB of features (three layers of 576 floats), and 30 ms of the step that shows them.
BOUND_TOKENS = 2048


@dataclass(frozen=True)
class _Waiting:
    """One plain step, one token a row; `forgotten` rows have ended since."""

    step: Observation
    forgotten: set[int] = field(default_factory=set)


class PendingSteps:
    """Observations of one token a row, in the order of their steps."""

    def __init__(self, bound_tokens: int = BOUND_TOKENS) -> None:
        self.bound_tokens = bound_tokens
        self.tokens = 0  # waiting, those of ended rows included
        self._steps: list[_Waiting] = []
        self._rows: set[int] = set()

    @property
    def full(self) -> bool:
        return self.tokens >= self.bound_tokens

    def add(self, step: Observation) -> None:
        """Keep a step; nothing is copied. Raises ValueError unless it has one token a row."""
        if step.indptr[-1] != len(step.host_rows):
            raise ValueError(f"{step.indptr[-1]} tokens of {len(step.host_rows)} rows: a plain step has one a row")
        self._steps.append(_Waiting(step))
        self._rows.update(step.host_rows)
        self.tokens += len(step.host_rows)

    def holds(self, rows: Iterable[int]) -> bool:
        """Whether anything of one of these rows waits."""
        return not self._rows.isdisjoint(rows)

    def forget(self, row: int) -> None:
        """The row has ended: its pages are no longer its own."""
        if row in self._rows:
            self._rows.discard(row)
            for waiting in self._steps:
                if row in waiting.step.host_rows:
                    waiting.forgotten.add(row)

    def take(self) -> Observation | None:
        """Everything that waits as one ragged observation, row by row in order of position; None: nothing does."""
        steps, self._steps = self._steps, []
        self._rows.clear()
        self.tokens = 0
        if steps and all(w.step.host_rows == steps[0].step.host_rows and not w.forgotten for w in steps):
            return _same_rows([waiting.step for waiting in steps])
        places: dict[int, list[int]] = {}  # ledger row -> its tokens' places in the steps laid end to end
        end = 0
        for waiting in steps:
            for place, row in enumerate(waiting.step.host_rows, end):
                if row not in waiting.forgotten:
                    places.setdefault(row, []).append(place)
            end += len(waiting.step.host_rows)
        if not places:
            return None
        return _merged([waiting.step for waiting in steps], places)


def _same_rows(steps: list[Observation]) -> Observation:
    """Steps of the same rows in the same order, which is most of them: what `_merged` gives, with less to do."""
    first, count, rows = steps[0], len(steps), len(steps[0].host_rows)
    if count == 1:
        return first
    return replace(
        first,
        indptr=tuple(range(0, rows * count + 1, count)),
        counts=torch.full_like(first.start, count),
        **_laid(steps, lambda parts: torch.stack(parts, dim=1).flatten(0, 1)),
    )


def _laid(steps: list[Observation], lay: Callable[[list[torch.Tensor]], torch.Tensor]) -> dict[str, Any]:
    """What steps hold token by token, as `lay` puts it together, and how far the newest may have written."""
    features = [step.features for step in steps if step.features is not None]
    return {
        "features": lay(features) if features else None,
        "next_tokens": lay([step.next_tokens for step in steps]),
        "kv": steps[-1].kv,
        "max_kv_tokens": max(step.max_kv_tokens for step in steps),
    }


def _merged(steps: list[Observation], places: dict[int, list[int]]) -> Observation:
    device = steps[0].rows.device
    order = [place for row in places.values() for place in row]
    indptr = [0]
    for row in places.values():
        indptr.append(indptr[-1] + len(row))
    in_order = order == list(range(sum(len(step.host_rows) for step in steps)))
    pick = None if in_order else upload(order, device)

    def lay(parts: list[torch.Tensor]) -> torch.Tensor:
        whole = torch.cat(parts)
        return whole if pick is None else whole.index_select(0, pick)

    return Observation(
        rows=upload(list(places), device),
        host_rows=tuple(places),
        indptr=tuple(indptr),
        # a row's steps follow each other, so its first position tells all of them
        start=torch.cat([step.start for step in steps]).index_select(
            0, upload([p[0] for p in places.values()], device)
        ),
        counts=upload([len(p) for p in places.values()], device),
        is_last=(True,) * len(places),
        **_laid(steps, lay),
    )
