"""Around the forward of a step that verifies chains: the tokens that go in, the accepted runs that come out.

On a CPU with the compiled module each is one call; elsewhere torch operations, with the same results.
"""

from __future__ import annotations

import torch

from octavo.backend.batches import Batch
from octavo.backend.relay import Relay
from octavo.ops import native_lib
from octavo.spec.verify import accept


class Chains:
    """Bound to the relay of one runner. Nothing goes past `context_tokens` KV slots of a row."""

    def __init__(self, relay: Relay, context_tokens: int) -> None:
        self._relay, self._context_tokens = relay, context_tokens
        self._lib = native_lib.library() if relay.seq_lens.device.type == "cpu" else None

    def lay(
        self, batch: Batch, start: torch.Tensor, last: torch.Tensor, drafted: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and KV slots of the forward, [n] each: the newest tokens `last` [b] at slots `start` [b], behind each
        its columns of `drafted` [b, width - 1]."""
        if self._lib is None:
            return batch.cut(torch.cat([last[:, None], drafted], dim=1)), batch.slots(start)
        drafted = _in_lines(drafted)
        tokens, slots = torch.empty_like(batch.columns), torch.empty_like(batch.columns)
        self._lib.octavo_lay_chains(
            len(start), batch.indptr.data_ptr(), start.data_ptr(), last.data_ptr(), drafted.data_ptr(),
            drafted.stride(0), tokens.data_ptr(), slots.data_ptr(),
        )  # fmt: skip
        return tokens, slots

    def keep(
        self, batch: Batch, start: torch.Tensor, drafted: torch.Tensor, sampled: torch.Tensor
    ) -> torch.Tensor:
        """[b, 1 + width]: how many drafted tokens of each row are kept, then its run (spec/verify.py), given the
        target's tokens `sampled` [n]. The relay knows lengths and newest tokens then."""
        relay, context = self._relay, self._context_tokens
        if self._lib is None:
            _, counts, run = accept(drafted, None, batch.real, batch.pad(sampled))
            return relay.keep(batch.rows, start, counts, run, context)
        drafted = _in_lines(drafted)
        kept = start.new_empty(len(start), 1 + batch.width)
        self._lib.octavo_keep_chains(
            len(start), batch.indptr.data_ptr(), batch.rows.data_ptr(), start.data_ptr(), drafted.data_ptr(),
            drafted.stride(0), sampled.data_ptr(), batch.width, context, relay.seq_lens.data_ptr(),
            relay.last_tokens.data_ptr(), kept.data_ptr(),
        )  # fmt: skip
        return kept


def _in_lines(drafted: torch.Tensor) -> torch.Tensor:
    return drafted if drafted.stride(1) == 1 and drafted.dtype == torch.int64 else drafted.to(torch.int64).contiguous()
