"""Real server processes over Mooncake on tcp, and the router in front: what a user starts, on a tiny random model."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.api.serving import ROOT, Server, free_port, running

HEALTH = ["--health-check-interval-secs", "1", "--health-failure-threshold", "2"]
_ROOMS = iter(range(1, 10**9))


@dataclass
class Trio:
    """One prefill server, decode servers, and the router's address ("" without a router)."""

    prefill: Server
    decodes: list[Server]
    bootstrap_port: int
    router: str = ""

    @property
    def decode(self) -> Server:
        return self.decodes[0]

    def both(self, path: str, body: dict[str, Any], *, decode: Server | None = None, room: int | None = None,
             timeout_s: float = 60.0) -> tuple[httpx.Response, httpx.Response]:
        """What the router does: the same body to both sides. Returns (prefill's, decode's) answers."""
        import concurrent.futures

        room = next(_ROOMS) if room is None else room
        body = {**body, "bootstrap_host": "127.0.0.1", "bootstrap_port": self.bootstrap_port, "bootstrap_room": room}
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            calls = [pool.submit(s.post, path, body, timeout=timeout_s) for s in (self.prefill, decode or self.decode)]
            return calls[0].result(), calls[1].result()

    def until(self, phase: str, *, side: str = "prefill", timeout_s: float = 30.0) -> None:
        """Wait until a room of one side is in `phase`."""
        server = self.prefill if side == "prefill" else self.decode
        deadline = time.monotonic() + timeout_s
        while phase not in (seen := server.get("/kv.json").json()["disaggregation"]["rooms"]):
            assert time.monotonic() < deadline, seen
            time.sleep(0.02)

    def check_at_rest(self, timeout_s: float = 20.0) -> None:
        """Nothing runs, nothing is leased or held, no law was broken; quarantined pages are allowed and counted."""
        alive = [s for s in (self.prefill, *self.decodes) if s.process.poll() is None]
        for server in alive:
            deadline = time.monotonic() + timeout_s
            while True:
                pools = server.get("/kv.json").json()["pools"]
                busy = {n: (p["held"], p["leased"]) for n, p in pools.items() if p["held"] or p["leased"]}
                if not busy or time.monotonic() > deadline:
                    break
                time.sleep(0.1)
            assert not busy, (server.url, server.get("/kv.json").json())
            assert server.metric("kv_balance_violations_total") == 0


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
    shared = {"check_books": True, "served_model_name": ("tiny",), "bootstrap_port": port, "env": env, **options}
    with contextlib.ExitStack() as stack:
        one = stack.enter_context(running(tmp, role="prefill", wait=False, **{**shared, **(prefill or {})}))
        many = [stack.enter_context(running(tmp, role="decode", wait=False, **{**shared, **(decode or {})}))
                for _ in range(decodes)]
        from tests.api.serving import wait_ready

        for server in (one, *many):
            wait_ready(server)
        url = stack.enter_context(routing(tmp, one, port, many)) if router else ""
        yield Trio(one, many, port, url)


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
    command += [] if retries else ["--disable-retries"]
    with (tmp / "router.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT)
    try:
        url = f"http://127.0.0.1:{port}"
        _until_up(url, process, tmp / "router.log")
        yield url
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _until_up(url: str, process: subprocess.Popen[bytes], log: Path, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/readiness", timeout=2).status_code == 200:
                return
        time.sleep(0.1)
    raise AssertionError(log.read_text())
