"""The draft networks for training: dense, differentiable, parameters under their checkpoint names.

What they compute is what spec/draft_layers.py computes over paged KV; a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from octavo.model.rope import rope_tables
from octavo.spec.checkpoint import DraftWeights
from octavo.spec.draft_config import DFlashConfig, DraftConfig, EagleConfig

Tables = tuple[Tensor, Tensor]


class Params(nn.Module):
    """Tensors by dotted name: `self["layers.0.mlp.up_proj.weight"]`."""

    def __init__(self, tensors: Mapping[str, Tensor], frozen: frozenset[str] = frozenset()) -> None:
        super().__init__()
        self._names: dict[str, str] = {}
        for name, tensor in tensors.items():
            key = name.replace(".", "__")
            self._names[name] = key
            self.register_parameter(key, nn.Parameter(tensor.clone().float(), requires_grad=name not in frozen))

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = getattr(self, self._names[name])
        return tensor

    def get(self, name: str) -> Tensor | None:
        return self[name] if name in self._names else None

    def tensors(self) -> dict[str, Tensor]:
        """A detached copy under checkpoint names."""
        return {name: getattr(self, key).detach().clone() for name, key in self._names.items()}


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split rotation of x [..., D] by tables [..., D/2] that broadcast to it."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class DraftNet(nn.Module):
    """What both algorithms share: parameters, rotation tables, norms, the back of a layer."""

    def __init__(self, weights: DraftWeights, rope: Tables, frozen: frozenset[str] = frozenset()) -> None:
        super().__init__()
        self.layer = weights.config.layer
        self.params = Params(weights.tensors, frozen)
        self.token_ids = weights.token_ids
        self.register_buffer("cos", rope[0], persistent=False)
        self.register_buffer("sin", rope[1], persistent=False)

    cos: Tensor
    sin: Tensor

    def norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.params[name + ".weight"]
        return F.rms_norm(x.float(), (weight.shape[0],), weight, self.layer.rms_eps)

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.params[name + ".weight"], self.params.get(name + ".bias"))

    def heads(self, x: Tensor, name: str, count: int) -> Tensor:
        """[..., T, width] -> [..., heads, T, D]."""
        y = self.linear(x, name)
        return y.reshape(*y.shape[:-1], count, self.layer.head_dim).transpose(-3, -2)

    def spread(self, kv: Tensor) -> Tensor:
        """KV heads repeated for their query heads: [..., KV, T, D] -> [..., heads, T, D]."""
        group = self.layer.num_heads // self.layer.num_kv_heads
        return kv if group == 1 else kv.repeat_interleave(group, dim=-3)

    def back(self, attended: Tensor, residual: Tensor, prefix: str) -> Tensor:
        """Output projection, residual, MLP: attended [..., heads, T, D]."""
        flat = attended.transpose(-3, -2).flatten(-2)
        hidden = residual + self.linear(flat, prefix + "self_attn.o_proj")
        x = self.norm(hidden, prefix + "post_attention_layernorm")
        gate = self.linear(x, prefix + "mlp.gate_proj")
        act = F.silu(gate) if self.layer.activation == "silu" else F.gelu(gate, approximate="tanh")
        return hidden + self.linear(act * self.linear(x, prefix + "mlp.up_proj"), prefix + "mlp.down_proj")

    def weights(self, config: DraftConfig) -> DraftWeights:
        return DraftWeights(config, self.params.tensors(), self.token_ids)


class EagleNet(DraftNet):
    """EAGLE-3 with training-time test: step k sees step-0 keys causally and the own position of steps 1 … k."""

    def __init__(self, weights: DraftWeights, rope: Tables, frozen: frozenset[str] = frozenset()) -> None:
        super().__init__(weights, rope, frozen)
        if not isinstance(weights.config, EagleConfig):
            raise TypeError("EagleNet needs an EAGLE-3 configuration")
        self.config = weights.config

    def fuse(self, features: Tensor) -> Tensor:
        """[..., taps * H] -> [..., H]."""
        if self.config.norm_before_fc:
            features = self.norm(features, "input_norm")
        if self.config.fc_norm:
            parts = features.chunk(len(self.config.taps), dim=-1)
            features = torch.cat([self.norm(p, f"fc_norm.{i}") for i, p in enumerate(parts)], dim=-1)
        return self.linear(features, "fc")

    def unroll(self, features: Tensor, embeds: Tensor, steps: int) -> list[Tensor]:
        """Hidden states for the head, one [B, T, H] per step.

        features [B, T, taps * H] of positions 0 … T-1; embeds [B, T + steps, H] of tokens 0 … T+steps-1 (what is
        beyond the text may be anything). Step k at i uses token i + 1 + k and predicts token i + 2 + k.
        """
        b, length, _ = features.shape
        if embeds.shape[1] < length + steps:
            embeds = F.pad(embeds, (0, 0, 0, length + steps - embeds.shape[1]))
        hidden_size, heads, kv_heads = self.layer.hidden_size, self.layer.num_heads, self.layer.num_kv_heads
        mask = torch.full((length, length), float("-inf"), device=features.device).triu(1)
        state = self.fuse(features)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        outputs: list[Tensor] = []
        attn = "layers.0.self_attn."
        for k in range(steps):
            normed = self.norm(state, "layers.0.hidden_norm")
            token = self.norm(embeds[:, 1 + k : 1 + k + length], "layers.0.input_layernorm")
            both = torch.cat([token, normed], dim=-1)
            cos, sin = self.cos[k : k + length], self.sin[k : k + length]
            q = rotate(self.heads(both, attn + "q_proj", heads), cos, sin)
            keys.append(self.spread(rotate(self.heads(both, attn + "k_proj", kv_heads), cos, sin)))
            values.append(self.spread(self.heads(both, attn + "v_proj", kv_heads)))
            attended = _attend(q * self.layer.head_dim**-0.5, keys, values, mask)
            state = self.back(attended, normed if self.config.norm_before_residual else state, "layers.0.")
            final = self.norm(state, "norm").reshape(b, length, hidden_size)
            outputs.append(final if self.config.norm_logits else state)
            if self.config.feed_normed:
                state = final
        return outputs


def _attend(q: Tensor, keys: list[Tensor], values: list[Tensor], mask: Tensor) -> Tensor:
    """q [B, heads, T, D] (scaled) over keys[0] causally and its own position of the others."""
    scores = q @ keys[0].transpose(-1, -2) + mask
    if len(keys) == 1:
        return scores.softmax(dim=-1) @ values[0]
    own = torch.stack([(q * k).sum(dim=-1) for k in keys[1:]], dim=-1)
    probs = torch.cat([scores, own], dim=-1).softmax(dim=-1)
    length = scores.shape[-1]
    out = probs[..., :length] @ values[0]
    for j, value in enumerate(values[1:]):
        out = out + probs[..., length + j : length + j + 1] * value
    return out


class DFlashNet(DraftNet):
    """DFlash over many anchors at once: blocks see the context strictly before their anchor, and themselves."""

    def __init__(self, weights: DraftWeights, rope: Tables, frozen: frozenset[str] = frozenset()) -> None:
        super().__init__(weights, rope, frozen)
        if not isinstance(weights.config, DFlashConfig):
            raise TypeError("DFlashNet needs a DFlash configuration")
        self.config = weights.config

    def blocks(self, features: Tensor, anchors: Tensor, anchor_embeds: Tensor, mask_embed: Tensor) -> Tensor:
        """Hidden states [B, A, size, H] for the head.

        features [B, T, taps * H]; anchors [B, A] positions < T; anchor_embeds [B, A, H] of the anchor tokens;
        mask_embed [H]. Slot k of a block predicts the token at anchor + k.
        """
        config, layer = self.config, self.layer
        b, count = anchors.shape
        size, length = config.block_size, features.shape[1]
        device = features.device
        context = self.norm(self.linear(features, "fc"), "hidden_norm")
        masks = mask_embed.expand(b, count, size - 1, layer.hidden_size)
        hidden = torch.cat([anchor_embeds.unsqueeze(2), masks], dim=2)
        steps = torch.arange(size, device=device)
        positions = anchors.unsqueeze(2) + steps  # [B, A, size]
        cos, sin = self.cos[positions].unsqueeze(2), self.sin[positions].unsqueeze(2)
        at = torch.arange(length, device=device)
        for i in range(config.num_layers):
            window = config.windows[i]
            visible = at < anchors[:, :, None, None]  # [B, A, 1, T]
            if window is not None:
                visible = visible & (at > positions.unsqueeze(3) - window)
            direction = steps[None, :] <= steps[:, None] if config.causal[i] else None
            tables = (cos, sin), (self.cos[:length], self.sin[:length])
            hidden = self._layer(i, hidden, context, visible.expand(b, count, size, length), direction, *tables)
        return self.norm(hidden, "norm")

    def _layer(
        self,
        index: int,
        hidden: Tensor,
        context: Tensor,
        visible: Tensor,
        direction: Tensor | None,
        block_rope: Tables,
        context_rope: Tables,
    ) -> Tensor:
        layer, prefix = self.layer, f"layers.{index}."
        attn = prefix + "self_attn."
        x = self.norm(hidden, prefix + "input_layernorm")
        q = rotate(self.norm(self.heads(x, attn + "q_proj", layer.num_heads), attn + "q_norm"), *block_rope)
        k = rotate(self.norm(self.heads(x, attn + "k_proj", layer.num_kv_heads), attn + "k_norm"), *block_rope)
        v = self.spread(self.heads(x, attn + "v_proj", layer.num_kv_heads))
        context_k = self.norm(self.heads(context, attn + "k_proj", layer.num_kv_heads), attn + "k_norm")
        context_k = self.spread(rotate(context_k, *context_rope)).unsqueeze(1)  # [B, 1, heads, T, D]
        context_v = self.spread(self.heads(context, attn + "v_proj", layer.num_kv_heads)).unsqueeze(1)
        q = q * layer.head_dim**-0.5
        far = (q @ context_k.transpose(-1, -2)).masked_fill(~visible.unsqueeze(2), float("-inf"))
        near = q @ self.spread(k).transpose(-1, -2)
        if direction is not None:
            near = near.masked_fill(~direction, float("-inf"))
        probs = torch.cat([far, near], dim=-1).softmax(dim=-1)
        length = far.shape[-1]
        attended = probs[..., :length] @ context_v + probs[..., length:] @ v
        return self.back(attended, hidden, prefix)


def rope_for(config: DraftConfig, target_rope: object, positions: int) -> Tables:
    """The rotation tables of a draft: its own (DFlash with a rope) or the target's."""
    from octavo.model.config import RopeConfig

    own = config.rope if isinstance(config, DFlashConfig) and config.rope is not None else target_rope
    if not isinstance(own, RopeConfig):
        raise TypeError("a RopeConfig is needed")
    return rope_tables(own, config.layer.head_dim, positions)
