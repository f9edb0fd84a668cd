"""Tokens to text, one at a time: the concatenation equals the tokenizer's decode of the whole run.

Three kinds of decoder are read exactly, token by token, from the tokenizer's own description:

    byte level   token → bytes → incremental UTF-8 (GPT-2, Llama 3, Qwen, SmolLM2)
    pieces       "▁" is a space, <0xE2> is a byte; a run of byte tokens is text or not as a whole, so it is
                 held until it ends (SentencePiece: Llama 2, Mistral, Gemma)
    anything else   a sliding window is decoded twice and the difference emitted

Half a UTF-8 character is never emitted; what stays incomplete at the end comes out of `flush` as U+FFFD.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable
from functools import cache
from typing import Any, Protocol

REPLACEMENT = "\ufffd"


class HasBackend(Protocol):
    """The part of `model.load.Tokenizer` that is used here."""

    @property
    def backend(self) -> Any: ...  # a tokenizers.Tokenizer


@cache
def _byte_of_char() -> dict[str, int]:
    """GPT-2's printable stand-ins: characters that are printable stand for themselves, the rest for 256 + i."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in plain}
    others = [byte for byte in range(256) if byte not in set(plain)]
    table.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return table


def _byte_level(token: str) -> bytes:
    table = _byte_of_char()
    try:
        return bytes([table[char] for char in token])
    except KeyError:  # an added token with characters outside the table stands for itself
        return token.encode("utf-8")


def _byte_token(token: str) -> int | None:
    """The byte that "<0xE2>" stands for."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return int(token[3:5], 16)
        except ValueError:
            return None
    return None


class _PieceRules:
    """A SentencePiece-like decoder: replacements, byte fallback, how many leading spaces fall away."""

    def __init__(self) -> None:
        self.replace: list[tuple[str, str]] = []
        self.byte_fallback = False
        self.strip = ("", 0)
        self.metaspace_first = ""  # replacement that disappears from the very first token

    @classmethod
    def parse(cls, steps: list[dict[str, Any]]) -> _PieceRules | None:
        """None where a step is not one of those understood here."""
        rules, fused = cls(), False
        for step in steps:
            kind = step["type"]
            if kind == "Replace" and "String" in step["pattern"] and not fused and not rules.byte_fallback:
                rules.replace.append((step["pattern"]["String"], step["content"]))
            elif kind == "ByteFallback" and not fused:
                rules.byte_fallback = True
            elif kind == "Fuse":
                fused = True
            elif kind == "Strip" and fused and step["stop"] == 0:
                rules.strip = (step["content"], step["start"])
            elif kind == "Metaspace" and len(steps) == 1:
                rules.replace.append((step["replacement"], " "))
                if step.get("prepend_scheme", "always") != "never":
                    rules.metaspace_first = step["replacement"]
            else:
                return None
        return rules


class Detokenizer:
    """What is shared by all requests of one tokenizer. `stream()` starts one answer."""

    def __init__(self, tokenizer: HasBackend) -> None:
        self._backend = tokenizer.backend
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        decoder = self._backend.decoder
        state: dict[str, Any] = json.loads(decoder.__getstate__()) if decoder is not None else {"type": "none"}
        steps: list[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
        self.byte_level = len(steps) == 1 and steps[0]["type"] == "ByteLevel"
        self.pieces = None if self.byte_level else _PieceRules.parse(steps)

    def stream(self, *, skip_special_tokens: bool = True, prompt_token_ids: Iterable[int] = ()) -> DetokenizerStream:
        """One answer's stream. It continues the prompt: a leading space is dropped only where the prompt shows
        no text, so text(prompt) + text(answer) = text(prompt + answer)."""
        after_text = any(token not in self.special_ids for token in prompt_token_ids)
        if self.byte_level:
            return _ByteLevelStream(self, skip_special_tokens)
        if self.pieces is not None:
            return _PieceStream(self, self.pieces, skip_special_tokens, after_text)
        prefix = list(prompt_token_ids)[-8:] if after_text else []
        return _WindowStream(self, skip_special_tokens, prefix)

    def token(self, token_id: int, skip_special_tokens: bool) -> str:
        """The token's written form, "" where it is skipped or not in the vocabulary (padding of the head)."""
        if skip_special_tokens and token_id in self.special_ids:
            return ""
        return self._backend.id_to_token(token_id) or ""

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        text: str = self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token adds to a text, special tokens written out (for the logprobs fields)."""
        token = self.token(token_id, skip_special_tokens=False)
        if self.byte_level:
            return _byte_level(token)
        if self.pieces is None:
            return self.decode([token_id], skip_special_tokens=False).encode("utf-8")
        byte = _byte_token(token) if self.pieces.byte_fallback else None
        if byte is not None:
            return bytes([byte])
        for old, new in self.pieces.replace:
            token = token.replace(old, new)
        return token.encode("utf-8")


class DetokenizerStream(Protocol):
    """One answer: `push` every token in order, `flush` once at the end."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class _ByteLevelStream:
    def __init__(self, shared: Detokenizer, skip_special_tokens: bool) -> None:
        self._shared, self._skip = shared, skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._utf8.decode(_byte_level(self._shared.token(token_id, self._skip)))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _PieceStream:
    def __init__(self, shared: Detokenizer, rules: _PieceRules, skip_special_tokens: bool, after_text: bool) -> None:
        self._shared, self._rules, self._skip = shared, rules, skip_special_tokens
        self._run = bytearray()  # byte tokens seen since the last ordinary one
        self._strip_left = 0 if after_text else rules.strip[1]
        self._first = not after_text

    def push(self, token_id: int) -> str:
        token = self._shared.token(token_id, self._skip)
        if not token:
            return ""
        for old, new in self._rules.replace:
            token = token.replace(old, "" if self._first and old == self._rules.metaspace_first else new)
        self._first = False
        byte = _byte_token(token) if self._rules.byte_fallback else None
        if byte is not None:
            self._run.append(byte)
            return ""
        return self._strip(self._end_run() + token)

    def flush(self) -> str:
        return self._strip(self._end_run())

    def _end_run(self) -> str:
        run, self._run = self._run, bytearray()
        try:
            return run.decode("utf-8")
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)

    def _strip(self, text: str) -> str:
        content = self._rules.strip[0]
        while self._strip_left and text.startswith(content):
            text = text[len(content) :]
            self._strip_left -= 1
        if text:
            self._strip_left = 0
        return text


class _WindowStream:
    """Decode the last few tokens with and without the newest; emit the difference once it is whole."""

    def __init__(self, shared: Detokenizer, skip_special_tokens: bool, prefix: list[int]) -> None:
        self._shared, self._skip = shared, skip_special_tokens
        self._window = list(prefix)
        self._known = len(prefix)  # tokens of the window whose text has been emitted

    def push(self, token_id: int) -> str:
        if self._skip and token_id in self._shared.special_ids:
            return ""
        self._window.append(token_id)
        return self._emit(final=False)

    def flush(self) -> str:
        return self._emit(final=True)

    def _emit(self, *, final: bool) -> str:
        before = self._shared.decode(self._window[: self._known], self._skip)
        now = self._shared.decode(self._window, self._skip)
        if len(now) <= len(before) or (now.endswith(REPLACEMENT) and not final):
            return ""
        self._window = self._window[max(0, self._known - 4) :] if before else self._window
        self._known = len(self._window)
        return now[len(before) :]
