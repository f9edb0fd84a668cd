"""An engine without a model, for the laws: it drives a ledger as an engine would, move by move.

Every move ends in `verify`: all laws, and the ledger against the slow books.
"""

from __future__ import annotations

import random

import numpy as np

from octavo.errors import OutOfPages
from octavo.kv import balance
from octavo.kv.ledger import OutOfRows
from octavo.kv.sizing import DecodeReserve, reserve_tokens
from tests.laws.slow_books import GARBAGE, Lease, Life, Reading, SlowBooks, Step


class Simulation(SlowBooks):
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

    def live(self) -> list[Life]:
        return [x for x in self.lives if not x.gone and not x.fill]

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
        step = rng.choice(self.setup.reserves())
        # A switch of algorithm or draft length: the lag is that of the step in flight, whatever comes next.
        lag = max([step.commit_lag, *(x.lag for x in lives if x.steps)])
        reserve = rng.choice([step.footprint + lag, self.config.largest_reserve_tokens, self.constant(lag, step)])
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
            accepted = rng.randint(1, self.setup.most_accepted(step))
            accepted = max(1, min(accepted, top - life.device))
            starts.append(life.device)
            writes.append(life.device + step.footprint)
            life.device += accepted
            commits.append(life.device)
            if any(s.is_chunk and s.op in life.steps for s in self.steps):
                self.events["first decode plan behind a prefill chunk in flight"] += 1
            life.last_reserve, life.lag = reserve_tokens(reserve), step.commit_lag
        self.launch(lives, starts, commits, writes, is_chunk=False)

    def constant(self, lag: int, step: DecodeReserve) -> DecodeReserve | int:
        """A typed reserve where it covers the step in flight, as an engine that never switches passes it."""
        return step if step.commit_lag == lag else step.footprint + lag

    def check_plan(self, lives, plan, allocated, reserve) -> None:
        needed, tokens = 0, reserve_tokens(reserve)
        for life, have, current, after in zip(lives, allocated, plan.current, plan.next, strict=True):
            known = max(life.known, self.committed(life))
            want = max(have, -(-(known + tokens) // self.p) * self.p)
            assert (have, want) == (int(current), int(after))
            assert int(self.ledger.allocated[life.row]) == want
            assert want == have or want - known <= tokens + self.p - 1
            needed += want - have
            if tokens < life.last_reserve and want == have:
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
            self.publish_one(rng.choice(ready), cut=rng.choice([0, 0, 1, self.p]))

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
        cut = rng.choice([0, 0, 1, 2, self.p, self.p + 1])
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
            if rng.random() < 0.7:
                self.publish_one(life)
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
        if rng.random() < 0.3:
            self.ledger.reset_cache()
            self.events["cache reset"] += 1

    # --- driving -----------------------------------------------------------------------------------------------

    MOVES = (
        ("admit", 10), ("extend", 14), ("decode", 18), ("run_device", 6), ("settle", 22), ("publish", 3), ("evict", 3),
        ("finish", 4), ("abort", 2), ("retract", 2), ("preallocate", 3), ("land", 3), ("abort_transfer", 1),
        ("late_write", 2), ("fail_transfer", 2), ("restart_endpoint", 2), ("read_out", 2), ("end_reading", 2),
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
