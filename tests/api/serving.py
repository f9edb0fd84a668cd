"""A real server process for tests: `with running(core=…) as server: server.url`."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.clock import running_time

ROOT = Path(__file__).resolve().parents[2]
# What the server promises, in time that the machine ran (tests/clock.py), with slack for the other tests on it.
IDLE_S = 4.0  # pages of clients that left are free (promised: 2 s)
NOTICED_S = 8.0  # a dead engine shows in /health and /ready (promised: 5 s)
TINY = "tests.api.cores:tiny"
_LAUNCH = (
    "import pickle, sys; from octavo.api.server import serve; "
    "config, core = pickle.load(sys.stdin.buffer); sys.exit(serve(config, core=core))"
)


@dataclass
class Server:
    """One server process and where it listens."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path
    headers: dict[str, str] = field(default_factory=dict)

    def engine_pid(self) -> int:
        """Process id of the engine: the server's only child."""
        out = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        assert out, "the server has no engine process"
        return int(out[0])

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, headers=self.headers, timeout=options.pop("timeout", 30), **options)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return httpx.post(
            self.url + path, json=body, headers=self.headers, timeout=options.pop("timeout", 120), **options
        )

    def books(self) -> dict[str, Any]:
        """`/kv.json`, asked again where the engine does not answer in time (a machine that stands still)."""
        answers: list[httpx.Response] = []
        until(lambda: (answers.append(self.get("/kv.json")), answers[-1].status_code == 200)[1], answers)
        found: dict[str, Any] = answers[-1].json()
        return found

    def metric(self, name: str) -> float:
        """Sum of a metric's samples. Where the engine does not answer in time /metrics repeats what it said last: it
        is asked just before, so that this is never long ago."""
        self.get("/kv.json")
        lines = self.get("/metrics").text.splitlines()
        samples = [line for line in lines if line.startswith((f"octavo:{name} ", f"octavo:{name}{{"))]
        assert samples, f"no metric {name}"
        return sum(float(line.rsplit(" ", 1)[1]) for line in samples)

    def wait_running(self, count: int) -> None:
        """Until `count` requests run."""
        until(lambda: self.books()["running"] >= count)

    def wait_idle(self) -> float:
        """Seconds (tests/clock.py) until no request runs or waits."""
        started_s = running_time.now()
        until(lambda: self.metric("num_requests_running") + self.metric("num_requests_waiting") == 0)
        return running_time.now() - started_s


def until(have: Callable[[], object], shown: object = "") -> None:
    """Wait for a state. The limit is for what never comes: how long it takes says nothing."""
    deadline_s = time.monotonic() + 120
    while not have():
        assert time.monotonic() < deadline_s, shown
        time.sleep(0.02)


def hold(path: Path, steps: int) -> None:
    """OCTAVO_TEST_HOLD of tests/api/cores.py: so many steps are computed, no more, until the file is gone."""
    part = path.with_suffix(".part")
    part.write_text(str(steps))
    part.replace(path)


_kept: list[socket.socket] = []


def free_port() -> int:
    """A port from the system that stays ours: bound and not listened on, so that nobody else is given it, connections
    to it are refused, and a server (they all set SO_REUSEADDR) can listen on it."""
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    one.bind(("127.0.0.1", 0))
    _kept.append(one)
    return int(one.getsockname()[1])


@contextmanager
def running(tmp: Path, *, core: str = TINY, wait: bool = True, env: dict[str, str] | None = None,
            **options: Any) -> Iterator[Server]:
    """Start a server, yield it when it is ready, stop it. Options are those of `ServerConfig`."""
    from octavo.config import ServerConfig

    port = options.pop("port", None) or free_port()
    config = ServerConfig(**{"port": port, "draft": "none", "kv_memory": "64MiB", "threads": 1, **options})
    log = tmp / f"server-{port}.log"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"} | (env or {})
    scheme = "https" if config.ssl_certfile else "http"
    with log.open("wb") as out:
        process = subprocess.Popen([sys.executable, "-c", _LAUNCH], stdin=subprocess.PIPE, stdout=out, stderr=out,
                                   env=environment, cwd=ROOT)
        assert process.stdin is not None
        process.stdin.write(pickle.dumps((config, core)))
        process.stdin.close()
    server = Server(process, f"{scheme}://127.0.0.1:{port}", log)
    if config.api_key is not None:
        server.headers = {"Authorization": f"Bearer {config.api_key}"}
    try:
        if wait:
            wait_ready(server)
        yield server
    finally:
        stop(server)


def wait_ready(server: Server) -> None:
    """Until `/ready` is 200. Shows the log if the server ends before."""

    def ready() -> bool:
        assert server.process.poll() is None, server.log.read_text()
        with suppress(httpx.TransportError):
            return server.get("/ready", timeout=5, verify=False).status_code == 200
        return False

    until(ready, server.log)


def stop(server: Server) -> int:
    """SIGTERM, then wait; the exit code."""
    if server.process.poll() is None:
        server.process.send_signal(signal.SIGTERM)
        try:
            server.process.wait(120)
        except subprocess.TimeoutExpired:
            server.process.kill()
            server.process.wait()
            raise AssertionError(f"the server did not stop:\n{server.log.read_text()}") from None
    return server.process.returncode
