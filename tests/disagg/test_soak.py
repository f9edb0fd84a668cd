"""A thousand requests through the router, one prefill and two decode servers, with aborts and a kill: `make soak`."""

from __future__ import annotations

import concurrent.futures
import os
import random
import signal
import statistics
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.api.serving import running, wait_ready
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

        def resident_bytes() -> int:
            pids = [pid for s in (servers.prefill, *servers.decodes) for pid in (s.process.pid, s.engine_pid())]
            return 4096 * sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            early = [pool.submit(ask, i) for i in range(REQUESTS // 8)]
            time.sleep(1.0)
            os.kill(servers.decodes[1].engine_pid(), signal.SIGKILL)  # the server starts its engine again
            for call in early:
                call.result()
            wait_ready(servers.decodes[1])
            for start in range(REQUESTS // 8, REQUESTS, 20):
                list(pool.map(ask, range(start, min(start + 20, REQUESTS))))
                memory.append(resident_bytes())
        servers.check_at_rest()
        assert not wrong, wrong
        assert right[0] > 0.85 * REQUESTS and lost[0] <= REQUESTS // 16, (right, lost)
        quarter = len(memory) // 4
        second, last = (statistics.median(part) for part in (memory[quarter : 2 * quarter], memory[-quarter:]))
        print(f"{right[0]} right, {lost[0]} lost to the kill; resident: second quarter {second / 2**20:.1f} MiB, "
              f"last {last / 2**20:.1f} MiB ({last / second - 1:+.2%})")
        assert abs(last / second - 1) < 0.02
