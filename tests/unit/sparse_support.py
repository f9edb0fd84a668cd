"""A small world of sparse rows for tests: true keys and values, steps over them, and a plain model of the state.

Keys, values and queries are small integers that depend on (content of the row, position, layer) alone, so scores are
exact in float32 and ties are frequent. Works with every `Ops`: bodies are recorded, rotation turns nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch

from octavo.ops import reference
from octavo.ops.meta import KVLayer, KVView, PageSelector, SparseView, StepMeta
from octavo.ops.sparse_state import back_up, new_sparse_view, open_rows, summarise_host_pages

HEADS, KV_HEADS, DIM = 6, 2, 16
HOST_LAYERS = (3, 1)  # of four layers in a host page
LAYERS = len(HOST_LAYERS)


@dataclass(frozen=True)
class Setup:
    """Numbers of `SparseView`; lengths in tokens, D and K in pages."""

    page_size: int = 4
    device_pages: int = 8
    topk_pages: int = 3
    recent_tokens: int = 12
    footprint_tokens: int = 6
    dense_limit_tokens: int = 0
    rows: int = 4
    width_pages: int = 40
    dtype: torch.dtype = torch.float32
    selector: PageSelector | None = None


@dataclass(frozen=True)
class Piece:
    """One sequence of a step: n tokens behind `start`; a prompt chunk, or decoding (chain or tree by masks, depths)."""

    row: int
    start: int
    n: int
    prefill: bool = False
    masks: tuple[int, ...] | None = None
    depths: tuple[int, ...] | None = None
    branches: tuple[int, ...] | None = None  # what a token is made of; 0: the true one of its position


@lru_cache(maxsize=1 << 16)
def content(row_seed: int, position: int, layer: int, branch: int = 0) -> dict[str, torch.Tensor]:
    """q [H·D], k, v [KVH·D] of one token: integers from -2 to 2 (values: any)."""
    seed = ((row_seed * 1009 + position) * 31 + layer) * 17 + branch
    generator = torch.Generator().manual_seed(seed)
    q = torch.randint(-2, 3, (HEADS * DIM,), generator=generator).float()
    k = torch.randint(-2, 3, (KV_HEADS * DIM,), generator=generator).float()
    return {"q": q, "k": k, "v": torch.randn(KV_HEADS * DIM, generator=generator).bfloat16().float()}


@dataclass
class World:
    """Rows with their device state. `ops` runs the steps; `dense`: the same layers in a plain full pool."""

    ops: Any
    setup: Setup = field(default_factory=Setup)
    dense: bool = False
    seeds: dict[int, int] = field(default_factory=dict)  # what a row's tokens are made of; default: the row number
    shuffle: int = 0

    def __post_init__(self) -> None:
        s, nan = self.setup, float("nan")
        generator = torch.Generator().manual_seed(self.shuffle)
        pages = s.rows * s.width_pages
        table = torch.randperm(pages, generator=generator).to(torch.int32).view(s.rows, s.width_pages)
        host = torch.full((pages + 1, 4, 2, KV_HEADS, s.page_size, DIM), nan, dtype=s.dtype)
        view = new_sparse_view(
            sparse_layers=LAYERS, host_layers=HOST_LAYERS, slots=s.rows * s.device_pages, host=host, max_rows=s.rows,
            width_pages=s.width_pages, device_pages=s.device_pages, topk_pages=s.topk_pages,
            recent_tokens=s.recent_tokens, footprint_tokens=s.footprint_tokens,
            dense_limit_tokens=s.dense_limit_tokens, selector=s.selector,
        )  # fmt: skip
        view.slots.fill_(nan)
        view.bounds.fill_(nan)
        slots = torch.randperm(s.rows * s.device_pages, generator=generator).to(torch.int32)
        view.row_slots.copy_(slots.view(s.rows, s.device_pages))
        view.host_table.copy_(table)
        full = torch.full((pages + 1, LAYERS, 2, KV_HEADS, s.page_size, DIM), nan, dtype=s.dtype)
        self.kv = KVView(full, None, table.clone(), None, s.page_size, None if self.dense else view)
        pool = "full" if self.dense else "sparse"
        rope = self.ops.rope(torch.ones(4096, DIM // 2), torch.zeros(4096, DIM // 2))

        def body(tape: Any) -> None:
            for layer in range(LAYERS):
                place = KVLayer(pool, layer)
                q, k, v = (tape.input(f"{x}{layer}", (HEADS if x == "q" else KV_HEADS) * DIM) for x in "qkv")
                turned = tape.rope_write(q, k, v, place, rope, DIM)
                tape.output(f"y{layer}", tape.attention(turned, place, 0.21, HEADS, KV_HEADS, DIM))

        self.program = self.ops.program(body)

    @property
    def view(self) -> SparseView:
        assert self.kv.sparse is not None
        return self.kv.sparse

    def seed(self, row: int) -> int:
        return self.seeds.get(row, row)

    def token(self, piece: Piece, i: int, layer: int) -> dict[str, torch.Tensor]:
        depth = piece.depths[i] if piece.depths is not None else i
        branch = piece.branches[i] if piece.branches is not None else 0
        return content(self.seed(piece.row), piece.start + depth, layer, branch)

    def run(self, pieces: Sequence[Piece], extra_tokens: int = 0) -> list[torch.Tensor]:
        """[LAYERS, n, H·D] of each piece; decoding ones must come first."""
        meta = meta_of(pieces, extra_tokens)
        inputs = {}
        for layer in range(LAYERS):
            tokens = [self.token(piece, i, layer) for piece in pieces for i in range(piece.n)]
            inputs |= {f"{x}{layer}": torch.stack([t[x] for t in tokens]) for x in "qkv"}
        outputs = self.program.run(meta, self.kv, inputs)
        together = torch.stack([outputs[f"y{layer}"] for layer in range(LAYERS)])
        return list(together.split([piece.n for piece in pieces], dim=1))

    def back_up(self, row: int, first: int, last: int) -> None:
        """Columns first … last - 1 go to the host tier; from now on they may lose their places."""
        columns = torch.arange(first, last)
        back_up(self.kv, torch.full_like(columns, row), columns)
        summarise_host_pages(self.view, self.view.host_table[row, columns].long())
        self.view.backed[row] = last

    def prefill(self, row: int, length: int, chunk: int, *, start: int = 0) -> list[torch.Tensor]:
        """A prompt in chunks, backed up after each."""
        results = []
        for at in range(start, length, chunk):
            end = min(length, at + chunk)
            results += self.run([Piece(row, at, end - at, prefill=True)])
            if not self.dense:
                self.back_up(row, int(self.view.backed[row]), end // self.setup.page_size)
        return results

    def close(self, row: int) -> None:
        open_rows(self.view, torch.tensor([row]))
        self.view.backed[row] = 0


def meta_of(pieces: Sequence[Piece], extra_tokens: int = 0) -> StepMeta:
    decodes = sum(not piece.prefill for piece in pieces)
    assert all(piece.prefill == (i >= decodes) for i, piece in enumerate(pieces))
    sizes = [piece.n for piece in pieces]
    slots = torch.cat([torch.arange(piece.start, piece.start + piece.n) for piece in pieces])
    depths = [torch.tensor(piece.depths or tuple(range(piece.n))) for piece in pieces]
    masks = [m - (1 << 64) if m >> 63 else m for piece in pieces for m in piece.masks or ()]
    return StepMeta(
        token_ids=torch.zeros(len(slots), dtype=torch.int64),
        positions=torch.cat([piece.start + depth for piece, depth in zip(pieces, depths, strict=True)]),
        write_slots=slots,
        q_seq=torch.repeat_interleave(torch.arange(len(pieces)), torch.tensor(sizes)),
        rows=torch.tensor([piece.row for piece in pieces]),
        kv_start=torch.tensor([piece.start for piece in pieces]),
        mask=torch.tensor(masks) if masks else None,
        q_indptr=(0, *torch.tensor(sizes).cumsum(0).tolist()),
        max_kv_tokens=max(piece.start + piece.n for piece in pieces) + extra_tokens,
        num_decodes=decodes,
    )


# -- the plain model ------------------------------------------------------------------------------------------------


def own_slots(piece: Piece, i: int) -> list[int]:
    """Tokens of the piece that token i sees, in order."""
    if piece.masks is None:
        return list(range(i + 1))
    return [j for j in range(64) if piece.masks[i] >> j & 1]


def expected(world: World, piece: Piece, i: int, layer: int) -> tuple[torch.Tensor, list[int]]:
    """(float64 output [H·D], counted pages) of one token, from the truth alone."""
    s = world.setup
    token = world.token(piece, i, layer)
    seen = [content(world.seed(piece.row), at, layer) for at in range(piece.start)]
    seen += [world.token(piece, j, layer) for j in own_slots(piece, i)]
    position = piece.start + (piece.depths[i] if piece.depths is not None else i)
    keys = torch.stack([t["k"] for t in seen]).view(-1, KV_HEADS, DIM).to(s.dtype)
    values = torch.stack([t["v"] for t in seen]).view(-1, KV_HEADS, DIM).to(s.dtype)
    q = token["q"].view(HEADS, DIM)
    pages = list(range((len(seen) - 1) // s.page_size + 1))
    if not piece.prefill:
        p = s.page_size
        votes = [
            reference.page_vote(q, keys[c * p : (c + 1) * p].transpose(0, 1)) if (c + 1) * p <= piece.start else 0.0
            for c in pages
        ]
        pages = reference.counted_pages(position, votes, p, s.topk_pages, s.recent_tokens, s.dense_limit_tokens)
    at = torch.tensor([x for x in range(len(seen)) if x // s.page_size in pages])
    out = torch.zeros(HEADS, DIM, dtype=torch.float64)
    for head in range(HEADS):
        k, v = (x[at, head // (HEADS // KV_HEADS)].double() for x in (keys, values))
        out[head] = torch.softmax(k @ q[head].double() * 0.21, 0) @ v
    return out.flatten(), pages


class StateModel:
    """order and column_of of every (layer, row), kept in lists by `reference.place_columns`."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.state: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
        self.events: dict[str, int] = {"hit": 0, "loaded": 0, "new": 0, "replaced": 0}

    def step(self, layer: int, piece: Piece, counted: Sequence[Sequence[int]], backed: int) -> None:
        p, places = self.setup.page_size, self.setup.device_pages
        order, column_of = self.state.get((layer, piece.row), (list(range(places)), [-1] * places))
        written = list(range(piece.start // p, (piece.start + piece.n - 1) // p + 1))
        needed = sorted({*written, *(c for pages in counted for c in pages)} if not piece.prefill else {*written})
        self.events["hit"] += sum(c in column_of for c in needed)
        after, held, taken = reference.place_columns(order, column_of, needed, written, backed)
        self.events["loaded"] += sum(column * p < piece.start for _, column in taken)
        self.events["new"] += sum(column * p >= piece.start for _, column in taken)
        self.events["replaced"] += sum(column_of[place] >= 0 for place, _ in taken)
        self.state[layer, piece.row] = (after, held)

    def check(self, view: SparseView, layer: int, row: int) -> None:
        order, column_of = self.state[layer, row]
        assert view.order[layer, row].tolist() == order
        assert view.column_of[layer, row].tolist() == column_of
        for column in range(view.slot_map.shape[2]):
            place = column_of.index(column) if column in column_of else -1
            assert int(view.slot_map[layer, row, column]) == place


def check_bytes(world: World, row: int, committed: int) -> None:
    """Slots and host pages hold the true keys and values of committed tokens, bit for bit."""
    view, s = world.view, world.setup
    for layer in range(LAYERS):
        for at in range(committed):
            column, offset = divmod(at, s.page_size)
            true = content(world.seed(row), at, layer)
            kv = torch.stack([true["k"], true["v"]]).view(2, KV_HEADS, DIM).to(s.dtype)
            place = int(view.slot_map[layer, row, column])
            if place >= 0:
                assert torch.equal(view.slots[int(view.row_slots[row, place]), layer, :, :, offset], kv)
            if column < int(view.backed[row]):
                page = int(view.host_table[row, column])
                assert torch.equal(view.host[page, HOST_LAYERS[layer], :, :, offset], kv)
            assert place >= 0 or column < int(view.backed[row]), (column, "is nowhere")


def chain(row: int, start: int, n: int, wrong_from: int | None = None) -> Piece:
    """n tokens to verify of which those from `wrong_from` on are not the true ones."""
    branches = tuple(0 if wrong_from is None or i < wrong_from else 3 for i in range(n))
    return Piece(row, start, n, branches=branches)


def tree(row: int, start: int) -> Piece:
    """Root, two children, two children of the second child; the true path is root → second → its first."""
    masks = (0b1, 0b11, 0b101, 0b1101, 0b10101)
    return Piece(row, start, 5, masks=masks, depths=(0, 1, 1, 2, 2), branches=(0, 1, 0, 0, 2))


def with_dense_limit(setup: Setup) -> Setup:
    """The limit a buffer allows."""
    limit = max(0, setup.device_pages * setup.page_size - setup.recent_tokens)
    return replace(setup, dense_limit_tokens=limit)
