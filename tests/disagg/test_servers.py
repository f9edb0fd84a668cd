"""Real servers over Mooncake (tcp) with the router in front: same text as one server, and every fault with signals."""

from __future__ import annotations

import concurrent.futures
import json
import random
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.serving import Server, free_port, running, until, wait_ready
from tests.clock import running_time
from tests.disagg.processes import Trio, failure_of, kill_tree, routing, trio

GREEDY = {"model": "tiny", "temperature": 0, "ignore_eos": True}


def words(seed: int, low: int = 5, high: int = 60) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(["page", "room", "lease", "tail", "draft", "key", "x1"]) for _ in range(
        rng.randint(low, high) // 5 + 1))


def texts(server: Server, prompts: list[str], **body: Any) -> list[str]:
    out = []
    for prompt in prompts:
        answer = server.post("/v1/completions", {**GREEDY, "prompt": prompt, "max_tokens": 12, **body})
        assert answer.status_code == 200, answer.text
        out.append(answer.json()["choices"][0]["text"])
    return out


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    with running(tmp_path_factory.mktemp("alone"), served_model_name=("tiny",)) as server:
        return texts(server, [words(i) for i in range(50)])


def test_fifty_prompts_have_the_text_of_one_server(servers: Trio, alone: list[str]) -> None:
    def ask(i: int) -> str:
        first, second = servers.both("/v1/completions", {**GREEDY, "prompt": words(i), "max_tokens": 12})
        assert (first.status_code, second.status_code) == (200, 200), (first.text, second.text)
        return str(second.json()["choices"][0]["text"])

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, range(50))) == alone
    assert servers.decode.metric("kv_transfer_bytes_total") > 0
    servers.check_at_rest()


def test_roles_need_rooms_and_others_refuse_them(servers: Trio) -> None:
    for server in (servers.prefill, servers.decode):
        answer = server.post("/v1/completions", {**GREEDY, "prompt": "x"})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "bootstrap_room"
        answer = server.post("/v1/completions", {**GREEDY, "prompt": "x", "n": 2, "bootstrap_host": "127.0.0.1",
                                                 "bootstrap_port": servers.bootstrap_port, "bootstrap_room": 5})
        assert answer.status_code == 400 and "2 distinct" in answer.text
    assert servers.prefill.get("/server_info").json()["disaggregation_mode"] == "prefill"


def test_a_room_is_used_once(servers: Trio) -> None:
    body = {**GREEDY, "prompt": "once", "max_tokens": 3}
    first = servers.both("/v1/completions", body, room=77_001)
    again = servers.both("/v1/completions", body, room=77_001)
    assert [r.status_code for r in first] == [200, 200] and [r.status_code for r in again] == [400, 400]
    assert again[1].json()["error"]["code"] == "expired_room"


def test_an_unreachable_prefill_server_is_reported_in_five_seconds(servers: Trio) -> None:
    body = {**GREEDY, "prompt": "nobody", "max_tokens": 3, "bootstrap_host": "127.0.0.1",
            "bootstrap_port": free_port(), "bootstrap_room": 77_002}
    started_s = running_time.now()
    answer = servers.decode.post("/v1/completions", body)
    assert answer.status_code in (502, 504) and f"127.0.0.1:{body['bootstrap_port']}" in answer.text
    assert running_time.now() - started_s < 5.5


def test_a_client_that_leaves_frees_both_sides(servers: Trio) -> None:
    body = {**GREEDY, "prompt": words(3), "max_tokens": 400, "stream": True, "bootstrap_host": "127.0.0.1",
            "bootstrap_port": servers.bootstrap_port, "bootstrap_room": 77_003}
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(servers.prefill.post, "/v1/completions", body)
        with httpx.stream("POST", servers.decode.url + "/v1/completions", json=body, timeout=200) as stream:
            next(stream.iter_lines())
    servers.check_at_rest()


def test_router_streams_choices_logprobs_and_schema(tmp_path: Path, servers: Trio) -> None:
    with routing(tmp_path, servers.prefill, servers.bootstrap_port, servers.decodes) as url:
        body: dict[str, Any] = {**GREEDY, "messages": [{"role": "user", "content": "hi you"}], "max_tokens": 8}
        path = url + "/v1/chat/completions"
        whole = httpx.post(path, json={**body, "logprobs": True, "top_logprobs": 2}, timeout=200).json()
        choice = whole["choices"][0]
        assert len(choice["logprobs"]["content"]) == 8 and whole["usage"]["completion_tokens"] == 8
        got = ""
        with httpx.stream("POST", path, json={**body, "stream": True}, timeout=200) as stream:
            for line in stream.iter_lines():
                if line.startswith("data: {"):
                    for part in json.loads(line[6:])["choices"]:
                        got += part["delta"].get("content") or ""
        assert got == choice["message"]["content"]
        many = httpx.post(path, json={**body, "n": 3, "temperature": 1.0, "seed": 5}, timeout=200).json()
        assert len({c["message"]["content"] for c in many["choices"]}) == 3
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object", "properties": {
            "a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}}}
        shaped = httpx.post(path, json={**body, "max_tokens": 60, "response_format": form, "ignore_eos": False},
                            timeout=200).json()
        assert json.loads(shaped["choices"][0]["message"]["content"])["a"] in (1, 2)
        servers.check_at_rest()


# -- processes that die ----------------------------------------------------------------------------------------------

SLOW = {"OCTAVO_TEST_STEP_S": "0.05"}


def _in_background(servers: Trio, pool: concurrent.futures.Executor, **body: Any) -> concurrent.futures.Future[Any]:
    return pool.submit(servers.both, "/v1/completions", {**GREEDY, "prompt": words(9), **body})


def test_prefill_killed_and_restarted(tmp_path: Path, alone: list[str]) -> None:
    """Killed while prompts wait and compute: clients hear of it within 5 s; running answers go on; a new one serves."""
    with trio(tmp_path, env=SLOW, prefill={"prefill_chunk": 16, "max_batched_tokens": 16}) as servers:
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            running_one = _in_background(servers, pool, max_tokens=200)
            servers.until("running", side="decode")
            waiting = [pool.submit(servers.decode.post, "/v1/completions", {
                **GREEDY, "prompt": words(40 + i, 200, 300), "max_tokens": 4, "bootstrap_host": "127.0.0.1",
                "bootstrap_port": servers.bootstrap_port, "bootstrap_room": 88_000 + i}) for i in range(2)]
            servers.until("transferring", 2, side="decode")
            kill_tree(servers.prefill)
            started_s = running_time.now()
            for call in waiting:
                answer = call.result()
                assert answer.status_code == 502 and "is gone" in answer.text, answer.text
            assert running_time.now() - started_s < 5.0
            assert not running_one.done()
            assert [answer.status_code for answer in running_one.result()] == [200, 200], "it had been handed over"
        servers.decode.wait_idle()
        servers.check_at_rest()
        with running(tmp_path, role="prefill", served_model_name=("tiny",), bootstrap_port=servers.bootstrap_port,
                     check_books=True) as fresh:
            servers.prefill = fresh
            first, second = servers.both("/v1/completions", {**GREEDY, "prompt": words(1), "max_tokens": 12})
            assert first.status_code == 200 and second.json()["choices"][0]["text"] == alone[1]
            servers.check_at_rest()


def test_a_dead_prefill_server_as_clients_of_the_router_see_it(tmp_path: Path, alone: list[str]) -> None:
    """Stopped or killed: everybody it owed a prompt hears of it within 5 s, what decodes goes on. Stopped: the router's
    health check takes it out, so that nobody new is sent to it, and back in."""
    with trio(tmp_path, router=True, env=SLOW, prefill={"prefill_chunk": 16, "max_batched_tokens": 16}) as servers:
        def ask(prompt: str, tokens: int, stream: bool = False) -> tuple[int, str, float]:
            body = {**GREEDY, "prompt": prompt, "max_tokens": tokens, "stream": stream}
            answer = httpx.post(servers.router + "/v1/completions", json=body, timeout=200)
            return answer.status_code, answer.text, running_time.now()

        def ready() -> bool:
            return httpx.get(servers.router + "/readiness", timeout=30).status_code == 200

        def owing(pool: concurrent.futures.Executor, first: int, number: signal.Signals) -> None:
            """The signal goes to a prefill server that has two prompts to compute, one of them for a stream."""
            with servers.holding():
                owed = [pool.submit(ask, words(first + stream, 200, 300), 4, stream) for stream in (False, True)]
                servers.until("transferring", 2, side="decode")
                kill_tree(servers.prefill, number)
            sent_s = running_time.now()
            for call in owed:
                status, text, at_s = call.result()
                assert at_s - sent_s < 5.0 and "error" in text and (status == 502 or "data: " in text), (status, text)

        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            owing(pool, 60, signal.SIGSTOP)
        until(lambda: not ready())
        asked_s = running_time.now()
        status, text, at_s = ask(words(1), 12)
        assert status == 503 and at_s - asked_s < 5.0, text
        kill_tree(servers.prefill, signal.SIGCONT)
        until(ready)
        status, text, _ = ask(words(1), 12)
        assert status == 200 and json.loads(text)["choices"][0]["text"] == alone[1], text
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            decoding = pool.submit(ask, words(9), 400)
            servers.until("running", side="decode")
            owing(pool, 50, signal.SIGKILL)
            assert not decoding.done()
            assert decoding.result()[0] == 200
        servers.decode.wait_idle()
        servers.check_at_rest()


def test_decode_killed(tmp_path: Path, alone: list[str]) -> None:
    """Its rooms end on the prefill server, pages come back, and another decode server is served."""
    with trio(tmp_path, decodes=2, env=SLOW, prefill={"prefill_chunk": 16, "max_batched_tokens": 16}) as servers:
        body = {**GREEDY, "prompt": words(41, 250, 300), "max_tokens": 4, "bootstrap_host": "127.0.0.1",
                "bootstrap_port": servers.bootstrap_port, "bootstrap_room": 99_001}
        with concurrent.futures.ThreadPoolExecutor(2) as pool, servers.holding():
            calls = [pool.submit(s.post, "/v1/completions", body) for s in (servers.prefill, servers.decode)]
            servers.until("computing")
            kill_tree(servers.decode)
            assert "is gone" in failure_of(calls[0].result())
        other = servers.decodes[1]
        first, second = servers.both("/v1/completions", {**GREEDY, "prompt": words(2), "max_tokens": 12}, decode=other)
        assert first.status_code == 200 and second.json()["choices"][0]["text"] == alone[2]
        servers.check_at_rest()


def test_prefill_stopped_for_forty_seconds(tmp_path: Path, alone: list[str]) -> None:
    """SIGSTOP is no death: its rooms fail in 5 s, leases stay until their status is known, then all goes on."""
    with trio(tmp_path, env=SLOW, prefill={"prefill_chunk": 16, "max_batched_tokens": 16},
              quarantine_after_s=45.0) as servers:
        body = {**GREEDY, "prompt": words(41, 250, 300), "max_tokens": 4, "bootstrap_host": "127.0.0.1",
                "bootstrap_port": servers.bootstrap_port, "bootstrap_room": 99_101}
        with concurrent.futures.ThreadPoolExecutor(2) as pool, servers.holding():
            calls = [pool.submit(s.post, "/v1/completions", body, timeout=200)
                     for s in (servers.prefill, servers.decode)]
            servers.until("computing")
            kill_tree(servers.prefill, signal.SIGSTOP)
            started_s, until_s = running_time.now(), time.monotonic() + 40
            answer = calls[1].result()
            assert answer.status_code in (502, 504) and running_time.now() - started_s < 5.5
            time.sleep(max(0.0, until_s - time.monotonic()))
            kill_tree(servers.prefill, signal.SIGCONT)
            calls[0].result()
        wait_ready(servers.prefill)
        first, second = servers.both("/v1/completions", {**GREEDY, "prompt": words(3), "max_tokens": 12})
        assert first.status_code == 200 and second.json()["choices"][0]["text"] == alone[3], (first.text, second.text)
        servers.check_at_rest()


def test_a_server_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with trio(tmp_path, decode={"page_size": 32}) as servers:
        first, second = servers.both("/v1/completions", {**GREEDY, "prompt": "x", "max_tokens": 2, "stream": False},
                                     timeout_s=200)
        assert second.status_code == 502 and "page size: prefill has 16, decode has 32" in second.text
        assert first.status_code == 400 or failure_of(first), "its room may have ended before it came"
