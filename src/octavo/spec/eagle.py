"""EAGLE-3 drafting over paged draft KV, as a chain or a top-k tree.

    KV slots of a row in the draft layer            c = committed, position of the newest token
    0 … c-1        true pairs (feature i, token i+1), written by `observe`
    c + (s-1)·K + k  branch k of draft step s: pair (own state, drafted token), RoPE position c + s - 1, thrown away

The first prediction comes from the newest true pair, c - 1: its K/V is there already and may lie in a shared page
(law 12), so the query runs with its write pointed at slot c, which it does not see and which step 1 overwrites.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from octavo.errors import ConfigError, ModelError
from octavo.ops.meta import StepMeta
from octavo.spec.checkpoint import DraftWeights
from octavo.spec.draft_config import EagleConfig
from octavo.spec.draft_layers import DraftTarget, EagleNetwork, kv_layers_behind
from octavo.spec.drafter import Draft, DraftRequest, Observation, ProposeBatch
from octavo.spec.metas import PositionLimit, bit_table, last_slots, observe_meta
from octavo.spec.prepare import EaglePrep, prepare_eagle
from octavo.spec.tree import Frontier, TreeGrower
from octavo.spec.verify import MAX_NODES


def check_eagle(steps: int, top_k: int, draft_tokens: int, vocab_size: int) -> None:
    """Raise ConfigError for a tree that cannot be: `draft_tokens` is N, root included."""
    if steps < 1:
        raise ConfigError("draft_steps", steps, "at least 1")
    if not 1 <= top_k <= vocab_size:
        raise ConfigError("draft_topk", top_k, f"1 to {vocab_size}, the draft's vocabulary")
    if steps * top_k > MAX_NODES:
        raise ConfigError("draft_topk", top_k, f"steps x topk at most {MAX_NODES}, {steps} steps are asked for")
    if not 2 <= draft_tokens <= MAX_NODES:
        raise ConfigError("draft_tokens", draft_tokens, f"2 to {MAX_NODES}, the root included")
    if top_k == 1 and draft_tokens != steps + 1:
        raise ConfigError("draft_tokens", draft_tokens, f"a chain of {steps} steps has {steps + 1}")
    candidates = top_k + (steps - 1) * top_k * top_k
    if draft_tokens - 1 > candidates:
        raise ConfigError("draft_tokens", draft_tokens, f"at most {candidates + 1} from {steps} steps of top {top_k}")


class EagleDrafter:
    """One EAGLE-3 draft bound to a target."""

    name = "eagle3"
    needs_host_tokens = False
    needs_draft_kv = True
    kv_layers = 1
    key_mode = "pair"

    def __init__(
        self,
        weights: DraftWeights,
        target: DraftTarget,
        *,
        steps: int,
        top_k: int = 1,
        draft_tokens: int | None = None,
        max_rows: int,
    ) -> None:
        """`draft_tokens` N counts the root (default: steps + 1 for a chain). Raises ConfigError or ModelError."""
        config = weights.config
        if not isinstance(config, EagleConfig):
            raise ModelError(f"an EAGLE-3 draft is needed, this one is for {config.algorithm}")
        nodes = default_nodes(steps, top_k) if draft_tokens is None else draft_tokens
        check_eagle(steps, top_k, nodes, config.draft_vocab_size)
        self.config, self.steps, self.top_k = config, steps, top_k
        self._weights = weights
        self.max_draft_tokens = nodes - 1
        self.max_depth = min(steps, nodes - 1)
        self.footprint_tokens = max(steps * top_k, nodes)
        self.commit_lag_tokens = nodes if top_k == 1 else min(steps + 1, nodes)
        self.taps = config.taps
        self.limit = PositionLimit(config.context_tokens)
        self.network = EagleNetwork(weights, target, kv_layers_behind(target.network, 1, (None,))[0])
        self._state = torch.zeros(max_rows, config.layer.hidden_size, dtype=target.dtype, device=target.device)
        self._bits = bit_table(target.device)

    # -- life of a row -----------------------------------------------------------------------------------------------

    @property
    def identity(self) -> str:
        """Tells this draft's weights from others'. Reads them back, so it is asked for off the launch path only."""
        return self._weights.fingerprint

    def begin(self, request: DraftRequest) -> None:
        self.limit.begin(request)
        self._state.select(0, request.row).zero_()

    def end(self, row: int) -> None:
        self.limit.end(row)
        self._state.select(0, row).zero_()

    def export_seed(self, row: int) -> torch.Tensor:
        """[H] what a row's next proposal starts from: it travels with a request that moves to another server."""
        return self._state.select(0, row).clone()

    def import_seed(self, row: int, seed: torch.Tensor) -> None:
        self._state.select(0, row).copy_(seed)

    def prepare_for_decode(
        self, rows: list[int], committed: list[int], allocated: list[int], *, width_tokens: int
    ) -> EaglePrep:
        """Host checks and the decode index of a step (see spec/prepare.py)."""
        return prepare_eagle(
            rows, committed, allocated, draft_tokens=self.max_draft_tokens + 1, width_tokens=width_tokens
        )

    # -- observe -----------------------------------------------------------------------------------------------------

    def observe(self, observation: Observation) -> None:
        """Draft KV of every true pair, and each row's newest fused feature as the seed of its next proposal."""
        if observation.features is None:
            raise ValueError("EAGLE-3 needs the target's features")
        meta = observe_meta(observation)
        fused = self.network.write(meta, observation.kv, observation.features, observation.next_tokens)
        newest = fused.index_select(0, last_slots(observation))
        self._state.index_copy_(0, observation.rows, newest.to(self._state.dtype))

    # -- propose -----------------------------------------------------------------------------------------------------

    def propose(self, batch: ProposeBatch) -> Draft:
        limits = self.limit.cut(batch)
        if self.top_k == 1:
            return self._chain(batch, limits)
        return self._tree(batch, limits)

    def _first(self, batch: ProposeBatch) -> tuple[StepMeta, torch.Tensor]:
        """The newest true pair, position c - 1: (its forward, the state [b, H] it starts from)."""
        b = len(batch.host_rows)
        meta = StepMeta(
            token_ids=batch.last_tokens,
            positions=(batch.seq_lens - 1).clamp(min=0),
            write_slots=batch.seq_lens,
            q_seq=torch.arange(b, device=batch.rows.device),
            rows=batch.rows,
            kv_start=batch.seq_lens,
            mask=torch.zeros(b, dtype=torch.int64, device=batch.rows.device),
            q_indptr=tuple(range(b + 1)),
            max_kv_tokens=batch.max_kv_tokens,
        )
        return meta, self._state.index_select(0, batch.rows)

    def _chain(self, batch: ProposeBatch, limits: tuple[int, ...]) -> Draft:
        steps = min(batch.draft_tokens, self.steps, max(limits, default=0))
        lengths = tuple(min(steps, limit) for limit in limits)
        b, device = len(limits), batch.rows.device
        if steps <= 0:
            return Draft(torch.zeros(b, 0, dtype=torch.int64, device=device), None, None, (0,) * b)
        first, state = self._first(batch)
        state, token = self.network.chain_step(first, batch.kv, state, batch.last_tokens)
        drafted = [token]
        for s in range(1, steps):
            at = batch.seq_lens + (s - 1) if s > 1 else batch.seq_lens
            meta = replace(first, token_ids=token, positions=at, write_slots=at, mask=None)
            state, token = self.network.chain_step(meta, batch.kv, state, token)
            drafted.append(token)
        return Draft(torch.stack(drafted, dim=1), None, None, lengths)

    def _tree(self, batch: ProposeBatch, limits: tuple[int, ...]) -> Draft:
        """A row whose limit is below the tree's depth drafts nothing: its columns could not all be used."""
        b, k, device = len(limits), self.top_k, batch.rows.device
        steps = min(self.steps, max(limits, default=0), batch.draft_tokens)
        if steps <= 0:
            return Draft(torch.zeros(b, 0, dtype=torch.int64, device=device), None, None, (0,) * b)
        columns = min(self.max_draft_tokens, batch.draft_tokens, k + (steps - 1) * k * k)
        lengths = tuple(columns if limit >= steps else 0 for limit in limits)
        first, state = self._first(batch)
        state, hidden = self.network.step(first, batch.kv, state, batch.last_tokens)
        grower = TreeGrower(k)
        tokens, log_probs = self._top(hidden)
        frontier = grower.first(tokens, log_probs)
        state = state.unsqueeze(1).expand(b, k, state.shape[1])
        mask = torch.zeros(b, k, dtype=torch.int64, device=device)
        for s in range(1, steps):
            mask = mask.gather(1, frontier.source) + self._bits.narrow(0, (s - 1) * k, k)
            parent_state = state.gather(1, frontier.source.unsqueeze(2).expand(b, k, state.shape[2]))
            flat_state, hidden = self._branches(batch, frontier, parent_state, mask, s)
            state = flat_state.reshape(b, k, -1)
            tokens, log_probs = self._top(hidden)
            frontier = grower.grow(frontier, tokens.reshape(b, k, k), log_probs.reshape(b, k, k))
        return grower.draft(columns, lengths)

    def _branches(
        self, batch: ProposeBatch, frontier: Frontier, state: torch.Tensor, mask: torch.Tensor, s: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draft step s over the b·K branches of `frontier`."""
        b, k = frontier.tokens.shape
        device = batch.rows.device
        slots = batch.seq_lens.unsqueeze(1) + torch.arange((s - 1) * k, s * k, device=device)
        positions = (batch.seq_lens + (s - 1)).unsqueeze(1).expand(b, k)
        tokens = frontier.tokens.reshape(-1)
        meta = StepMeta(
            token_ids=tokens,
            positions=positions.reshape(-1),
            write_slots=slots.reshape(-1),
            q_seq=torch.arange(b * k, device=device) // k,
            rows=batch.rows,
            kv_start=batch.seq_lens,
            mask=mask.reshape(-1),
            q_indptr=tuple(range(0, b * k + 1, k)),
            max_kv_tokens=batch.max_kv_tokens,
        )
        return self.network.step(meta, batch.kv, state.reshape(b * k, -1), tokens)

    def _top(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(target ids, log-probabilities) [m, K] of the best K drafts."""
        log_probs = torch.log_softmax(self.network.head.logits(hidden), dim=-1)
        best, ids = log_probs.topk(self.top_k, dim=-1)
        return self.network.head.target_ids(ids), best


def default_nodes(steps: int, top_k: int) -> int:
    """N where the user gave none: a chain's own, or a small tree."""
    return steps + 1 if top_k == 1 else min(16, 1 + top_k + (steps - 1) * top_k * top_k)
