"""Prompt lookup: draft what followed the last occurrence of the longest suffix of prompt + output.

The suffixes of a row are kept in a suffix automaton that grows by one state or two per token, so looking up the
longest match costs the same at token 100 and at token 100,000 (amortised constant per new token).
Source: A. Blumer et al., "The smallest automaton recognizing the subwords of a text" (1985).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from octavo.backend.relay import upload
from octavo.errors import ConfigError
from octavo.spec.columns import NOTHING, ColumnChooser, Found, Worth, kind_of_match
from octavo.spec.drafter import Draft, DraftRequest, Observation, ProposeBatch

# How far up the suffix links an occurrence is refreshed. States further up keep an older occurrence, which is
# still a true one; the bound keeps a text of one repeated token linear.
_REFRESH_LINKS = 32


class SuffixAutomaton:
    """All substrings of a growing text; each state remembers a recent position where its substrings end."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link: list[int] = [-1]
        self._len: list[int] = [0]
        self._end: list[int] = [-1]
        self._last = 0
        self.match_len = 0  # longest proper suffix that occurred before
        self.match_end = -1  # index of the last token of that earlier occurrence

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._append(token)

    def _append(self, token: int) -> None:
        position = len(self.tokens)
        self.tokens.append(token)
        current = self._new_state({}, 0, self._len[self._last] + 1, position)
        state = self._last
        while state != -1 and token not in self._next[state]:
            self._next[state][token] = current
            state = self._link[state]
        if state != -1:
            self._link[current] = self._split(state, token)
        self._last = current
        match = self._link[current]
        self.match_len, self.match_end = self._len[match], self._end[match]
        for _ in range(_REFRESH_LINKS):
            if match <= 0:
                break
            self._end[match] = position
            match = self._link[match]

    def _split(self, state: int, token: int) -> int:
        """The state of exactly the substrings of `state` followed by `token`; cloned off a longer one if needed."""
        target = self._next[state][token]
        if self._len[target] == self._len[state] + 1:
            return target
        clone = self._new_state(dict(self._next[target]), self._link[target], self._len[state] + 1, self._end[target])
        while state != -1 and self._next[state].get(token) == target:
            self._next[state][token] = clone
            state = self._link[state]
        self._link[target] = clone
        return clone

    def _new_state(self, edges: dict[int, int], link: int, length: int, end: int) -> int:
        self._next.append(edges)
        self._link.append(link)
        self._len.append(length)
        self._end.append(end)
        return len(self._next) - 1

    def step(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Follow a foreign text: (state, match length) of its longest suffix that is a substring of this text."""
        while state != 0 and token not in self._next[state]:
            state = self._link[state]
            length = self._len[state]
        if token in self._next[state]:
            return self._next[state][token], length + 1
        return 0, 0

    def end_of(self, state: int) -> int:
        return self._end[state]


class _Row:
    __slots__ = ("corpus_len", "corpus_state", "text")

    def __init__(self) -> None:
        self.text = SuffixAutomaton()
        self.corpus_state = 0
        self.corpus_len = 0


class NgramDrafter:
    """n-gram drafts for every model: no weights, no draft KV, no verify rows where nothing matches."""

    name = "ngram"
    needs_host_tokens = True
    needs_draft_kv = False
    kv_layers = 0
    key_mode = "token"
    taps: tuple[int, ...] = ()

    def __init__(
        self, *, draft_tokens: int, min_match_tokens: int = 2, corpus: Sequence[Sequence[int]] = ()
    ) -> None:
        """`corpus`: texts shared by all rows, used where they match longer than the row itself. Raises ConfigError."""
        if not 1 <= draft_tokens <= 63:
            raise ConfigError("draft_tokens", draft_tokens, "1 to 63")
        if min_match_tokens < 1:
            raise ConfigError("ngram_min_match", min_match_tokens, "at least 1")
        self.max_draft_tokens = self.max_depth = draft_tokens
        self.footprint_tokens = self.commit_lag_tokens = draft_tokens + 1
        self.min_match_tokens = min_match_tokens
        self.columns: ColumnChooser | None = None  # None: every token that was found is drafted
        self._rows: dict[int, _Row] = {}
        self._corpus: SuffixAutomaton | None = None
        if corpus:
            self._corpus = SuffixAutomaton()
            for text in corpus:
                self._corpus.extend([*text, -1])  # -1 is no token: a match never crosses two texts

    def begin(self, request: DraftRequest) -> None:
        self._rows[request.row] = _Row()
        if self.columns is not None:
            self.columns.begin(request.row)

    def end(self, row: int) -> None:
        del self._rows[row]

    def observe(self, observation: Observation) -> None:
        """Nothing to do: the tokens come with the next `propose`."""

    def adapt(self) -> ColumnChooser:
        """From now on only the tokens that pay are drafted."""
        self.columns = ColumnChooser(self.max_draft_tokens)
        return self.columns

    def propose(self, batch: ProposeBatch) -> Draft:
        return drafted(batch, self.find, self.columns)

    def find(self, batch: ProposeBatch, worth: Worth | None = None) -> list[Found]:
        """What may follow in each row as far as it is worth finding, NOTHING where nothing matches."""
        if batch.host_tokens is None:
            raise ValueError("n-gram drafting needs the tokens on the host: settle the rows first")
        reach = None if worth is None else worth.reach
        rows = zip(batch.host_rows, batch.host_tokens, batch.host_limits, strict=True)
        return [self.lookup(row, tokens, min(batch.draft_tokens, limit), reach) for row, tokens, limit in rows]

    def lookup(self, row: int, tokens: Sequence[int], limit: int, reach: Sequence[int] | None = None) -> Found:
        """Up to `limit` tokens that may follow `tokens`, the whole text of `row` so far; `reach`: at most so many by
        the kind of the match."""
        state = self._rows[row]
        fresh = tokens[len(state.text.tokens) :]
        state.text.extend(fresh)
        if self._corpus is not None:
            for token in fresh:
                state.corpus_state, state.corpus_len = self._corpus.step(
                    state.corpus_state, state.corpus_len, token
                )
        if limit <= 0:
            return NOTHING
        own = state.text
        if self._corpus is not None and state.corpus_len >= max(self.min_match_tokens, own.match_len + 1):
            limit = limit if reach is None else min(limit, reach[kind_of_match(state.corpus_len)])
            found = _until_break(self._corpus.tokens, self._corpus.end_of(state.corpus_state) + 1, limit)
            return _matched(found, state.corpus_len)
        if own.match_len < self.min_match_tokens:
            return NOTHING
        limit = limit if reach is None else min(limit, reach[kind_of_match(own.match_len)])
        return _matched(_continue(own.tokens, own.match_end + 1, limit), own.match_len)


def _matched(tokens: list[int], match_tokens: int) -> Found:
    """Every token that is right makes the match one longer."""
    return Found(tokens, [kind_of_match(match_tokens + j) for j in range(len(tokens))])


def drafted(
    batch: ProposeBatch,
    find: Callable[[ProposeBatch, Worth | None], list[Found]],
    columns: ColumnChooser | None,
) -> Draft:
    """What `find` finds as a draft: all of it, or what `columns` takes."""
    if columns is None:
        found = find(batch, None)
    else:
        worth = columns.worth(len(batch.host_rows))
        found = columns.take(batch, find(batch, worth), worth)
    return chains([row.tokens for row in found], batch.rows.device)


def chains(drafts: list[list[int]], device: torch.device) -> Draft:
    """One chain a row, as wide as the longest."""
    lengths = tuple(map(len, drafts))
    width = max(lengths, default=0)
    if width == 0:
        return Draft(torch.empty((len(drafts), 0), dtype=torch.int64, device=device), None, None, lengths)
    flat = [token for draft in drafts for token in (*draft, *[0] * (width - len(draft)))]
    return Draft(upload(flat, device).reshape(len(drafts), width), None, None, lengths)


def _continue(tokens: list[int], start: int, limit: int) -> list[int]:
    """`limit` tokens from `start`; past the end the text repeats with the period the match has found."""
    period = len(tokens) - start
    return [tokens[start + j % period] for j in range(limit)]


def _until_break(tokens: list[int], start: int, limit: int) -> list[int]:
    drafted = tokens[start : start + limit]
    return drafted[: drafted.index(-1)] if -1 in drafted else drafted
