"""Tokenizer of a checkpoint folder: tokenizer.json with what tokenizer_config.json and generation_config.json add."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import ModelError
from ..config import ModelConfig
from .hf_config import read_json, token_ids
from .tokenizer import Tokenizer

_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def folder_tokenizer(folder: Path, config: ModelConfig) -> Tokenizer:
    """Read the tokenizer. Raises `ModelError` naming the file that is missing or malformed."""
    from tokenizers import Tokenizer as Backend

    path = folder / "tokenizer.json"
    if not path.exists():
        also = " (tokenizer.model alone is not read; convert it)" if (folder / "tokenizer.model").exists() else ""
        raise ModelError(f"missing: a checkpoint folder needs its tokenizer{also}", file=path)
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the library raises a bare Exception
        raise ModelError(f"not a tokenizer: {error}", file=path) from None
    backend.no_truncation()
    backend.no_padding()
    options = _optional(folder / "tokenizer_config.json")
    generation = _optional(folder / "generation_config.json")
    specials = {name: token for name in _NAMES if (token := _content(options.get(name))) is not None}
    _mark_specials(backend, options, specials)

    def id_of(name: str) -> int | None:
        token = specials.get(name)
        return None if token is None else backend.token_to_id(token)

    eos = id_of("eos_token")
    listed = [eos] if eos is not None else []
    listed += [*token_ids(generation.get("eos_token_id"), folder / "generation_config.json"), *config.eos_token_ids]
    listed = [i for i in listed if i < config.vocab_size]  # an id the model has no row for is never said
    bos = id_of("bos_token")
    _add_bos(backend, options, specials.get("bos_token"), bos)
    return Tokenizer(
        backend,
        bos_id=bos if bos is not None else _within(config.bos_token_id, backend),
        eos_ids=dict.fromkeys(listed),
        eos_id=eos,
        pad_id=id_of("pad_token"),
        unk_id=id_of("unk_token"),
        chat_template=_template(folder, options),
        special_tokens=specials,
    )


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _content(value: Any) -> str | None:
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _within(token_id: int | None, backend: Any) -> int | None:
    return token_id if token_id is not None and backend.id_to_token(token_id) is not None else None


def _mark_specials(backend: Any, options: Mapping[str, Any], specials: Mapping[str, str]) -> None:
    """Tokens that only tokenizer_config.json calls special become special for the backend too."""
    from tokenizers import AddedToken

    wanted = [t for t in specials.values() if backend.token_to_id(t) is not None]
    listed = options.get("added_tokens_decoder")
    if isinstance(listed, Mapping):
        wanted += [
            t
            for row in listed.values()
            if isinstance(row, Mapping)
            and row.get("special")
            and (t := _content(row)) is not None
            and backend.token_to_id(t) is not None
        ]
    known = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in wanted if t not in known])


def _add_bos(backend: Any, options: Mapping[str, Any], token: str | None, token_id: int | None) -> None:
    """`add_bos_token` without a post-processor that does it: older exports leave that to the tokenizer's class."""
    from tokenizers import processors

    if not options.get("add_bos_token") or token is None or token_id is None:
        return
    if backend.encode("", add_special_tokens=True).ids[:1] != [token_id]:
        extra = processors.TemplateProcessing(single=[token, "$A"], special_tokens=[(token, token_id)])
        current = backend.post_processor
        backend.post_processor = extra if current is None else processors.Sequence([current, extra])


def _template(folder: Path, options: Mapping[str, Any]) -> str | None:
    """The chat template: its own file before tokenizer_config.json; of several, the one called "default"."""
    path = folder / "chat_template.jinja"
    if path.exists():
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise ModelError("the chat template is not UTF-8 text", file=path) from None
    value = _optional(folder / "chat_template.json").get("chat_template") or options.get("chat_template")
    if isinstance(value, list):
        named = {row.get("name"): row.get("template") for row in value if isinstance(row, Mapping)}
        value = named.get("default")
    return value if isinstance(value, str) and value else None
