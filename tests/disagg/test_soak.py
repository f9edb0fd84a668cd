"""A thousand requests through the router, one prefill and two decode servers, with aborts and a kill: `make soak`."""

from __future__ import annotations

import concurrent.futures
import os
import random
import signal
import threading
import time
from pathlib import Path

import httpx
import pytest

from octavo.engine.process import rss_bytes
from tests.api.serving import running
from tests.disagg.processes import trio

REQUESTS = int(os.environ.get("OCTAVO_SOAK_REQUESTS", "1000"))
DISTINCT = 40

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]


def question(i: int) -> dict[str, object]:
    rng = random.Random(i % DISTINCT)
    text = " ".join(rng.choice(["page", "room", "lease", "tail"]) for _ in range(rng.randint(2, 40)))
    return {"model": "tiny", "messages": [{"role": "user", "content": f"{i % DISTINCT} {text}"}], "temperature": 0,
            "max_tokens": rng.randint(1, 40), "ignore_eos": True}


def test_soak(tmp_path: Path) -> None:
    """Every answer that is given is right, leases drain, memory is flat, both books close."""
    with running(tmp_path, served_model_name=("tiny",)) as alone:
        want = [alone.post("/v1/chat/completions", question(i)).json()["choices"][0]["message"]["content"]
                for i in range(DISTINCT)]
    with trio(tmp_path, decodes=2, router=True, restart_engine=True, num_pages=400) as servers:
        lost, wrong, right, lock = [0], [], [0], threading.Lock()

        def ask(i: int) -> None:
            rng = random.Random(f"abort{i}")
            url = servers.router + "/v1/chat/completions"
            if rng.random() < 0.05:
                try:
                    httpx.post(url, json=question(i), timeout=rng.uniform(0.001, 0.3))
                except httpx.TimeoutException:
                    pass
                return
            try:
                answer = httpx.post(url, json=question(i), timeout=120)
            except httpx.TransportError:
                answer = None
            with lock:
                if answer is None or answer.status_code != 200:
                    lost[0] += 1
                elif answer.json()["choices"][0]["message"]["content"] == want[i % DISTINCT]:
                    right[0] += 1
                else:
                    wrong.append(i)

        memory: list[int] = []

        def measure() -> int:
            return sum(int(Path(f"/proc/{s.engine_pid()}/statm").read_text().split()[1]) * 4096
                       for s in (servers.prefill, *servers.decodes))

        assert rss_bytes() > 0
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            first = list(pool.map(ask, range(REQUESTS // 4)))
            memory.append(measure())
            later = [pool.submit(ask, i) for i in range(REQUESTS // 4, 3 * REQUESTS // 4)]
            time.sleep(1.0)
            os.kill(servers.decodes[1].engine_pid(), signal.SIGKILL)  # the server starts its engine again
            for call in later:
                call.result()
            list(pool.map(ask, range(3 * REQUESTS // 4, REQUESTS)))
        assert len(first) == REQUESTS // 4
        servers.check_at_rest(60)
        memory.append(measure())
        assert not wrong, wrong
        assert right[0] > 0.8 * REQUESTS, (right, lost)
        assert memory[1] < memory[0] * 1.15 + 32 * 2**20, memory
        print(f"{right[0]} right, {lost[0]} lost to the kill, memory {memory[0] >> 20} -> {memory[1] >> 20} MiB")
