"""What `LLM` and `AsyncLLM` share: prompts and parameters as callers give them, answers out of their pieces."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, SupportsIndex

from octavo.engine.messages import ChoiceDelta
from octavo.engine.output import CompletionOutput, RequestOutput
from octavo.engine.request import ChoiceOutput
from octavo.errors import RequestError
from octavo.params import SamplingParams

Prompt = str | Sequence[int]


def listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many, as a list. A list of numbers is one prompt. Raises `RequestError` for anything else."""
    if isinstance(prompts, str):
        return [prompts]
    items = _items(prompts)
    if items and _is_id(items[0]):
        return [checked(items)]
    return [checked(item) for item in items]


def conversations(messages: object) -> list[list[Any]]:
    """One conversation or many, as lists of messages. Raises `RequestError` for what is neither."""
    talks = conversation(messages)
    if talks and isinstance(talks[0], Mapping):
        return [talks]
    return [conversation(talk) for talk in talks]


def conversation(messages: object) -> list[Any]:
    """A list of messages; the chat template checks them one by one. Raises `RequestError` for what is no list."""
    if isinstance(messages, Iterable) and not isinstance(messages, str | bytes | bytearray | Mapping):
        return list(messages)
    kind = type(messages).__name__
    allowed = "a list of messages, or a list of such lists, is allowed"
    raise RequestError(f"messages: got {kind}; {allowed}", param="messages")


def checked(prompt: object) -> Prompt:
    """A text, or token ids as plain integers. Raises `RequestError` naming what was given."""
    if isinstance(prompt, str):
        return prompt
    ids = _items(prompt)
    for token in ids:
        if not _is_id(token):
            raise RequestError(f"prompt: got {token!r} among token ids; whole numbers are allowed", param="prompt")
    return [int(token) for token in ids]


def _items(value: object) -> list[Any]:
    """The items of a list, a tuple, an array or a tensor."""
    if hasattr(value, "tolist"):  # one item of a tensor is a tensor; its list has plain numbers
        value = value.tolist()
    if isinstance(value, Iterable) and not isinstance(value, bytes | bytearray | Mapping):
        return list(value)
    kind = type(value).__name__
    raise RequestError(f"prompt: got {kind}; text, a list of token ids, or a list of either is allowed", param="prompt")


def _is_id(value: object) -> bool:
    """Whole numbers of any library, truth values apart."""
    return isinstance(value, SupportsIndex) and not isinstance(value, bool) and not isinstance(value, Iterable)


def one_each(params: SamplingParams | Sequence[SamplingParams] | None, prompts: int) -> list[SamplingParams]:
    """Parameters of each prompt: the same for all, or one each. Raises `RequestError` for another number or kind."""
    given = [SamplingParams()] if params is None else list(params) if isinstance(params, Sequence) else [params]
    for item in given:
        if not isinstance(item, SamplingParams):
            raise RequestError(f"params: got {item!r}; SamplingParams are allowed, one or one each", param="params")
    settings = given if isinstance(params, Sequence) else given * prompts
    if len(settings) != prompts:
        raise RequestError(f"{len(settings)} params for {prompts} prompts: give one, or one each", param="params")
    return settings


def empty(request_id: str, prompt_token_ids: list[int], n: int) -> RequestOutput:
    """The answer before its first piece."""
    return RequestOutput(request_id, prompt_token_ids, [CompletionOutput(index=i) for i in range(n)])


def add(result: RequestOutput, piece: ChoiceOutput | ChoiceDelta) -> None:
    """Take a piece into the answer."""
    answer = result.outputs[piece.index]
    answer.text += piece.text
    answer.token_ids.extend(piece.token_ids)
    if piece.logprobs is not None:
        answer.logprobs = [*(answer.logprobs or []), *piece.logprobs]
    answer.finish_reason, answer.stop_reason = piece.finish_reason, piece.stop_reason
    if piece.metrics is not None:
        answer.metrics = piece.metrics
    if piece.prompt_logprobs is not None and result.prompt_logprobs is None:
        result.prompt_logprobs = piece.prompt_logprobs
