"""`octavo bench --server` against a small HTTP server whose times and counts are known."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from octavo.bench import server_load
from octavo.bench.server_load import Client, drive, percentiles
from octavo.cli import main
from octavo.errors import ConfigError, OctavoError

FIRST_S, GAP_S, PIECES, TOKENS = 0.25, 0.125, 4, 8  # sums of these are exact


class Clock:
    """What the client reads instead of a clock. Time passes only where the server says so, and not before the client
    has looked at it for what it has been sent."""

    def __init__(self) -> None:
        self._now_s, self.looks = 0.0, 0
        self._looked = threading.Condition()

    def __call__(self) -> float:
        with self._looked:
            self.looks += 1
            self._looked.notify_all()
            return self._now_s

    def pass_by(self, seconds: float, *, behind_looks: int) -> None:
        with self._looked:
            assert self._looked.wait_for(lambda: self.looks >= behind_looks, timeout=120)
            self._now_s += seconds


class Crowd:
    """How many requests are served at once. Each waits until there are as many as are expected."""

    def __init__(self, expected: int) -> None:
        self.most = self._here = 0
        self._all, self._lock = threading.Barrier(expected, timeout=120), threading.Lock()

    def come(self) -> None:
        with self._lock:
            self._here += 1
            self.most = max(self.most, self._here)
        self._all.wait()

    def go(self) -> None:
        with self._lock:
            self._here -= 1


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        self._json(200, {"data": [{"id": "m"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = body["messages"][0]["content"]
        self.server.seen.append((body, self.headers.get("Authorization")))  # type: ignore[attr-defined]
        if prompt == "refuse":
            self._json(429, {"error": {"message": "queue full"}})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.server.crowd.come()  # type: ignore[attr-defined]
        clock: Clock = self.server.clock  # type: ignore[attr-defined]
        looks = clock.looks
        clock.pass_by(FIRST_S, behind_looks=looks)
        for number in range(PIECES):
            self._event({"choices": [{"delta": {"content": "two tokens"}}]})
            clock.pass_by(GAP_S, behind_looks=looks + number + 1)
        self.server.crowd.go()  # type: ignore[attr-defined]
        if prompt == "cut":
            return
        if prompt != "no usage":
            self._event({"choices": [], "usage": {"completion_tokens": TOKENS}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, event: object) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.flush()

    def _json(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.seen, server.clock, server.crowd = [], Clock(), Crowd(1)  # type: ignore[attr-defined]
    monkeypatch.setattr(server_load, "time", SimpleNamespace(perf_counter=server.clock))  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def client_of(server: ThreadingHTTPServer, **changes: str) -> Client:
    return Client(f"http://127.0.0.1:{server.server_port}", model=None, api_key=changes.get("key"), timeout_s=30)


def run(server: ThreadingHTTPServer, prompts: list[str], streams: int):  # type: ignore[no-untyped-def]
    server.crowd = Crowd(streams)  # type: ignore[attr-defined]
    return drive(
        client_of(server), prompts, streams=streams, max_tokens=8, temperature=0.0, extra={}, progress=lambda *_: None
    ).summary()


def test_times_and_counts_are_the_clients_and_the_servers(server: ThreadingHTTPServer) -> None:
    summary = run(server, ["a", "b", "c", "d"], 1)
    assert (summary["requests"], summary["failed"], summary["output_tokens"]) == (4, 0, 4 * TOKENS)
    assert set(summary["ttft_s"].values()) == {FIRST_S}
    assert set(summary["inter_piece_s"].values()) == {GAP_S}
    assert summary["time_per_output_token_s"]["p50"] == (PIECES - 1) * GAP_S / (TOKENS - 1)
    assert summary["wall_s"] == 4 * (FIRST_S + PIECES * GAP_S)
    assert not summary["tokens_counted_by_pieces"]
    assert [body["model"] for body, _ in server.seen] == ["m"] * 4  # type: ignore[attr-defined]


def test_no_more_than_the_streams_run_at_once(server: ThreadingHTTPServer) -> None:
    for streams in (1, 2, 4):
        summary = run(server, ["a"] * 4, streams)
        assert (summary["requests"], summary["failed"], summary["output_tokens"]) == (4, 0, 4 * TOKENS)
        assert server.crowd.most == streams  # type: ignore[attr-defined]


def test_failures_are_counted_and_named_and_the_load_goes_on(server: ThreadingHTTPServer) -> None:
    summary = run(server, ["refuse", "a", "cut", "no usage"], 1)
    assert summary["failed"] == 2 and summary["tokens_counted_by_pieces"]
    assert any("429" in error for error in summary["errors"]) and any("[DONE]" in error for error in summary["errors"])


def test_the_key_is_sent(server: ThreadingHTTPServer) -> None:
    client_of(server, key="secret").ask("a", max_tokens=1, temperature=0, extra={})
    assert server.seen[0][1] == "Bearer secret"  # type: ignore[attr-defined]


def test_percentiles_are_nearest_rank() -> None:
    assert percentiles([float(n) for n in range(1, 101)]) == {"p50": 50.0, "p90": 90.0, "p99": 99.0, "mean": 50.5}
    assert percentiles([3.0]) == {"p50": 3.0, "p90": 3.0, "p99": 3.0, "mean": 3.0}
    assert percentiles([]) == {}


@pytest.mark.parametrize("url", ["ftp://x", "http://"])
def test_bad_addresses_are_usage_errors(url: str) -> None:
    with pytest.raises(ConfigError, match="--server"):
        Client(url, model="m", api_key=None, timeout_s=1)


def test_nobody_there_is_said_plainly() -> None:
    with pytest.raises(OctavoError, match="no OpenAI-compatible server"):
        Client("http://127.0.0.1:9", model=None, api_key=None, timeout_s=1)


def test_the_command_prints_a_table(server: ThreadingHTTPServer, capsys: pytest.CaptureFixture[str]) -> None:
    address = f"127.0.0.1:{server.server_port}"
    assert main(["bench", "--server", address, "--limit", "3", "--streams", "1,2", "--requests", "4"]) == 0
    table = capsys.readouterr().out
    assert "TTFT ms" in table and len(table.splitlines()) == 5
