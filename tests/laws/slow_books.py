"""The slow books: what a right ledger must agree with, kept without its data structures.

contents   what every page slot of both pools holds. The KV of position i is a function of all tokens up to i (with
           pair keys up to i+1), so its content is a hash of that prefix; a reject is garbage. Steps, transfers and
           late writes go through the page tables as they were when the operation was launched.
owners     a dict of page -> owner, rebuilt from the tables after every move
cache      a dict of prefix hash -> pages, instead of a radix tree
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from octavo.kv import balance
from octavo.kv.ledger import Ledger
from octavo.kv.pool import PageState
from tests.laws.law_setups import Setup

GARBAGE = -7


@dataclass(eq=False)
class Life:
    """A request and, while it has one, its row."""

    stream: np.ndarray  # every token it will ever have
    tags: np.ndarray  # tags[i]: content of KV position i
    namespace: str | None
    prompt: int  # tokens to prefill
    row: int = -1
    generation: int = 0
    device: int = 0  # tokens committed as the device knows them, once all launched steps have run
    known: int = 0
    fill: int = 0
    gone: bool = False
    steps: list[int] = field(default_factory=list)  # undrained steps, oldest first
    last_reserve: int = 0
    lag: int = 0  # what its last launched step may commit, under overlap


@dataclass(eq=False)
class Step:
    """A launched step of some rows: tables and lengths as they were at launch."""

    op: int
    lives: list[Life]
    generations: list[int]
    start: list[int]
    commits: list[int]
    writes_until: list[int]
    full: np.ndarray
    swa: np.ndarray | None
    ran: bool = False
    is_chunk: bool = False
    seen: tuple[set[int], set[int]] = field(default_factory=lambda: (set(), set()))


@dataclass(eq=False)
class Reading:
    """The row's pages are read by a peer, or backed up: content must stand until it drains."""

    op: int
    life: Life
    upto: int
    floor: int
    full: np.ndarray
    swa: np.ndarray | None
    seen: tuple[set[int], set[int]] = field(default_factory=lambda: (set(), set()))


@dataclass(eq=False)
class Lease:
    life: Life
    row: int
    generation: int
    first: int
    swa_first: int
    full: np.ndarray
    swa: np.ndarray | None


class SlowBooks:
    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.config = setup.config()
        self.p, self.window = setup.page_size, setup.window_tokens
        self.ledger = Ledger(self.config)
        self.events: Counter[str] = Counter()
        self.lives: list[Life] = []
        self.waiting: list[Life] = []
        self.steps: list[Step] = []  # launched, in order; the device runs them in order
        self.readings: list[Reading] = []
        self.leases: list[Lease] = []
        self.poisoned: list[Lease] = []  # quarantined: anything may be written there at any time
        self.full = np.full((self.config.full_pages, self.p), GARBAGE, np.int64)
        self.swa = np.full((max(1, self.config.swa_pages), self.p), GARBAGE, np.int64)
        self.cache: dict[int, list[int | None]] = {}  # content of a page's last slot -> [full page, SWA page]
        self.owned: tuple[set[int], set[int]] = (set(), set())
        rng = random.Random(setup.seed)
        length = setup.context_tokens + 2
        self.families = [[rng.randrange(50) for _ in range(length)] for _ in range(3)]

    def committed(self, life: Life) -> int:
        return int(self.ledger.committed[life.row])

    # --- expectations -------------------------------------------------------------------------------------------

    def expected_bound(self, life, num_tokens, swa_table, was) -> int:
        if not self.setup.prefix_cache:
            return was
        bound = min(self.committed(life), num_tokens - (1 if self.setup.pair_keys else 0)) // self.p * self.p
        if bound <= was:
            return was
        if swa_table is not None:
            for page in range(max(0, bound - self.window) // self.p, bound // self.p):
                if swa_table[page] < 0:
                    self.events["boundary without a live window"] += 1
                    return was
        return bound

    def remember_published(self, life, was, bound, table, swa_table) -> None:
        for page in range(was // self.p, bound // self.p):
            key = int(life.tags[(page + 1) * self.p - 1])
            swa = int(swa_table[page]) if swa_table is not None and swa_table[page] >= 0 else None
            have = self.cache.get(key)
            if have is None:
                self.cache[key] = [int(table[page]), swa]
            elif have[1] is None and swa is not None:
                have[1] = swa
                self.events["heal"] += 1

    def expected_match(self, life: Life, num_tokens: int, read_from: int | None) -> int:
        """Longest reusable prefix (tokens), by trying every boundary from the longest down."""
        if not self.setup.prefix_cache:
            return 0
        have = []
        for page in range((num_tokens - 1) // self.p):
            entry = self.cache.get(int(life.tags[(page + 1) * self.p - 1]))
            if entry is None:
                break
            have.append(entry)
        for pages in range(len(have), 0, -1):
            start = max(0, pages * self.p - self.window) // self.p if read_from is None else min(pages, read_from)
            if not self.window or all(have[i][1] is not None for i in range(start, pages)):
                if pages < len(have):
                    self.events["match cut at a tombstone"] += 1
                return pages * self.p
        return 0

    # --- contents ----------------------------------------------------------------------------------------------

    def write(self, full_row, swa_row, start: int, tags: np.ndarray) -> None:
        self.write_into(self.full, full_row, start, tags)
        if swa_row is not None:
            self.write_into(self.swa, swa_row, start, tags)

    def write_into(self, store, table_row, start: int, tags: np.ndarray) -> None:
        positions = np.arange(start, start + len(tags))
        pages = table_row[positions // self.p]
        assert (pages >= 0).all(), "a write without a page"
        store[pages, positions % self.p] = tags

    def expect_content(self, life, full_row, swa_row, upto: int, swa_from: int, unrun: bool = False) -> None:
        """Positions below `upto` hold this request's KV, in the sliding layers from `swa_from` on."""
        if unrun:  # what is committed on the host has run on the device
            for step in self.steps:
                assert step.ran or all(s >= upto or x is not life for x, s in zip(step.lives, step.start, strict=True))
        for store, row, first in ((self.full, full_row, 0), (self.swa, swa_row, swa_from)):
            if row is None:
                continue
            positions = np.arange(first, upto)
            pages = row[positions // self.p]
            assert (pages >= 0).all(), "a query reads where there is no page"
            wrong = store[pages, positions % self.p] != life.tags[first:upto]
            assert not wrong.any(), f"foreign KV at position {first + int(wrong.argmax())} of row {life.row}"

    # --- verification ------------------------------------------------------------------------------------------

    def out_of_pages(self, error: Exception, before: tuple) -> None:
        self.events[f"out of {getattr(error, 'pool', 'rows')} pages"] += 1
        self.unchanged(before)

    def fingerprint(self) -> tuple:
        led = self.ledger
        lengths = tuple(
            x.tobytes() for x in (led.committed, led.known, led.allocated, led.protected, led.evicted, led.fill)
        )
        tables = (led.full_table.tobytes(), led.swa_table.tobytes() if self.window else b"")
        pools = (led.full_pool.state.tobytes(), led.swa_pool.state.tobytes() if led.swa_pool else b"")
        locks = (
            led.tree.swa_locks.tobytes(),
            led.tree.evictable_full,
            led.tree.evictable_swa,
            led.generation.tobytes(),
        )
        return lengths + tables + pools + locks

    def unchanged(self, before: tuple) -> None:
        assert self.fingerprint() == before, "law 11: a refused allocation changed something"

    def verify(self) -> None:
        broken = balance.check(self.ledger)
        assert not broken, broken
        self.forget_evicted()
        self.check_owners()

    def forget_evicted(self) -> None:
        """Cached pages that are cached no more leave the model's cache."""
        full, swa = self.ledger.full_pool, self.ledger.swa_pool
        for key in [k for k, (page, _) in self.cache.items() if full.state[page] != PageState.CACHED]:
            del self.cache[key]
            self.events["cached page evicted"] += 1
        for entry in self.cache.values():
            if entry[1] is not None and swa.state[entry[1]] != PageState.CACHED:
                entry[1] = None
                self.events["tombstone"] += 1

    def check_owners(self) -> None:
        """The slow books: every page has one owner, nothing that an operation names was given out again."""
        ledger, p = self.ledger, self.p
        own_full: dict[int, int] = {}
        own_swa: dict[int, int] = {}
        for life in self.lives:
            row = life.row
            protected, end = int(ledger.protected[row]) // p, int(ledger.allocated[row]) // p
            floor = int(ledger.evicted[row]) // p
            for column in range(end):
                if column < protected:
                    key = int(life.tags[(column + 1) * p - 1])
                    assert self.cache[key][0] == ledger.full_table[row, column], "a shared page is the cache's"
                else:
                    page = int(ledger.full_table[row, column])
                    assert page not in own_full, "one owner"
                    own_full[page] = row
                if self.window and column >= floor:
                    page = int(ledger.swa_table[row, column])
                    if column < protected:
                        assert self.cache[key][1] == page, "a shared SWA page is the cache's"
                    else:
                        assert page not in own_swa, "one owner"
                        own_swa[page] = row
        self.note_seen((own_full, own_swa))
        cached_full = {page for page, _ in self.cache.values()}
        cached_swa = {page for _, page in self.cache.values() if page is not None}
        self.check_pool(ledger.full_pool, own_full, cached_full, self.named(False), 0)
        if self.window:
            self.check_pool(ledger.swa_pool, own_swa, cached_swa, self.named(True), 1)

    def named(self, sliding: bool) -> set[int]:
        """Pages that undrained operations may still read or write."""
        pages: set[int] = set()
        for step in self.steps:
            table = step.swa if sliding else step.full
            for i, (start, end) in enumerate(zip(step.start, step.writes_until, strict=True)):
                first = max(0, start - self.window + 1) // self.p if sliding else 0
                pages.update(table[i, first : -(-end // self.p)].tolist())
        for r in self.readings:
            table = r.swa if sliding else r.full
            first = r.floor // self.p if sliding else 0
            pages.update(table[first : -(-r.upto // self.p)].tolist())
        for lease in [*self.leases, *self.poisoned]:
            table = lease.swa if sliding else lease.full
            first = lease.swa_first if sliding else lease.first
            pages.update(table[first // self.p : -(-lease.life.prompt // self.p)].tolist())
        return pages - {-1}

    def check_pool(self, pool, own: dict[int, int], cached: set[int], named: set[int], index: int) -> None:
        assert not set(own) & cached, "a page is the cache's and a request's"
        in_state = [set(np.flatnonzero(pool.state == s).tolist()) for s in range(5)]
        assert in_state[PageState.CACHED] == cached
        poisoned: set[int] = set()
        for lease in self.poisoned:
            table, first = (lease.swa, lease.swa_first) if index else (lease.full, lease.first)
            poisoned.update(table[first // self.p : -(-lease.life.prompt // self.p)].tolist())
        assert in_state[PageState.QUARANTINED] == poisoned
        leaving = (in_state[PageState.HELD] | in_state[PageState.LEASED]) - set(own)
        assert leaving <= named | self.kept(index), "a page is kept for nobody"
        assert set(own) <= in_state[PageState.HELD] | in_state[PageState.LEASED]
        assert not named & in_state[PageState.FREE], "law 14: an operation in flight names a free page"
        taken = set(own) - self.owned[index]
        for page in taken & named:
            assert self.named_by_row(page, own[page], index), "law 14: a page was given out while an operation named it"
        self.owned[index].clear()
        self.owned[index].update(own)
        assert sum(pool.counts) == pool.total
        if not self.lives and not self.steps and not self.readings and not self.leases:
            assert pool.free + len(cached) + len(poisoned) == pool.total, "pages leaked"
            self.events["at rest"] += 1

    def note_seen(self, own: tuple[dict[int, int], dict[int, int]]) -> None:
        """Every undrained operation keeps whatever its rows owned while it was in flight, and no more."""
        for operation in [*self.steps, *self.readings]:
            lives = operation.lives if isinstance(operation, Step) else [operation.life]
            rows = {x.row for x in lives if not x.gone}
            for seen, owners in zip(operation.seen, own, strict=True):
                seen.update(page for page, row in owners.items() if row in rows)

    def kept(self, index: int) -> set[int]:
        """Pages that an ended request, or a remapped one, may still keep."""
        pages: set[int] = set()
        for operation in [*self.steps, *self.readings]:
            pages |= operation.seen[index]
        return pages

    def named_by_row(self, page: int, row: int, index: int) -> bool:
        """The page is named by an operation of this very row (its own lease, or a step launched after it was taken)."""
        for step in self.steps:
            table = step.swa if index else step.full
            for i, life in enumerate(step.lives):
                if not life.gone and life.row == row and page in table[i].tolist():
                    return True
        return any(
            lease.row == row and not lease.life.gone and page in (lease.swa if index else lease.full).tolist()
            for lease in self.leases
        )
