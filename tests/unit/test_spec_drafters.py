"""EAGLE-3 and DFlash drafters against networks recomputed from scratch for every token."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch

from octavo.errors import ConfigError, ModelError
from octavo.spec.checkpoint import random_draft
from octavo.spec.dflash import DFlashDrafter
from octavo.spec.drafter import Drafter, DraftRequest
from octavo.spec.eagle import EagleDrafter
from octavo.spec.verify import accept
from tests.fake_cuda import fake_cuda
from tests.unit import spec_reference as ref

FLAGS: list[dict[str, Any]] = [
    {},
    {"fc_norm": True},
    {"norm_before_fc": True},
    {"norm_before_residual": True},
    {"feed_normed": True},
    {"norm_logits": False},
    {"draft_vocab_size": 40},
    {"taps": (1, 5)},
]


def text(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(ref.VOCAB) for _ in range(length)]


def eagle(flags: dict[str, Any], **options: Any) -> tuple[EagleDrafter, ref.EagleReference]:
    target, network = ref.bind()
    weights = random_draft(ref.eagle_config(**flags), seed=3)
    return EagleDrafter(weights, target, max_rows=4, **options), ref.EagleReference(weights, network)


def begin(drafter: Drafter, row: int, tokens: list[int], cached: int = 0) -> None:
    drafter.begin(DraftRequest(row, tuple(tokens), 64, cached))


def prefill(drafter: Any, view: Any, row: int, tokens: list[int], cuts: tuple[int, ...], start: int = 0) -> None:
    """Show positions start … n-2 of a text, in chunks that end at `cuts`."""
    features = ref.features_of(tokens, len(drafter.taps))
    for stop in [*(c for c in cuts if start < c < len(tokens) - 1), len(tokens) - 1]:
        drafter.observe(ref.observe_chunk(view, row, tokens, features, start, stop))
        start = stop


@pytest.mark.parametrize("flags", FLAGS, ids=str)
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_chain_equals_the_network_from_scratch(flags: dict[str, Any], page_size: int) -> None:
    drafter, reference = eagle(flags, steps=4)
    assert isinstance(drafter, Drafter)
    view = ref.Pages.make(1, page_size=page_size).view
    tokens = text(1, 23)
    begin(drafter, 2, tokens)
    prefill(drafter, view, 2, tokens, (7, 16))
    draft = drafter.propose(ref.propose_batch(view, [2], [tokens], 4))
    features = ref.features_of(tokens, len(drafter.taps))
    assert draft.tokens[0].tolist() == reference.chain(tokens, features, 4)
    assert draft.lengths == (4,)


def test_a_chain_goes_on_after_verifies_of_every_length() -> None:
    """Rejected drafts leave nothing behind: after each accepted run the proposal equals one from scratch."""
    drafter, reference = eagle({}, steps=3)
    view = ref.Pages.make(1, page_size=4).view
    tokens = text(2, 40)
    features = ref.features_of(tokens, 3)
    begin(drafter, 1, tokens[:9])
    prefill(drafter, view, 1, tokens[:9], (4,))
    known = 9
    for accepted in (0, 3, 1, 2, 0, 3):
        draft = drafter.propose(ref.propose_batch(view, [1], [tokens[:known]], 3))
        assert draft.tokens[0].tolist() == reference.chain(tokens[:known], features, 3)
        stop = known + accepted
        observed = ref.observe_chunk(view, 1, tokens[: stop + 1], features, known - 1, stop, pad=3 - accepted)
        drafter.observe(observed)
        known = stop + 1


def test_rows_of_different_lengths_do_not_disturb_each_other() -> None:
    drafter, reference = eagle({}, steps=3)
    view = ref.Pages.make(1).view
    texts = {0: text(3, 5), 3: text(4, 33), 1: text(5, 2)}
    for row, tokens in texts.items():
        begin(drafter, row, tokens)
        prefill(drafter, view, row, tokens, (8,))
    rows = [3, 1, 0]
    draft = drafter.propose(ref.propose_batch(view, rows, [texts[r] for r in rows], 3, [3, 2, 0]))
    assert draft.lengths == (3, 2, 0)
    for i, row in enumerate(rows):
        features = ref.features_of(texts[row], 3)
        assert draft.tokens[i].tolist() == reference.chain(texts[row], features, 3)


@pytest.mark.parametrize("cached", [0, 16, 32])
def test_warm_equals_cold(cached: int) -> None:
    """A prefix whose draft KV is in the pages already gives the same drafts, and is not written again."""
    drafter, reference = eagle({}, steps=3)
    view = ref.Pages.make(1).view
    tokens = text(6, 40)
    begin(drafter, 0, tokens)
    prefill(drafter, view, 0, tokens, ())
    shared = view.full_table.clone()
    shared[1, : cached // 16] = shared[0, : cached // 16]
    warm = dataclasses.replace(view, full_table=shared)
    assert view.full is not None
    before = view.full.clone()
    begin(drafter, 1, tokens, cached)
    prefill(drafter, warm, 1, tokens, (), start=cached)
    draft = drafter.propose(ref.propose_batch(warm, [1], [tokens], 3))
    assert draft.tokens[0].tolist() == reference.chain(tokens, ref.features_of(tokens, 3), 3)
    pages = shared[1, : cached // 16].long()
    assert torch.equal(view.full[pages], before[pages])


def test_a_row_with_one_token_and_a_page_boundary_write_only_their_own_slots() -> None:
    """Law 12: the query of the newest pair must not write into the page that holds it."""
    drafter, _ = eagle({}, steps=3)
    view = ref.Pages.make(1).view
    tokens = text(7, 17)  # 16 committed: position 15 is the last of a page that may be shared
    begin(drafter, 0, tokens)
    prefill(drafter, view, 0, tokens, ())
    assert view.full is not None
    before = view.full.clone()
    drafter.propose(ref.propose_batch(view, [0], [tokens], 3))
    page = int(view.full_table[0, 0])
    assert torch.equal(view.full[page], before[page])
    changed = (view.full != before).flatten(1).any(dim=1).nonzero().flatten().tolist()
    assert changed == [int(view.full_table[0, 1])]


def test_nothing_survives_into_the_next_request() -> None:
    drafter, reference = eagle({}, steps=2)
    view = ref.Pages.make(1).view
    old, new = text(8, 30), text(9, 6)
    begin(drafter, 0, old)
    prefill(drafter, view, 0, old, ())
    drafter.end(0)
    begin(drafter, 0, new)
    prefill(drafter, view, 0, new, ())
    draft = drafter.propose(ref.propose_batch(view, [0], [new], 2))
    assert draft.tokens[0].tolist() == reference.chain(new, ref.features_of(new, 3), 2)


def brute_force_tree(
    reference: ref.EagleReference, tokens: list[int], steps: int, k: int, columns: int
) -> dict[tuple[int, ...], float]:
    """{path of tokens: cumulative log-probability} of the kept nodes."""
    pairs = reference.true_pairs(tokens, ref.features_of(tokens, 3))
    frontier: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    states: dict[tuple[int, ...], list[tuple[torch.Tensor, int]]] = {(): pairs}
    candidates: list[tuple[tuple[int, ...], float]] = []
    for _ in range(steps):
        children: list[tuple[tuple[int, ...], float]] = []
        for path, score in frontier:
            state, log_probs = reference.last(states[path])
            best, ids = log_probs.topk(k)
            for value, draft_id in zip(best.tolist(), ids.tolist(), strict=True):
                token = reference.target_id(draft_id)
                child = (*path, token)
                children.append((child, score + value))
                states[child] = [*states[path], (state, token)]
        candidates += children
        frontier = sorted(children, key=lambda c: -c[1])[:k]
    return dict(sorted(candidates, key=lambda c: -c[1])[:columns])


@pytest.mark.parametrize(("steps", "k", "nodes"), [(1, 3, 4), (2, 2, 5), (3, 3, 12), (4, 2, 15), (3, 2, 11)])
def test_a_tree_equals_brute_force(steps: int, k: int, nodes: int) -> None:
    drafter, reference = eagle({"draft_vocab_size": 60}, steps=steps, top_k=k, draft_tokens=nodes)
    view = ref.Pages.make(1, page_size=4).view
    texts = [text(10, 14), text(11, 7)]
    for row, tokens in enumerate(texts):
        begin(drafter, row, tokens)
        prefill(drafter, view, row, tokens, (5,))
    draft = drafter.propose(ref.propose_batch(view, [0, 1], texts, nodes - 1))
    assert draft.parents is not None and draft.depths is not None and draft.lengths == (nodes - 1,) * 2
    for row, tokens in enumerate(texts):
        paths: list[tuple[int, ...]] = [()]
        for j in range(nodes - 1):
            parent = int(draft.parents[row, j])
            assert parent <= j, "parents come first"
            paths.append((*paths[parent], int(draft.tokens[row, j])))
            assert int(draft.depths[row, j]) == len(paths[-1])
        assert set(paths[1:]) == set(brute_force_tree(reference, tokens, steps, k, nodes - 1))


def test_the_largest_tree_fits_and_is_verified() -> None:
    drafter, _ = eagle({}, steps=5, top_k=8, draft_tokens=64)
    assert (drafter.footprint_tokens, drafter.commit_lag_tokens, drafter.max_depth) == (64, 6, 5)
    view = ref.Pages.make(1).view
    tokens = text(12, 20)
    begin(drafter, 0, tokens)
    prefill(drafter, view, 0, tokens, ())
    draft = drafter.propose(ref.propose_batch(view, [0], [tokens], 63))
    assert draft.tokens.shape == (1, 63)
    sampled = torch.zeros(1, 64, dtype=torch.int64)
    nodes, counts, _ = accept(draft.tokens, draft.parents, draft.lengths, sampled, drafter.max_depth)
    assert nodes.shape == (1, 6)


def test_a_tree_shrinks_near_the_limit_and_at_draft_length_zero() -> None:
    drafter, _ = eagle({}, steps=3, top_k=2, draft_tokens=8)
    view = ref.Pages.make(1).view
    tokens = text(13, 20)
    for row in (0, 1):
        begin(drafter, row, tokens)
        prefill(drafter, view, row, tokens, ())
    both = [tokens, tokens]
    assert drafter.propose(ref.propose_batch(view, [0, 1], both, 7, [5, 2])).lengths == (7, 0)
    short = drafter.propose(ref.propose_batch(view, [0, 1], both, 7, [1, 1]))
    assert short.lengths == (2, 2) and short.depths is not None and int(short.depths.max()) == 1
    assert drafter.propose(ref.propose_batch(view, [0, 1], both, 0)).lengths == (0, 0)
    assert drafter.propose(ref.propose_batch(view, [0, 1], both, 7, [0, 0])).lengths == (0, 0)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"steps": 0}, "draft_steps"),
        ({"steps": 3, "top_k": 0}, "draft_topk"),
        ({"steps": 9, "top_k": 8, "draft_tokens": 8}, "draft_topk"),
        ({"steps": 3, "draft_tokens": 3}, "draft_tokens"),
        ({"steps": 2, "top_k": 2, "draft_tokens": 8}, "draft_tokens"),
        ({"steps": 5, "top_k": 8, "draft_tokens": 65}, "draft_tokens"),
        ({"steps": 1, "top_k": 97, "draft_tokens": 8}, "draft_topk"),
    ],
)
def test_trees_that_cannot_be_are_refused(options: dict[str, int], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        eagle({}, **options)


def test_a_draft_with_a_smaller_position_limit_than_the_prompt_drafts_nothing_and_counts() -> None:
    drafter, _ = eagle({"context_tokens": 12}, steps=2)
    view = ref.Pages.make(1).view
    tokens = text(14, 20)
    begin(drafter, 0, tokens)
    prefill(drafter, view, 0, tokens, ())
    assert drafter.propose(ref.propose_batch(view, [0], [tokens], 2)).lengths == (0,)
    assert drafter.limit.beyond == 1
    drafter.end(0)
    begin(drafter, 0, tokens[:5])
    prefill(drafter, view, 0, tokens[:5], ())
    assert drafter.propose(ref.propose_batch(view, [0], [tokens[:5]], 2)).lengths == (2,)


def test_the_seed_of_a_row_can_move() -> None:
    drafter, reference = eagle({}, steps=2)
    view = ref.Pages.make(1).view
    tokens = text(15, 12)
    begin(drafter, 0, tokens)
    prefill(drafter, view, 0, tokens, ())
    seed = drafter.export_seed(0)
    drafter.end(0)
    begin(drafter, 3, tokens, 11)
    drafter.import_seed(3, seed)
    moved = view.full_table.clone()
    moved[3] = moved[0]
    batch = ref.propose_batch(dataclasses.replace(view, full_table=moved), [3], [tokens], 2)
    assert drafter.propose(batch).tokens[0].tolist() == reference.chain(tokens, ref.features_of(tokens, 3), 2)


# -- DFlash ----------------------------------------------------------------------------------------------------------

DFLASH_FLAGS: list[dict[str, Any]] = [
    {},
    {"windows": (None, 9), "causal": (False, True)},
    {"windows": (9, None), "causal": (False, False)},
    {"windows": (5, 5), "causal": (True, True)},
    {"embed_scale": 0.5},
    {"num_layers": 1, "windows": (None,), "causal": (False,)},
]


def dflash(flags: dict[str, Any], **options: Any) -> tuple[DFlashDrafter, ref.DFlashReference]:
    target, network = ref.bind()
    weights = random_draft(ref.dflash_config(**flags), seed=4)
    return DFlashDrafter(weights, target, max_rows=4, **options), ref.DFlashReference(weights, network)


@pytest.mark.parametrize("flags", DFLASH_FLAGS, ids=str)
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_block_equals_the_network_from_scratch(flags: dict[str, Any], page_size: int) -> None:
    drafter, reference = dflash(flags)
    assert isinstance(drafter, Drafter)
    view = ref.Pages.make(2, page_size=page_size).view
    texts = [text(20, 22), text(21, 3)]
    for row, tokens in enumerate(texts):
        begin(drafter, row, tokens)
        prefill(drafter, view, row, tokens, (7,))
    draft = drafter.propose(ref.propose_batch(view, [0, 1], texts, 5, [5, 2]))
    assert draft.parents is None and draft.lengths == (5, 2)
    for row, tokens in enumerate(texts):
        assert draft.tokens[row].tolist() == reference.block(tokens, ref.features_of(tokens, 2))


def test_blocks_follow_each_other_and_leave_no_trace() -> None:
    drafter, reference = dflash({})
    view = ref.Pages.make(2, page_size=4).view
    tokens = text(22, 60)
    features = ref.features_of(tokens, 2)
    begin(drafter, 1, tokens[:9])
    prefill(drafter, view, 1, tokens[:9], ())
    known = 9
    for accepted, width in ((0, 5), (5, 5), (2, 3), (0, 0), (1, 5)):
        draft = drafter.propose(ref.propose_batch(view, [1], [tokens[:known]], max(width, 1)))
        expected = reference.block(tokens[:known], features)
        assert draft.tokens[0].tolist() == expected[: max(width, 1)]
        stop = known + accepted
        observed = ref.observe_chunk(view, 1, tokens[: stop + 1], features, known - 1, stop, pad=width - accepted)
        drafter.observe(observed)
        known = stop + 1


def test_context_kv_does_not_depend_on_chunking() -> None:
    drafter, _ = dflash({})
    tokens = text(23, 50)
    results = []
    for cuts in ((), (1, 2, 3), (16, 32), (31,)):
        view = ref.Pages.make(2).view
        begin(drafter, 0, tokens)
        prefill(drafter, view, 0, tokens, cuts)
        drafter.end(0)
        assert view.full is not None
        pages = view.full[view.full_table[0].long()][:, 2:]  # [pages, draft layers, 2, heads, p, D]
        results.append(pages.permute(0, 4, 1, 2, 3, 5).flatten(0, 1)[:49].clone())
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=1e-5)


def test_bad_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="block_size must be positive, got 0"):
        dflash({}, block_size=0)
    with pytest.raises(ConfigError, match="2 to 6"):
        dflash({}, block_size=7)
    with pytest.raises(ModelError, match="block_size 0"):
        ref.dflash_config(block_size=0)
    with pytest.raises(ModelError, match="EAGLE-3 draft is needed"):
        EagleDrafter(random_draft(ref.dflash_config()), ref.bind()[0], steps=2, max_rows=1)


# -- no host reads ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["chain", "tree", "dflash"])
def test_the_launch_path_runs_on_a_fake_cuda_device(kind: str) -> None:
    with fake_cuda() as device:
        target, _ = ref.bind(device)
        drafter: Any
        if kind == "dflash":
            drafter = DFlashDrafter(random_draft(ref.dflash_config()), target, max_rows=4)
        else:
            tree = {"top_k": 3, "draft_tokens": 10} if kind == "tree" else {}
            config = ref.eagle_config(draft_vocab_size=90)
            weights = dataclasses.replace(random_draft(dataclasses.replace(config, draft_vocab_size=96)), config=config)
            drafter = EagleDrafter(weights, target, steps=3, max_rows=4, **tree)
        full = torch.zeros(33, 4, 2, 2, 16, 16, device=device)
        table = torch.zeros(4, 8, dtype=torch.int32, device=device)
        from octavo.ops.meta import KVView
        from octavo.spec.drafter import Observation, ProposeBatch

        view = KVView(full, None, table, None, 16)
        two = torch.zeros(2, dtype=torch.int64, device=device)
        taps = len(drafter.taps) * ref.HIDDEN
        begin(drafter, 0, [1, 2])
        drafter.observe(
            Observation(
                two, (0, 1), (0, 4, 8), two, two, torch.zeros(8, taps, device=device),
                torch.zeros(8, dtype=torch.int64, device=device), (True, True), view, 128,
            )
        )
        draft = drafter.propose(ProposeBatch(two, (0, 1), two, two, 3, (3, 2), None, view, 128))
        assert draft.tokens.device.type == "cuda"
