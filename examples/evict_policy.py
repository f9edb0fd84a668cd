"""An eviction policy for the prefix cache: popular and shallow prefixes outlive recent ones.

    octavo serve --evict-policy examples.evict_policy:Popular
    octavo replay trace.jsonl --evict-policy examples.evict_policy:Popular

A policy is a class without constructor arguments and one method. It is asked for a node's priority when the node
becomes evictable; the lowest goes first. A node is a run of pages that requests share; it offers

    last_use, swa_last_use   when a request last used its pages, or its sliding-window pages (a counter of admissions
                             and publications, not seconds)
    hits                     how many requests have reused it
    start_page, num_pages    how deep it lies and how long it is
"""

from __future__ import annotations

from octavo.kv.policy import NodeInfo


class Popular:
    """A system prompt that a thousand requests share should not go because of ten long conversations.

    Every doubling of a node's hits is worth `worth` ticks of recency; depth is a mild penalty, for a prefix near
    the root serves more requests than its continuation.
    """

    worth = 64.0
    depth_penalty = 0.05

    def priority(self, node: NodeInfo, pool: str) -> float:
        recency = node.last_use if pool == "full" else node.swa_last_use
        return recency + self.worth * (node.hits + 1).bit_length() - self.depth_penalty * node.start_page
