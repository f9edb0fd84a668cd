"""`octavo cluster up`: Ray places servers, a router answers, a dead server comes back, Ctrl-C ends everything."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from octavo.api.server import bind
from octavo.cli import main
from octavo.cli.cluster import serve_flags
from octavo.disagg.cluster import Place
from octavo.disagg.zmq_hub import ZmqHub
from octavo.model.load.expected import expected_tensors
from tests.api.serving import ROOT
from tests.unit.load_files import hf_config_json, random_tensors, tiny, write_folder


def test_options_become_flags_and_secrets_do_not() -> None:
    flags = serve_flags({"model": "m", "page_size": "32", "prefix_cache": False, "check_books": True, "api_key": "k"})
    assert flags == ["--model", "m", "--page-size", "32", "--no-prefix-cache", "--check-books"]


def test_numbers_of_servers_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "up", "--prefill", "0"]) == 2
    assert "--prefill" in capsys.readouterr().err


def test_the_ports_of_a_place_stay_its_own() -> None:
    """Nobody is given them before its server listens, nor between two lives of it; the server can listen on them."""
    place = Place("prefill", [], {}, "127.0.0.1")
    assert place.address() == (f"http://127.0.0.1:{place.port}", place.bootstrap_port)
    for port in (place.port, place.bootstrap_port):
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        for _ in range(2):
            bind("127.0.0.1", port).close()
            hub = ZmqHub(("127.0.0.1", port))
            hub.close()


@pytest.mark.parametrize(
    ("address", "shown"),
    [("local", "Ray did not start on this machine: timed out"), ("auto", "--ray-address: got 'auto'")],
)
def test_a_ray_that_does_not_start_is_said(
    address: str, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import ray

    def fail(**options: object) -> None:
        raise Exception("timed out")

    monkeypatch.setattr(ray, "init", fail)
    assert main(["cluster", "up", "--ray-address", address]) != 0
    err = capsys.readouterr().err
    assert shown in err and "timed out" in err and "Traceback" not in err


def _line(log: Path, pattern: str, process: subprocess.Popen[bytes]) -> re.Match[str]:
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        found = re.search(pattern, log.read_text(errors="replace"))
        if found:
            return found
        assert process.poll() is None, log.read_text(errors="replace")
        time.sleep(0.2)
    raise AssertionError(log.read_text(errors="replace"))


def _servers(model: Path) -> dict[int, str]:
    """Processes that run `octavo serve` on `model`: pid -> command line."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if " serve --role" in command and str(model) in command:
                    found[int(entry.name)] = command
    return found


@pytest.mark.timeout(1800)
def test_one_command_brings_all_of_it_up_and_down(tmp_path: Path) -> None:
    config = tiny("llama")
    weights = random_tensors(expected_tensors(config))
    model = write_folder(tmp_path / "tiny", hf_config_json(config, "LlamaForCausalLM"), weights)
    log = tmp_path / "cluster.log"
    command = [sys.executable, "-m", "octavo", "cluster", "up", "--prefill", "1", "--decode", "1", "--router-port", "0",
               "--model", str(model), "--draft", "none", "--threads", "1", "--kv-memory", "16MiB", "--check-books",
               "--served-model-name", "tiny"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, cwd=tmp_path)
    try:
        url = _line(log, r"ready: (http://\S+) \(1 prefill, 1 decode\)", process)[1]
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "temperature": 0,
                "ignore_eos": True}

        def ask() -> str:
            answer = httpx.post(url + "/v1/chat/completions", json=body, timeout=200)
            assert answer.status_code == 200, answer.text
            return str(answer.json()["choices"][0]["message"]["content"])

        first = ask()
        assert ask() == first
        victim = next(pid for pid, command in _servers(model).items() if "--role decode" in command)
        os.kill(victim, signal.SIGKILL)
        _line(log, r"died and was started again", process)
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            with contextlib.suppress(AssertionError, httpx.TransportError):
                assert ask() == first
                break
            time.sleep(0.5)
        else:
            raise AssertionError(log.read_text(errors="replace"))
        process.send_signal(signal.SIGINT)
        assert process.wait(200) == 130
        assert not _servers(model)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(200)
        if process.poll() is None:
            process.kill()
            process.wait()
