"""Tool calls: which format a model speaks, how a forced call is enforced, how tools reach a template without them.

Reading answers is `tool_parsers`; this module imports no grammar engine, it only writes the grammar's text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from octavo.api.tool_parsers import CallArguments, CallBegin, Content, Event, ToolParser, make_parser

__all__ = [
    "FORMATS",
    "CallArguments",
    "CallBegin",
    "Content",
    "Event",
    "ToolParser",
    "call_grammar",
    "detect_format",
    "inline_tools",
    "make_parser",
    "template_takes_tools",
]

FORMATS: Final = ("hermes", "llama3", "qwen3")
MAX_PARALLEL_CALLS: Final = 8
_JSON_GUIDE: Final = {"whitespace_pattern": r"[ \t\r\n]{1,32}"}  # bounded: see engine/grammar.py


def template_takes_tools(template: str | None) -> bool:
    """Whether a chat template does anything with `tools`."""
    return template is not None and "tools" in template


def detect_format(template: str | None) -> str:
    """The format a template teaches; "hermes" where it says nothing (then `inline_tools` teaches it)."""
    if not template_takes_tools(template) or template is None:
        return "hermes"
    if "<tool_call>" in template:
        return "qwen3" if "<think>" in template or "<function=" in template else "hermes"
    if '"parameters"' in template or "<|python_tag|>" in template or "ipython" in template:
        return "llama3"
    return "hermes"


def _quoted(text: str) -> str:
    """A Lark string literal."""
    return json.dumps(text)


def call_grammar(
    style: str, tools: Sequence[Mapping[str, Any]], *, name: str | None = None, parallel: bool = True
) -> str:
    """Lark text under which an answer is one call or (with `parallel`) up to eight of `tools`, arguments by schema.

    tools  in OpenAI's form; name: only this one, once (`tool_choice` names a function)
    """
    chosen = [t["function"] for t in tools if name is None or t["function"]["name"] == name]
    if not chosen:
        raise ValueError(f"no tool {name!r} to force")
    if style == "llama3":
        before, after, between = '{"name": %s, "parameters": ', "}", "; "
    else:
        before, after, between = '<tool_call>\n{"name": %s, "arguments": ', "}\n</tool_call>", "\n"
    more = f" ({_quoted(between)} call){{0,{MAX_PARALLEL_CALLS - 1}}}" if parallel and name is None else ""
    lines = [f"start: call{more}", "call: " + " | ".join(f"call_{i}" for i in range(len(chosen)))]
    for i, function in enumerate(chosen):
        # each schema is a root of its own, so that its "#/$defs/…" references hold
        schema = dict(function.get("parameters") or {"type": "object", "properties": {}})
        schema.setdefault("type", "object")
        schema.setdefault("x-guidance", _JSON_GUIDE)
        opening = before % json.dumps(function["name"], ensure_ascii=False)
        lines.append(f"call_{i}: {_quoted(opening)} args_{i} {_quoted(after)}")
        lines.append(f"args_{i}: %json {json.dumps(schema, ensure_ascii=False)}")
    return "\n".join(lines) + "\n"


_TEACH: Final = """You may call these functions to help the user. Their signatures, one JSON object a line:
<tools>
%s
</tools>
To call one, answer with its name and arguments as JSON inside tags, like this:
<tool_call>
{"name": "function_name", "arguments": {"argument": "value"}}
</tool_call>
Results come back inside <tool_response> tags."""


def inline_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
) -> list[dict[str, Any]]:
    """Messages for a template that knows no tools: they are taught in the system message, calls and results of
    earlier turns become text in the Hermes format. Contents are strings afterwards."""
    out: list[dict[str, Any]] = []
    for message in messages:
        content = _text(message.get("content"))
        if message["role"] == "tool":
            entry = {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
            if out and out[-1]["role"] == "user" and out[-1]["content"].startswith("<tool_response>"):
                out[-1]["content"] += "\n" + entry["content"]
                continue
        else:
            calls = [_call_text(call["function"]) for call in message.get("tool_calls") or []]
            entry = {"role": message["role"], "content": "\n".join([content] * bool(content or not calls) + calls)}
        out.append(entry)
    if tools:
        listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        taught = _TEACH % listed
        if out and out[0]["role"] in ("system", "developer"):
            out[0]["content"] = f"{out[0]['content']}\n\n{taught}".lstrip()
        else:
            out.insert(0, {"role": "system", "content": taught})
    return out


def _text(content: Any) -> str:
    if isinstance(content, str) or content is None:
        return content or ""
    return "".join(part.get("text", "") for part in content)


def _call_text(function: Mapping[str, Any]) -> str:
    arguments = function.get("arguments") or "{}"
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    name = json.dumps(function["name"], ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'
