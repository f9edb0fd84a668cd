"""Prefill and decode through a `Network` with page tables nobody manages: pages are handed out in a shuffled order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from octavo.model.registry import Network, make_kv
from octavo.ops.meta import KVView, StepMeta


@dataclass(frozen=True)
class Pages:
    full_pages: int
    swa_pages: int


class Driver:
    """`rows` sequences of at most `max_tokens` tokens; `extent` counts tokens whose KV is in the pages."""

    def __init__(self, network: Network, rows: int = 1, max_tokens: int = 256) -> None:
        self.network = network
        width = -(-max_tokens // network.page_size)
        count = rows * width
        self.kv: KVView = make_kv(network, Pages(count, count), max_rows=rows, width_pages=width, device=network.device)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(7)).to(torch.int32).view(rows, width)
        for table in (self.kv.full_table, self.kv.swa_table):
            if table is not None:
                table.copy_(order)
        self.extent = [0] * rows

    def meta(self, batch: Sequence[tuple[int, Sequence[int]]]) -> StepMeta:
        """Causal step: (row, new token ids) for each sequence."""
        ids, positions, seqs, indptr = [], [], [], [0]
        for s, (row, tokens) in enumerate(batch):
            start = self.extent[row]
            ids += list(tokens)
            positions += range(start, start + len(tokens))
            seqs += [s] * len(tokens)
            indptr.append(indptr[-1] + len(tokens))
        at = torch.tensor(positions)
        return StepMeta(
            token_ids=torch.tensor(ids),
            positions=at,
            write_slots=at.clone(),
            q_seq=torch.tensor(seqs),
            rows=torch.tensor([row for row, _ in batch]),
            kv_start=torch.tensor([self.extent[row] for row, _ in batch]),
            mask=None,
            q_indptr=tuple(indptr),
            max_kv_tokens=max(self.extent[row] + len(tokens) for row, tokens in batch),
        )

    def run(self, batch: Sequence[tuple[int, Sequence[int]]], taps: tuple[int, ...] = ()) -> list[torch.Tensor]:
        """Hidden states [tokens, H] of each sequence; the rows grow."""
        meta = self.meta(batch)
        hidden, self.features = self.network.forward(meta, self.kv, taps)
        for row, tokens in batch:
            self.extent[row] += len(tokens)
        return list(hidden.split([len(tokens) for _, tokens in batch]))

    def prefill(self, row: int, tokens: Sequence[int], chunk: int | None = None) -> torch.Tensor:
        """Hidden states of all prompt tokens, fed in chunks."""
        size = chunk or len(tokens)
        return torch.cat([self.run([(row, tokens[i : i + size])])[0] for i in range(0, len(tokens), size)])

    def greedy(self, prompts: Sequence[Sequence[int]], count: int, chunk: int | None = None) -> list[list[int]]:
        """`count` greedy tokens for every prompt, prompts prefilled one by one, decoded together."""
        last = torch.cat([self.prefill(row, prompt, chunk)[-1:] for row, prompt in enumerate(prompts)])
        return self.decode(last, count)

    def decode(self, last: torch.Tensor, count: int) -> list[list[int]]:
        """`count` greedy tokens for every row, from the hidden states [rows, H] of their newest tokens."""
        out: list[list[int]] = [[] for _ in last]
        for step in range(count):
            tokens = self.network.argmax(last).tolist()
            for mine, token in zip(out, tokens, strict=True):
                mine.append(token)
            if step + 1 < count:
                last = torch.cat(self.run([(row, [token]) for row, token in enumerate(tokens)]))
        return out
