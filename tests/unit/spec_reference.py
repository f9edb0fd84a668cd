"""A tiny target, and the draft networks recomputed from scratch: no pages, no masks, no cached state."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from octavo.model.config import ModelConfig, RopeConfig
from octavo.model.rope import rope_tables
from octavo.ops.meta import KVView
from octavo.ops.torch_ops import TorchOps
from octavo.ops.weights import Matrix
from octavo.spec.checkpoint import DraftWeights
from octavo.spec.draft_config import DFlashConfig, EagleConfig, LayerShape
from octavo.spec.draft_layers import DraftTarget
from octavo.spec.drafter import Observation, ProposeBatch

VOCAB, HIDDEN, LAYERS = 96, 32, 6
TARGET = ModelConfig("llama", VOCAB, HIDDEN, 64, LAYERS, 4, 2, 16, 512, rope=RopeConfig(10000.0))
SHAPE = LayerShape(HIDDEN, 48, 4, 2, 16, 1e-5)


@contextlib.contextmanager
def training_readers_stood_in_for() -> Iterator[None]:
    """`speculators` imports readers of training data, which nothing here touches and which need not be installed."""
    absent = [name for name in ("datasets", "hs_connectors") if importlib.util.find_spec(name) is None]
    for name in absent:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__getattr__ = lambda attribute: object  # type: ignore[method-assign]
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]


class TinyTarget:
    """Embeddings, head and features: what a drafter sees of a target. Features are a function of the token only."""

    full_layers = 2

    def __init__(self, ops: TorchOps, config: ModelConfig = TARGET) -> None:
        self.config, self.ops = config, ops
        generator = torch.Generator().manual_seed(5)
        self.table = torch.randn(config.vocab_size, config.hidden_size, generator=generator)
        self.head = 2.0 * torch.randn(config.vocab_size, config.hidden_size, generator=generator) / HIDDEN**0.5
        self._head = ops.matrix(Matrix("fp32", config.vocab_size, config.hidden_size, dense=self.head))
        self._table = self.table.to(ops.device) * config.embed_scale

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self._table)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.ops.logits(hidden, self._head)

    def argmax(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.ops.argmax(hidden, self._head)


def bind(device: torch.device | str = "cpu", config: ModelConfig = TARGET) -> tuple[DraftTarget, TinyTarget]:
    ops = TorchOps(device)
    network = TinyTarget(ops, config)

    def head_rows(ids: torch.Tensor) -> Matrix:
        return Matrix("fp32", len(ids), HIDDEN, dense=network.head.index_select(0, ids))

    def rope(rope: RopeConfig, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        return rope_tables(rope, head_dim, 640)

    target = DraftTarget(network, ops, head_rows, rope, "fp32", torch.float32, torch.device(device))
    return target, network


def eagle_config(**changes: object) -> EagleConfig:
    values: dict[str, object] = {"layer": SHAPE, "vocab_size": VOCAB, "draft_vocab_size": VOCAB, "taps": (2, 3, 4)}
    return EagleConfig(**{**values, **changes})  # type: ignore[arg-type]


def dflash_config(**changes: object) -> DFlashConfig:
    values: dict[str, object] = {
        "layer": SHAPE,
        "vocab_size": VOCAB,
        "draft_vocab_size": VOCAB,
        "num_layers": 2,
        "target_layer_ids": (1, 3),
        "block_size": 6,
        "mask_token_id": 95,
        "windows": (None, None),
        "causal": (False, False),
    }
    return DFlashConfig(**{**values, **changes})  # type: ignore[arg-type]


@dataclass
class Pages:
    """KV tensors and a table for `rows` rows of `tokens` tokens, pages in random order, garbage in every slot."""

    view: KVView

    @classmethod
    def make(cls, draft_layers: int, *, rows: int = 4, tokens: int = 256, page_size: int = 16) -> Pages:
        generator = torch.Generator().manual_seed(1)
        width = -(-tokens // page_size)
        count = rows * width
        full = torch.randn(count + 1, 2 + draft_layers, 2, 2, page_size, 16, generator=generator)
        order = torch.randperm(count, generator=generator).reshape(rows, width)
        return cls(KVView(full, None, order.to(torch.int32), None, page_size))


def features_of(tokens: list[int], taps: int, seed: int = 9) -> torch.Tensor:
    """[n, taps * H] features of a text: each depends on its own token and position."""
    rows = []
    for i, token in enumerate(tokens):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + 1009 * i + token)
        rows.append(torch.randn(taps * HIDDEN, generator=generator))
    return torch.stack(rows)


def observe_chunk(
    view: KVView, row: int, tokens: list[int], features: torch.Tensor, start: int, stop: int, pad: int = 0
) -> Observation:
    """Positions start:stop of a text, then `pad` slots of garbage."""
    width = stop - start + pad
    following = tokens[start + 1 : stop + 1] + [7] * pad
    garbage = torch.full((pad, features.shape[1]), 3.0)
    return Observation(
        torch.tensor([row]),
        (row,),
        (0, width),
        torch.tensor([start]),
        torch.tensor([stop - start]),
        torch.cat([features[start:stop], garbage]),
        torch.tensor(following),
        (stop == len(tokens) - 1,),
        view,
        256,
    )


def propose_batch(
    view: KVView, rows: list[int], texts: list[list[int]], draft_tokens: int, limits: list[int] | None = None
) -> ProposeBatch:
    return ProposeBatch(
        torch.tensor(rows),
        tuple(rows),
        torch.tensor([len(t) - 1 for t in texts]),
        torch.tensor([t[-1] for t in texts]),
        draft_tokens,
        tuple(limits or [99] * len(rows)),
        None,
        view,
        256,
    )


# -- the networks from scratch --------------------------------------------------------------------------------------


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + SHAPE.rms_eps) * weight


def turn(x: torch.Tensor, position: int) -> torch.Tensor:
    """Rotate heads [n, D] at one position, pair (i, i + D/2)."""
    half = x.shape[-1] // 2
    out = torch.empty_like(x)
    for i in range(half):
        angle = position / TARGET.rope.theta ** (2 * i / x.shape[-1])
        c, s = math.cos(angle), math.sin(angle)
        out[:, i] = x[:, i] * c - x[:, i + half] * s
        out[:, i + half] = x[:, i + half] * c + x[:, i] * s
    return out


def heads(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1, SHAPE.head_dim)


def attend(q: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]) -> torch.Tensor:
    """q [heads, D] over lists of [kv_heads, D] -> [heads * D]."""
    out = []
    for h in range(SHAPE.num_heads):
        group = h // (SHAPE.num_heads // SHAPE.num_kv_heads)
        scores = torch.stack([(q[h] * k[group]).sum() for k in keys]) * SHAPE.head_dim**-0.5
        weights = torch.softmax(scores, dim=0)
        out.append(sum(w * v[group] for w, v in zip(weights, values, strict=True)))
    return torch.cat(out)  # type: ignore[arg-type]


def back(w: dict[str, torch.Tensor], prefix: str, attended: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    hidden = residual + w[prefix + "self_attn.o_proj.weight"] @ attended
    x = norm(hidden, w[prefix + "post_attention_layernorm.weight"])
    gate = w[prefix + "mlp.gate_proj.weight"] @ x
    act = gate * torch.sigmoid(gate)
    return hidden + w[prefix + "mlp.down_proj.weight"] @ (act * (w[prefix + "mlp.up_proj.weight"] @ x))


class EagleReference:
    """One row of EAGLE-3: everything from the first pair on, for every question asked."""

    def __init__(self, weights: DraftWeights, network: TinyTarget) -> None:
        config = weights.config
        assert isinstance(config, EagleConfig)
        self.w, self.config, self.network, self.ids = weights.tensors, config, network, weights.token_ids
        self.head = weights.tensors.get("lm_head.weight")

    def fuse(self, feature: torch.Tensor) -> torch.Tensor:
        if self.config.norm_before_fc:
            feature = norm(feature, self.w["input_norm.weight"])
        if self.config.fc_norm:
            parts = feature.split(HIDDEN)
            feature = torch.cat([norm(p, self.w[f"fc_norm.{i}.weight"]) for i, p in enumerate(parts)])
        return self.w["fc.weight"] @ feature

    def last(self, pairs: list[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """(state fed back, log-probabilities over the draft vocabulary) of the last of (state, token) pairs."""
        keys, values = [], []
        attn = "layers.0.self_attn."
        for position, (state, token) in enumerate(pairs):
            normed = norm(state, self.w["layers.0.hidden_norm.weight"])
            both = torch.cat([norm(self.network.table[token], self.w["layers.0.input_layernorm.weight"]), normed])
            keys.append(turn(heads(self.w[attn + "k_proj.weight"] @ both), position))
            values.append(heads(self.w[attn + "v_proj.weight"] @ both))
            q = turn(heads(self.w[attn + "q_proj.weight"] @ both), position)
        residual = normed if self.config.norm_before_residual else state
        out = back(self.w, "layers.0.", attend(q, keys, values), residual)
        final = norm(out, self.w["norm.weight"])
        rows = self.head if self.head is not None else self.network.head
        logits = rows @ (final if self.config.norm_logits else out)
        return final if self.config.feed_normed else out, torch.log_softmax(logits, dim=0)

    def target_id(self, draft_id: int) -> int:
        return draft_id if self.ids is None else int(self.ids[draft_id])

    def true_pairs(self, tokens: list[int], features: torch.Tensor) -> list[tuple[torch.Tensor, int]]:
        return [(self.fuse(features[i]), tokens[i + 1]) for i in range(len(tokens) - 1)]

    def chain(self, tokens: list[int], features: torch.Tensor, steps: int) -> list[int]:
        pairs = self.true_pairs(tokens, features)
        drafted: list[int] = []
        for _ in range(steps):
            state, log_probs = self.last(pairs)
            drafted.append(self.target_id(int(log_probs.argmax())))
            pairs = [*pairs, (state, drafted[-1])]
        return drafted


class DFlashReference:
    """One row of DFlash: context K/V and block recomputed for every question."""

    def __init__(self, weights: DraftWeights, network: TinyTarget) -> None:
        assert isinstance(weights.config, DFlashConfig)
        self.w, self.config, self.network = weights.tensors, weights.config, network

    def block(self, tokens: list[int], features: torch.Tensor) -> list[int]:
        config, w = self.config, self.w
        anchor, size = len(tokens) - 1, config.block_size
        context = [norm(w["fc.weight"] @ features[i], w["hidden_norm.weight"]) for i in range(anchor)]
        ids = [tokens[-1]] + [config.mask_token_id] * (size - 1)
        hidden = [self.network.table[t] * config.embed_scale for t in ids]
        for i in range(config.num_layers):
            hidden = self.layer(i, hidden, context, anchor)
        out = [self.network.head @ norm(h, w["norm.weight"]) for h in hidden]
        return [int(logits.argmax()) for logits in out[1:]]

    def layer(
        self, index: int, hidden: list[torch.Tensor], context: list[torch.Tensor], anchor: int
    ) -> list[torch.Tensor]:
        w, prefix = self.w, f"layers.{index}."
        attn = prefix + "self_attn."
        inputs = [norm(h, w[prefix + "input_layernorm.weight"]) for h in hidden]
        keys, values = [], []
        for position, x in enumerate([*context, *inputs]):
            k = norm(heads(w[attn + "k_proj.weight"] @ x), w[attn + "k_norm.weight"])
            keys.append(turn(k, position))
            values.append(heads(w[attn + "v_proj.weight"] @ x))
        results = []
        for j, x in enumerate(inputs):
            q = turn(norm(heads(w[attn + "q_proj.weight"] @ x), w[attn + "q_norm.weight"]), anchor + j)
            stop = anchor + j + 1 if self.config.causal[index] else len(keys)
            window = self.config.windows[index]
            start = 0 if window is None else max(0, anchor + j - window + 1)
            results.append(back(w, prefix, attend(q, keys[start:stop], values[start:stop]), hidden[j]))
        return results
