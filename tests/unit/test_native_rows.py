"""Norms, gates, rotation, copies and the recorder's bookkeeping, against torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import ConfigError, OctavoError
from octavo.ops import native_lib
from octavo.ops.meta import KVLayer
from octavo.ops.native import NativeOps
from tests.unit.native_support import ISAS, paged, random_matrix, run_body, same_bits, tokens


def norm(x: torch.Tensor, w: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.double()
    return wide / torch.sqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * w.double()


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=15, deadline=None)
@given(width=st.integers(1, 100), rows=st.integers(1, 9), seed=st.integers(0, 99))
def test_norms_and_gates(isa: str, width: int, rows: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, w = torch.randn(rows, 2 * width, generator=generator) * 4, torch.randn(width, generator=generator)
    ops = NativeOps(1, isa=isa)
    vector = ops.vector(w)

    def body(tape: Any) -> None:
        value = tape.input("x", 2 * width)
        left, right = tape.split(value, [width, width])
        tape.output("norm", tape.rms_norm(right, vector, 1e-5))
        tape.output("heads", tape.head_norm(value, vector, 1e-6, width))
        tape.output("silu", tape.gated(value, "silu"))
        tape.output("gelu", tape.gated(value, "gelu_tanh"))
        tape.output("swapped", tape.concat([right, left]))
        tape.output("scaled", tape.scale(left, 0.5))
        tape.output("sum", tape.add(left, right))
        tape.output("wide", left, column=1, width=width + 2)
        tape.output("wide", tape.split(right, [1, width - 1])[0] if width > 1 else right, column=0, width=width + 2)

    got = run_body(ops, body, {"x": x})
    left, right = x[:, :width], x[:, width:]
    assert torch.allclose(got["norm"].double(), norm(right, w, 1e-5), rtol=3e-6, atol=1e-6)
    heads = norm(x.view(rows, 2, width), w, 1e-6).reshape(rows, -1)
    assert torch.allclose(got["heads"].double(), heads, rtol=3e-6, atol=1e-6)
    assert torch.allclose(got["silu"], F.silu(left) * right, rtol=2e-6, atol=2e-6)
    assert torch.allclose(got["gelu"], F.gelu(left, approximate="tanh") * right, rtol=2e-6, atol=4e-6)
    assert torch.equal(got["swapped"], torch.cat([right, left], 1))
    assert torch.equal(got["scaled"], left * 0.5)
    assert torch.equal(got["sum"], left + right)
    assert torch.equal(got["wide"][:, 1 : width + 1], left)
    assert torch.equal(got["wide"][:, 0], right[:, 0])


def test_every_instruction_set_gives_the_same_bits() -> None:
    x = torch.randn(33, 202) * 5
    x[0] = 0.0
    x[1, :8] = torch.tensor([100.0, -100.0, 1e-30, -1e-30, 88.0, -88.0, 20.0, -20.0])
    w = torch.randn(101)
    results = []
    for isa in ISAS:
        for threads in (1, 2):
            ops = NativeOps(threads, isa=isa)
            vector = ops.vector(w)

            def body(tape: Any, vector: Any = vector) -> None:
                value = tape.input("x", 202)
                tape.output("a", tape.head_norm(value, vector, 1e-5, 101))
                tape.output("b", tape.gated(value, "silu"))
                tape.output("c", tape.gated(value, "gelu_tanh"))

            whole = run_body(ops, body, {"x": x})
            single = [run_body(ops, body, {"x": x[r : r + 1]}) for r in range(33)]
            for name in "abc":
                assert same_bits(whole[name], torch.cat([s[name] for s in single]))
            results.append(whole)
    for other in results[1:]:
        assert all(same_bits(results[0][name], other[name]) for name in "abc")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("head_dim", "half"), [(8, 4), (64, 32), (64, 16), (20, 10)])
def test_rotation_and_writing_into_pages(isa: str, dtype: torch.dtype, head_dim: int, half: int) -> None:
    ops, n, heads, kv_heads, page_size = NativeOps(1, isa=isa), 5, 4, 2, 4
    kv = paged(6, 3, kv_heads, page_size, head_dim, 2, dtype=dtype, seed=0)
    angles = torch.rand(40, half) * 6
    rope = ops.rope(angles.cos(), angles.sin())
    q, k, v = (torch.randn(n, h * head_dim) for h in (heads, kv_heads, kv_heads))
    meta = tokens(n)
    meta = meta.__class__(
        meta.token_ids, torch.arange(n) + 9, torch.arange(n) + 3, meta.q_seq, torch.tensor([1]), meta.kv_start, None,
        (0, n), 8,
    )  # fmt: skip
    before = kv.swa.clone() if kv.swa is not None else torch.empty(0)

    def body(tape: Any) -> None:
        parts = [tape.input(name, x.shape[1]) for name, x in (("q", q), ("k", k), ("v", v))]
        tape.output("q", tape.rope_write(*parts, KVLayer("swa", 2), rope, head_dim))
        tape.rope_write(None, parts[1], parts[2], KVLayer("full", 0), rope, head_dim)

    got = run_body(ops, body, {"q": q, "k": k, "v": v}, meta, kv)["q"]

    def rotated(x: torch.Tensor) -> torch.Tensor:
        x = x.view(n, -1, head_dim).clone()
        cos, sin = (f(angles[meta.positions])[:, None] for f in (torch.cos, torch.sin))
        a, b = x[..., :half].clone(), x[..., half : 2 * half].clone()
        x[..., :half], x[..., half : 2 * half] = a * cos - b * sin, b * cos + a * sin
        return x

    assert torch.allclose(got, rotated(q).view(n, -1), atol=1e-6)
    rounding = max(1e-5, torch.finfo(dtype).eps / 2)  # relative: bf16 keeps eight bits
    for pool, table, layer in ((kv.swa, kv.swa_table, 2), (kv.full, kv.full_table, 0)):
        assert pool is not None and table is not None
        for t in range(n):
            page, offset = int(table[1, (t + 3) // page_size]), (t + 3) % page_size
            assert torch.allclose(pool[page, layer, 0, :, offset].float(), rotated(k)[t], rtol=rounding, atol=1e-6)
            assert torch.equal(pool[page, layer, 1, :, offset], v[t].view(kv_heads, head_dim).to(dtype))
    assert kv.swa is not None
    changed = (kv.swa != before).flatten(3).any(-1).any(-1)
    assert not bool(changed[:, :2].any())  # other layers of the page are untouched


def test_bfloat16_pages_round_to_nearest_even() -> None:
    ops = NativeOps(1)
    kv = paged(1, 1, 1, 4, 16, 1, dtype=torch.bfloat16, seed=0)
    v = torch.tensor([1.0, 1.00390625, 1.01171875, -1.00390625, 3e38, float("inf"), float("nan"), 1e-40] * 2)[None]
    one = torch.zeros(1, 8)
    rope = ops.rope(one + 1, one)

    def body(tape: Any) -> None:
        x = tape.input("v", 16)
        tape.rope_write(None, x, x, KVLayer("full", 0), rope, 16)

    run_body(ops, body, {"v": v}, tokens(1), kv)
    assert kv.full is not None
    got, want = kv.full[0, 0, 1, 0, 0], v[0].bfloat16()
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got[~got.isnan()], want[~want.isnan()])


def test_bad_ids_positions_and_pages_are_errors_not_crashes() -> None:
    ops = NativeOps(1)
    kv = paged(4, 1, 1, 4, 16, 2, dtype=torch.float32, seed=0)
    table = ops.matrix(random_matrix("fp32", 10, 16))
    rope = ops.rope(torch.ones(6, 8), torch.zeros(6, 8))

    def body(tape: Any) -> None:
        x = tape.embed(table)
        q = tape.rope_write(x, x, x, KVLayer("full", 0), rope, 16)
        tape.output("y", tape.attention(q, KVLayer("full", 0), 0.25, 1, 1, 16))

    program = ops.program(body)
    for bad in (-1, 10, 1 << 40):
        with pytest.raises(OctavoError, match="token id"):
            program.run(tokens(1, ids=torch.tensor([bad])), kv)
    with pytest.raises(OctavoError, match="position"):
        program.run(tokens(8, ids=torch.zeros(8, dtype=torch.int64)), kv)
    kv.full_table[0, 0] = -1
    with pytest.raises(OctavoError, match="no page"):
        program.run(tokens(1, ids=torch.zeros(1, dtype=torch.int64)), kv)
    kv.full_table[0, 0] = 4
    with pytest.raises(OctavoError, match="no page"):
        program.run(tokens(1, ids=torch.zeros(1, dtype=torch.int64)), kv)


def test_wrong_widths_and_shapes_are_refused_when_recording_or_running() -> None:
    ops = NativeOps(1)
    w = ops.matrix(random_matrix("fp32", 8, 16))
    with pytest.raises(ValueError, match="linear"):
        ops.program(lambda t: t.output("y", t.linear(t.input("x", 8), w)))
    program = ops.program(lambda t: t.output("y", t.linear(t.input("x", 16), w)))
    with pytest.raises(ValueError, match="input 'x'"):
        program.run(tokens(2), None, {"x": torch.zeros(2, 8)})
    attention = ops.program(
        lambda t: t.output("y", t.attention(t.input("x", 16), KVLayer("full", 3), 1.0, 1, 1, 16))
    )
    with pytest.raises(ValueError, match="layer 3"):
        attention.run(
            tokens(1), paged(2, 1, 1, 4, 16, 1, dtype=torch.float32, seed=0), {"x": torch.zeros(1, 16)}
        )
    assert program.run(tokens(0), None, {"x": torch.zeros(0, 16)})["y"].shape == (0, 8)


def test_environment_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_NATIVE_ISA", "generic")
    assert NativeOps(1).name == "native generic"
    monkeypatch.setenv("OCTAVO_NATIVE_ISA", "avx1")
    with pytest.raises(ConfigError, match="avx512bf16, avx512, avx2, neon, generic"):
        NativeOps(1)
    monkeypatch.setenv("OCTAVO_NATIVE", "0")
    assert native_lib.library() is None
    monkeypatch.setenv("OCTAVO_NATIVE", "maybe")
    with pytest.raises(ConfigError, match="allowed: 0, 1"):
        native_lib.library()


def test_a_missing_or_foreign_library_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("OCTAVO_NATIVE_LIB", str(tmp_path / "absent.so"))
    assert native_lib.library() is None
    monkeypatch.setenv("OCTAVO_NATIVE_LIB", "libm.so.6")
    assert native_lib.library() is None


def test_profile_covers_every_stage() -> None:
    ops = NativeOps(1)
    w = ops.matrix(random_matrix("int8", 32, 32))
    program = ops.program(lambda t: t.output("y", t.linear(t.input("x", 32), w)))
    program.start_profile()
    for _ in range(3):
        program.run(tokens(4), None, {"x": torch.randn(4, 32)})
    stages = program.profile()
    assert [name for name, _, _ in stages] == ["quantize", "linear", "copy"]
    assert stages[1][1] == w.nbytes and all(seconds > 0 for _, _, seconds in stages)
