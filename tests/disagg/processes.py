"""Real server processes over Mooncake on tcp, and the router in front: what a user starts, on a tiny random model."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.api.serving import ROOT, Server, free_port, hold, running, until, wait_ready

HEALTH = ["--health-check-interval-secs", "1", "--health-check-timeout-secs", "1", "--health-failure-threshold", "2",
          "--disable-circuit-breaker"]
_ROOMS = iter(range(1, 10**9))


@dataclass
class Trio:
    """One prefill server, decode servers, and the router's address ("" without a router). `hold`: file that holds the
    prefill server."""

    prefill: Server
    decodes: list[Server]
    bootstrap_port: int
    hold: Path
    router: str = ""

    @property
    def decode(self) -> Server:
        return self.decodes[0]

    def both(self, path: str, body: dict[str, Any], *, decode: Server | None = None, room: int | None = None,
             timeout_s: float = 200.0) -> tuple[httpx.Response, httpx.Response]:
        """What the router does: the same body to both sides. Returns (prefill's, decode's) answers."""
        import concurrent.futures

        room = next(_ROOMS) if room is None else room
        body = {**body, "bootstrap_host": "127.0.0.1", "bootstrap_port": self.bootstrap_port, "bootstrap_room": room}
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            calls = [pool.submit(s.post, path, body, timeout=timeout_s) for s in (self.prefill, decode or self.decode)]
            return calls[0].result(), calls[1].result()

    def until(self, phase: str, count: int = 1, *, side: str = "prefill") -> None:
        """Wait until `count` rooms of one side are in `phase`."""
        server = self.prefill if side == "prefill" else self.decode
        until(lambda: rooms(server).get(phase, 0) >= count)

    @contextlib.contextmanager
    def holding(self) -> Iterator[None]:
        """Inside, the prefill server computes the first chunk of what it is asked for and no more."""
        hold(self.hold, 1)
        try:
            yield
        finally:
            self.hold.unlink()

    def check_at_rest(self) -> None:
        """Nothing runs, nothing is leased or held, no law was broken; quarantined pages are allowed and counted."""
        for server in [s for s in (self.prefill, *self.decodes) if s.process.poll() is None]:
            until(lambda server=server: not any(p["held"] or p["leased"] for p in server.books()["pools"].values()),
                  server.url)
            assert server.metric("kv_balance_violations_total") == 0


def rooms(server: Server) -> dict[str, int]:
    """Rooms of a server by phase."""
    return dict(server.books()["disaggregation"]["rooms"])


def failure_of(answer: httpx.Response) -> str:
    """The error in a prefill server's half of an answer, whose headers were sent before anything could fail."""
    assert answer.status_code == 200, answer.text
    return str(answer.json()["error"]["message"])


def kill_tree(server: Server, number: int = signal.SIGKILL) -> None:
    """A signal to the engine process and its HTTP process, as when a machine stops or dies."""
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    for pid in [*children, str(server.process.pid)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), number)


@contextlib.contextmanager
def trio(tmp: Path, *, decodes: int = 1, router: bool = False, prefill: dict[str, Any] | None = None,
         decode: dict[str, Any] | None = None, env: dict[str, str] | None = None, **options: Any) -> Iterator[Trio]:
    port = free_port()
    held = tmp / f"hold-{port}"
    shared = {"check_books": True, "served_model_name": ("tiny",), "bootstrap_port": port, "env": env, **options}
    first = {**shared, **(prefill or {})}
    first["env"] = {**(first["env"] or {}), "OCTAVO_TEST_HOLD": str(held)}
    with contextlib.ExitStack() as stack:
        one = stack.enter_context(running(tmp, role="prefill", wait=False, **first))
        many = [stack.enter_context(running(tmp, role="decode", wait=False, **{**shared, **(decode or {})}))
                for _ in range(decodes)]
        for server in (one, *many):
            wait_ready(server)
        url = stack.enter_context(routing(tmp, one, port, many)) if router else ""
        yield Trio(one, many, port, held, url)


@contextlib.contextmanager
def routing(tmp: Path, prefill: Server, bootstrap_port: int, decodes: list[Server], *, retries: bool = False
            ) -> Iterator[str]:
    """`sglang-router` in prefill/decode mode; yields its address."""
    port, metrics = free_port(), free_port()
    command = [sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation",
               "--prefill", prefill.url, str(bootstrap_port)]
    for server in decodes:
        command += ["--decode", server.url]
    command += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics), *HEALTH]
    # In turns: the default policy sends a prompt where it was before, so all tries may go to the server that is gone.
    command += ["--decode-policy", "round_robin"] if retries else ["--disable-retries"]
    with (tmp / "router.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT)
    try:
        url = f"http://127.0.0.1:{port}"
        _until_up(url, process, tmp / "router.log")
        yield url
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _until_up(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    def up() -> bool:
        assert process.poll() is None, log.read_text()
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{url}/readiness", timeout=5).status_code == 200
        return False

    until(up, log)
