"""The road between two real servers, with a gate in it: messages can be lost or late, a read can be cut at a byte.

A decode server is told the road's port instead of the prefill server's. Control messages pass through a ZMQ relay,
which knows them; the address in `Welcome` is replaced, so that Mooncake's TCP connections come here too and their bytes
are counted. Both servers are the real ones and know nothing of it.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import zmq

from octavo.disagg import protocol as p

_HEADER_BYTES = 16  # incarnations of sender and receiver, before each message
_BUFFER_BYTES = 1 << 16


class DataRoad:
    """Relays the TCP connections of one Mooncake endpoint. Bytes towards the reader are counted and can be stopped."""

    def __init__(self, upstream: str) -> None:
        host, _, port = upstream.rpartition(":")
        self._rpc, self._data = (host, int(port)), ("", 0)
        self._moved = threading.Condition()
        self._limit: int | None = None
        self.passed_bytes = 0
        self._closed = False
        self._sockets: list[socket.socket] = []
        self._rpc_server, self._data_server = (socket.create_server(("127.0.0.1", 0)) for _ in range(2))
        self.rpc_port, self.data_port = (s.getsockname()[1] for s in (self._rpc_server, self._data_server))
        self.address = f"127.0.0.1:{self.rpc_port}"
        for server, handle in ((self._rpc_server, self._greet), (self._data_server, self._join)):
            threading.Thread(target=self._accept, args=(server, handle), daemon=True).start()

    def stop_after(self, more_bytes: int) -> None:
        """From now on `more_bytes` pass, and not one more."""
        with self._moved:
            self._limit = self.passed_bytes + more_bytes

    def go_on(self) -> None:
        with self._moved:
            self._limit = None
            self._moved.notify_all()

    @property
    def stands(self) -> bool:
        """Whether the gate has let through what it was told, and something waits behind it."""
        with self._moved:
            return self._limit is not None and self.passed_bytes == self._limit

    def close(self) -> None:
        with self._moved:
            self._closed = True
            self._moved.notify_all()
        for one in (self._rpc_server, self._data_server, *self._sockets):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self, server: socket.socket, handle: Callable[[socket.socket], None]) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = server.accept()
                self._sockets.append(client)
                threading.Thread(target=self._quietly, args=(handle, client), daemon=True).start()

    def _quietly(self, handle: Callable[[socket.socket], None], client: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError):
            handle(client)

    def _greet(self, client: socket.socket) -> None:
        """Handshakes: length, kind, JSON; in the answer the port of the data connections is replaced by ours."""
        with socket.create_connection(self._rpc) as real:
            while True:
                real.sendall(_frame(client))
                answer = _frame(real)
                document = json.loads(answer[9:])
                self._data = (document["tcp_data_host"], document["tcp_data_port"])
                document["tcp_data_port"], document["name"] = self.data_port, self.address
                body = answer[8:9] + json.dumps(document).encode()
                client.sendall(struct.pack("<Q", len(body)) + body)

    def _join(self, client: socket.socket) -> None:
        real = socket.socket()
        real.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)  # little is on its way at any time
        real.connect(self._data)
        self._sockets.append(real)
        threading.Thread(target=self._quietly, args=(lambda c: self._pump(c, real, counted=False), client),
                         daemon=True).start()
        self._pump(real, client, counted=True)

    def _pump(self, source: socket.socket, target: socket.socket, *, counted: bool) -> None:
        try:
            while data := source.recv(_BUFFER_BYTES):
                at = 0
                while at < len(data):
                    size = self._allowed(len(data) - at) if counted else len(data)
                    target.sendall(data[at : at + size])
                    at += size
        finally:
            for one in (source, target):
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    def _allowed(self, size: int) -> int:
        """How many of `size` bytes may pass now; waits until it is one at least."""
        with self._moved:
            while not self._closed and self._limit is not None and self.passed_bytes >= self._limit:
                self._moved.wait()
            if self._closed:
                raise EOFError
            size = size if self._limit is None else min(size, self._limit - self.passed_bytes)
            self.passed_bytes += size
            return size


class Road:
    """`port` is what decode servers are told. `lose`: which messages vanish; `keep`: which ones wait for `deliver`;
    `forge`: what a prefill server's message is replaced with."""

    def __init__(self, bootstrap_port: int) -> None:
        self.lose: Callable[[p.Message], bool] = lambda message: False
        self.keep: Callable[[p.Message], bool] = lambda message: False
        self.forge: Callable[[p.Message], p.Message] = lambda message: message
        self.kept: list[p.Message] = []
        self.data: DataRoad | None = None
        self._upstream = f"tcp://127.0.0.1:{bootstrap_port}"
        self._context: zmq.Context[Any] = zmq.Context(1)
        self._front = self._context.socket(zmq.ROUTER)
        self.port = self._front.bind_to_random_port("tcp://127.0.0.1")
        self._late: list[tuple[bytes, bytes]] = []
        self._deliver = self._stop = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def deliver(self) -> None:
        """What was kept back arrives now."""
        self._deliver = True

    @property
    def delivered(self) -> bool:
        return not self._deliver

    def close(self) -> None:
        """As when the machine at the other end dies: its port is closed, its connections end."""
        self._stop = True
        self._thread.join(5)
        if self.data is not None:
            self.data.close()

    def _run(self) -> None:
        backs: dict[bytes, Any] = {}
        poller = zmq.Poller()
        poller.register(self._front, zmq.POLLIN)
        while not self._stop:
            ready = dict(poller.poll(20))
            if self._deliver:
                for frames in self._late:
                    self._front.send_multipart(frames)
                self._late, self._deliver = [], False
            if self._front in ready:
                name, frame = self._front.recv_multipart()
                if name not in backs:
                    backs[name] = self._context.socket(zmq.DEALER)
                    backs[name].setsockopt(zmq.IDENTITY, name)
                    backs[name].connect(self._upstream)
                    poller.register(backs[name], zmq.POLLIN)
                if not self.lose(p.decoder.decode(frame[_HEADER_BYTES:])):
                    backs[name].send(frame)
            for name, back in backs.items():
                if back in ready:
                    self._bring(name, back.recv())
        self._context.destroy(linger=0)

    def _bring(self, name: bytes, frame: bytes) -> None:
        message = p.decoder.decode(frame[_HEADER_BYTES:])
        if self.lose(message):
            return
        if isinstance(message, p.Welcome):
            if self.data is None:
                self.data = DataRoad(message.address)
            message.address = self.data.address
        message = self.forge(message)
        frame = frame[:_HEADER_BYTES] + p.encoder.encode(message)
        if self.keep(message):
            self.kept.append(message)
            self._late.append((name, frame))
        else:
            self._front.send_multipart([name, frame])


@contextlib.contextmanager
def road(bootstrap_port: int) -> Iterator[Road]:
    built = Road(bootstrap_port)
    try:
        yield built
    finally:
        built.close()


def _frame(source: socket.socket) -> bytes:
    """One handshake frame with its length. Raises EOFError at its end."""
    head = _exactly(source, 8)
    return head + _exactly(source, struct.unpack("<Q", head)[0])


def _exactly(source: socket.socket, size: int) -> bytes:
    out = b""
    while len(out) < size:
        part = source.recv(size - len(out))
        if not part:
            raise EOFError
        out += part
    return out
