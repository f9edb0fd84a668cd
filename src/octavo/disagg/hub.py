"""The control connection as the two sides see it: messages in order, signs of life, and who is gone.

`send` and `receive` belong to the engine's loop. `quick` answers some messages on the hub's own thread, so that a long
step does not hold up a peer. `LocalNet` is the hub inside one process; `zmq_hub` the one between processes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from octavo.disagg.protocol import Message, PeerDown

Quick = Callable[[str, Message], Message | None]


def no_quick(peer: str, message: Message) -> Message | None:
    return None


class Hub(Protocol):
    quick: Quick
    wake: Callable[[], None]  # called from any thread when something has arrived

    def send(self, peer: str, message: Message) -> None:
        """Send, or drop where the peer is gone (a `PeerDown` says so). Never blocks."""
        ...

    def receive(self) -> list[tuple[str, Message | PeerDown]]:
        """Everything that has arrived."""
        ...

    def has_mail(self) -> bool: ...

    def close(self) -> None: ...


class LocalHub:
    """One end of a `LocalNet`."""

    def __init__(self, net: LocalNet, name: str) -> None:
        self._net, self.name = net, name
        self.quick: Quick = no_quick
        self.wake: Callable[[], None] = lambda: None
        self.mail: deque[tuple[str, Message | PeerDown]] = deque()

    def send(self, peer: str, message: Message) -> None:
        self._net.carry(self.name, peer, message)

    def receive(self) -> list[tuple[str, Message | PeerDown]]:
        got = list(self.mail)
        self.mail.clear()
        return got

    def has_mail(self) -> bool:
        return bool(self.mail)

    def close(self) -> None:
        self._net.kill(self.name, "closed", final=True)


class LocalNet:
    """Hubs of one process by name. `lose` decides which messages vanish; `kill` is the end of a peer."""

    def __init__(self) -> None:
        self._hubs: dict[str, LocalHub] = {}
        self.lose: Callable[[str, str, Message], bool] = lambda sender, receiver, message: False
        self.carried: list[tuple[str, str, Message]] = []  # newest last, at most 10,000

    def hub(self, name: str) -> LocalHub:
        self._hubs[name] = LocalHub(self, name)
        return self._hubs[name]

    def carry(self, sender: str, receiver: str, message: Message) -> None:
        if len(self.carried) >= 10_000:
            del self.carried[:5_000]
        self.carried.append((sender, receiver, message))
        if sender not in self._hubs or self.lose(sender, receiver, message):
            return
        hub = self._hubs.get(receiver)
        if hub is None:
            self._hubs[sender].mail.append((receiver, PeerDown("not reachable", True)))
            return
        answer = hub.quick(sender, message)
        hub.mail.append((sender, message))
        hub.wake()
        if answer is not None:
            self.carry(receiver, sender, answer)

    def kill(self, name: str, reason: str = "killed", *, final: bool = True) -> None:
        """The peer is gone (`final`) or silent: everybody else hears of it."""
        if final:
            self._hubs.pop(name, None)
        for other in self._hubs.values():
            if other.name != name:
                other.mail.append((name, PeerDown(reason, final)))
                other.wake()
