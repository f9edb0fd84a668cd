"""What others read of the ledger: table updates, budgets, the report."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.errors import NeverFits, OutOfPages
from octavo.kv.books import Table
from octavo.kv.ledger import Ledger
from octavo.kv.pages import distinct
from octavo.kv.sizing import DecodeReserve
from tests.laws.helpers import make, ok, pages, prefill, sliding, tokens


def lengths(ledger: Ledger, row: int) -> dict[str, int]:
    names = ("committed", "known", "allocated", "protected", "evicted", "fill")
    return {name: int(getattr(ledger, name)[row]) for name in names}


# --- tables ----------------------------------------------------------------------------------------------------


def apply(ledger: Ledger, copies: dict[str, np.ndarray]) -> None:
    for pool, copy in copies.items():
        rows, columns, values = ledger.take_table_updates(pool)
        assert len(set(zip(rows.tolist(), columns.tolist(), strict=True))) == len(rows), "a cell is sent once"
        copy[rows, columns] = values


def test_updates_keep_a_copy_of_the_tables_current() -> None:
    ledger = sliding(window_tokens=8, full_pages=60, swa_pages=40)
    copies = {"full": np.full_like(ledger.full_table, -1), "swa": np.full_like(ledger.swa_table, -1)}

    def check() -> None:
        apply(ledger, copies)
        assert (copies["full"] == ledger.full_table).all() and (copies["swa"] == ledger.swa_table).all()

    rows = [prefill(ledger, tokens(n, 50 * n)).row for n in (7, 11)]
    check()
    got = prefill(ledger, tokens(7, 350), publish=True)
    ledger.publish(rows[0], tokens(7, 350))  # a remap
    ledger.plan_decode([*rows, got.row], 8)
    check()
    assert [len(x) for x in ledger.take_table_updates("full")] == [0, 0, 0]
    ledger.commit(rows, [1, 1], [14, 18])
    ledger.evict(rows)
    check()
    for row in (*rows, got.row):
        ledger.release(row)
    check()
    assert (copies["full"] == -1).all() and (copies["swa"] == -1).all()


def test_a_remap_is_sent() -> None:
    ledger = make()
    a, b = prefill(ledger, tokens(10)), prefill(ledger, tokens(10))
    ledger.publish(a.row, tokens(10))
    ledger.take_table_updates("full")
    ledger.publish(b.row, tokens(10))
    rows, columns, values = ledger.take_table_updates("full")
    assert ledger.stats["remapped_pages"] == 2
    assert (rows.tolist(), columns.tolist(), values.tolist()) == ([b.row] * 2, [0, 1], pages(ledger, a.row)[:2])


def test_the_log_of_changes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.kv.books.LOG_LIMIT", 50)
    ledger = make()
    for _ in range(200):
        ledger.release(prefill(ledger, tokens(20)).row)
    got = prefill(ledger, tokens(20))
    table = ledger._full
    assert table._logged == sum(len(part) for part in table._log) <= 50 + 2 * ledger.full_table.size
    copy = np.full_like(ledger.full_table, -1)
    rows, columns, values = ledger.take_table_updates("full")
    copy[rows, columns] = values
    assert (copy == ledger.full_table).all() and got.row == 0


def test_sweeping_the_log_is_amortised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.kv.books.LOG_LIMIT", 16)
    sweeps: list[int] = []
    monkeypatch.setattr("octavo.kv.books.distinct", lambda cells: sweeps.append(len(cells)) or distinct(cells))
    table = Table(1, 4096)
    table.write(0, 0, 16, 0)
    assert not sweeps
    table.write(0, 0, 1, 0)
    assert sweeps == [17] and table._logged == 16
    table.take_updates()
    sweeps.clear()
    for column in range(4096):
        table.write(0, column, column + 1, column)
    assert 7 <= len(sweeps) <= 12, "each sweep is twice as far away as the last one"
    assert table.take_updates()[1].tolist() == list(range(4096))
    sweeps.clear()
    for column in range(16):
        table.write(0, column, column + 1, 5)
    assert not sweeps and table._logged == 16
    table.write(0, 3, 4, 6)
    assert sweeps == [17] and table._logged == 16 and table._limit == 48


def test_a_table_sends_one_change_without_sorting() -> None:
    table = Table(2, 8)
    table.write_cells(np.array([1, 0]), np.array([2, 5]), np.array([7, 8], np.int32))
    assert [part.tolist() for part in table.take_updates()] == [[1, 0], [2, 5], [7, 8]]
    table.write(1, 3, 3, 9)
    assert [part.tolist() for part in table.take_updates()] == [[], [], []]


def test_views_cannot_be_written() -> None:
    ledger = sliding()
    for name in ("committed", "known", "allocated", "protected", "evicted", "fill", "generation", "row_state",
                 "full_table", "swa_table"):  # fmt: skip
        with pytest.raises(ValueError, match="read-only"):
            getattr(ledger, name)[0] = 1


# --- budgets, report -------------------------------------------------------------------------------------------


def test_what_can_never_fit_names_pool_and_pages() -> None:
    ledger = make(full_pages=10, context_tokens=200)
    ledger.can_ever_fit(20, 13, 8)  # 40 tokens
    with pytest.raises(NeverFits, match="needs 11 pages of 4 tokens in the full pool, which has 10"):
        ledger.can_ever_fit(20, 14, 8)
    with pytest.raises(NeverFits):
        ledger.can_ever_fit(20, 13, DecodeReserve(9, 0))


def test_what_can_never_fit_the_sliding_pool() -> None:
    ledger = sliding(window_tokens=8, swa_pages=6, full_pages=100, context_tokens=200, chunk_tokens=8)
    ledger.can_ever_fit(100, 50, 8)  # bounded by the window: 6 pages
    with pytest.raises(NeverFits, match="needs 7 pages of 4 tokens in the swa pool, which has 6"):
        ledger.can_ever_fit(100, 50, 9)
    ledger.can_ever_fit(10, 5, 9)  # short: 6 pages do


def test_quarantined_pages_do_not_count_as_room() -> None:
    ledger = make(full_pages=10, context_tokens=200)
    got = ledger.preallocate(tokens(4), 4)
    ledger.quarantine(got.row, got.generation)
    with pytest.raises(NeverFits, match="which has 9"):
        ledger.can_ever_fit(20, 13, 8)
    ledger.can_ever_fit(20, 9, 8)
    windowed = sliding(window_tokens=8, swa_pages=6, full_pages=100, context_tokens=200, chunk_tokens=8)
    windowed.can_ever_fit(100, 50, 8)
    lost = windowed.preallocate(tokens(4), 4)
    windowed.quarantine(lost.row, lost.generation)
    with pytest.raises(NeverFits, match="needs 6 pages of 4 tokens in the swa pool, which has 5"):
        windowed.can_ever_fit(100, 50, 8)


def test_pages_to_admit() -> None:
    assert make().pages_to_admit(9, 2) == {"full": 3}
    assert make(page_size=1).pages_to_admit(9, 2) == {"full": 11}
    assert make().pages_to_admit(9, DecodeReserve(2, 2), cached_tokens=8) == {"full": 2}
    ledger = sliding(window_tokens=8, swa_pages=12, full_pages=100, chunk_tokens=16)
    assert ledger.pages_to_admit(9, 2) == {"full": 3, "swa": 3}
    assert ledger.pages_to_admit(60, 2) == {"full": 16, "swa": 8}
    assert ledger.pages_to_admit(60, 2, cached_tokens=48) == {"full": 4, "swa": 4}
    ledger.check_room({"full": 100, "swa": 12})
    with pytest.raises(OutOfPages, match="swa pool: 13 pages needed, 12 available"):
        ledger.check_room({"full": 1, "swa": 13})


def test_available_counts_each_pool_by_itself() -> None:
    ledger = sliding(window_tokens=8, full_pages=40, swa_pages=16)
    ledger.release(prefill(ledger, tokens(24), publish=True).row)
    ledger.tree.evict_swa(4)
    assert (ledger.available("full"), ledger.free_pages("full")) == (40, 34)
    assert (ledger.available("swa"), ledger.free_pages("swa")) == (16, 14)
    with pytest.raises(ValueError, match="no pool 'host'"):
        ledger.available("host")
    with pytest.raises(ValueError, match="no pool 'swa'"):
        make().free_pages("swa")


def test_reset_cache() -> None:
    ledger = make()
    ledger.release(prefill(ledger, tokens(9), publish=True).row)
    keep = prefill(ledger, tokens(9, 50), publish=True)
    assert ledger.reset_cache() == 2 and ledger.full_pool.by_name()["cached"] == 2
    assert ledger.protected[keep.row] == 8
    ok(ledger)


def test_report() -> None:
    ledger = sliding(window_tokens=8, full_pages=20, swa_pages=16)
    got = prefill(ledger, tokens(17), publish=True)
    ledger.evict([got.row])
    ledger.begin_op([got.row])
    report = ledger.report()
    assert report["page_size"] == 4 and report["window_tokens"] == 8 and report["operations_in_flight"] == 1
    full, swa = report["pools"]["full"], report["pools"]["swa"]
    assert (full["total"], full["free"], full["cached"], full["held"], full["evictable"]) == (20, 15, 4, 1, 0)
    assert (swa["total"], swa["cached"], swa["held"], swa["evictable"], swa["peak_used"]) == (16, 4, 1, 2, 5)
    assert full["map"].count("c") == 4 and full["map"].count("f") == 15 and len(full["map"]) == 20
    (row,) = report["rows"]
    assert row | {"full_pages": 0, "swa_pages": 0} == {
        "row": 0, "generation": 1, "state": "active", "committed": 17, "known": 17, "allocated": 20, "protected": 16,
        "evicted": 8, "fill": 0, "full_pages": 0, "swa_pages": 0,
    }  # fmt: skip
    assert row["full_pages"] == [pages(ledger, 0)[-1]] and row["swa_pages"] == [pages(ledger, 0, "swa")[-1]]
    assert report["cache"] == {"nodes": 1, "namespaces": 1} and report["stats"]["queried_tokens"] == 17
    bare = ledger.report(page_map=False)
    assert "map" not in bare["pools"]["full"] and "full_pages" not in bare["rows"][0]


def test_report_of_large_pools_has_no_map_unless_asked() -> None:
    assert [("map" in make(full_pages=n).report()["pools"]["full"]) for n in (65_536, 65_537)] == [True, False]
    ledger = make(full_pages=70_000)
    assert "map" not in ledger.report()["pools"]["full"]
    assert len(ledger.report(page_map=True)["pools"]["full"]["map"]) == 70_000
