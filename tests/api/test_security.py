"""Keys, limits, hostile headers and paths, what is logged, where it listens."""

from __future__ import annotations

import contextlib
import json
import random
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.api.serving import Server, running

KEY = "octavo-test-key-3f7a"
SECRET_PROMPT = "the cat is called Wolfgang"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("guarded")
    with running(folder, api_key=KEY, max_body_bytes=2000, cors_origin=("https://ok.example",), root_path="/llm",
                 log_level="debug", log_json=True) as server:  # fmt: skip
        yield server


def test_key_is_needed_everywhere_but_for_probes(guarded: Server) -> None:
    for path in ("/v1/models", "/metrics", "/kv.json", "/server_info", "/version", "/openapi.json", "/nope"):
        for given in (None, "Bearer wrong", KEY, "Basic " + KEY, "Bearer", "Bearer " + KEY + "x"):
            headers = {} if given is None else {"Authorization": given}
            response = httpx.get(guarded.url + path, headers=headers, timeout=30)
            assert response.status_code == 401, (path, headers)
            assert response.headers["www-authenticate"] == "Bearer"
            assert response.json()["error"]["code"] == "invalid_api_key"
        assert guarded.get(path).status_code in (200, 404)
    assert httpx.post(guarded.url + "/v1/completions", json={"prompt": "x"}, timeout=30).status_code == 401
    for path in ("/health", "/ready", "/kv"):
        assert httpx.get(guarded.url + path, timeout=30).status_code == 200


def test_body_limit(guarded: Server) -> None:
    large = guarded.post("/v1/completions", {"prompt": "x" * 3000})
    assert large.status_code == 413 and "2000" in large.json()["error"]["message"]

    def chunks() -> Iterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(30):
            yield b"x" * 100
        yield b'"}'

    headers = guarded.headers | {"Content-Type": "application/json"}
    unannounced = httpx.post(guarded.url + "/v1/completions", content=chunks(), headers=headers, timeout=30)
    assert unannounced.status_code == 413
    assert unannounced.json()["error"]["code"] == "request_body_too_large"


def test_cors(guarded: Server) -> None:
    ask = {"Origin": "https://ok.example", "Access-Control-Request-Method": "POST",
           "Access-Control-Request-Headers": "authorization,content-type"}  # fmt: skip
    allowed = httpx.options(guarded.url + "/v1/chat/completions", headers=ask, timeout=30)
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://ok.example"
    foreign = httpx.options(guarded.url + "/v1/chat/completions", headers=ask | {"Origin": "https://evil"}, timeout=30)
    assert "access-control-allow-origin" not in foreign.headers


def test_root_path_with_and_without_the_prefix(guarded: Server) -> None:
    for path in ("/v1/models", "/llm/v1/models"):
        assert guarded.get(path).status_code == 200
    assert httpx.get(guarded.url + "/llm/v1/models", timeout=30).status_code == 401
    assert httpx.get(guarded.url + "/llm/health", timeout=30).status_code == 200
    assert guarded.get("/openapi.json").json()["servers"] == [{"url": "/llm"}]


def test_request_ids(server: Server) -> None:
    own = httpx.get(server.url + "/health", headers={"X-Request-Id": "trace-1.a"}, timeout=30)
    assert own.headers["x-request-id"] == "trace-1.a"
    for bad in ("", "x" * 500, "a b", "ü".encode().decode("latin-1")):
        replaced = httpx.get(server.url + "/health", headers={"X-Request-Id": bad.encode("latin-1")}, timeout=30)
        assert len(replaced.headers["x-request-id"]) == 32


def raw(server: Server, data: bytes) -> bytes:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
        answer = b""
        with contextlib.suppress(ConnectionResetError):  # the server closed on what it had not read
            while part := connection.recv(65536):
                answer += part
    return answer


def test_hostile_bytes_never_cause_a_5xx(server: Server) -> None:
    """Header and path fuzzing below what an HTTP client would let out."""
    dice = random.Random(5)
    samples = [
        b"GET /v1/models/../../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /%00%ff%c0%af HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /v1/models/%2e%2e%2f HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET http://elsewhere/v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /" + b"a" * 60_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nA: " + b"b" * 200_000 + b"\r\n\r\n",
        b"GET /health HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: \xff\xfe\r\nContent-Length: 2\r\n\r\n{}",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"\r\n\r\n\r\n",
    ]
    for _ in range(60):
        path = bytes(dice.randrange(33, 256) for _ in range(dice.randrange(1, 60)))
        name = bytes(dice.randrange(32, 127) for _ in range(dice.randrange(1, 20)))
        value = bytes(dice.randrange(1, 256) for _ in range(dice.randrange(0, 60)))
        samples.append(b"GET /" + path + b" HTTP/1.1\r\nHost: x\r\n" + name + b": " + value + b"\r\n\r\n")
    for sample in samples:
        answer = raw(server, sample)
        status = answer.split(b" ", 2)[1:2]
        assert not answer or status[0][:1] in b"2345" and not status[0].startswith(b"5"), (sample[:80], answer[:200])
    assert server.get("/health").status_code == 200


def test_templates_see_data_not_code(server: Server) -> None:
    for text in ("{{ 7 * 7 }}", "{% for x in ().__class__.__base__.__subclasses__() %}{{ x }}{% endfor %}"):
        tokens = server.post("/tokenize", {"messages": [{"role": "user", "content": text}]}).json()["tokens"]
        assert text in server.post("/detokenize", {"tokens": tokens}).json()["prompt"]
    refused = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}],
                                                   "chat_template": "{{ 7 * 7 }}"})  # fmt: skip
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "chat_template"


def test_no_prompt_and_no_key_in_the_log(guarded: Server) -> None:
    assert guarded.post("/v1/completions", {"prompt": SECRET_PROMPT, "max_tokens": 4}).status_code == 200
    assert guarded.post("/v1/completions", {"prompt": SECRET_PROMPT, "temperature": -1}).status_code == 400
    httpx.get(guarded.url + "/v1/models", headers={"Authorization": "Bearer not-the-key-9"}, timeout=30)
    log = guarded.log.read_text()
    assert "Wolfgang" not in log and KEY not in log and "not-the-key-9" not in log
    for line in log.splitlines():
        assert {"time", "level", "message"} <= set(json.loads(line))


def test_prompts_are_logged_when_asked_for(tmp_path: Path) -> None:
    with running(tmp_path, log_prompts=True) as server:
        assert server.post("/v1/completions", {"prompt": SECRET_PROMPT, "max_tokens": 2}).status_code == 200
        assert "Wolfgang" in server.log.read_text()


def test_listens_on_loopback_only(server: Server) -> None:
    port = int(server.url.rpartition(":")[2])
    listening = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    addresses = {fields[1].split(":")[0] for fields in listening
                 if fields[3] == "0A" and int(fields[1].split(":")[1], 16) == port}  # fmt: skip
    assert addresses == {"0100007F"}


def test_no_outgoing_connections(server: Server) -> None:
    """No telemetry: neither process holds a connection to anything but loopback, after serving a request."""
    assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 2}).status_code == 200
    for pid in (server.process.pid, server.engine_pid()):
        inodes = {
            link.removeprefix("socket:[").rstrip("]")
            for fd in Path(f"/proc/{pid}/fd").iterdir()
            if (link := _link(fd)).startswith("socket:[")
        }
        for table in ("tcp", "tcp6", "udp", "udp6"):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                remote = fields[2].split(":")[0]
                loopback = ("0100007F", "00000000", "0" * 32, "0000000000000000FFFF00000100007F")
                assert fields[9] not in inodes or remote in loopback, line


def _link(fd: Path) -> str:
    try:
        return str(fd.readlink())
    except OSError:
        return ""


@pytest.mark.parametrize(("host", "warned"), [("0.0.0.0", True), ("127.0.0.1", False)])
def test_an_open_door_is_said_at_start(tmp_path: Path, host: str, warned: bool) -> None:
    """The first line says where, before the model is there; a server that all may use says so."""
    with running(tmp_path, host=host) as server:
        pass
    lines = server.log.read_text().splitlines()
    assert f"listening on http://{host}:" in lines[0] and "loading smollm2" in lines[0]
    assert any("no --api-key" in line for line in lines) is warned
    assert lines[-1].endswith("stopped")
