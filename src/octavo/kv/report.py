"""The books as plain data: what `kv_report()`, the metrics and the picture show."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.kv.books import ROW_STATE_NAMES
from octavo.kv.saving import Capacity, PageBytes, two_pool_saving
from octavo.kv.sizing import PoolSizes

if TYPE_CHECKING:
    from octavo.kv.ledger_base import LedgerBase
    from octavo.kv.pool import PagePool

STATE_LETTERS = "fchlq"  # free, cached, held, leased, quarantined: the letters of a page map
MAP_LIMIT_PAGES = 65_536  # larger pools are mapped only on demand


def ledger_report(ledger: LedgerBase, *, page_map: bool | None = None) -> dict[str, Any]:
    """Pools in pages, requests in tokens, counters.

    pools     name -> total, free, cached, held, leased, quarantined, evictable, peak_used (pages), and with a
              page map: `map`, one letter of "fchlq" per page
    rows      live requests: row, generation, state, committed, known, allocated, protected, evicted, fill (tokens),
              and with a page map: `full_pages`, `swa_pages`, the ids the row owns
    tiers     with HiSparse: sizes, tickets, backups, pages moved
    stats     queried and hit tokens, evictions, splits, heals, remapped pages, violations
    """
    pools: dict[str, PagePool[Any]] = {"full": ledger.full_pool}
    if ledger.swa_pool is not None:
        pools["swa"] = ledger.swa_pool
    if ledger.tiers is not None:
        pools["host"], pools["slots"] = ledger.tiers.pool.host, ledger.tiers.slots
    with_map = page_map if page_map is not None else sum(p.total for p in pools.values()) <= MAP_LIMIT_PAGES
    tree = ledger.tree
    evictable = {"full": tree.evictable_full, "swa": tree.evictable_swa, "host": tree.evictable_full, "slots": 0}
    letters = np.frombuffer(STATE_LETTERS.encode(), np.uint8)
    shown: dict[str, Any] = {}
    for name, pool in pools.items():
        shown[name] = {**pool.by_name(), "evictable": evictable[name], "peak_used": pool.total - pool.min_free}
        if with_map:
            shown[name]["map"] = letters[pool.state].tobytes().decode()
    return {
        "page_size": ledger.page_size,
        "window_tokens": ledger.config.window_tokens,
        "pools": shown,
        "rows": [_row(ledger, int(row), with_map) for row in ledger.live_rows()],
        "cache": {"nodes": tree.num_nodes, "namespaces": len(tree.roots)},
        "operations_in_flight": len(ledger.inflight.operations),
        "stats": {
            **ledger.stats,
            "evicted_full_pages": tree.evicted_full,
            "evicted_swa_pages": tree.evicted_swa,
            "healed_pages": tree.heals,
            "splits": tree.splits,
        },
        **({} if ledger.tiers is None else {"tiers": ledger.tiers.report()}),
    }


def held_pages(ledger: LedgerBase) -> PoolSizes:
    """Pages of both pools that requests and transfers hold: a shared page once, cached pages that nobody uses not."""
    full, swa, tree = ledger.full_pool, ledger.swa_pool, ledger.tree
    return PoolSizes(
        full.total - full.free - tree.evictable_full,
        swa.total - swa.free - tree.evictable_swa if swa is not None else 0,
    )


def sliding_report(ledger: LedgerBase, page_bytes: PageBytes, peak: PoolSizes, capacity: Capacity) -> dict[str, Any]:
    """What the SWA pool saves against one full-length pool for all layers; `two_pool_saving` has the formula.

    full_page_bytes, swa_page_bytes   a page of either pool
    now        `held_pages`: full_pages, swa_pages for the same tokens, two_pools_bytes, one_pool_bytes, saved_bytes
    peak       the same when full_pages was largest
    capacity   the same when `requests` requests of `context_tokens` tokens run together
    """
    return {
        "full_page_bytes": page_bytes.full,
        "swa_page_bytes": page_bytes.swa,
        "now": two_pool_saving(held_pages(ledger), page_bytes)._asdict(),
        "peak": two_pool_saving(peak, page_bytes)._asdict(),
        "capacity": {
            "requests": capacity.requests,
            "context_tokens": capacity.context_tokens,
            **two_pool_saving(capacity.pages, page_bytes)._asdict(),
        },
    }


def _row(ledger: LedgerBase, row: int, with_pages: bool) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "row": row,
        "generation": int(ledger.generation[row]),
        "state": ROW_STATE_NAMES[int(ledger.row_state[row])],
    }
    for name in ("committed", "known", "allocated", "protected", "evicted", "fill"):
        shown[name] = int(getattr(ledger, name)[row])
    if with_pages:
        full, swa, _ = ledger.pages_of(row)
        shown["full_pages"], shown["swa_pages"] = full.tolist(), swa.tolist()
    return shown
