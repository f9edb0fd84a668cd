"""Clients that leave free their pages, streaming or not; those that stay are not held up."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
import time
from collections.abc import AsyncGenerator, Iterator, MutableMapping
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from octavo.api import disconnect
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


def connection_with(server: Server, body: dict[str, Any]) -> socket.socket:
    """A connection on which a completion was asked for, and nothing read."""
    request = httpx.Request("POST", server.url + "/v1/completions", json=body)
    lines = "".join(f"{k}: {v}\r\n" for k, v in request.headers.items())
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    one.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
    one.sendall(f"POST /v1/completions HTTP/1.1\r\n{lines}\r\n".encode() + request.content)
    return one


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_frees_the_pages(slow: Server, stream: bool) -> None:
    aborted = slow.metric("request_success_total")
    with connection_with(slow, LONG | {"stream": stream, "n": 2}):
        slow.wait_running(2)
    assert slow.wait_idle() < IDLE_S
    pool = slow.get("/kv.json").json()["pools"]["full"]
    assert pool["held"] == pool["leased"] == 0
    assert slow.metric("request_success_total") == aborted + 2


def test_leaving_before_the_answer_begins(slow: Server) -> None:
    """The connection closes at once: the request is taken back whether or not the engine has it yet."""
    for delay_s in (0.0, 0.001, 0.005, 0.02, 0.1):
        with connection_with(slow, LONG | {"stream": True}):
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
    slow.wait_running(3)
    assert slow.post("/abort_request", {"abort_all": True}).json() == {"aborted": 3}
    for thread in threads:
        thread.join(10)
    assert [a.json()["choices"][0]["finish_reason"] for a in answers] == ["abort"] * 3


def test_the_same_id_twice_is_refused(slow: Server) -> None:
    body = LONG | {"request_id": "twice"}
    thread = threading.Thread(target=lambda: slow.post("/v1/completions", body))
    thread.start()
    slow.wait_running(1)
    second = slow.post("/v1/completions", body)
    assert second.status_code == 400 and second.json()["error"]["param"] == "request_id"
    slow.post("/abort_request", {"rid": "twice"})
    thread.join(10)


def test_flush_while_running_is_refused(slow: Server) -> None:
    thread = threading.Thread(target=lambda: slow.post("/v1/completions", LONG | {"request_id": "busy"}))
    thread.start()
    slow.wait_running(1)
    busy = slow.post("/flush_cache", {})
    assert busy.status_code == 409 and busy.json()["error"]["code"] == "busy"
    slow.post("/abort_request", {"rid": "busy"})
    thread.join(10)
    slow.wait_idle()
    assert slow.post("/flush_cache", {}).status_code == 200


def test_full_queue_gets_429(slow: Server) -> None:
    """8 run and do not end, 4 may wait: of 20 more 4 wait and are served, the others get a time to come back."""

    async def all_at_once() -> list[httpx.Response]:
        async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=50)) as client:

            def ask(**body: Any) -> asyncio.Future[httpx.Response]:
                whole = {"prompt": "q", "ignore_eos": True, **body}
                return asyncio.ensure_future(client.post(slow.url + "/v1/completions", json=whole))

            first = [ask(max_tokens=480, request_id=f"first-{i}") for i in range(8)]
            await asyncio.to_thread(slow.wait_running, 8)
            others = [ask(max_tokens=20) for _ in range(20)]
            while sum(one.done() for one in others) < 16:
                await asyncio.wait([one for one in others if not one.done()], return_when=asyncio.FIRST_COMPLETED)
            assert not any(one.done() for one in first), "they ran all the time"
            await asyncio.to_thread(slow.post, "/abort_request", {"rid": "first"})
            await asyncio.gather(*first)
            return await asyncio.gather(*others)

    answers = asyncio.run(all_at_once())
    refused = [a for a in answers if a.status_code == 429]
    served = [a for a in answers if a.status_code == 200]
    assert (len(refused), len(served)) == (16, 4)
    for answer in refused:
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["type"] == "rate_limit_error"
    assert {a.json()["usage"]["completion_tokens"] for a in served} == {20}


def test_a_slow_reader_holds_up_nobody(slow: Server) -> None:
    with connection_with(slow, LONG | {"stream": True, "max_tokens": 450}):
        slow.wait_running(1)  # and never read
        answer = slow.post("/v1/completions", {"prompt": "quick", "max_tokens": 10, "ignore_eos": True})
        assert answer.status_code == 200
        assert slow.metric("num_requests_running") == 1, "the 450 tokens of the other are not waited for"
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
        while (response := await task).status_code == 429:  # whoever left may not have been noticed yet
            await asyncio.sleep(0.05)
            task = asyncio.ensure_future(client.post(slow.url + "/v1/completions", json=body))
        assert response.status_code == 200, response.text
        return "served"

    async def crowd() -> list[str]:
        async with httpx.AsyncClient(timeout=240, limits=httpx.Limits(max_connections=12)) as client:
            return await asyncio.gather(*(one(client, number) for number in range(60)))

    ends = asyncio.run(crowd())
    assert (ends.count("left"), ends.count("served")) == (6, 54)
    assert slow.wait_idle() < IDLE_S
    pool = slow.get("/kv.json").json()["pools"]["full"]
    assert pool["held"] == pool["leased"] == 0


class QuickLoop(asyncio.SelectorEventLoop):
    """A loop in which waiting takes no time: its clock goes on to the next timer at once, and only then."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0
        look = self._selector.select  # type: ignore[attr-defined]

        def select(timeout: float | None = None) -> list[Any]:
            self._now_s += timeout or 0.0
            return list(look(0))

        self._selector.select = select  # type: ignore[attr-defined]

    def time(self) -> float:
        return self._now_s


@pytest.mark.parametrize(("waits_s", "comments"), [((0, 0.45, 0), 4), ((0.08,) * 8, 0), ((0.15, 0.05, 0.25), 3)])
def test_a_stream_on_which_nothing_comes_is_kept_alive(
    waits_s: tuple[float, ...], comments: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A comment between the events while the answer waits, none where it flows, and nothing behind its end."""
    sent: list[bytes] = []
    closed: list[bool] = []

    async def blocks() -> AsyncGenerator[bytes, None]:
        for number, wait_s in enumerate(waits_s):
            await asyncio.sleep(wait_s)
            yield b"data: %d\n\n" % number

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message.get("body", b"start"))

    async def go() -> None:
        await EventStream(blocks(), lambda: closed.append(True), keep_alive_s=0.1)({"type": "http"}, receive, send)
        await asyncio.sleep(0.25)

    with asyncio.Runner(loop_factory=QuickLoop) as runner:
        monkeypatch.setattr(disconnect, "time", SimpleNamespace(monotonic=runner.get_loop().time))
        runner.run(go())
    events = [block for block in sent if not block.startswith(b":")]
    said = [block for block in sent if block.startswith(b":")]
    assert events == [b"start", *(b"data: %d\n\n" % n for n in range(len(waits_s))), b""] and sent[-1] == b""
    assert closed and len(said) == comments
    assert all(comment.endswith(b"\n\n") for comment in said)
