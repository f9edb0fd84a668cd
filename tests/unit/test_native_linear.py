"""Linear layers of the compiled module: against float64, and the same bits for any rows, threads, instruction set."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import ConfigError
from octavo.ops.native import NativeOps, NativeWeight
from octavo.ops.weights import Matrix
from tests.unit.native_support import ISAS, KINDS, linear_reference, random_matrix, run_body, same_bits


def product(ops: NativeOps, x: torch.Tensor, w: NativeWeight) -> torch.Tensor:
    return run_body(ops, lambda t: t.output("y", t.linear(t.input("x", x.shape[1]), w)), {"x": x})["y"]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=12, deadline=None)
@given(out=st.integers(1, 70), groups=st.integers(1, 9), rows=st.integers(1, 19), seed=st.integers(0, 99))
def test_against_float64(isa: str, kind: str, out: int, groups: int, rows: int, seed: int) -> None:
    ops = NativeOps(1, isa=isa)
    inner = groups * 32 - (seed % 32 if kind in ("bf16", "fp32") else 0)
    matrix = random_matrix(kind, out, inner, seed)
    x = torch.randn(rows, inner, generator=torch.Generator().manual_seed(seed)) * 3
    want = linear_reference(x, matrix)
    got = product(ops, x, ops.matrix(matrix)).double()
    bound = x.abs().double() @ matrix.dequantize().abs().double().T
    assert bool(((got - want).abs() <= 3e-6 * bound + 1e-6).all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("out", "inner"), [(48, 64), (33, 96), (576, 576)])
def test_bits_do_not_depend_on_rows_threads_or_instruction_set(kind: str, out: int, inner: int) -> None:
    matrix = random_matrix(kind, out, inner, 7)
    x = torch.randn(64, inner, generator=torch.Generator().manual_seed(1))
    first = NativeOps(1, isa=ISAS[0])
    want = product(first, x[:1], first.matrix(matrix))
    rest = torch.cat([product(first, x[r : r + 1], first.matrix(matrix)) for r in range(1, 64)])
    want = torch.cat([want, rest])
    for isa in ISAS:
        for threads in (1, 2, 3):
            ops = NativeOps(threads, isa=isa)
            w = ops.matrix(matrix)
            for rows in [*range(1, 18), 64] if isa != "generic" else [1, 5, 64]:
                assert same_bits(product(ops, x[:rows], w), want[:rows]), (isa, threads, rows)


@pytest.mark.parametrize("kind", KINDS)
def test_bias_and_residual(kind: str) -> None:
    ops = NativeOps(2)
    matrix, bias = random_matrix(kind, 37, 64), torch.randn(37)
    x, r = torch.randn(5, 64), torch.randn(5, 37)
    w = ops.matrix(matrix, bias)
    plain = product(ops, x, ops.matrix(matrix))
    assert torch.equal(product(ops, x, w), plain + bias)

    def folded(tape: object) -> None:
        tape.output("y", tape.add(tape.input("r", 37), tape.linear(tape.input("x", 64), w)))  # type: ignore[attr-defined]

    assert torch.equal(run_body(ops, folded, {"x": x, "r": r})["y"], r + (plain + bias))


def test_values_read_again_after_a_folded_add() -> None:
    """A linear whose result has another reader keeps it; sums of two linears and of a value with itself are right."""
    ops = NativeOps(1)
    w = ops.matrix(random_matrix("fp32", 32, 32))
    x = torch.randn(3, 32)
    y = product(ops, x, w)

    def body(tape: object) -> None:
        value = tape.input("x", 32)  # type: ignore[attr-defined]
        a, b = tape.linear(value, w), tape.linear(value, w)  # type: ignore[attr-defined]
        total = tape.add(a, b)  # type: ignore[attr-defined]
        c = tape.linear(value, w)  # type: ignore[attr-defined]
        tape.output("total", total)  # type: ignore[attr-defined]
        tape.output("both", tape.add(value, c))  # type: ignore[attr-defined]
        tape.output("c", c)  # type: ignore[attr-defined]
        tape.output("twice", tape.add(c, c))  # type: ignore[attr-defined]

    out = run_body(ops, body, {"x": x})
    assert torch.equal(out["total"], y + y)
    assert torch.equal(out["both"], x + y)
    assert torch.equal(out["c"], y)
    assert torch.equal(out["twice"], y + y)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", ["int4", "int5", "int8", "int8min"])
def test_extreme_codes_do_not_saturate(isa: str, kind: str) -> None:
    """All codes and activations at their ends: the int16 sums of the AVX2 path are at their bound."""
    matrix = random_matrix(kind, 16, 128)
    assert matrix.codes is not None
    matrix.codes[:8] = matrix.codes.min()
    matrix.codes[8:] = matrix.codes.max()
    x = torch.ones(4, 128)
    x[1] *= -1
    x[2, ::2] *= -1
    x[3] = 0
    ops = NativeOps(1, isa=isa)
    got = product(ops, x, ops.matrix(matrix)).double()
    want = linear_reference(x, matrix)
    assert torch.allclose(got, want, rtol=1e-5, atol=1e-4)
    assert bool((got[3] == 0).all())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_argmax_and_embedding_of_one_table(isa: str, kind: str) -> None:
    ops = NativeOps(2, isa=isa)
    matrix = random_matrix(kind, 301, 96, 3)
    table = ops.matrix(matrix)
    hidden = torch.randn(7, 96)
    logits = ops.logits(hidden, table)
    assert torch.equal(ops.argmax(hidden, table), logits.argmax(-1))
    capped = ops.logits(hidden, table, softcap=5.0)
    assert torch.allclose(capped, 5.0 * torch.tanh(logits / 5.0), atol=2e-6)
    ids = torch.tensor([[0, 300], [17, 16]])
    assert torch.equal(ops.embed(table, ids), matrix.dequantize()[ids])
    assert torch.equal(ops.embed(table, ids, 2.0), matrix.dequantize()[ids] * 2.0)


def test_argmax_takes_the_lowest_of_equal_ids() -> None:
    ops = NativeOps(2)
    dense = torch.zeros(1000, 8)
    dense[[3, 500, 999], 0] = 1.0
    table = ops.matrix(Matrix("fp32", 1000, 8, dense=dense))
    hidden = torch.zeros(2, 8)
    hidden[0, 0], hidden[1, 0] = 1.0, -1.0
    assert ops.argmax(hidden, table).tolist() == [3, 0]


def test_group_width_is_checked() -> None:
    with pytest.raises(ConfigError, match="multiple of 32"):
        NativeOps(1).matrix(random_matrix("int8", 4, 64).__class__("int8", 4, 40))
