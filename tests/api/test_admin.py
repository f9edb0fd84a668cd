"""Everything beside generation: probes, models, tokens, facts, metrics, books, and what the process imports."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from pathlib import Path

import httpx

from tests.api.serving import ROOT, Server, hold, running, until


def test_probes(server: Server) -> None:
    assert server.get("/health").status_code == 200
    assert server.get("/ready").json() == {"status": "ready"}
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", server.get("/version").json()["version"])


def test_probes_answer_head(server: Server) -> None:
    for path in ("/health", "/ready"):
        response = httpx.head(server.url + path)
        assert (response.status_code, response.content) == (200, b"")


def test_tokenizer_facts(server: Server) -> None:
    facts = server.get("/tokenizer_info").json()
    assert facts["eos_token"] == "<|end|>" == facts["eos_tokens"][0] and facts["bos_token"] is None
    assert facts["vocab_size"] == 288 and "message" in facts["chat_template"] and facts["add_bos_token"] is False
    tokens = server.post("/tokenize", {"prompt": facts["eos_token"], "add_special_tokens": False}).json()["tokens"]
    assert tokens == [256]


def test_models(server: Server) -> None:
    listed = server.get("/v1/models").json()
    assert listed["object"] == "list" and [m["id"] for m in listed["data"]] == ["tiny", "alias"]
    one = server.get("/v1/models/alias").json()
    assert one["id"] == "alias" and one["object"] == "model" and one["max_model_len"] == 512
    missing = server.get("/v1/models/gpt-4/turbo")
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "model_not_found"


def test_tokens_there_and_back(server: Server) -> None:
    for text in ("hello", "Grüße 🙂", "", "a\nb\t c"):
        tokens = server.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
        assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"]) == len(text.encode())
        assert tokens["max_model_len"] == 512
        assert server.post("/detokenize", {"tokens": tokens["tokens"]}).json()["prompt"] == text


def test_facts(server: Server) -> None:
    info = server.get("/server_info").json()
    assert info["served_model_name"] == "tiny" and info["max_model_len"] == 512 and info["ready"] is True
    assert "api_key" not in info["config"]
    assert set(server.get("/get_server_info").json()) == set(info)
    model = server.get("/model_info").json()
    assert model["is_generation"] is True and model["vocab_size"] == 288 and model["has_chat_template"] is True
    assert model["model_type"] == "llama"


def test_books_close_and_show_the_cache(server: Server) -> None:
    server.post("/v1/completions", {"prompt": "books " * 20, "max_tokens": 3})
    server.wait_idle()
    books = server.get("/kv.json").json()
    pool = books["pools"]["full"]
    assert sum(pool[s] for s in ("free", "cached", "held", "leased", "quarantined")) == pool["total"]
    assert pool["held"] == pool["leased"] == 0 and pool["cached"] > 0 and books["rows"] == []
    assert len(pool["map"]) == pool["total"]
    assert server.post("/flush_cache", {}).json() == {"flushed": True}
    assert server.get("/kv.json").json()["pools"]["full"]["cached"] == 0


def test_books_of_two_pools_show_what_the_second_saves(tmp_path: Path) -> None:
    """A page of a layer has 2 · 2 heads · 16 tokens · 16 · 4 = 4,096 bytes: 8,192 of the full layers, 16,384 of the
    sliding ones. After a chunk of 100 tokens and five more: ceil((104 + 1)/16) = 7 full pages; the window of 24 lets
    go of floor_p(floor_p(105) − 24) = 64 tokens, 4 of their pages."""
    held = tmp_path / "held"
    hold(held, 6)
    options = {"core": "tests.api.cores:tiny_hybrid", "page_size": 16, "overlap": False, "prefix_cache": False}
    with running(tmp_path, env={"OCTAVO_TEST_HOLD": str(held)}, **options) as server:
        body = {"prompt": "w" * 100, "max_tokens": 20, "ignore_eos": True}
        asking = threading.Thread(target=server.post, args=("/v1/completions", body))
        asking.start()
        until(lambda: [row["committed"] for row in server.books()["rows"]] == [105])
        sliding = server.books()["sliding"]
        assert sliding["now"] == sliding["peak"] == {
            "full_pages": 7, "swa_pages": 3, "two_pools_bytes": 7 * 8_192 + 3 * 16_384, "one_pool_bytes": 7 * 24_576,
            "saved_bytes": 4 * 16_384,
        }  # fmt: skip
        held.unlink()
        asking.join()
        server.wait_idle()
        after = server.books()["sliding"]
        assert after["now"]["full_pages"] == after["now"]["saved_bytes"] == 0
        assert (after["peak"]["full_pages"], after["peak"]["swa_pages"]) == (8, 3)
        assert after["capacity"] == sliding["capacity"] and after["capacity"]["context_tokens"] == 512
        page = server.get("/kv").text
        assert "books.sliding" in page and 'id="saving"' in page


WANTED = """num_requests_running num_requests_waiting kv_cache_usage_perc prefix_cache_queries_total
prefix_cache_hits_total prompt_tokens_total generation_tokens_total num_preemptions_total
request_success_total{finished_reason time_to_first_token_seconds_bucket inter_token_latency_seconds_bucket
e2e_request_latency_seconds_bucket request_queue_time_seconds_bucket request_prefill_time_seconds_bucket
request_decode_time_seconds_bucket spec_decode_num_drafts_total spec_decode_num_draft_tokens_total
spec_decode_num_accepted_tokens_total kv_pages{pool kv_balance_violations_total kv_tier_pages{ kv_leases{
kv_transfers_total{ kv_transfer_bytes_total""".split()


def test_metrics_have_the_promised_names(server: Server) -> None:
    server.post("/v1/completions", {"prompt": "count", "max_tokens": 4})
    response = server.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = response.text.splitlines()
    for name in WANTED:
        assert any(line.startswith("octavo:" + name) for line in lines), name
    for line in lines:
        if not line.startswith("#"):
            assert re.fullmatch(r'octavo:[a-z0-9_]+(\{[a-z_]+="[^"]*"(,[a-z_]+="[^"]*")*\})? \S+', line), line


def test_metrics_count(server: Server) -> None:
    names = ("prompt_tokens_total", "generation_tokens_total", "request_success_total", "prefix_cache_queries_total",
             "e2e_request_latency_seconds_count", "time_to_first_token_seconds_count",
             "inter_token_latency_seconds_count")  # fmt: skip
    before = {name: server.metric(name) for name in names}
    body = {"prompt": [65] * 10, "max_tokens": 5, "n": 2, "ignore_eos": True}
    server.post("/v1/completions", body)
    grown = {name: server.metric(name) - before[name] for name in names}
    assert grown["prompt_tokens_total"] in (10, 20)
    assert grown["generation_tokens_total"] == 10 and grown["request_success_total"] == 2
    assert grown["e2e_request_latency_seconds_count"] == grown["time_to_first_token_seconds_count"] == 2
    assert grown["inter_token_latency_seconds_count"] == 8
    assert grown["prefix_cache_queries_total"] >= 9


def test_page_states_sum_to_the_pool(server: Server) -> None:
    text = server.get("/metrics").text
    states = re.findall(r'octavo:kv_pages\{pool="full",state="(\w+)"\} (\S+)', text)
    total = re.search(r'octavo:kv_pool_pages\{pool="full"\} (\S+)', text)
    assert total is not None and len(states) == 5
    assert sum(float(n) for _, n in states) == float(total[1])


def test_metrics_document_is_in_step() -> None:
    command = [sys.executable, "-m", "octavo.obs.metrics_doc", "--check", str(ROOT / "docs/metrics.md")]
    done = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT / "src")})
    assert done.returncode == 0, done.stderr


def test_openapi_description(server: Server) -> None:
    paths = server.get("/openapi.json").json()["paths"]
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize", "/metrics", "/kv.json"} <= set(paths)


def test_http_process_imports_no_torch() -> None:
    code = (
        "import sys, octavo.api.app, octavo.api.server, octavo.async_llm, octavo.model.load.tokenizer\n"
        "heavy = {'torch', 'numba', 'transformers', 'octavo.engine.core'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          env={"PYTHONPATH": str(ROOT / "src")})  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_idle_server_uses_no_processor_and_goes_by_its_model(tmp_path: Path) -> None:
    """The engine loop blocks in poll: a second of idling costs a few milliseconds of the two processes.

    Without --served-model-name clients may also ask for what --model says."""
    import os
    import time

    def ticks(pid: int) -> int:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    with running(tmp_path) as server:
        assert [m["id"] for m in server.get("/v1/models").json()["data"]] == ["tiny-llama"]
        for name in ("tiny-llama", "smollm2"):  # the test's core ignores --model, which is at its default
            assert server.post("/v1/completions", {"model": name, "prompt": "x", "max_tokens": 1}).status_code == 200
        assert server.post("/v1/completions", {"model": "other", "prompt": "x"}).status_code == 404
        pids = (server.process.pid, server.engine_pid())
        used_s: list[float] = []
        while not used_s or (used_s[-1] >= 0.3 and len(used_s) < 6):  # at first the start may still be worked off
            before = sum(map(ticks, pids))
            time.sleep(3.0)
            used_s.append((sum(map(ticks, pids)) - before) / os.sysconf("SC_CLK_TCK"))
    assert used_s[-1] < 0.3, f"{used_s} s of processor time in 3 s of idling"
