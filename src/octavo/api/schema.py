"""The bodies that the endpoints take. Unknown fields are refused; each field says what it allows.

Numbers are checked for type here and for range by `SamplingParams`, the same for HTTP and Python.
Fields of other servers that change nothing here are in `neutral.py`.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from octavo.api.neutral import NEUTRAL, shown, split_neutral
from octavo.errors import RequestError

TokenIds = list[int]


class Body(BaseModel):
    """Base of all request bodies: strict types, no unknown fields, neutral fields checked and dropped."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Top(Body):
    """A whole body: its strings must be text, since JSON can spell half a surrogate pair and no tokenizer can, and its
    numbers finite, though Python's parser reads NaN and Infinity (a schema would carry them on)."""

    @model_validator(mode="before")
    @classmethod
    def _check_text(cls, data: Any) -> Any:
        bad = _untext(data)
        if bad is not None:
            raise RequestError(f"{shown(bad)}: not valid Unicode (half a surrogate pair)", code="invalid_json")
        if isinstance(data, dict):
            for name, value in data.items():
                if _unfinite(value):
                    raise RequestError(f"{name}: a finite number is needed; NaN and Infinity are not JSON", param=name)
        return data


def _untext(value: Any) -> str | None:
    """A string somewhere in `value` that has no UTF-8 form, or None."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return value
    elif isinstance(value, dict):
        return next((bad for item in value.items() for part in item if (bad := _untext(part)) is not None), None)
    elif isinstance(value, list):
        return next((bad for item in value if not isinstance(item, int) and (bad := _untext(item)) is not None), None)
    return None


def _unfinite(value: Any) -> bool:
    """Whether there is a number without a value somewhere in `value`."""
    if isinstance(value, float):
        return not math.isfinite(value)
    if isinstance(value, dict):
        return any(_unfinite(item) for item in value.values())
    return isinstance(value, list) and any(not isinstance(item, int) and _unfinite(item) for item in value)


class StreamOptions(Body):
    include_usage: bool | None = Field(None, description="send a last chunk with the usage")
    continuous_usage_stats: bool | None = Field(None, description="every chunk has the usage so far")
    include_obfuscation: bool | None = Field(None, description="has no effect here")


class JsonSchemaFormat(Body):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(True, alias="schema", description="a JSON schema")
    strict: bool | None = Field(None, description="the schema is always enforced")


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema", "regex", "grammar"] = Field(
        description='"text", "json_object", "json_schema", "regex" or "grammar"'
    )
    json_schema: JsonSchemaFormat | None = Field(None, description='needed when type is "json_schema"')
    pattern: str | None = Field(None, description='needed when type is "regex"')
    grammar: str | None = Field(None, description='Lark text, needed when type is "grammar"')


class FunctionDefinition(Body):
    name: str = Field(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_.\-]+$",
                      description="1 to 64 letters, digits, underscores, dots and dashes")
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="a JSON schema of the arguments")
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"] = Field("function", description='"function"')
    function: FunctionDefinition


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"] = Field("function", description='"function"')
    function: NamedFunction


class ToolCallFunction(Body):
    name: str
    arguments: str | dict[str, Any] = Field("{}", description="JSON text of the arguments")


class ToolCall(Body):
    id: str | None = None
    index: int | None = None
    type: Literal["function"] = "function"
    function: ToolCallFunction


class ContentPart(Body):
    type: Literal["text"] = Field(description='content parts of type "text" are supported')
    text: str


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"] = Field(
        description='"system", "developer", "user", "assistant", "tool" or "function"'
    )
    content: str | list[ContentPart] | None = Field(None, description='a string, or a list of {"type": "text"} parts')
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    audio: None = Field(None, description="audio is not supported; null")
    annotations: list[Any] | None = None
    function_call: None = Field(None, description="use tool_calls; null")


class Sampled(Top):
    """What chat and completions share."""

    model: str | None = Field(None, description="a name that GET /v1/models lists; absent: the one model there is")
    temperature: float | None = Field(None, description="a number from 0; default 1")
    top_p: float | None = Field(None, description="a number above 0 and at most 1; default 1")
    top_k: int | None = Field(None, description="an integer from 1, or 0 or -1 for no limit")
    min_p: float | None = Field(None, description="a number from 0 to 1; default 0")
    presence_penalty: float | None = Field(None, description="a number from -2 to 2; counts the output")
    frequency_penalty: float | None = Field(None, description="a number from -2 to 2; counts the output")
    repetition_penalty: float | None = Field(None, description="a number above 0; counts prompt and output; default 1")
    logit_bias: dict[str, float] | None = Field(None, description="token ids (as strings) to numbers from -100 to 100")
    seed: int | None = Field(None, description="a 64-bit integer")
    sampling_seed: int | None = Field(None, description="another name of seed")
    stop: str | list[str] | None = Field(None, description="a non-empty string, or a list of them")
    stop_token_ids: list[int] | None = Field(None, description="a list of token ids")
    include_stop_str_in_output: bool | None = Field(None, description="true or false")
    max_tokens: int | None = Field(None, description="an integer from 0; absent: the rest of the context")
    min_tokens: int | None = Field(None, description="an integer from 0, at most max_tokens")
    ignore_eos: bool | None = Field(None, description="true or false")
    skip_special_tokens: bool | None = Field(None, description="true or false; default true")
    n: int | None = Field(None, description="an integer from 1 to 128")
    stream: bool | None = Field(None, description="true or false")
    stream_options: StreamOptions | None = Field(None, description="only together with stream: true")
    response_format: ResponseFormat | None = Field(None, description="the form the answer must have")
    regex: str | None = Field(None, description="a regular expression the whole answer matches")
    grammar: str | None = Field(None, description="a Lark grammar the whole answer follows")
    json_schema: str | dict[str, Any] | None = Field(None, description="a JSON schema, or its text")
    priority: int | None = Field(None, description="an integer; smaller runs earlier; default 0")
    user: str | None = Field(None, description="a string; has no effect")
    request_id: str | None = Field(None, min_length=1, max_length=128, description="1 to 128 characters")
    rid: str | None = Field(None, min_length=1, max_length=128, description="another name of request_id")
    include_metrics: bool | None = Field(None, description="true: the answer carries `metrics`")
    bootstrap_host: str | list[str] | None = Field(None, description="set by a router; needs --role")
    bootstrap_port: int | list[int] | None = Field(None, description="set by a router; needs --role")
    bootstrap_room: int | list[int] | None = Field(None, description="set by a router; needs --role; one a choice")

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, data: Any) -> Any:
        if isinstance(data, dict):
            return split_neutral(data, taken=frozenset(cls.model_fields))
        return data

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: Any) -> dict[str, Any]:
        described: dict[str, Any] = handler(core_schema)
        target = handler.resolve_ref_schema(described)
        for name, neutral in NEUTRAL.items():
            target.setdefault("properties", {}).setdefault(name, {"description": neutral.allowed})
        return described


class ChatRequest(Sampled):
    """Body of POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, description="a non-empty list of messages")
    max_completion_tokens: int | None = Field(None, description="an integer from 0; the newer name of max_tokens")
    logprobs: bool | None = Field(None, description="true or false")
    top_logprobs: int | None = Field(None, description="an integer from 0 to 20, together with logprobs: true")
    tools: list[Tool] | None = Field(None, description="a list of tools")
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = Field(
        None, description='"none", "auto", "required" or {"type": "function", "function": {"name": …}}'
    )
    parallel_tool_calls: bool | None = Field(None, description="true or false")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="an object; variables of the chat template")
    continue_final_message: bool | None = Field(None, description="true: the last message is continued")
    add_generation_prompt: bool | None = Field(None, description="true or false; default true")
    add_special_tokens: Literal[False] | None = Field(None, description="the template adds them; false")
    echo: Literal[False] | None = Field(None, description="only false is supported for chat")


class CompletionRequest(Sampled):
    """Body of POST /v1/completions."""

    prompt: str | list[str] | TokenIds | list[TokenIds] = Field(
        description="a string, a list of strings, a list of token ids, or a list of lists of token ids"
    )
    logprobs: int | None = Field(None, description="an integer from 0 to 20")
    echo: bool | None = Field(None, description="true: the answer begins with the prompt")
    add_special_tokens: bool | None = Field(None, description="true or false; default true")


class TokenizeRequest(Top):
    """Body of POST /tokenize: `prompt` (or `content`), or `messages`."""

    model: str | None = None
    prompt: str | None = Field(None, description="a string")
    content: str | None = Field(None, description="another name of prompt")
    messages: list[Message] | None = Field(None, description="a list of messages, to be put into the chat template")
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = Field(None, description="true or false; default true for a prompt")
    add_generation_prompt: bool | None = Field(None, description="true or false; default true")
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = Field(None, description="true: the tokens as text too")


class DetokenizeRequest(Top):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: TokenIds = Field(description="a list of token ids")
    skip_special_tokens: bool | None = Field(None, description="true or false; default false")


class AbortRequest(Top):
    """Body of POST /abort_request."""

    rid: str | None = Field(None, description="id of the request (the `id` of its answer)")
    request_id: str | None = Field(None, description="another name of rid")
    abort_all: bool | None = Field(None, description="true: every request in flight")
    abort_message: str | None = None


BODIES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/abort_request": AbortRequest,
}
