"""Nodes of the prefix tree, and what a look-up and a publication return."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from octavo.kv.pages import FullPages, HostPages, Int32Array, SwaPages

Namespace = str | int | None  # an int: retired


class Node:
    """A run of pages. The root of a namespace has none and no parent. The stamps are the heaps': which entry counts."""

    __slots__ = (
        "parent", "children", "key", "tokens", "full", "swa", "start_page",
        "locks", "kept", "host", "last_use", "swa_last_use", "hits", "full_stamp", "swa_stamp", "namespace",
    )  # fmt: skip

    def __init__(self, parent: Node | None, key: bytes, tokens: Int32Array, full: Int32Array, start_page: int) -> None:
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        self.key = key  # bytes of the first page's key: its name in parent.children
        self.tokens = tokens  # num_pages·p tokens, one more with pair keys
        self.full = full
        self.swa = np.empty(0, np.int32)
        self.start_page = start_page
        self.locks = self.kept = 0  # kept: those among the locks that are retracted requests'
        self.host: HostPages | None = None  # of an offloaded node: where its KV is, while `full` names no page
        self.last_use = self.swa_last_use = self.hits = 0
        self.namespace: Namespace = None  # of a root

    @property
    def num_pages(self) -> int:
        return len(self.full)

    @property
    def end_page(self) -> int:
        return self.start_page + len(self.full)


class Match(NamedTuple):
    """The longest usable prefix: `pages` pages, the last of them inside the last node of `path`."""

    pages: int
    path: list[Node]  # nodes from the root down, root excluded
    full: FullPages  # [pages]
    swa: SwaPages  # [pages], -1 where dead; empty without an SWA pool


class Inserted(NamedTuple):
    """Result of publishing pages [first, last) of a row: what its tables must say now, and what became spare."""

    node: Node  # ends exactly at `last`
    full: FullPages  # [last-first] tree pages
    swa: SwaPages  # [last-first], -1 below the row's floor; empty without an SWA pool
    spare_full: FullPages  # the row's duplicates of pages the tree already had
    spare_swa: SwaPages
