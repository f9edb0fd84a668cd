"""The contract between the engine's one decode loop and every drafting algorithm.

    begin(request)      once, when the request gets its row: forget everything about the row's former owner
    observe(obs)        true tokens and features of every target forward (prefill chunk, decode, verify). Steps that
                        drafted nothing may be shown several at once if `needs_draft_kv` (spec/pending.py), always
                        before `propose` and before anybody else is given the row's pages
    propose(batch)      before every verify: the draft tokens, as a chain or a tree
    end(row)            once, when the request leaves its row

None of the four has a default, so no state can survive into the next request. Everything a drafter keeps per
request is indexed by the ledger row. Tensors live on the model's device; `propose` and `observe` are on the
launch path and must not synchronise with the device (no .item(), .tolist(), boolean indexing, blocking copies),
unless `needs_host_tokens` is set: such rows are settled before they are planned.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from octavo.ops.meta import KVView


@dataclass(frozen=True)
class DraftRequest:
    """A request as a drafter sees it when it gets its row."""

    row: int
    prompt_token_ids: tuple[int, ...]  # prompt, plus earlier output when a retracted request resumes
    max_tokens: int
    cached_tokens: int  # prefix found in the cache: draft KV below it is already in the pages


@dataclass(frozen=True)
class ProposeBatch:
    """b decode rows about to be verified. The tensors are the engine's own: to be read.

    rows         [b] int64 ledger rows (device) and `host_rows`, the same on the host
    seq_lens     [b] int64 KV slots committed as the device knows it = position of `last_tokens`
    last_tokens  [b] int64 newest token of each row; it has no KV yet and is the root of the draft
    draft_tokens host: how many tokens to draft this step at most (adaptive, 0 … max_draft_tokens), for every row
    host_limits  host: per-row upper bound of drafted tokens (context, max_tokens)
    host_tokens  host: full token lists (prompt + output); None unless `needs_host_tokens`
    max_kv_tokens host upper bound of any slot read or written, plus one
    host_lens    host: tokens of each row as far as known (the newest included); () if nobody counts
    catch_up     shows the drafter what waits (spec/pending.py). Called before `propose`, but for a drafter that has
                 `catches_up` set: it calls this itself, when it drafts from its KV
    """

    rows: torch.Tensor
    host_rows: tuple[int, ...]
    seq_lens: torch.Tensor
    last_tokens: torch.Tensor
    draft_tokens: int
    host_limits: tuple[int, ...]
    host_tokens: tuple[list[int], ...] | None
    kv: KVView
    max_kv_tokens: int
    host_lens: tuple[int, ...] = ()
    catch_up: Callable[[], None] = lambda: None


def kv_owner(drafter: Any) -> Any:
    """The drafter whose draft KV and seeds these are: itself, or the one with weights of two that act as one."""
    return getattr(drafter, "learned", drafter)


@dataclass(frozen=True)
class Draft:
    """What was drafted for b rows, m columns (root not included).

    tokens   [b, m] int64; columns >= lengths[s] of row s are padding and are never verified
    parents  [b, m] int64 or None for a chain; parent of column j as a node number, 0 = root, j+1 = column j.
             Parents come before children.
    depths   [b, m] int64 or None for a chain (then j+1)
    lengths  host, per row: how many columns are real. Trees are uniform.
    sources  host, per row: which of a drafter's sources drafted it (spec/lookup_first.py); () where there is but one
    """

    tokens: torch.Tensor
    parents: torch.Tensor | None
    depths: torch.Tensor | None
    lengths: tuple[int, ...]
    sources: tuple[int, ...] = ()


@dataclass(frozen=True)
class Observation:
    """True tokens and features of one target forward, ragged over b rows.

    rows         [b] int64
    indptr       b+1 host integers into the flat arrays
    start        [b] int64 position of each row's first observed token
    counts       [b] int64 how many of the row's slots are real (the rest is padding of a verify whose
                 accepted run was shorter than its width; writing KV there is harmless, it is overwritten)
    features     [n, taps * H] the target's hidden states HF[i] for the drafter's `taps`, concatenated; or None
    next_tokens  [n] int64 the token after each observed position (for the last one: the sampled/bonus token, or
                 the next prompt token when a prefill chunk is not the last)
    is_last      host, per row: False for a prefill chunk that more chunks follow
    """

    rows: torch.Tensor
    host_rows: tuple[int, ...]
    indptr: tuple[int, ...]
    start: torch.Tensor
    counts: torch.Tensor
    features: torch.Tensor | None
    next_tokens: torch.Tensor
    is_last: tuple[bool, ...]
    kv: KVView
    max_kv_tokens: int


@runtime_checkable
class Drafter(Protocol):
    """One drafting algorithm, bound to one target. A class without all four methods cannot be instantiated."""

    name: str
    max_draft_tokens: int  # drafted columns at most (N - 1)
    max_depth: int  # longest possible accepted run without the bonus token
    footprint_tokens: int  # KV positions one step may write (docs: reserve)
    commit_lag_tokens: int  # what a step in flight may still commit
    needs_host_tokens: bool
    needs_draft_kv: bool  # draft KV must exist for every published page
    kv_layers: int  # draft layers inside a page of the full pool
    key_mode: str  # "token" | "pair": how the prefix cache is keyed
    taps: tuple[int, ...]  # indices into the target's hidden-state list HF (0 = embeddings)

    @abstractmethod
    def begin(self, request: DraftRequest) -> None: ...

    @abstractmethod
    def propose(self, batch: ProposeBatch) -> Draft: ...

    @abstractmethod
    def observe(self, observation: Observation) -> None: ...

    @abstractmethod
    def end(self, row: int) -> None: ...
