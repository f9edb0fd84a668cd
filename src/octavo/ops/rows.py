"""Row-invariant products out of library kernels: every row gets the same bits whatever stands beside it.

A library picks its inner kernel by the number of rows (torch 2.13 on AVX2: 1, 2, 3, 5, 7, 9, 11 rows differ
from 64; multiples of 4 agree). So a product runs only with row counts whose bits were seen to agree with a
canonical run; other counts are padded up or cut into pieces. The trying is done once per shape and number of
threads, when a weight is packed, because comparing reads values and the launch path must not. The last resort,
one row at a time, is invariant by itself. (Design 04, Numerics.)
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial

import torch
from torch.nn import functional as F

# Row counts worth trying. Padding to the next one costs at most a third.
_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
_TRY_FLOP = 4e9  # the largest product tried: wider weights run in smaller pieces
_PROBE_ROWS = 16
_CANONICAL_ROWS = 64
CUDA_ROWS = 64  # on a device that must not be read back every product has this one shape

Product = Callable[[torch.Tensor], torch.Tensor]
"""[..., rows, in] -> [..., rows, out]; row i of the result is a function of row i of the argument alone."""

_agrees: dict[Hashable, dict[int, bool]] = {}


def prepare_linear(key: Hashable, product: Product, inner: int, out_features: int, dtype: torch.dtype) -> None:
    """Try the row counts of a product [n, inner] -> [n, out_features] unless its `key` is known already."""
    known = _agrees.setdefault((key, torch.get_num_threads()), {})
    if known:
        return
    limit = max(_PROBE_ROWS, int(_TRY_FLOP / (2 * inner * out_features)))
    probe = _probe(inner, dtype)
    canonical_rows = _CANONICAL_ROWS if limit >= _CANONICAL_ROWS else _PROBE_ROWS
    canonical = product(_tiled(probe, canonical_rows))
    expected = canonical[:_PROBE_ROWS]
    # Unless every place of the canonical run gives a row the same bits, there is nothing to agree with.
    sound = torch.equal(canonical, _tiled(expected, canonical_rows))
    for size in _SIZES:
        if size <= limit:
            known[size] = sound and torch.equal(product(_tiled(probe, size)), _tiled(expected, size))
    known.setdefault(1, False)


def linear_rows(x: torch.Tensor, key: Hashable, product: Product, out_features: int) -> torch.Tensor:
    """product(x) for x [n, in] with every row's bits independent of n. `key` names kernel and shape."""
    if x.shape[0] == 0:
        return product(x)
    if x.device.type != "cpu":
        exact = x.dtype == torch.float32  # bf16 is not promised to be deterministic there, and is to be fast
        return _in_pieces(x, product, _fixed_pieces(x.shape[0], CUDA_ROWS)) if exact else product(x)
    threads = torch.get_num_threads()
    if (key, threads) not in _agrees:  # the number of threads was changed since
        prepare_linear(key, product, x.shape[1], out_features, x.dtype)
    return _in_pieces(x, product, _pieces(x.shape[0], _agrees[key, threads]))


def prepare_batched(inner: int, columns: int, kind: str) -> None:
    """Try the row counts of `batched_rows` for [B, M, inner] · [B, inner, columns]."""
    known = _agrees.setdefault(("bmm", kind, inner, columns, torch.get_num_threads()), {})
    if not known:
        known.update({size: _bmm_agrees(kind, inner, columns, size) for size in _SIZES})


def batched_rows(a: torch.Tensor, b: torch.Tensor, kind: str) -> torch.Tensor:
    """torch.bmm(a, b) for float32 a [B, M, K], b [B, K, N]: bits of a row independent of B and M.

    `kind` is "nt" if b is a transposed view, "nn" if it is contiguous (the library tells them apart).
    """
    rows, inner, columns = a.shape[1], a.shape[2], b.shape[2]
    if a.device.type != "cpu":
        padded = -(-rows // CUDA_ROWS) * CUDA_ROWS
        return torch.bmm(F.pad(a, (0, 0, 0, padded - rows)), b)[:, :rows]
    prepare_batched(inner, columns, kind)
    pieces = _pieces(rows, _agrees["bmm", kind, inner, columns, torch.get_num_threads()])
    if pieces[0][0] > 1:
        return _in_pieces(a, partial(_bmm, b), pieces)
    alone = []
    for i in range(len(a)):
        alone.append(_in_pieces(a[i : i + 1], partial(_bmm, b[i : i + 1]), pieces))
    return torch.cat(alone)


def _bmm(b: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    return torch.bmm(a, b)


def row_counts_that_agree(key: Hashable) -> dict[int, bool]:
    """What has been seen so far for a key of `linear_rows` (for `octavo doctor` and tests)."""
    return dict(_agrees.get((key, torch.get_num_threads()), {}))


def _fixed_pieces(rows: int, size: int) -> list[tuple[int, int]]:
    return [(size, min(size, rows - at)) for at in range(0, rows, size)]


def _pieces(rows: int, agrees: dict[int, bool]) -> list[tuple[int, int]]:
    """(rows of the call, rows used) in order. Falls back to single rows, whose one shape needs no proof."""
    pieces: list[tuple[int, int]] = []
    left = rows
    while left > 0:
        size = _next_size(left, agrees)
        pieces.append((size, min(size, left)))
        left -= size
    return pieces


def _next_size(left: int, agrees: dict[int, bool]) -> int:
    """The smallest proven size that covers what is left without much padding, else the largest below it."""
    limit = max(_CANONICAL_ROWS, left + left // 8)
    for size in _SIZES:
        if left <= size <= limit and agrees.get(size):
            return size
    for size in reversed(_SIZES):
        if 1 < size < left and agrees.get(size):
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


def _bmm_agrees(kind: str, inner: int, columns: int, size: int) -> bool:
    """Over several batch sizes; canonical is one matrix of 64 rows."""
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
