"""Offloading: what only retracted requests lock gives its logical pages back and keeps its host pages.

A retracted request locks the path of pages that it shares with the prefix cache. Every page of the tree is in the host
tier whole, so where nobody else locks a node its logical pages can be had: the node keeps its place in the tree, its
key and its host pages, and names no page. It is *loaded back* when one of its requests returns, *put back* when a row
has computed its pages anew, and goes with the last request that locks it.

Rows lock whole paths, so what rows lock is closed towards the root, and what is offloaded towards the leaves: below an
offloaded node everything is. SWA pages are a matter of their own: retracted requests lock none.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import numpy as np

from octavo.kv.node import Node
from octavo.kv.pages import NO_PAGE, FullPages, HostPages, Int32Array, SwaPages
from octavo.kv.policy import EvictPolicy
from octavo.kv.pool import PagePool, PageState
from octavo.kv.prefix import PrefixTree
from octavo.kv.tiered_pool import TieredPool


class OffloadTree(PrefixTree):
    """The prefix cache over a host tier."""

    def __init__(
        self,
        page_size: int,
        full_pool: TieredPool,
        swa_pool: PagePool[SwaPages] | None,
        window_tokens: int,
        pair_keys: bool,
        policy: EvictPolicy,
    ) -> None:
        super().__init__(page_size, full_pool, swa_pool, window_tokens, pair_keys, policy)
        self.pool = full_pool
        self.offloaded_pages = self.loaded_back_pages = 0  # counters

    # --- locks -------------------------------------------------------------------------------------------------

    def keep_path(self, node: Node) -> None:
        """A row's lock of the path that ends at `node` is a retracted request's from now on."""
        while node.parent is not None:
            node.kept += 1
            self._count(node, node.num_pages)
            node = node.parent

    def unlock_kept(self, node: Node) -> None:
        """Drop a retracted request's lock of the path that ends at `node`."""
        at = node
        while at.parent is not None:
            self._count(at, -at.num_pages)
            at.kept -= 1
            at = at.parent
        self.unlock_path(node)

    def _count(self, node: Node, pages: int) -> None:
        if node.locks == node.kept and node.host is None:
            self.offloadable_full += pages

    def _lock_node(self, node: Node) -> None:
        if node.locks:
            self._count(node, -node.num_pages)
        super()._lock_node(node)

    def _unlock_node(self, node: Node) -> None:
        if node.locks == 1 and node.host is not None:
            self._drop(node, node.host)
            return
        super()._unlock_node(node)
        if node.locks:
            self._count(node, node.num_pages)

    def _drop(self, node: Node, host: HostPages) -> None:
        """Nobody comes back for an offloaded node any more."""
        self.pool.host.give_back(host, PageState.CACHED)
        if self.swa_pool is not None:
            self._free_swa(node.swa[node.swa >= 0])
        self._remove(node)

    # --- pages -------------------------------------------------------------------------------------------------

    def offload(self, pages: int, ends: Iterable[Node]) -> None:
        """Free at least `pages` logical pages of nodes that only retracted requests lock; there are so many, and
        nothing is evictable. `ends`: where the paths of all retracted requests end; the first are offloaded first."""
        for node in ends:
            while pages > 0 and node.parent is not None and node.locks == node.kept:
                # Where a child is not offloaded, another request's path goes on, whose turn comes.
                if node.host is None and all(child.host is not None for child in node.children.values()):
                    pages -= self._offload_node(node)
                node = node.parent

    def _offload_node(self, node: Node) -> int:
        count = node.num_pages
        node.host = self.pool.part(cast(FullPages, node.full), PageState.CACHED)
        node.full = np.full(count, NO_PAGE, np.int32)
        self.offloadable_full -= count
        self.offloaded_pages += count
        return count

    def load_back(self, node: Node, host: HostPages) -> None:
        """Logical pages for an offloaded node, `host` its pages, that a row has locked."""
        node.full, node.host = self.pool.take_for(host, PageState.CACHED, PageState.CACHED), None
        self.loaded_back_pages += len(host)

    def _meet(self, node: Node, mine: Int32Array, out: Int32Array) -> Int32Array:
        """Where the node is offloaded, the row's pages become the node's, and their host pages with them."""
        if node.host is None:
            return super()._meet(node, mine, out)
        self.pool.host.give_back(node.host, PageState.CACHED)
        self.pool.move(cast(FullPages, mine), PageState.HELD, PageState.CACHED)
        node.full, node.host = mine.copy(), None
        return mine[:0]
