"""What happened to transfers: results by cause, bytes, seconds. Feeds metrics and `/kv.json`."""

from __future__ import annotations

from typing import Any


class TransferTally:
    def __init__(self) -> None:
        self.results: dict[str, int] = dict.fromkeys(("done", "failed", "aborted"), 0)
        self.bytes = 0
        self.seconds = 0.0
        self.skipped_bytes = 0  # sliding-window pages before the tail, and prefixes that were here already

    def count(self, result: str) -> None:
        self.results[result] = self.results.get(result, 0) + 1

    def moved(self, size_bytes: int, seconds: float) -> None:
        self.bytes += size_bytes
        self.seconds += seconds

    def snapshot(self) -> dict[str, Any]:
        """JSON-able."""
        return {"results": dict(self.results), "bytes": self.bytes, "seconds": round(self.seconds, 6),
                "skipped_bytes": self.skipped_bytes}
