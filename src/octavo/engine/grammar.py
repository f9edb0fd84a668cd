"""Constrained output: which tokens a grammar allows next. The grammar engine is `llguidance`; this is its frame.

A matcher belongs to one answer and stands behind the answer's newest token. Masks for drafted tokens come from
walking the draft and rolling back, so a rejected draft leaves no trace (02, acceptance rule 1).
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, Final, Protocol

import numpy as np

from octavo.errors import GrammarError, RequestError
from octavo.params import SamplingParams

KINDS: Final = ("json_object", "json_schema", "regex", "grammar")
# Between two JSON tokens. Unbounded, a small model that begins with newlines writes newlines until max_tokens.
JSON_WHITESPACE: Final = r"[ \t\r\n]{1,32}"
_CACHED_GRAMMARS: Final = 64


class GrammarTokenizer(Protocol):
    """The part of `model.load.Tokenizer` that is used here."""

    @property
    def backend(self) -> Any: ...  # a tokenizers.Tokenizer

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_ids(self) -> frozenset[int]: ...


class Matcher:
    """One answer's place in its grammar."""

    def __init__(self, grammar: Grammar, inner: Any, words: int, end_mask: np.ndarray) -> None:
        """`end_mask`: bits of the end tokens over the tokenizer's (perhaps wider) table."""
        self._grammar = grammar
        self._inner = inner
        self._words = words
        self._end_mask = end_mask
        self._buffer = np.zeros_like(end_mask)
        self.error: str | None = None  # the engine gave up (a limit was hit); the answer cannot be continued

    def fill_mask(self, out: np.ndarray) -> None:
        """Write the allowed ids of the next token into `out` (int32 [words], bit i of word w is id 32·w + i)."""
        self._check()
        if self.error is not None:
            out[:] = -1
            return
        self._inner.unsafe_compute_mask_ptr(self._buffer.ctypes.data, self._buffer.nbytes)
        self._check()
        out[:] = self._buffer[: self._words] if self.error is None else -1

    def accept(self, token: int) -> bool:
        """Move behind one token. False, and no move, where the grammar does not allow it."""
        return self.error is None and self._inner.try_consume_tokens([token]) == 1

    def advance(self, token: int) -> bool:
        """Move behind a token of the answer. True: the answer is complete (or cannot go on, see `error`).

        Asked after every single token, never after a run: that an answer ends, and with which token, must be a
        function of its tokens alone, whatever drafts have brought them.
        """
        if not self.accept(token):
            self._check()
            self.error = self.error or f"token {token} is not allowed by the grammar"
        return self.is_finished

    def rollback(self, tokens: int) -> None:
        """Take back the newest `tokens` moves."""
        if tokens and self.error is None and not self._inner.rollback(tokens):
            self._check()
            self.error = self.error or f"cannot take back {tokens} tokens"

    def masks_for_draft(self, tokens: Sequence[int], parents: Sequence[int] | None = None) -> np.ndarray:
        """int32 [1 + len(tokens), words]: the root's mask, then one behind every drafted token.

        `parents` are node numbers (0 = root, j + 1 = drafted column j), None for a chain. Behind a token that the
        grammar forbids everything is allowed: nothing there can be accepted. The matcher ends where it was.
        """
        masks = np.full((1 + len(tokens), self._words), -1, dtype=np.int32)
        self.fill_mask(masks[0])
        children: list[list[int]] = [[] for _ in masks]
        for column in range(len(tokens)):
            children[column if parents is None else parents[column]].append(column + 1)
        depth = 0
        for node, parent_depth in _walk(children):
            if self.error is not None:
                break
            self.rollback(depth - parent_depth)
            depth = parent_depth
            if self.accept(tokens[node - 1]):
                depth += 1
                self.fill_mask(masks[node])
            else:
                children[node].clear()  # and nothing below it is visited
        self.rollback(depth)
        return masks

    @property
    def is_finished(self) -> bool:
        """Nothing but an end token may follow."""
        if self.error is not None or self._inner.is_stopped():
            return True
        if not self._inner.is_accepting():
            return False
        # The library notices some ends only when it makes the next mask: whether an answer is complete must not
        # depend on whether a draft has asked for that mask already.
        self._inner.unsafe_compute_mask_ptr(self._buffer.ctypes.data, self._buffer.nbytes)
        self._check()
        return self.error is not None or not np.any(self._buffer & ~self._end_mask)

    @property
    def is_accepting(self) -> bool:
        """The text so far is a whole answer, though more may follow."""
        return self.error is None and bool(self._inner.is_accepting())

    def _check(self) -> None:
        """Notice that the library gave up. Its report goes on behind the first line with the text so far, which is
        nobody's to log or to send."""
        if self.error is None and self._inner.is_error():
            self.error = str(self._inner.get_error()).strip().partition("\n")[0]
            self._grammar.spent = True

    def failure(self, call_id: str) -> GrammarError:
        """The error of an answer that cannot go on. Limits of the library are for the caller to mend, not for us."""
        if self._inner.is_error():
            kind = self._grammar.kind
            return GrammarError(f"{kind}: {self.error}; a simpler one is needed", param=kind)
        return GrammarError(f"request {call_id}: {self.error}")


def _walk(children: list[list[int]]) -> Iterator[tuple[int, int]]:
    """(node, depth of its parent) below the root, children right behind their parent. A node whose list is emptied
    while it is the newest is not descended into."""
    stack = [(child, 0) for child in reversed(children[0])]
    while stack:
        node, parent_depth = stack.pop()
        yield node, parent_depth
        stack.extend((child, parent_depth + 1) for child in reversed(children[node]))


class Grammar:
    """A compiled grammar: `matcher()` starts an answer."""

    def __init__(self, kind: str, inner: Any, words: int, end_mask: np.ndarray) -> None:
        self.kind = kind
        self._inner, self._words, self._end_mask = inner, words, end_mask
        self.spent = False  # its matchers share states, so one that hit a limit leaves none for those to come

    def matcher(self) -> Matcher:
        return Matcher(self, self._inner.deep_copy(), self._words, self._end_mask)

    def first_error(self) -> str | None:
        """Why not even the first token of an answer can be chosen; None: it can. (A grammar whose parts are all in
        order may still be too large, or have no answer.)"""
        matcher = self.matcher()
        matcher.fill_mask(np.empty(self._words, dtype=np.int32))
        return matcher.error


class GrammarCompiler:
    """Compiles grammars for one tokenizer and one model's vocabulary; keeps the most recent ones.

    The token trie (half a second for 49,152 tokens) is built for the first constrained request, or by `warm_up`.
    """

    def __init__(self, tokenizer: GrammarTokenizer, vocab_size: int) -> None:
        """`vocab_size`: width of the logits, which may exceed the tokenizer's own."""
        self._tokenizer = tokenizer
        self._words = (vocab_size + 31) // 32
        self._table_size = max(vocab_size, tokenizer.vocab_size)
        end_bits = np.zeros((self._table_size + 31) // 32 * 32, dtype=np.uint8)
        end_bits[sorted(tokenizer.eos_ids)] = 1
        self._end_mask = np.packbits(end_bits, bitorder="little").view(np.int32)
        self._trie: Any = None
        self._cache: OrderedDict[tuple[str, str], Grammar] = OrderedDict()

    def compile(self, params: SamplingParams) -> Grammar:
        """The grammar of a request whose `params.structured` is not None. Raises `RequestError`."""
        if params.structured is None:
            raise ValueError("the request asks for no structure")
        return self.compile_spec(*params.structured)

    def compile_spec(self, kind: str, spec: str | dict[str, Any] | bool) -> Grammar:
        """Compile `spec` of one of `KINDS`. Raises `RequestError` naming the field where it is not understood."""
        key = (kind, spec if isinstance(spec, str) else _json_text(spec))
        known = self._cache.get(key)
        if known is not None and not known.spent:
            self._cache.move_to_end(key)
            return known
        from llguidance import LLMatcher

        source = grammar_source(kind, spec)
        inner = LLMatcher(self.warm_up(), source, log_level=0)
        if inner.is_error():
            raise _refused(kind, inner.get_error())
        grammar = Grammar(kind, inner, self._words, self._end_mask)
        error = grammar.first_error()
        if error is not None:
            raise _refused(kind, error)
        self._cache[key] = grammar
        if len(self._cache) > _CACHED_GRAMMARS:
            self._cache.popitem(last=False)
        return grammar

    def warm_up(self) -> Any:
        """Build the token trie now. Raises `RequestError` if this kind of tokenizer cannot be constrained."""
        if self._trie is None:
            from llguidance import LLTokenizer

            ends: list[int] = sorted(self._tokenizer.eos_ids)
            try:
                self._trie = LLTokenizer(
                    self._tokenizer.backend.to_str(), n_vocab=self._table_size, eos_token=ends or None
                )
            except ValueError as error:
                raise RequestError(
                    f"this model's tokenizer does not work with constrained output: {error}", code="unsupported"
                ) from None
        return self._trie


def grammar_source(kind: str, spec: str | dict[str, Any] | bool) -> str:
    """llguidance's own text for a specification. Raises `RequestError` naming the field."""
    from llguidance import LLMatcher

    if kind == "json_object":
        return _json_source({"type": "object"})
    if kind == "json_schema":
        return _json_source(_schema(spec))
    if not isinstance(spec, str) or not spec:
        raise RequestError(f"{kind}: a non-empty string is allowed", param=kind)
    if kind == "regex":
        return LLMatcher.grammar_from_regex(spec)
    if kind == "grammar":
        from llguidance.gbnf_to_lark import any_to_lark

        try:
            return LLMatcher.grammar_from_lark(any_to_lark(spec))
        except Exception as error:  # the converter raises what its parser meets: ValueError, IndexError, …
            raise _refused(kind, str(error)) from None
    raise ValueError(f"kind {kind!r}: {', '.join(KINDS)} are known")


def check_grammar(params: SamplingParams) -> None:
    """Refuse a bad specification without a tokenizer (before a request is queued). Raises `RequestError`."""
    if params.structured is None:
        return
    from llguidance import LLMatcher

    kind, spec = params.structured
    message = LLMatcher.validate_grammar(grammar_source(kind, spec))
    if message and not message.startswith("WARNING"):
        raise _refused(kind, message)


def _json_text(spec: dict[str, Any] | bool) -> str:
    """A schema's text. Raises `RequestError` for what JSON cannot say: NaN, Python's own objects, endless nesting."""
    try:
        return json.dumps(spec, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise _refused("json_schema", str(error)) from None


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON value")


def _schema(spec: str | dict[str, Any] | bool) -> dict[str, Any]:
    if isinstance(spec, str):
        try:
            spec = json.loads(spec, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise _refused("json_schema", f"not JSON: {error}") from None
    if spec is True:
        return {}
    if not isinstance(spec, dict):
        raise _refused("json_schema", "a JSON schema is an object")
    _json_text(spec)
    return spec


def _json_source(schema: dict[str, Any]) -> str:
    from llguidance import LLMatcher

    try:
        return LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": JSON_WHITESPACE})
    except (ValueError, RecursionError) as error:
        raise _refused("json_schema", str(error)) from None


def _refused(kind: str, message: str) -> RequestError:
    first = " ".join(message.split())
    return RequestError(f"{kind}: {first[:400]}", param=kind, code="invalid_grammar")
