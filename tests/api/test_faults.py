"""Faults on real processes: the engine killed, stopped or refusing to start, stop signals, ports and files."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo.config import ServerConfig
from octavo.errors import ConfigError
from tests.api.serving import NOTICED_S, ROOT, Server, free_port, running, stop, until, wait_ready
from tests.clock import running_time

SLOW = {"OCTAVO_TEST_STEP_S": "0.02"}
LONG = {"prompt": "long", "max_tokens": 400, "ignore_eos": True}


class Load:
    """Requests in flight: two streams and two plain ones, and how each ended."""

    def __init__(self, server: Server) -> None:
        self.ends: list[str] = []
        self._threads = [threading.Thread(target=self._run, args=(server, i)) for i in range(4)]
        for thread in self._threads:
            thread.start()
        server.wait_running(4)

    def _run(self, server: Server, number: int) -> None:
        body = LONG | {"stream": number % 2 == 0}
        try:
            response = httpx.post(server.url + "/v1/completions", json=body, timeout=200)
        except httpx.TransportError as error:
            self.ends.append(type(error).__name__)
            return
        if response.status_code != 200:
            self.ends.append(response.json()["error"]["code"])
        elif number % 2 == 0:
            self.ends.append("engine_dead" if '"code":"engine_dead"' in response.text else "complete")
        else:
            self.ends.append(response.json()["choices"][0]["finish_reason"])

    def join(self) -> list[str]:
        for thread in self._threads:
            thread.join(200)
            assert not thread.is_alive(), "a client hangs"
        return sorted(self.ends)


def until_status(server: Server, path: str, status: int, *, within_s: float | None = None) -> None:
    """Wait until a probe answers with a status. `within_s`: what is promised, in time that the machine ran."""
    started_s = running_time.now()

    def answers() -> bool:
        with contextlib.suppress(httpx.TransportError):
            return server.get(path, timeout=5).status_code == status
        return False

    until(answers, (path, status, server.log))
    took_s = running_time.now() - started_s
    assert within_s is None or took_s < within_s, f"{path} was {status} after {took_s:.1f} s"


def test_killed_engine_fails_what_is_in_flight_and_ends_the_server(tmp_path: Path) -> None:
    with running(tmp_path, env=SLOW) as server:
        load = Load(server)
        os.kill(server.engine_pid(), signal.SIGKILL)
        until_status(server, "/health", 503, within_s=NOTICED_S)
        assert server.get("/ready").status_code == 503
        refused = server.post("/v1/completions", LONG)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "engine_dead"
        assert int(refused.headers["retry-after"]) >= 1
        assert load.join() == ["engine_dead"] * 4
        assert server.process.wait(60) not in (0, None)


def test_killed_engine_is_started_again(tmp_path: Path) -> None:
    loading = {"OCTAVO_TEST_LOAD_S": "2"}  # long enough that it is seen to be down
    with running(tmp_path, env=SLOW | loading, restart_engine=True) as server:
        load = Load(server)
        first = server.engine_pid()
        os.kill(first, signal.SIGKILL)
        until_status(server, "/ready", 503, within_s=NOTICED_S)
        assert load.join() == ["engine_dead"] * 4
        until_status(server, "/ready", 200)
        assert server.engine_pid() != first
        answer = server.post("/v1/completions", {"prompt": "again", "max_tokens": 3})
        assert answer.status_code == 200
        assert server.metric("engine_restarts_total") == 1
        assert server.get("/kv.json").json()["pools"]["full"]["held"] == 0


def test_stopped_engine_is_noticed_and_replaced(tmp_path: Path) -> None:
    with running(tmp_path, env=SLOW, restart_engine=True) as server:
        load = Load(server)
        first = server.engine_pid()
        os.kill(first, signal.SIGSTOP)
        until_status(server, "/health", 503, within_s=NOTICED_S)
        assert server.get("/ready").status_code == 503
        assert load.join() == ["engine_dead"] * 4
        until_status(server, "/ready", 200)
        assert server.engine_pid() != first
        assert server.post("/v1/completions", {"prompt": "again", "max_tokens": 3}).status_code == 200


def test_engine_that_was_stopped_briefly_goes_on(tmp_path: Path) -> None:
    with running(tmp_path, env=SLOW) as server:
        pid = server.engine_pid()
        os.kill(pid, signal.SIGSTOP)
        until_status(server, "/health", 503, within_s=NOTICED_S)
        os.kill(pid, signal.SIGCONT)
        until_status(server, "/ready", 200, within_s=NOTICED_S)
        assert server.engine_pid() == pid
        assert server.post("/v1/completions", {"prompt": "again", "max_tokens": 3}).status_code == 200


def test_stop_signal_lets_running_requests_finish(tmp_path: Path) -> None:
    with running(tmp_path, env=SLOW, shutdown_timeout_s=200) as server:
        load = Load(server)
        server.process.send_signal(signal.SIGTERM)
        until_status(server, "/ready", 503, within_s=NOTICED_S)
        late = server.post("/v1/completions", LONG)
        assert late.status_code == 503
        assert load.join() == ["complete", "complete", "length", "length"]
        assert server.process.wait(60) == 0


def test_stop_signal_cuts_off_what_takes_too_long(tmp_path: Path) -> None:
    with running(tmp_path, env=SLOW, shutdown_timeout_s=0.5) as server:
        load = Load(server)
        started_s = running_time.now()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(120) == 0
        assert running_time.now() - started_s < 12.0
        assert load.join() == ["abort", "abort", "complete", "complete"]


def test_interrupt_exits_with_130(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(120) == 130


def test_engine_ends_with_its_parent(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        engine = server.engine_pid()
        server.process.kill()
        server.process.wait()
        until(lambda: "(zombie)" in _status(engine), "the engine outlives its parent")


def _status(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return "(zombie)"


def test_port_in_use_is_said_before_the_model_is_loaded(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with running(tmp_path, port=port, wait=False) as server:
            assert server.process.wait(120) != 0
            assert f"{port}" in server.log.read_text() and "in use" in server.log.read_text()


def test_bad_addresses_are_named() -> None:
    from octavo.api.server import bind

    for host in ("no-such-host.invalid", "203.0.113.7", "a" * 300):
        with pytest.raises(ConfigError, match="--host"):
            bind(host, 0)


def _serve_directly(config: ServerConfig) -> subprocess.CompletedProcess[str]:
    """The server with the real engine and its own loader, as the command line starts it."""
    code = ("import pickle, sys; from octavo.api.server import serve; from octavo.errors import OctavoError\n"
            "try: sys.exit(serve(pickle.loads(sys.stdin.buffer.read())))\n"
            "except OctavoError as e: print(type(e).__name__, e, file=sys.stderr); sys.exit(e.exit_code)")  # fmt: skip
    import pickle

    return subprocess.run([sys.executable, "-c", code], input=pickle.dumps(config), capture_output=True, timeout=200,
                          env=os.environ | {"PYTHONPATH": str(ROOT / "src")})  # type: ignore[return-value] # fmt: skip


def test_unusable_model_is_one_error_and_no_server(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(100))
    done: Any = _serve_directly(ServerConfig(port=free_port(), model=str(broken)))
    assert done.returncode in (1, 2)
    said = done.stderr.decode()
    assert "ModelError" in said and "broken.gguf" in said and "Traceback" not in said


def test_a_full_disk_ends_the_trace_and_not_the_server(tmp_path: Path) -> None:
    with running(tmp_path, record_trace="/dev/full") as server:
        for number in range(40):  # more than what the file's buffer holds
            body = {"prompt": f"{number} " * 40, "max_tokens": 2}
            assert server.post("/v1/completions", body).status_code == 200
        assert server.get("/health").status_code == 200
        assert stop(server) == 0
    said = server.log.read_text()
    assert said.count("the trace ends here") == 1 and "/dev/full" in said and "No space left" in said


def test_bad_tls_files_are_named(tmp_path: Path) -> None:
    nonsense = tmp_path / "cert.pem"
    nonsense.write_text("no certificate")
    done: Any = _serve_directly(
        ServerConfig(port=free_port(), ssl_certfile=str(nonsense), ssl_keyfile=str(tmp_path / "missing.pem"))
    )
    assert done.returncode == 2 and "--ssl-certfile" in done.stderr.decode()


def test_tls(tmp_path: Path) -> None:
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", str(key), "-out", str(cert),
                    "-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"],
                   check=True, capture_output=True)  # fmt: skip
    with running(tmp_path, ssl_certfile=str(cert), ssl_keyfile=str(key)) as server:
        trusted = ssl.create_default_context(cafile=str(cert))
        response = httpx.post(server.url + "/v1/completions", json={"prompt": "x", "max_tokens": 2}, verify=trusted,
                              timeout=30)  # fmt: skip
        assert response.status_code == 200
        assert stop(server) == 0


def test_probes_answer_while_the_model_loads(tmp_path: Path) -> None:
    """The address answers at once: alive, not ready, and a request says why."""
    loaded = tmp_path / "loaded"
    with running(tmp_path, wait=False, env={"OCTAVO_TEST_LOADED": str(loaded)}) as server:
        until_status(server, "/health", 200)
        assert server.get("/ready").json()["reason"] == "the model is loading"
        early = server.post("/v1/completions", {"prompt": "x"})
        assert early.status_code == 503 and "loading" in early.json()["error"]["message"]
        loaded.touch()
        wait_ready(server)


def test_stop_signal_while_the_model_loads(tmp_path: Path) -> None:
    with running(tmp_path, wait=False, env={"OCTAVO_TEST_LOADED": str(tmp_path / "never")}) as server:
        until_status(server, "/health", 200)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(120) == 0
