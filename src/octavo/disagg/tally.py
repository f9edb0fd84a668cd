"""What happened to transfers: results, failures by cause, bytes, seconds. Feeds metrics and `/kv.json`."""

from __future__ import annotations

from typing import Any

from octavo.disagg.failures import CAUSES, cause_of, result_of
from octavo.errors import OctavoError


class TransferTally:
    def __init__(self) -> None:
        self.results: dict[str, int] = dict.fromkeys(("done", "failed", "aborted"), 0)
        self.failures: dict[str, int] = dict.fromkeys(CAUSES, 0)
        self.bytes = 0
        self.seconds = 0.0  # of rooms, from the lease of their pages to their landing: the prompt's computation too
        self.read_seconds = 0.0  # in calls of the transport
        self.behind_seconds = 0.0  # from the news that the prompt is computed to the landing: what a transfer adds
        self.skipped_bytes = 0  # sliding-window pages before the tail, and prefixes that were here already

    def count(self, result: str) -> None:
        self.results[result] = self.results.get(result, 0) + 1

    def lost(self, reason: str, error: OctavoError | None) -> None:
        """A room ended and was not handed over."""
        self.count(result_of(reason, error))
        if reason != "abort":
            self.failures[cause_of(error)] += 1

    def moved(self, size_bytes: int, seconds: float, read_seconds: float, behind_seconds: float) -> None:
        """A room has landed."""
        self.count("done")
        self.bytes += size_bytes
        self.seconds += seconds
        self.read_seconds += read_seconds
        self.behind_seconds += behind_seconds

    def snapshot(self) -> dict[str, Any]:
        """JSON-able."""
        return {"results": dict(self.results), "failures": {c: n for c, n in self.failures.items() if n},
                "bytes": self.bytes, "seconds": round(self.seconds, 6), "read_seconds": round(self.read_seconds, 6),
                "behind_seconds": round(self.behind_seconds, 6), "skipped_bytes": self.skipped_bytes}
