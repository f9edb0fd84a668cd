"""Transport inside one process: memory copies, with every fault a network can have, on command.

Faults are set on the `Wire`, which all transports of a process share:

    hold        reads stay pending; `release` performs them later (a late write)
    fail_after  so many copies of all reads succeed, every later one fails; nothing is written afterwards
    lose        the read never says how it ended; `release` still performs it
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

from octavo.disagg.protocol import Region
from octavo.disagg.transport.base import Copy, Status, Ticket


class Wire:
    """What connects the transports of one process, and what is wrong with it."""

    def __init__(self) -> None:
        self.hold = False
        self.lose = False
        self.fail_after: int | None = None
        self.reads = 0
        self.copied = 0
        self.regions: list[Region] = []  # of every transport: what can be read
        self._held: list[tuple[Ticket, Sequence[Copy], Callable[[], None]]] = []

    @property
    def held(self) -> int:
        return len(self._held)

    def start(self, ticket: Ticket, copies: Sequence[Copy], final: Callable[[], None]) -> None:
        self.reads += 1
        if self.hold or self.lose:
            if self.lose:
                ticket.status, ticket.error = Status.UNKNOWN, "no progress"
            self._held.append((ticket, copies, final))
            if self.lose:
                final()
            return
        self._perform(ticket, copies, final)

    def release(self) -> int:
        """Perform every read that was held back: the late writes. Returns how many there were."""
        held, self._held = self._held, []
        for ticket, copies, final in held:
            self._perform(ticket, copies, final)
        return len(held)

    def _perform(self, ticket: Ticket, copies: Sequence[Copy], final: Callable[[], None]) -> None:
        for copy in copies:
            if self.fail_after is not None and self.copied >= self.fail_after:
                ticket.error = f"failed behind {self.copied} copies"
                ticket.status = Status.FAILED
                final()
                return
            if not _inside(self.regions, copy.source, copy.size_bytes):
                ticket.error = f"address {copy.source:#x} (+{copy.size_bytes}) is nobody's"
                ticket.status = Status.FAILED
                final()
                return
            ctypes.memmove(copy.target, copy.source, copy.size_bytes)
            ticket.moved_bytes += copy.size_bytes
            self.copied += 1
        if ticket.status is Status.PENDING:
            ticket.status = Status.DONE
        final()


class InProcessTransport:
    """One end of a `Wire`. Addresses are plain addresses of this process."""

    kind = "inprocess"

    def __init__(self, wire: Wire, name: str) -> None:
        self._wire, self._name = wire, name
        self._final: Callable[[], None] = lambda: None
        self._regions: list[Region] = []
        self.forgotten: list[str] = []

    @property
    def address(self) -> str:
        return self._name

    def register(self, regions: Sequence[Region]) -> None:
        self._regions.extend(regions)
        self._wire.regions.extend(regions)

    def on_final(self, call: Callable[[], None]) -> None:
        self._final = call

    def read(self, peer: str, copies: Sequence[Copy]) -> Ticket:
        for copy in copies:  # one-sided reads write into our own registered memory only
            if not _inside(self._regions, copy.target, copy.size_bytes):
                raise ValueError(f"address {copy.target:#x} (+{copy.size_bytes}) is not registered")
        ticket = Ticket(peer, sum(c.size_bytes for c in copies))
        self._wire.start(ticket, copies, self._final)
        return ticket

    def forget(self, peer: str) -> None:
        self.forgotten.append(peer)

    def close(self) -> None:
        """Nothing to close: reads that are held stay with the wire."""


def _inside(regions: Sequence[Region], address: int, size_bytes: int) -> bool:
    return any(r.base <= address and address + size_bytes <= r.base + r.page_bytes * r.pages for r in regions)
