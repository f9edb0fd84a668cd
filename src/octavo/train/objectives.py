"""What a draft is trained to do, and how well it would be accepted.

The targets are the target model's own distributions, restricted to the draft's vocabulary, at the positions of text
the target itself wrote.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo.train.data import Batch
from octavo.train.nets import DFlashNet, EagleNet


@dataclass(frozen=True)
class Frozen:
    """Parts of the target that training only reads: embedding table [V, H], its scale, head rows [v, H] of the
    draft's vocabulary, their ids [v], and the target's logit soft cap."""

    table: Tensor
    head: Tensor
    token_ids: Tensor
    softcap: float | None = None

    def embed(self, tokens: Tensor) -> Tensor:
        """Raw embedding rows, as drafts see them."""
        return F.embedding(tokens, self.table)

    def target_probs(self, hidden: Tensor) -> Tensor:
        logits = F.linear(hidden, self.head).float()
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits.softmax(dim=-1)


@dataclass(frozen=True)
class Outcome:
    """A batch's loss, the summed accepted drafts and how many proposals they come from (teacher-forced)."""

    loss: Tensor
    accepted: float
    proposals: int

    @property
    def accept_length(self) -> float:
        """Accepted drafts plus the bonus token, per proposal."""
        return 1.0 + self.accepted / max(1, self.proposals)


def products_in(dtype: str) -> torch.autocast:
    """Matrix products inside run in "bfloat16", or as they are ("float32"); parameters and losses stay float32."""
    return torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16")


def _cross_entropy(hidden: Tensor, head: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
    """(cross-entropy per row, arg-max draft id per row)."""
    logits = F.linear(hidden, head).float()
    return -(probs * logits.log_softmax(dim=-1)).sum(dim=-1), logits.argmax(dim=-1)


def eagle_outcome(net: EagleNet, frozen: Frozen, batch: Batch, steps: int, decay: float = 0.8) -> Outcome:
    """Training-time test: sum over steps k of decay^k · cross-entropy, step k at position i predicting i + 2 + k."""
    b, length = batch.tokens.shape
    at = torch.arange(length)
    # a token is predicted if it belongs to the answer and exists
    wanted = (at >= batch.answers.unsqueeze(1)) & (at < batch.lengths.unsqueeze(1))  # [B, T] by predicted token
    wanted[:, :2] = False
    rows, columns = wanted.nonzero(as_tuple=True)
    with torch.no_grad():
        probs = frozen.target_probs(batch.hidden[rows, columns - 1])
    outputs = net.unroll(batch.features, frozen.embed(batch.tokens), steps)
    loss = torch.zeros(())
    run = torch.zeros(b, length)
    alive = torch.zeros(b, length, dtype=torch.bool)
    for k, out in enumerate(outputs):
        base = columns - 2 - k
        valid = base >= 0
        r, c, i = rows[valid], columns[valid], base[valid]
        loss_rows, best = _cross_entropy(out[r, i], frozen.head, probs[valid])
        loss = loss + decay**k * loss_rows.mean()
        hit = torch.zeros(b, length, dtype=torch.bool)
        hit[r, i] = frozen.token_ids[best] == batch.tokens[r, c]
        if k == 0:
            alive[r, i] = True
            proposals = int(alive.sum())
        alive = alive & hit
        run = run + alive
    return Outcome(loss, float(run.sum()), proposals)


def pick_anchors(batch: Batch, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(anchors [B, A], valid [B, A]): distinct answer positions that have a token behind them."""
    b, length = batch.tokens.shape
    at = torch.arange(length)
    allowed = (at >= batch.answers.unsqueeze(1)) & (at < batch.lengths.unsqueeze(1) - 1)
    noise = torch.rand(b, length, generator=generator).masked_fill(~allowed, -1.0)
    best, anchors = noise.topk(min(count, length), dim=1)
    return anchors, best >= 0


def dflash_outcome(
    net: DFlashNet,
    frozen: Frozen,
    batch: Batch,
    anchors_per_sample: int,
    generator: torch.Generator,
    gamma: float = 4.0,
) -> Outcome:
    """Blocks at random answer positions; slot k predicts token anchor + k with weight exp(-(k - 1) / gamma)."""
    size = net.config.block_size
    anchors, valid = pick_anchors(batch, anchors_per_sample, generator)
    embeds = frozen.embed(batch.tokens.gather(1, anchors)) * net.config.embed_scale
    mask = frozen.table[net.config.mask_token_id] * net.config.embed_scale
    hidden = net.blocks(batch.features, anchors, embeds, mask)  # [B, A, size, H]
    slots = torch.arange(1, size)
    predicted = anchors.unsqueeze(2) + slots  # [B, A, size - 1]
    real = valid.unsqueeze(2) & (predicted < batch.lengths[:, None, None])
    b_index, a_index, s_index = real.nonzero(as_tuple=True)
    token_at = predicted[b_index, a_index, s_index]
    with torch.no_grad():
        probs = frozen.target_probs(batch.hidden[b_index, token_at - 1])
    rows = hidden[:, :, 1:][b_index, a_index, s_index]
    loss_rows, best = _cross_entropy(rows, frozen.head, probs)
    weight = torch.exp(-s_index.float() / gamma)
    loss = (loss_rows * weight).sum() / weight.sum().clamp(min=1e-6)
    hits = torch.zeros(real.shape)
    hits[b_index, a_index, s_index] = (frozen.token_ids[best] == batch.tokens[b_index, token_at]).float()
    accepted = hits.cumprod(dim=2).sum(dim=2)[valid]
    return Outcome(loss, float(accepted.sum()), int(valid.sum()))
