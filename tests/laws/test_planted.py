"""The checks can fail: one violation of every kind is planted in working books and must be seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from octavo.errors import LawViolation
from octavo.kv import balance
from octavo.kv.ledger import Ledger
from octavo.kv.node import Node
from tests.laws.helpers import commit, golden, ok, prefill, sliding, tokens


def busy() -> Ledger:
    """Two running rows with a shared prefix, one in transfer, one draining, a reader with pages set aside."""
    ledger = sliding(window_tokens=8, swa_pages=40, full_pages=60, max_rows=8)
    first = prefill(ledger, tokens(20), publish=True)
    second = ledger.admit(tokens(18))
    ledger.extend(second.row, 18)
    commit(ledger, second, 18)
    ledger.begin_op([first.row], "transfer")
    ledger.evict([first.row])
    ledger.plan_decode([first.row, second.row], 8)
    ledger.preallocate(tokens(9, 40), 9)
    third = prefill(ledger, tokens(6, 60))
    ledger.begin_op([third.row], "step")
    ledger.release(third.row)
    spare = prefill(ledger, tokens(9, 80), publish=True)
    ledger.release(spare.row)
    ok(ledger)
    return ledger


def put(name: str, row: int, change: int) -> Callable[[Ledger], None]:
    def plant(ledger: Ledger) -> None:
        getattr(ledger, "_" + name)[row] += change

    return plant


def do(action: Callable[[Ledger], Any]) -> Callable[[Ledger], None]:
    def plant(ledger: Ledger) -> None:
        action(ledger)

    return plant


def node(ledger: Ledger, start_page: int = 0) -> Any:
    return next(n for n in ledger.tree.nodes() if n.start_page == start_page and n.tokens[0] < 20)


def node_without_pages(ledger: Ledger) -> None:
    root, none = ledger.tree.root(None), np.empty(0, np.int32)
    root.children[b""] = Node(root, b"", none, none, 0)
    ledger.tree.num_nodes += 1


def set_cell(table: str, row: int, column: int, page: int) -> Callable[[Ledger], None]:
    def plant(ledger: Ledger) -> None:
        getattr(ledger, table).cells[row, column] = page

    return plant


PLANTED: dict[str, tuple[int, Callable[[Ledger], None]]] = {
    "unaligned watermark": (1, put("allocated", 0, 1)),
    "unaligned protected": (1, put("protected", 1, -1)),
    "unaligned floor": (1, put("evicted", 0, 2)),
    "protected over committed": (2, put("protected", 0, 16)),
    "committed over known": (2, put("committed", 1, 1)),
    "known over allocated": (2, put("known", 1, 40)),
    "known one over allocated": (2, put("known", 1, 11)),
    "fill over allocated": (2, put("fill", 2, 8)),
    "fill one over allocated": (2, put("fill", 2, 4)),
    "floor over the row": (2, put("evicted", 1, 32)),
    "floor one page over the row": (2, put("evicted", 1, 12)),
    "committed fell": (3, put("committed", 1, -1)),
    "watermark fell": (3, put("allocated", 0, -4)),
    "floor fell": (3, put("evicted", 0, -4)),
    "protected fell": (3, put("protected", 0, -4)),
    "free page counted as held": (5, do(lambda x: x.full_pool.counts.__setitem__(2, x.full_pool.counts[2] + 1))),
    "sliding page lost": (5, do(lambda x: x.swa_pool.counts.__setitem__(0, x.swa_pool.counts[0] - 1))),
    "total does not add up": (5, do(lambda x: setattr(x.full_pool, "total", 61))),
    "evictable miscounted": (5, do(lambda x: setattr(x.tree, "evictable_full", 0))),
    "evictable sliding miscounted": (5, do(lambda x: setattr(x.tree, "evictable_swa", 99))),
    "leaf in no queue": (5, do(lambda x: x.tree.full_heap._entries.clear())),
    "sliding node in no queue": (5, do(lambda x: x.tree.swa_heap._entries.clear())),
    "page on the free list twice": (6, do(lambda x: x.full_pool._stack.__setitem__(0, x.full_pool._stack[1]))),
    "held page on the free list": (6, do(lambda x: x.full_pool._stack.__setitem__(0, x._full.cells[1, 4]))),
    "page owned twice": (6, do(lambda x: x._full.cells.__setitem__((1, 5), x._full.cells[0, 5]))),
    "page owned by nobody": (6, do(lambda x: x.full_pool.take(1))),
    "many pages owned by nobody": (6, do(lambda x: x.full_pool.take(12))),
    "free page in the tree": (6, do(lambda x: node(x).full.__setitem__(0, x.full_pool.free_list()[0]))),
    "page that does not exist": (6, set_cell("_full", 1, 5, 1000)),
    "first page that does not exist": (6, set_cell("_full", 1, 5, 60)),
    "page set aside twice": (6, do(lambda x: setattr(x.inflight.aside[0], "full", x._full.cells[0, 5:7]))),
    "hole in a table": (6, set_cell("_full", 1, 5, -1)),
    "entry behind the watermark": (6, set_cell("_full", 1, 9, 3)),
    "page set aside is lost": (12, do(lambda x: x.inflight.aside.clear())),
    "node miscounted": (6, do(lambda x: setattr(x.tree, "num_nodes", 1))),
    "node under a wrong name": (6, do(lambda x: setattr(node(x), "key", b"?"))),
    "node without its tokens": (6, do(lambda x: setattr(node(x), "tokens", node(x).tokens[1:]))),
    "node without pages": (6, node_without_pages),
    "node at a wrong depth": (6, do(lambda x: setattr(node(x), "start_page", 1))),
    "sliding page misfiled": (6, do(lambda x: x.tree.swa_node.__setitem__(node(x).swa[0], None))),
    "sliding page 0 misfiled": (6, do(lambda x: x.tree.swa_node.__setitem__(0, None))),
    "empty namespace kept": (6, do(lambda x: x.tree.root("nobody"))),
    "wider than the row": (10, put("allocated", 1, 4 * 100)),
    "wider by a page": (10, put("allocated", 1, 76 - 28)),
    "shared entry remapped": (12, set_cell("_full", 1, 0, 59)),
    "shared sliding entry remapped": (12, set_cell("_swa", 1, 3, 39)),
    "shared sliding entry remapped to page 0": (12, set_cell("_swa", 1, 3, 0)),
    "path ends elsewhere": (12, do(lambda x: x._node.__setitem__(1, x.tree.root(None)))),
    "lock lost": (12, do(lambda x: setattr(node(x), "locks", node(x).locks - 1))),
    "lock of nobody": (12, do(lambda x: setattr(next(n for n in x.tree.nodes() if not n.locks), "locks", 1))),
    "root lock lost": (12, do(lambda x: setattr(x.tree.root(None), "locks", 1))),
    "sliding lock lost": (12, do(lambda x: x.tree.swa_locks.__setitem__(node(x).swa[-1], 0))),
    "floor inside the window": (13, put("evicted", 1, 4)),
    "entry below the floor": (13, set_cell("_swa", 0, 0, 3)),
    "hole in the window": (13, set_cell("_swa", 0, 5, -1)),
    "operation miscounted": (14, do(lambda x: x.inflight.per_row.__setitem__(0, 0))),
    "operation names a free row": (14, do(lambda x: x._state.__setitem__(3, 0))),
}


READ = golden("planted.txt")


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_violation_is_seen(name: str) -> None:
    law, plant = PLANTED[name]
    ledger = busy()
    assert ledger.tree.evictable_full and ledger.tree.evictable_swa and ledger.inflight.aside
    plant(ledger)
    found = balance.check(ledger)
    assert law in {violation.law for violation in found}, found
    assert [str(violation) for violation in found] == READ[name]  # after a wanted change, look at every line
    assert ledger.stats["violations"] >= len(found) >= 1
    with pytest.raises(LawViolation) as raised:
        balance.raise_on(busy_with(plant))
    assert str(raised.value) == READ[name][0]


def busy_with(plant: Callable[[Ledger], None]) -> Ledger:
    ledger = busy()
    plant(ledger)
    return ledger


@pytest.mark.parametrize("length", [5, 20])
def test_sliding_pages_in_no_queue_are_seen(length: int) -> None:
    """Page 0 alone, unlocked; and a node that is locked in part."""
    ledger = sliding()
    got = prefill(ledger, tokens(length), publish=True)
    if length == 5:
        ledger.release(got.row)
    ledger.evict([got.row] if length == 20 else [])
    ledger.tree.swa_heap._entries.clear()
    assert [str(violation) for violation in balance.check(ledger)] == [
        "law 5: evictable SWA pages are in no queue (start_page=0)"
    ]


def test_every_law_that_state_can_break_is_planted() -> None:
    """4, 7, 8, 9, 11 and 15 are about calls, not about state: docs/invariants.md names their tests."""
    assert {law for law, _ in PLANTED.values()} == {1, 2, 3, 5, 6, 10, 12, 13, 14}


def test_sound_books_are_sound_and_nothing_is_counted() -> None:
    ledger = busy()
    balance.raise_on(ledger)
    balance.raise_on(ledger, deep=False)
    assert ledger.stats["violations"] == 0


def test_the_shallow_check_sees_lengths_and_counts() -> None:
    for name in ("unaligned watermark", "committed fell", "sliding page lost", "operation miscounted"):
        assert balance.check(busy_with(PLANTED[name][1]), deep=False)


def test_a_violation_names_row_and_numbers() -> None:
    ledger = busy()
    ledger._protected[0] += 16
    found = [v for v in balance.check(ledger) if v.law == 2]
    assert found[0].row == 0 and found[0].numbers["protected"] == 36 and "committed=20" in str(found[0])


def test_at_rest_nothing_may_be_held() -> None:
    ledger = busy()
    broken = balance.check(ledger, at_rest=True)
    assert [str(violation) for violation in broken] == READ["at rest"]
    empty = sliding()
    ledger = empty
    assert not balance.check(ledger, at_rest=True)
    got = ledger.preallocate(tokens(4), 4)
    assert balance.check(ledger, at_rest=True)
    ledger.fail_transfer(got.row, got.generation)
    assert not balance.check(ledger, at_rest=True)


def test_held_and_leased_pages_do_not_make_up_for_each_other_at_rest() -> None:
    ledger = sliding()
    prefill(ledger, tokens(4))
    ledger.preallocate(tokens(4, 50), 4)
    assert len(balance.check(ledger, at_rest=True)) == 2


def test_a_row_that_is_reused_may_be_shorter() -> None:
    ledger = sliding()
    long = prefill(ledger, tokens(30))
    op = ledger.begin_op([long.row])
    ledger.release(long.row)
    ok(ledger)  # seen while draining
    ledger.end_op(op)
    short = prefill(ledger, tokens(3, 50))
    assert short.row == long.row
    ok(ledger)


def test_aside_pages_are_owned() -> None:
    ledger = busy()
    (entry,) = ledger.inflight.aside
    assert len(entry.swa) == 0 and len(entry.swa_unlock) == 3 and entry.waits_for == {1}
    assert np.array_equal(ledger.tree.swa_locks[entry.swa_unlock] >= 1, [True] * 3)


@pytest.mark.parametrize(("page_size", "committed", "oldest"), [(4, 19, 12), (1, 8, 1), (1, 7, 0)])
def test_a_floor_may_reach_the_oldest_key_that_is_read_and_no_page_more(
    page_size: int, committed: int, oldest: int
) -> None:
    """Window 8: a query at n reads from max(0, n − 7) on."""
    ledger = sliding(window_tokens=8, page_size=page_size, swa_pages=40, full_pages=60)
    row = prefill(ledger, tokens(committed)).row
    if oldest:
        ledger._raise_floor(row, oldest, ledger.swa_pool, ledger._swa)
    ok(ledger)
    ledger._raise_floor(row, oldest + page_size, ledger.swa_pool, ledger._swa)
    assert [violation.law for violation in balance.check(ledger)] == [13]
