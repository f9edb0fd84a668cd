"""Text to ids and back, whatever the vocabulary came from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ...errors import RequestError
from .chat_template import check_template, render_chat

if TYPE_CHECKING:
    import tokenizers

# Control tokens that end an answer in some family of models, whether or not its metadata lists them.
END_TOKENS = frozenset({
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>", "<|end|>",
    "<|return|>", "<|call|>", "<EOT>", "<|eot|>", "<end_of_utterance>",
})  # fmt: skip


class Tokenizer:
    """A vocabulary with its chat template.

    `eos_ids` holds every token that ends an answer: those the checkpoint names and the control tokens that models of
    its family end a turn with. `backend` is the `tokenizers.Tokenizer`, for incremental decoding.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_id: int | None = None,
        eos_ids: Iterable[int] = (),
        pad_id: int | None = None,
        unk_id: int | None = None,
        eos_id: int | None = None,
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        self.backend = backend
        self.bos_id, self.pad_id, self.unk_id = bos_id, pad_id, unk_id
        ends = [i for i in eos_ids]
        self.eos_id = eos_id if eos_id is not None else (ends[0] if ends else None)
        self.eos_ids: frozenset[int] = frozenset(ends) | self._control_ends()
        self.chat_template = chat_template
        self._variables = dict(special_tokens or {})
        for name, token_id in (("bos", bos_id), ("eos", self.eos_id), ("pad", pad_id), ("unk", unk_id)):
            token = None if token_id is None else backend.id_to_token(token_id)
            if token is not None:
                self._variables.setdefault(f"{name}_token", token)
        self._variables.setdefault("bos_token", "")
        self._variables.setdefault("eos_token", "")

    def _control_ends(self) -> frozenset[int]:
        added = self.backend.get_added_tokens_decoder()
        return frozenset(i for i, token in added.items() if token.special and token.content in END_TOKENS)

    @property
    def vocab_size(self) -> int:
        """Ids the tokenizer can produce; a model's embedding may have more rows."""
        return int(self.backend.get_vocab_size(with_added_tokens=True))

    @cached_property
    def special_ids(self) -> frozenset[int]:
        return frozenset(i for i, token in self.backend.get_added_tokens_decoder().items() if token.special)

    def id_to_token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it, or None for an id it does not have."""
        return self.backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None

    def token_to_id(self, token: str) -> int | None:
        return self.backend.token_to_id(token)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text; with `add_special_tokens` begun the way the model expects (BOS, if it uses one).

        Raises `RequestError` for a text that is not valid Unicode (a lone surrogate).
        """
        try:
            return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)
        except (TypeError, UnicodeEncodeError):
            raise _bad_text(text) from None

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids. Bytes that are not a whole character become U+FFFD; ids out of the vocabulary give nothing."""
        return str(self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens))

    # -- chat --------------------------------------------------------------------------------------------------------

    def with_template(self, template: str) -> Tokenizer:
        """This tokenizer with another chat template (`--chat-template FILE`). Raises `ModelError` if it is none."""
        check_template(template)
        other = object.__new__(Tokenizer)
        other.__dict__.update(self.__dict__)
        other.chat_template = template
        return other

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt text of a conversation. Further keywords are the template's own variables.

        Raises `RequestError` if the model has no template (saying how to pass one) or the template refuses.
        """
        return render_chat(
            chat_template if chat_template is not None else self.chat_template,
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=self._variables | kwargs,
        )

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> list[int]:
        """Ids of a conversation. Takes what `apply_chat_template` takes.

        BOS stands there once: from the template if it writes one, else from the tokenizer if it adds one.
        """
        return self.encode_rendered(self.apply_chat_template(messages, **kwargs))

    def encode_rendered(self, text: str) -> list[int]:
        """Ids of a text that a chat template has made: no second BOS, no EOS behind it."""
        ids = self.encode(text, add_special_tokens=False)
        if self.bos_id is None or ids[:1] == [self.bos_id]:
            return ids
        return [self.bos_id, *ids] if self.adds_bos else ids

    @cached_property
    def adds_bos(self) -> bool:
        """Whether plain prompts get a BOS in front."""
        return self.bos_id is not None and self.backend.encode("", add_special_tokens=True).ids[:1] == [self.bos_id]


def _bad_text(text: object) -> RequestError:
    """Why the backend would not take a text. (It calls a string with a lone surrogate "no string".)"""
    if not isinstance(text, str):
        return RequestError(f"prompt: got {type(text).__name__}; a string is needed", param="prompt")
    at = next((i for i, c in enumerate(text) if "\ud800" <= c <= "\udfff"), 0)
    return RequestError(f"prompt: character {at} is {text[at]!r}, not valid Unicode; send UTF-8 text", param="prompt")
