"""Tool calls of a chat request: what the template sees, what the grammar enforces, how the answer is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.api.schema import NamedTool
from octavo.errors import RequestError

if TYPE_CHECKING:
    from octavo.api.schema import ChatRequest
    from octavo.model.load.tokenizer import Tokenizer


class ToolReader:
    """Turns an answer's text into content and tool calls, delta by delta."""

    def __init__(self, parser: Any | None) -> None:
        self._parser = parser
        self.text = ""
        self._content: list[str] = []

    def push(self, text: str) -> list[dict[str, Any]]:
        """The parts of chat deltas that `text` gives rise to."""
        self.text += text
        if not text:
            return []
        self._content.append(text)
        return [{"content": text}]

    def finish(self) -> list[dict[str, Any]]:
        return []

    def message(self) -> dict[str, Any]:
        """The whole message, once finished."""
        return {"role": "assistant", "content": "".join(self._content), "refusal": None}

    def finish_reason(self, reason: str | None) -> str | None:
        return reason


@dataclass(frozen=True)
class ToolPlan:
    """Decided before the prompt is made."""

    for_template: list[dict[str, Any]] | None
    constraint: dict[str, Any] | None
    make_parser: Callable[[], Any] | None

    def reader(self) -> ToolReader:
        return ToolReader(self.make_parser() if self.make_parser is not None else None)


def plan_tools(body: ChatRequest, tokenizer: Tokenizer) -> ToolPlan:
    """What `tools` and `tool_choice` come to. Raises `RequestError` where they contradict each other."""
    tools = body.tools or []
    choice = body.tool_choice
    if not tools:
        if choice is not None and choice not in ("none", "auto"):
            raise RequestError("tool_choice: it needs tools", param="tool_choice")
        return ToolPlan(None, None, None)
    names = [tool.function.name for tool in tools]
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise RequestError(f"tool_choice: there is no tool {choice.function.name!r}; tools: {', '.join(names)}",
                           param="tool_choice")
    return ToolPlan([tool.model_dump(exclude_none=True) for tool in tools], None, None)
