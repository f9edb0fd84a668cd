"""`octavo cluster up`: Ray places one actor a server; each actor runs `octavo serve` on its machine and keeps it up.

A server that dies is started again at the same address, so the router's list stays right. Nothing here schedules
machines: where an actor goes is Ray's decision.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from typing import Any

from octavo.errors import ConfigError, UserError

READY_S = 600.0  # a large model takes its time
WATCH_S = 1.0
ROUTER_FLAGS = ["--health-check-interval-secs", "1", "--health-check-timeout-secs", "1",
                "--health-failure-threshold", "2", "--disable-retries",
                "--disable-circuit-breaker"]  # fmt: skip


class PartDown(UserError):
    """Ray, a server or the router did not start or has ended. Its own messages are above this one, so that the line
    is all that is shown."""

    status = 503
    code = "cluster_part_down"


def keep_port(host: str) -> socket.socket:
    """A free port of `host`, bound and not listened on: as long as the socket lives nobody else is given it, and a
    server (they all set SO_REUSEADDR) can listen on it, again after it died."""
    kept = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    kept.bind((host, 0))
    return kept


def port_of(kept: socket.socket) -> int:
    return int(kept.getsockname()[1])


def answers(url: str) -> bool:
    """Whether `url` says 200 now."""
    try:
        with urllib.request.urlopen(url, timeout=2) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


class Place:
    """One server on the machine where its actor runs."""

    def __init__(self, role: str, flags: list[str], environment: dict[str, str], host: str | None) -> None:
        self.host = host or _node_address()
        self._kept = keep_port(self.host), keep_port(self.host)
        self.port, self.bootstrap_port = map(port_of, self._kept)
        self.starts = 0
        self._environment = os.environ | environment
        self._command = [sys.executable, "-m", "octavo", "serve", "--role", role, *flags, "--host", self.host,
                         "--port", str(self.port), "--bootstrap-host", self.host]
        if role == "prefill":
            self._command += ["--bootstrap-port", str(self.bootstrap_port)]
        self._process: subprocess.Popen[bytes] | None = None

    def ensure(self) -> int:
        """Start the server if it does not run. Returns how often it has been started."""
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(self._command, env=self._environment, stdin=subprocess.DEVNULL)
            self.starts += 1
        return self.starts

    def address(self) -> tuple[str, int]:
        """(URL, bootstrap port)."""
        return f"http://{self.host}:{self.port}", self.bootstrap_port

    def wait_ready(self, timeout_s: float) -> str:
        """"" when it is ready; else what happened instead."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            if self._process is not None and self._process.poll() is not None:
                return f"it ended with exit code {self._process.returncode}"
            if answers(f"http://{self.host}:{self.port}/ready"):
                return ""
            time.sleep(0.2)
        return f"it was not ready within {timeout_s:g} s"

    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def stop(self, timeout_s: float = 20.0) -> None:
        if self._process is None or self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _node_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


def up(flags: Sequence[str], *, prefill: int, decode: int, ray_address: str, router: tuple[str, int], threads: int,
       api_key: str | None = None) -> int:
    """Place the servers, start the router, keep all of it up until a signal. Returns the exit code.

    Raises ConfigError for a Ray cluster that cannot be reached, PartDown for a Ray or a server that does not start.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray

    local = ray_address == "local"
    try:
        ray.init(address=None if local else ray_address, include_dashboard=False, logging_level="error",
                 log_to_driver=True, **({"num_cpus": max(threads, 1) * (prefill + decode)} if local else {}))
    except Exception as error:  # Ray raises bare ones too, as where its processes do not start in time
        if local:
            raise PartDown(f"Ray did not start on this machine: {error}") from error
        raise ConfigError("--ray-address", ray_address, f"allowed: local, auto or a cluster's address ({error})") \
            from None
    environment = {} if api_key is None else {"OCTAVO_API_KEY": api_key}
    actor = ray.remote(num_cpus=max(threads, 1), scheduling_strategy="SPREAD")(Place)
    places = [actor.remote(role, list(flags), environment, "127.0.0.1" if local else None)
              for role in ["prefill"] * prefill + ["decode"] * decode]
    stop = _Stop()
    process: subprocess.Popen[bytes] | None = None
    try:
        with stop, contextlib.ExitStack() as keep:
            ray.get([place.ensure.remote() for place in places])
            for place, wrong in zip(places, ray.get([p.wait_ready.remote(READY_S) for p in places]), strict=True):
                if wrong:
                    raise PartDown(f"the server at {ray.get(place.address.remote())[0]} did not start: {wrong}")
            addresses = ray.get([place.address.remote() for place in places])
            process = _start_router(addresses[:prefill], addresses[prefill:], router, keep)
            _watch(ray, places, process, stop)
        return 130 if stop.number == signal.SIGINT else 0
    finally:
        if process is not None and process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            if process.poll() is None:
                process.kill()
        with contextlib.suppress(Exception):
            ray.get([place.stop.remote() for place in places], timeout=40)
        ray.shutdown()


class _Stop:
    """SIGINT and SIGTERM as a flag, while the block runs."""

    def __init__(self) -> None:
        self.number = 0
        self._old: dict[int, Any] = {}

    def __enter__(self) -> _Stop:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._old[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: object) -> None:
        self.number = number

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)


def _start_router(prefills: list[tuple[str, int]], decodes: list[tuple[str, int]], at: tuple[str, int],
                  keep: contextlib.ExitStack) -> subprocess.Popen[bytes]:
    """`keep`: closed when the router is no longer needed."""
    host = at[0]
    port = at[1] or port_of(keep.enter_context(keep_port(host)))
    command = [sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation"]
    for url, bootstrap_port in prefills:
        command += ["--prefill", url, str(bootstrap_port)]
    for url, _ in decodes:
        command += ["--decode", url]
    command += ["--host", host, "--port", str(port), *ROUTER_FLAGS]
    command += ["--prometheus-port", str(port_of(keep.enter_context(keep_port("127.0.0.1"))))]
    process = subprocess.Popen([*command, "--log-level", "warn"], stdin=subprocess.DEVNULL)
    deadline_s = time.monotonic() + 60
    while not answers(f"http://{host}:{port}/readiness"):
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise PartDown(f"the router did not start (exit code {process.poll()})")
        time.sleep(0.2)
    print(f"ready: http://{host}:{port} ({len(prefills)} prefill, {len(decodes)} decode)", flush=True)
    return process


def _watch(ray: Any, places: list[Any], router: subprocess.Popen[bytes], stop: _Stop) -> None:
    """Until a signal: servers that died are started again; a dead router ends all."""
    told = [1] * len(places)
    while not stop.number:
        time.sleep(WATCH_S)
        if router.poll() is not None:
            raise PartDown(f"the router ended with exit code {router.returncode}")
        for number, starts in enumerate(ray.get([place.ensure.remote() for place in places])):
            if starts > told[number]:
                told[number] = starts
                print(f"{ray.get(places[number].address.remote())[0]} died and was started again", flush=True)
