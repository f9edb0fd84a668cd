"""The prefix tree's figures: what is counted, what counts as used, what a removed node leaves behind."""

from __future__ import annotations

from tests.laws.helpers import make, ok, prefill, sliding, tokens


def test_a_window_that_is_not_read_is_not_used() -> None:
    """Pages 0 and 1 end where the window of the reader begins."""
    ledger = sliding(window_tokens=8, full_pages=40, swa_pages=30)
    ledger.release(prefill(ledger, tokens(17), publish=True).row)
    ledger.release(prefill(ledger, [*tokens(8), *tokens(9, 50)], publish=True).row)
    upper = next(node for node in ledger.tree.nodes() if node.start_page == 0)
    before = upper.swa_last_use, upper.last_use
    got = ledger.admit(tokens(17))
    assert (got.cached_tokens, int(ledger.evicted[got.row]), upper.num_pages) == (16, 8, 2)
    assert upper.swa_last_use == before[0] and upper.last_use > before[1]


def test_merging_a_window_is_a_use_of_what_was_merged() -> None:
    """Two rows compute the same pages; the second has its first two no more when it publishes."""
    ledger = sliding(window_tokens=8, full_pages=40, swa_pages=30)
    first, second = prefill(ledger, tokens(16)), prefill(ledger, tokens(16))
    ledger.publish(first.row, tokens(17))
    ledger.evict([second.row])
    assert ledger.evicted[second.row] == 8
    (node,) = ledger.tree.nodes()
    before = node.swa_last_use
    ledger.publish(second.row, tokens(17))
    assert node.swa_last_use == node.last_use == ledger.tree.tick > before
    ok(ledger)


def test_what_was_evicted_and_healed_is_counted() -> None:
    ledger = sliding(window_tokens=8, full_pages=40, swa_pages=30)
    ledger.release(prefill(ledger, tokens(16), publish=True).row)
    (node,) = ledger.tree.nodes()
    pages = node.swa.tolist()
    assert ledger.tree.evict_swa(3) == 3 and all(ledger.tree.swa_node[page] is None for page in pages[:3])
    assert ledger.report()["stats"]["evicted_swa_pages"] == 3
    ledger.release(prefill(ledger, tokens(16)).row, tokens(17))
    stats = ledger.report()["stats"]
    assert (stats["healed_pages"], stats["evicted_full_pages"], stats["splits"]) == (3, 0, 0)
    assert ledger.reset_cache() == 4 and node.parent is None
    stats = ledger.report()["stats"]
    assert (stats["evicted_full_pages"], stats["evicted_swa_pages"]) == (4, 3 + 4)
    ok(ledger, at_rest=True)


def test_a_part_is_healed() -> None:
    """The row has two of the three pages that the tree has lost."""
    ledger = sliding(window_tokens=8, full_pages=40, swa_pages=30)
    ledger.release(prefill(ledger, tokens(16), publish=True).row)
    second = prefill(ledger, tokens(16, 0)[:3])
    ledger.tree.evict_swa(3)
    ledger.extend(second.row, 20)
    ledger.commit([second.row], [second.generation], [17])
    ledger.evict([second.row])
    assert ledger.evicted[second.row] == 8
    assert ledger.publish(second.row, tokens(18)) == 16
    (node,) = ledger.tree.nodes()
    assert [page >= 0 for page in node.swa.tolist()] == [False, False, True, True]
    assert ledger.tree.heals == 1
    ok(ledger)


def test_no_more_is_evicted_than_was_asked_for() -> None:
    ledger = sliding(window_tokens=8, full_pages=40, swa_pages=30)
    for start in (0, 50):
        ledger.release(prefill(ledger, tokens(9, start), publish=True).row)
    assert ledger.tree.evict_swa(3) == 3 and ledger.tree.evictable_swa == 1
    assert ledger.tree.evict_full(3) == 3 and ledger.tree.evictable_full == 1
    ok(ledger)


def test_a_match_leaves_a_token_in_the_second_node_too() -> None:
    ledger = make(full_pages=40)
    for prompt in (tokens(4), tokens(16)):
        ledger.release(prefill(ledger, prompt, publish=True).row)
    assert ledger.tree.num_nodes == 2
    assert [ledger.match(tokens(count)).pages for count in (12, 13, 16, 17)] == [2, 3, 3, 4]


def test_publishing_less_than_a_node_holds_splits_it() -> None:
    ledger = make(full_pages=40)
    short = prefill(ledger, tokens(10))
    ledger.release(prefill(ledger, tokens(16), publish=True).row)
    assert ledger.publish(short.row, tokens(10)) == 8
    assert sorted(node.num_pages for node in ledger.tree.nodes()) == [2, 2] and ledger.tree.splits == 1
    ok(ledger)


def test_a_node_cut_between_locked_and_loose_window_pages_gives_up_the_loose_ones() -> None:
    """Row A keeps the window of its end; row B shares four pages of five and locks two: two are nobody's."""
    ledger = sliding(window_tokens=8, swa_pages=20, full_pages=40)
    a = prefill(ledger, tokens(20), publish=True)
    ledger.evict([a.row])
    b = ledger.admit([*tokens(16), *tokens(5, 50)])
    assert b.cached_tokens == 16 and ledger.tree.evictable_swa == 2
    ok(ledger)
    assert ledger.tree.evict_swa(9) == 2 and ledger.tree.evictable_swa == 0
    ok(ledger)


def test_the_queue_of_window_pages_does_not_grow_with_history() -> None:
    ledger = sliding(window_tokens=8, swa_pages=20, full_pages=40)
    for start in (0, 20, 40):
        ledger.release(prefill(ledger, tokens(9, start), publish=True).row)
    for _ in range(2000):
        ledger.release(ledger.admit(tokens(9, 20)).row)
    assert len(ledger.tree.swa_heap) > 2 * ledger.tree.num_nodes + 1024
    ledger.tree.evict_swa(0)
    assert len(ledger.tree.swa_heap) <= 2 * ledger.tree.num_nodes + 1024
    assert ledger.tree.evict_swa(1) == 1
    ok(ledger)
