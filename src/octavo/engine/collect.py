"""What `LLM` and `AsyncLLM` share: prompts and parameters as callers give them, answers out of their pieces."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.engine.messages import ChoiceDelta
from octavo.engine.output import CompletionOutput, RequestOutput
from octavo.engine.request import ChoiceOutput
from octavo.errors import RequestError
from octavo.params import SamplingParams

Prompt = str | Sequence[int]


def listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many, as a list. A list of numbers is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    if prompts and all(isinstance(p, int) for p in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def one_each(params: SamplingParams | Sequence[SamplingParams] | None, prompts: int) -> list[SamplingParams]:
    """Parameters of each prompt: the same for all, or one each. Raises `RequestError` for another number."""
    settings = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * prompts
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
