"""What the engine process tells the API process when the model is loaded, and how the tokenizer crosses over.

The API process rebuilds the engine's own tokenizer from its JSON: the checkpoint is read once, and both sides agree
by construction. Imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from octavo.model.load.tokenizer import Tokenizer


def pack_tokenizer(tokenizer: Tokenizer) -> bytes:
    """The tokenizer as bytes for `unpack_tokenizer`."""
    return msgspec.msgpack.encode(
        {
            "json": tokenizer.backend.to_str(),
            "bos_id": tokenizer.bos_id,
            "eos_id": tokenizer.eos_id,
            "eos_ids": sorted(tokenizer.eos_ids),
            "pad_id": tokenizer.pad_id,
            "unk_id": tokenizer.unk_id,
            "chat_template": tokenizer.chat_template,
            "special_tokens": tokenizer._variables,
        }
    )


def unpack_tokenizer(packed: bytes) -> Tokenizer:
    """The same tokenizer in this process."""
    import tokenizers

    from octavo.model.load.tokenizer import Tokenizer

    fields: dict[str, Any] = msgspec.msgpack.decode(packed)
    backend = tokenizers.Tokenizer.from_str(fields.pop("json"))
    return Tokenizer(backend, **fields)


def describe(core: Any) -> dict[str, Any]:
    """Facts about the loaded engine for `/server_info`, `/model_info` and the start-up log."""
    info: dict[str, Any] = {
        "model_name": core.model_name,
        "max_model_len": core.max_model_len,
        "vocab_size": core.vocab_size,
        "architecture": core.parts.runner.network.config.architecture,
    }
    info["page_size"] = core.config.page_size
    info["kv_tokens"] = core.ledger.full_pool.total * core.config.page_size
    info["startup_lines"] = core.parts.startup_lines
    return {**info, **core.parts.info}
