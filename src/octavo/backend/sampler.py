"""From hidden states to tokens: picks the head's cheapest form that the batch allows, on the launch path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from octavo.engine.request import Request
from octavo.ops.sampling import SamplingState, logprobs

Logprobs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Sampler:
    """Sampling settings and token history of every ledger row, bound to one network."""

    def __init__(self, network: Any, max_rows: int, context_tokens: int, vocab_size: int, device: torch.device) -> None:
        self._network = network
        self.state = SamplingState(max_rows, context_tokens, vocab_size, device)
        self._device = device
        self._context_tokens = context_tokens

    def begin(self, request: Request, ban_ids: Sequence[int]) -> None:
        """Give `request.row` to its request. `ban_ids`: end and stop ids forbidden until min_tokens is reached."""
        self.state.set_row(
            request.row,
            request.params,
            seed=request.seed,
            choice=request.choice,
            prompt_tokens=request.prompt_tokens,
            tokens=request.tokens,
            ban_ids=ban_ids,
        )

    def end(self, row: int) -> None:
        self.state.clear_row(row)

    @property
    def remembers(self) -> bool:
        """Whether any request so far needed its token history."""
        return self.state.has_history

    def needs_path(self, host_rows: Sequence[int]) -> bool:
        """Whether a verify of these rows must know the drafted tokens on the way to each node."""
        flags = self.state.flags(host_rows)
        return flags.repetition or flags.output_penalties

    def sample(
        self,
        hidden: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        host_rows: Sequence[int],
        *,
        max_tokens: int,
        path: torch.Tensor | None = None,
        bitmask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Logprobs | None]:
        """Tokens [m] for hidden states [m, H], and log-probabilities if any row wants them.

        rows, positions [m]: ledger row of each hidden state and sequence index of the token to be sampled;
        max_tokens bounds the positions on the host;
        path [m, d] drafted ancestors (padded with -1); bitmask int32 [m, words] of the grammar.
        """
        flags = self.state.flags(host_rows)
        if flags.plain_greedy and bitmask is None:
            return self._network.argmax(hidden), None
        logits = self._network.logits(hidden)
        processed = self.state.process(
            logits, rows, positions, flags, max_tokens=max_tokens, ancestors=path, bitmask=bitmask
        )
        tokens = self.state.sample(processed, rows, positions, flags)
        wanted = logprobs(logits, tokens, flags.logprobs) if flags.logprobs is not None else None
        return tokens, wanted

    def remember(self, rows: torch.Tensor, first: torch.Tensor, tokens: torch.Tensor) -> None:
        """Write committed tokens [b, w] to the history, the first at sequence index `first` [b].

        Columns beyond an accepted run repeat its last token at indices the next step writes again.
        """
        columns = first[:, None] + torch.arange(tokens.shape[1], device=self._device)
        within = torch.where(columns < self._context_tokens, tokens, torch.full_like(tokens, -1))
        self.state.write_history(rows[:, None].expand_as(tokens), columns, within)
