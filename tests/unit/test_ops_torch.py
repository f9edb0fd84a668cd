"""Single torch operations against the slow references; weight formats; bits of every operation over rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from octavo.model.config import RopeConfig
from octavo.model.rope import rope_tables
from octavo.ops import reference
from octavo.ops.meta import StepMeta
from octavo.ops.torch_ops import TorchOps, TorchTape
from octavo.ops.torch_weights import DenseWeight, Int4Weight, Int8Weight, pack, vectorised
from octavo.ops.weights import Matrix, quantize

CPU = torch.device("cpu")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def dense(weight: torch.Tensor) -> Matrix:
    return Matrix("fp32", *weight.shape, dense=weight)


def tape_of(ops: TorchOps, n: int) -> TorchTape:
    zeros = torch.zeros(n, dtype=torch.int64)
    positions = torch.arange(n) * 3
    one = torch.zeros(1, dtype=torch.int64)
    meta = StepMeta(torch.arange(n), positions, positions, zeros, one, one, None, (0, n), 3 * n)
    return TorchTape(ops, meta, None, {"x": random(n, 8)})


@pytest.mark.parametrize("width", [36, 100, 576])
@pytest.mark.parametrize("name", ["rms_norm", "head_norm", "silu", "gelu_tanh", "add", "scale"])
def test_operations_equal_the_reference_and_are_row_invariant(name: str, width: int) -> None:
    ops = TorchOps()
    x, weight = random(700, width), random(width, seed=1)

    def run(rows: torch.Tensor) -> torch.Tensor:
        tape = tape_of(ops, 4)
        if name == "rms_norm":
            return tape.rms_norm(rows, ops.vector(weight), 1e-5)
        if name == "head_norm":
            return tape.head_norm(rows, ops.vector(weight[:4]), 1e-5, 4)
        if name in ("silu", "gelu_tanh"):
            return tape.gated(rows, name)
        return tape.add(rows, rows * 0.3) if name == "add" else tape.scale(rows, 0.123)

    wanted: dict[str, Callable[[], torch.Tensor]] = {
        "rms_norm": lambda: reference.rms_norm(x, weight, 1e-5),
        "head_norm": lambda: reference.rms_norm(x.view(700, -1, 4), weight[:4], 1e-5).view(700, width),
        "silu": lambda: reference.gated(x, "silu"),
        "gelu_tanh": lambda: reference.gated(x, "gelu_tanh"),
        "add": lambda: x.double() * 1.3,
        "scale": lambda: x.double() * 0.123,
    }
    whole = run(x)
    torch.testing.assert_close(whole.double(), wanted[name](), rtol=1e-5, atol=1e-5)
    for start, stop in [(0, 1), (0, 2), (0, 3), (5, 12), (0, 33), (1, 700), (699, 700), (100, 227)]:
        assert torch.equal(run(x[start:stop].clone()), whole[start:stop]), (start, stop)


@pytest.mark.parametrize("rotated", [8, 12])  # a part of the head, the whole head
def test_rotation_equals_the_reference(rotated: int) -> None:
    ops, dim = TorchOps(), 12
    cos, sin = rope_tables(RopeConfig(theta=50.0), rotated, 64)
    tape = tape_of(ops, 5)
    table = ops.rope(cos, sin)
    from octavo.ops.torch_ops import _rotate

    x = random(5, 3 * dim)
    ours = _rotate(x, *tape._cos_sin(table), dim)
    for token in range(5):
        for head in range(3):
            at = slice(head * dim, (head + 1) * dim)
            expected = reference.rotate(x[token, at], 3 * token, cos, sin)
            torch.testing.assert_close(ours[token, at].double(), expected, rtol=1e-5, atol=1e-6)


def test_tape_moves_columns() -> None:
    tape = tape_of(TorchOps(), 3)
    x = tape.input("x", 8)
    a, b, c = tape.split(x, [3, 1, 4])
    assert torch.equal(tape.concat([c, a, b]), torch.cat([x[:, 4:], x[:, :4]], dim=1))
    tape.output("two", a, column=4, width=7)
    tape.output("two", c, column=0, width=7)
    tape.output("one", b)
    assert torch.equal(tape.outputs["two"], torch.cat([x[:, 4:], x[:, :3]], dim=1))
    assert torch.equal(tape.outputs["one"], x[:, 3:4])
    with pytest.raises(ValueError, match=r"expected \(3, 9\)"):
        tape.input("x", 9)
    with pytest.raises(ValueError, match="KVView"):
        tape._attention()


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
@pytest.mark.parametrize("bias", [False, True])
def test_dense_weights(kind: str, bias: bool) -> None:
    w = random(48, 40)
    matrix = dense(w) if kind == "fp32" else Matrix("bf16", 48, 40, dense=w.bfloat16())
    offset = random(48, seed=2) if bias else None
    x = random(9, 40, seed=3)
    packed = pack(matrix, offset, torch.float32, CPU)
    tolerance = 1e-4 if kind == "fp32" else 0.2
    got = packed.linear(x)
    assert got.dtype == torch.float32 and packed.kind == kind
    torch.testing.assert_close(got.double(), reference.linear(x, matrix, offset), rtol=0, atol=tolerance)
    assert packed.nbytes == 48 * 40 * (4 if kind == "fp32" else 2) + (48 * 4 if bias else 0)
    assert torch.equal(packed.embed(torch.tensor([[3, 1]])).float(), matrix.dequantize()[[3, 1]][None])


@pytest.mark.parametrize("minimum", [True, False])
def test_int4_holds_the_files_own_codes(minimum: bool) -> None:
    matrix = quantize(random(64, 96), "int4")
    if not minimum:
        matrix = Matrix("int4", 64, 96, matrix.codes, matrix.scale, None)
    packed = pack(matrix, random(64, seed=5), torch.float32, CPU)
    assert isinstance(packed, Int4Weight if vectorised() else DenseWeight)
    x = random(70, 96, seed=1)
    expected = reference.linear(x, matrix, random(64, seed=5))
    error = (packed.linear(x).double() - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt()
    assert error < 1e-2  # activations and scales in bf16
    assert packed.nbytes < 64 * 96 * 0.8 or not vectorised()


def test_int4_without_room_for_its_kernel_is_dense() -> None:
    matrix = quantize(random(24, 64), "int4")
    packed = pack(matrix, None, torch.float32, CPU)
    assert packed.kind == "fp32"
    x = random(3, 64, seed=1)
    torch.testing.assert_close(packed.linear(x).double(), reference.linear(x, matrix), rtol=1e-4, atol=1e-4)


def test_int8_has_one_scale_per_row_and_readable_rows() -> None:
    w = random(64, 96)
    packed = Int8Weight(w, None)
    x = random(33, 96, seed=1)
    expected = x.double() @ w.double().T
    error = (packed.linear(x).double() - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt()
    assert error < 2e-2
    torch.testing.assert_close(packed.embed(torch.tensor([5, 60])), w[[5, 60]], rtol=0, atol=0.03)


def test_packed_forms_are_not_used_where_their_kernels_are_scalar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert not vectorised()
    for kind in ("int4", "int8"):
        matrix = quantize(random(64, 96), kind)  # type: ignore[arg-type]
        packed = pack(matrix, None, torch.float32, CPU)
        assert packed.kind == "fp32"
        assert torch.equal(packed.embed(torch.arange(64)), matrix.dequantize())


def test_arg_max_ties_go_to_the_lowest_id_and_the_soft_cap_bends() -> None:
    ops = TorchOps()
    w = random(32, 8)
    w[20], w[7] = w[11], w[11]
    head = ops.matrix(dense(w))
    hidden = torch.stack([w[11] * 5, w[3] * 9])
    assert ops.argmax(hidden, head).tolist() == [7, 3]
    plain = ops.logits(hidden, head)
    assert torch.allclose(ops.logits(hidden, head, 2.0), 2 * torch.tanh(plain / 2), atol=1e-6)
    assert float(ops.logits(hidden, head, 2.0).abs().max()) <= 2.0


def test_a_position_behind_the_table_stays_in_it() -> None:
    """The extra step of a finished request may stand at the context's end: its result is ignored."""
    ops = TorchOps()
    cos, sin = rope_tables(RopeConfig(), 4, 5)
    tape = tape_of(ops, 3)  # positions 0, 3, 6
    got, _ = tape._cos_sin(ops.rope(cos, sin))
    assert torch.equal(got[2, 0], cos[4])
