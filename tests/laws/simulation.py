"""An engine without a model, for the laws: it drives a ledger as an engine would and keeps its own, slow books.

What it knows independently of the ledger
  contents   what every page slot of both pools holds. The KV of position i is a function of all tokens up to i (with
             pair keys up to i+1), so its content is a hash of that prefix; a reject is garbage. Steps, transfers and
             late writes go through the page tables as they were when the operation was launched.
  owners     a dict of page -> owner, rebuilt from the tables after every move
  cache      a dict of prefix hash -> page, instead of a radix tree

Every move ends in `verify`: all laws, and the ledger against these books.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from octavo.errors import OutOfPages
from octavo.kv import balance
from octavo.kv.ledger import Ledger, LedgerConfig, OutOfRows
from octavo.kv.pool import PageState
from octavo.kv.sizing import DecodeReserve, min_swa_pages

GARBAGE = -7


@dataclass(frozen=True)
class Setup:
    page_size: int
    window_tokens: int  # 0: no sliding layers
    overlap: bool
    pair_keys: bool = False
    spare_full_pages: int = 12
    spare_swa_pages: int = 3
    max_rows: int = 5
    prefix_cache: bool = True
    seed: int = 0

    @property
    def unit(self) -> int:
        return max(self.page_size, 4)

    @property
    def context_tokens(self) -> int:
        return 7 * self.unit + 3

    @property
    def chunk_tokens(self) -> int:
        return 2 * self.unit + 1

    def reserves(self) -> list[DecodeReserve]:
        o = self.overlap
        return [
            DecodeReserve.plain(overlap=o),
            DecodeReserve.eagle(steps=3, topk=1, draft_tokens=4, overlap=o),
            DecodeReserve.eagle(steps=3, topk=2, draft_tokens=8, overlap=o),
            DecodeReserve.dflash(block_size=6, overlap=o),
            DecodeReserve.ngram(max_draft=4, overlap=o),
        ]

    def most_accepted(self, reserve: DecodeReserve) -> int:
        """What one step may commit: the lag it would have under overlap."""
        accepted = {1: 1, 4: 4, 8: 4, 6: 6, 5: 5}
        return accepted[reserve.footprint]

    def config(self) -> LedgerConfig:
        largest = max(r.tokens for r in self.reserves())
        swa = 0
        if self.window_tokens:
            least = min_swa_pages(self.window_tokens, largest, self.chunk_tokens, self.page_size, overlap=self.overlap)
            swa = least + self.spare_swa_pages
        width = -(-(self.context_tokens + largest) // self.page_size)
        return LedgerConfig(
            page_size=self.page_size,
            full_pages=width + self.spare_full_pages * self.unit // self.page_size,
            swa_pages=swa,
            window_tokens=self.window_tokens,
            max_rows=self.max_rows,
            context_tokens=self.context_tokens,
            largest_reserve_tokens=largest,
            key_mode="pair" if self.pair_keys else "token",
            prefix_cache=self.prefix_cache,
            chunk_tokens=self.chunk_tokens,
            overlap=self.overlap,
        )


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


class Simulation:
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

    # --- requests ----------------------------------------------------------------------------------------------

    def new_life(self, rng: random.Random) -> Life:
        """A stream that follows one family and leaves it somewhere for another: prefixes are shared."""
        length = self.setup.context_tokens + 2
        first, second = rng.choice(self.families), rng.choice(self.families)
        at = rng.choice([rng.randrange(length), rng.randrange(0, length, self.p), length])
        stream = np.array(first[:at] + second[at:], np.int32)
        namespace = rng.choice([None, None, None, "lora"])
        tags, running = [], hash(namespace) & 0xFFFF
        for token in stream.tolist():
            running = hash((running, token)) & 0x7FFFFFFFFFFF
            tags.append(running)
        shift = 1 if self.setup.pair_keys else 0
        p, context = self.p, self.setup.context_tokens
        prompt = rng.choice([rng.randint(1, context - 1), p * rng.randint(1, 4) + rng.choice([-1, 0, 1])])
        return Life(stream, np.array(tags[shift:]), namespace, min(max(1, prompt), context - 1))

    def live(self, *, idle: bool = False) -> list[Life]:
        found = [x for x in self.lives if not x.gone and not x.fill]
        return [x for x in found if not x.steps] if idle else found

    def committed(self, life: Life) -> int:
        return int(self.ledger.committed[life.row])

    def tokens_known(self, life: Life) -> np.ndarray:
        """What the host knows of the stream: the prompt, and the token behind what is committed."""
        return life.stream[: max(life.prompt, self.committed(life) + 1)]

    # --- moves -------------------------------------------------------------------------------------------------

    def admit(self, rng: random.Random) -> None:
        life = self.waiting.pop(0) if self.waiting and rng.random() < 0.7 else self.new_life(rng)
        tokens = life.stream[: life.prompt]
        expected = self.expected_match(life, life.prompt, None)
        before = self.fingerprint()
        try:
            got = self.ledger.admit(tokens, namespace=life.namespace)
        except OutOfRows:
            self.events["out of rows"] += 1
            self.unchanged(before)
            return
        assert got.cached_tokens == expected, (got, expected)
        life.row, life.generation = got.row, got.generation
        life.device = life.known = got.cached_tokens
        life.gone, life.fill, life.steps = False, 0, []
        if got.cached_tokens:
            self.events["prefix hit"] += 1
        self.lives.append(life)

    def extend(self, rng: random.Random) -> None:
        """Launch a prefill chunk. With overlap it may follow another one that is still in flight."""
        limit = 2 if self.setup.overlap else 1
        ready = [x for x in self.live() if x.known < x.prompt and len(x.steps) < limit]
        if not ready:
            return
        life = rng.choice(ready)
        upto = min(
            life.prompt,
            life.known + rng.choice([1, self.p, self.setup.chunk_tokens, rng.randint(1, self.setup.chunk_tokens)]),
        )
        upto = max(upto, life.known + 1)
        before = self.fingerprint()
        try:
            self.ledger.extend(life.row, upto)
        except OutOfPages as error:
            self.out_of_pages(error, before)
            return
        start, life.known, life.device = life.known, upto, upto
        self.launch([life], [start], [upto], [upto], is_chunk=True)

    def decode(self, rng: random.Random) -> None:
        """Plan and launch a decode step of some rows. With overlap one step may be in flight already."""
        limit = 2 if self.setup.overlap else 1
        top = self.setup.context_tokens
        ready = [x for x in self.live() if x.known >= x.prompt and len(x.steps) < limit and x.device < top]
        if not ready:
            return
        lives = rng.sample(ready, rng.randint(1, len(ready)))
        reserve = rng.choice(self.setup.reserves())
        rows = [x.row for x in lives]
        before, allocated = self.fingerprint(), self.ledger.allocated[rows].tolist()
        try:
            plan = self.ledger.plan_decode(rows if rng.random() < 0.5 else np.array(rows), reserve)
        except OutOfPages as error:
            self.out_of_pages(error, before)
            return
        self.check_plan(lives, plan, allocated, reserve)
        starts, commits, writes = [], [], []
        for life in lives:
            accepted = rng.randint(1, self.setup.most_accepted(reserve))
            accepted = max(1, min(accepted, top - life.device))
            starts.append(life.device)
            writes.append(life.device + reserve.footprint)
            life.device += accepted
            commits.append(life.device)
            if any(s.is_chunk and s.op in life.steps for s in self.steps):
                self.events["first decode plan behind a prefill chunk in flight"] += 1
            life.last_reserve = reserve.tokens
        self.launch(lives, starts, commits, writes, is_chunk=False)

    def check_plan(self, lives, plan, allocated, reserve) -> None:
        needed = 0
        for life, have, current, after in zip(lives, allocated, plan.current, plan.next, strict=True):
            known = max(life.known, self.committed(life))
            want = max(have, -(-(known + reserve.tokens) // self.p) * self.p)
            assert (have, want) == (int(current), int(after))
            assert int(self.ledger.allocated[life.row]) == want
            assert want - max(known, have - reserve.tokens - self.p) <= max(have, reserve.tokens + self.p)
            needed += want - have
            if reserve.tokens < life.last_reserve and want == have:
                self.events["down-switch"] += 1
        assert needed == plan.needed_tokens

    def launch(self, lives, starts, commits, writes, *, is_chunk: bool) -> None:
        rows = [x.row for x in lives]
        for life, end in zip(lives, writes, strict=True):
            assert end <= self.ledger.allocated[life.row], "law 9: the step would write behind the watermark"
            assert end <= self.ledger.width_tokens, "law 10"
        op = self.ledger.begin_op(rows, "step")
        swa = self.ledger.swa_table[rows].copy() if self.window else None
        self.steps.append(
            Step(op, lives, [x.generation for x in lives], starts, commits, writes, self.ledger.full_table[rows].copy(),
                 swa, is_chunk=is_chunk)
        )  # fmt: skip
        for life in lives:
            life.steps.append(op)

    def run_device(self, rng: random.Random) -> None:
        """The device runs the oldest launched step that has not run."""
        step = next((s for s in self.steps if not s.ran), None)
        if step is not None:
            self.execute(step)

    def execute(self, step: Step) -> None:
        for i, life in enumerate(step.lives):
            swa = step.swa[i] if step.swa is not None else None
            start, end = step.start[i], step.writes_until[i]
            self.expect_content(life, step.full[i], swa, start, max(0, start - self.window + 1))
            tags = np.full(end - start, GARBAGE, np.int64)
            good = min(step.commits[i], len(life.tags)) - start
            tags[:good] = life.tags[start : start + good]
            self.write(step.full[i], swa, start, tags)
        step.ran = True

    def settle(self, rng: random.Random) -> None:
        """The host processes the oldest step: drain, commit, publish, evict, in either order of the first two."""
        if not self.steps:
            return
        step = self.steps.pop(0)
        if not step.ran:
            self.execute(step)
        rows = [x.row for x in step.lives]
        current = [not x.gone and x.generation == g for x, g in zip(step.lives, step.generations, strict=True)]
        drain_first = rng.random() < 0.5
        if drain_first:
            self.ledger.end_op(step.op)
        applied = self.ledger.commit(rows, step.generations, step.commits)
        assert applied.tolist() == current
        if not drain_first:
            self.ledger.end_op(step.op)
        self.events["stale commit"] += current.count(False)
        for life, live, upto in zip(step.lives, current, step.commits, strict=True):
            if step.op in life.steps:
                life.steps.remove(step.op)
            if live:
                assert self.committed(life) == upto
                life.known = max(life.known, upto)
                if rng.random() < 0.4:
                    self.publish_one(life)
        live_rows = [x.row for x, ok in zip(step.lives, current, strict=True) if ok]
        if rng.random() < 0.8:
            self.evict_rows(live_rows)

    def publish(self, rng: random.Random) -> None:
        if ready := self.live():
            self.publish_one(rng.choice(ready))

    def publish_one(self, life: Life, cut: int = 0) -> None:
        tokens = self.tokens_known(life)
        tokens = tokens[: max(1, len(tokens) - cut)]
        row = life.row
        floor, was = int(self.ledger.evicted[row]), int(self.ledger.protected[row])
        table = self.ledger.full_table[row].copy()
        swa_table = self.ledger.swa_table[row].copy() if self.window else None
        bound = self.expected_bound(life, len(tokens), swa_table, was)
        self.remember_published(life, was, bound, table, swa_table)
        got = self.ledger.publish(row, tokens)
        assert got == bound == int(self.ledger.protected[row]), (got, bound)
        if bound > was and self.window and max(0, bound - self.window) // self.p * self.p == floor > 0:
            self.events["eviction at the insert boundary"] += 1
        if (self.ledger.full_table[row] != table).any():
            self.events["remap of a duplicate"] += 1

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

    def evict(self, rng: random.Random) -> None:
        ready = self.live()
        if ready:
            self.evict_rows([x.row for x in rng.sample(ready, rng.randint(1, len(ready)))])

    def evict_rows(self, rows: list[int]) -> None:
        self.ledger.evict(rows)
        for row in rows:
            n = int(self.ledger.committed[row])
            if self.window:
                want = max(0, n // self.p * self.p - self.window) // self.p * self.p
                assert int(self.ledger.evicted[row]) >= want
                if want:
                    self.events["sliding eviction"] += 1

    # --- ways out ----------------------------------------------------------------------------------------------

    def finish(self, rng: random.Random) -> None:
        """A stop: published up to it, sometimes cut before what is committed."""
        ready = [x for x in self.live() if self.committed(x)]
        if not ready:
            return
        life = rng.choice(ready)
        cut = rng.choice([0, 0, 1, 2, self.p])
        tokens = self.tokens_known(life)
        tokens = tokens[: max(1, len(tokens) - cut)]
        self.publish_one(life, cut)
        self.leave(life, tokens)

    def abort(self, rng: random.Random) -> None:
        if ready := self.live():
            life = rng.choice(ready)
            if life.steps:
                self.events["abort in flight"] += 1
            self.leave(life, None)

    def retract(self, rng: random.Random) -> None:
        """Give a row back and queue the request again with the tokens the host knows."""
        ready = [x for x in self.live() if self.committed(x)]
        if not ready:
            return
        life = rng.choice(ready)
        if life.steps:
            self.events["retract in flight"] += 1
        tokens = self.tokens_known(life)
        self.publish_one(life)
        again = Life(life.stream, life.tags, life.namespace, min(len(tokens), self.setup.context_tokens - 1))
        self.leave(life, tokens)
        self.waiting.append(again)

    def leave(self, life: Life, tokens: np.ndarray | None) -> None:
        self.ledger.release(life.row, tokens)
        life.gone = True
        self.lives.remove(life)

    # --- transfers ---------------------------------------------------------------------------------------------

    def preallocate(self, rng: random.Random) -> None:
        life = self.new_life(rng)
        fill = rng.randint(1, life.prompt)
        start = max(0, fill - self.window) // self.p * self.p if self.window else 0
        expected = self.expected_match(life, fill, start // self.p if self.window else None)
        before = self.fingerprint()
        try:
            got = self.ledger.preallocate(life.stream[: life.prompt], fill, namespace=life.namespace)
        except (OutOfPages, OutOfRows) as error:
            self.out_of_pages(error, before)
            return
        assert (got.cached_tokens, got.tail_start_tokens) == (expected, start), (got, expected, start)
        life.row, life.generation, life.fill = got.row, got.generation, fill
        life.device = life.known = fill
        life.prompt = fill
        self.lives.append(life)
        swa = self.ledger.swa_table[got.row].copy() if self.window else None
        self.leases.append(
            Lease(
                life,
                got.row,
                got.generation,
                expected,
                max(expected, start),
                self.ledger.full_table[got.row].copy(),
                swa,
            )
        )

    def land(self, rng: random.Random) -> None:
        if not self.leases:
            return
        lease = self.leases.pop(rng.randrange(len(self.leases)))
        life = lease.life
        self.transfer_writes(lease, life.tags[: life.prompt])
        landed = self.ledger.land(lease.row, lease.generation)
        assert landed == (not life.gone)
        self.events["landed" if landed else "landed after the end"] += 1
        if landed:
            life.fill = 0
        assert not self.ledger.land(lease.row, lease.generation), "a landing counts once"

    def transfer_writes(self, lease: Lease, tags: np.ndarray) -> None:
        self.write_into(self.full, lease.full, lease.first, tags[lease.first :])
        if lease.swa is not None:
            self.write_into(self.swa, lease.swa, lease.swa_first, tags[lease.swa_first :])

    def abort_transfer(self, rng: random.Random) -> None:
        ready = [x for x in self.lives if x.fill and not x.gone]
        if ready:
            self.leave(rng.choice(ready), None)

    def late_write(self, rng: random.Random) -> None:
        """A transfer that is not final writes anything at any time, whatever became of its request."""
        for lease in [*self.leases, *self.poisoned]:
            end = max(lease.life.prompt, lease.first)
            self.transfer_writes(lease, np.full(end, GARBAGE, np.int64))
            if lease.life.gone:
                self.events["late write on a lease"] += 1

    def fail_transfer(self, rng: random.Random) -> None:
        if not self.leases:
            return
        lease = self.leases.pop(rng.randrange(len(self.leases)))
        outcome = rng.choice(["final", "unknown", "never"])
        self.events[f"transfer failed, status {outcome}"] += 1
        if outcome == "never":
            assert self.ledger.quarantine(lease.row, lease.generation) >= 1
            self.poisoned.append(lease)
        else:
            assert self.ledger.fail_transfer(lease.row, lease.generation, final=outcome == "final")
            if outcome == "unknown":
                self.leases.append(lease)
        if not lease.life.gone:
            lease.life.gone = True
            self.lives.remove(lease.life)

    def restart_endpoint(self, rng: random.Random) -> None:
        if self.poisoned:
            assert self.ledger.end_quarantine() > 0
            self.poisoned.clear()
            self.events["quarantine ended"] += 1

    def read_out(self, rng: random.Random) -> None:
        """A peer starts to read a row's pages, or a tier to back them up."""
        ready = [x for x in self.live() if self.committed(x)]
        if ready and len(self.readings) < 3:
            life = rng.choice(ready)
            op = self.ledger.begin_op([life.row], rng.choice(["transfer", "backup", "load"]))
            swa = self.ledger.swa_table[life.row].copy() if self.window else None
            floor = int(self.ledger.evicted[life.row])
            self.readings.append(
                Reading(op, life, self.committed(life), floor, self.ledger.full_table[life.row].copy(), swa)
            )

    def end_reading(self, rng: random.Random) -> None:
        if self.readings:
            r = self.readings.pop(rng.randrange(len(self.readings)))
            self.expect_content(r.life, r.full, r.swa, r.upto, r.floor, unrun=True)
            self.ledger.end_op(r.op)
            if r.life.gone:
                self.events["late read of a row that ended"] += 1

    def reset_cache(self, rng: random.Random) -> None:
        if rng.random() < 0.1:
            self.ledger.reset_cache()
            self.events["cache reset"] += 1

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
        in_state = [set(np.flatnonzero(pool.state == s).tolist()) for s in PageState]
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

    # --- driving -----------------------------------------------------------------------------------------------

    MOVES = (
        ("admit", 10), ("extend", 14), ("decode", 18), ("run_device", 6), ("settle", 22), ("publish", 3), ("evict", 3),
        ("finish", 4), ("abort", 2), ("retract", 2), ("preallocate", 3), ("land", 3), ("abort_transfer", 1),
        ("late_write", 2), ("fail_transfer", 1), ("restart_endpoint", 1), ("read_out", 2), ("end_reading", 2),
        ("reset_cache", 1),
    )  # fmt: skip

    def move(self, name: str, rng: random.Random) -> None:
        self.events[f"rule {name}"] += 1
        getattr(self, name)(rng)
        self.verify()

    def run(self, moves: int, rng: random.Random) -> None:
        names = [name for name, _ in self.MOVES]
        weights = [weight for _, weight in self.MOVES]
        for name in rng.choices(names, weights, k=moves):
            self.move(name, rng)
        self.drain(rng)

    def drain(self, rng: random.Random) -> None:
        """Let everything come to rest; then nothing may be held."""
        while self.steps:
            self.move("settle", rng)
        while self.readings:
            self.move("end_reading", rng)
        while self.leases:
            self.move("land", rng)
        for life in list(self.lives):
            self.leave(life, None)
            self.verify()
        self.restart_endpoint(rng)
        self.verify()
        assert not balance.check(self.ledger, at_rest=True)


def covering_setups(seed: int = 0) -> list[Setup]:
    """Every page size with and without overlap, sliding windows shorter and longer than a page, both key modes."""
    setups = []
    for p in (1, 16, 64, 256):
        windows = [0, {1: 5, 16: 40, 64: 50, 256: 200}[p], {1: 9, 16: 16, 64: 130, 256: 300}[p]]
        for i, window in enumerate(windows):
            for overlap in (False, True):
                pair = (i + overlap) % 2 == 1
                setups.append(Setup(p, window, overlap, pair_keys=pair, seed=seed + len(setups)))
    return setups
