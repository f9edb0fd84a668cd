"""The ledger alone at the scale of a fleet: 100,000 requests, ten million pages, no model.

    python benchmarks/ledger_scale.py                      100k requests, 10 M pages (about 3 GB of memory)
    python benchmarks/ledger_scale.py --requests 2000 --pages 200000

The trace: a third of the arrivals continue a conversation (their prefix is an earlier request's text), the others
start with one of 200 system prompts; lengths are log-normal; every step some requests end, are published and replaced.
Printed: cost of a step, of an admission and of a prefix lookup, early and late in the run (cost must follow the size of
the books, not their history), and memory per request.
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


def resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Fleet:
    def __init__(self, requests: int, pages: int, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        before = resident_bytes()
        self.ledger = Ledger(
            LedgerConfig(
                page_size=PAGE_SIZE, full_pages=pages, max_rows=requests, context_tokens=CONTEXT,
                largest_reserve_tokens=RESERVE.tokens, chunk_tokens=CHUNK, overlap=True,
            )
        )  # fmt: skip
        self.empty_bytes = resident_bytes() - before
        self.systems = [self.rng.integers(0, 50_000, int(n), np.int32) for n in self.rng.integers(100, 1200, 200)]
        self.ended: deque[np.ndarray] = deque(maxlen=4096)  # conversations that may go on
        self.texts: dict[int, np.ndarray] = {}
        self.stop = np.zeros(requests, np.int64)
        self.times: dict[str, list[float]] = {name: [] for name in ("lookup", "admit", "plan", "settle", "release")}

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
        start = time.perf_counter()
        self.ledger.match(tokens)
        middle = time.perf_counter()
        got = self.ledger.admit(tokens)
        self.ledger.extend(got.row, len(tokens))
        self.ledger.commit([got.row], [got.generation], [len(tokens)])
        self.ledger.publish(got.row, tokens)
        end = time.perf_counter()
        self.times["lookup"].append(middle - start)
        self.times["admit"].append(end - middle)
        self.texts[got.row] = tokens
        self.stop[got.row] = len(tokens) + int(self.rng.integers(20, 500))

    def step(self) -> int:
        """One decode step of everybody; who is done leaves and is replaced. Returns how many that were."""
        ledger = self.ledger
        rows = np.flatnonzero(ledger.row_state == 1)
        start = time.perf_counter()
        ledger.plan_decode(rows, RESERVE)
        op = ledger.begin_op(rows)
        ledger.take_table_updates("full")
        middle = time.perf_counter()
        ledger.commit(rows, ledger.generation[rows], ledger.committed[rows] + 1)
        ledger.end_op(op)
        end = time.perf_counter()
        self.times["plan"].append(middle - start)
        self.times["settle"].append(end - middle)
        done = rows[ledger.committed[rows] >= self.stop[rows]].tolist()
        for row in done:
            grown = int(ledger.committed[row]) - len(self.texts[row])
            answer = self.rng.integers(0, 50_000, grown + 1, np.int32)
            whole = np.concatenate([self.texts.pop(row), answer])
            start = time.perf_counter()
            ledger.release(row, whole)
            self.times["release"].append(time.perf_counter() - start)
            self.ended.append(whole)
        for _ in done:
            self.arrive()
        return len(done)


def halves(seconds: list[float]) -> dict[str, float]:
    """Microseconds: median of the first and of the last third, and p99 of all."""
    values = np.array(seconds) * 1e6
    third = max(1, len(values) // 3)
    early, late = float(np.median(values[:third])), float(np.median(values[-third:]))
    return {
        "early_us": round(early, 1),
        "late_us": round(late, 1),
        "p99_us": round(float(np.percentile(values, 99)), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--pages", type=int, default=10_000_000)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    fleet = Fleet(args.requests, args.pages, args.seed)
    for _ in range(args.requests):
        fleet.arrive()
    filled = {name: halves(fleet.times[name]) for name in ("lookup", "admit")}
    for name in ("lookup", "admit"):
        fleet.times[name].clear()
    replaced = sum(fleet.step() for _ in range(args.steps))
    ledger = fleet.ledger
    broken = balance.check(ledger)
    cached = ledger.full_pool.by_name()["cached"]
    result: dict[str, Any] = {
        "requests": args.requests,
        "pages": args.pages,
        "steps": args.steps,
        "replaced": replaced,
        "while_filling": filled,
        "in_steady_state": {name: halves(times) for name, times in fleet.times.items() if times},
        "hit_rate": round(ledger.stats["hit_tokens"] / ledger.stats["queried_tokens"], 3),
        "cached_pages": cached,
        "tree_nodes": ledger.tree.num_nodes,
        "evicted_pages": ledger.tree.evicted_full,
        "empty_books_bytes_per_request": round(fleet.empty_bytes / args.requests),
        "peak_resident_bytes": resident_bytes(),
        "violations": len(broken),
    }
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
