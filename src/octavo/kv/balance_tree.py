"""Checks of the prefix tree: shared pages are the tree's (law 12), locks are what rows hold, evictable is unlocked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from octavo.errors import LawViolation
from octavo.kv.node import Node
from octavo.kv.prefix import PrefixTree

if TYPE_CHECKING:
    from octavo.kv.ledger_base import LedgerBase


def check_tree(ledger: LedgerBase) -> list[LawViolation]:
    tree, nodes = ledger.tree, ledger.tree.nodes()
    broken = [*_shape(tree, nodes), *_evictable(tree, nodes)]
    locks: dict[int, int] = {}
    swa_locks = np.zeros_like(tree.swa_locks)
    for entry in ledger.inflight.aside:
        swa_locks[entry.swa_unlock] += 1
    for row in ledger.live_rows().tolist():
        end = int(ledger.protected[row]) // ledger.page_size
        node = ledger.path_end(row)
        if node.end_page != end:
            broken.append(
                LawViolation(
                    12, "the locked path does not end at protected", row=row, path=node.end_page, protected=end
                )
            )
        while node.parent is not None:
            locks[id(node)] = locks.get(id(node), 0) + 1
            mapped = ledger.full_table[row, node.start_page : node.end_page]
            if not np.array_equal(mapped, node.full):
                broken.append(LawViolation(12, "a shared entry is not the tree's page", row=row, node=node.start_page))
            if ledger.swa_table is not None:
                window = ledger.swa_table[row, node.start_page : node.end_page]
                if ((window >= 0) & (window != node.swa)).any():
                    broken.append(LawViolation(12, "a shared SWA entry is not the tree's page", row=row))
            node = node.parent
        locks[id(node)] = locks.get(id(node), 0) + 1
        swa_locks[ledger.pages_of(row)[2]] += 1
    kept: dict[int, int] = {}
    for ticket in ledger.tiers.tickets if ledger.tiers is not None else ():
        node = ticket.node
        while node.parent is not None:
            locks[id(node)] = locks.get(id(node), 0) + 1
            kept[id(node)] = kept.get(id(node), 0) + 1
            node = node.parent
        locks[id(node)] = locks.get(id(node), 0) + 1
    for node in [*nodes, *tree.roots.values()]:
        if node.locks != locks.get(id(node), 0):
            broken.append(LawViolation(12, "lock count", kept=node.locks, counted=locks.get(id(node), 0)))
        if node.kept != kept.get(id(node), 0):
            counted = kept.get(id(node), 0)
            broken.append(LawViolation(12, "lock count of retracted requests", kept=node.kept, counted=counted))
    if not np.array_equal(swa_locks, tree.swa_locks):
        page = int(np.flatnonzero(swa_locks != tree.swa_locks)[0])
        broken.append(LawViolation(12, "SWA lock count", page=page, kept=int(tree.swa_locks[page])))
    return broken


def _shape(tree: PrefixTree, nodes: list[Node]) -> list[LawViolation]:
    """Nodes name their first page to their parent, hold one key per page, and their SWA pages know them."""
    broken = []
    p, x = tree.page_size, tree.extra
    if len(nodes) != tree.num_nodes:
        broken.append(LawViolation(6, "nodes are miscounted", kept=tree.num_nodes, counted=len(nodes)))
    for node in nodes:
        parent = node.parent
        fits = (
            parent is not None
            and parent.children.get(node.key) is node
            and parent.end_page == node.start_page
            and node.num_pages > 0
            and len(node.tokens) == node.num_pages * p + x
            and node.tokens[: p + x].tobytes() == node.key
        )
        if not fits:
            broken.append(LawViolation(6, "a node of the prefix tree is malformed", start_page=node.start_page))
        if tree.swa_pool is not None:
            alive = node.swa[node.swa >= 0]
            if len(node.swa) != node.num_pages or any(owner is not node for owner in tree.swa_node[alive]):
                broken.append(LawViolation(6, "SWA pages of a node are misfiled", start_page=node.start_page))
    for namespace, root in tree.roots.items():
        if not root.children and not root.locks:
            broken.append(LawViolation(6, f"namespace {namespace!r} is empty and kept"))
    return broken


def _evictable(tree: PrefixTree, nodes: list[Node]) -> list[LawViolation]:
    """What counts as evictable is unlocked, and a victim can be found for all of it."""
    broken = []
    full = sum(node.num_pages for node in nodes if node.locks == 0)
    alive = [node.swa[node.swa >= 0] for node in nodes] if tree.swa_pool is not None else []
    swa = sum(int((tree.swa_locks[pages] == 0).sum()) for pages in alive)
    if (full, swa) != (tree.evictable_full, tree.evictable_swa):
        kept = (tree.evictable_full, tree.evictable_swa)
        broken.append(LawViolation(5, "evictable pages are miscounted", kept=kept, counted=(full, swa)))
    queued_full, queued_swa = tree.full_heap.current(), tree.swa_heap.current()
    for node in nodes:
        if node.locks == 0 and not node.children and id(node) not in queued_full:
            broken.append(LawViolation(5, "an evictable leaf is in no queue", start_page=node.start_page))
        if tree.swa_pool is not None:
            pages = node.swa[node.swa >= 0]
            if (tree.swa_locks[pages] == 0).any() and id(node) not in queued_swa:
                broken.append(LawViolation(5, "evictable SWA pages are in no queue", start_page=node.start_page))
    return broken
