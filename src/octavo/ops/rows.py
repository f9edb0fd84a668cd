"""Row-invariant products out of library kernels: every row gets the same bits whatever stands beside it.

A library picks its inner kernel by the number of rows (torch 2.13 on AVX2: 1, 2, 3, 5, 7, 9, 11 rows differ
from 64; multiples of 4 agree). So a product runs only with row counts whose bits were seen to agree with a
canonical run; other counts are padded up or cut into pieces. What was seen is remembered per shape and number of
threads. The last resort, one row at a time, is invariant by itself. (Design 04, Numerics.)
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch.nn import functional as F

# Row counts worth trying. Padding to the next one costs at most a third.
_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
_CANONICAL_ROWS = 64
_CANONICAL_ROWS_WIDE = 16  # for heads of 2**25 weights and more: 64 rows would take seconds
_PROBE_ROWS = 16
CUDA_ROWS = 64  # on a device that must not be read back every product has this one shape

Product = Callable[[torch.Tensor], torch.Tensor]
"""[..., rows, in] -> [..., rows, out]; row i of the result is a function of row i of the argument alone."""

_agrees: dict[Hashable, dict[int, bool]] = {}


def linear_rows(x: torch.Tensor, key: Hashable, product: Product, out_features: int) -> torch.Tensor:
    """product(x) for x [n, in] with every row's bits independent of n. `key` names kernel and shape."""
    if x.shape[0] == 0:
        return product(x)
    if x.device.type != "cpu":
        return _in_pieces(x, product, _fixed_pieces(x.shape[0], CUDA_ROWS))
    known = _agrees.setdefault((key, torch.get_num_threads()), {})
    wide = out_features * x.shape[1] >= 2**25
    rows = _CANONICAL_ROWS_WIDE if wide else _CANONICAL_ROWS

    def agrees(size: int) -> bool:
        if size not in known:
            known[size] = _linear_agrees(product, x.shape[1], x.dtype, size, rows)
        return known[size]

    return _in_pieces(x, product, _pieces(x.shape[0], agrees))


def batched_rows(a: torch.Tensor, b: torch.Tensor, kind: str) -> torch.Tensor:
    """torch.bmm(a, b) for float32 a [B, M, K], b [B, K, N]: bits of a row independent of B and M.

    `kind` is "nt" if b is a transposed view, "nn" if it is contiguous (the library tells them apart).
    """
    rows, inner, columns = a.shape[1], a.shape[2], b.shape[2]
    if a.device.type != "cpu":
        padded = -(-rows // CUDA_ROWS) * CUDA_ROWS
        return torch.bmm(F.pad(a, (0, 0, 0, padded - rows)), b)[:, :rows]
    known = _agrees.setdefault(("bmm", kind, inner, columns, torch.get_num_threads()), {})

    def agrees(size: int) -> bool:
        if size not in known:
            known[size] = _bmm_agrees(kind, inner, columns, size)
        return known[size]

    for multiple in (4, 8, 16):
        padded = -(-rows // multiple) * multiple
        if agrees(padded):
            return _in_pieces(a, lambda block: torch.bmm(block, b), [(padded, rows)])
    pieces = _pieces(rows, agrees)
    if pieces[0][0] > 1:
        return _in_pieces(a, lambda block: torch.bmm(block, b), pieces)
    single = [_in_pieces(a[i : i + 1], lambda block, i=i: torch.bmm(block, b[i : i + 1]), pieces) for i in range(len(a))]
    return torch.cat(single)


def row_counts_that_agree(key: Hashable) -> dict[int, bool]:
    """What has been seen so far for a key of `linear_rows` (for `octavo doctor` and tests)."""
    return dict(_agrees.get((key, torch.get_num_threads()), {}))


def _fixed_pieces(rows: int, size: int) -> list[tuple[int, int]]:
    return [(size, min(size, rows - at)) for at in range(0, rows, size)]


def _pieces(rows: int, agrees: Callable[[int], bool]) -> list[tuple[int, int]]:
    """(rows of the call, rows used) in order. Falls back to single rows, whose one shape needs no proof."""
    pieces: list[tuple[int, int]] = []
    left = rows
    while left > 0:
        size = _next_size(left, agrees)
        pieces.append((size, min(size, left)))
        left -= size
    return pieces


def _next_size(left: int, agrees: Callable[[int], bool]) -> int:
    """The smallest proven size that covers what is left without much padding, else the largest below it."""
    limit = max(_CANONICAL_ROWS, left + left // 8)
    for size in _SIZES:
        if left <= size <= limit and agrees(size):
            return size
    for size in reversed(_SIZES):
        if 1 < size < left and agrees(size):
            return size
    return 1


def _in_pieces(x: torch.Tensor, product: Product, pieces: list[tuple[int, int]]) -> torch.Tensor:
    results, at = [], 0
    for size, used in pieces:
        block = x[..., at : at + used, :]
        if size > used:
            block = F.pad(block, (0, 0, 0, size - used))
        elif x.shape[-1] % 16:
            block = block.contiguous() if at == 0 else block.clone()  # rows aligned as in every other call
        y = product(block)
        results.append(y[..., :used, :] if size > used else y)
        at += used
    return results[0] if len(results) == 1 else torch.cat(results, dim=-2)


def _probe(inner: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(20240601)
    return torch.randn(_PROBE_ROWS, inner, generator=generator).to(dtype)


def _tiled(probe: torch.Tensor, rows: int) -> torch.Tensor:
    return probe.repeat(-(-rows // len(probe)), 1)[:rows].contiguous()


def _linear_agrees(product: Product, inner: int, dtype: torch.dtype, size: int, canonical_rows: int) -> bool:
    """Do `size` rows give the canonical run's bits, at every place a row can stand in?"""
    probe = _probe(inner, dtype)
    canonical = product(_tiled(probe, canonical_rows))
    if not torch.equal(canonical, _tiled(canonical[:_PROBE_ROWS], canonical_rows)):
        return False  # no two places alike: nothing to agree with
    return torch.equal(product(_tiled(probe, size)), _tiled(canonical[:_PROBE_ROWS], size))


def _bmm_agrees(kind: str, inner: int, columns: int, size: int) -> bool:
    """As above for a batched product, over several batch sizes; canonical is one matrix of 64 rows."""
    generator = torch.Generator().manual_seed(20240602)
    probe = _probe(inner, torch.float32)
    batches = [count for count in (1, 2, 3, 8, 33) if count <= 3 or count * size <= 4096]
    b = torch.randn(max(batches), inner, columns, generator=generator)
    if kind == "nt":
        b = b.transpose(1, 2).contiguous().transpose(1, 2)
    a = _tiled(probe, _CANONICAL_ROWS)[None]
    whole = torch.cat([torch.bmm(a, b[i : i + 1]) for i in range(len(b))])
    canonical = whole[:, :_PROBE_ROWS]
    if not torch.equal(whole, canonical.repeat(1, _CANONICAL_ROWS // _PROBE_ROWS, 1)):
        return False
    expected = canonical.repeat(1, -(-size // _PROBE_ROWS), 1)[:, :size]
    tiled = _tiled(probe, size)[None]
    return all(torch.equal(torch.bmm(tiled.repeat(n, 1, 1), b[:n]), expected[:n]) for n in batches)
