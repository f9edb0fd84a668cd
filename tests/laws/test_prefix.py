"""The prefix tree through the ledger: matching, pairs, splits, tombstones, healing, eviction order."""

from __future__ import annotations

import random

import numpy as np
import pytest

from octavo.kv.heap import EvictionHeap
from octavo.kv.policy import LeastRecentlyUsed, load_policy
from tests.laws.helpers import commit, make, ok, pages, prefill, sliding, tokens


def cached(ledger, prompt, namespace=None) -> int:
    return ledger.match(np.array(prompt, np.int32), namespace).pages * ledger.page_size


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 12])
def test_a_match_leaves_a_token(length: int) -> None:
    ledger = make()
    ledger.release(prefill(ledger, tokens(12), publish=True).row)
    got = ledger.admit(tokens(length))
    assert got.cached_tokens == (length - 1) // 4 * 4 < length
    ok(ledger)


def test_whole_pages_only_and_the_first_difference_ends_it() -> None:
    ledger = make()
    ledger.release(prefill(ledger, tokens(16), publish=True).row)
    for at in range(16):
        changed = tokens(17)
        changed[at] = 99
        assert cached(ledger, changed) == at // 4 * 4


def test_a_match_does_not_jump_over_pages() -> None:
    """A B, then C below it: A C shares A alone, though C is a child of the node that holds A."""
    ledger = make()
    a, b, c = tokens(4), tokens(4, 10), tokens(4, 20)
    got = prefill(ledger, [*a, *b, 1], publish=True)
    ledger.extend(got.row, 13)
    commit(ledger, got, 13)
    ledger.publish(got.row, [*a, *b, *c, 1])
    assert ledger.tree.num_nodes == 2
    assert cached(ledger, [*a, *c, *c, 1]) == 4 and cached(ledger, [*a, *b, *c, 1]) == 12
    assert cached(ledger, [*c, *c, 1]) == 0
    other = ledger.admit([*a, *c, 1])
    assert pages(ledger, other.row) == pages(ledger, got.row)[:1]
    ok(ledger)


def test_hits_count_the_requests_that_reused_a_node() -> None:
    ledger = make()
    ledger.release(prefill(ledger, tokens(9), publish=True).row)
    (node,) = ledger.tree.nodes()
    assert (node.hits, node.locks) == (0, 0)
    for _ in range(2):
        ledger.release(ledger.admit(tokens(9)).row)
    assert (node.hits, node.locks) == (2, 0)
    ledger.admit(tokens(6))  # splits it: both halves keep what was counted, one is used once more
    assert sorted(n.hits for n in ledger.tree.nodes()) == [2, 3]


def test_pair_keys_need_the_next_token() -> None:
    """Draft KV at i depends on token i+1: the page [0, 4) is named by tokens 0 … 4."""
    ledger = make(key_mode="pair")
    row = prefill(ledger, tokens(9), publish=True).row
    assert ledger.protected[row] == 8
    ledger.release(row)
    assert cached(ledger, [0, 1, 2, 3, 4, 99, 99]) == 4
    assert cached(ledger, [0, 1, 2, 3, 99, 99, 99]) == 0
    assert cached(ledger, tokens(8)) == 4
    assert cached(ledger, tokens(9)) == 8
    assert cached(ledger, [*tokens(8), 99]) == 4
    ok(ledger)


def test_pair_keys_publish_one_token_less() -> None:
    ledger = make(key_mode="pair")
    got = prefill(ledger, tokens(8))
    assert ledger.publish(got.row, tokens(8)) == 4, "the token behind the second page is not known"
    assert ledger.publish(got.row, tokens(9)) == 8
    ok(ledger)


@pytest.mark.parametrize("key_mode", ["token", "pair"])
def test_split_in_the_middle_of_a_run(key_mode: str) -> None:
    ledger = make(key_mode=key_mode)
    a = prefill(ledger, tokens(18), publish=True)
    other = [*tokens(9), 70, 71, 72, 73, 74]
    assert cached(ledger, other) == 8
    b = ledger.admit(other)
    assert b.cached_tokens == 8 and pages(ledger, b.row) == pages(ledger, a.row)[:2]
    assert ledger.tree.num_nodes == 2 and ledger.tree.splits == 1
    ok(ledger)
    ledger.extend(b.row, 14)
    commit(ledger, b, 14)
    assert ledger.publish(b.row, other) == 12
    assert ledger.tree.num_nodes == 3
    ok(ledger)
    assert cached(ledger, tokens(18)) == 16 and cached(ledger, other) == 12
    ledger.release(a.row)
    ledger.release(b.row)
    ok(ledger, at_rest=True)


def test_namespaces_do_not_share() -> None:
    ledger = make()
    ledger.release(prefill(ledger, tokens(9), publish=True, namespace="adapter").row)
    assert cached(ledger, tokens(9)) == 0 and cached(ledger, tokens(9), "adapter") == 8
    assert list(ledger.tree.roots) == ["adapter"]
    ledger.reset_cache()
    assert not ledger.tree.roots, "an empty namespace is forgotten"
    ok(ledger, at_rest=True)


def test_a_namespace_in_use_survives_its_pages() -> None:
    ledger = make()
    first = prefill(ledger, tokens(9), publish=True, namespace="a")
    second = ledger.admit(tokens(3, 50), namespace="a")
    ledger.release(first.row)
    ledger.reset_cache()
    assert list(ledger.tree.roots) == ["a"]
    ledger.extend(second.row, 3)
    ledger.release(second.row)
    assert not ledger.tree.roots


def test_identical_cold_prompts_arriving_together_are_merged() -> None:
    ledger = make()
    a, b = prefill(ledger, tokens(10)), prefill(ledger, tokens(10))
    assert not set(pages(ledger, a.row)) & set(pages(ledger, b.row))
    ledger.publish(a.row, tokens(10))
    assert ledger.publish(b.row, tokens(10)) == 8
    assert pages(ledger, a.row)[:2] == pages(ledger, b.row)[:2]
    assert pages(ledger, a.row)[2] != pages(ledger, b.row)[2]
    assert ledger.full_pool.by_name()["cached"] == 2 and ledger.full_pool.by_name()["held"] == 2
    assert ledger.stats["remapped_pages"] == 2
    ok(ledger)
    ledger.release(a.row)
    ledger.release(b.row)
    ok(ledger, at_rest=True)


def test_duplicates_stay_held_while_a_step_reads_them() -> None:
    ledger = make()
    a, b = prefill(ledger, tokens(10), publish=True), prefill(ledger, tokens(10, 30))
    del a
    c = ledger.admit(tokens(9, 60))
    ledger.extend(c.row, 9)
    commit(ledger, c, 9)
    ledger.publish(c.row, tokens(9, 60))
    d = ledger.admit(tokens(8, 60))  # may not reuse the last page: it is cold there
    ledger.extend(d.row, 8)
    commit(ledger, d, 8)
    op = ledger.begin_op([d.row])
    free = ledger.full_pool.free
    duplicate = pages(ledger, d.row)[1]
    ledger.publish(d.row, tokens(9, 60))
    assert pages(ledger, d.row)[1] != duplicate
    assert ledger.full_pool.free == free and ledger.full_pool.state[duplicate] == 2
    ok(ledger)
    ledger.end_op(op)
    assert ledger.full_pool.free == free + 1 and ledger.full_pool.state[duplicate] == 0
    ok(ledger)
    del b


def test_least_recently_used_leaf_goes_first() -> None:
    ledger = make(full_pages=12)
    for start in (0, 20, 40):
        ledger.release(prefill(ledger, tokens(9, start), publish=True).row)
    ledger.release(ledger.admit(tokens(9, 0)).row)  # used again
    assert ledger.full_pool.by_name()["cached"] == 6
    got = ledger.admit(tokens(28, 100))
    ledger.extend(got.row, 28)  # 7 pages, 6 are free
    assert [cached(ledger, tokens(9, s)) for s in (0, 20, 40)] == [8, 4, 8]
    ledger.extend(got.row, 32)
    assert [cached(ledger, tokens(9, s)) for s in (0, 20, 40)] == [8, 0, 8]
    ledger.extend(got.row, 36)
    assert [cached(ledger, tokens(9, s)) for s in (0, 20, 40)] == [8, 0, 4]
    ok(ledger)


def test_publishing_is_a_use() -> None:
    ledger = make(full_pages=12)
    a, b = prefill(ledger, tokens(9)), prefill(ledger, tokens(9, 20))
    ledger.publish(b.row, tokens(9, 20))
    ledger.publish(a.row, tokens(9))
    for row in (a.row, b.row):
        ledger.release(row)
    ledger.tree.evict_full(2)
    assert (cached(ledger, tokens(9)), cached(ledger, tokens(9, 20))) == (8, 0)


def test_leaves_go_before_their_parents_and_locked_ones_stay() -> None:
    ledger = make(full_pages=10)
    a = prefill(ledger, tokens(9), publish=True)
    long = [*tokens(8), *tokens(8, 40), 1]
    ledger.release(prefill(ledger, long, publish=True).row)
    assert ledger.available("full") == ledger.full_pool.free + 2
    got = ledger.admit(tokens(4, 90))
    ledger.extend(got.row, ledger.available("full") * 4)
    assert cached(ledger, long) == 8, "what a row has locked stays"
    assert ledger.tree.evictable_full == 0
    ok(ledger)
    ledger.release(a.row)
    assert ledger.tree.evictable_full == 2
    ok(ledger)


def test_evicting_the_whole_tree_in_small_steps() -> None:
    ledger = make(full_pages=16)
    for branch in range(3):
        prompt = [*tokens(8), *tokens(5, 100 + 10 * branch)]
        ledger.release(prefill(ledger, prompt, publish=True).row)
    assert ledger.tree.evictable_full == 5 and ledger.tree.num_nodes == 4
    for left in range(4, -1, -1):
        assert ledger.tree.evict_full(1) == 1
        assert ledger.tree.evictable_full == left
        ok(ledger)
    assert ledger.tree.evict_full(1) == 0 and not ledger.tree.roots and ledger.tree.num_nodes == 0


def test_the_queue_does_not_grow_with_history() -> None:
    ledger = make(full_pages=24)
    for start in (0, 20, 40):
        ledger.release(prefill(ledger, tokens(9, start), publish=True).row)
    for _ in range(4000):
        ledger.release(ledger.admit(tokens(9, 20)).row)
    ledger.tree.evict_full(0)
    assert len(ledger.tree.full_heap) <= 2 * ledger.tree.num_nodes + 1024
    assert ledger.tree.evict_full(1) == 1 and cached(ledger, tokens(9, 0)) == 4
    ok(ledger)


class Leaf:
    """As much of a node as the queue reads."""

    def __init__(self, last_use: int) -> None:
        self.last_use, self.full_stamp, self.parent = last_use, 0, object()


def queue(entries: int) -> tuple[EvictionHeap, list[Leaf]]:
    """A queue of so many entries, of 600 leaves, 100 of which have gone; the others' last entry is the current one."""
    rng = random.Random(entries)
    heap, leaves = EvictionHeap("full", LeastRecentlyUsed()), [Leaf(0) for _ in range(600)]
    for number in range(entries):
        leaf = leaves[number % 600]
        leaf.last_use = rng.randrange(10_000)
        heap.push(leaf)
    for leaf in leaves[:100]:
        leaf.parent = None
    return heap, leaves[100:]


@pytest.mark.parametrize(("entries", "live", "left"), [(1800, 388, 1800), (1800, 387, 500), (1799, 387, 500)])
def test_stale_entries_are_swept_when_they_outnumber_the_nodes(entries: int, live: int, left: int) -> None:
    heap, leaves = queue(entries)
    heap.compact(live)
    assert len(heap) == left
    popped = [heap.pop(lambda leaf: leaf.parent is not None) for _ in leaves]
    assert [leaf.last_use for leaf in popped] == sorted(leaf.last_use for leaf in leaves)
    assert heap.pop(lambda leaf: leaf.parent is not None) is None


def test_a_policy_chooses_the_victim() -> None:
    class Shallow:
        def priority(self, node, pool):
            return -node.hits if pool == "full" else 0

    ledger = make(full_pages=12, evict_policy=Shallow())
    for start in (0, 20):
        ledger.release(prefill(ledger, tokens(9, start), publish=True).row)
    for _ in range(3):
        ledger.release(ledger.admit(tokens(9, 20)).row)
    ledger.tree.evict_full(2)
    assert (cached(ledger, tokens(9, 0)), cached(ledger, tokens(9, 20))) == (8, 0)


def test_the_example_policy_keeps_what_is_popular() -> None:
    ledger = make(full_pages=12, evict_policy=load_policy("examples.evict_policy:Popular"))
    ledger.release(prefill(ledger, tokens(9), publish=True).row)
    for _ in range(5):
        ledger.release(ledger.admit(tokens(9)).row)
    ledger.release(prefill(ledger, tokens(9, 20), publish=True).row)
    ledger.tree.evict_full(2)
    assert (cached(ledger, tokens(9)), cached(ledger, tokens(9, 20))) == (8, 0)


# --- windows ---------------------------------------------------------------------------------------------------


def test_floor_unlocks_shared_window_pages_and_they_stay_matchable() -> None:
    ledger = sliding(window_tokens=8)
    got = prefill(ledger, tokens(20), publish=True)
    assert ledger.tree.evictable_swa == 0
    assert ledger.evict([got.row]) == 3  # floor_p(20 − 8) = 12
    assert ledger.evicted[got.row] == 12 and ledger.tree.evictable_swa == 3
    assert pages(ledger, got.row, "swa") == ledger.swa_table[got.row, 3:5].tolist()
    ok(ledger)
    assert cached(ledger, tokens(9)) == 8, "unlocked is not gone"
    ledger.release(got.row)
    ok(ledger, at_rest=True)


def test_tombstones_cut_matches_and_are_healed() -> None:
    ledger = sliding(window_tokens=8, full_pages=40)
    got = prefill(ledger, tokens(20), publish=True)
    ledger.evict([got.row])
    ledger.release(got.row)
    assert ledger.tree.evict_swa(3) == 3  # the oldest positions go first
    assert ledger.report()["stats"]["evicted_swa_pages"] == 3
    assert [cached(ledger, tokens(n)) for n in (5, 9, 13, 17, 21)] == [0, 0, 0, 0, 20]
    ok(ledger)
    again = prefill(ledger, tokens(13))  # recomputed: three new full pages
    free = ledger.full_pool.free
    assert ledger.publish(again.row, tokens(13)) == 12
    assert ledger.tree.heals == 3 and ledger.full_pool.free == free + 3, "full duplicates go, SWA pages heal"
    assert [cached(ledger, tokens(n)) for n in (5, 9, 13, 17, 21)] == [4, 8, 12, 16, 20]
    ok(ledger)
    ledger.release(again.row)
    ok(ledger, at_rest=True)


def test_a_dead_page_in_the_middle() -> None:
    ledger = sliding(window_tokens=4, full_pages=40)
    got = prefill(ledger, tokens(24), publish=True)
    ledger.release(got.row)
    node = ledger.tree.nodes()[0]
    ledger.tree.evict_swa(3)
    assert (node.swa >= 0).tolist() == [False] * 3 + [True] * 3
    # boundary m needs page m−1 alive (window = one page)
    assert [cached(ledger, tokens(4 * m + 1)) for m in range(1, 7)] == [0, 0, 0, 16, 20, 24]
    ok(ledger)


@pytest.mark.parametrize("window", [3, 4, 5, 7, 8, 9, 16])
@pytest.mark.parametrize("length", range(1, 26))
def test_turn_two_reuses_turn_one_while_the_window_lives(window: int, length: int) -> None:
    """Lengths around the window and the page; after release and with the window's pages under the floor gone."""
    ledger = sliding(window_tokens=window, swa_pages=14, full_pages=40)
    got = prefill(ledger, tokens(length), publish=True)
    ledger.evict([got.row])
    plan = ledger.plan_decode([got.row], 2)
    assert plan.next[0] % 4 == 0
    ledger.release(got.row, tokens(length))
    ledger.tree.evict_swa(100)  # nothing is locked: everything goes
    assert cached(ledger, tokens(length + 9)) == 0
    again = prefill(ledger, tokens(length), publish=True)
    ledger.evict([again.row])
    ledger.tree.evict_swa(100)  # what the row has locked stays: the window before the insertion boundary
    assert cached(ledger, tokens(length + 9)) == length // 4 * 4
    ok(ledger)
    ledger.release(again.row)
    ok(ledger, at_rest=True)


def test_a_boundary_without_a_live_window_is_not_published() -> None:
    ledger = sliding(window_tokens=8)
    got = prefill(ledger, tokens(32))
    ledger.evict([got.row])  # floor 24
    assert ledger.publish(got.row, tokens(31)) == 0, "the boundary 28 would need 20 … 27"
    assert ledger.publish(got.row, tokens(32)) == 32
    assert cached(ledger, tokens(40)) == 32
    assert [cached(ledger, tokens(n)) for n in (29, 25, 9)] == [0, 0, 0], "below, there are tombstones"
    ok(ledger)


def test_merging_with_a_window_frees_both_duplicates() -> None:
    ledger = sliding(window_tokens=8)
    a, b = prefill(ledger, tokens(10)), prefill(ledger, tokens(10))
    ledger.publish(a.row, tokens(10))
    before = (ledger.full_pool.free, ledger.swa_pool.free)
    ledger.publish(b.row, tokens(10))
    assert (ledger.full_pool.free, ledger.swa_pool.free) == (before[0] + 2, before[1] + 2)
    assert pages(ledger, a.row, "swa")[:2] == pages(ledger, b.row, "swa")[:2]
    ok(ledger)
    ledger.release(a.row)
    assert ledger.tree.evictable_swa == 0
    ledger.release(b.row)
    assert ledger.tree.evictable_swa == 2
    ok(ledger, at_rest=True)


def test_splits_keep_window_pages_with_their_positions() -> None:
    ledger = sliding(window_tokens=8, full_pages=40)
    a = prefill(ledger, tokens(24), publish=True)
    b = ledger.admit([*tokens(12), 99])
    assert b.cached_tokens == 12
    assert pages(ledger, b.row, "swa") == ledger.swa_table[a.row, 1:3].tolist()
    ok(ledger)
    ledger.release(a.row)
    assert ledger.tree.evictable_swa == 4 and ledger.tree.evict_swa(100) == 4
    assert cached(ledger, [*tokens(12), 99]) == 12
    ok(ledger)
    ledger.release(b.row)
    ok(ledger, at_rest=True)


def test_least_recently_used_window_goes_first() -> None:
    ledger = sliding(window_tokens=4, full_pages=40)
    for start in (0, 30):
        ledger.release(prefill(ledger, tokens(9, start), publish=True).row)
    ledger.release(ledger.admit(tokens(9)).row)
    ledger.tree.evict_swa(1)
    assert (cached(ledger, tokens(5, 30)), cached(ledger, tokens(9, 30)), cached(ledger, tokens(5))) == (0, 8, 4)
    ledger.tree.evict_swa(1)
    assert (cached(ledger, tokens(9, 30)), cached(ledger, tokens(9))) == (0, 8)
