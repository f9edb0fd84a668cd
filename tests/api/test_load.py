"""Many clients at once: every answer complete and equal to its solo run, waiting is fair, memory flat, books closed."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.serving import IDLE_S, Server, hold, running, until

CLIENTS = 200
PROMPTS = 20


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("busy"), max_running=32, max_queue=500, check_books=True) as server:
        yield server
        assert server.metric("kv_balance_violations_total") == 0


def body_of(number: int) -> dict[str, Any]:
    kind = number % PROMPTS
    return {"prompt": f"client of kind {kind}: " + "abc " * kind, "max_tokens": 12 + kind % 5, "ignore_eos": True,
            "temperature": 0.0 if kind % 2 else 1.0, "seed": kind, "stream": True}  # fmt: skip


async def answer(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> tuple[str, float]:
    """Text of a stream and the time to its first event."""
    started, first, text, done = time.monotonic(), 0.0, "", False
    async with client.stream("POST", url + "/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                done = True
            elif line.startswith("data: "):
                first = first or time.monotonic() - started
                text += json.loads(line[6:])["choices"][0]["text"]
    assert done, "the stream ended early"
    return text, first


def test_200_clients(busy: Server) -> None:
    async def run() -> tuple[list[str], list[tuple[str, float]]]:
        limits = httpx.Limits(max_connections=CLIENTS)
        async with httpx.AsyncClient(timeout=240, limits=limits) as client:
            solo = [(await answer(client, busy.url, body_of(n)))[0] for n in range(PROMPTS)]
            crowd = await asyncio.gather(*(answer(client, busy.url, body_of(n)) for n in range(CLIENTS)))
        return solo, list(crowd)

    solo, crowd = asyncio.run(run())
    for number, (text, _) in enumerate(crowd):
        assert text == solo[number % PROMPTS], f"client {number} got another answer than alone"
    waits = sorted(first for _, first in crowd)
    print(f"time to first token: median {statistics.median(waits):.2f} s, longest {waits[-1]:.2f} s")
    earlier = statistics.mean(first for _, first in crowd[: CLIENTS // 4])
    later = statistics.mean(first for _, first in crowd[-CLIENTS // 4 :])
    assert earlier <= later * 1.25, "first come, first served"
    assert busy.wait_idle() < IDLE_S
    pool = busy.get("/kv.json").json()["pools"]["full"]
    assert pool["held"] == pool["leased"] == 0


def rss_bytes(server: Server) -> int:
    """Resident memory of the server and its engine."""
    pids = (server.process.pid, server.engine_pid())
    return 4096 * sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)


@pytest.mark.parametrize("requests", [600, pytest.param(2400, marks=pytest.mark.soak)])
def test_memory_is_flat(busy: Server, requests: int) -> None:
    """Median resident memory of the last quarter of the requests within 2 % of the second quarter's."""
    samples: list[int] = []

    async def run() -> None:
        async with httpx.AsyncClient(timeout=240) as client:
            for start in range(0, requests, 20):
                bodies = (body_of(n) | {"max_tokens": 4} for n in range(start, start + 20))
                await asyncio.gather(*(answer(client, busy.url, body) for body in bodies))
                samples.append(rss_bytes(busy))

    asyncio.run(run())
    quarter = len(samples) // 4
    second = statistics.median(samples[quarter : 2 * quarter])
    last = statistics.median(samples[-quarter:])
    print(f"resident: second quarter {second / 2**20:.1f} MiB, last {last / 2**20:.1f} MiB ({last / second - 1:+.2%})")
    assert abs(last / second - 1) < 0.02


def test_priority_goes_first(tmp_path: Path) -> None:
    """While the engine is full, a request of smaller priority number is served before those that waited longer: it gets
    the first place that is free, and its answer in the next step, behind which none is computed."""
    held = tmp_path / "hold"
    hold(held, 0)
    env = {"OCTAVO_TEST_HOLD": str(held), "OCTAVO_TEST_STEP_S": "0.005"}
    with running(tmp_path, max_running=8, env=env) as server, ThreadPoolExecutor(24) as pool:

        def ask(number: int, **more: int) -> Future[httpx.Response]:
            body = {"prompt": f"n {number}", "max_tokens": 60, "ignore_eos": True, "request_id": f"n{number}", **more}
            return pool.submit(server.post, "/v1/completions", body)

        def until_they(run: int, wait: int) -> None:
            until(lambda: [(books := server.books())["running"], books["waiting"]] == [run, wait])

        first = [ask(number) for number in range(8)]
        until_they(0, 8)
        hold(held, 1)
        until_they(8, 0)
        later = [ask(number) for number in range(8, 20)]
        until_they(8, 12)
        urgent = ask(20, max_tokens=1, priority=-1)
        until_they(8, 13)
        server.post("/abort_request", {"rid": "n3"})
        until_they(7, 13)
        hold(held, 2)
        assert urgent.result().json()["usage"]["completion_tokens"] == 1
        assert not any(one.done() for one in (*first[:3], *first[4:], *later))
        held.unlink()
        ends = [one.result().json()["choices"][0]["finish_reason"] for one in (*first, *later)]
        assert ends == ["length"] * 3 + ["abort"] + ["length"] * 16
