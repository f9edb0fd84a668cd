"""The draft networks, written once against a `Tape` (ops/base.py), so that every implementation can run them.

EAGLE-3 (arXiv 2503.01840): one decoder layer whose attention sees [norm(embedding of token i+1) | norm(feature i)].
DFlash: block-diffusion layers whose context K/V are projections of the target's hidden states.

Each network is two programs: `write` turns true features into draft KV (and nothing else, so it costs two small
products a token), the other reads that KV and predicts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from octavo.model.config import ModelConfig, RopeConfig
from octavo.ops.base import Ops, Program, Tape, Value, Weight
from octavo.ops.meta import KVLayer, KVView, StepMeta
from octavo.ops.weights import Kind, Matrix, quantize
from octavo.spec.checkpoint import DraftWeights
from octavo.spec.draft_config import DFlashConfig, EagleConfig


class TargetNetwork(Protocol):
    """The part of the target that drafts use (model/registry.py)."""

    config: ModelConfig
    full_layers: int

    def embed(self, ids: torch.Tensor) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...

    def argmax(self, hidden: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True)
class DraftTarget:
    """A target as a draft is bound to it.

    head_rows  rows of the target's head as a matrix: [len(ids), H]
    rope       (cos, sin) float32 tables [positions, r] of a rotation over heads of the draft's size
    kind       how the draft's own weights are kept ("fp32", "bf16", "int8")
    dtype      of activations
    """

    network: TargetNetwork
    ops: Ops
    head_rows: Callable[[torch.Tensor], Matrix]
    rope: Callable[[RopeConfig, int], tuple[torch.Tensor, torch.Tensor]]
    kind: Kind
    dtype: torch.dtype
    device: torch.device

    @property
    def config(self) -> ModelConfig:
        return self.network.config

    def embed(self, ids: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """The target's raw embedding rows (without its own scale) times `scale`: [..., H]."""
        factor = scale / self.config.embed_scale
        rows = self.network.embed(ids)
        return rows if factor == 1.0 else rows * factor

    def table(self, scale: float = 1.0) -> Weight | None:
        """The target's table, where a program that embeds with it has the same bits as `embed`; None: call that."""
        return getattr(self.network, "embedding", None) if scale == self.config.embed_scale else None


class DraftHead:
    """Logits over the draft's vocabulary, and the way back to target ids. `own`: its matrix, None for the target's."""

    def __init__(self, weights: DraftWeights, target: DraftTarget) -> None:
        self._target = target
        self.own: Weight | None = None
        self._ids: torch.Tensor | None = None
        if weights.token_ids is not None:
            self._ids = weights.token_ids.to(target.device)
        if "lm_head.weight" in weights.tensors:
            self.own = target.ops.matrix(_matrix(weights.tensors["lm_head.weight"], target.kind))
        elif weights.token_ids is not None:
            self.own = target.ops.matrix(target.head_rows(weights.token_ids))

    def argmax(self, hidden: torch.Tensor) -> torch.Tensor:
        """[m, H] -> target ids [m]."""
        if self.own is None:
            return self._target.network.argmax(hidden)
        return self.target_ids(self._target.ops.argmax(hidden, self.own))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[m, H] -> float32 [m, draft vocabulary]."""
        if self.own is None:
            return self._target.network.logits(hidden)
        return self._target.ops.logits(hidden, self.own)

    def target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        if self._ids is None:
            return draft_ids
        return self._ids.index_select(0, draft_ids.reshape(-1)).reshape(draft_ids.shape)


def _matrix(weight: torch.Tensor, kind: Kind) -> Matrix:
    out, inner = weight.shape
    if kind in ("int8", "int4") and inner % 32 == 0:
        return quantize(weight, kind)
    if kind == "bf16":
        return Matrix("bf16", out, inner, dense=weight.to(torch.bfloat16).contiguous())
    return Matrix("fp32", out, inner, dense=weight.float().contiguous())


class _Maker:
    """Looks tensors up by name and hands them to the operations."""

    def __init__(self, weights: DraftWeights, target: DraftTarget) -> None:
        self.tensors, self.ops, self.kind = weights.tensors, target.ops, target.kind

    def vector(self, name: str) -> Weight:
        return self.ops.vector(self.tensors[name + ".weight"])

    def linear(self, *names: str) -> Weight:
        """The matrices stacked over their outputs, with their biases if they have any."""
        weight = torch.cat([self.tensors[n + ".weight"] for n in names])
        biases = [self.tensors[n + ".bias"] for n in names if n + ".bias" in self.tensors]
        return self.ops.matrix(_matrix(weight, self.kind), torch.cat(biases) if biases else None)


@dataclass(frozen=True)
class _Block:
    """Weights of the part of a decoder layer behind its attention."""

    out: Weight
    post_norm: Weight
    gate_up: Weight
    down: Weight

    @classmethod
    def make(cls, maker: _Maker, prefix: str) -> _Block:
        return cls(
            maker.linear(prefix + "self_attn.o_proj"),
            maker.vector(prefix + "post_attention_layernorm"),
            maker.linear(prefix + "mlp.gate_proj", prefix + "mlp.up_proj"),
            maker.linear(prefix + "mlp.down_proj"),
        )

    def run(self, tape: Tape, attended: Value, residual: Value, config: EagleConfig | DFlashConfig) -> Value:
        hidden = tape.add(residual, tape.linear(attended, self.out))
        inner = tape.linear(tape.rms_norm(hidden, self.post_norm, config.layer.rms_eps), self.gate_up)
        return tape.add(hidden, tape.linear(tape.gated(inner, config.layer.activation), self.down))


class EagleNetwork:
    """EAGLE-3 over paged KV. Pair i is (feature of position i, token at i + 1); its K/V sits at position i."""

    def __init__(self, weights: DraftWeights, target: DraftTarget, kv_layer: KVLayer) -> None:
        config = weights.config
        if not isinstance(config, EagleConfig):
            raise TypeError("EagleNetwork needs an EAGLE-3 configuration")
        self.config, self._target, self._layer = config, target, kv_layer
        maker = _Maker(weights, target)
        self._fc = maker.linear("fc")
        self._fc_norms = [maker.vector(f"fc_norm.{i}") for i in range(len(config.taps))] if config.fc_norm else []
        self._input_norm = maker.vector("input_norm") if config.norm_before_fc else None
        self._embed_norm = maker.vector("layers.0.input_layernorm")
        self._hidden_norm = maker.vector("layers.0.hidden_norm")
        attn = "layers.0.self_attn."
        self._qkv = maker.linear(attn + "q_proj", attn + "k_proj", attn + "v_proj")
        self._kv = maker.linear(attn + "k_proj", attn + "v_proj")
        self._block = _Block.make(maker, "layers.0.")
        self._norm = maker.vector("norm")
        self._rope = target.ops.rope(*target.rope(target.config.rope, config.layer.head_dim))
        self.head = DraftHead(weights, target)
        self._table = target.table()
        self._write_program = target.ops.program(self._write_body)
        self._step_program = target.ops.program(self._step_body)
        # embedding, layer and head in one program, where the target shows its table and the draft has its own rows
        fused = self._table is not None and self.head.own is not None
        self._chain_program = target.ops.program(self._chain_body) if fused else None

    def write(
        self, meta: StepMeta, kv: KVView, features: torch.Tensor, next_tokens: torch.Tensor
    ) -> torch.Tensor:
        """Draft K/V of true pairs; returns the fused features [n, H] (the state a chain starts from)."""
        inputs = {"features": features, **self._embeds(next_tokens)}
        return self._write_program.run(meta, kv, inputs)["fused"]

    def step(
        self, meta: StepMeta, kv: KVView, state: torch.Tensor, next_tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One draft step: (state fed back to the next step [n, H], hidden for the head [n, H])."""
        out = self._step_program.run(meta, kv, {"state": state, **self._embeds(next_tokens)})
        return out["state"], out["hidden"]

    def chain_step(
        self, meta: StepMeta, kv: KVView, state: torch.Tensor, next_tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One step of a chain: (state fed back [n, H], best target ids [n])."""
        if self._chain_program is None:
            state, hidden = self.step(meta, kv, state, next_tokens)
            return state, self.head.argmax(hidden)
        out = self._chain_program.run(meta, kv, {"state": state})
        return out["state"], self.head.target_ids(out["ids"])

    def _embeds(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        """Inputs of a program that does not embed the step's token ids itself."""
        return {} if self._table is not None else {"embeds": self._target.embed(tokens)}

    def _embedded(self, tape: Tape) -> Value:
        if self._table is not None:
            return tape.embed(self._table)
        return tape.input("embeds", self.config.layer.hidden_size)

    def _pair(self, tape: Tape, embeds: Value, feature: Value) -> tuple[Value, Value]:
        eps = self.config.layer.rms_eps
        normed = tape.rms_norm(feature, self._hidden_norm, eps)
        both = tape.concat([tape.rms_norm(embeds, self._embed_norm, eps), normed])
        return both, normed if self.config.norm_before_residual else feature

    def _write_body(self, tape: Tape) -> None:
        layer, hidden = self.config.layer, self.config.layer.hidden_size
        taps = len(self.config.taps)
        features = tape.input("features", taps * hidden)
        if self._input_norm is not None:
            features = tape.rms_norm(features, self._input_norm, layer.rms_eps)
        if self._fc_norms:
            parts = tape.split(features, [hidden] * taps)
            normed = [tape.rms_norm(p, w, layer.rms_eps) for p, w in zip(parts, self._fc_norms, strict=True)]
            features = tape.concat(normed)
        fused = tape.linear(features, self._fc)
        both, _ = self._pair(tape, self._embedded(tape), fused)
        k, v = tape.split(tape.linear(both, self._kv), [layer.kv_width] * 2)
        tape.rope_write(None, k, v, self._layer, self._rope, layer.head_dim)
        tape.output("fused", fused)

    def _step_body(self, tape: Tape) -> None:
        tape.output("hidden", self._layer_body(tape))

    def _chain_body(self, tape: Tape) -> None:
        tape.argmax("ids", self._layer_body(tape), self.head.own)

    def _layer_body(self, tape: Tape) -> Value:
        """The layer over pairs of (own state, drafted token), up to what the head reads."""
        layer, hidden = self.config.layer, self.config.layer.hidden_size
        both, residual = self._pair(tape, self._embedded(tape), tape.input("state", hidden))
        q, k, v = tape.split(tape.linear(both, self._qkv), [layer.q_width, layer.kv_width, layer.kv_width])
        q = tape.rope_write(q, k, v, self._layer, self._rope, layer.head_dim)
        heads = layer.num_heads, layer.num_kv_heads, layer.head_dim
        attended = tape.attention(q, self._layer, layer.head_dim**-0.5, *heads)
        state = self._block.run(tape, attended, residual, self.config)
        normed = tape.rms_norm(state, self._norm, layer.rms_eps)
        tape.output("state", normed if self.config.feed_normed else state)
        return normed if self.config.norm_logits else state


@dataclass(frozen=True)
class _DFlashLayer:
    input_norm: Weight
    qkv: Weight
    q_norm: Weight
    k_norm: Weight
    block: _Block
    kv: KVLayer


class DFlashNetwork:
    """DFlash over paged KV: context K/V from target features, then one block forward, causal layer by layer or not."""

    def __init__(self, weights: DraftWeights, target: DraftTarget, kv_layers: Sequence[KVLayer]) -> None:
        config = weights.config
        if not isinstance(config, DFlashConfig):
            raise TypeError("DFlashNetwork needs a DFlash configuration")
        self.config, self._target = config, target
        maker = _Maker(weights, target)
        self._fc, self._hidden_norm, self._norm = maker.linear("fc"), maker.vector("hidden_norm"), maker.vector("norm")
        self._layers = [self._make_layer(maker, i, kv) for i, kv in enumerate(kv_layers)]
        names = [f"layers.{i}.self_attn.{p}" for i in range(config.num_layers) for p in ("k_proj", "v_proj")]
        self._context_kv = maker.linear(*names)  # one product for the K/V of all layers
        rope = config.rope if config.rope is not None else target.config.rope
        self._rope = target.ops.rope(*target.rope(rope, config.layer.head_dim))
        self.head = DraftHead(weights, target)
        self._table = target.table(config.embed_scale)
        self._write_program = target.ops.program(self._write_body)
        # layers that share the direction of their block mask run as one program
        self._segments: list[tuple[bool, Program]] = []
        for first, last, causal in _runs(config.causal):
            body = self._block_body(first, last)
            self._segments.append((causal, target.ops.program(body)))

    @staticmethod
    def _make_layer(maker: _Maker, index: int, kv: KVLayer) -> _DFlashLayer:
        prefix = f"layers.{index}."
        attn = prefix + "self_attn."
        return _DFlashLayer(
            maker.vector(prefix + "input_layernorm"),
            maker.linear(attn + "q_proj", attn + "k_proj", attn + "v_proj"),
            maker.vector(attn + "q_norm"),
            maker.vector(attn + "k_norm"),
            _Block.make(maker, prefix),
            kv,
        )

    def write(self, meta: StepMeta, kv: KVView, features: torch.Tensor) -> None:
        """K/V of every draft layer for true features [n, taps * H]: a pure function of the feature and its position."""
        self._write_program.run(meta, kv, {"features": features})

    def block(self, full: StepMeta, causal: StepMeta, kv: KVView) -> torch.Tensor:
        """Hidden states [n, H] of block tokens, for the head. `full` and `causal` differ in their masks only."""
        inputs = {}
        if self._table is None:
            inputs = {"hidden": self._target.embed(full.token_ids, self.config.embed_scale)}
        for is_causal, program in self._segments:
            inputs = program.run(causal if is_causal else full, kv, inputs)
        return inputs["hidden"]

    def _write_body(self, tape: Tape) -> None:
        layer = self.config.layer
        features = tape.input("features", len(self.config.taps) * layer.hidden_size)
        context = tape.rms_norm(tape.linear(features, self._fc), self._hidden_norm, layer.rms_eps)
        parts = tape.split(tape.linear(context, self._context_kv), [layer.kv_width] * (2 * self.config.num_layers))
        for i, weights in enumerate(self._layers):
            k = tape.head_norm(parts[2 * i], weights.k_norm, layer.rms_eps, layer.head_dim)
            tape.rope_write(None, k, parts[2 * i + 1], weights.kv, self._rope, layer.head_dim)

    def _block_body(self, first: int, last: int) -> Callable[[Tape], None]:
        def body(tape: Tape) -> None:
            if first == 0 and self._table is not None:
                hidden = tape.embed(self._table, self.config.embed_scale)
            else:
                hidden = tape.input("hidden", self.config.layer.hidden_size)
            for weights in self._layers[first:last]:
                hidden = self._layer_body(tape, hidden, weights)
            if last == self.config.num_layers:
                hidden = tape.rms_norm(hidden, self._norm, self.config.layer.rms_eps)
            tape.output("hidden", hidden)

        return body

    def _layer_body(self, tape: Tape, hidden: Value, weights: _DFlashLayer) -> Value:
        layer = self.config.layer
        qkv = tape.linear(tape.rms_norm(hidden, weights.input_norm, layer.rms_eps), weights.qkv)
        q, k, v = tape.split(qkv, [layer.q_width, layer.kv_width, layer.kv_width])
        q = tape.head_norm(q, weights.q_norm, layer.rms_eps, layer.head_dim)
        k = tape.head_norm(k, weights.k_norm, layer.rms_eps, layer.head_dim)
        q = tape.rope_write(q, k, v, weights.kv, self._rope, layer.head_dim)
        heads = layer.num_heads, layer.num_kv_heads, layer.head_dim
        attended = tape.attention(q, weights.kv, layer.head_dim**-0.5, *heads)
        return weights.block.run(tape, attended, hidden, self.config)


def _runs(flags: Sequence[bool]) -> list[tuple[int, int, bool]]:
    """(first, last + 1, flag) of every run of equal flags."""
    runs: list[tuple[int, int, bool]] = []
    for i, flag in enumerate(flags):
        if runs and runs[-1][2] == flag:
            runs[-1] = (runs[-1][0], i + 1, flag)
        else:
            runs.append((i, i + 1, flag))
    return runs


def kv_layers_behind(target: TargetNetwork, count: int, windows: Sequence[int | None]) -> list[KVLayer]:
    """Places for `count` draft layers in a page of the full pool, behind the target's own."""
    return [KVLayer("full", target.full_layers + i, windows[i]) for i in range(count)]


def describe(config: EagleConfig | DFlashConfig) -> dict[str, Any]:
    """What the start-up print and /server_info say about a draft."""
    return {"algorithm": config.algorithm, "layers": config.num_layers, "draft_vocab_size": config.draft_vocab_size}
