"""Questions to the network that may take seconds: what a name means, whether a port is closed. Each has a thread of
its own, so that the control connection, whose beats others wait for, never waits itself."""

from __future__ import annotations

import ipaddress
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

PROBE_S = 0.5
MOST = 64  # questions open at a time; more are not asked


class Asides:
    """`ask` and `take` belong to one thread; `wake` is called from any when there is something to take."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._answers: deque[tuple[Any, Any]] = deque()
        self._open = 0

    def ask(self, key: Any, question: Callable[..., Any], *about: Any) -> bool:
        """Have `question(*about)` answered; False: too much is being asked."""
        if self._open >= MOST:
            return False
        self._open += 1

        def answer() -> None:
            self._answers.append((key, question(*about)))
            self._wake()

        threading.Thread(target=answer, name="aside", daemon=True).start()
        return True

    def take(self) -> list[tuple[Any, Any]]:
        """(key, answer) of everything that has been answered."""
        got = []
        while self._answers:
            got.append(self._answers.popleft())
        self._open -= len(got)
        return got


def split_address(name: str) -> tuple[str, int]:
    """"host:port" or "[host]:port" as (host, port)."""
    host, _, port = name.rpartition(":")
    return host.strip("[]"), int(port)


def numeric(name: str) -> str | None:
    """The address as ZMQ and sockets take it without looking anything up; None where the host is a name."""
    host, port = split_address(name)
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return None
    return f"{literal(host)}:{port}"


def look_up(name: str) -> tuple[str, str]:
    """(numeric address, "") of "host:port", or ("", what is wrong with the host)."""
    host, port = split_address(name)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return "", str(error)
    return f"{literal(str(found[0][4][0]))}:{port}", ""


def refuses(address: str) -> bool:
    """Whether a server's process is known to be dead: its port is closed. A stopped one still accepts."""
    try:
        with socket.create_connection(split_address(address), PROBE_S):
            return False
    except ConnectionRefusedError:
        return True
    except OSError:
        return False


def literal(host: str) -> str:
    """An address for the host part of a URL."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
