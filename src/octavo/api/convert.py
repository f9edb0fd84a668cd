"""From a request's body to what the engine takes: token ids and `SamplingParams`."""

from __future__ import annotations

import json
import uuid
from typing import TYPE_CHECKING, Any

from octavo.api.neutral import shown
from octavo.api.schema import ChatRequest, CompletionRequest, Message, Sampled
from octavo.api.tools import inline_tools, template_takes_tools
from octavo.engine.request import Bootstrap
from octavo.errors import RequestError
from octavo.params import MAX_LOGPROBS, SamplingParams

if TYPE_CHECKING:
    from octavo.model.load.tokenizer import Tokenizer

MAX_PROMPTS = 128  # prompts in one completions call
_PLAIN = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
          "logit_bias", "stop", "stop_token_ids", "include_stop_str_in_output", "min_tokens", "ignore_eos",
          "skip_special_tokens", "n")
_TEMPLATE_OWN = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message",
                           "chat_template", "self"})


def request_id_of(body: Sampled, prefix: str) -> str:
    """The caller's own id, or a new one."""
    if body.rid is not None and body.request_id is not None and body.rid != body.request_id:
        raise RequestError("rid and request_id name the same thing: give one", param="rid")
    given = body.request_id or body.rid
    return given if given is not None else f"{prefix}-{uuid.uuid4().hex}"


def chat_params(body: ChatRequest, tool_constraint: dict[str, Any] | None = None) -> SamplingParams:
    """Sampling parameters of a chat request. `tool_constraint` is the structured field a forced tool call needs."""
    if body.top_logprobs is not None and not body.logprobs and body.top_logprobs != 0:
        raise RequestError(f"top_logprobs: got {body.top_logprobs}; it needs logprobs: true", param="top_logprobs")
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= MAX_LOGPROBS:
        raise RequestError(f"top_logprobs: got {body.top_logprobs}; an integer from 0 to {MAX_LOGPROBS} is allowed",
                           param="top_logprobs")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    return _params(body, getattr(body, name), name, logprobs, tool_constraint)


def completion_params(body: CompletionRequest) -> SamplingParams:
    params = _params(body, body.max_tokens, "max_tokens", body.logprobs, None)
    return params.with_changes(prompt_logprobs=params.logprobs) if body.echo else params


def _params(body: Sampled, max_tokens: int | None, max_name: str, logprobs: int | None,
            tool_constraint: dict[str, Any] | None) -> SamplingParams:
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options: it is only allowed together with stream: true", param="stream_options")
    options = body.stream_options
    if options is not None and options.continuous_usage_stats and not options.include_usage:
        raise RequestError("stream_options.continuous_usage_stats: it needs include_usage: true",
                           param="stream_options.continuous_usage_stats")
    if body.priority is not None and not -(2**31) <= body.priority < 2**31:
        raise RequestError(f"priority: got {shown(body.priority)}; a 32-bit integer is allowed", param="priority")
    seeds = {s for s in (body.seed, body.sampling_seed) if s is not None}
    if len(seeds) > 1:
        raise RequestError("seed and sampling_seed name the same thing: give one", param="sampling_seed")
    fields = {name: getattr(body, name) for name in _PLAIN if getattr(body, name) is not None}
    structured = _structured(body)
    if tool_constraint and structured:
        raise RequestError(f"tool_choice forces a tool call, which {next(iter(structured))} contradicts: give one",
                           param="tool_choice")
    try:
        return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, seed=min(seeds, default=None),
                              **fields, **structured, **(tool_constraint or {}))
    except RequestError as error:
        if error.param == "max_tokens" and max_name != "max_tokens":
            raise RequestError(str(error).replace("max_tokens", max_name, 1), param=max_name) from None
        if error.param == "seed" and body.seed is None:
            raise RequestError(str(error).replace("seed", "sampling_seed", 1), param="sampling_seed") from None
        raise


def _structured(body: Sampled) -> dict[str, Any]:
    """The structured-output fields of `SamplingParams` that the body asks for."""
    out: dict[str, Any] = {}
    for name in ("regex", "grammar", "json_schema"):
        if getattr(body, name) is not None:
            out[name] = getattr(body, name)
    form = body.response_format
    if form is None or form.type == "text":
        return out
    if out:
        raise RequestError(f"response_format and {next(iter(out))} exclude each other: give one",
                           param="response_format")
    if form.type == "json_object":
        return {"json_object": True}
    needs = {"json_schema": "json_schema", "regex": "pattern", "grammar": "grammar"}[form.type]
    value = getattr(form, needs)
    if value is None:
        raise RequestError(f"response_format.{needs}: it is needed when type is {form.type!r}",
                           param=f"response_format.{needs}")
    return {form.type: value.schema_ if form.type == "json_schema" else value}


def message_dicts(messages: list[Message]) -> list[dict[str, Any]]:
    """Messages as chat templates read them: absent fields left out, arguments of tool calls as objects."""
    out = []
    for message in messages:
        entry = message.model_dump(exclude_none=True)
        entry.setdefault("content", "" if message.role != "assistant" or not message.tool_calls else None)
        if isinstance(entry["content"], list):
            entry["content"] = [{"type": "text", "text": part["text"]} for part in entry["content"]]
        for call in entry.get("tool_calls", []):
            arguments = call["function"]["arguments"]
            if isinstance(arguments, str):
                try:
                    parsed = json.loads(arguments or "{}")
                except (ValueError, RecursionError):
                    continue  # what a model wrote need not be JSON; the template shows it as it is
                if isinstance(parsed, dict):
                    call["function"]["arguments"] = parsed
        out.append(entry)
    return out


def chat_ids(tokenizer: Tokenizer, body: Any, tools: list[dict[str, Any]] | None) -> list[int]:
    """Token ids of a conversation (`ChatRequest` or a `TokenizeRequest` with messages). Slow: call it in a thread.

    Raises `RequestError` for what the template cannot take.
    """
    extra = body.chat_template_kwargs or {}
    own = next((name for name in extra if name in _TEMPLATE_OWN or not name.isidentifier()), None)
    if own is not None:
        raise RequestError(f"chat_template_kwargs: {shown(own)} is not a variable that may be set; "
                           f"not allowed: {', '.join(sorted(_TEMPLATE_OWN))}", param="chat_template_kwargs")
    if body.continue_final_message and body.add_generation_prompt:
        raise RequestError("continue_final_message and add_generation_prompt exclude each other: give one",
                           param="continue_final_message")
    messages = message_dicts(body.messages)
    if not template_takes_tools(tokenizer.chat_template) and (tools or _speaks_of_tools(messages)):
        messages, tools = inline_tools(messages, tools), None
    return tokenizer.encode_chat(
        messages,
        tools=tools,
        add_generation_prompt=body.add_generation_prompt is not False and not body.continue_final_message,
        continue_final_message=bool(body.continue_final_message),
        **extra,
    )


def bootstrap_of(body: Sampled, role: str, n: int) -> Bootstrap | None:
    """Where the two halves of a prefill/decode pair meet for this request; None on a server of its own.

    With several choices the router sends lists, one room a choice. Raises `RequestError` naming the field.
    """
    given = {name: getattr(body, name) for name in ("bootstrap_host", "bootstrap_port", "bootstrap_room")}
    if role == "both":
        name = next((name for name, value in given.items() if value is not None), None)
        if name is not None:
            raise RequestError(f"{name}: got {shown(given[name])}; it needs --role prefill or --role decode; allowed "
                               "here: null", param=name, code="unsupported_value")
        return None
    if given["bootstrap_room"] is None:
        return None  # the engine says what it needs
    lists = {name: value if isinstance(value, list) else [value] for name, value in given.items()}
    for name, values in lists.items():
        distinct = name == "bootstrap_room"
        if not values or values[0] is None or (not distinct and len(set(values)) != 1):
            raise RequestError(f"{name}: got {shown(given[name])}; one value is needed", param=name)
    rooms = lists["bootstrap_room"]
    if len(rooms) != n or len(set(rooms)) != n or not all(0 <= room < 2**63 for room in rooms):
        raise RequestError(f"bootstrap_room: got {shown(given['bootstrap_room'])}; {n} distinct numbers from 0 to "
                           "2^63 - 1 are needed, one a choice", param="bootstrap_room")
    port = lists["bootstrap_port"][0]
    if not 0 < port < 65536:
        raise RequestError(f"bootstrap_port: got {port}; a port is needed", param="bootstrap_port")
    return Bootstrap(lists["bootstrap_host"][0], port, rooms)


def _speaks_of_tools(messages: list[dict[str, Any]]) -> bool:
    return any(message["role"] == "tool" or message.get("tool_calls") for message in messages)


def blame_field(error: RequestError, body: Sampled, *, forced_call: bool) -> RequestError:
    """The error with the field that the client sent: a schema the grammar engine refuses may come from a tool."""
    if error.param == "prompt_logprobs":
        return RequestError(f"echo: together with logprobs it needs {error}", param="echo", code="unsupported_value")
    if error.param not in ("json_schema", "regex", "grammar"):
        return error
    if forced_call:
        return RequestError(f"tools: {error}", param="tools", code=error.code)
    if body.response_format is not None:
        return RequestError(f"response_format: {error}", param="response_format", code=error.code)
    return error


def completion_prompts(tokenizer: Tokenizer, body: CompletionRequest) -> list[list[int]]:
    """Token ids of each prompt. Slow: call it in a thread. Raises `RequestError` for an empty or unusable prompt."""
    prompt = body.prompt
    if isinstance(prompt, str):
        prompts: list[Any] = [prompt]
    elif prompt and isinstance(prompt[0], int):
        prompts = [prompt]
    else:
        prompts = list(prompt)
    if not prompts:
        raise RequestError("prompt: got []; at least one prompt is needed", param="prompt")
    if len(prompts) > MAX_PROMPTS:
        raise RequestError(f"prompt: got {len(prompts)} prompts; at most {MAX_PROMPTS} in one call", param="prompt")
    special = body.add_special_tokens is not False
    out = []
    for index, item in enumerate(prompts):
        ids = tokenizer.encode(item, add_special_tokens=special) if isinstance(item, str) else list(item)
        if not ids:
            where = "prompt" if len(prompts) == 1 else f"prompt[{index}]"
            raise RequestError(f"{where}: got {shown(item)}; at least one token is needed", param="prompt")
        out.append(ids)
    return out
