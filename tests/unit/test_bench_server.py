"""`octavo bench --server` against a small HTTP server whose times and counts are known."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from octavo.bench.server_load import Client, drive, percentiles
from octavo.cli import main
from octavo.errors import ConfigError, OctavoError

FIRST_S, GAP_S, PIECES, TOKENS = 0.03, 0.01, 4, 8


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
        time.sleep(FIRST_S)
        for _ in range(PIECES):
            self._event({"choices": [{"delta": {"content": "two tokens"}}]})
            time.sleep(GAP_S)
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
def server() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.seen = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def client_of(server: ThreadingHTTPServer, **changes: str) -> Client:
    return Client(f"http://127.0.0.1:{server.server_port}", model=None, api_key=changes.get("key"), timeout_s=30)


def run(server: ThreadingHTTPServer, prompts: list[str], streams: int):  # type: ignore[no-untyped-def]
    return drive(
        client_of(server), prompts, streams=streams, max_tokens=8, temperature=0.0, extra={}, progress=lambda *_: None
    ).summary()


def test_times_and_counts_are_the_clients_and_the_servers(server: ThreadingHTTPServer) -> None:
    summary = run(server, ["a", "b", "c", "d"], 2)
    assert (summary["requests"], summary["failed"], summary["output_tokens"]) == (4, 0, 4 * TOKENS)
    assert summary["ttft_s"]["p50"] >= FIRST_S
    assert summary["inter_piece_s"]["p50"] >= GAP_S
    assert summary["time_per_output_token_s"]["p50"] >= (PIECES - 1) * GAP_S / (TOKENS - 1)
    assert not summary["tokens_counted_by_pieces"]
    assert [body["model"] for body, _ in server.seen] == ["m"] * 4  # type: ignore[attr-defined]


def test_no_more_than_the_streams_run_at_once(server: ThreadingHTTPServer) -> None:
    alone, together = run(server, ["a"] * 4, 1), run(server, ["a"] * 4, 4)
    assert alone["wall_s"] >= 4 * (FIRST_S + PIECES * GAP_S)
    assert together["wall_s"] < alone["wall_s"]


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
