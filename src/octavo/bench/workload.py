"""What is timed: token ids of prompts, the same for every engine.

Two kinds. *depth*: a prompt of an exact number of tokens cut from a fixed text, each stream and repeat another
piece. *chat*: the prompts of a JSON-lines file through the model's chat template. Prefix caches are off, and the
prompts differ, so nothing is computed once and used twice.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError, UserError

CHAT_PROMPTS = "benchmarks/prompts/chat40.jsonl"
TURNS_EACH = 4  # chat prompts a stream answers one after the other, at least


@dataclass(frozen=True)
class Case:
    """One line of the table: `streams` requests at a time, the next one begins when one has ended; each has
    `output_tokens` forced tokens."""

    kind: str  # "depth" | "chat"
    streams: int
    prompt_tokens: int | None  # exact for depth; None: as long as the chat prompts are
    output_tokens: int
    temperature: float = 0.0

    @property
    def label(self) -> str:
        prompt = f"{self.prompt_tokens} tokens" if self.kind == "depth" else "chat prompts"
        heat = "" if self.temperature == 0 else f", T={self.temperature:g}"
        return f"{prompt} + {self.output_tokens}, {self.streams} stream{'s' if self.streams > 1 else ''}{heat}"


def source_text() -> str:
    """A long English text every Python brings: the help topics. Its hash is recorded with each result."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def read_text(path: str) -> str:
    """A text file of the user's. Raises UserError naming it."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--perplexity-text: {path}: {error}") from None
    if not text.strip():
        raise UserError(f"--perplexity-text: {path}: no text in it")
    return text


def text_sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class DepthPrompts:
    """Pieces of the source text of an exact length in tokens."""

    def __init__(self, encode: Callable[[str], Sequence[int]], count: int = 1) -> None:
        """`count`: groups of a repeat."""
        self.ids, self.count = list(encode(source_text())), count

    def groups(self, case: Case, repeat: int) -> list[list[list[int]]]:
        """Groups of `case.streams` prompts; every prompt of every repeat starts at a place of its own."""
        length, streams = case.prompt_tokens or 1, case.streams
        if length >= len(self.ids):
            raise ConfigError("--depth", length, f"allowed: below {len(self.ids)}, the length of the text")
        prompts = []
        for number in range(self.count * streams):
            begin = (7919 * (repeat * self.count * streams + number) + 104729 * length) % (len(self.ids) - length)
            prompts.append(self.ids[begin : begin + length])
        return [prompts[i : i + streams] for i in range(0, len(prompts), streams)]


class ChatPrompts:
    """All prompts of a JSON-lines file: one by one for one stream, else as one line that the streams take from, long
    enough for `TURNS_EACH` turns of every stream and full to the last turn. Every repeat is the same work."""

    def __init__(
        self, path: Path, encode_chat: Callable[[list[dict[str, str]]], Sequence[int]], limit: int | None
    ) -> None:
        entries = read_prompts(path)
        count = min(limit or len(entries), len(entries))
        self.entries = [entries[i * len(entries) // count] for i in range(count)]  # evenly, so from all categories
        self.ids = [list(encode_chat([{"role": "user", "content": entry["prompt"]}])) for entry in self.entries]

    def groups(self, case: Case, repeat: int) -> list[list[list[int]]]:
        if case.streams == 1:
            return [[ids] for ids in self.ids]
        turns = max(TURNS_EACH, -(-len(self.ids) // case.streams))
        return [[self.ids[i % len(self.ids)] for i in range(turns * case.streams)]]


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """Entries with `id`, `category`, `prompt`. Raises UserError naming file and line."""
    entries = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{path}, line {number}: not JSON ({error.msg})") from None
        if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str):
            raise UserError(f"{path}, line {number}: wants an object with a text field 'prompt'")
        entries.append(entry)
    if not entries:
        raise UserError(f"{path}: no prompts in it")
    return entries


def chat_prompts_path(given: str | None) -> Path:
    """The prompt file: the given one, or the checkout's own."""
    if given is not None:
        return Path(given)
    for folder in (Path.cwd(), Path(__file__).resolve().parents[3]):
        if (folder / CHAT_PROMPTS).is_file():
            return folder / CHAT_PROMPTS
    raise ConfigError("--prompts", given, f"no {CHAT_PROMPTS} here; name a JSON-lines file with a field 'prompt'")
