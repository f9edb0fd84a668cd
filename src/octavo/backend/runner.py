"""Launches one planned step on the device: draft, one target forward, sample, accept, tell the relay.

Everything between `launch` and `StepHandle.wait` is the launch path: it takes host numbers from the plan and device
values from the relay, and never waits for the device. `wait` is the one place where results come to the host.

Token order in the forward: decode rows first (root, then drafted columns), then prefill chunks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from octavo.backend.batches import Batch, Flat
from octavo.backend.chains import Chains
from octavo.backend.masks import draft_masks, first_masks, to_device
from octavo.backend.prompt_logprobs import prompt_logprobs
from octavo.backend.relay import Relay, TableProjection, TierProjection, upload
from octavo.backend.results import StepHandle
from octavo.backend.sampler import Sampler
from octavo.engine.request import Request
from octavo.kv.ledger import Ledger
from octavo.ops.meta import KVView, StepMeta
from octavo.sched.batch import DecodeRow, PrefillChunk, StepPlan
from octavo.spec.drafter import Draft, Drafter, DraftRequest, Observation, ProposeBatch, kv_owner
from octavo.spec.pending import PendingSteps
from octavo.spec.prepare import prepare_step
from octavo.spec.verify import accept, ancestor_mask, compact_kv, path_tokens

_BATCHES_KEPT = 256  # layouts of a step; rows that look up draft now so many tokens, now others


class Heads(NamedTuple):
    """Where the decode rows stand: their rows, their layout of one token each, KV slots committed and newest token."""

    host_rows: tuple[int, ...]
    batch: Batch
    start: torch.Tensor
    last: torch.Tensor


class Runner:
    """Binds a network, its KV tensors, a sampler and at most one drafter to the ledger's decisions."""

    def __init__(
        self,
        network: Any,
        kv: KVView,
        sampler: Sampler,
        drafter: Drafter | None,
        ledger: Ledger,
        *,
        device: torch.device,
        context_tokens: int,
    ) -> None:
        self.network, self.kv, self.sampler, self.drafter = network, kv, sampler, drafter
        self.device = device
        self.context_tokens = context_tokens
        self._ledger = ledger
        self.relay = Relay.create(ledger.config.max_rows, device)
        self._chains = Chains(self.relay, context_tokens)
        tables = {"full": kv.full_table}
        if kv.swa_table is not None:
            tables["swa"] = kv.swa_table
        self._projection = TableProjection(tables)
        self._tiers = None if kv.sparse is None or ledger.tiers is None else TierProjection(kv.sparse, ledger.tiers)
        self._batches_of: tuple[int, ...] = ()
        self._batches: dict[tuple[int, ...], Batch] = {}  # by drafted tokens, of the rows that came last
        self._taps = drafter.taps if drafter is not None else ()
        self.pending = PendingSteps()
        self._may_wait = drafter is not None and drafter.needs_draft_kv
        self._shown_tokens = 0  # of what waited
        self._catches_up = bool(getattr(drafter, "catches_up", False))
        self._pools = tuple(name for name in ("full", "swa") if getattr(kv, name) is not None)

    # -- life of a row -------------------------------------------------------------------------------------------

    def begin(self, request: Request, ban_ids: Sequence[int]) -> None:
        """A request got its row: everything per-row on the device is set anew."""
        self.sampler.begin(request, ban_ids)
        self.pending.forget(request.row)
        if self.drafter is not None:
            self.drafter.begin(
                DraftRequest(request.row, tuple(request.tokens), request.max_tokens, request.launched_tokens)
            )

    def resume(self, request: Request, ban_ids: Sequence[int], newest: int) -> None:
        """A row whose KV came from elsewhere: it has `launched_tokens` of it, and `newest` behind them without."""
        self.begin(request, ban_ids)
        row = upload([request.row], self.device)
        at, token = upload([request.launched_tokens], self.device), upload([newest], self.device)
        self.relay.store(row, at, token)
        if self.sampler.remembers:
            self.sampler.remember(row, at, token[:, None])

    def end(self, row: int) -> None:
        self.sampler.end(row)
        self.pending.forget(row)
        if self.drafter is not None:
            self.drafter.end(row)

    # -- one step ------------------------------------------------------------------------------------------------

    def launch(self, plan: StepPlan) -> StepHandle:
        """Run the plan; returns at once on an asynchronous device."""
        self.project()
        handle = StepHandle(plan)
        shown_before = self._shown_tokens
        heads = self._heads(plan)
        draft = self._propose(plan, handle, heads)
        self._run(handle, plan, heads, draft)
        handle.caught_up_tokens = self._shown_tokens - shown_before
        handle.send(self.device)
        return handle

    def _heads(self, plan: StepPlan) -> Heads | None:
        if not plan.decodes:
            return None
        host_rows = tuple(d.row for d in plan.decodes)
        batch = self._batch_of(host_rows, (0,) * len(host_rows))
        start = self.relay.seq_lens.index_select(0, batch.rows)
        return Heads(host_rows, batch, start, self.relay.last_tokens.index_select(0, batch.rows))

    def _run(self, handle: StepHandle, plan: StepPlan, heads: Heads | None, draft: Draft | None) -> None:
        """One forward in the form that takes the fewest operations; two where trees and prompts meet."""
        if heads is not None and draft is None and not plan.prefills:
            self._plain(handle, plan, heads)
        elif heads is not None and draft is not None and draft.parents is None and not plan.prefills:
            self._chain(handle, plan, heads, draft)
        elif draft is not None and draft.parents is not None and plan.prefills:
            # a tree's ancestor masks speak about 64 slots; a prompt chunk may be longer, so it runs on its own
            self._forward(handle, plan.decodes, (), heads, draft, plan.max_kv_tokens)
            self._forward(handle, (), plan.prefills, None, None, plan.max_kv_tokens)
        else:
            self._forward(handle, plan.decodes, plan.prefills, heads, draft, plan.max_kv_tokens)

    def project(self) -> None:
        """Bring the device copies of the books up to date: tables, and with a host tier slots and backup frontiers."""
        for pool in self._projection.tables:
            updates = self._ledger.take_table_updates(pool)
            self._projection.apply(pool, *updates)
            if pool == "full" and self._tiers is not None:
                self._tiers.apply(*updates)
        if self._tiers is not None:
            self._tiers.apply_rows()

    def _propose(self, plan: StepPlan, handle: StepHandle, heads: Heads | None) -> Draft | None:
        if self.drafter is None or heads is None or plan.draft_tokens == 0:
            return None
        host_rows = heads.host_rows
        top_ks = [d.request.params.top_k for d in plan.decodes]
        prepare_step(kv_owner(self.drafter), host_rows, self._ledger, top_ks, self.network.config.vocab_size)
        if not self._catches_up:
            self._show_pending()
        tokens = tuple(d.request.tokens for d in plan.decodes) if self.drafter.needs_host_tokens else None
        draft = self.drafter.propose(
            ProposeBatch(
                rows=heads.batch.rows,
                host_rows=host_rows,
                seq_lens=heads.start,
                last_tokens=heads.last,
                draft_tokens=plan.draft_tokens,
                host_limits=tuple(d.draft_limit for d in plan.decodes),
                host_tokens=tokens,
                kv=self.kv,
                max_kv_tokens=plan.max_kv_tokens,
                host_lens=tuple(len(d.request.tokens) + d.request.inflight_outputs for d in plan.decodes),
                catch_up=self._show_pending,
            )
        )
        handle.sources = draft.sources
        return draft if any(draft.lengths) else None

    def _forward(
        self,
        handle: StepHandle,
        decodes: tuple[DecodeRow, ...],
        prefills: tuple[PrefillChunk, ...],
        heads: Heads | None,
        draft: Draft | None,
        max_kv_tokens: int,
    ) -> None:
        flat = self._flat(len(decodes), draft)
        rows = upload([d.row for d in decodes] + [c.row for c in prefills], self.device)
        decode_rows = rows[: len(decodes)]
        start, last = (decode_rows, decode_rows) if heads is None else (heads.start, heads.last)
        meta = self._meta(flat, rows, start, last, draft, decodes, prefills, max_kv_tokens)
        hidden, taps = self.network.forward(meta, self.kv, self._taps)
        count = len(flat.lengths) + sum(flat.lengths)
        if decodes:
            tap = taps[:count] if taps is not None else None
            self._verify(handle, decodes, flat, draft, decode_rows, start, hidden[:count], tap, max_kv_tokens)
        if prefills:
            self._prefill(
                handle,
                prefills,
                rows[len(decodes) :],
                hidden[count:],
                taps[count:] if taps is not None else None,
                max_kv_tokens,
            )

    def _plain(self, handle: StepHandle, plan: StepPlan, heads: Heads) -> None:
        """One token for every row, nothing drafted: the same as `_forward`, with as few operations as it takes."""
        host_rows, batch, start = heads.host_rows, heads.batch, heads.start
        meta = batch.meta(heads.last, start, start, plan.max_kv_tokens)
        hidden, taps = self.network.forward(meta, self.kv, self._taps)
        none = (0,) * len(host_rows)
        masks = to_device(draft_masks(plan.decodes, none, None, self.network.config.vocab_size), self.device)
        at = start + 1
        sampled, logprobs = self.sampler.sample(
            hidden, batch.rows, at, host_rows, max_tokens=plan.max_kv_tokens + 1, bitmask=masks
        )
        self.relay.store(batch.rows, at.clamp(max=self.context_tokens), sampled)
        if self.sampler.remembers:
            self.sampler.remember(batch.rows, at, sampled[:, None])
        handle.keep_plain(sampled, logprobs)
        if self.drafter is not None:
            self._observe_plain(self._observation(host_rows, batch, start, batch.ones, taps, sampled))

    def _observation(
        self,
        host_rows: tuple[int, ...],
        batch: Batch,
        start: torch.Tensor,
        counts: torch.Tensor,
        features: torch.Tensor | None,
        next_tokens: torch.Tensor,
    ) -> Observation:
        return Observation(
            rows=batch.rows,
            host_rows=host_rows,
            indptr=batch.q_indptr,
            start=start,
            counts=counts,
            features=features,
            next_tokens=next_tokens,
            is_last=(True,) * len(host_rows),
            kv=self.kv,
            max_kv_tokens=self._ledger.width_pages * self.kv.page_size,
        )

    def _chain(self, handle: StepHandle, plan: StepPlan, heads: Heads, draft: Draft) -> None:
        """Chains or blocks and nothing beside them: the same as `_forward`, with as few operations as it takes."""
        host_rows, start = heads.host_rows, heads.start
        batch = self._batch_of(host_rows, draft.lengths)
        columns = draft.tokens[:, : batch.width - 1]
        tokens, slots = self._chains.lay(batch, start, heads.last, columns)
        meta = batch.meta(tokens, slots, start, plan.max_kv_tokens)
        hidden, taps = self.network.forward(meta, self.kv, self._taps)
        path = None
        if self.sampler.needs_path(host_rows):
            path = batch.cut(path_tokens(columns, None, None, batch.width - 1))
        masks = to_device(draft_masks(plan.decodes, draft.lengths, draft, self.network.config.vocab_size), self.device)
        sampled, logprobs = self.sampler.sample(
            hidden, batch.node_rows, slots + 1, host_rows, max_tokens=plan.max_kv_tokens + 1, path=path, bitmask=masks
        )
        kept = self._chains.keep(batch, start, columns, sampled)
        self._keep(handle, batch.rows, start, kept, draft.lengths, logprobs, None)
        # an accepted path lies in order, and what is behind it is not looked at: nothing needs to be gathered
        self._observe(self._observation(host_rows, batch, start, kept[:, 0] + 1, taps, sampled))

    def _batch_of(self, host_rows: tuple[int, ...], drafted: tuple[int, ...]) -> Batch:
        """What describes a step of so many drafted tokens for each of these rows; the same rows mostly come again."""
        if self._batches_of != host_rows:
            self._batches_of, self._batches = host_rows, {}
        batch = self._batches.get(drafted)
        if batch is None:
            if len(self._batches) >= _BATCHES_KEPT:
                self._batches = {}
            batch = self._batches[drafted] = Batch.of(host_rows, drafted, self.device)
        return batch

    def _flat(self, decode_rows: int, draft: Draft | None) -> Flat:
        if draft is None:
            return Flat(1, (0,) * decode_rows, None)
        width = 1 + max(draft.lengths)
        if min(draft.lengths) == width - 1:
            return Flat(width, draft.lengths, None)
        real = np.concatenate([np.arange(i * width, i * width + 1 + n) for i, n in enumerate(draft.lengths)])
        return Flat(width, draft.lengths, upload(real, self.device))

    def _meta(
        self,
        flat: Flat,
        rows: torch.Tensor,
        start: torch.Tensor,
        last: torch.Tensor,
        draft: Draft | None,
        decodes: tuple[DecodeRow, ...],
        prefills: tuple[PrefillChunk, ...],
        max_kv_tokens: int,
    ) -> StepMeta:
        """Positions of decode rows come from the relay, those of prompt chunks from the plan."""
        columns = torch.arange(flat.width, device=self.device)
        slots = start[:, None] + columns
        positions, tokens, mask = slots, last[:, None], None
        if draft is not None:
            drafted = flat.width - 1
            tokens = torch.cat([tokens, draft.tokens[:, :drafted]], dim=1)
            if draft.parents is not None and draft.depths is not None:
                depths = torch.nn.functional.pad(draft.depths[:, :drafted], (1, 0))
                positions = start[:, None] + depths
                mask = flat.cut(ancestor_mask(draft.parents[:, :drafted]))
        sizes = [1 + n for n in flat.lengths] + [c.num_tokens for c in prefills]
        indptr = np.concatenate([[0], np.cumsum(sizes)])
        seq = np.repeat(np.arange(len(sizes)), sizes)
        ids = flat.cut(tokens), flat.cut(positions), flat.cut(slots)
        if prefills:
            known = np.concatenate([np.asarray(c.request.tokens[c.start : c.end], dtype=np.int64) for c in prefills])
            at = upload(np.concatenate([np.arange(c.start, c.end) for c in prefills]), self.device)
            chunk_ids = upload(known, self.device)
            ids = (torch.cat([ids[0], chunk_ids]), torch.cat([ids[1], at]), torch.cat([ids[2], at]))
            start = torch.cat([start, upload([c.start for c in prefills], self.device)])
        return StepMeta(
            token_ids=ids[0].contiguous(),
            positions=ids[1].contiguous(),
            write_slots=ids[2].contiguous(),
            q_seq=upload(seq, self.device),
            rows=rows,
            kv_start=start,
            mask=mask,
            q_indptr=tuple(indptr.tolist()),
            max_kv_tokens=max_kv_tokens,
            num_decodes=len(decodes),
        )

    # -- decode rows ---------------------------------------------------------------------------------------------

    def _verify(
        self,
        handle: StepHandle,
        decodes: tuple[DecodeRow, ...],
        flat: Flat,
        draft: Draft | None,
        rows: torch.Tensor,
        start: torch.Tensor,
        hidden: torch.Tensor,
        taps: torch.Tensor | None,
        max_kv_tokens: int,
    ) -> None:
        """Sample at every node, keep the accepted run, bring relay, history and drafter up to date."""
        host_rows = tuple(d.row for d in decodes)
        node_rows = flat.cut(rows[:, None].expand(-1, flat.width))
        if draft is None:
            at, path = start + 1, None
        else:
            drafted = flat.width - 1
            depths = torch.arange(flat.width, device=self.device).expand(len(decodes), -1)
            tree = draft.parents is not None and draft.depths is not None
            if draft.parents is not None and draft.depths is not None:
                depths = torch.nn.functional.pad(draft.depths[:, :drafted], (1, 0))
            at = flat.cut(start[:, None] + 1 + depths)
            path = None
            if self.sampler.needs_path(host_rows):
                depth = self.drafter.max_depth if tree and self.drafter is not None else drafted
                path = flat.cut(
                    path_tokens(
                        draft.tokens[:, :drafted],
                        draft.parents[:, :drafted] if draft.parents is not None else None,
                        draft.depths[:, :drafted] if draft.depths is not None else None,
                        depth,
                    )
                )
        masks = to_device(draft_masks(decodes, flat.lengths, draft, self.network.config.vocab_size), self.device)
        sampled, logprobs = self.sampler.sample(
            hidden, node_rows, at, host_rows, max_tokens=max_kv_tokens + 1, path=path, bitmask=masks
        )
        nodes, counts, tokens = self._accept(flat, draft, sampled)
        if draft is not None and draft.parents is not None:
            compact_kv(self.kv, rows, start, nodes, self._pools)
        kept = self.relay.keep(rows, start, counts, tokens, self.context_tokens)
        self._keep(handle, rows, start, kept, flat.lengths, logprobs, nodes)
        if self.drafter is not None:
            self._observe_run(host_rows, rows, start, flat, nodes, kept[:, 0], tokens, taps)

    def _keep(
        self, handle: StepHandle, rows: torch.Tensor, start: torch.Tensor, kept: torch.Tensor,
        lengths: tuple[int, ...], logprobs: Any, nodes: torch.Tensor | None,
    ) -> None:
        """Runs that the relay knows already (`Relay.keep`) into history and results. `nodes`: of trees."""
        if self.sampler.remembers:
            self.sampler.remember(rows, start + 1, kept[:, 1:])
        handle.keep_decodes(kept, nodes, lengths, logprobs)

    def _accept(
        self, flat: Flat, draft: Draft | None, sampled: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if draft is None:
            zeros = torch.zeros_like(sampled)
            return zeros[:, None], zeros, sampled[:, None]
        drafted = flat.width - 1
        parents = draft.parents[:, :drafted] if draft.parents is not None else None
        depth = self.drafter.max_depth if parents is not None and self.drafter is not None else None
        lengths = upload(list(draft.lengths), self.device)
        return accept(draft.tokens[:, :drafted], parents, lengths, flat.pad(sampled), depth)

    def _observe_run(
        self,
        host_rows: tuple[int, ...],
        rows: torch.Tensor,
        start: torch.Tensor,
        flat: Flat,
        nodes: torch.Tensor,
        counts: torch.Tensor,
        tokens: torch.Tensor,
        taps: torch.Tensor | None,
    ) -> None:
        width = nodes.shape[1]
        features = None
        if taps is not None:
            by_node = flat.pad(taps)
            index = nodes[:, :, None].expand(-1, -1, by_node.shape[2])
            features = by_node.gather(1, index).reshape(len(host_rows) * width, -1)
        observe = self._observe_plain if width == 1 else self._observe
        observe(
            Observation(
                rows=rows,
                host_rows=host_rows,
                indptr=tuple(range(0, len(host_rows) * width + 1, width)),
                start=start,
                counts=counts + 1,
                features=features,
                next_tokens=tokens.reshape(-1),
                is_last=(True,) * len(host_rows),
                kv=self.kv,
                max_kv_tokens=self._ledger.width_pages * self.kv.page_size,
            )
        )

    def _observe(self, observation: Observation) -> None:
        self.write_pending(observation.host_rows)  # earlier steps first: the newest one leaves the seed
        if self.drafter is not None:
            self.drafter.observe(observation)

    def _observe_plain(self, step: Observation) -> None:
        """Nothing was drafted, one token a row: a drafter with draft KV need not see it yet (spec/pending.py)."""
        if not self._may_wait:
            self._observe(step)
            return
        self.pending.add(step)
        if self.pending.full:
            self._show_pending()

    def _show_pending(self) -> None:
        """Show the drafter what waits: draft KV is whole then."""
        step = self.pending.take()
        if step is not None:
            self._shown_tokens += step.indptr[-1]
            self._observe(step)

    def write_pending(self, rows: Iterable[int]) -> None:
        """Before anybody else is given pages of these rows: their draft KV is written."""
        if self.pending.holds(rows):
            self._show_pending()

    # -- prompt chunks -------------------------------------------------------------------------------------------

    def _prefill(
        self,
        handle: StepHandle,
        chunks: tuple[PrefillChunk, ...],
        rows: torch.Tensor,
        hidden: torch.Tensor,
        taps: torch.Tensor | None,
        max_kv_tokens: int,
    ) -> None:
        """The final chunk of a prompt samples its first token; every chunk moves the relay and the drafter."""
        ends = np.cumsum([c.num_tokens for c in chunks])
        final = [i for i, c in enumerate(chunks) if c.final]
        sampled: torch.Tensor | None = None
        stop = upload([c.end for c in chunks], self.device)
        self.relay.store(rows, stop, None)
        if final:
            final_index = upload(final, self.device)
            final_rows = rows.index_select(0, final_index)
            at = stop.index_select(0, final_index)
            last = hidden.index_select(0, upload(ends[final] - 1, self.device))
            host_rows = tuple(chunks[i].row for i in final)
            masks = to_device(first_masks([chunks[i] for i in final], self.network.config.vocab_size), self.device)
            sampled, logprobs = self.sampler.sample(
                last, final_rows, at, host_rows, max_tokens=max_kv_tokens + 1, bitmask=masks
            )
            self.relay.store(final_rows, at, sampled)
            if self.sampler.remembers:
                self.sampler.remember(final_rows, at, sampled[:, None])
            handle.keep_prefills(final, sampled, logprobs)
        handle.keep_prompts(prompt_logprobs(self.network, chunks, hidden))
        if self.drafter is not None:
            known = [
                c.request.tokens[c.start + 1 : c.end] + ([0] if c.final else [c.request.tokens[c.end]]) for c in chunks
            ]
            following = upload(np.concatenate([np.asarray(k, dtype=np.int64) for k in known]), self.device)
            if sampled is not None:
                following.index_copy_(0, upload(ends[final] - 1, self.device), sampled)
            self._observe(
                Observation(
                    rows=rows,
                    host_rows=tuple(c.row for c in chunks),
                    indptr=(0, *(int(e) for e in ends)),
                    start=upload([c.start for c in chunks], self.device),
                    counts=upload([c.num_tokens for c in chunks], self.device),
                    features=taps,
                    next_tokens=following,
                    is_last=tuple(c.final for c in chunks),
                    kv=self.kv,
                    max_kv_tokens=max_kv_tokens,
                )
            )
