"""Products whose bits must not depend on the number of rows, over good kernels and over hostile ones."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from octavo.ops.rows import batched_rows, linear_rows, row_counts_that_agree

COUNTS = [*range(1, 41), 63, 64, 65, 97, 100, 130, 257, 600, 1025]


@pytest.mark.parametrize(("out", "inner"), [(96, 64), (40, 36), (17, 100), (320, 72)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_gives_a_row_the_same_bits_in_any_company(out: int, inner: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(out, inner, generator=generator).to(dtype)
    x = torch.randn(1025, inner, generator=generator).to(dtype)
    key = ("test", out, inner, str(dtype))

    def run(rows: torch.Tensor) -> torch.Tensor:
        return linear_rows(rows, key, lambda block: F.linear(block, weight), out)

    whole = run(x)
    for count in COUNTS:
        assert torch.equal(run(x[:count]), whole[:count]), count
    for start in (1, 7, 500):
        assert torch.equal(run(x[start : start + 3]), whole[start : start + 3])
    torch.testing.assert_close(whole.float(), (x.double() @ weight.double().T).float(), rtol=2e-2, atol=2e-1)


@pytest.mark.parametrize("hostile", ["few rows differ", "odd counts differ", "places differ", "every count differs"])
def test_kernels_that_look_at_the_row_count_are_tamed(hostile: str) -> None:
    """The kernel's bits change with the row count or the place; the product's must not."""
    weight = torch.randn(24, 32, generator=torch.Generator().manual_seed(1))

    def kernel(x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        shift = torch.zeros(rows, 1)
        if hostile == "few rows differ" and rows < 12:
            shift += 1
        elif hostile == "odd counts differ":
            shift += rows % 2
        elif hostile == "places differ":
            shift[:, 0] = torch.arange(rows) % 3
        elif hostile == "every count differs":
            shift += rows
        return (x[:, None, :] * weight).sum(-1) + shift

    x = torch.randn(70, 32, generator=torch.Generator().manual_seed(2))
    key = ("hostile", hostile)
    whole = linear_rows(x, key, kernel, 24)
    for count in (1, 2, 3, 5, 11, 16, 17, 64, 69):
        assert torch.equal(linear_rows(x[:count], key, kernel, 24), whole[:count]), count
    seen = row_counts_that_agree(key)
    assert not seen[1]
    assert seen[64] == (hostile != "places differ")


@pytest.mark.parametrize("kind", ["nt", "nn"])
@pytest.mark.parametrize(("inner", "columns"), [(64, 64), (24, 64), (64, 24), (256, 64)])
def test_batched_products_do_not_depend_on_batch_or_rows(kind: str, inner: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(5)
    a = torch.randn(40, 200, inner, generator=generator)
    b = torch.randn(40, inner, columns, generator=generator)
    if kind == "nt":
        b = b.transpose(1, 2).contiguous().transpose(1, 2)
    whole = batched_rows(a, b, kind)
    for rows in (1, 2, 3, 4, 5, 7, 9, 12, 30, 63, 100, 199):
        assert torch.equal(batched_rows(a[:, :rows], b, kind), whole[:, :rows]), rows
    for batch in (1, 2, 3, 5, 17):
        assert torch.equal(batched_rows(a[:batch, :3], b[:batch], kind), whole[:batch, :3]), batch


def test_two_threads_agree_with_themselves() -> None:
    threads = torch.get_num_threads()
    weight = torch.randn(96, 576, generator=torch.Generator().manual_seed(1))
    x = torch.randn(64, 576, generator=torch.Generator().manual_seed(2))
    try:
        torch.set_num_threads(2)
        run = lambda rows: linear_rows(rows, "two threads", lambda b: F.linear(b, weight), 96)  # noqa: E731
        whole = run(x)
        for count in (1, 2, 3, 5, 6, 7, 9, 10, 11, 13):
            assert torch.equal(run(x[:count]), whole[:count]), count
    finally:
        torch.set_num_threads(threads)
