"""The control connection between processes: ZMQ sockets on a thread of their own, msgpack messages, a beat a second.

A prefill server binds one ROUTER socket (its bootstrap address); a decode server opens one DEALER for each prefill
server. Each message carries who sent it (an *incarnation*: one life of one process) and whom it is for, so that
nothing meant for a former life of a peer is taken up by the next one. Two missed beats and a peer is down.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from octavo.disagg.hub import Quick, no_quick
from octavo.disagg.protocol import Beat, Hello, Message, PeerDown, decoder, encoder
from octavo.errors import ConfigError

BEAT_S = 1.0
SILENT_S = 2 * BEAT_S + 0.5  # two beats missed, and half a second for a busy machine
LATE_BEATS = 0.25  # who looks so much too late was stopped, perhaps the whole machine was: no silence of others
CONNECT_S = 3.0  # until the first sign of life of a server that was greeted
SUSPECT_S = 120.0  # so long a silent server's port is looked at once a beat
_HEADER = struct.Struct("<QQ")  # incarnation of the sender, of the receiver (0: not known yet)


@dataclass
class _Peer:
    incarnation: int
    heard_s: float
    socket: Any = None  # the DEALER, on the decode side
    reached: bool = False


class ZmqHub:
    """See the module. `bind`: address to listen on (prefill side), None on the decode side."""

    def __init__(self, bind: tuple[str, int] | None) -> None:
        self.quick: Quick = no_quick
        self.wake: Callable[[], None] = lambda: None
        self.incarnation = secrets.randbits(63) | 1
        self._context: zmq.Context[Any] = zmq.Context(1)
        self._mail: deque[tuple[str, Message | PeerDown]] = deque()
        self._out: deque[tuple[str, Message]] = deque()
        self._peers: dict[str, _Peer] = {}
        self._suspects: dict[str, float] = {}  # silent, not known to be dead -> until when that is looked into
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._stop = False
        self._router: Any = None
        self._poller = zmq.Poller()
        self._poller.register(self._read, zmq.POLLIN)
        if bind is not None:
            self._router = self._context.socket(zmq.ROUTER)
            self._router.setsockopt(zmq.LINGER, 0)
            try:
                self._router.bind(f"tcp://{_literal(bind[0])}:{bind[1]}")
            except zmq.ZMQError as error:
                self._context.destroy(linger=0)
                allowed = f"a free port is needed; it cannot be listened on at {bind[0]}: {error}"
                raise ConfigError("bootstrap_port", bind[1], allowed) from None
            self._poller.register(self._router, zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)
        self._thread.start()

    # -- the engine's loop ---------------------------------------------------------------------------------------

    def send(self, peer: str, message: Message) -> None:
        self._out.append((peer, message))
        self._nudge()

    def receive(self) -> list[tuple[str, Message | PeerDown]]:
        got = []
        while self._mail:
            got.append(self._mail.popleft())
        return got

    def has_mail(self) -> bool:
        return bool(self._mail)

    def close(self) -> None:
        """Say what is still to be said, then stop the thread."""
        self._stop = True
        self._nudge()
        self._thread.join(5.0)

    def _nudge(self) -> None:
        try:
            os.write(self._write, b"x")
        except BlockingIOError:
            pass  # the pipe is full: the thread is awake

    # -- the hub's thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        beat_s = time.monotonic()
        while True:
            ready = dict(self._poller.poll(int(1000 * max(0.0, beat_s - time.monotonic()))))
            if self._read in ready:
                os.read(self._read, 4096)
            while self._out:
                self._dispatch(*self._out.popleft())
            for source in ready:
                if not isinstance(source, int):
                    self._drain(source)
            now = time.monotonic()
            if now >= beat_s:
                late_s = now - beat_s
                beat_s = now + BEAT_S
                self._beat(now, late_s)
            if self._stop and not self._out:
                break
        self._context.destroy(linger=200)
        os.close(self._read)
        os.close(self._write)

    def _drain(self, sock: Any) -> None:
        while True:
            try:
                frames = sock.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            except zmq.ZMQError:
                return
            name = frames[0].hex() if sock is self._router else next(
                (n for n, p in self._peers.items() if p.socket is sock), "")
            self._hear(name, frames[-1])

    def _hear(self, name: str, frame: bytes) -> None:
        if not name or len(frame) < _HEADER.size:
            return
        sender, receiver = _HEADER.unpack_from(frame)
        try:
            message = decoder.decode(frame[_HEADER.size :])
        except (msgspec.DecodeError, msgspec.ValidationError):
            return  # not one of ours: whoever it is gets no answer
        peer = self._peers.get(name)
        if peer is None:
            if self._router is None or not isinstance(message, Hello):
                return  # a peer introduces itself first; what a former peer still says is for nobody
            peer = self._peers[name] = _Peer(sender, time.monotonic(), None, True)
        if peer.incarnation not in (0, sender):
            self._down(name, "it was restarted", final=True)
            return
        peer.incarnation, peer.reached, peer.heard_s = sender, True, time.monotonic()
        if receiver not in (0, self.incarnation) or isinstance(message, Beat):
            return
        answer = self.quick(name, message)
        if answer is not None:
            self._dispatch(name, answer)
        self._mail.append((name, message))
        self.wake()

    def _dispatch(self, name: str, message: Message) -> None:
        peer = self._peers.get(name)
        if peer is None and self._router is None:
            peer = self._connect(name)
        if peer is None:
            return
        frame = _HEADER.pack(self.incarnation, peer.incarnation) + encoder.encode(message)
        try:
            if peer.socket is None:
                self._router.send_multipart([bytes.fromhex(name), frame], zmq.NOBLOCK)
            else:
                peer.socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            self._down(name, "it does not read what is sent to it", final=False)

    def _connect(self, name: str) -> _Peer:
        dealer = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.IDENTITY, b"\x01" + secrets.token_bytes(12))
        dealer.connect(f"tcp://{name}")
        self._poller.register(dealer, zmq.POLLIN)
        peer = self._peers[name] = _Peer(0, time.monotonic(), dealer)
        return peer

    def _beat(self, now: float, late_s: float) -> None:
        for name, peer in list(self._peers.items()):
            if late_s > LATE_BEATS * BEAT_S:
                peer.heard_s = min(now, peer.heard_s + late_s)  # we were stopped: beats may be waiting to be read
            age_s = now - peer.heard_s
            if peer.reached and age_s > SILENT_S:
                self._down(name, f"no sign of life for {age_s:.1f} s", final=self._refuses(name))
            elif not peer.reached and age_s > CONNECT_S:
                self._down(name, f"not reachable within {CONNECT_S:g} s", final=self._refuses(name))
            else:
                self._dispatch(name, Beat())
        for name, until_s in list(self._suspects.items()):
            if now > until_s or self._refuses(name):
                del self._suspects[name]
                if now <= until_s:
                    self._mail.append((name, PeerDown("its port is closed", True)))
                    self.wake()

    def _refuses(self, name: str) -> bool:
        """Whether a prefill server's process is known to be dead: its port is closed. A stopped one still accepts."""
        if self._router is not None:
            return False
        host, _, port = name.rpartition(":")
        try:
            with socket.create_connection((host.strip("[]"), int(port)), 0.5):
                return False
        except ConnectionRefusedError:
            return True
        except (OSError, ValueError):
            return False

    def _down(self, name: str, reason: str, *, final: bool) -> None:
        peer = self._peers.pop(name, None)
        if peer is None:
            return
        if peer.socket is not None:
            self._poller.unregister(peer.socket)
            peer.socket.close(0)
        if not final and self._router is None:
            self._suspects[name] = time.monotonic() + SUSPECT_S
        self._mail.append((name, PeerDown(reason, final)))
        self.wake()


def _literal(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
