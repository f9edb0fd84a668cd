"""One large read over Mooncake is cut between its first and its last byte: the other end is killed, or stopped for
40 s. A gate on the road (road.py) says when; no sleep decides it. Before and after a transfer are in the same tests:
a room that decodes already, one whose read is in line behind the one that is cut, one that nobody computes yet."""

from __future__ import annotations

import concurrent.futures
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.serving import Server, running, until, wait_ready
from tests.clock import running_time
from tests.disagg.cores import TOKEN_BYTES
from tests.disagg.processes import Trio, kill_tree, rooms, trio
from tests.disagg.road import Road, road

WIDE = "tests.disagg.cores:wide"
OPTIONS = {"core": WIDE, "kv_memory": "256MiB", "prefill_chunk": 2048, "max_batched_tokens": 2048}
GREEDY = {"model": "tiny", "temperature": 0, "ignore_eos": True}
LONG = ["".join(chr(97 + (i * i + n) % 23) for i in range(1500)) for n in range(3)]  # a token a byte: 24 MB of KV
SHORT = "a short one"
CUT_BYTES = 5_000_000
SLOW = {"OCTAVO_TEST_STEP_S": "0.05"}
RUNNING_TOKENS = 160  # at 0.05 s a step longer than any report of a fault may take
_ROOMS = iter(range(5_000_000, 10**9))


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What one server writes."""
    with running(tmp_path_factory.mktemp("alone"), served_model_name=("tiny",), **OPTIONS) as server:
        out = {prompt: text_of(server.post("/v1/completions", {**GREEDY, "prompt": prompt, "max_tokens": 8}))
               for prompt in LONG}
        out[SHORT] = text_of(server.post("/v1/completions",
                                         {**GREEDY, "prompt": SHORT, "max_tokens": RUNNING_TOKENS}))
        return out


class Calls:
    """Requests in the background, with times (tests/clock.py)."""

    def __init__(self, servers: Trio, way: Road | None) -> None:
        self.servers, self.port = servers, servers.bootstrap_port if way is None else way.port
        self.pool = concurrent.futures.ThreadPoolExecutor(12)

    def ask(self, prompt: str, tokens: int = 8, *, decode: Server | None = None, only: str = ""
            ) -> dict[str, concurrent.futures.Future[tuple[httpx.Response, float]]]:
        body = {**GREEDY, "prompt": prompt, "max_tokens": tokens, "bootstrap_host": "127.0.0.1",
                "bootstrap_port": self.port, "bootstrap_room": next(_ROOMS)}

        def post(server: Server) -> tuple[httpx.Response, float]:
            answer = server.post("/v1/completions", body, timeout=240)
            return answer, running_time.now()

        sides = {"prefill": self.servers.prefill, "decode": decode or self.servers.decode}
        return {name: self.pool.submit(post, server) for name, server in sides.items() if only in ("", name)}


def leased(server: Server) -> int:
    return sum(pool["leased"] for pool in server.books()["pools"].values())


def read_in_the_middle(servers: Trio, way: Road, calls: Calls, *, decode: Server | None = None) -> dict[str, Any]:
    """Four rooms: one decodes, one is in the middle of its read, one is in line behind that, one is not computed."""
    decode = decode or servers.decode
    assert way.data is not None
    way.data.stop_after(CUT_BYTES)
    started = {"during": calls.ask(LONG[0], decode=decode)}
    until(lambda: way.data is not None and way.data.stands)
    started["behind"] = calls.ask(LONG[1], decode=decode)
    until(lambda: rooms(servers.prefill).get("offered") == 2)
    started["before"] = calls.ask(LONG[2], decode=decode, only="decode")
    until(lambda: rooms(decode) == {"transferring": 3})
    started["after"] = Calls(servers, None).ask(SHORT, RUNNING_TOKENS, decode=decode)  # not over the road: it passes
    until(lambda: rooms(decode) == {"running": 1, "transferring": 3})
    assert way.data.stands and CUT_BYTES < 1500 * TOKEN_BYTES, "the read is cut, not complete"
    return started


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Trio, Road, Calls]]:
    with trio(tmp_path, decode={"env": SLOW}, **OPTIONS) as servers, road(servers.bootstrap_port) as way:
        yield servers, way, Calls(servers, way)


def freed(prefill: Server, since_s: float) -> None:
    """A prefill server holds nothing for a decode server that is gone, 5 s after it went."""
    until(lambda: not rooms(prefill))
    assert running_time.now() - since_s < 5.0
    held = [pool["held"] for pool in prefill.books()["pools"].values()]
    assert sum(held) == 0, held


def warm(calls: Calls, alone: dict[str, str], prompt: str = LONG[2], decode: Server | None = None) -> None:
    """A request that is served as ever, its prompt's pages moved and used again."""
    asked = calls.ask(prompt, decode=decode)
    assert text_of(asked["decode"].result()[0]) == alone[prompt]
    assert asked["prefill"].result()[0].status_code == 200


def test_prefill_killed_inside_a_read(pair: tuple[Trio, Road, Calls], tmp_path: Path, alone: dict[str, str]) -> None:
    servers, way, calls = pair
    warm(calls, alone)
    started = read_in_the_middle(servers, way, calls)
    kill_tree(servers.prefill)
    way.close()  # the port closes with the process
    killed = running_time.now()
    for name in ("during", "behind", "before"):
        answer, at = started[name]["decode"].result()
        assert answer.status_code == 502 and at - killed < 5.0, (name, answer.text, at - killed)
    assert text_of(started["after"]["decode"].result()[0]) == alone[SHORT], "it had been handed over"
    servers.check_at_rest()
    pools = servers.decode.books()["pools"]
    assert all(pool["quarantined"] == 0 for pool in pools.values()), "a dead process writes nothing any more"
    with running(tmp_path, role="prefill", served_model_name=("tiny",), bootstrap_port=servers.bootstrap_port,
                 check_books=True, **OPTIONS) as fresh:
        servers.prefill = fresh
        for prompt in LONG:
            warm(Calls(servers, None), alone, prompt)
        servers.check_at_rest()


def test_prefill_stopped_inside_a_read_for_forty_seconds(
    pair: tuple[Trio, Road, Calls], alone: dict[str, str]
) -> None:
    servers, way, calls = pair
    warm(calls, alone)
    started = read_in_the_middle(servers, way, calls)
    assert way.data is not None
    passed = way.data.passed_bytes
    kill_tree(servers.prefill, signal.SIGSTOP)
    stopped, until_s = running_time.now(), time.monotonic() + 40
    way.data.go_on()  # the network is well: what is missing is in the stopped process
    for name in ("during", "behind", "before"):
        answer, at = started[name]["decode"].result()
        assert answer.status_code == 502 and at - stopped < 5.0, (name, answer.text, at - stopped)
    assert text_of(started["after"]["decode"].result()[0]) == alone[SHORT]
    while time.monotonic() < until_s:
        assert leased(servers.decode) > 0, "no timeout ends a lease: its bytes may still come"
        assert passed <= way.data.passed_bytes < passed + 1500 * TOKEN_BYTES - CUT_BYTES
        time.sleep(1.0)
    kill_tree(servers.prefill, signal.SIGCONT)
    wait_ready(servers.prefill)
    for prompt in LONG:
        warm(calls, alone, prompt)
    servers.check_at_rest()


def test_decode_killed_inside_a_read(tmp_path: Path, alone: dict[str, str]) -> None:
    with trio(tmp_path, decodes=2, decode={"env": SLOW}, **OPTIONS) as servers, road(servers.bootstrap_port) as way:
        calls = Calls(servers, way)
        warm(calls, alone)
        read_in_the_middle(servers, way, calls)
        kill_tree(servers.decode)
        killed = running_time.now()
        freed(servers.prefill, killed)
        for prompt in LONG:
            warm(Calls(servers, None), alone, prompt, servers.decodes[1])
        servers.check_at_rest()


def test_decode_stopped_inside_a_read_for_forty_seconds(tmp_path: Path, alone: dict[str, str]) -> None:
    with trio(tmp_path, decodes=2, decode={"env": SLOW}, room_timeout_s=180.0, **OPTIONS) as servers, \
            road(servers.bootstrap_port) as way:
        calls = Calls(servers, way)
        warm(calls, alone)
        started = read_in_the_middle(servers, way, calls)
        assert way.data is not None
        kill_tree(servers.decode, signal.SIGSTOP)
        stopped, until_s = running_time.now(), time.monotonic() + 40
        way.data.go_on()
        freed(servers.prefill, stopped)
        other = Calls(servers, None)
        while time.monotonic() < until_s:  # pages it was reading are used by others meanwhile
            for prompt in LONG:
                warm(other, alone, prompt, servers.decodes[1])
            time.sleep(8.0)
        kill_tree(servers.decode, signal.SIGCONT)
        wait_ready(servers.decode)
        for name in ("during", "behind", "before"):
            answer, _ = started[name]["decode"].result()
            assert answer.status_code == 502, (name, answer.text)
        assert text_of(started["after"]["decode"].result()[0]) == alone[SHORT], "it needs no prefill server any more"
        for prompt in LONG:
            warm(calls, alone, prompt)
        servers.check_at_rest()
