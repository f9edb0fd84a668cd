"""The prefix cache: a radix tree over whole pages.

A node is a run of pages that no request has yet told apart. It keeps the tokens of its pages, their full-pool ids
and, where the model slides, their SWA ids; an SWA id of -1 is a *tombstone*: the window page went, the full page
stayed. A row that recomputes such a page *heals* it. A node *splits* where two requests part.

Keys: page k of a sequence is named by tokens [k·p, (k+1)·p). With pair keys (an EAGLE draft is loaded, whose KV
at i depends on token i+1) by tokens [k·p, (k+1)·p], so a page matches only if the token after it does too.

Two lock counts: a row locks the nodes of its whole path (`Node.locks`, so locks never grow towards the leaves) and,
page by page, the SWA pages of its window (`swa_locks`), which it drops as its read floor passes. Only unlocked
pages are evicted: full pages from the ends of leaves, SWA pages anywhere. With a host tier, nodes that only retracted
requests lock can be offloaded (`offload.py`): an offloaded node is not matched.
"""

from __future__ import annotations

from typing import cast

import numpy as np

from octavo.kv.heap import EvictionHeap
from octavo.kv.node import Inserted, Match, Namespace, Node
from octavo.kv.pages import NO_PAGE, BoolArray, FullPages, HostPages, Int32Array, Int64Array, SwaPages
from octavo.kv.policy import EvictPolicy
from octavo.kv.pool import PagePool, PageState


class PrefixTree:
    """Owns the `cached` pages of both pools. Keys are int32 token arrays."""

    def __init__(
        self,
        page_size: int,
        full_pool: PagePool[FullPages],
        swa_pool: PagePool[SwaPages] | None,
        window_tokens: int,
        pair_keys: bool,
        policy: EvictPolicy,
    ) -> None:
        self.page_size = page_size
        self.window = window_tokens
        self.extra = 1 if pair_keys else 0  # tokens behind a page that its key includes
        self.full_pool, self.swa_pool = full_pool, swa_pool
        self.roots: dict[Namespace, Node] = {}
        self.num_nodes = 0
        self.tick = self.retired = 0  # retired: roots that nobody looks at again
        self.evictable_full = 0
        self.offloadable_full = 0  # with a host tier: pages that only retracted requests lock
        self.evictable_swa = 0
        self.evicted_full = self.evicted_swa = self.splits = self.heals = 0  # counters
        swa_total = swa_pool.total if swa_pool else 0
        self.swa_locks = np.zeros(swa_total, np.int32)
        self.swa_node = np.empty(swa_total, object)  # SWA page -> its node
        self.full_heap = EvictionHeap("full", policy)
        self.swa_heap = EvictionHeap("swa", policy)

    # --- lookup ------------------------------------------------------------------------------------------------

    def root(self, namespace: Namespace) -> Node:
        node = self.roots.get(namespace)
        if node is None:
            none = np.empty(0, np.int32)
            node = self.roots[namespace] = Node(None, b"", none, none, 0)
            node.namespace = namespace
        return node

    def retire(self) -> None:
        """Nothing that is in the tree is matched again: its roots take names nobody asks for. Rows go on."""
        for name in list(self.roots):
            self.retired += 1
            root = self.roots[self.retired] = self.roots.pop(name)
            root.namespace = self.retired

    def match(
        self, tokens: Int32Array, namespace: str | None, max_pages: int, read_from_page: int | None = None
    ) -> Match:
        """Longest prefix of at most `max_pages` pages that may be reused. Changes nothing.

        With an SWA pool a boundary counts only if the window before it is alive, or, where `read_from_page` says
        what the row will read, everything from there on.
        """
        path: list[Node] = []
        pages = 0
        node = self.roots.get(namespace)
        while node is not None and pages < max_pages:
            node = self._child(node, tokens, pages)
            if node is None or node.host is not None:
                break
            take = min(self._common_pages(node, tokens, pages), max_pages - pages)
            path.append(node)
            pages += take
            if take < node.num_pages:
                break
        swa = np.concatenate([n.swa for n in path])[:pages] if path and self.swa_pool else np.empty(0, np.int32)
        if self.swa_pool is not None and pages:
            pages = self._alive_boundary(swa, read_from_page)
            while path and path[-1].start_page >= pages:
                path.pop()
        full = np.concatenate([n.full for n in path])[:pages] if path else np.empty(0, np.int32)
        return Match(pages, path, cast(FullPages, full), cast(SwaPages, swa[:pages]))

    def _child(self, node: Node, tokens: Int32Array, page: int) -> Node | None:
        p = self.page_size
        return node.children.get(tokens[page * p : (page + 1) * p + self.extra].tobytes())

    def _common_pages(self, node: Node, tokens: Int32Array, page: int) -> int:
        """Pages of `node` that `tokens` shares from `page` on; its first page is known to match."""
        if node.num_pages == 1:
            return 1
        mine = node.tokens
        theirs = tokens[page * self.page_size : page * self.page_size + len(mine)]
        length = len(theirs)
        differs = mine[:length] != theirs
        first = int(differs.argmax())
        common = first if differs[first] else length
        return (common - self.extra) // self.page_size

    def window_start_page(self, pages: int) -> int:
        """First page that a row starting at boundary `pages` may read through its window."""
        return max(0, pages * self.page_size - self.window) // self.page_size

    def _alive_boundary(self, swa: Int32Array, read_from_page: int | None) -> int:
        """Largest boundary m <= len(swa) with no tombstone in [start(m), m)."""
        total = len(swa)
        dead: BoolArray = swa < 0
        if not dead.any():
            return total
        boundaries = np.arange(total + 1)
        if read_from_page is None:
            starts = np.maximum(boundaries * self.page_size - self.window, 0) // self.page_size
        else:
            starts = np.minimum(boundaries, read_from_page)
        last_dead = np.full(total + 1, -1)
        last_dead[1:] = np.maximum.accumulate(np.where(dead, boundaries[:-1], -1))
        return int(np.flatnonzero(last_dead < starts)[-1])

    # --- locks -------------------------------------------------------------------------------------------------

    def take(self, match: Match, namespace: Namespace, swa_from_page: int) -> Node:
        """Lock a match for a row: its whole path, and its SWA pages from `swa_from_page` on. Returns its last node."""
        self.tick += 1
        root = self.root(namespace)
        root.locks += 1  # a root lives while it has pages or rows
        if not match.path:
            return root
        last = match.path[-1]
        if last.end_page > match.pages:
            last = self._split(last, match.pages - last.start_page)
        node: Node | None = last
        while node is not None and node.parent is not None:
            node.hits += 1
            self._lock_node(node)
            if node.end_page > swa_from_page:
                node.swa_last_use = self.tick
            node = node.parent
        if self.swa_pool is not None:
            window = match.swa[swa_from_page:]
            self.lock_swa(window[window >= 0])  # on the path of a retracted request some may be dead
        return last

    def _lock_node(self, node: Node) -> None:
        if node.locks == 0:
            self.evictable_full -= node.num_pages
        node.locks += 1
        node.last_use = self.tick

    def unlock_path(self, node: Node | None) -> None:
        """Drop one row's lock of the path that ends at `node`."""
        while node is not None and node.parent is not None:
            parent = node.parent
            self._unlock_node(node)
            node = parent
        if node is not None:
            node.locks -= 1
            self._drop_if_empty(node)

    def _unlock_node(self, node: Node) -> None:
        node.locks -= 1
        if node.locks == 0:
            self.evictable_full += node.num_pages
            if not node.children:
                self.full_heap.push(node)

    def lock_swa(self, pages: Int32Array) -> None:
        if len(pages):
            self.evictable_swa -= int((self.swa_locks[pages] == 0).sum())
            self.swa_locks[pages] += 1

    def unlock_swa(self, pages: Int32Array) -> None:
        """Drop one lock of each SWA page; pages without a lock left may be evicted."""
        if not len(pages):
            return
        self.swa_locks[pages] -= 1
        loose = pages[self.swa_locks[pages] == 0]
        self.evictable_swa += len(loose)
        for node in dict.fromkeys(self.swa_node[loose].tolist()):  # in order: what follows is reproducible
            self.swa_heap.push(node)

    # --- growth ------------------------------------------------------------------------------------------------

    def insert(self, node: Node, tokens: Int32Array, full: Int32Array, swa: Int32Array | None) -> Inserted:
        """Publish pages [node.end_page, +len(full)) of a row whose path ends at `node`, and lock them for it.

        full, swa   the row's own pages, `held`; swa is -1 below the row's floor, None without an SWA pool
        The new pages become `cached`. Where the tree has a page already, the tree's is kept and the row's is spare.
        """
        self.tick += 1
        first, last = node.end_page, node.end_page + len(full)
        new_full, new_swa = full.copy(), swa.copy() if swa is not None else np.empty(0, np.int32)
        spare_full: list[Int32Array] = []
        spare_swa: list[Int32Array] = []
        page = first
        while page < last:
            at = page - first
            child = self._child(node, tokens, page)
            if child is None:
                node = self._append(node, tokens, page, full[at:], None if swa is None else swa[at:])
                break
            same = min(self._common_pages(child, tokens, page), last - page)
            if same < child.num_pages:
                child = self._split(child, same)
            self._lock_node(child)
            spare_full.append(self._meet(child, full[at : at + same], new_full[at : at + same]))
            if swa is not None:
                spare_swa.append(self._merge_swa(child, swa[at : at + same], new_swa[at : at + same]))
            node, page = child, page + same
        empty = np.empty(0, np.int32)
        return Inserted(
            node,
            cast(FullPages, new_full),
            cast(SwaPages, new_swa),
            cast(FullPages, np.concatenate(spare_full) if spare_full else empty),
            cast(SwaPages, np.concatenate(spare_swa) if spare_swa else empty),
        )

    def _meet(self, node: Node, mine: Int32Array, out: Int32Array) -> Int32Array:
        """A row has pages that a node is there for: `out` gets what its table must say. Returns the spare ones."""
        out[:] = node.full
        return mine

    def _append(self, parent: Node, tokens: Int32Array, page: int, full: Int32Array, swa: Int32Array | None) -> Node:
        p, end = self.page_size, page + len(full)
        node_tokens = tokens[page * p : end * p + self.extra].copy()
        node = Node(parent, node_tokens[: p + self.extra].tobytes(), node_tokens, full.copy(), page)
        node.locks, node.last_use, node.swa_last_use = 1, self.tick, self.tick
        parent.children[node.key] = node
        self.num_nodes += 1
        self.full_pool.move(cast(FullPages, full), PageState.HELD, PageState.CACHED)
        if swa is not None and self.swa_pool is not None:
            node.swa = swa.copy()
            self._adopt_swa(node, swa[swa >= 0])
        return node

    def _merge_swa(self, node: Node, mine: Int32Array, out: Int32Array) -> Int32Array:
        """Combine a row's SWA pages with a node's; `out` gets what the row's table must say. Returns the spare ones."""
        alive, have = node.swa >= 0, mine >= 0
        heal = have & ~alive
        if heal.any():
            self.heal(node, np.flatnonzero(heal), mine[heal])
        both = have & alive
        out[both] = node.swa[both]
        self.lock_swa(node.swa[both])
        if have.any():
            node.swa_last_use = self.tick
        return mine[both]

    def heal(self, node: Node, at: Int64Array, pages: Int32Array) -> None:
        """SWA pages of a row, held, take the place of the node's tombstones `at`."""
        node.swa[at] = pages
        self._adopt_swa(node, pages)
        self.heals += len(pages)

    def _adopt_swa(self, node: Node, pages: Int32Array) -> None:
        """Pages of a row become the node's, locked once (by that row)."""
        if self.swa_pool is not None:
            self.swa_pool.move(cast(SwaPages, pages), PageState.HELD, PageState.CACHED)
            self.swa_locks[pages] = 1
            self.swa_node[pages] = node

    def _split(self, node: Node, pages: int) -> Node:
        """Cut the first `pages` pages off into a new parent, which is returned. `node` keeps the rest, and its
        identity: rows whose path ends at it still end at it."""
        p, x = self.page_size, self.extra
        upper = Node(
            node.parent, node.key, node.tokens[: pages * p + x].copy(), node.full[:pages].copy(), node.start_page
        )
        upper.locks, upper.kept, upper.hits = node.locks, node.kept, node.hits
        if node.host is not None:
            upper.host, node.host = cast(HostPages, node.host[:pages]), cast(HostPages, node.host[pages:])
        upper.last_use, upper.swa_last_use = node.last_use, node.swa_last_use
        if node.parent is not None:
            node.parent.children[node.key] = upper
        node.parent, node.start_page = upper, upper.end_page
        node.tokens, node.full = node.tokens[pages * p :].copy(), node.full[pages:].copy()
        node.key = node.tokens[: p + x].tobytes()
        upper.children[node.key] = node
        if self.swa_pool is not None:
            upper.swa, node.swa = node.swa[:pages].copy(), node.swa[pages:].copy()
            alive = upper.swa[upper.swa >= 0]
            self.swa_node[alive] = upper
            if (self.swa_locks[alive] == 0).any():
                self.swa_heap.push(upper)
        self.num_nodes += 1
        self.splits += 1
        return upper

    # --- eviction ----------------------------------------------------------------------------------------------

    def evict_full(self, pages: int) -> int:
        """Free up to `pages` unlocked full pages (and their SWA pages), from the ends of leaves. Returns how many."""
        freed = 0
        while freed < pages:
            node = self.full_heap.pop(lambda n: n.locks == 0 and not n.children and n.parent is not None)
            if node is None:
                break
            count = min(node.num_pages, pages - freed)
            self._drop_end(node, count)
            freed += count
        self.full_heap.compact(self.num_nodes)
        return freed

    def _drop_end(self, node: Node, count: int) -> None:
        keep = node.num_pages - count
        gone = node.full[keep:]
        self.full_pool.give_back(cast(FullPages, gone), PageState.CACHED)
        self.evictable_full -= count
        self.evicted_full += count
        if self.swa_pool is not None:
            self._free_swa(node.swa[keep:][node.swa[keep:] >= 0])
            node.swa = node.swa[:keep]
        node.full = node.full[:keep]
        node.tokens = node.tokens[: keep * self.page_size + self.extra]
        if keep:
            self.full_heap.push(node)
        else:
            self._remove(node)

    def _remove(self, node: Node) -> None:
        parent = node.parent
        node.parent = None
        self.num_nodes -= 1
        if parent is None:
            return
        del parent.children[node.key]
        if parent.parent is None:
            self._drop_if_empty(parent)
        elif not parent.children and not parent.locks:
            self.full_heap.push(parent)

    def _drop_if_empty(self, root: Node) -> None:
        if not root.children and not root.locks:
            self.roots.pop(root.namespace, None)

    def _free_swa(self, pages: Int32Array) -> None:
        if self.swa_pool is not None:
            self.swa_pool.give_back(cast(SwaPages, pages), PageState.CACHED)
            self.swa_node[pages] = None
            self.evictable_swa -= len(pages)
            self.evicted_swa += len(pages)

    def evict_swa(self, pages: int) -> int:
        """Free up to `pages` unlocked SWA pages; their full pages stay, with tombstones. Returns how many."""
        freed = 0
        while freed < pages:
            node = self.swa_heap.pop(lambda n: n.parent is not None)
            if node is None:
                break
            alive = np.flatnonzero(node.swa >= 0)
            loose = alive[self.swa_locks[node.swa[alive]] == 0]
            victims = loose[: pages - freed]  # the oldest positions first: windows are at the ends
            self._free_swa(node.swa[victims])
            node.swa[victims] = NO_PAGE
            freed += len(victims)
            if len(victims) < len(loose):
                self.swa_heap.push(node)
        self.swa_heap.compact(self.num_nodes)
        return freed

    def nodes(self) -> list[Node]:
        """Every node (roots excluded), for checks and reports."""
        found: list[Node] = []
        todo = list(self.roots.values())
        while todo:
            children = list(todo.pop().children.values())
            found.extend(children)
            todo.extend(children)
        return found
