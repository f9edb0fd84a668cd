"""A `tokenizers.Tokenizer` from GGUF metadata, and its cached conversion.

Two kinds of vocabulary: byte-level BPE ("gpt2") with the split pattern that `tokenizer.ggml.pre` names, and
SentencePiece ("llama"), whose merges are recovered from the pieces.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import ModelError
from .cache import write_atomic
from .gguf_file import GGUFFile
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    import tokenizers

CACHE_FORMAT = 1  # raise it whenever a conversion below changes: cached ones are then made again

CONTROL, USER_DEFINED = 3, 4  # tokenizer.ggml.token_type
_SPACE = "\u2581"  # SentencePiece's visible space

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {
    "llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3, "falcon3": _LLAMA3, "dbrx": _LLAMA3,
    "smaug-bpe": _LLAMA3, "pixtral": _LLAMA3,
    "qwen2": _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"),
    "deepseek-r1-qwen": _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"),
    "megrez": _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"),
    "tekken": _TEKKEN,
}  # fmt: skip
_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
_PLAIN = ("gpt-2", "gpt2", "phi-2", "default", "mpt", "olmo", "jais", "trillion")
_WHOLE_WORDS = (
    "llama-bpe",
    "llama3",
    "llama-v3",
    "falcon3",
    "pixtral",
    "tekken",
)  # a word in the vocabulary is one token
_NFC = ("qwen2", "deepseek-r1-qwen", "megrez")
PRE_TOKENIZERS = tuple(sorted({*_SPLITS, *_SINGLE_DIGITS, *_PLAIN}))


def gguf_tokenizer(file: GGUFFile, cache: Path | None) -> Tokenizer:
    """The tokenizer a GGUF file describes, from the cache if it was converted before.

    Raises `ModelError` if the file has none, or one of an unknown kind.
    """
    values = file.metadata
    if "tokenizer.ggml.tokens" not in values:
        raise ModelError("metadata tokenizer.ggml.tokens is missing: the file has no tokenizer", file=file.path)
    backend = _cached(file, cache) if cache is not None else _convert(file)
    count = len(values["tokenizer.ggml.tokens"])

    def known(token_id: int | None) -> int | None:
        """The id, if there is such a token: some files write -1, or 32 bits of it, for "none"."""
        return token_id if token_id is not None and 0 <= token_id < count else None

    eos = [known(values.get(f"tokenizer.ggml.{key}_token_id")) for key in ("eos", "eot", "eom")]
    listed = [known(int(i)) for i in values.get("tokenizer.ggml.eos_token_ids", ())]
    return Tokenizer(
        backend,
        bos_id=known(values.get("tokenizer.ggml.bos_token_id")),
        eos_ids=[i for i in (*eos, *listed) if i is not None],
        eos_id=eos[0],
        pad_id=known(values.get("tokenizer.ggml.padding_token_id")),
        unk_id=known(values.get("tokenizer.ggml.unknown_token_id")),
        chat_template=values.get("tokenizer.chat_template") or None,
    )


# -- cache ---------------------------------------------------------------------------------------------------------


def _cached(file: GGUFFile, cache: Path) -> tokenizers.Tokenizer:
    """Read the conversion kept for this header, or make it. A stale, cut or foreign cache file is never believed."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import __version__ as library

    key = hashlib.sha256(file.header()).hexdigest()[:32]
    path = cache / "tokenizers" / f"{key}.json"
    label = f"octavo tokenizer {CACHE_FORMAT} tokenizers {library} "
    try:
        stored = path.read_bytes()
    except OSError:
        stored = b""
    head, _, body = stored.partition(b"\n")
    if head == (label + hashlib.sha256(body).hexdigest()).encode():
        return Backend.from_buffer(body)
    backend = _convert(file)
    body = backend.to_str().encode()
    try:
        write_atomic(path, [(label + hashlib.sha256(body).hexdigest()).encode(), b"\n", body])
    except OSError:
        pass  # a cache that cannot be written costs a second at the next start, nothing else
    return backend


# -- conversion ----------------------------------------------------------------------------------------------------


def _convert(file: GGUFFile) -> tokenizers.Tokenizer:
    values = file.metadata
    tokens = values["tokenizer.ggml.tokens"].to_list()
    kinds = values.get("tokenizer.ggml.token_type")
    kinds = [1] * len(tokens) if kinds is None else [int(k) for k in kinds]
    if len(kinds) != len(tokens):
        raise ModelError(
            f"metadata tokenizer.ggml.token_type has {len(kinds)} entries for {len(tokens)} tokens", file=file.path
        )
    model = values.get("tokenizer.ggml.model")
    if model == "gpt2":
        backend = _byte_level(file, tokens)
    elif model == "llama":
        backend = _sentencepiece(file, tokens, kinds)
    else:
        raise ModelError(f"tokenizer model {model!r} is not supported; allowed: gpt2, llama", file=file.path)
    _add_tokens(backend, tokens, kinds)
    _add_ends(backend, values, tokens, default_bos=model == "llama")
    return backend


def _byte_level(file: GGUFFile, tokens: Sequence[str]) -> tokenizers.Tokenizer:
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    values = file.metadata
    kind = values.get("tokenizer.ggml.pre", "default")
    if kind not in PRE_TOKENIZERS:
        raise ModelError(
            f"pre-tokenizer {kind!r} is not supported; allowed: {', '.join(PRE_TOKENIZERS)}", file=file.path
        )
    if "tokenizer.ggml.merges" not in values:
        raise ModelError("metadata tokenizer.ggml.merges is missing: a gpt2 vocabulary needs it", file=file.path)
    merges = [_pair(merge, file.path) for merge in values["tokenizer.ggml.merges"].to_list()]
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = Backend(_bpe(models, file.path, vocab, merges, ignore_merges=kind in _WHOLE_WORDS))
    if kind in _SPLITS:
        first = pre_tokenizers.Split(Regex(_SPLITS[kind]), behavior="isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [first, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    else:
        prefix = bool(values.get("tokenizer.ggml.add_space_prefix", False))
        bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=True)
        digits = [pre_tokenizers.Digits(individual_digits=True)] if kind in _SINGLE_DIGITS else []
        backend.pre_tokenizer = pre_tokenizers.Sequence([*digits, bytes_])
    if kind in _NFC:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(file: GGUFFile, tokens: list[str], kinds: Sequence[int]) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    values = file.metadata
    gemma = str(values.get("general.architecture", "")).startswith("gemma")
    if gemma:  # runs of spaces are spelled with real spaces in the file, unlike every other piece
        tokens[:] = [_SPACE * len(t) if len(t) > 1 and not t.strip(" ") else t for t in tokens]
    vocab = {token: index for index, token in enumerate(tokens)}
    if "tokenizer.ggml.merges" in values:
        merges = [_pair(merge, file.path) for merge in values["tokenizer.ggml.merges"].to_list()]
    else:
        scores = values.get("tokenizer.ggml.scores")
        if scores is None or len(scores) != len(tokens):
            raise ModelError(
                "metadata tokenizer.ggml.scores is missing or too short: a llama vocabulary needs it", file=file.path
            )
        # Gemma's pieces are listed in the order of their merges; its scores are not in that order throughout.
        merges = recover_merges(tokens, -np.arange(len(tokens)) if gemma else np.asarray(scores, dtype=np.float64))
    unknown = values.get("tokenizer.ggml.unknown_token_id")
    unk = tokens[unknown] if isinstance(unknown, int) and unknown < len(tokens) else None
    fallback = all(f"<0x{byte:02X}>" in vocab for byte in range(256))
    backend = Backend(_bpe(models, file.path, vocab, merges, unk_token=unk, fuse_unk=True, byte_fallback=fallback))
    prefix = bool(values.get("tokenizer.ggml.add_space_prefix", not gemma))
    if gemma:
        backend.normalizer = normalizers.Replace(" ", _SPACE)
    else:
        scheme = "first" if prefix else "never"
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme=scheme, split=False)
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps + ([decoders.Strip(content=" ", left=1)] if prefix else []))
    return backend


def recover_merges(tokens: Sequence[str], scores: Sequence[float] | np.ndarray) -> list[tuple[str, str]]:
    """Merges of a SentencePiece vocabulary: every way to make a piece from two others, the best-scored piece first.

    Ties fall to the longer left part, as in the usual conversion to merge lists.
    """
    known = set(tokens)
    found = []
    for token, score in zip(tokens, np.asarray(scores).tolist(), strict=True):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in known and right in known:
                found.append((-score, -len(left), -len(right), left, right))
    found.sort(key=lambda item: item[:3])
    return [(left, right) for *_, left, right in found]


def _bpe(models: Any, path: Path, vocab: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> Any:
    try:
        return models.BPE(vocab=vocab, merges=merges, **options)
    except Exception as error:  # the library raises a bare Exception
        raise ModelError(f"the tokenizer's merges do not fit its tokens: {error}", file=path) from None


def _pair(merge: str, path: Path) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if not left or not right or " " in right:
        raise ModelError(f"tokenizer merge {merge!r} is not a pair", file=path)
    return left, right


def _add_tokens(backend: tokenizers.Tokenizer, tokens: Sequence[str], kinds: Sequence[int]) -> None:
    """Control tokens are matched whole and can be skipped in text; user-defined ones are matched whole and kept.

    Runs of spaces are left to the merges: SentencePiece matches them after spaces became visible, not before.
    """
    from tokenizers import AddedToken

    control = [
        AddedToken(t, normalized=False, special=True) for t, k in zip(tokens, kinds, strict=True) if k == CONTROL
    ]
    defined = [
        AddedToken(t, normalized=False, special=False)
        for t, k in zip(tokens, kinds, strict=True)
        if k == USER_DEFINED and t.strip(_SPACE)
    ]
    backend.add_special_tokens(control)
    backend.add_tokens(defined)


def _add_ends(
    backend: tokenizers.Tokenizer, values: Mapping[str, Any], tokens: Sequence[str], *, default_bos: bool
) -> None:
    """BOS in front and EOS behind a plain text, where the file asks for them."""
    from tokenizers import processors

    ends = {}
    for name, default in (("bos", default_bos), ("eos", False)):
        token_id = values.get(f"tokenizer.ggml.{name}_token_id")
        if (
            values.get(f"tokenizer.ggml.add_{name}_token", default)
            and isinstance(token_id, int)
            and 0 <= token_id < len(tokens)
        ):
            ends[name] = (tokens[token_id], token_id)
    if ends:
        template = [ends[n][0] for n in ("bos",) if n in ends] + ["$A"] + [ends[n][0] for n in ("eos",) if n in ends]
        backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=list(ends.values()))
