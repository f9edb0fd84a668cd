"""Log-probabilities in the two forms of the OpenAI API, and the text and bytes of single tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.engine.output import TokenLogprob
    from octavo.model.load.tokenizer import Tokenizer


@lru_cache(maxsize=1)
def _byte_of() -> dict[str, int]:
    """The printable stand-ins that byte-level BPE vocabularies use for bytes (GPT-2's table)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(b): b for b in plain}
    spare = (b for b in range(256) if b not in set(plain))
    table.update({chr(256 + i): b for i, b in enumerate(spare)})
    return table


class TokenText:
    """Bytes of tokens: exact for byte-level BPE and for SentencePiece vocabularies with byte tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._byte_level = tokenizer.token_to_id("Ġ") is not None or tokenizer.token_to_id("Ġthe") is not None
        self._added = tokenizer.backend.get_added_tokens_decoder()
        self._special = frozenset(i for i, token in self._added.items() if token.special)
        self._cache: dict[int, bytes] = {}

    def bytes_of(self, token_id: int) -> bytes:
        """UTF-8 bytes the token stands for (part of a character, possibly)."""
        known = self._cache.get(token_id)
        if known is None:
            known = self._cache[token_id] = self._find(token_id)
        return known

    def width_of(self, token_id: int, *, skip_special_tokens: bool = True) -> int:
        """Characters the token adds to a text (a part of one counts as one)."""
        if skip_special_tokens and token_id in self._special:
            return 0
        return len(self.bytes_of(token_id).decode("utf-8", "replace"))

    def label_of(self, token_id: int) -> str:
        """The token as text, or its bytes spelled out where they are no whole characters (so labels stay distinct)."""
        raw = self.bytes_of(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _find(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._added:
            return token.encode()
        if self._byte_level:
            table = _byte_of()
            if all(c in table for c in token):
                return bytes(table[c] for c in token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace("\u2581", " ").encode()


def chat_logprobs(entries: Iterable[TokenLogprob] | None, text: TokenText) -> dict[str, Any] | None:
    """`choice.logprobs` of a chat completion."""
    if entries is None:
        return None
    return {
        "content": [
            {**_one(e.token_id, e.logprob, text), "top_logprobs": [_one(i, lp, text) for i, lp in e.top]}
            for e in entries
        ],
        "refusal": None,
    }


def _one(token_id: int, logprob: float, text: TokenText) -> dict[str, Any]:
    raw = text.bytes_of(token_id)
    return {"token": raw.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(raw)}


def _finite(logprob: float) -> float:
    """JSON has no infinity: what has no probability gets -9999, as other servers do."""
    return logprob if logprob > -9999.0 else -9999.0


class CompletionLogprobs:
    """`choice.logprobs` of a text completion, whose offsets count on over deltas."""

    def __init__(self, text: TokenText, *, skip_special_tokens: bool = True) -> None:
        self._text, self._skip = text, skip_special_tokens
        self._offset = 0

    def add(
        self,
        entries: Sequence[TokenLogprob | None] | None,
        prompt_token_ids: Sequence[int] = (),
    ) -> dict[str, Any] | None:
        """The object for the next tokens. An entry may be None only for a token of the prompt, whose ids are given
        then: nothing stands before the first one, so it has no probability."""
        if entries is None:
            return None
        out: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for number, entry in enumerate(entries):
            token_id = prompt_token_ids[number] if entry is None else entry.token_id
            top = None if entry is None else {self._text.label_of(i): _finite(lp) for i, lp in entry.top}
            out["tokens"].append(self._text.label_of(token_id))
            out["token_logprobs"].append(None if entry is None else _finite(entry.logprob))
            out["top_logprobs"].append(top)
            out["text_offset"].append(self._offset)
            self._offset += self._text.width_of(token_id, skip_special_tokens=self._skip)
        return out


def merge_completion(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """One `logprobs` object out of those of successive deltas."""
    return {name: [x for part in parts for x in part[name]]
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
