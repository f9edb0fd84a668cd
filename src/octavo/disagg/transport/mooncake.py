"""Mooncake Transfer Engine: one-sided reads between processes and machines (tcp, or rdma where there is a device).

What was seen with version 0.3.13 over tcp, and what follows from it:
  - A call that fails may still write afterwards: with the peer stopped it returned -1 after 30 s and moved every byte
    when the peer went on. So a failure is never final here (`Status.UNKNOWN`); only the peer's end makes it so.
  - Every request of a batch costs a connection and large batches fail: pages that are contiguous on both sides are
    joined (`copies_of`), and a batch has at most `BATCH` requests.
  - A stopped peer holds a call for half a minute, or for a whole one before its first byte: each peer has a thread of
    its own.
  - It keeps what an address has told it, and its connections, for good: behind the same address another life of the
    server has its memory and its data port elsewhere, and every read of it fails. Both are told to end with each read
    (`_FRESH`; 0.5 ms a read on loopback).
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from octavo.disagg.protocol import Region
from octavo.disagg.transport.base import Copy, Status, Ticket
from octavo.errors import ConfigError

BATCH = 32
_FRESH = {"MC_DISABLE_METACACHE": "1", "MC_TCP_ENABLE_CONNECTION_POOL": "0"}
LONGEST_BYTES = 64 * 1024**2  # one request; longer runs are cut


class MooncakeTransport:
    """One endpoint of this process. Raises ConfigError where the library or its system libraries are missing."""

    kind = "mooncake"

    def __init__(self, host: str, protocol: str = "tcp", device: str = "") -> None:
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
        for name, value in _FRESH.items():
            os.environ.setdefault(name, value)
        try:
            from mooncake.engine import TransferEngine
        except ImportError as error:
            raise ConfigError(
                "transport", "mooncake",
                f"it cannot be loaded ({error}); pip install 'octavo[disagg]', and on Debian: libibverbs1 librdmacm1",
            ) from error  # fmt: skip
        self._engine: Any = TransferEngine()
        if self._engine.initialize(host, "P2PHANDSHAKE", protocol, device) != 0:
            raise ConfigError("transport_protocol", protocol, "Mooncake cannot start with it on this machine; try tcp")
        self._address = f"{host}:{self._engine.get_rpc_port()}"
        self._final: Callable[[], None] = lambda: None
        self._queues: dict[str, queue.SimpleQueue[tuple[Ticket, list[Copy]] | None]] = {}
        self._registered: list[int] = []

    @property
    def address(self) -> str:
        return self._address

    def register(self, regions: Sequence[Region]) -> None:
        for region in regions:
            size = region.page_bytes * region.pages
            if self._engine.register_memory(region.base, size) != 0:
                raise ConfigError("transport", "mooncake", f"it cannot register {size} bytes of KV pages")
            self._registered.append(region.base)

    def on_final(self, call: Callable[[], None]) -> None:
        self._final = call

    def read(self, peer: str, copies: Sequence[Copy]) -> Ticket:
        ticket = Ticket(peer, sum(c.size_bytes for c in copies))
        jobs = self._queues.get(peer)
        if jobs is None:
            jobs = self._queues[peer] = queue.SimpleQueue()
            threading.Thread(target=self._work, args=(jobs,), name=f"read-{peer}", daemon=True).start()
        jobs.put((ticket, list(copies)))
        return ticket

    def _work(self, jobs: queue.SimpleQueue[tuple[Ticket, list[Copy]] | None]) -> None:
        while True:
            job = jobs.get()
            if job is None:
                return
            ticket, copies = job
            try:
                self._perform(ticket, _cut(copies))
            except Exception as error:  # a fault of the library: what it was doing is unknown
                ticket.error, ticket.status = f"{type(error).__name__}: {error}", Status.UNKNOWN
            self._final()

    def _perform(self, ticket: Ticket, copies: list[Copy]) -> None:
        for first in range(0, len(copies), BATCH):
            part = copies[first : first + BATCH]
            started_s = time.monotonic()
            code = self._engine.batch_transfer_sync_read(
                ticket.peer, [c.target for c in part], [c.source for c in part], [c.size_bytes for c in part]
            )
            ticket.seconds += time.monotonic() - started_s
            if code != 0:
                ticket.error, ticket.status = f"Mooncake returned {code}", Status.UNKNOWN
                return
            ticket.moved_bytes += sum(c.size_bytes for c in part)
        ticket.status = Status.DONE

    def forget(self, peer: str) -> None:
        """The peer is gone for good, its address is of a former life: its thread ends when its last call returns."""
        jobs = self._queues.pop(peer, None)
        if jobs is not None:
            jobs.put(None)

    def close(self) -> None:
        for peer in list(self._queues):
            self.forget(peer)
        for base in self._registered:
            with contextlib.suppress(Exception):
                self._engine.unregister_memory(base)
        self._registered.clear()


def _cut(copies: list[Copy]) -> list[Copy]:
    out = []
    for copy in copies:
        for offset in range(0, copy.size_bytes, LONGEST_BYTES):
            size = min(LONGEST_BYTES, copy.size_bytes - offset)
            out.append(Copy(copy.target + offset, copy.source + offset, size))
    return out
