"""The laws of docs/invariants.md, checkable at any time.

`check` returns what is broken instead of raising, so that an idle server can report a fault and stay up. The shallow
check is vector arithmetic over rows and page states; the deep one also recounts owners, locks and the tree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from octavo.errors import LawViolation
from octavo.kv.balance_tiers import check_tiers
from octavo.kv.balance_tree import check_tree
from octavo.kv.books import RowState
from octavo.kv.pages import Int32Array
from octavo.kv.pool import STATE_NAMES, PagePool, PageState

if TYPE_CHECKING:
    from typing import Any

    from octavo.kv.ledger_base import LedgerBase

# By page state: pages that requests own, and pages that the prefix tree owns.
IS_HELD = np.isin(np.arange(len(STATE_NAMES)), (PageState.HELD, PageState.LEASED))
IS_CACHED = np.arange(len(STATE_NAMES)) == PageState.CACHED


def check(ledger: LedgerBase, *, deep: bool = True, at_rest: bool = False) -> list[LawViolation]:
    """Every broken law, as errors that are not raised. `at_rest`: no request lives, so only free, cached and
    quarantined pages may exist. Compares with the lengths seen by the last check (law 3)."""
    broken = [*_lengths(ledger), *_monotone(ledger), *_operations(ledger)]
    for pool in [*_pools(ledger), *_tier_pools(ledger)]:
        broken.extend(_counts(pool, at_rest))
    broken.extend(check_tiers(ledger, deep=deep, at_rest=at_rest))
    if deep:
        for pool in _pools(ledger):
            broken.extend(_owners(ledger, pool))
        broken.extend(_tables(ledger))
        broken.extend(check_tree(ledger))
    ledger.stats["violations"] += len(broken)
    return broken


def raise_on(ledger: LedgerBase, *, deep: bool = True, at_rest: bool = False) -> None:
    """`check`, raising the first broken law."""
    broken = check(ledger, deep=deep, at_rest=at_rest)
    if broken:
        raise broken[0]


def _pools(ledger: LedgerBase) -> list[PagePool[Any]]:
    return [ledger.full_pool] if ledger.swa_pool is None else [ledger.full_pool, ledger.swa_pool]


def _tier_pools(ledger: LedgerBase) -> list[PagePool[Any]]:
    return [] if ledger.tiers is None else [ledger.tiers.pool.host, ledger.tiers.slots]


def _lengths(ledger: LedgerBase) -> list[LawViolation]:
    """Laws 1, 2, 10, 13 over all rows that hold anything."""
    rows = ledger.live_rows()
    committed, known, allocated = ledger.committed[rows], ledger.known[rows], ledger.allocated[rows]
    protected, evicted, fill = ledger.protected[rows], ledger.evicted[rows], ledger.fill[rows]
    transfer = ledger.row_state[rows] == RowState.TRANSFER
    p, window = ledger.page_size, ledger.config.window_tokens
    final = np.maximum(committed, fill)
    # The oldest key that a query at `final` or behind it reads is final - W + 1.
    oldest = np.maximum(final - window + 1, 0) if window else np.zeros_like(final)
    tests = [
        (1, "a length is not a multiple of the page size", (allocated | protected | evicted) & (p - 1) != 0),
        (2, "protected > committed", protected > committed),
        (2, "committed > known", committed > known),
        (2, "known > allocated", known > allocated),
        (2, "fill > allocated", transfer & (fill > allocated)),
        (2, "evicted > max(committed, fill)", evicted > final),
        (10, "allocated is wider than the row", allocated > ledger.width_tokens),
        (13, "the read floor is inside a live window", evicted > oldest),
    ]
    broken = []
    for law, message, wrong in tests:
        for i in np.flatnonzero(wrong).tolist():
            broken.append(
                LawViolation(
                    law, message, row=int(rows[i]), protected=int(protected[i]), committed=int(committed[i]),
                    known=int(known[i]), allocated=int(allocated[i]), evicted=int(evicted[i]), fill=int(fill[i]),
                )
            )  # fmt: skip
    return broken


def _monotone(ledger: LedgerBase) -> list[LawViolation]:
    """Law 3, against the lengths at the last check of the same life of a row."""
    names = ("committed", "allocated", "evicted", "protected")
    now = {name: getattr(ledger, name).copy() for name in names}
    alive = (ledger.row_state == RowState.ACTIVE) | (ledger.row_state == RowState.TRANSFER)
    life = np.where(alive, ledger.generation, -1)  # generations start at 1
    before, ledger.audited = ledger.audited, (life, now)
    if before is None:
        return []
    same_life = alive & (before[0] == life)
    broken = []
    for name in names:
        for row in np.flatnonzero(same_life & (now[name] < before[1][name])).tolist():
            broken.append(
                LawViolation(3, f"{name} fell", row=row, was=int(before[1][name][row]), now=int(now[name][row]))
            )
    return broken


def _operations(ledger: LedgerBase) -> list[LawViolation]:
    """Law 14: every operation names rows that are held, and the count per row is right."""
    count = np.zeros(ledger.config.max_rows, np.int64)
    for operation in ledger.inflight.operations.values():
        count[operation.rows] += 1
    broken = []
    for row in np.flatnonzero(count != ledger.inflight.per_row).tolist():
        counted, kept = int(count[row]), int(ledger.inflight.per_row[row])
        broken.append(LawViolation(14, "operations in flight are miscounted", row=row, counted=counted, kept=kept))
    for row in np.flatnonzero((count > 0) & (ledger.row_state == RowState.FREE)).tolist():
        broken.append(LawViolation(14, "a free row is named by an operation in flight", row=row))
    return broken


def _counts(pool: PagePool[Any], at_rest: bool) -> list[LawViolation]:
    """Law 5, from the page states."""
    counted = np.bincount(pool.state, minlength=len(STATE_NAMES)).tolist()
    broken = []
    if counted != pool.counts or sum(pool.counts) != pool.total:
        broken.append(LawViolation(5, f"{pool.name} pool: pages are miscounted", counted=counted, kept=pool.counts))
    free = pool.free_list()
    if (
        len(free) != pool.counts[0]
        or (pool.state[free] != PageState.FREE).any()
        or np.bincount(free).max(initial=0) > 1
    ):
        broken.append(LawViolation(6, f"{pool.name} pool: the free list is not the free pages", listed=len(free)))
    if at_rest and pool.counts[PageState.HELD] + pool.counts[PageState.LEASED]:
        broken.append(LawViolation(5, f"{pool.name} pool: pages are held at rest", **pool.by_name()))
    return broken


def _owners(ledger: LedgerBase, pool: PagePool[Any]) -> list[LawViolation]:
    """Law 6: every page is named by exactly one owner of the kind its state says."""
    held: list[Int32Array] = []
    for row in ledger.live_rows().tolist():
        full, swa, _ = ledger.pages_of(row)
        held.append(full if pool.name == "full" else swa)
    held.extend(entry.full if pool.name == "full" else entry.swa for entry in ledger.inflight.aside)
    nodes = ledger.tree.nodes()
    if pool.name == "full":
        cached = [node.full for node in nodes if node.host is None]
    else:
        cached = [node.swa[node.swa >= 0] for node in nodes]
    broken = []
    for owners, kind, wanted in ((held, "requests", IS_HELD), (cached, "the prefix tree", IS_CACHED)):
        pages = np.concatenate(owners) if owners else np.empty(0, np.int32)
        if len(pages) and (pages.min() < 0 or pages.max() >= len(pool.state)):
            broken.append(LawViolation(6, f"{pool.name} pool: {kind} name pages that do not exist"))
            continue
        named = np.bincount(pages, minlength=len(pool.state))
        expected = wanted[pool.state]
        for page in np.flatnonzero(named != expected)[:8].tolist():
            state = STATE_NAMES[int(pool.state[page])]
            message = f"{pool.name} page {page} is {state} and named {int(named[page])} times by {kind}"
            broken.append(LawViolation(6, message, page=page))
    return broken


def _tables(ledger: LedgerBase) -> list[LawViolation]:
    """Tables name a page exactly inside [floor, allocated): law 10 on the right, law 13 on the left."""
    columns = np.arange(ledger.width_pages)
    ends = (ledger.allocated // ledger.page_size)[:, None]
    floors = (ledger.evicted // ledger.page_size)[:, None]
    broken = []
    wrong = ((ledger.full_table >= 0) != (columns < ends)).any(axis=1)
    for row in np.flatnonzero(wrong).tolist():
        broken.append(LawViolation(6, "the full table does not end at the watermark", row=row))
    if ledger.swa_table is not None:
        wrong = ((ledger.swa_table >= 0) != ((columns < ends) & (columns >= floors))).any(axis=1)
        for row in np.flatnonzero(wrong).tolist():
            broken.append(LawViolation(13, "the SWA table is not exactly [floor, watermark)", row=row))
    return broken
