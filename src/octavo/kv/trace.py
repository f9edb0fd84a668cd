"""Recording every call of a ledger, as JSON lines, for `replay` and for reports of faults.

The first line holds the format version and the configuration, every other line one call:
`{"call": "extend", "row": 3, "upto": 512}`. Prompts are recorded as token ids: a trace holds what users wrote.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import numpy as np

from octavo.errors import ConfigError
from octavo.kv.books import LedgerConfig
from octavo.kv.replay import TraceError, replay_calls
from octavo.kv.tiers import TierConfig

FORMAT = 1
_LOG = logging.getLogger("octavo.trace")


class TraceWriter:
    """Give it to `Ledger(config, trace=TraceWriter(path))`; close it when the ledger is done.

    A disk that fills up ends the recording with a line in the log, not the work that is recorded.
    """

    def __init__(self, path: str | Path) -> None:
        """Raises `ConfigError` where the file cannot be opened."""
        self._path = path
        try:
            self._file: IO[str] | None = open(path, "w", encoding="utf-8")
        except OSError as error:
            raise ConfigError("record_trace", str(path), f"a file that can be written is needed ({error})") from None

    def begin(self, config: LedgerConfig) -> None:
        self._write({"octavo_trace": FORMAT, "config": asdict(config)})

    def record(self, call: str, **fields: Any) -> None:
        self._write({"call": call, **fields})

    def close(self) -> None:
        if self._file is not None:
            try:
                self._file.close()
            except OSError as error:
                self._give_up(error)
        self._file = None

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(line, default=_plain, separators=(",", ":")) + "\n")
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        file, self._file = self._file, None
        _LOG.error("%s: the trace ends here, incomplete (%s)", self._path, error.strerror)
        if file is not None:
            with suppress(OSError):
                file.close()


def _plain(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} in a trace")


def read_trace(path: str | Path) -> tuple[LedgerConfig, Iterator[dict[str, Any]]]:
    """The configuration and the calls of a trace. Raises `TraceError` naming file and line."""
    try:
        with open(path, encoding="utf-8") as file:
            lines = [_parsed(path, number, text) for number, text in enumerate(file, 1) if text.strip()]
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: not text ({error})") from error
    if not lines or lines[0].get("octavo_trace") != FORMAT:
        raise TraceError(f"{path}: not an Octavo KV trace of format {FORMAT}")
    try:
        given = lines[0]["config"]
        tiers = given.get("tiers")
        config = LedgerConfig(**given | {"tiers": tiers and TierConfig(**tiers)})
    except (KeyError, TypeError, AttributeError) as error:
        raise TraceError(f"{path}: the first line holds no configuration of this version ({error})") from error
    return config, iter(lines[1:])


def _parsed(path: str | Path, number: int, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise TraceError(f"{path}, line {number}: not JSON ({error})") from error
    if not isinstance(value, dict):
        raise TraceError(f"{path}, line {number}: not an object")
    return value


def replay(
    path: str | Path,
    *,
    page_size: int | None = None,
    num_pages: int | None = None,
    swa_pages: int | None = None,
    host_pages: int | None = None,
    evict_policy: str | Any | None = None,
) -> dict[str, Any]:
    """Run a trace again without a model, with other sizes or another eviction policy.

    host_pages     pages of the host tier, for a trace of books that have one
    evict_policy   `module:Class` or a policy object
    Returns what `replay_calls` returns: hits, preemptions, peak pages, tiers, violations. Raises `TraceError`,
    `ConfigError`.
    """
    config, calls = read_trace(path)
    return replay_calls(
        config, calls, page_size=page_size, num_pages=num_pages, swa_pages=swa_pages, host_pages=host_pages,
        evict_policy=evict_policy,
    )  # fmt: skip
