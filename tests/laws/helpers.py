"""Small ledgers and the moves that every deterministic test needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from octavo.kv import balance
from octavo.kv.ledger import Admission, Ledger, LedgerConfig
from octavo.kv.tiers import TierConfig


def make(page_size: int = 4, full_pages: int = 32, **options: Any) -> Ledger:
    values = {"max_rows": 4, "context_tokens": 64, "largest_reserve_tokens": 8, **options}
    policy = values.pop("evict_policy", None)
    trace = values.pop("trace", None)
    return Ledger(LedgerConfig(page_size=page_size, full_pages=full_pages, **values), evict_policy=policy, trace=trace)


def sliding(window_tokens: int = 8, swa_pages: int = 16, **options: Any) -> Ledger:
    return make(window_tokens=window_tokens, swa_pages=swa_pages, **options)


def prefill(ledger: Ledger, tokens: list[int], *, publish: bool = False, namespace: str | None = None) -> Admission:
    """Admit and compute a whole prompt."""
    got = ledger.admit(tokens, namespace=namespace)
    ledger.extend(got.row, len(tokens))
    commit(ledger, got, len(tokens))
    if publish:
        ledger.publish(got.row, tokens)
    return got


def commit(ledger: Ledger, admission: Any, committed: int) -> bool:
    return bool(ledger.commit([admission.row], [admission.generation], [committed])[0])


def ok(ledger: Ledger, *, at_rest: bool = False) -> None:
    broken = balance.check(ledger, at_rest=at_rest)
    assert not broken, broken


def tokens(count: int, start: int = 0) -> list[int]:
    return list(range(start, start + count))


def pages(ledger: Ledger, row: int, pool: str = "full") -> list[int]:
    table = ledger.full_table if pool == "full" else ledger.swa_table
    assert table is not None
    return [int(page) for page in table[row] if page >= 0]


def ids(*values: int) -> Any:
    return np.array(values, np.int32)


def golden(name: str) -> dict[str, list[str]]:
    """golden/NAME.txt: headings, and under each the lines that are indented."""
    found: dict[str, list[str]] = {}
    for line in (Path(__file__).parent / "golden" / name).read_text().splitlines():
        if line.startswith("    "):
            found[list(found)[-1]].append(line[4:])
        else:
            found[line] = []
    return found


def tiered(host: int = 16, full: int = 16, slots: int = 12) -> Ledger:
    sizes = TierConfig(host, slots, device_pages=4, topk_pages=1, recent_tokens=4)
    return Ledger(
        LedgerConfig(page_size=4, full_pages=full, max_rows=4, context_tokens=48, largest_reserve_tokens=4, tiers=sizes)
    )


def back_up(ledger: Ledger, row: int) -> None:
    backup = ledger.begin_backup([row])
    if backup is not None:
        ledger.end_backup(backup.op)
