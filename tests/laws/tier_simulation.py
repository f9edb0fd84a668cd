"""An engine with a host tier and without a model: it drives the books move by move, beside a slow obvious model.

The model keeps what every host page and every SWA page holds (a tag per position, a hash of all tokens up to it),
which positions a dense pass wrote, and counts budgets anew after every move.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from octavo.errors import OutOfPages
from octavo.kv import balance
from octavo.kv.ledger import Ledger, LedgerConfig, OutOfRows
from octavo.kv.node import Node
from octavo.kv.sizing import full_budget_pages
from octavo.kv.tiered_pool import TieredPool
from octavo.kv.tiers import Ticket, TierConfig, path_of

RESERVE = 6
CONTEXT = 70


@dataclass(eq=False)
class Life:
    stream: list[int]
    prompt: int
    last: int  # tokens it will have at its end
    row: int = -1
    generation: int = 0
    device: int = 0
    dense: list[bool] = field(default_factory=list)  # by position: written by a dense pass
    promised: bool = False
    ticket: Ticket | None = None
    window: dict[int, list[int | None]] = field(default_factory=dict)  # of a ticket: SWA pages copied, by column
    step: tuple[int, int] | None = None  # an undrained step: (operation, what it commits)
    lease: bool = False

    @cached_property
    def tags(self) -> list[int]:
        return [hash(tuple(self.stream[: i + 1])) for i in range(len(self.stream))]


class TierSimulation:
    MOVES = (
        ("admit", 5), ("extend", 8), ("decode", 14), ("settle", 16), ("begin_backup", 10), ("drain_backup", 10),
        ("publish", 6), ("finish", 1), ("abort", 1), ("retract", 4), ("resume", 4), ("drop_ticket", 1),
        ("preallocate", 3), ("land", 4), ("fail_transfer", 1), ("refused_backup", 3), ("reset_cache", 1),
    )  # fmt: skip
    # Requests with a common beginning that are often retracted, while few logical pages are there
    PRESSED = {
        "admit": 14, "extend": 40, "settle": 60, "begin_backup": 30, "drain_backup": 50, "publish": 24, "retract": 2,
        "preallocate": 1, "refused_backup": 0, "drop_ticket": 1, "finish": 4, "resume": 16,
    }  # fmt: skip

    def __init__(
        self, seed: int, *, page_size: int = 4, host: int = 40, full: int = 30, slots: int = 24, pressed: bool = False
    ) -> None:
        self.rng = random.Random(seed)
        self.pressed = pressed
        self.p, self.promising = page_size, (0.7, 0.1)[seed % 5 == 0]
        self.tiers = TierConfig(host, slots, device_pages=6, topk_pages=1, recent_tokens=8)
        window = 10 * pressed or self.rng.choice([0, 0, 10])
        self.ledger = Ledger(
            LedgerConfig(
                page_size=page_size, full_pages=full, max_rows=6, context_tokens=CONTEXT,
                largest_reserve_tokens=RESERVE, window_tokens=window, tiers=self.tiers,
                swa_pages=(self.rng.choice([60, 16]), 14)[pressed] if window else 0,
            )
        )  # fmt: skip
        self.swa: list[list[int | None]] = [[None] * page_size for _ in range(60)]
        self.dense_limit = max(0, 6 * page_size - 8)
        self.host: list[list[int | None]] = [[None] * page_size for _ in range(host)]
        self.lives: list[Life] = []
        self.tickets: list[Life] = []
        self.backups: dict[int, tuple[list[Life], list[int], list[tuple[Life, int, int]]]] = {}
        self.families = [[self.rng.randrange(50) for _ in range(CONTEXT)] for _ in range(2)]
        self.events: Counter[str] = Counter()

    # -- moves --

    def new_life(self) -> Life:
        at, (a, b) = self.rng.randrange(CONTEXT), self.rng.choices(self.families, k=2)
        if self.pressed:
            a, at = self.families[0], self.rng.randrange(12, CONTEXT, 8)
            b = [self.rng.randrange(50) for _ in range(CONTEXT)]
        prompt = self.rng.randint(1, CONTEXT - 20)
        return Life(a[:at] + b[at:], prompt, self.rng.randint(prompt + 1, CONTEXT))

    def budget(self, life: Life) -> int:
        return full_budget_pages(life.prompt, life.last - life.prompt, CONTEXT, RESERVE, self.p)

    def admit(self) -> None:
        life = self.new_life()
        life.promised = self.rng.random() < self.promising
        try:
            got = self.ledger.admit(life.stream[: life.prompt], budget_pages=self.budget(life) * life.promised)
        except OutOfPages as short:
            self.events[f"admit: out of {short.pool}"] += 1
            return
        except OutOfRows:
            return
        life.row, life.generation, life.device = got.row, got.generation, got.cached_tokens
        life.dense = [True] * got.cached_tokens
        self.events["prefix hit"] += got.cached_tokens > 0
        self.lives.append(life)

    def ready(self, *, idle: bool = False) -> list[Life]:
        return [x for x in self.lives if not x.lease and (x.step is None or not idle)]

    def extend(self) -> None:
        if not (ready := [x for x in self.ready(idle=True) if x.device < x.prompt]):
            return
        life = self.rng.choice(ready)
        upto = min(life.prompt, life.device + self.rng.randint(1, 9))
        if self.grow(life, lambda: self.ledger.extend(life.row, upto)):
            life.dense += [True] * (upto - life.device)
            self.slide(life, life.device, upto)
            life.device = upto
            life.step = (self.ledger.begin_op([life.row]), upto)

    def decode(self) -> None:
        ready = [x for x in self.ready(idle=True) if x.prompt <= x.device < x.last - 1]
        if not ready:
            return
        life = self.rng.choice(ready)
        if self.grow(life, lambda: self.ledger.plan_decode([life.row], RESERVE)):
            upto = min(life.last - 1, life.device + self.rng.randint(1, 3))
            life.dense += [q + 1 <= self.dense_limit for q in range(life.device, upto)]
            self.slide(life, life.device, upto)
            life.device = upto
            life.step = (self.ledger.begin_op([life.row]), upto)

    def grow(self, life: Life, call) -> bool:
        """An allocation. A promised request never finds the host tier full, and logical pages are short only because
        rows hold them: nothing else keeps any."""
        try:
            call()
        except OutOfPages as short:
            self.events[f"grow: out of {short.pool}"] += 1
            assert short.pool != "host" or not life.promised
            assert short.pool != "full" or short.needed_pages > self.tiers_pool.total - len(self.in_rows()) - self.aside
            return self.pressed and short.pool == "full" and self.retract_another(life) and self.grow(life, call)
        return True

    def retract_another(self, life: Life) -> bool:
        """As a scheduler does it. Its pages are shared first."""
        for other in [x for x in self.retractable() if x is not life]:
            self.publish_one(other)
            self.retract_one(other)
            self.verify()
            return True
        return False

    def settle(self) -> None:
        if ready := [x for x in self.lives if x.step is not None]:
            life = self.rng.choice(ready)
            op, upto = life.step
            life.step = None
            assert self.ledger.commit([life.row], [life.generation], [upto])[0]
            self.ledger.end_op(op)
            self.ledger.evict([life.row])

    def begin_backup(self) -> None:
        if not (ready := self.ready()):
            return
        lives = self.rng.sample(ready, self.rng.randint(1, len(ready)))
        backup = self.ledger.begin_backup([x.row for x in lives])
        if backup is None:
            return
        by_row = {x.row: x for x in lives}
        copies = [
            (by_row[int(r)], int(c), self.page(int(r), int(c)))
            for r, c in zip(backup.rows, backup.columns, strict=True)
        ]
        for life, column, _ in copies:
            assert (column + 1) * self.p <= int(self.ledger.committed[life.row])
        self.backups[backup.op] = (lives, [x.generation for x in lives], copies)

    def drain_backup(self) -> None:
        """The copies happen, whatever became of the requests: their pages are still nobody else's (law 14)."""
        if self.backups:
            op = self.rng.choice(list(self.backups))
            for life, column, page in self.backups.pop(op)[2]:
                self.write(page, life, column)
            self.ledger.end_backup(op)
            self.events["backup drained"] += 1

    def refused_backup(self) -> None:
        """Its rows stay as they were."""
        if self.backups:
            op = self.rng.choice(list(self.backups))
            was = self.ledger.tiers.backed.copy()
            self.backups.pop(op)
            self.ledger.end_backup(op, written=False)
            assert (self.ledger.tiers.backed <= was).all()  # a row that closed now has none
            self.events["backup refused"] += 1

    def publish(self) -> None:
        if ready := self.ready():
            self.publish_one(self.rng.choice(ready))

    def publish_one(self, life: Life) -> None:
        known = life.stream[: max(life.prompt, int(self.ledger.committed[life.row]) + 1)]
        offloaded = self.offloaded()
        bound = self.ledger.publish(life.row, known)
        self.events["put back"] += self.offloaded() < offloaded
        assert all(life.dense[:bound]), "only what a dense pass wrote is shared"
        assert bound <= int(self.ledger.tiers.backed[life.row]) * self.p
        if life.dense and not all(life.dense) and bound:
            self.events["published below a sparse part"] += 1

    def finish(self) -> None:
        if ready := self.ready(idle=True):
            life = self.rng.choice(ready)
            self.publish_one(life)
            self.leave(life)

    def abort(self) -> None:
        if ready := self.lives:
            life = self.rng.choice(ready)
            self.events["abort in flight"] += life.step is not None
            self.events["abort during a backup"] += any(life in lives for lives, _, _ in self.backups.values())
            op = life.step
            self.leave(life)
            if op is not None:
                self.verify()
                self.ledger.end_op(op[0])

    def leave(self, life: Life) -> None:
        lease = life.lease
        self.ledger.release(life.row)
        self.lives.remove(life)
        if lease:
            assert self.ledger.fail_transfer(life.row, life.generation)

    def retractable(self) -> list[Life]:
        busy = {x for lives, _, _ in self.backups.values() for x in lives}
        return [x for x in self.ready(idle=True) if x.device >= x.prompt and x not in busy]

    def retract(self) -> None:
        if ready := self.retractable():
            self.retract_one(self.rng.choice(ready))

    def retract_one(self, life: Life) -> None:
        first, last = self.ledger.unbacked(life.row)
        for column in range(first, last):
            self.write(self.page(life.row, column), life, column)
        life.window = self.window_of(life)
        life.ticket = self.ledger.retract(life.row)
        life.row = -1
        self.lives.remove(life)
        self.tickets.append(life)
        self.events["retracted"] += 1
        self.events["retracted with shared pages"] += life.ticket.node.end_page > 0

    def resume(self) -> None:
        if not self.tickets:
            return
        life = self.rng.choice(self.tickets)
        path = path_of(life.ticket)
        there = {int(x) for node in path for x in node.full if x >= 0}
        gone = sum(node.num_pages for node in path if node.host is not None)
        available, takes = self.ledger.available("logical"), self.ledger.tiers.pages_to_resume(life.ticket)
        try:
            got = self.ledger.preallocate(life.stream, life.device, host=True, ticket=life.ticket)
        except OutOfPages as short:
            self.events[f"resume: out of {short.pool}"] += 1
            assert short.pool != "host", "its host pages are there"
            if short.pool == "full":
                assert takes > available
                assert short.needed_pages == len(life.ticket.host) + gone
                held = self.in_rows() | there
                assert short.needed_pages > self.tiers_pool.total - len(held) - self.aside
            return
        except OutOfRows:
            return
        assert takes <= available
        self.tickets.remove(life)
        life.row, life.generation, life.ticket = got.row, got.generation, None
        shared = int(self.ledger.protected[got.row]) // self.p
        assert got.cached_tokens == (shared - gone) * self.p
        self.events["loaded back"] += gone > 0
        self.events["window healed"] += len(got.healed_columns) > 0
        self.restore(life, shared, got.healed_columns)
        self.verify()
        assert self.ledger.land(life.row, life.generation)
        self.lives.append(life)
        self.events["resumed"] += 1

    def drop_ticket(self) -> None:
        if self.tickets:
            life = self.tickets.pop(self.rng.randrange(len(self.tickets)))
            offloaded = self.offloaded()
            self.ledger.drop_ticket(life.ticket)
            self.events["offloaded pages dropped"] += self.offloaded() < offloaded
            self.events["ticket dropped"] += 1

    def preallocate(self) -> None:
        life = self.new_life()
        life.promised = self.rng.random() < self.promising
        try:
            got = self.ledger.preallocate(
                life.stream[: life.prompt], life.prompt, host=True, budget_pages=self.budget(life) * life.promised
            )
        except OutOfPages as short:
            self.events[f"preallocate: out of {short.pool}"] += 1
            return
        except OutOfRows:
            return
        life.row, life.generation, life.lease = got.row, got.generation, True
        life.device, life.dense = life.prompt, [True] * life.prompt
        assert not self.ledger.tiers.has_slots(life.row), "slots come after success"
        for column in range(got.cached_tokens // self.p, -(-life.prompt // self.p)):
            self.write(self.page(life.row, column), life, column)
        self.slide(life, max(got.cached_tokens, got.tail_start_tokens), life.prompt)
        self.lives.append(life)

    def land(self) -> None:
        if ready := [x for x in self.lives if x.lease]:
            life = self.rng.choice(ready)
            try:
                assert self.ledger.land(life.row, life.generation)
            except OutOfPages as short:
                assert short.pool == "slots"
                self.events["land: out of slots"] += 1
                return
            life.lease = False
            self.events["landed"] += 1

    def fail_transfer(self) -> None:
        if ready := [x for x in self.lives if x.lease]:
            life = self.rng.choice(ready)
            assert self.ledger.fail_transfer(life.row, life.generation)
            self.lives.remove(life)

    def reset_cache(self) -> None:
        self.ledger.reset_cache()

    # -- the model --

    @property
    def tiers_pool(self) -> TieredPool:
        return self.ledger.tiers.pool

    @property
    def aside(self) -> int:
        return sum(len(entry.full) for entry in self.ledger.inflight.aside)

    def nodes(self) -> list[Node]:
        return self.ledger.tree.nodes()

    def offloaded(self) -> int:
        return sum(len(node.host) for node in self.nodes() if node.host is not None)

    def in_rows(self) -> set[int]:
        return {int(x) for row in self.ledger.live_rows() for x in self.ledger.full_table[row] if x >= 0}

    def slide(self, life: Life, first: int, last: int) -> None:
        """A step, or a transfer, writes the SWA KV of positions [first, last)."""
        if self.ledger.swa_table is not None:
            for at in range(first, last):
                page = int(self.ledger.swa_table[life.row, at // self.p])
                assert page >= 0
                self.swa[page][at % self.p] = life.tags[at]

    def window_of(self, life: Life) -> dict[int, list[int | None]]:
        if self.ledger.swa_table is None:
            return {}
        columns = range(int(self.ledger.evicted[life.row]) // self.p, -(-life.device // self.p))
        return {column: list(self.swa[int(self.ledger.swa_table[life.row, column])]) for column in columns}

    def restore(self, life: Life, shared: int, healed: tuple[int, ...]) -> None:
        """The copied window comes back: the row's own pages, and of the shared ones those alone that had gone."""
        if self.ledger.swa_table is not None:
            floor = int(self.ledger.evicted[life.row]) // self.p
            assert all(floor <= column < shared for column in healed)
            for column in [*healed, *range(max(floor, shared), -(-life.device // self.p))]:
                self.swa[int(self.ledger.swa_table[life.row, column])] = list(life.window[column])

    def page(self, row: int, column: int) -> int:
        logical = int(self.ledger.full_table[row, column])
        assert logical >= 0
        return int(self.ledger.tiers.pool.host_of[logical])

    def write(self, host_page: int, life: Life, column: int) -> None:
        tags = life.tags[: life.device][column * self.p : (column + 1) * self.p]
        self.host[host_page] = [*tags, *[None] * (self.p - len(tags))]

    def expect(self, host_page: int, life: Life, column: int, tokens: int) -> None:
        first = column * self.p
        for at in range(first, min(first + self.p, tokens)):
            assert self.host[host_page][at - first] == life.tags[at], (life.row, column)

    def verify(self) -> None:
        broken = balance.check(self.ledger)
        assert not broken, broken
        tiers = self.ledger.tiers
        for life in self.lives:
            if not life.lease:
                for column in range(int(tiers.backed[life.row])):
                    self.expect(self.page(life.row, column), life, column, life.device)
                if self.ledger.swa_table is not None:
                    for at in range(int(self.ledger.evicted[life.row]), life.device):
                        page = int(self.ledger.swa_table[life.row, at // self.p])
                        assert self.swa[page][at % self.p] == life.tags[at], (life.row, at)
        for life in self.tickets:
            needed = tiers.host_pages_of(life.ticket).tolist()
            assert len(needed) == -(-life.device // self.p)
            for column, host_page in enumerate(needed):
                self.expect(host_page, life, column, life.device)
        # Budgets, counted anew. A row that has ended keeps its slots until the last operation drains.
        cached = {int(x) for node in self.nodes() if node.host is None for x in node.full}
        on_device = len(self.in_rows() | cached) + self.aside
        assert tiers.pool.total - tiers.pool.free == on_device
        parted = sum(len(life.ticket.host) for life in self.tickets) + self.offloaded()
        assert tiers.pool.host.total - tiers.pool.host.free == on_device + parted
        with_slots = int(sum(tiers.has_slots(row) for row in range(6)))
        assert tiers.slots.total - tiers.slots.free == with_slots * self.tiers.device_pages

    def run(self, moves: int) -> None:
        weights = dict(self.MOVES) | (self.PRESSED if self.pressed else {})
        names = [name for name, weight in weights.items() for _ in range(weight)]
        for _ in range(moves):
            name = self.rng.choice(names)
            self.events[f"rule {name}"] += 1
            before = self.ledger.tree.offloaded_pages
            getattr(self, name)()
            self.events["offloaded"] += self.ledger.tree.offloaded_pages > before
            self.events["offloaded from several"] += any(n.host is not None and n.kept > 1 for n in self.nodes())
            self.verify()
        self.drain()

    def drain(self) -> None:
        for life in list(self.lives):
            op = life.step
            self.leave(life)
            if op is not None:
                self.ledger.end_op(op[0])
        while self.backups:
            self.drain_backup()
        while self.tickets:
            self.drop_ticket()
        self.verify()
        self.ledger.reset_cache()
        assert not balance.check(self.ledger, at_rest=True)
        tiers = self.ledger.tiers
        assert (tiers.pool.host.free, tiers.slots.free) == (tiers.pool.host.total, tiers.slots.total)
        assert np.all(tiers.row_slots == -1) and np.all(tiers.pool.host_of == -1)
