"""Per-row sampling settings on the device, and the step from logits to tokens.

    process(logits)  repetition → presence/frequency → bias → grammar → min_tokens ban → temperature
                     → top-k → top-p → min-p           the distribution p of the acceptance rules
    sample(p)        greedy rows: arg-max, ties to the lowest id; others: inverse CDF at
                     uniform(seed, choice, position)

A *logits row* is one of the m positions being sampled: one per request in plain decode, one per drafted node in
a verify. `positions[i]` is the sequence index of the token to be sampled (prompt token 0 has index 0). History
holds the request's committed tokens; drafted ancestors of a verify row come as `ancestors`.

Which processors a batch needs is known on the host (`SamplingFlags`); nothing here waits for the device.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from octavo.ops import processors
from octavo.ops.random_bits import signed64, uniform53
from octavo.params import SamplingParams

# columns of the packed per-row settings
_TEMPERATURE, _TOP_P, _MIN_P, _REPETITION, _PRESENCE, _FREQUENCY, _FLOATS = range(7)
_TOP_K, _SEED, _CHOICE, _PROMPT_LEN, _MIN_TOKENS, _GREEDY, _INTS = range(7)


@dataclass(frozen=True)
class SamplingFlags:
    """Host-side summary of the rows of one step: which processors run, and the statistics of their top-k."""

    sampled: bool = False  # some row draws a random token
    greedy: bool = True  # some row takes the arg-max
    repetition: bool = False
    output_penalties: bool = False
    bias: bool = False
    ban: bool = False
    temperature: bool = False
    top_k: bool = False
    top_p: bool = False
    min_p: bool = False
    grammar: bool = False
    logprobs: int | None = None  # most alternatives any row wants, None: no row wants log-probabilities
    max_top_k: int = 0  # over rows that have a limit
    every_top_k: bool = True  # every row that draws has a limit
    uniform_top_k: int | None = None  # the one value all rows share ("no limit" is the vocabulary size)

    @property
    def plain_greedy(self) -> bool:
        """Tokens are the arg-max of the raw logits: `Network.argmax` may be used instead of logits."""
        return not (
            self.sampled or self.repetition or self.output_penalties or self.bias or self.ban or self.grammar
        ) and (self.logprobs is None)

    def __or__(self, other: SamplingFlags) -> SamplingFlags:
        wanted = [x for x in (self.logprobs, other.logprobs) if x is not None]
        return SamplingFlags(
            sampled=self.sampled or other.sampled,
            greedy=self.greedy or other.greedy,
            repetition=self.repetition or other.repetition,
            output_penalties=self.output_penalties or other.output_penalties,
            bias=self.bias or other.bias,
            ban=self.ban or other.ban,
            temperature=self.temperature or other.temperature,
            top_k=self.top_k or other.top_k,
            top_p=self.top_p or other.top_p,
            min_p=self.min_p or other.min_p,
            grammar=self.grammar or other.grammar,
            logprobs=max(wanted) if wanted else None,
            every_top_k=self.every_top_k and other.every_top_k,
            max_top_k=max(self.max_top_k, other.max_top_k),
            uniform_top_k=self.uniform_top_k if self.uniform_top_k == other.uniform_top_k else None,
        )


def flags_of(params: SamplingParams, vocab_size: int) -> SamplingFlags:
    """The flags of one request alone. Greedy requests skip what cannot change an arg-max."""
    k = params.top_k_of(vocab_size)
    sampled = not params.greedy
    limited = sampled and k < vocab_size
    return SamplingFlags(
        sampled=sampled,
        greedy=not sampled,
        repetition=params.repetition_penalty != 1.0,
        output_penalties=params.presence_penalty != 0.0 or params.frequency_penalty != 0.0,
        bias=bool(params.logit_bias),
        ban=params.min_tokens > 0,
        temperature=sampled and params.temperature != 1.0,
        top_k=limited,
        top_p=sampled and params.top_p < 1.0,
        min_p=sampled and params.min_p > 0.0,
        grammar=params.structured is not None,
        logprobs=params.logprobs,
        max_top_k=k if limited else 0,
        every_top_k=limited or not sampled,
        uniform_top_k=k,
    )


_NEUTRAL = SamplingFlags()


class SamplingState:
    """Settings and token history of every ledger row.

    Memory: 100 bytes a row, plus history (max_rows × context × 4 bytes) and bias and ban tables, each made
    when the first request needs it.
    """

    def __init__(self, max_rows: int, context_tokens: int, vocab_size: int, device: torch.device | str) -> None:
        self.max_rows, self.context_tokens, self.vocab_size = max_rows, context_tokens, vocab_size
        self.device = torch.device(device)
        self._floats = torch.zeros((max_rows, _FLOATS), dtype=torch.float32, device=self.device)
        self._ints = torch.zeros((max_rows, _INTS), dtype=torch.int64, device=self.device)
        self._history: torch.Tensor | None = None  # int32 [max_rows, context + 1]; the last column is a sink
        self._bias_ids = self._empty_ids(0, 0)
        self._bias_values = torch.zeros((max_rows, 0), dtype=torch.float32, device=self.device)
        self._ban_ids = self._empty_ids(0, -1)
        self._host_flags = [_NEUTRAL] * max_rows
        self._interned: dict[SamplingFlags, SamplingFlags] = {}  # equal flags are one object: unions are cheap

    def _empty_ids(self, width: int, fill: int) -> torch.Tensor:
        return torch.full((self.max_rows, width), fill, dtype=torch.int64, device=self.device)

    # ---- a request gets or leaves its row (host → device writes; not on the launch path) ----

    def set_row(
        self,
        row: int,
        params: SamplingParams,
        *,
        seed: int,
        choice: int = 0,
        prompt_tokens: int,
        tokens: Sequence[int] = (),
        ban_ids: Iterable[int] = (),
    ) -> SamplingFlags:
        """Give `row` to a request; nothing of its former owner stays.

        seed           the request's, or the one the engine drew (`random_bits.request_seed`)
        prompt_tokens  length of the prompt; what follows counts as output
        tokens         prompt, plus earlier output when a retracted request resumes
        ban_ids        end and stop ids forbidden until min_tokens is reached
        """
        flags = flags_of(params, self.vocab_size)
        flags = self._interned.setdefault(flags, flags)
        greedy = params.greedy
        floats = [1.0 if greedy else params.temperature, params.top_p, params.min_p]
        floats += [params.repetition_penalty, params.presence_penalty, params.frequency_penalty]
        top_k = self.vocab_size if greedy else params.top_k_of(self.vocab_size)
        ints = [top_k, signed64(seed), choice, prompt_tokens, params.min_tokens, int(greedy)]
        self._floats[row] = torch.tensor(floats, dtype=torch.float32).to(self.device)
        self._ints[row] = torch.tensor(ints, dtype=torch.int64).to(self.device)
        self._host_flags[row] = flags
        self._set_bias(row, params.logit_bias or {})
        self._set_ban(row, list(ban_ids) if flags.ban else [])
        if flags.repetition or flags.output_penalties:
            self._set_history(row, tokens)
        return flags

    def clear_row(self, row: int) -> None:
        """The request left: the row is greedy and neutral until its next owner."""
        self._host_flags[row] = _NEUTRAL
        self._set_bias(row, {})

    def _set_bias(self, row: int, bias: dict[int, float]) -> None:
        width = self._bias_ids.shape[1]
        if len(bias) > width:
            grow = len(bias) - width
            self._bias_ids = torch.cat((self._bias_ids, self._empty_ids(grow, 0)), dim=1)
            self._bias_values = torch.nn.functional.pad(self._bias_values, (0, grow))
        if self._bias_ids.shape[1] == 0:
            return
        pad = self._bias_ids.shape[1] - len(bias)
        self._bias_ids[row] = torch.tensor(list(bias) + [0] * pad, dtype=torch.int64).to(self.device)
        values = torch.tensor(list(bias.values()) + [0.0] * pad, dtype=torch.float32)
        self._bias_values[row] = values.to(self.device)

    def _set_ban(self, row: int, ids: list[int]) -> None:
        width = self._ban_ids.shape[1]
        if len(ids) > width:
            self._ban_ids = torch.cat((self._ban_ids, self._empty_ids(len(ids) - width, -1)), dim=1)
        if self._ban_ids.shape[1] == 0:
            return
        pad = self._ban_ids.shape[1] - len(ids)
        self._ban_ids[row] = torch.tensor(ids + [-1] * pad, dtype=torch.int64).to(self.device)

    def _set_history(self, row: int, tokens: Sequence[int]) -> None:
        if self._history is None:
            shape = (self.max_rows, self.context_tokens + 1)
            self._history = torch.zeros(shape, dtype=torch.int32, device=self.device)
        known = torch.tensor(list(tokens[: self.context_tokens]), dtype=torch.int32)
        self._history[row, : known.shape[0]] = known.to(self.device)

    # ---- launch path ----

    def write_history(self, rows: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> None:
        """Record committed tokens: three int64 tensors of one shape. A token below 0 is padding.

        Rows whose request needs no history may be passed too. Shapes are free ([m], [b, run]).
        """
        if self._history is None:
            return
        # a finished request's ignored extra step may lie past the context: into the sink with it
        columns = torch.where(tokens >= 0, positions, self.context_tokens).clamp_max(self.context_tokens)
        self._history.index_put_((rows, columns), tokens.to(torch.int32))

    def flags(self, host_rows: Iterable[int]) -> SamplingFlags:
        """Union of the rows' flags (host arithmetic). No rows: plain greedy."""
        distinct = {id(own): own for own in (self._host_flags[row] for row in host_rows)}
        return functools.reduce(operator.or_, distinct.values()) if distinct else _NEUTRAL

    @property
    def has_history(self) -> bool:
        return self._history is not None

    def row_flags(self, row: int) -> SamplingFlags:
        return self._host_flags[row]

    def process(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        flags: SamplingFlags,
        *,
        max_tokens: int,
        ancestors: torch.Tensor | None = None,
        bitmask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """float32 [m, V]: the logits of p, after every processor the batch needs.

        logits     float32 [m, V], not changed
        rows       int64 [m] ledger rows; positions int64 [m] sequence index of the token to be sampled
        flags      `self.flags(host rows)`
        max_tokens host upper bound of any position (bounds the history that is looked at)
        ancestors  int64 [m, D] drafted tokens between the history and this row's position, padded with −1
        bitmask    int32 [m, ≥ ceil(V/32)] on the device; rows without a grammar hold −1
        """
        floats, ints = self._floats[rows], self._ints[rows]
        if flags.repetition or flags.output_penalties:
            logits = self._penalties(logits, rows, positions, floats, ints, flags, max_tokens, ancestors)
        if flags.bias:
            logits = processors.add_sparse(logits, self._bias_ids[rows], self._bias_values[rows])
        if bitmask is not None:
            logits = processors.apply_bitmask(logits, bitmask)
        if flags.ban:
            too_early = positions - ints[:, _PROMPT_LEN] < ints[:, _MIN_TOKENS]
            logits = processors.ban(logits, self._ban_ids[rows], too_early)
        if flags.temperature:
            logits = processors.temperature(logits, floats[:, _TEMPERATURE])
        if flags.top_k:
            logits = processors.top_k(logits, ints[:, _TOP_K], flags.max_top_k, flags.uniform_top_k)
        if flags.top_p:
            short = flags.top_k and flags.every_top_k and flags.max_top_k <= processors.SHORT_LIST
            logits = processors.top_p(logits, floats[:, _TOP_P], flags.max_top_k if short else None)
        if flags.min_p:
            logits = processors.min_p(logits, floats[:, _MIN_P])
        return logits

    def _penalties(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        floats: torch.Tensor,
        ints: torch.Tensor,
        flags: SamplingFlags,
        max_tokens: int,
        ancestors: torch.Tensor | None,
    ) -> torch.Tensor:
        if self._history is None:
            raise RuntimeError("penalties without a history: set_row was not called for these rows")
        tokens = self._history[rows, : min(max_tokens, self.context_tokens)]
        index = torch.arange(tokens.shape[1], device=self.device)
        known = positions
        if ancestors is not None:
            known = positions - (ancestors >= 0).sum(dim=1)
        valid = index < known.unsqueeze(1)
        is_output = index >= ints[:, _PROMPT_LEN].unsqueeze(1)
        if ancestors is not None:
            tokens = torch.cat((tokens, ancestors.to(torch.int32)), dim=1)
            drafted = ancestors >= 0
            valid = torch.cat((valid, drafted), dim=1)
            is_output = torch.cat((is_output, drafted), dim=1)
        vocab = logits.shape[1]
        if flags.repetition:
            seen = processors.count_tokens(tokens, valid, vocab) > 0
            logits = processors.repetition(logits, seen, floats[:, _REPETITION])
        if flags.output_penalties:
            counts = processors.count_tokens(tokens, valid & is_output, vocab)
            presence, frequency = floats[:, _PRESENCE], floats[:, _FREQUENCY]
            logits = processors.presence_frequency(logits, counts, presence, frequency)
        return logits

    def sample(
        self, processed: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, flags: SamplingFlags
    ) -> torch.Tensor:
        """int64 [m] tokens drawn from the processed logits [m, V]."""
        if not flags.sampled:
            return processed.argmax(dim=-1)  # ties: the first, i.e. the lowest id
        ints = self._ints[rows]
        drawn = processors.draw(processed, uniform53(ints[:, _SEED], ints[:, _CHOICE], positions))
        if not flags.greedy:
            return drawn
        return torch.where(ints[:, _GREEDY] > 0, processed.argmax(dim=-1), drawn)


def logprobs(logits: torch.Tensor, tokens: torch.Tensor, top: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-softmax of the model's own logits [m, V], before any processor, for tokens [m].

    Returns (chosen float32 [m], top ids int64 [m, top], top values float32 [m, top]), best first.
    """
    values = torch.log_softmax(logits, dim=-1)
    chosen = values.gather(1, tokens.unsqueeze(1)).squeeze(1)
    best = torch.topk(values, min(top, values.shape[1]), dim=-1)
    return chosen, best.indices, best.values
