"""Answers with tool calls, read as they stream. What comes out does not depend on how the text was cut.

    hermes  text … <tool_call>\n{"name": …, "arguments": {…}}\n</tool_call> …
    qwen3   the same; what stands in <think> … </think> is text; a call may also be written
            <tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>
    llama3  the whole answer is {"name": …, "parameters": {…}}, several joined by "; "

Text that looked like a call and turns out not to be one is handed on as text, unchanged.
"""

from __future__ import annotations

import itertools
import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from octavo.api.tool_scan import CallScanner

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_THINK, _END_THINK = "<think>", "</think>"
_FUNCTION = re.compile(r"\s*<function=([^>\s]+)\s*>(.*?)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)\s*>\n?(.*?)\n?</parameter>", re.DOTALL)
_PYTHON_TAG = "<|python_tag|>"


@dataclass(frozen=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True)
class CallBegin:
    """A call of tool `name` begins; `index` counts the answer's calls from 0."""

    index: int
    name: str
    id: str


@dataclass(frozen=True)
class CallArguments:
    """More of the JSON text of call `index`'s arguments."""

    index: int
    text: str


Event = Content | CallBegin | CallArguments


class ToolParser(Protocol):
    """One answer's reader: `push` every piece of text, `finish` once."""

    def push(self, text: str) -> list[Event]: ...

    def finish(self) -> list[Event]: ...


class _Parser:
    """What the formats share: events of one push are gathered and neighbours merged."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._schemas = {t["function"]["name"]: t["function"].get("parameters") or {} for t in tools}
        self._events: list[Event] = []
        self._calls = 0
        self._scanner = CallScanner()
        self._begun = False  # the current call's begin has been handed out

    def push(self, text: str) -> list[Event]:
        for char in text:
            self._read(char)
        return self._take()

    def finish(self) -> list[Event]:
        self._end()
        return self._take()

    def _read(self, char: str) -> None:
        raise NotImplementedError

    def _end(self) -> None:
        raise NotImplementedError

    def _take(self) -> list[Event]:
        """The gathered events, neighbours of one kind merged."""
        merged: list[Event] = []
        for kind, group in itertools.groupby(self._events, key=lambda e: (type(e), getattr(e, "index", 0))):
            events = list(group)
            if kind[0] is Content:
                merged.append(Content("".join(e.text for e in events if isinstance(e, Content))))
            elif kind[0] is CallArguments:
                text = "".join(e.text for e in events if isinstance(e, CallArguments))
                merged.append(CallArguments(kind[1], text))
            else:
                merged.extend(events)
        self._events.clear()
        return merged

    def _content(self, text: str, /) -> None:
        if text:
            self._events.append(Content(text))

    def _arguments(self, text: str, /) -> None:
        if text:
            self._events.append(CallArguments(self._calls - 1, text))

    def _begin(self, name: str) -> None:
        self._events.append(CallBegin(self._calls, name, f"call_{uuid.uuid4().hex[:24]}"))
        self._calls += 1
        self._begun = True

    def _new_scan(self, names: frozenset[str] | None = None) -> None:
        self._scanner = CallScanner(names)
        self._begun = False

    def _scan(self, char: str) -> None:
        """Feed the scanner and hand out what it makes certain."""
        scanner = self._scanner
        scanner.feed(char)
        if scanner.broken or scanner.name is None:
            return
        if not self._begun:
            self._begin(scanner.name)
        self._arguments(scanner.take())


class HermesParser(_Parser):
    """`<tool_call>` tags. With `thinking`, the first <think> … </think> is text, whatever stands in it."""

    def __init__(self, tools: Sequence[Mapping[str, Any]], *, thinking: bool = False) -> None:
        super().__init__(tools)
        self._thinking = thinking
        self._space: list[str] = []  # white space in front of what may be a tag: dropped if it opens a call
        self._tag = ""  # the beginning of what may be a tag
        self._body: list[str] = []  # what came since <tool_call>
        self._first = ""  # its first character that is not white space
        self._state = self._text

    def _read(self, char: str) -> None:
        self._state(char)

    def _text(self, char: str) -> None:
        if not self._tag and char.isspace():
            self._space.append(char)
            return
        self._tag += char
        if self._tag == _OPEN:
            self._tag, self._body, self._first = "", [], ""
            self._new_scan()
            self._state = self._call_body
        elif self._tag == _THINK and self._thinking:
            self._release()
            self._thinking = False
            self._state = self._think
        elif not _OPEN.startswith(self._tag) and not (self._thinking and _THINK.startswith(self._tag)):
            self._not_a_tag(char)

    def _not_a_tag(self, char: str) -> None:
        """Hand out what is text for certain; the last character may begin a tag or the space before one."""
        self._thinking = False  # thinking comes first or not at all
        keep = char == "<" or char.isspace()
        self._tag = self._tag[:-1] if keep else self._tag
        shown = self._tag.rstrip()
        space = self._tag[len(shown) :]
        self._tag = shown
        self._release()
        self._space.extend(space)
        if keep:
            self._text(char)

    def _release(self) -> None:
        self._content("".join(self._space) + self._tag)
        self._space, self._tag = [], ""

    def _think(self, char: str) -> None:
        self._content(char)
        self._tag = (self._tag + char)[-len(_END_THINK) :]
        if self._tag == _END_THINK:
            self._tag = ""
            self._state = self._text

    def _call_body(self, char: str) -> None:
        self._body.append(char)
        self._first = self._first or char.strip()
        if self._first == "<":
            self._xml_body(char)
            return
        self._scan(char)
        if self._scanner.done:
            self._space = []
            self._state = self._after_call
        elif self._scanner.broken:
            self._malformed()

    def _malformed(self) -> None:
        """Not a call: text again, or, behind a begun call, arguments up to the closing tag."""
        if self._begun:
            self._space, self._tag = [], self._body[-1]
            self._state = self._raw_arguments
            return
        body = "".join(self._body)
        at = body.rfind("<", max(0, len(body) - len(_OPEN)))  # another tag may have begun here
        at = at if at >= 0 else len(body) - 1
        self._tag = _OPEN + body[:at]
        self._release()
        self._state = self._text
        for char in body[at:]:
            self._read(char)

    def _raw_arguments(self, char: str) -> None:
        self._tag += char
        if self._tag.endswith(_CLOSE):
            self._arguments(self._tag[: -len(_CLOSE)].rstrip())
            self._tag = ""
            self._state = self._text
        elif len(self._tag) > 64:  # far more than a tag and some white space
            self._arguments(self._tag[:32])
            self._tag = self._tag[32:]

    def _xml_body(self, char: str) -> None:
        if len(self._body) < 64 and not "<function=".startswith("".join(self._body).strip()[:10]):
            self._malformed()
        elif char == ">" and "".join(self._body[-len(_CLOSE) :]) == _CLOSE:
            match = _FUNCTION.fullmatch("".join(self._body[: -len(_CLOSE)]))
            if match is None:
                self._malformed()
                return
            self._space = []
            self._begin(match.group(1))
            self._arguments(self._xml_arguments(match.group(1), match.group(2)))
            self._state = self._text

    def _xml_arguments(self, name: str, inner: str) -> str:
        properties = self._schemas.get(name, {}).get("properties", {})
        values: dict[str, Any] = {}
        for key, text in _PARAMETER.findall(inner):
            schema = properties.get(key, {})
            values[key] = text
            if not (isinstance(schema, dict) and schema.get("type") == "string"):
                try:
                    values[key] = json.loads(text)
                except (ValueError, RecursionError):
                    pass  # what is not JSON stays text
        return json.dumps(values, ensure_ascii=False)

    def _after_call(self, char: str) -> None:
        """White space and the closing tag; a model that forgets it goes on with text."""
        if not self._tag and char.isspace():
            self._space.append(char)
            return
        self._tag += char
        if self._tag == _CLOSE:
            self._space, self._tag = [], ""
            self._state = self._text
        elif not _CLOSE.startswith(self._tag):
            again, self._tag = self._tag, ""
            self._state = self._text
            for c in again:
                self._read(c)

    def _end(self) -> None:
        if self._state == self._call_body and not self._begun:
            self._tag = _OPEN + "".join(self._body)
            self._release()
        elif self._state == self._raw_arguments:
            self._arguments(self._tag)
        elif self._state == self._text and (self._tag or not self._calls):
            self._release()
        self._space, self._tag, self._body = [], "", []
        self._state = self._text


class LlamaParser(_Parser):
    """Llama 3.1: the answer is one JSON call or several joined by ";". Names outside the tools are text."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(tools)
        self._names = frozenset(self._schemas)
        self._raw: list[str] = []  # since the beginning of the answer or of the current call
        self._lead = ""  # of that, what is not white space, before the "{"
        self._state: Callable[[str], None] = self._start

    def _read(self, char: str) -> None:
        self._state(char)

    def _start(self, char: str) -> None:
        """White space, the optional tag, then "{" (behind a call also ";")."""
        self._raw.append(char)
        self._lead += char.strip()
        lead = self._lead.removeprefix(";") if self._calls else self._lead
        if _PYTHON_TAG.startswith(lead):
            return
        if lead.removeprefix(_PYTHON_TAG) == "{":
            self._new_scan(self._names)
            self._state = self._call
            self._scan(char)
        else:
            self._plain()

    def _call(self, char: str) -> None:
        self._raw.append(char)
        self._scan(char)
        if self._scanner.done:
            self._raw, self._lead = [], ""
            self._state = self._start
        elif self._scanner.broken:
            if self._begun:
                self._arguments(char)
                self._state = self._arguments
            else:
                self._plain()

    def _plain(self) -> None:
        self._content("".join(self._raw))
        self._raw = []
        self._state = self._content

    def _end(self) -> None:
        if self._state == self._start and self._calls and self._lead in ("", ";"):
            self._raw = []  # what stands behind the last call
        if not (self._state == self._call and self._begun):
            self._content("".join(self._raw))
        self._raw = []


def make_parser(style: str, tools: Sequence[Mapping[str, Any]]) -> ToolParser:
    """Parser of a format ("hermes", "qwen3", "llama3") for tools in OpenAI's form."""
    if style == "llama3":
        return LlamaParser(tools)
    if style in ("hermes", "qwen3"):
        return HermesParser(tools, thinking=style == "qwen3")
    raise ValueError(f"tool format {style!r}; hermes, qwen3 and llama3 are known")
