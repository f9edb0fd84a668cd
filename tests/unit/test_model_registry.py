"""Where layers keep their KV, what a page costs, how formats are chosen, what taps return."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from octavo.errors import ConfigError, ModelError
from octavo.model.layers import place_layers
from octavo.model.registry import ARCHITECTURES, build_network, kv_page_bytes, make_kv
from octavo.ops import native
from octavo.ops.meta import KVLayer
from octavo.ops.weights import Matrix, quantize
from tests.models.driver import Driver, Pages
from tests.tiny import RandomSource, config_of

PATHS = [False, *([True] if native.available() else [])]


def build(kind: str = "llama", *, source: Any = None, changes: dict[str, Any] | None = None, **options: Any) -> Any:
    config = config_of(kind, **(changes or {}))
    options = {"quantization": "none", "use_native": False, "threads": 1, **options}
    return build_network((config, source or RandomSource(config)), **options)


def test_windowed_layers_live_in_the_sliding_pool() -> None:
    assert place_layers((8, 8, None, 8)) == (
        KVLayer("swa", 0, 8),
        KVLayer("swa", 1, 8),
        KVLayer("full", 0),
        KVLayer("swa", 2, 8),
    )
    hybrid, sliding, full = build("gemma3"), build("sliding"), build()
    assert (hybrid.full_layers, hybrid.swa_layers) == (2, 4)
    assert (sliding.full_layers, sliding.swa_layers) == (0, 4)
    assert (full.full_layers, full.swa_layers) == (4, 0)


def test_page_bytes_are_those_of_the_tensors() -> None:
    for kind, drafts in (("gemma3", 1), ("sliding", 0), ("sliding", 2), ("llama", 3)):
        for dtype in (torch.float32, torch.bfloat16):
            network = build(kind, draft_kv_layers=drafts, page_size=16, kv_dtype=dtype)
            full, swa = kv_page_bytes(network.config, 16, dtype, drafts)
            kv = make_kv(network, Pages(5, 3), max_rows=2, width_pages=7)
            assert full == (0 if kv.full is None else kv.full[0].nbytes)
            assert swa == (0 if kv.swa is None else kv.swa[0].nbytes)
            assert kv.full is None or kv.full.shape[:2] == (6, network.full_layers + drafts)
            assert kv.swa is None or kv.swa.shape[:2] == (4, network.swa_layers)
            assert (kv.swa_table is None) == (kv.swa is None)
            assert kv.full_table.shape == (2, 7) and kv.full_table.dtype == torch.int32
            assert bool((kv.full_table == -1).all())


def test_unknown_architecture_is_named() -> None:
    with pytest.raises(ModelError, match="'mamba' is not supported: llama, mistral, qwen2, qwen3, gemma3 are"):
        build(changes={"architecture": "mamba"})
    assert all(a.tested in ("real weights", "random weights", "no") for a in ARCHITECTURES.values())


@pytest.mark.parametrize("use_native", PATHS)
def test_taps_come_in_the_given_order(use_native: bool) -> None:
    network = build("gemma3", use_native=use_native)
    ids = list(range(20))
    driver = Driver(network, 1, 64)
    hidden = driver.run([(0, ids)], (6, 0, 3, 0))[0]
    h = network.config.hidden_size
    assert driver.features.shape == (20, 4 * h)
    last, embedded, inner, again = driver.features.split(h, dim=1)
    assert torch.equal(last, hidden)
    assert torch.equal(embedded, network.embed(torch.tensor(ids)))
    assert torch.equal(embedded, again)
    assert not torch.equal(inner, embedded)
    plain = Driver(network, 1, 64)
    assert torch.equal(plain.run([(0, ids)])[0], hidden)
    assert plain.features is None
    for bad in ((7,), (-1,)):
        with pytest.raises(ConfigError, match="0 … 6"):
            driver.run([(0, ids)], bad)


class _Kinds:
    """A source whose file kinds are given: the first that is contained in the name."""

    def __init__(self, config: Any, kinds: dict[str, str]) -> None:
        self._real, self._kinds = RandomSource(config), kinds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def kind(self, name: str) -> str:
        return next((kind for part, kind in self._kinds.items() if part in name), "F32")


FILE = {"embed_tokens": "Q8_0", "v_proj": "Q6_K", "norm": "F32", "proj": "Q4_1"}


def test_auto_keeps_what_torch_has_kernels_for(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of()
    auto = build(source=_Kinds(config, FILE), quantization="auto")
    assert auto.formats == "fp32 × 5, int4 × 24"
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    scalar = build(source=_Kinds(config, FILE), quantization="auto")
    assert scalar.formats == "fp32 × 29"


def test_formats_asked_for_are_given() -> None:
    config = config_of()
    assert build(quantization="int8").formats == "int8 × 29"
    assert build(quantization="int4").formats == "int4 × 28, int8 × 1"
    assert build(dtype=torch.bfloat16).formats == "bf16 × 29"
    none = build()
    assert none.formats == "fp32 × 29"
    wanted = sum(4 * RandomSource(config).tensor(name).numel() for name in RandomSource(config).names())
    assert none.weight_bytes == wanted
    untied = build(changes={"tie_embeddings": False})
    assert untied.formats == "fp32 × 30"


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_networks_answer_nearly_alike(quantization: Any) -> None:
    ids = list(range(40))
    exact, packed = build(), build(quantization=quantization)
    a = exact.logits(Driver(exact, 1, 64).prefill(0, ids))
    b = packed.logits(Driver(packed, 1, 64).prefill(0, ids))
    error = float((a - b).pow(2).mean().sqrt() / a.std())
    assert 1e-4 < error < (0.2 if quantization == "int8" else 0.8)


def test_a_stack_of_mixed_kinds_gives_what_its_parts_give() -> None:
    """q, k, v of different file kinds become several weights; the result is that of one."""
    config = config_of()
    mixed = build(source=_Kinds(config, {"v_proj": "Q8_0"}), quantization="auto", use_native=False)
    plain = build(quantization="none")
    ids = list(range(30))
    assert torch.equal(Driver(mixed, 1, 64).prefill(0, ids), Driver(plain, 1, 64).prefill(0, ids))


def test_bf16_activations_stay_near_float32() -> None:
    exact, rounded = build("gemma3"), build("gemma3", dtype=torch.bfloat16)
    ids = list(range(40))
    a = exact.logits(Driver(exact, 1, 64).prefill(0, ids))
    hidden = Driver(rounded, 1, 64).prefill(0, ids)
    assert hidden.dtype == torch.bfloat16 and rounded.kv_dtype == torch.bfloat16
    error = float((a - rounded.logits(hidden)).pow(2).mean().sqrt() / a.std())
    assert error < 0.2


def test_norms_stored_without_their_one_are_raised() -> None:
    class Lowered(RandomSource):
        def tensor(self, name: str) -> torch.Tensor:
            value = super().tensor(name)
            return value - 1 if "norm" in name else value

    config = config_of("gemma3")
    ids = list(range(30))
    usual = build_network((config, RandomSource(config)), quantization="none", use_native=False)
    lowered = replace(config, norm_plus_one=True)
    raised = build_network((lowered, Lowered(lowered)), quantization="none", use_native=False)
    a, b = (n.logits(Driver(n, 1, 64).prefill(0, ids)) for n in (usual, raised))
    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_rotation_tables_reach_as_far_as_asked() -> None:
    short, long = build(max_positions=64), build()
    ids = list(range(60))
    assert short.max_positions == 64 and long.max_positions == 512
    assert torch.equal(Driver(short, 1, 64).prefill(0, ids), Driver(long, 1, 64).prefill(0, ids))


def test_a_matrix_keeps_its_values_through_quantize() -> None:
    w = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    for kind, limit in (("int8", 0.02), ("int4", 0.3)):
        made = quantize(w, kind)  # type: ignore[arg-type]
        assert isinstance(made, Matrix)
        assert float((made.dequantize() - w).abs().max()) < limit
