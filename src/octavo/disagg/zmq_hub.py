"""The control connection between processes: ZMQ sockets on a thread of their own, msgpack messages, a beat a second.

A prefill server binds one ROUTER socket (its bootstrap address); a decode server opens one DEALER for each prefill
server. Each message carries who sent it (an *incarnation*: one life of one process) and whom it is for, so that
nothing meant for a former life of a peer is taken up by the next one. Two missed beats and a peer is down.
"""

from __future__ import annotations

import os
import secrets
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import zmq

from octavo.disagg.asides import Asides, literal, look_up, numeric, refuses
from octavo.disagg.hub import Quick, no_quick
from octavo.disagg.protocol import Beat, Hello, Message, PeerDown, decoder, encoder
from octavo.errors import ConfigError, OctavoError

BEAT_S = 1.0
SILENT_S = 2 * BEAT_S + 0.5  # two beats missed, and half a second for a busy machine
LATE_BEATS = 0.25  # who looks so much too late was stopped, perhaps the whole machine was: no silence of others
CONNECT_S = 3.0  # until the first sign of life of a server that was greeted
SUSPECT_S = 120.0  # so long a silent server's port is looked at once a beat
MESSAGE_BYTES = 64 * 1024**2  # longer ones end their connection; a million page ids are 5 MB
AT_ONCE = 256  # messages read before beats have their turn again
_HEADER = struct.Struct("<QQ")  # incarnation of the sender, of the receiver (0: not known yet)


class ControlLost(OctavoError):
    """The thread of the control connection has ended: no other server can be talked to any more."""

    code = "control_connection_lost"


@dataclass(eq=False)
class _Peer:
    incarnation: int
    heard_s: float
    socket: Any = None  # the DEALER, on the decode side; None there: its name is being looked up
    reached: bool = False
    address: str = ""  # numeric, on the decode side
    queued: list[Message] = field(default_factory=list)  # to be said when its name has been looked up
    doubt: str = ""  # why it seems gone, while its port is being looked at


@dataclass(eq=False)
class _Suspect:
    """A silent server that is not known to be dead."""

    address: str
    until_s: float
    asked: bool = False


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
        self._suspects: dict[str, _Suspect] = {}
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._asides = Asides(self._nudge)
        self._stop = False
        self._fault: Exception | None = None
        self._router: Any = None
        self._poller = zmq.Poller()
        self._poller.register(self._read, zmq.POLLIN)
        if bind is not None:
            self._router = self._socket(zmq.ROUTER, bind[0])
            try:
                self._router.bind(f"tcp://{literal(bind[0])}:{bind[1]}")
            except zmq.ZMQError as error:
                self._context.destroy(linger=0)
                allowed = f"a free port is needed; it cannot be listened on at {bind[0]}: {error}"
                raise ConfigError("bootstrap_port", bind[1], allowed) from None
            self._poller.register(self._router, zmq.POLLIN)
        self._thread = threading.Thread(target=self._live, name="control", daemon=True)
        self._thread.start()

    def _socket(self, kind: int, host: str) -> Any:
        made = self._context.socket(kind)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES)
        made.setsockopt(zmq.IPV6, int(":" in host))
        return made

    # -- the engine's loop ---------------------------------------------------------------------------------------

    def send(self, peer: str, message: Message) -> None:
        self._out.append((peer, message))
        self._nudge()

    def receive(self) -> list[tuple[str, Message | PeerDown]]:
        """Everything that has arrived. Raises ControlLost where nothing can arrive any more."""
        if self._fault is not None:
            raise ControlLost(f"the control connection has failed: {self._fault!r}") from self._fault
        got = []
        while self._mail:
            got.append(self._mail.popleft())
        return got

    def has_mail(self) -> bool:
        return bool(self._mail) or self._fault is not None

    def close(self) -> None:
        """Say what is still to be said, then stop the thread."""
        self._stop = True
        self._nudge()
        self._thread.join(5.0)

    def _nudge(self) -> None:
        try:
            os.write(self._write, b"x")
        except OSError:
            pass  # the pipe is full: the thread is awake; or closed: it has ended

    # -- the hub's thread ----------------------------------------------------------------------------------------

    def _live(self) -> None:
        try:
            self._run()
        except Exception as error:  # a fault of ours: without this thread the engine must not seem well
            self._fault = error
            self.wake()
        finally:
            self._context.destroy(linger=200)
            os.close(self._read)
            write, self._write = self._write, -1
            os.close(write)

    def _run(self) -> None:
        beat_s = time.monotonic()
        while True:
            ready = dict(self._poller.poll(int(1000 * max(0.0, beat_s - time.monotonic()))))
            if self._read in ready:
                os.read(self._read, 4096)
            self._settle()
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
                return

    def _drain(self, sock: Any) -> None:
        for _ in range(AT_ONCE):
            try:
                frames = sock.recv_multipart(zmq.NOBLOCK)
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
        except Exception:  # not one of ours, whatever is wrong with it: whoever it is gets no answer
            return
        peer = self._peers.get(name)
        if peer is None:
            if self._router is None or not isinstance(message, Hello):
                return  # a peer introduces itself first; what a former peer still says is for nobody
            peer = self._peers[name] = _Peer(sender, time.monotonic(), None, True)
        if peer.incarnation not in (0, sender):
            self._down(name, "it was restarted", final=True)
            return
        peer.incarnation, peer.reached, peer.heard_s, peer.doubt = sender, True, time.monotonic(), ""
        if receiver not in (0, self.incarnation) or isinstance(message, Beat):
            return
        answer = self.quick(name, message)
        if answer is not None:
            self._dispatch(name, answer)
        self._post(name, message)

    def _dispatch(self, name: str, message: Message) -> None:
        peer = self._peers.get(name)
        if peer is None and self._router is None:
            peer = self._connect(name)
        if peer is None:
            return
        if self._router is None and peer.socket is None:
            peer.queued.append(message)
            return
        frame = _HEADER.pack(self.incarnation, peer.incarnation) + encoder.encode(message)
        try:
            if peer.socket is None:
                self._router.send_multipart([bytes.fromhex(name), frame], zmq.NOBLOCK)
            else:
                peer.socket.send(frame, zmq.NOBLOCK)
        except zmq.ZMQError:
            self._down(name, "it does not read what is sent to it", final=False)

    def _connect(self, name: str) -> _Peer:
        peer = self._peers[name] = _Peer(0, time.monotonic())
        address = numeric(name)
        if address is not None:
            self._open(name, peer, address)
        elif not self._asides.ask(("name", name, peer), look_up, name):
            self._down(name, "too many host names are being looked up", final=False)
        return peer

    def _open(self, name: str, peer: _Peer, address: str) -> None:
        """Connect to a numeric address and say what waited for it."""
        try:
            dealer = self._socket(zmq.DEALER, address.rpartition(":")[0])
            dealer.setsockopt(zmq.IDENTITY, b"\x01" + secrets.token_bytes(12))
            dealer.connect(f"tcp://{address}")
        except zmq.ZMQError as error:  # no more sockets, an address that leads nowhere
            self._down(name, f"it cannot be connected to: {error}", final=False)
            return
        self._poller.register(dealer, zmq.POLLIN)
        peer.socket, peer.address = dealer, address
        while peer.queued and self._peers.get(name) is peer:
            self._dispatch(name, peer.queued.pop(0))

    def _beat(self, now: float, late_s: float) -> None:
        for name, peer in list(self._peers.items()):
            if late_s > LATE_BEATS * BEAT_S:
                peer.heard_s = min(now, peer.heard_s + late_s)  # we were stopped: beats may be waiting to be read
            age_s = now - peer.heard_s
            if peer.reached and age_s > SILENT_S:
                self._doubt(name, peer, f"no sign of life for {age_s:.1f} s")
            elif not peer.reached and age_s > CONNECT_S:
                self._doubt(name, peer, f"not reachable within {CONNECT_S:g} s")
            elif self._router is not None or peer.socket is not None:
                self._dispatch(name, Beat())
        for name, suspect in list(self._suspects.items()):
            if now > suspect.until_s:
                del self._suspects[name]
            elif not suspect.asked:
                suspect.asked = self._asides.ask(("suspect", name, suspect), refuses, suspect.address)

    def _doubt(self, name: str, peer: _Peer, reason: str) -> None:
        """A silent peer is down; of a server the port is looked at first, which may prove that it is dead."""
        if peer.doubt:
            return
        peer.doubt = reason
        if not peer.address or not self._asides.ask(("peer", name, peer), refuses, peer.address):
            self._down(name, reason, final=False)

    def _settle(self) -> None:
        """What was asked aside has been answered."""
        for (what, name, about), answer in self._asides.take():
            if what == "suspect":
                about.asked = False
                if answer and self._suspects.get(name) is about:
                    del self._suspects[name]
                    self._post(name, PeerDown("its port is closed", True))
            elif self._peers.get(name) is not about:
                continue  # it is gone meanwhile
            elif what == "peer" and about.doubt:
                self._down(name, about.doubt, final=answer)
            elif what == "name":
                address, wrong = answer
                if wrong:
                    self._down(name, f"its host name cannot be looked up: {wrong}", final=False)
                else:
                    self._open(name, about, address)

    def _down(self, name: str, reason: str, *, final: bool) -> None:
        peer = self._peers.pop(name, None)
        if peer is None:
            return
        if peer.socket is not None:
            self._poller.unregister(peer.socket)
            peer.socket.close(0)
        if not final and peer.address:
            self._suspects[name] = _Suspect(peer.address, time.monotonic() + SUSPECT_S)
        self._post(name, PeerDown(reason, final))

    def _post(self, name: str, message: Message | PeerDown) -> None:
        self._mail.append((name, message))
        self.wake()
