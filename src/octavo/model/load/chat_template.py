"""Chat templates: Jinja in an immutable sandbox, with the helpers that templates on the hub expect.

A template is data from strangers: it can read the messages and build a string, nothing else.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from ...errors import ModelError, RequestError

NO_TEMPLATE = (
    "the model has no chat template (it may be a base model); pass one with --chat-template FILE (a Jinja file), "
    "or send a plain prompt instead"
)
MAX_REPEAT = 1000
_END_MARK = "\x02octavo-end-of-final-message\x03"


def _raise_exception(message: str) -> None:
    import jinja2

    raise jinja2.exceptions.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML; a prompt wants the characters themselves.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


@lru_cache(maxsize=1)
def _environment() -> Any:
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}…{% endgeneration %}` marks what the assistant said for training; here it is only text."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    class Sandbox(ImmutableSandboxedEnvironment):
        """Also refuses to build enormous values out of small ones."""

        intercepted_binops = frozenset({"*", "**"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if operator == "**" or not (isinstance(left, int | float) and isinstance(right, int | float)):
                size = right if isinstance(right, int) else left
                if isinstance(size, int) and abs(size) > MAX_REPEAT:
                    raise ValueError(f"{operator} with {size} is more than a prompt can need (up to {MAX_REPEAT})")
            return super().call_binop(context, operator, left, right)

    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


@lru_cache(maxsize=32)
def _compile(template: str) -> Any:
    import jinja2

    try:
        return _environment().from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise ModelError(f"chat template, line {error.lineno}: {error.message}") from None


def check_template(template: str) -> None:
    """Raise `ModelError` if the text is not a Jinja template."""
    _compile(template)


def render_chat(
    template: str | None,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """The prompt for a conversation.

    With `continue_final_message` the text ends inside the last message, open to be continued, and no generation
    prompt is added. Raises `RequestError`: no template, bad messages, or what the template itself refuses.
    """
    if template is None:
        raise RequestError(NO_TEMPLATE, param="messages", code="no_chat_template")
    compiled = _compile(template)
    prepared = [_prepare(index, message) for index, message in enumerate(messages)]
    if not prepared:
        raise RequestError("messages: got []; at least one message is needed", param="messages")
    if continue_final_message:
        final = prepared[-1].get("content")
        if not isinstance(final, str):
            raise RequestError("continue_final_message: the last message has no text to continue", param="messages")
        prepared[-1]["content"] = final + _END_MARK
    try:
        text = compiled.render(
            messages=prepared,
            tools=[dict(tool) for tool in tools] if tools else None,
            documents=None,
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            **dict(variables or {}),
        )
    except Exception as error:  # a template is code: it can fail in any way
        raise RequestError(f"chat template: {error or type(error).__name__}", param="messages") from None
    return _cut(text) if continue_final_message else text


def _cut(text: str) -> str:
    head, mark, _ = text.rpartition(_END_MARK)
    if not mark:
        raise RequestError(
            "continue_final_message: the chat template does not show the last message unchanged",
            param="continue_final_message",
        )
    return head


def _prepare(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(
            f"messages[{index}]: got {message!r}; an object with a role is needed", param=f"messages[{index}]"
        )
    out = dict(message)
    content = out.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        out["content"] = "\n".join(_part(index, number, part) for number, part in enumerate(content))
    elif content is not None and not isinstance(content, str):
        raise RequestError(
            f"messages[{index}].content: got {content!r}; a string, or a list of parts of type 'text', is allowed",
            param=f"messages[{index}].content",
        )
    return out


def _part(index: int, number: int, part: Any) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else part
    raise RequestError(
        f"messages[{index}].content[{number}]: got {kind!r}; only parts of type 'text' are read",
        param=f"messages[{index}].content",
    )
