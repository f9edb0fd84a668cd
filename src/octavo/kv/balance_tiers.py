"""Checks of the tiers: host pages and slots close (law 5), have one owner (law 6), and only backed KV is shared."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from octavo.errors import LawViolation
from octavo.kv.books import RowState
from octavo.kv.pages import NO_PAGE
from octavo.kv.pool import PageState

if TYPE_CHECKING:
    from octavo.kv.ledger_base import LedgerBase
    from octavo.kv.tiers import Tiers


def check_tiers(ledger: LedgerBase, *, deep: bool, at_rest: bool) -> list[LawViolation]:
    """Nothing to check without a host tier. The page counts are checked with those of the other pools."""
    tiers = ledger.tiers
    if tiers is None:
        return []
    broken = [*_frontiers(ledger, tiers), *_promises(ledger, tiers)]
    if deep:
        broken += [*_host_owners(tiers), *_slot_owners(ledger, tiers), *_offloaded(tiers)]
    if at_rest and (tiers.tickets or tiers.backups):
        broken.append(
            LawViolation(5, "tickets or backups at rest", tickets=len(tiers.tickets), backups=len(tiers.backups))
        )
    return broken


def _frontiers(ledger: LedgerBase, tiers: Tiers) -> list[LawViolation]:
    """protected <= backed <= backing <= committed, in whole pages; a victim is never newer than its backup."""
    p = ledger.page_size
    rows = np.flatnonzero(ledger.row_state == RowState.ACTIVE)
    protected, committed = ledger.protected[rows] // p, ledger.committed[rows] // p
    backed, backing = tiers.backed[rows], tiers.backing[rows]
    tests = [
        (12, "shared pages are not backed up", protected > backed),
        (14, "backed up before a backup has begun", backed > backing),
        (14, "backed up before it was committed", backing > committed),
        (6, "an active row has no device slots", tiers.row_slots[rows, 0] == NO_PAGE),
    ]
    broken = []
    for law, message, wrong in tests:
        for i in np.flatnonzero(wrong).tolist():
            broken.append(
                LawViolation(law, message, row=int(rows[i]), protected=int(protected[i]), backed=int(backed[i]),
                             backing=int(backing[i]), committed=int(committed[i]))
            )  # fmt: skip
    return broken


def _promises(ledger: LedgerBase, tiers: Tiers) -> list[LawViolation]:
    """What is promised and not taken yet can be had: now, or when the operations that keep pages aside have drained."""
    promised = tiers.promised_pages(ledger.allocated // ledger.page_size)
    have = ledger.available("host") + sum(len(entry.full) for entry in ledger.inflight.aside)
    if promised <= have:
        return []
    return [LawViolation(5, "more host pages are promised than there are", promised=promised, available=have)]


def _host_owners(tiers: Tiers) -> list[LawViolation]:
    """A host page belongs to one logical page, in the same state, to one ticket or to one offloaded node; a free
    logical page has none."""
    pool = tiers.pool
    broken = []
    used = np.flatnonzero(pool.state != PageState.FREE)
    bound = pool.host_of[used]
    for page in np.flatnonzero((pool.host_of != NO_PAGE) != (pool.state != PageState.FREE))[:8].tolist():
        broken.append(LawViolation(6, "a logical page is bound to a host page exactly while it is not free", page=page))
    parted = [node.host for node in tiers.tree.nodes() if node.host is not None]
    named = np.concatenate([bound[bound >= 0], *(ticket.host for ticket in tiers.tickets), *parted])
    if len(named) and int(named.max()) >= pool.host.total:
        return [*broken, LawViolation(6, "a host page that does not exist is named", page=int(named.max()))]
    count = np.bincount(named, minlength=pool.host.total)
    for page in np.flatnonzero(count != (pool.host.state != PageState.FREE))[:8].tolist():
        broken.append(LawViolation(6, "a host page has not exactly one owner", page=page, owners=int(count[page])))
    for i in np.flatnonzero((bound >= 0) & (pool.host.state[bound] != pool.state[used]))[:8].tolist():
        broken.append(LawViolation(6, "a host page is in another state than its logical page", page=int(bound[i])))
    for ticket in tiers.tickets:
        if (pool.host.state[ticket.host] != PageState.HELD).any():
            broken.append(LawViolation(6, "a ticket's host page is not held", host=ticket.host.tolist()))
    for host in parted:
        if (pool.host.state[host] != PageState.CACHED).any():
            broken.append(LawViolation(6, "an offloaded page is not cached", host=host.tolist()))
    return broken


def _offloaded(tiers: Tiers) -> list[LawViolation]:
    """Only what retracted requests alone lock is offloaded, node by node, and everything below it."""
    broken = []
    offloadable = 0
    for node in tiers.tree.nodes():
        alone = 0 < node.locks == node.kept
        if node.host is None:
            offloadable += node.num_pages * alone
            continue
        if not alone or len(node.host) != node.num_pages or (node.full != NO_PAGE).any():
            broken.append(LawViolation(6, "a node is offloaded that may not be", start_page=node.start_page))
        if any(child.host is None for child in node.children.values()):
            broken.append(LawViolation(6, "a page below an offloaded one is not offloaded", start_page=node.start_page))
    if offloadable != tiers.tree.offloadable_full:
        kept = tiers.tree.offloadable_full
        broken.append(LawViolation(5, "offloadable pages are miscounted", kept=kept, counted=offloadable))
    return broken


def _slot_owners(ledger: LedgerBase, tiers: Tiers) -> list[LawViolation]:
    """Every slot that is not free is one row's; a row has all of its slots or none; a free row has none."""
    broken = []
    cells = tiers.row_slots
    named = cells[cells >= 0]
    count = np.bincount(named, minlength=tiers.slots.total)
    if len(count) > tiers.slots.total:
        return [LawViolation(6, "a device slot that does not exist is named", slot=int(named.max()))]
    for slot in np.flatnonzero(count != (tiers.slots.state != PageState.FREE))[:8].tolist():
        broken.append(LawViolation(6, "a device slot has not exactly one owner", slot=slot, owners=int(count[slot])))
    some, every = (cells >= 0).any(axis=1), (cells >= 0).all(axis=1)
    for row in np.flatnonzero(some & (~every | (ledger.row_state == RowState.FREE))).tolist():
        broken.append(LawViolation(6, "a row holds some of its slots, or is free and holds any", row=row))
    return broken
