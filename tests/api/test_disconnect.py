"""Clients that leave free their pages, streaming or not; those that stay are not held up."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
import time
from collections.abc import AsyncGenerator, Iterator, MutableMapping
from typing import Any

import httpx
import pytest

from octavo.api.disconnect import EventStream
from tests.api.serving import IDLE_S, Server, running

LONG = {"prompt": "long", "max_tokens": 400, "ignore_eos": True}


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """An engine whose steps take 20 ms, so that an answer of 400 tokens takes 8 s."""
    folder = tmp_path_factory.mktemp("slow")
    with running(folder, env={"OCTAVO_TEST_STEP_S": "0.02"}, check_books=True, max_running=8, max_queue=4) as server:
        yield server
        assert server.metric("kv_balance_violations_total") == 0


def wait_running(server: Server, count: int) -> None:
    deadline = time.monotonic() + 10
    while server.metric("num_requests_running") < count:
        assert time.monotonic() < deadline, "the requests never ran"
        time.sleep(0.02)


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_frees_the_pages(slow: Server, stream: bool) -> None:
    aborted = slow.metric("request_success_total")
    with httpx.Client(timeout=30) as client:
        request = client.build_request("POST", slow.url + "/v1/completions", json=LONG | {"stream": stream, "n": 2})
        thread = threading.Thread(target=_send_and_leave, args=(request,))
        thread.start()
        wait_running(slow, 2)
        thread.join()
    assert slow.wait_idle() < IDLE_S
    pool = slow.get("/kv.json").json()["pools"]["full"]
    assert pool["held"] == pool["leased"] == 0
    assert slow.metric("request_success_total") == aborted + 2


def _send_and_leave(request: httpx.Request) -> None:
    """Send the raw request, wait a little, close the connection."""
    host, port = str(request.url.host), request.url.port
    lines = "".join(f"{k}: {v}\r\n" for k, v in request.headers.items())
    head = f"{request.method} {request.url.path} HTTP/1.1\r\n{lines}"
    with socket.create_connection((host, port or 80)) as connection:
        connection.sendall(head.encode() + b"\r\n" + request.content)
        time.sleep(0.7)


def test_leaving_before_the_answer_begins(slow: Server) -> None:
    """The connection closes at once: the request is taken back whether or not the engine has it yet."""
    for delay_s in (0.0, 0.001, 0.005, 0.02, 0.1):
        body = httpx.Request("POST", slow.url + "/v1/completions", json=LONG | {"stream": True})
        head = "POST /v1/completions HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in body.headers.items())
        with socket.create_connection(("127.0.0.1", int(slow.url.rpartition(":")[2]))) as connection:
            connection.sendall(head.encode() + b"\r\n" + body.content)
            time.sleep(delay_s)
    time.sleep(0.2)
    assert slow.wait_idle() < IDLE_S


def test_abort_request_ends_the_stream(slow: Server) -> None:
    body = LONG | {"stream": True, "request_id": "to-be-aborted"}
    with httpx.stream("POST", slow.url + "/v1/completions", json=body, timeout=30) as response:
        lines = response.iter_lines()
        next(lines)
        assert slow.post("/abort_request", {"rid": "to-be-aborted"}).json() == {"aborted": 1}
        rest = "\n".join(lines)
    assert '"finish_reason":"abort"' in rest and rest.rstrip().endswith("data: [DONE]")
    assert slow.wait_idle() < IDLE_S


def test_abort_all(slow: Server) -> None:
    answers: list[httpx.Response] = []
    threads = [threading.Thread(target=lambda: answers.append(slow.post("/v1/completions", LONG))) for _ in range(3)]
    for thread in threads:
        thread.start()
    wait_running(slow, 3)
    assert slow.post("/abort_request", {"abort_all": True}).json() == {"aborted": 3}
    for thread in threads:
        thread.join(10)
    assert [a.json()["choices"][0]["finish_reason"] for a in answers] == ["abort"] * 3


def test_the_same_id_twice_is_refused(slow: Server) -> None:
    body = LONG | {"request_id": "twice"}
    thread = threading.Thread(target=lambda: slow.post("/v1/completions", body))
    thread.start()
    wait_running(slow, 1)
    second = slow.post("/v1/completions", body)
    assert second.status_code == 400 and second.json()["error"]["param"] == "request_id"
    slow.post("/abort_request", {"rid": "twice"})
    thread.join(10)


def test_flush_while_running_is_refused(slow: Server) -> None:
    thread = threading.Thread(target=lambda: slow.post("/v1/completions", LONG | {"request_id": "busy"}))
    thread.start()
    wait_running(slow, 1)
    busy = slow.post("/flush_cache", {})
    assert busy.status_code == 409 and busy.json()["error"]["code"] == "busy"
    slow.post("/abort_request", {"rid": "busy"})
    thread.join(10)
    slow.wait_idle()
    assert slow.post("/flush_cache", {}).status_code == 200


def test_full_queue_gets_429(slow: Server) -> None:
    """8 run, 4 may wait: of 20 at once some are turned away, with a time to come back; the others are served."""

    async def all_at_once() -> list[httpx.Response]:
        async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=50)) as client:
            body = {"prompt": "q", "max_tokens": 20, "ignore_eos": True}
            return await asyncio.gather(*(client.post(slow.url + "/v1/completions", json=body) for _ in range(30)))

    answers = asyncio.run(all_at_once())
    refused = [a for a in answers if a.status_code == 429]
    served = [a for a in answers if a.status_code == 200]
    assert len(refused) + len(served) == 30 and refused and len(served) >= 12
    for answer in refused:
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["type"] == "rate_limit_error"
    assert {a.json()["usage"]["completion_tokens"] for a in served} == {20}


def test_a_slow_reader_holds_up_nobody(slow: Server) -> None:
    body = httpx.Request("POST", slow.url + "/v1/completions", json=LONG | {"stream": True, "max_tokens": 450})
    head = "POST /v1/completions HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in body.headers.items())
    with socket.socket() as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        lazy.connect(("127.0.0.1", int(slow.url.rpartition(":")[2])))
        lazy.sendall(head.encode() + b"\r\n" + body.content)
        time.sleep(0.3)  # and never read
        started = time.monotonic()
        answer = slow.post("/v1/completions", {"prompt": "quick", "max_tokens": 10, "ignore_eos": True})
        assert answer.status_code == 200 and time.monotonic() - started < 6.0, "450 tokens of the other take 9 s"
    assert slow.wait_idle() < IDLE_S


def test_a_tenth_leaving_at_random(slow: Server) -> None:
    dice = random.Random(11)

    async def one(client: httpx.AsyncClient, number: int) -> str:
        stream = number % 2 == 0
        body = {"prompt": f"client {number}", "max_tokens": 30, "ignore_eos": True, "stream": stream}
        task = asyncio.ensure_future(client.post(slow.url + "/v1/completions", json=body))
        if number % 10 == 0:
            await asyncio.sleep(dice.random() * 0.8)
            task.cancel()
            return "left"
        response = await task
        assert response.status_code in (200, 429), response.text
        return "served" if response.status_code == 200 else "refused"

    async def crowd() -> list[str]:
        async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=12)) as client:
            return await asyncio.gather(*(one(client, number) for number in range(60)))

    ends = asyncio.run(crowd())
    assert ends.count("left") == 6 and ends.count("served") >= 40
    assert slow.wait_idle() < IDLE_S
    pool = slow.get("/kv.json").json()["pools"]["full"]
    assert pool["held"] == pool["leased"] == 0


@pytest.mark.parametrize("silent_s", [0.0, 0.5])
def test_a_stream_on_which_nothing_comes_is_kept_alive(silent_s: float) -> None:
    """A comment between the events while the answer waits, none where it flows, and nothing behind its end."""
    sent: list[bytes] = []
    closed: list[bool] = []

    async def blocks() -> AsyncGenerator[bytes, None]:
        for number in range(3):
            await asyncio.sleep(silent_s if number == 1 else 0)
            yield b"data: %d\n\n" % number

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message.get("body", b"start"))

    async def go() -> None:
        await EventStream(blocks(), lambda: closed.append(True), keep_alive_s=0.1)({"type": "http"}, receive, send)
        await asyncio.sleep(0.25)

    asyncio.run(go())
    events = [block for block in sent if not block.startswith(b":")]
    comments = [block for block in sent if block.startswith(b":")]
    assert events == [b"start", b"data: 0\n\n", b"data: 1\n\n", b"data: 2\n\n", b""] and sent[-1] == b"" and closed
    assert 1 <= len(comments) <= 5 if silent_s else not comments
    assert all(comment.endswith(b"\n\n") for comment in comments)
