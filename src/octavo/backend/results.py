"""Results of a launched step on their way to the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from octavo.backend.prompt_logprobs import by_chunk
from octavo.engine.output import TokenLogprob
from octavo.sched.batch import StepPlan


@dataclass(frozen=True)
class HostLogprobs:
    """Log-probabilities (nats) of m sampled nodes: chosen [m], the likeliest `top` ids and values [m, k]."""

    chosen: np.ndarray
    top_ids: np.ndarray
    top_values: np.ndarray

    def entries(self, tokens: Sequence[int], wanted: int, nodes: Sequence[int] | None = None) -> list[TokenLogprob]:
        """For `tokens`, chosen at `nodes` (None: the first of all, in order), with the `wanted` likeliest beside it."""
        at = slice(None) if nodes is None else nodes
        chosen, ids, values = (part[at].tolist() for part in (self.chosen, self.top_ids, self.top_values))
        return [
            TokenLogprob(token, logprob, tuple(zip(i[:wanted], v[:wanted], strict=True)))
            for token, logprob, i, v in zip(tokens, chosen, ids, values, strict=False)
        ]


@dataclass(frozen=True)
class StepResult:
    """One settled step, on the host.

    tokens    per decode row: accepted drafted tokens and the bonus token
    accepted  per decode row: how many of them were drafted
    nodes     per decode row: flat node index of each token (into `logprobs`), None without logprobs
    first     chunk index -> first sampled token of a finished prompt
    prompts   chunk index -> log-probabilities of the prompt tokens that the chunk predicts, where they are wanted
    """

    tokens: list[list[int]]
    accepted: list[int]
    drafted: tuple[int, ...]
    nodes: list[list[int]] | None
    logprobs: HostLogprobs | None
    first: dict[int, int]
    first_logprobs: HostLogprobs | None
    prompts: dict[int, HostLogprobs] = field(default_factory=dict)


@dataclass
class StepHandle:
    """A launched step. `op` is the ledger's number for it (law 14); the draft KV of `caught_up_tokens` tokens of
    earlier steps was written with it; `sources` are the draft's (spec/drafter.py)."""

    plan: StepPlan
    op: int = -1
    started_s: float = 0.0
    caught_up_tokens: int = 0
    sources: tuple[int, ...] = ()
    _decodes: tuple[Any, ...] | None = None
    _prefills: tuple[Any, ...] | None = None
    _copies: dict[str, torch.Tensor] = field(default_factory=dict)
    _event: Any = None
    _lengths: tuple[int, ...] = ()
    _final: list[int] = field(default_factory=list)
    _prompts: dict[int, int] = field(default_factory=dict)

    def keep_decodes(
        self, kept: torch.Tensor, nodes: torch.Tensor | None, lengths: tuple[int, ...], logprobs: Any
    ) -> None:
        """As `Relay.keep` gives them: counts [b], then runs [b, w]. `nodes` [b, w] of each, None: in order."""
        self._copies["run"] = kept
        self._lengths = lengths
        if logprobs is not None:
            if nodes is None:
                nodes = torch.minimum(torch.arange(kept.shape[1] - 1, device=kept.device), kept[:, :1])
            self._copies["nodes"] = nodes
            self._keep_logprobs("decode", logprobs)

    def keep_plain(self, tokens: torch.Tensor, logprobs: Any) -> None:
        """One token a row, nothing drafted."""
        self._copies["plain"] = tokens
        self._lengths = (0,) * len(self.plan.decodes)
        if logprobs is not None:
            self._keep_logprobs("decode", logprobs)

    def keep_prefills(self, final: list[int], sampled: torch.Tensor, logprobs: Any) -> None:
        self._final = final
        self._copies["first"] = sampled
        if logprobs is not None:
            self._keep_logprobs("prefill", logprobs)

    def keep_prompts(self, found: tuple[dict[int, int], Any] | None) -> None:
        """Log-probabilities of prompt tokens, as `backend.prompt_logprobs` gives them."""
        if found is not None:
            self._prompts = found[0]
            self._keep_logprobs("prompt", found[1])

    def _keep_logprobs(self, name: str, logprobs: Any) -> None:
        chosen, ids, values = logprobs
        self._copies[name + ".chosen"], self._copies[name + ".ids"] = chosen, ids
        self._copies[name + ".values"] = values

    def send(self, device: torch.device) -> None:
        """Start the copies to the host; nothing waits here."""
        if device.type == "cuda" and torch.cuda.is_available():
            self._copies = {k: v.to("cpu", non_blocking=True) for k, v in self._copies.items()}
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> StepResult:
        """Block until the step is done and read it."""
        if self._event is not None:
            self._event.synchronize()
        host = {k: v.numpy() for k, v in self._copies.items()}
        tokens: list[list[int]] = []
        accepted: list[int] = []
        if "run" in host:
            for line in host["run"].tolist():
                accepted.append(line[0])
                tokens.append(line[1 : 2 + line[0]])
        nodes = self._flat_nodes(host["nodes"], accepted) if "nodes" in host else None
        if "plain" in host:
            tokens = [[token] for token in host["plain"].tolist()]
            accepted = [0] * len(tokens)
            nodes = [[i] for i in range(len(tokens))] if "decode.chosen" in host else None
        first = dict(zip(self._final, host["first"].tolist(), strict=True)) if "first" in host else {}
        return StepResult(
            tokens, accepted, self._lengths, nodes, _logprobs(host, "decode"), first, _logprobs(host, "prefill"),
            self._prompt_logprobs(host),
        )  # fmt: skip

    def _prompt_logprobs(self, host: dict[str, np.ndarray]) -> dict[int, HostLogprobs]:
        every = _logprobs(host, "prompt")
        if every is None:
            return {}
        return {
            chunk: HostLogprobs(every.chosen[at], every.top_ids[at], every.top_values[at])
            for chunk, at in by_chunk(self._prompts).items()
        }

    def _flat_nodes(self, nodes: np.ndarray, accepted: list[int]) -> list[list[int]]:
        starts = np.concatenate([[0], np.cumsum([1 + n for n in self._lengths])])[:-1]
        return [(starts[i] + nodes[i, : n + 1]).tolist() for i, n in enumerate(accepted)]


def _logprobs(host: dict[str, np.ndarray], name: str) -> HostLogprobs | None:
    if name + ".chosen" not in host:
        return None
    return HostLogprobs(host[name + ".chosen"], host[name + ".ids"], host[name + ".values"])
