"""DFlash drafting: one non-causal forward over [anchor, MASK × (B-1)] drafts a whole block.

    KV slots of a row in the draft layers           c = committed, position of the anchor (the newest token)
    0 … c-1        context K/V, a pure function of the target's features at that position, written by `observe`
    c … c+B-1      the block's own K/V, thrown away: the next `observe` overwrites what was committed

The slots of a block are marginals, so the arg-max block is proposed at every temperature (q is one-hot).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from octavo.errors import ConfigError, ModelError
from octavo.ops.meta import StepMeta
from octavo.spec.checkpoint import DraftWeights
from octavo.spec.draft_config import DFlashConfig
from octavo.spec.draft_layers import DFlashNetwork, DraftTarget, kv_layers_behind
from octavo.spec.drafter import Draft, DraftRequest, Observation, ProposeBatch
from octavo.spec.metas import PositionLimit, observe_meta
from octavo.spec.prepare import DFlashPrep, prepare_dflash
from octavo.spec.verify import chain_mask


def check_block(block_size: int, trained_block: int) -> None:
    """Raise for a block that cannot be: ValueError at 0 or less (01), ConfigError above the trained size."""
    if block_size <= 0:
        raise ValueError(f"block_size must be positive, got {block_size}")
    if not 2 <= block_size <= trained_block:
        raise ConfigError("draft_tokens", block_size, f"2 to {trained_block}, the draft's block size")


class DFlashDrafter:
    """One DFlash draft bound to a target. `block_size` tokens are verified at most, anchor included."""

    name = "dflash"
    needs_host_tokens = False
    needs_draft_kv = True
    key_mode = "token"

    def __init__(
        self, weights: DraftWeights, target: DraftTarget, *, block_size: int | None = None, max_rows: int
    ) -> None:
        """`block_size` below the trained one verifies a prefix of each block. Raises ConfigError or ModelError."""
        config = weights.config
        if not isinstance(config, DFlashConfig):
            raise ModelError(f"a DFlash draft is needed, this one is for {config.algorithm}")
        size = config.block_size if block_size is None else block_size
        check_block(size, config.block_size)
        self.config, self.block_size = config, config.block_size
        self._weights = weights
        self.max_draft_tokens = self.max_depth = size - 1
        # the draft forward writes the trained block whatever is verified of it
        self.footprint_tokens = config.block_size
        self.commit_lag_tokens = config.block_size
        self.kv_layers = config.num_layers
        self.taps = config.taps
        self.limit = PositionLimit(config.context_tokens)
        layers = kv_layers_behind(target.network, config.num_layers, config.windows)
        self.network = DFlashNetwork(weights, target, layers)
        self._causal_mask = chain_mask(config.block_size - 1, target.device)
        self._full_mask = self._causal_mask.narrow(0, config.block_size - 1, 1).expand(config.block_size)

    @property
    def identity(self) -> str:
        """Tells this draft's weights from others'. Reads them back, so it is asked for off the launch path only."""
        return self._weights.fingerprint

    def begin(self, request: DraftRequest) -> None:
        self.limit.begin(request)

    def end(self, row: int) -> None:
        self.limit.end(row)

    def prepare_for_decode(
        self, top_ks: Sequence[int], committed: Sequence[int], *, vocab_size: int
    ) -> DFlashPrep:
        """Host statistics of a step (see spec/prepare.py)."""
        return prepare_dflash(top_ks, committed, block_size=self.block_size, vocab_size=vocab_size)

    def observe(self, observation: Observation) -> None:
        """Context K/V of every true token."""
        if observation.features is None:
            raise ValueError("DFlash needs the target's features")
        self.network.write(observe_meta(observation), observation.kv, observation.features)

    def propose(self, batch: ProposeBatch) -> Draft:
        limits = self.limit.cut(batch)
        columns = min(batch.draft_tokens, self.max_draft_tokens, max(limits, default=0))
        lengths = tuple(min(columns, limit) for limit in limits)
        b, size, device = len(limits), self.block_size, batch.rows.device
        if columns <= 0:
            return Draft(torch.zeros(b, 0, dtype=torch.int64, device=device), None, None, (0,) * b)
        masks = torch.full((b, size - 1), self.config.mask_token_id, dtype=torch.int64, device=device)
        tokens = torch.cat([batch.last_tokens.unsqueeze(1), masks], dim=1).reshape(-1)
        slots = (batch.seq_lens.unsqueeze(1) + torch.arange(size, device=device)).reshape(-1)

        def meta(mask: torch.Tensor) -> StepMeta:
            return StepMeta(
                token_ids=tokens,
                positions=slots,
                write_slots=slots,
                q_seq=torch.arange(b * size, device=device) // size,
                rows=batch.rows,
                kv_start=batch.seq_lens,
                mask=mask.expand(b, size).reshape(-1),
                q_indptr=tuple(range(0, b * size + 1, size)),
                max_kv_tokens=batch.max_kv_tokens,
            )

        hidden = self.network.block(meta(self._full_mask), meta(self._causal_mask), batch.kv)
        predicted = hidden.reshape(b, size, -1).narrow(1, 1, columns).reshape(b * columns, -1)
        drafted = self.network.head.argmax(predicted.contiguous())
        return Draft(drafted.reshape(b, columns), None, None, lengths)
