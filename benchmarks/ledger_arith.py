"""Cost of the decode watermark and of the whole decode plan, in microseconds per batch.

    python benchmarks/ledger_arith.py [--json] [--rows 1 16 256] [--steps 10000]

Columns: the arithmetic alone; the same as a Python loop over request objects; the whole ledger call that decode uses
(out-of-memory check, page ids, page-table writes, row width), with one pool and with a sliding-window pool beside it;
and everything a step costs the ledger (plan, operation, commit, eviction, table updates).

The trace is steady and mixed: rows at random phases of a page, runs of 1 to 4 tokens accepted per step, p = 16; rows
that reach the context are replaced between the timed calls.
"""

from __future__ import annotations

import argparse
import json
import time
from types import SimpleNamespace
from typing import Any

import numpy as np

from octavo.kv.ledger import Ledger, LedgerConfig
from octavo.kv.sizing import DecodeReserve, RowsView, page_aligned_decode_alloc_lens

PAGE_SIZE, CONTEXT, WINDOW = 16, 2048, 512
RESERVE = DecodeReserve.eagle(steps=3, topk=1, draft_tokens=4, overlap=True)


def percentiles(seconds: list[float]) -> dict[str, float]:
    p50, p99 = np.percentile(np.array(seconds) * 1e6, [50, 99])
    return {"p50": round(float(p50), 2), "p99": round(float(p99), 2)}


def open_rows(ledger: Ledger, count: int, rng: np.random.Generator) -> None:
    for length in rng.integers(16, CONTEXT // 2, count).tolist():
        got = ledger.admit([1] * length)
        ledger.extend(got.row, length)
        ledger.commit([got.row], [got.generation], [length])
        ledger.evict([got.row])


def make_ledger(count: int, window: int, rng: np.random.Generator) -> Ledger:
    pages = count * (CONTEXT // PAGE_SIZE + 2)
    config = LedgerConfig(
        page_size=PAGE_SIZE, full_pages=pages, swa_pages=pages if window else 0, window_tokens=window, max_rows=count,
        context_tokens=CONTEXT, largest_reserve_tokens=RESERVE.tokens, prefix_cache=False, overlap=True,
    )  # fmt: skip
    ledger = Ledger(config)
    open_rows(ledger, count, rng)
    return ledger


def whole_call(count: int, steps: int, window: int) -> tuple[dict[str, float], dict[str, float]]:
    """(plan alone, everything the ledger does in a step)."""
    rng = np.random.default_rng(count)
    ledger = make_ledger(count, window, rng)
    rows = np.arange(count)
    plans: list[float] = []
    whole: list[float] = []
    for _ in range(steps):
        run = rng.integers(1, 5, count)
        t0 = time.perf_counter()
        ledger.plan_decode(rows, RESERVE)
        t1 = time.perf_counter()
        op = ledger.begin_op(rows)
        ledger.take_table_updates("full")
        ledger.take_table_updates("swa")
        lengths = ledger.committed + run
        ledger.commit(rows, ledger.generation, lengths)
        ledger.end_op(op)
        ledger.evict(rows)
        t2 = time.perf_counter()
        plans.append(t1 - t0)
        whole.append(t2 - t0)
        done = np.flatnonzero(lengths > CONTEXT - 8)
        for row in done.tolist():
            ledger.release(row)
        open_rows(ledger, len(done), rng)
    return percentiles(plans), percentiles(whole)


def arithmetic(count: int, steps: int) -> tuple[dict[str, float], dict[str, float]]:
    """(arrays, a loop over request objects)."""
    rng = np.random.default_rng(count)
    known = rng.integers(16, CONTEXT, count)
    view = RowsView(-(-(known + rng.integers(0, 9, count)) // PAGE_SIZE) * PAGE_SIZE, known)
    requests = [
        SimpleNamespace(kv=SimpleNamespace(kv_allocated_len=a, kv_committed_len=c))
        for a, c in zip(view.allocated.tolist(), view.known.tolist(), strict=True)
    ]
    times: tuple[list[float], list[float]] = ([], [])
    for source, kept, repeats in ((view, times[0], steps), (requests, times[1], max(20, steps // 10))):
        for _ in range(repeats):
            start = time.perf_counter()
            page_aligned_decode_alloc_lens(source, reserve=RESERVE, page_size=PAGE_SIZE)
            kept.append(time.perf_counter() - start)
    return percentiles(times[0]), percentiles(times[1])


def measure(count: int, steps: int) -> dict[str, Any]:
    steps = max(100, min(steps, 2_560_000 // count))
    arrays, loop = arithmetic(count, steps)
    one, one_step = whole_call(count, steps, 0)
    two, two_step = whole_call(count, steps, WINDOW)
    return {
        "rows": count, "steps": steps, "arithmetic": arrays, "loop": loop, "plan_one_pool": one,
        "plan_two_pools": two, "step_one_pool": one_step, "step_two_pools": two_step,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 16, 256, 4096, 65536])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = [measure(count, args.steps) for count in args.rows]
    if args.json:
        print(json.dumps(found, indent=1))
        return
    names = ["arithmetic", "loop", "plan_one_pool", "plan_two_pools", "step_one_pool", "step_two_pools"]
    print("microseconds, p50 / p99\n" + f"{'rows':>6}" + "".join(f"{name.replace('_', ' '):>20}" for name in names))
    for row in found:
        shown = "".join(f"{row[name]['p50']:>11.1f} /{row[name]['p99']:>7.1f}" for name in names)
        print(f"{row['rows']:>6}{shown}")


if __name__ == "__main__":
    main()
