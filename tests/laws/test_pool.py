"""Page states and the free list: laws 5, 6 and 11 inside one pool."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.errors import LawViolation, OutOfPages
from octavo.kv.pool import PagePool, PageState
from tests.laws.helpers import ids

HELD, CACHED, LEASED, FREE = PageState.HELD, PageState.CACHED, PageState.LEASED, PageState.FREE


def test_take_gives_every_page_once() -> None:
    pool = PagePool("full", 5)
    taken = [*pool.take(2), *pool.take(1), *pool.take(2)]
    assert sorted(taken) == [0, 1, 2, 3, 4] and pool.free == 0
    assert pool.counts == [0, 0, 5, 0, 0] and (pool.state == HELD).all()


def test_low_ids_come_first_and_the_last_freed_again() -> None:
    pool = PagePool("full", 8)
    assert pool.take(3).tolist() == [0, 1, 2] and pool.take(1).tolist() == [3]
    pool.give_back(ids(1, 2), HELD)
    assert pool.take(1).tolist() == [1]
    assert pool.take(2).tolist() == [2, 4]


def test_take_is_all_or_nothing() -> None:
    pool = PagePool("swa", 3)
    pool.take(1)
    with pytest.raises(OutOfPages) as caught:
        pool.take(3)
    assert (caught.value.pool, caught.value.needed_pages, caught.value.available_pages) == ("swa", 3, 2)
    assert pool.counts == [2, 0, 1, 0, 0] and pool.take(2).tolist() == [1, 2]


def test_take_nothing() -> None:
    pool = PagePool("full", 2)
    assert len(pool.take(0)) == 0 and pool.free == 2
    pool.give_back(ids(), HELD)
    pool.move(ids(), HELD, CACHED)
    assert pool.free == 2


def test_take_into_a_state() -> None:
    pool = PagePool("full", 4)
    pages = pool.take(2, LEASED)
    one = pool.take(1, CACHED)
    assert pool.by_name() == {"total": 4, "free": 1, "cached": 1, "held": 0, "leased": 2, "quarantined": 0}
    pool.move(pages, LEASED, HELD)
    pool.give_back(one, CACHED)
    assert pool.counts == [2, 0, 2, 0, 0]


def test_freeing_a_free_page_names_it() -> None:
    pool = PagePool("full", 4)
    pages = pool.take(3)
    pool.give_back(pages[1:2], HELD)
    with pytest.raises(LawViolation, match="law 6: full page 1 is free already") as caught:
        pool.give_back(pages, HELD)
    assert caught.value.law == 6 and caught.value.numbers["page"] == 1
    assert pool.counts == [2, 0, 2, 0, 0], "nothing changed"
    assert sorted(pool.free_list().tolist()) == [1, 3]


def test_freeing_a_page_twice_in_one_call_names_it() -> None:
    pool = PagePool("full", 4)
    pool.take(3)
    with pytest.raises(LawViolation, match="law 6: .*page 2 is named twice"):
        pool.give_back(ids(1, 2, 0, 2), HELD)
    assert pool.counts == [1, 0, 3, 0, 0]


@pytest.mark.parametrize("page", [-1, 4, 100])
def test_a_page_that_does_not_exist_is_named(page: int) -> None:
    pool = PagePool("full", 4)
    pool.take(4)
    with pytest.raises(LawViolation, match=f"law 6: .*no page {page}"):
        pool.give_back(ids(0, page, 9), HELD)
    with pytest.raises(LawViolation, match=f"law 6: .*no page {page}"):
        pool.move(ids(page), HELD, CACHED)
    pool.give_back(ids(0, 3), HELD)


def test_a_move_from_the_wrong_state_is_refused() -> None:
    pool = PagePool("full", 4)
    pool.take(2)
    with pytest.raises(LawViolation, match="page 0 is held, expected cached"):
        pool.move(ids(0), CACHED, HELD)
    with pytest.raises(LawViolation, match="free already"):
        pool.move(ids(1, 3), HELD, CACHED)
    assert pool.state.tolist() == [HELD, HELD, FREE, FREE]


def test_low_water_mark() -> None:
    pool = PagePool("full", 6)
    first = pool.take(4)
    pool.give_back(first, HELD)
    pool.take(1)
    assert pool.min_free == 2 and pool.free == 5


def test_a_stack_of_random_moves() -> None:
    rng = np.random.default_rng(1)
    pool, held = PagePool("full", 50), []
    for _ in range(2000):
        if rng.random() < 0.5 and pool.free:
            held.extend(pool.take(int(rng.integers(1, pool.free + 1))).tolist())
        elif held:
            rng.shuffle(held)
            count = int(rng.integers(1, len(held) + 1))
            pool.give_back(ids(*held[:count]), HELD)
            held = held[count:]
        assert len(set(held)) == len(held) == pool.counts[HELD]
        assert sorted([*held, *pool.free_list().tolist()]) == list(range(50))
