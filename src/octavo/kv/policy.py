"""Which cached pages go first. A policy is one method; `examples/evict_policy.py` shows another.

A policy is loaded by `--evict-policy module:Class`, constructed without arguments and asked for a node's priority
whenever the node becomes evictable. Nodes with the lowest priority are evicted first.
"""

from __future__ import annotations

import importlib
from typing import Protocol

from octavo.errors import ConfigError


class NodeInfo(Protocol):
    """What a policy may read of a node of the prefix tree."""

    last_use: int  # tick of the last request that used the node's pages
    swa_last_use: int  # the same for its sliding-window pages
    hits: int  # requests that reused it
    start_page: int  # depth: pages between the root and this node

    @property
    def num_pages(self) -> int: ...


class EvictPolicy(Protocol):
    def priority(self, node: NodeInfo, pool: str) -> float:
        """Lower goes first. `pool` is "full" (the leaf is removed) or "swa" (its window pages are dropped)."""
        ...


class LeastRecentlyUsed:
    """The default."""

    def priority(self, node: NodeInfo, pool: str) -> float:
        return node.last_use if pool == "full" else node.swa_last_use


def load_policy(spec: str) -> EvictPolicy:
    """`module:Class` -> an instance. Raises `ConfigError` naming `--evict-policy`."""
    module_name, _, class_name = spec.partition(":")
    allowed = "module:Class, a class with a method priority(node, pool)"
    if not module_name or not class_name:
        raise ConfigError("evict_policy", spec, allowed)
    try:
        made = getattr(importlib.import_module(module_name), class_name)()
    except (ImportError, AttributeError, TypeError) as error:
        raise ConfigError("evict_policy", spec, f"{allowed} ({error})") from error
    if not callable(getattr(made, "priority", None)):
        raise ConfigError("evict_policy", spec, allowed)
    policy: EvictPolicy = made
    return policy
