"""Tokens per second over the last seconds, for the log line and the KV page."""

from __future__ import annotations

import time
from collections import deque


class Rates:
    """Counts tokens in slots of one second; keeps `window_s` of them."""

    def __init__(self, window_s: int = 10) -> None:
        self._slots: deque[tuple[int, int]] = deque(maxlen=window_s + 1)
        self._window_s = window_s
        self.total_tokens = 0

    def tokens(self, count: int, now_s: float) -> None:
        """`count` tokens arrived at `now_s` (monotonic)."""
        self.total_tokens += count
        slot = int(now_s)
        if self._slots and self._slots[-1][0] == slot:
            self._slots[-1] = (slot, self._slots[-1][1] + count)
        else:
            self._slots.append((slot, count))

    def per_second(self, now_s: float | None = None, window_s: int | None = None) -> float:
        """Mean rate over the last `window_s` whole seconds."""
        now = int(time.monotonic() if now_s is None else now_s)
        window = self._window_s if window_s is None else window_s
        return sum(n for slot, n in self._slots if now - window <= slot < now) / window
