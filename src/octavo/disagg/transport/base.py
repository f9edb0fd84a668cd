"""What a transport does: one-sided reads of a peer's registered memory into our own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple, Protocol

from octavo.disagg.protocol import Region


class Status(Enum):
    PENDING = "pending"
    DONE = "done"  # final: every byte is here
    FAILED = "failed"  # final: nothing will be written any more
    UNKNOWN = "unknown"  # given up, but bytes may still arrive: only the end of the peer makes it final


class Copy(NamedTuple):
    """Read `size_bytes` at the peer's address `source` to our address `target`."""

    target: int
    source: int
    size_bytes: int


class Ticket:
    """One read on its way. `status` is set once, by the transport, from any thread; `seconds` before that: how long
    the transport was at work on it, without the time in line."""

    __slots__ = ("error", "moved_bytes", "peer", "seconds", "size_bytes", "status")

    def __init__(self, peer: str, size_bytes: int) -> None:
        self.peer, self.size_bytes = peer, size_bytes
        self.status = Status.PENDING
        self.error = ""
        self.moved_bytes = 0
        self.seconds = 0.0


class Transport(Protocol):
    """Moves bytes between registered memories. Thread-safe; `read` never blocks."""

    kind: str

    @property
    def address(self) -> str:
        """Where peers read from us."""
        ...

    def register(self, regions: Sequence[Region]) -> None:
        """Make our pools readable and writable by transfers. Once, before anything else."""
        ...

    def read(self, peer: str, copies: Sequence[Copy]) -> Ticket:
        """Start reading from the transport address `peer`."""
        ...

    def on_final(self, call: Callable[[], None]) -> None:
        """`call` (from any thread) when a ticket leaves `PENDING`."""
        ...

    def forget(self, peer: str) -> None:
        """Nothing will be read from the transport address `peer` any more; what is on its way goes on. Idempotent."""
        ...

    def close(self) -> None: ...


def copies_of(local: Region, remote: Region, targets: Sequence[int], sources: Sequence[int]) -> list[Copy]:
    """Copies for (source page, target page) pairs. Runs that are contiguous on both sides become one copy."""
    size = local.page_bytes
    out: list[Copy] = []
    for target, source in zip(targets, sources, strict=True):
        to, at = local.base + target * size, remote.base + source * size
        if out and out[-1].target + out[-1].size_bytes == to and out[-1].source + out[-1].size_bytes == at:
            out[-1] = Copy(out[-1].target, out[-1].source, out[-1].size_bytes + size)
        else:
            out.append(Copy(to, at, size))
    return out
