"""Stop strings in a stream of text: found across pieces, held back while partial.

The text is read character by character, so the result does not depend on how it was cut into tokens: the stop
that is complete first ends the answer; of several complete at the same character the longest one does (it
starts earliest, so nothing of any of them is shown).
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """One answer's matcher. `push` returns what may be shown; what could still become a stop is held."""

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._held = ""

    def push(self, text: str, *, enabled: bool = True) -> tuple[str, str | None]:
        """(text to show, stop string found or None). With `enabled` False (before min_tokens) stops that are
        complete inside this piece pass as text; one that has only begun may still be completed later."""
        if not self._stops or not text:
            return text, None
        buffer = self._held + text
        if enabled:
            found = self._first_complete(buffer, len(self._held))
            if found is not None:
                end, stop = found
                self._held = ""
                return buffer[: end if self._include_stop else end - len(stop)], stop
        held = self._partial_length(buffer)
        cut = len(buffer) - held
        self._held = buffer[cut:]
        return buffer[:cut], None

    def flush(self) -> str:
        """The answer ended otherwise: what was held is plain text."""
        held, self._held = self._held, ""
        return held

    def _first_complete(self, buffer: str, old_chars: int) -> tuple[int, str] | None:
        """(end, stop) of the stop complete first at a character after the first `old_chars`."""
        best: tuple[int, str] | None = None
        for stop in self._stops:
            at = buffer.find(stop, max(0, old_chars - len(stop) + 1))
            if at < 0:
                continue
            end = at + len(stop)
            if best is None or (end, -len(stop)) < (best[0], -len(best[1])):
                best = (end, stop)
        return best

    def _partial_length(self, buffer: str) -> int:
        """Length of the longest end of `buffer` that begins a stop without completing it."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(buffer)), longest, -1):
                if buffer.endswith(stop[:length]):
                    longest = length
                    break
        return longest
