"""Sparse layers (HiSparse): against slow references and plain models, and bit for bit against dense attention and
against themselves under other company, chunks, drafts and places. Torch and every compiled instruction set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.ops import native_lib
from octavo.ops.meta import KVLayer, KVView
from octavo.ops.page_selector import PageBounds
from octavo.ops.sparse_state import back_up, load_dense, load_slots, new_sparse_view, open_rows, summarise_host_pages
from octavo.ops.torch_ops import TorchOps
from octavo.ops.torch_sparse import best, counted_list
from octavo.spec.verify import compact_kv
from tests.fake_cuda import fake_cuda
from tests.guard import no_device_sync
from tests.unit.sparse_support import (
    LAYERS,
    Piece,
    Setup,
    StateModel,
    World,
    chain,
    check_bytes,
    expected,
    meta_of,
    tree,
    with_dense_limit,
)

OPS: dict[str, Callable[[], Any]] = {"torch": TorchOps}
if native_lib.library() is not None:
    from octavo.ops.native import NativeOps

    for _isa in native_lib.available_isas():
        OPS[f"native {_isa}"] = partial(NativeOps, 2, isa=_isa)
BASE = Setup(device_pages=16)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def inputs_of(world: World, piece: Piece) -> dict[str, torch.Tensor]:
    inputs = {}
    for layer in range(LAYERS):
        tokens = [world.token(piece, i, layer) for i in range(piece.n)]
        inputs |= {f"{x}{layer}": torch.stack([t[x] for t in tokens]) for x in "qkv"}
    return inputs


def checked(world: World, model: StateModel, pieces: list[Piece]) -> None:
    """Run one step; outputs, places and order must be what the plain models say."""
    backed = {piece.row: int(world.view.backed[piece.row]) for piece in pieces}
    for piece, out in zip(pieces, world.run(pieces), strict=True):
        for layer in range(LAYERS):
            counted = []
            for i in range(piece.n):
                want, pages = expected(world, piece, i, layer)
                torch.testing.assert_close(out[layer, i].double(), want, atol=2e-5, rtol=1e-4)
                counted.append(pages)
            model.step(layer, piece, counted, backed[piece.row])
            model.check(world.view, layer, piece.row)


@pytest.mark.parametrize("name", OPS)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_steps_of_every_kind_against_the_plain_models(name: str, data: st.DataObject) -> None:
    """Outputs, selection, places, LRU order and bytes after random prompts, decodes, verifies, trees and backups."""
    p = data.draw(st.sampled_from([1, 4, 8, 16]), "page size")
    topk, recent = data.draw(st.integers(1, 5), "topk"), data.draw(st.integers(12, 17), "recent")
    setup = Setup(
        page_size=p, topk_pages=topk, recent_tokens=recent, width_pages=-(-160 // p), rows=2,
        device_pages=data.draw(st.integers(0, 8), "spare") + topk + 2 + (recent + 30) // p,
        dtype=data.draw(st.sampled_from([torch.float32, torch.bfloat16]), "dtype"),
    )  # fmt: skip
    if data.draw(st.booleans(), "dense limit"):
        setup = with_dense_limit(setup)
    world, model = World(OPS[name](), setup), StateModel(setup)
    committed, prompt = [0, 0], [data.draw(st.integers(1, 60), "prompt") for _ in range(2)]
    for _ in range(data.draw(st.integers(2, 9), "steps")):
        pieces, after = [], list(committed)
        for row in range(2):
            if committed[row] < prompt[row]:
                n = min(data.draw(st.integers(1, 8)), prompt[row] - committed[row])
                pieces.append(Piece(row, committed[row], n, prefill=True))
                after[row] += n
            elif committed[row] < 100:
                n = data.draw(st.integers(1, setup.footprint_tokens))
                accepted = data.draw(st.integers(1, n))
                pieces.insert(0, chain(row, committed[row], n, wrong_from=accepted))
                after[row] += accepted
        if any(not piece.prefill for piece in pieces) and data.draw(st.integers(0, 3)) == 0:
            kept = [piece for piece in pieces if not piece.prefill]
            pieces = [tree(piece.row, piece.start) for piece in kept]
            after = [c + any(piece.row == row for piece in pieces) for row, c in enumerate(committed)]
        if pieces:
            checked(world, model, pieces)
        late, committed = committed, after
        for row in range(2):  # the host may be one step behind
            first = int(world.view.backed[row])
            known = late[row] if data.draw(st.booleans(), "overlap") else committed[row]
            world.back_up(row, first, max(first, known // p))
            check_bytes(world, row, committed[row])
        if committed[0] > 40 and data.draw(st.integers(0, 4)) == 0:  # the row ends, another takes its place
            world.close(0)
            world.seeds[0] = data.draw(st.integers(5, 9))
            for layer in range(LAYERS):
                model.state.pop((layer, 0), None)
            committed[0] = 0


@pytest.mark.parametrize("name", OPS)
def test_a_long_row_hits_loads_and_replaces(name: str) -> None:
    setup = replace(BASE, device_pages=11)
    world, model = World(OPS[name](), setup), StateModel(setup)
    for at in range(0, 120, 8):
        checked(world, model, [Piece(1, at, 8, prefill=True)])
        world.back_up(1, at // 4, (at + 8) // 4)
    for at in range(120, 150):
        checked(world, model, [chain(1, at, 1)])
        world.back_up(1, int(world.view.backed[1]), (at + 1) // 4)
    assert min(model.events.values()) > 20, model.events
    assert world.view.counts.tolist() == [model.events[name] for name in ("hit", "loaded", "new")]
    check_bytes(world, 1, 150)


@pytest.mark.parametrize("name", OPS)
def test_a_union_that_does_not_fit_is_read_in_the_host_tier(name: str) -> None:
    """Six rows of a verify want more pages than there are places: right all the same, and writes have places."""
    setup = replace(BASE, device_pages=8, topk_pages=3)
    world, model = World(OPS[name](), setup), StateModel(setup)
    world.prefill(1, 90, 4)
    for layer in range(LAYERS):
        order = world.view.order[layer, 1].tolist()
        model.state[layer, 1] = (order, world.view.column_of[layer, 1].tolist())
    for at in (90, 94, 98):
        checked(world, model, [chain(1, at, 6, wrong_from=4)])
        world.back_up(1, int(world.view.backed[1]), (at + 4) // 4)
        check_bytes(world, 1, at + 4)


STEPS = {
    "decode": lambda row, at: chain(row, at, 1),
    "verify": lambda row, at: chain(row, at, 6, wrong_from=3),
    "tree": tree,
    "chunk": lambda row, at: Piece(row, at, 8, prefill=True),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("name", OPS)
def test_with_every_page_counted_the_bits_are_those_of_dense_attention(
    name: str, kind: str, dtype: torch.dtype
) -> None:
    """K at least all pages; and, with K = 1, a row below the dense limit. Lengths around the blocks of 64 and 128."""
    for limit in (False, True):
        setup = replace(BASE, page_size=8, device_pages=50, topk_pages=40, width_pages=45, dtype=dtype)
        if limit:
            setup = with_dense_limit(replace(setup, topk_pages=1))
        sparse, dense = World(OPS[name](), setup), World(OPS[name](), setup, dense=True)
        for row, length in enumerate((1, 63, 129, 260)):
            for world in (sparse, dense):
                world.prefill(row, length, 64)
            piece = STEPS[kind](row, length)
            assert same(sparse.run([piece])[0], dense.run([piece])[0]), (length, limit)


@pytest.mark.parametrize("kind", ["decode", "verify", "tree"])
@pytest.mark.parametrize("name", OPS)
def test_bits_do_not_depend_on_company_chunks_places_or_what_is_loaded(name: str, kind: str) -> None:
    def start(chunk: int = 8, shuffle: int = 0) -> World:
        world = World(OPS[name](), BASE, shuffle=shuffle)
        for row, length in enumerate((100, 61, 40)):
            world.prefill(row, length, chunk)
        return world

    piece = STEPS[kind](0, 100)
    want = start().run([piece])[0]
    masked = kind == "tree"
    company = [tree(1, 61), piece, tree(2, 40)] if masked else [chain(1, 61, 4), piece, chain(2, 40, 1)]
    assert same(start().run(company)[1], want)
    if not masked:
        assert same(start().run([piece, Piece(2, 40, 9, prefill=True)])[0], want)
    assert same(start(chunk=5, shuffle=5).run([piece], extra_tokens=40)[0], want)
    cold = start()
    open_rows(cold.view, torch.tensor([0]))  # nothing is in the slots: everything comes from the host tier
    assert same(cold.run([piece])[0], want)
    warm = start()
    warm.run([piece])
    warm.run([chain(1, 61, 2)])
    assert same(warm.run([piece])[0], want)


@pytest.mark.parametrize("name", OPS)
def test_a_drafted_row_counts_and_sees_what_plain_decode_does(name: str) -> None:
    plain, chained, treed = (World(OPS[name](), BASE) for _ in range(3))
    for world in (plain, chained, treed):
        world.prefill(0, 70, 8)
    single = [plain.run([chain(0, 70 + i, 1)])[0] for i in range(6)]
    assert same(chained.run([chain(0, 70, 6)])[0], torch.cat(single, dim=1))
    path = treed.run([tree(0, 70)])[0][:, [0, 2, 3]]
    assert same(path, torch.cat(single[:3], dim=1))


@pytest.mark.parametrize("name", OPS)
def test_compaction_of_a_tree_moves_the_slots_of_every_sparse_layer(name: str) -> None:
    plain, treed = World(OPS[name](), BASE), World(OPS[name](), BASE)
    for world in (plain, treed):
        world.prefill(0, 70, 8)
    for i in range(3):
        plain.run([chain(0, 70 + i, 1)])
    treed.run([tree(0, 70)])
    compact_kv(treed.kv, torch.tensor([0]), torch.tensor([70]), torch.tensor([[0, 2, 3]]), ())
    check_bytes(treed, 0, 73)
    treed.back_up(0, 17, 18)
    for at in range(73, 80):
        assert same(treed.run([chain(0, at, 1)])[0], plain.run([chain(0, at, 1)])[0])


@pytest.mark.parametrize("name", OPS)
def test_pages_loaded_into_fresh_slots_are_where_the_state_says(name: str) -> None:
    """What a resumed row does: two rows lose their slots and get their newest columns back, in places 0, 1, …"""
    world, untouched = World(OPS[name](), BASE), World(OPS[name](), BASE)
    for each in (world, untouched):
        each.prefill(0, 64, 8)
        each.prefill(2, 40, 8)
    rows = torch.tensor([0, 2])
    open_rows(world.view, rows)
    world.view.slots.fill_(float("nan"))
    load_slots(world.kv, torch.tensor([0, 2, 0, 0, 2]), torch.tensor([13, 9, 14, 15, 8]))
    for row, columns in ((0, [13, 14, 15]), (2, [9, 8])):
        empty = BASE.device_pages - len(columns)
        for layer in range(LAYERS):
            assert world.view.column_of[layer, row].tolist() == columns + [-1] * empty
            assert world.view.slot_map[layer, row, columns].tolist() == list(range(len(columns)))
            assert int((world.view.slot_map[layer, row] >= 0).sum()) == len(columns)
            places = list(range(BASE.device_pages))
            assert world.view.order[layer, row].tolist() == places[len(columns) :] + places[: len(columns)]
        check_bytes(world, row, 64 if row == 0 else 40)
    assert int((world.view.slot_map[:, 1] >= 0).sum()) == 0
    pieces = [chain(0, 64, 2), chain(2, 40, 1)]
    for got, want in zip(world.run(pieces), untouched.run(pieces), strict=True):
        assert same(got, want)


@pytest.mark.parametrize("name", OPS)
def test_what_has_no_page_goes_to_the_spare_slot(name: str) -> None:
    world = World(OPS[name](), BASE)
    world.prefill(0, 40, 8)
    before = world.view.slots.clone()
    world.view.host_table[0, 10:] = -1
    if name == "torch":
        world.run([chain(0, 40, 6)])
    else:
        with pytest.raises(Exception, match="no page"):
            world.run([chain(0, 40, 6)])
    changed = (world.view.slots.view(torch.int32) != before.view(torch.int32)).flatten(1).any(1)
    mapped = {int(world.view.row_slots[0, place]) for place in range(16) if int(world.view.column_of[0, 0, place]) >= 0}
    assert not changed[:-1].any() or set(changed[:-1].nonzero().flatten().tolist()) <= mapped


def refused(world: World, match: str, **changes: Any) -> None:
    broken = replace(world.kv, sparse=replace(world.view, **changes))
    with pytest.raises(ValueError, match=match):
        world.program.run(meta_of([chain(0, 0, 1)]), broken, inputs_of(world, chain(0, 0, 1)))


@pytest.mark.parametrize("name", [name for name in OPS if name != "torch"])
def test_compiled_code_refuses_a_view_it_cannot_read(name: str) -> None:
    world = World(OPS[name](), BASE)
    view = world.view
    refused(world, "page bounds only", selector=PageBounds())
    refused(world, "slots of shape", slots=view.slots[..., :8])
    refused(world, "both be float32 or bfloat16", host=view.host.double())
    refused(world, "sparse layers in the slots", slots=view.slots[:, :1], host_layers=(1,))
    refused(world, "contiguous", bounds=view.bounds.transpose(3, 4))
    refused(world, "order must be int32", order=view.order.long())
    refused(world, "bounds must be", bounds=view.bounds[:, 1:].contiguous())
    with pytest.raises(ValueError, match="has sparse layers"):
        world.program.run(meta_of([chain(0, 0, 1)]), replace(world.kv, sparse=None), inputs_of(world, chain(0, 0, 1)))


def test_selection_takes_the_best_and_of_equal_pages_the_lowest() -> None:
    scores = torch.tensor([[9.0, 2.0, 5.0, 2.0, 2.0, 7.0], [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]])
    candidates = torch.tensor([[False, True, True, True, True, False], [True, False, True, True, True, True]])
    assert best(scores, candidates, 3).tolist() == [
        [False, True, True, True, False, False],
        [True, False, True, True, False, False],
    ]
    columns, count = counted_list(best(scores, candidates, 3), 4)
    assert columns[:, :3].tolist() == [[1, 2, 3], [0, 2, 3]] and count.tolist() == [3, 3]


@pytest.mark.parametrize("kind", STEPS)
def test_a_step_never_waits_for_the_device(kind: str) -> None:
    """The guard of the launch path, over selection, swap-in, attention and compaction."""
    world = World(TorchOps(), replace(BASE, device_pages=8))
    world.prefill(0, 60, 4)
    piece = STEPS[kind](0, 60)
    world.run([chain(1, 0, 1), piece] if not piece.prefill and piece.masks is None else [piece])
    meta, inputs = meta_of([piece]), inputs_of(world, piece)
    rows, start, nodes = torch.tensor([0]), torch.tensor([60]), torch.tensor([[0, 1]])
    with no_device_sync():
        world.program.run(meta, world.kv, inputs)
        compact_kv(world.kv, rows, start, nodes, ())
        open_rows(world.view, rows)


@pytest.mark.parametrize("kind", STEPS)
def test_every_operation_runs_on_a_cuda_device_that_is_not_there(kind: str) -> None:
    """Shapes and devices only: nothing is read back, nothing mixes devices."""
    piece = STEPS[kind](0, 200)
    described = meta_of([piece, Piece(1, 0, 30, prefill=True)] if piece.masks is None else [piece])
    with fake_cuda() as device:
        tensors = ("token_ids", "positions", "write_slots", "q_seq", "rows", "kv_start")
        made = {name: torch.zeros(len(getattr(described, name)), dtype=torch.int64, device=device) for name in tensors}
        mask = None if described.mask is None else torch.zeros(piece.n, dtype=torch.int64, device=device)
        meta = replace(described, mask=mask, **made)
        host = torch.zeros(65, 4, 2, 2, 4, 16, device=device)
        view = new_sparse_view(
            sparse_layers=1, host_layers=(1,), dense_host_layers=(0,), slots=32, host=host, max_rows=4, width_pages=60,
            device_pages=8, topk_pages=3, recent_tokens=12, footprint_tokens=6, dense_limit_tokens=20, device=device,
        )  # fmt: skip
        table = torch.zeros(4, 60, dtype=torch.int32, device=device)
        kv = KVView(torch.zeros(9, 1, 2, 2, 4, 16, device=device), None, table, None, 4, view)
        ops = TorchOps(device)
        rope = ops.rope(torch.ones(600, 8, device=device), torch.zeros(600, 8, device=device))

        def body(tape: Any) -> None:
            for layer in (KVLayer("full", 0), KVLayer("sparse", 0)):
                q, k, v = (tape.input(x, 64 if x == "q" else 32) for x in "qkv")
                tape.output(layer.pool, tape.attention(tape.rope_write(q, k, v, layer, rope, 16), layer, 0.2, 4, 2, 16))

        n = meta.num_tokens
        inputs = {x: torch.zeros(n, 64 if x == "q" else 32, device=device) for x in "qkv"}
        assert ops.program(body).run(meta, kv, inputs)["sparse"].shape == (n, 64)
        rows, columns = (torch.zeros(3, dtype=torch.int64, device=device) for _ in range(2))
        for operation in (back_up, load_dense, load_slots):
            operation(kv, rows, columns)
        open_rows(view, rows)
        summarise_host_pages(view, rows)
        compact_kv(kv, rows, rows, torch.zeros(3, 3, dtype=torch.int64, device=device), ("full",))
