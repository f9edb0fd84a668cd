"""Tool calls of a chat request: what the template sees, what the grammar enforces, how the answer is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.api.schema import NamedTool
from octavo.api.tools import CallArguments, CallBegin, Event, ToolParser, call_grammar, detect_format, make_parser
from octavo.errors import RequestError

if TYPE_CHECKING:
    from octavo.api.schema import ChatRequest
    from octavo.model.load.tokenizer import Tokenizer


class ToolReader:
    """Turns one answer's text into content and tool calls, delta by delta. Without a parser all of it is content."""

    def __init__(self, parser: ToolParser | None, *, parallel: bool = True) -> None:
        self._parser = parser
        self._most_calls = 128 if parallel else 1
        self.text = ""
        self._content: list[str] = []
        self._calls: list[dict[str, Any]] = []

    def push(self, text: str) -> list[dict[str, Any]]:
        """The parts of chat deltas that `text` gives rise to."""
        self.text += text
        if not text:
            return []
        if self._parser is None:
            self._content.append(text)
            return [{"content": text}]
        return self._take(self._parser.push(text))

    def finish(self) -> list[dict[str, Any]]:
        """What was held back; call it once, at the end of the answer."""
        return self._take(self._parser.finish()) if self._parser is not None else []

    def _take(self, events: list[Event]) -> list[dict[str, Any]]:
        parts: list[dict[str, Any]] = []
        for event in events:
            if isinstance(event, CallBegin):
                if event.index >= self._most_calls:
                    continue  # parallel_tool_calls: false; the client asked for one
                function = {"name": event.name, "arguments": ""}
                self._calls.append({"id": event.id, "type": "function", "function": function})
                shown = {"index": event.index, "id": event.id, "type": "function", "function": dict(function)}
                parts.append({"tool_calls": [shown]})
            elif isinstance(event, CallArguments):
                if event.index >= self._most_calls:
                    continue
                self._calls[event.index]["function"]["arguments"] += event.text
                parts.append({"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]})
            else:
                self._content.append(event.text)
                parts.append({"content": event.text})
        return parts

    def message(self) -> dict[str, Any]:
        """The whole message, once finished."""
        content = "".join(self._content)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self._calls:
            message["content"] = content.strip() or None
            message["tool_calls"] = self._calls
        return message

    def finish_reason(self, reason: str | None) -> str | None:
        """ "tool_calls" where the answer ended by itself with calls in it."""
        return "tool_calls" if reason == "stop" and self._calls else reason


@dataclass(frozen=True)
class ToolPlan:
    """Decided before the prompt is made: tools the prompt shows, the grammar of a forced call, how to read answers."""

    shown: list[dict[str, Any]] | None = None
    constraint: dict[str, Any] | None = None
    style: str | None = None
    parallel: bool = True

    def reader(self) -> ToolReader:
        """A reader for one choice."""
        parser = make_parser(self.style, self.shown or []) if self.style is not None else None
        return ToolReader(parser, parallel=self.parallel)


def plan_tools(body: ChatRequest, tokenizer: Tokenizer) -> ToolPlan:
    """What `tools` and `tool_choice` come to. Raises `RequestError` where they contradict each other."""
    choice = body.tool_choice
    if not body.tools:
        if choice is not None and choice not in ("none", "auto"):
            raise RequestError("tool_choice: it needs tools", param="tool_choice")
        return ToolPlan()
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools]
    names = [tool["function"]["name"] for tool in tools]
    twice = next((name for i, name in enumerate(names) if name in names[:i]), None)
    if twice is not None:
        raise RequestError(f"tools: there are two tools named {twice!r}", param="tools")
    if choice == "none":
        return ToolPlan()  # the model is not told of what it may not use
    style = detect_format(tokenizer.chat_template)
    parallel = body.parallel_tool_calls is not False
    if choice is None or choice == "auto":
        return ToolPlan(tools, None, style, parallel)
    name = choice.function.name if isinstance(choice, NamedTool) else None
    if name is not None and name not in names:
        raise RequestError(f"tool_choice: there is no tool {name!r}; tools: {', '.join(names)}", param="tool_choice")
    return ToolPlan(tools, {"grammar": call_grammar(style, tools, name=name, parallel=parallel)}, style, parallel)
