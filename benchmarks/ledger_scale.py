"""The ledger alone at the scale of a fleet: 100,000 requests, ten million pages, no model.

    python benchmarks/ledger_scale.py                      100k requests, 10 M pages (about 3 GB of memory)
    python benchmarks/ledger_scale.py --requests 2000 --pages 200000
    python benchmarks/ledger_scale.py --again              is a cost history, or what is in the books?

The trace: a third of the arrivals continue a conversation (their prefix is an earlier request's text), the others
start with one of 200 system prompts; lengths are log-normal; every step some requests end, are published and replaced.
Printed, in processor time: cost of the parts of a step, of an admission and of a prefix lookup, early and late in the
run (cost must follow the size of the books, not their history), and memory per request. `quiet` are steps behind the
run in which nobody ends: the same full books, without what a replaced request adds to a step. With `--again` the books
are then drained, their cache is dropped, and the same trace is played on them from its start: what is slower then than
it was at the same place of the first run is history.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections import deque
from typing import Any

import numpy as np

from octavo.kv import balance
from octavo.kv.ledger import Ledger, LedgerConfig
from octavo.kv.sizing import DecodeReserve

PAGE_SIZE, CONTEXT, CHUNK = 16, 4096, 4096
RESERVE = DecodeReserve.plain(overlap=True)
TIMED = ("lookup", "admit", "plan", "updates", "settle", "release")


def resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Fleet:
    def __init__(self, requests: int, pages: int, seed: int) -> None:
        before = resident_bytes()
        self.ledger = Ledger(
            LedgerConfig(
                page_size=PAGE_SIZE, full_pages=pages, max_rows=requests, context_tokens=CONTEXT,
                largest_reserve_tokens=RESERVE.tokens, chunk_tokens=CHUNK, overlap=True,
            )
        )  # fmt: skip
        self.empty_bytes = resident_bytes() - before
        self.begin(seed)

    def begin(self, seed: int) -> None:
        """The trace from its start, on books without requests."""
        requests = self.ledger.config.max_rows
        self.rng = np.random.default_rng(seed)
        self.systems = [self.rng.integers(0, 50_000, int(n), np.int32) for n in self.rng.integers(100, 1200, 200)]
        self.ended: deque[np.ndarray] = deque(maxlen=4096)  # conversations that may go on
        self.texts: dict[int, np.ndarray] = {}
        self.stop = np.zeros(requests, np.int64)
        self.times: dict[str, list[float]] = {name: [] for name in TIMED}
        self.cells: list[int] = []  # table cells fetched per step
        for _ in range(requests):
            self.arrive()
        self.filling = {name: thirds(self.times[name]) for name in ("lookup", "admit")}
        self.times = {name: [] for name in TIMED}
        self.ledger.take_table_updates("full")

    def drain(self) -> None:
        """Everybody goes, and the cache with them."""
        for row in self.ledger.live_rows().tolist():
            self.ledger.release(row)
        self.ledger.reset_cache()

    def text(self) -> np.ndarray:
        length = int(np.clip(self.rng.lognormal(6.2, 0.8), 16, CONTEXT - 600))
        fresh = self.rng.integers(0, 50_000, length, np.int32)
        if self.ended and self.rng.random() < 0.33:
            before = self.ended[int(self.rng.integers(len(self.ended)))]
        else:
            before = self.systems[int(self.rng.zipf(1.5)) % len(self.systems)]
        return np.concatenate([before, fresh])[: CONTEXT - 512]

    def arrive(self) -> None:
        tokens = self.text()
        start = time.thread_time()
        self.ledger.match(tokens)
        middle = time.thread_time()
        got = self.ledger.admit(tokens)
        self.ledger.extend(got.row, len(tokens))
        self.ledger.commit([got.row], [got.generation], [len(tokens)])
        self.ledger.publish(got.row, tokens)
        end = time.thread_time()
        self.times["lookup"].append(middle - start)
        self.times["admit"].append(end - middle)
        self.texts[got.row] = tokens
        self.stop[got.row] = len(tokens) + int(self.rng.integers(20, 500))

    def step(self, *, replace: bool = True) -> int:
        """One decode step of everybody; who is done leaves and is replaced. Returns how many that were."""
        ledger = self.ledger
        rows = np.flatnonzero(ledger.row_state == 1)
        clock = [time.thread_time()]
        ledger.plan_decode(rows, RESERVE)
        op = ledger.begin_op(rows)
        clock.append(time.thread_time())
        cells, _, _ = ledger.take_table_updates("full")
        clock.append(time.thread_time())
        ledger.commit(rows, ledger.generation[rows], ledger.committed[rows] + 1)
        ledger.end_op(op)
        clock.append(time.thread_time())
        for name, begun, ended in zip(("plan", "updates", "settle"), clock, clock[1:], strict=False):
            self.times[name].append(ended - begun)
        self.cells.append(len(cells))
        done = rows[ledger.committed[rows] >= self.stop[rows]].tolist() if replace else []
        for row in done:
            grown = int(ledger.committed[row]) - len(self.texts[row])
            answer = self.rng.integers(0, 50_000, grown + 1, np.int32)
            whole = np.concatenate([self.texts.pop(row), answer])
            start = time.thread_time()
            ledger.release(row, whole)
            self.times["release"].append(time.thread_time() - start)
            self.ended.append(whole)
        for _ in done:
            self.arrive()
        return len(done)

    def run(self, steps: int, quiet_steps: int) -> dict[str, Any]:
        """Steps with replacements, then quiet ones. Costs of both, and what was in the books between."""
        replaced = [self.step() for _ in range(steps)]
        third = max(1, steps // 3)
        steady = {name: thirds(times) for name, times in self.times.items() if times}
        shown = {
            "replaced": sum(replaced),
            "replaced_per_step": [round(float(np.mean(part)), 1) for part in (replaced[:third], replaced[-third:])],
            "table_cells_per_step": [round(float(np.mean(part))) for part in (self.cells[:third], self.cells[-third:])],
            "while_filling": self.filling,
            "in_steady_state": steady,
            "held_pages": self.ledger.full_pool.by_name()["held"],
            "cached_pages": self.ledger.full_pool.by_name()["cached"],
            "tree_nodes": self.ledger.tree.num_nodes,
        }
        self.times = {name: [] for name in TIMED}
        for _ in range(quiet_steps):
            self.step(replace=False)
        # the first quiet step still fetches what the last replacements wrote
        quiet = {name: thirds(times[1:])["late"] for name, times in self.times.items() if times[1:]}
        return {**shown, "quiet": quiet}


def thirds(seconds: list[float]) -> dict[str, Any]:
    """Microseconds: median and least of the first and of the last third, and p99 of all."""
    values = np.array(seconds) * 1e6
    third = max(1, len(values) // 3)
    return {
        **{
            name: {"median_us": round(float(np.median(part)), 1), "min_us": round(float(part.min()), 1)}
            for name, part in (("early", values[:third]), ("late", values[-third:]))
        },
        "p99_us": round(float(np.percentile(values, 99)), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--pages", type=int, default=10_000_000)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--quiet-steps", type=int, default=30, help="steps behind the run in which nobody ends")
    parser.add_argument("--again", action="store_true", help="play the trace a second time on the drained books")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    fleet = Fleet(args.requests, args.pages, args.seed)
    ledger = fleet.ledger
    result: dict[str, Any] = {
        "requests": args.requests,
        "pages": args.pages,
        "steps": args.steps,
        **fleet.run(args.steps, args.quiet_steps),
        "hit_rate": round(ledger.stats["hit_tokens"] / ledger.stats["queried_tokens"], 3),
        "evicted_pages": ledger.tree.evicted_full,
        "empty_books_bytes_per_request": round(fleet.empty_bytes / args.requests),
        "peak_resident_bytes": resident_bytes(),
        "violations": len(balance.check(ledger)),
    }
    if args.again:
        fleet.drain()
        fleet.begin(args.seed)
        result["again"] = fleet.run(args.steps, args.quiet_steps)
        result["violations"] += len(balance.check(ledger))
    if args.json:
        print(json.dumps(result, indent=1))
        return
    for name, value in result.items():
        if isinstance(value, dict):
            print(f"{name}:")
            for inner, figures in value.items():
                print(f"  {inner:10} {figures}")
        else:
            print(f"{name}: {value}")


if __name__ == "__main__":
    main()
