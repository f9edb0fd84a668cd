"""A priority queue of evictable nodes whose entries may go stale.

Pushing a node again makes its former entry stale; stale entries are skipped when popped and swept when they
outnumber the nodes, so the queue's size follows the tree's, not the history's.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import TYPE_CHECKING

from octavo.kv.policy import EvictPolicy

if TYPE_CHECKING:
    from octavo.kv.node import Node


class EvictionHeap:
    def __init__(self, pool: str, policy: EvictPolicy) -> None:
        self.pool, self.policy = pool, policy
        self._stamp = f"{pool}_stamp"
        self._serial = 0
        self._entries: list[tuple[float, int, Node]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def push(self, node: Node) -> None:
        """(Re)insert a node with its present priority."""
        self._serial += 1
        setattr(node, self._stamp, self._serial)
        heapq.heappush(self._entries, (self.policy.priority(node, self.pool), self._serial, node))

    def pop(self, usable: Callable[[Node], bool]) -> Node | None:
        """The usable node with the lowest priority, or None."""
        while self._entries:
            _, serial, node = heapq.heappop(self._entries)
            if getattr(node, self._stamp) == serial and usable(node):
                return node
        return None

    def current(self) -> set[int]:
        """`id` of every node with a current entry, for checks."""
        return {id(node) for _, serial, node in self._entries if getattr(node, self._stamp) == serial}

    def compact(self, live_nodes: int) -> None:
        """Drop stale entries once there are many more entries than nodes."""
        if len(self._entries) > 2 * live_nodes + 1024:
            self._entries = [e for e in self._entries if getattr(e[2], self._stamp) == e[1] and e[2].parent is not None]
            heapq.heapify(self._entries)
