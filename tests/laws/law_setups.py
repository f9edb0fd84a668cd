"""Sizes and options of the simulated engines: small pools, short contexts, every page size."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.kv.ledger import LedgerConfig
from octavo.kv.sizing import DecodeReserve, min_swa_pages


@dataclass(frozen=True)
class Setup:
    page_size: int
    window_tokens: int  # 0: no sliding layers
    overlap: bool
    pair_keys: bool = False
    spare_full_pages: int = 12
    spare_swa_pages: int = 3
    max_rows: int = 5
    prefix_cache: bool = True
    seed: int = 0

    @property
    def unit(self) -> int:
        return max(self.page_size, 4)

    @property
    def context_tokens(self) -> int:
        return 7 * self.unit + 3

    @property
    def chunk_tokens(self) -> int:
        return 2 * self.unit + 1

    def reserves(self) -> list[DecodeReserve]:
        o = self.overlap
        return [
            DecodeReserve.plain(overlap=o),
            DecodeReserve.eagle(steps=3, topk=1, draft_tokens=4, overlap=o),
            DecodeReserve.eagle(steps=3, topk=2, draft_tokens=8, overlap=o),
            DecodeReserve.dflash(block_size=6, overlap=o),
            DecodeReserve.ngram(max_draft=4, overlap=o),
        ]

    def most_accepted(self, reserve: DecodeReserve) -> int:
        """What one step may commit: the lag it would have under overlap."""
        accepted = {1: 1, 4: 4, 8: 4, 6: 6, 5: 5}
        return accepted[reserve.footprint]

    def config(self) -> LedgerConfig:
        # Algorithms may follow one another, so the largest lag may meet the largest footprint.
        largest = max(r.footprint for r in self.reserves()) + max(r.commit_lag for r in self.reserves())
        swa = 0
        if self.window_tokens:
            least = min_swa_pages(self.window_tokens, largest, self.chunk_tokens, self.page_size, overlap=self.overlap)
            swa = least + self.spare_swa_pages
        width = -(-(self.context_tokens + largest) // self.page_size)
        return LedgerConfig(
            page_size=self.page_size,
            full_pages=width + self.spare_full_pages * self.unit // self.page_size,
            swa_pages=swa,
            window_tokens=self.window_tokens,
            max_rows=self.max_rows,
            context_tokens=self.context_tokens,
            largest_reserve_tokens=largest,
            key_mode="pair" if self.pair_keys else "token",
            prefix_cache=self.prefix_cache,
            chunk_tokens=self.chunk_tokens,
            overlap=self.overlap,
        )


def covering_setups(seed: int = 0) -> list[Setup]:
    """Every page size with and without overlap, sliding windows shorter and longer than a page, both key modes."""
    setups = []
    for p in (1, 16, 64, 256):
        windows = [0, {1: 5, 16: 40, 64: 50, 256: 200}[p], {1: 9, 16: 16, 64: 130, 256: 300}[p]]
        for i, window in enumerate(windows):
            for overlap in (False, True):
                pair = (i + overlap) % 2 == 1
                spare = 2 if i == 1 else 12
                setups.append(Setup(p, window, overlap, pair, spare_full_pages=spare, seed=seed + len(setups)))
    return setups
