"""Faults between real servers over Mooncake that need no signal: aborts in every state, lost and late messages, reads
that outlive their request, rooms that are taken, unknown or over, servers that do not fit. The road says when."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo.disagg import protocol as p
from tests.api.serving import Server, free_port, running, until
from tests.disagg.processes import Trio, failure_of, kill_tree, rooms, routing, trio
from tests.disagg.road import Road, road
from tests.disagg.test_cuts import GREEDY, LONG, OPTIONS, Calls, leased, text_of, warm

OTHER = "somebody else's prompt"
ROOM_TIMEOUT_S = 20.0
_ROOMS = iter(range(6_000_000, 7_000_000))


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    """Steps take a while, chunks are small: every state lasts. Two rows on the decode server."""
    options = {**OPTIONS, "prefill_chunk": 256, "max_batched_tokens": 256, "room_timeout_s": ROOM_TIMEOUT_S}
    with trio(tmp_path_factory.mktemp("slow"), env={"OCTAVO_TEST_STEP_S": "0.03"}, decode={"max_running": 2},
              **options) as servers:
        yield servers


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    with running(tmp_path_factory.mktemp("alone"), served_model_name=("tiny",), **OPTIONS) as server:
        return {prompt: text_of(server.post("/v1/completions", {**GREEDY, "prompt": prompt, "max_tokens": 8}))
                for prompt in (*LONG, OTHER)}


@pytest.fixture
def way(slow: Trio) -> Iterator[Road]:
    """A road of its own for each test: to the decode server it is a prefill server it has never met. Books close."""
    with road(slow.bootstrap_port) as built:
        yield built
        built.lose = built.keep = lambda message: False
        built.deliver()
        if built.data is not None:
            built.data.go_on()
        for server in (slow.prefill, slow.decode):
            server.wait_idle()
        slow.check_at_rest()


class Leaver:
    """A client that sends a request and goes away when it is told to."""

    def __init__(self, server: Server, body: dict[str, Any]) -> None:
        url = httpx.URL(server.url)
        self.socket = socket.create_connection((url.host, url.port))
        data = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        self.socket.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)

    def leave(self) -> None:
        self.socket.close()


def body_of(way: Road, room: int, prompt: str, tokens: int = 8) -> dict[str, Any]:
    return {**GREEDY, "prompt": prompt, "max_tokens": tokens, "bootstrap_host": "127.0.0.1",
            "bootstrap_port": way.port, "bootstrap_room": room}


def hold_in(state: str, slow: Trio, way: Road, alone: dict[str, str]) -> Callable[[], None]:
    """Make the next room stay in a state of the decode side. Returns what ends that."""
    lost = {"arrived": p.Welcome, "waiting": p.Kept}.get(state)
    way.lose = lambda message: lost is not None and isinstance(message, lost)
    if state == "preallocating":
        calls = Calls(slow, None)
        busy = [calls.ask(OTHER + str(i), 1000) for i in range(2)]
        until(lambda: rooms(slow.decode).get("running") == 2)

        def free() -> None:
            slow.decode.post("/abort_request", {"abort_all": True})
            for one in busy:
                for call in one.values():
                    call.result()

        return free
    if state == "transferring":
        warm(Calls(slow, way), alone, OTHER)
        assert way.data is not None
        way.data.stop_after(100_000)
    return lambda: None


@pytest.mark.parametrize("state", ["arrived", "preallocating", "transferring", "waiting", "running"])
@pytest.mark.parametrize("side", ["decode", "prefill"])
@pytest.mark.parametrize("how", ["its client leaves", "abort_request"])
def test_abort_in_each_state_from_either_side(
    state: str, side: str, how: str, slow: Trio, way: Road, alone: dict[str, str]
) -> None:
    free = hold_in(state, slow, way, alone)
    prompt = LONG[0] if state == "transferring" else OTHER
    tokens = 200 if state == "transferring" else 800  # whoever is to be seen running must not be done before
    body = body_of(way, next(_ROOMS), f"{how} {side} {state} {prompt}", tokens)  # nothing of it is cached
    clients = {"prefill": Leaver(slow.prefill, body), "decode": Leaver(slow.decode, body)}
    until(lambda: rooms(slow.decode).get(state, 0) >= 1)
    if state == "transferring":  # a chunk is announced, its read has begun and stands
        until(lambda: way.data is not None and way.data.stands)
    if how == "abort_request":  # while `preallocating` those it waits for end with it
        (slow.prefill if side == "prefill" else slow.decode).post("/abort_request", {"abort_all": True})
    else:
        clients[side].leave()
    if side == "decode":
        until(lambda: state not in rooms(slow.decode))
    elif state == "transferring":  # an abort that comes behind the last chunk finds the answer given: the room goes on
        until(lambda: "computing" not in rooms(slow.prefill))
    if state == "transferring":
        assert leased(slow.decode) > 0, "the read is not over, so the lease is not"
        assert way.data is not None
        way.data.go_on()
    way.lose = lambda message: False
    free()
    if side == "prefill" and state in ("waiting", "running"):  # everything is on the decode server: it goes on
        until(lambda: rooms(slow.decode) == {"running": 1})
        clients["decode"].leave()
    slow.decode.wait_idle()  # the other half of a room hears that it is over
    slow.prefill.wait_idle()
    warm(Calls(slow, way), alone, OTHER)


@pytest.mark.parametrize("state", ["arrived", "computing"])
def test_abort_in_each_state_of_the_prefill_side(state: str, slow: Trio, way: Road, alone: dict[str, str]) -> None:
    calls = Calls(slow, way)
    with slow.holding():
        started = calls.ask(LONG[1] + state, only="prefill" if state == "arrived" else "")
        until(lambda: rooms(slow.prefill) == {state: 1})
        if state == "computing":
            until(lambda: slow.prefill.books()["rows"][0]["committed"] == 256)
        assert slow.prefill.post("/abort_request", {"abort_all": True}).json() == {"aborted": 1}
        end = started["prefill"].result()[0]
    assert end.status_code == 200 and end.json()["choices"][0]["finish_reason"] == "abort"
    if "decode" in started:
        answer, _ = started["decode"].result()
        assert answer.status_code == 502 and "the prefill server ended the room: aborted" in answer.text
    warm(calls, alone)


def test_an_offered_room_has_its_answer_already(slow: Trio, way: Road, alone: dict[str, str]) -> None:
    """A router passes the decode server's stream on when both halves have answered: the prefill server does so when
    the prompt is computed. Pages stay until they are read; there is nothing left to abort."""
    way.lose = lambda message: isinstance(message, p.Read)
    started = Calls(slow, way).ask(LONG[1])
    answer, _ = started["prefill"].result()
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 1
    assert rooms(slow.prefill) == {"offered": 1} and not started["decode"].done()
    assert slow.prefill.post("/abort_request", {"abort_all": True}).json() == {"aborted": 0}
    way.lose = lambda message: False
    assert text_of(started["decode"].result()[0]) == alone[LONG[1]]


@pytest.mark.parametrize("lost", [p.Read, p.Kept])
def test_a_lost_read_done_is_asked_again(lost: type, slow: Trio, way: Road, alone: dict[str, str]) -> None:
    seen: list[p.Message] = []
    way.lose = lambda message: isinstance(message, lost) and (seen.append(message) or len(seen) <= 3)
    warm(Calls(slow, way), alone, LONG[0])
    assert len(seen) > 3


def test_a_read_that_outlives_its_request(slow: Trio, way: Road, alone: dict[str, str]) -> None:
    """Its pages stay leased while others, over another road, take and return theirs; then its late bytes arrive."""
    calls = Calls(slow, way)
    warm(calls, alone, OTHER)
    assert way.data is not None
    way.data.stop_after(1_000_000)
    started = calls.ask("x" + LONG[0])  # a start of its own: nothing of it is cached, all of it is read
    until(lambda: way.data is not None and way.data.stands)
    slow.decode.post("/abort_request", {"abort_all": True})
    assert started["decode"].result()[0].json()["choices"][0]["finish_reason"] == "abort"
    held = leased(slow.decode)
    assert held >= 1000 // 16
    for prompt in (*LONG, OTHER):
        warm(Calls(slow, None), alone, prompt)
        assert leased(slow.decode) == held, "nobody got a page of the read that still runs"
    passed = way.data.passed_bytes
    way.data.go_on()
    until(lambda: leased(slow.decode) == 0)
    assert way.data.passed_bytes > passed, "its bytes came late"
    for prompt in LONG:
        warm(calls, alone, prompt)


def test_late_metadata_of_a_former_room_is_not_taken_for_another(slow: Trio, way: Road, alone: dict[str, str]) -> None:
    """The row is used again, by the same prompt; then first token and pages of the former attempt arrive."""
    calls = Calls(slow, way)
    warm(calls, alone, OTHER)
    way.keep = lambda message: isinstance(message, (p.Pages, p.Computed)) and message.room == room
    room = next(_ROOMS)
    body = body_of(way, room, LONG[2])
    clients = [Leaver(slow.prefill, body), Leaver(slow.decode, body)]
    until(lambda: any(isinstance(message, p.Computed) for message in way.kept))
    for client in clients:
        client.leave()
    until(lambda: not rooms(slow.decode))
    way.lose = lambda message: isinstance(message, p.Kept)
    again = calls.ask(LONG[2])
    until(lambda: rooms(slow.decode) == {"waiting": 1})
    way.deliver()
    until(lambda: way.delivered)
    time.sleep(0.2)
    way.lose = lambda message: False
    assert text_of(again["decode"].result()[0]) == alone[LONG[2]]


def test_rooms_that_are_taken_unknown_or_over(slow: Trio, way: Road, alone: dict[str, str]) -> None:
    calls = Calls(slow, way)
    lonely = {side: calls.ask(OTHER + side, only=side)[side] for side in ("prefill", "decode")}
    warm(calls, alone, OTHER)
    assert way.data is not None
    way.data.stop_after(100_000)
    room = next(_ROOMS)
    first = [calls.pool.submit(server.post, "/v1/completions", body_of(way, room, "y" + LONG[0]))
             for server in (slow.prefill, slow.decode)]
    until(lambda: way.data is not None and way.data.stands)
    for server in (slow.prefill, slow.decode):
        answer = server.post("/v1/completions", body_of(way, room, OTHER))
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "duplicate_room")
    way.data.go_on()
    assert [call.result().status_code for call in first] == [200, 200]
    for server in (slow.prefill, slow.decode):
        answer = server.post("/v1/completions", body_of(way, room, OTHER))
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "expired_room")
    for side, call in lonely.items():
        answer = call.result()[0]
        if side == "prefill":
            assert "room" in failure_of(answer)
        else:
            assert answer.status_code == 504 and "room" in answer.text, answer.text


@pytest.mark.parametrize(
    ("named", "change", "env"),
    [("KV dtype: prefill has bfloat16, decode has float32", {"kv_dtype": "bf16"}, {}),
     ("weights fingerprint: prefill has", {}, {"OCTAVO_TEST_SEED": "1"}),
     ("kv heads: prefill has 2, decode has 4", {}, {"OCTAVO_TEST_KV_HEADS": "2"})],
)  # fmt: skip
def test_the_handshake_names_what_differs(
    named: str, change: dict[str, Any], env: dict[str, str], slow: Trio, tmp_path: Path
) -> None:
    port = free_port()
    with running(tmp_path, role="prefill", served_model_name=("tiny",), bootstrap_port=port, env=env,
                 **{**OPTIONS, **change}) as other:
        body = {**GREEDY, "prompt": "x", "bootstrap_host": "127.0.0.1", "bootstrap_port": port,
                "bootstrap_room": next(_ROOMS)}
        answer = slow.decode.post("/v1/completions", body)
        assert answer.status_code == 502 and named in answer.text
        assert other.metric("kv_transfers_total") == 0
    refused = [line for line in slow.decode.get("/metrics").text.splitlines()
               if line.startswith('octavo:kv_transfer_failures_total{cause="refused"}')]
    assert len(refused) == 1 and float(refused[0].split()[-1]) >= 1


def test_the_router_tries_again_with_a_new_room(tmp_path: Path) -> None:
    """With retries on: a decode server is killed, the router's second try is another room on the other server. It
    tries again when both halves have answered, so the prefill server's wait for the dead half is part of it."""
    with trio(tmp_path, decodes=2, room_timeout_s=5.0) as servers:
        wanted = text_of(servers.both("/v1/completions", {**GREEDY, "prompt": OTHER, "max_tokens": 8})[1])
        with routing(tmp_path, servers.prefill, servers.bootstrap_port, servers.decodes, retries=True) as url:
            kill_tree(servers.decode)
            body = {**GREEDY, "prompt": OTHER, "max_tokens": 8}
            answers = [httpx.post(url + "/v1/completions", json=body, timeout=200) for _ in range(6)]
            assert [text_of(answer) for answer in answers] == [wanted] * 6
        servers.check_at_rest()
