"""What a transfer costs a request, and what window tails save: two real servers over Mooncake, prompts one at a time.

    python benchmarks/disagg_transfer.py [--models smollm2 gemma3-270m] [--tokens 128 512 1024 2048] [--out FILE]

For each model a prefill and a decode server run with one thread each; the benchmark does what a router does. Prompts
are token ids of exact length, new each time, no prefix cache. Per prompt, from the decode server's own counters: bytes
read, bytes that did not travel, seconds in calls of the transport, seconds between "the prompt is computed" and the
first token being there (`behind`: what the transfer adds to TTFT); TTFT is what a client of the decode server sees.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import threading
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from disagg_latency import free_port, served

from octavo.bench.record import environment

COUNTERS = ("bytes", "skipped_bytes", "read_seconds", "behind_seconds")
_ROOMS = itertools.count(1)


def post(url: str, body: dict[str, Any]) -> float:
    """Send a streamed completion and read all of it. Returns the seconds to its first piece."""
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})  # fmt: skip
    started_s = time.perf_counter()
    first_s = 0.0
    with urllib.request.urlopen(request, timeout=300) as answer:
        for line in answer:
            if line.startswith(b"data: {") and not first_s:
                first_s = time.perf_counter() - started_s
            if line.startswith(b"data: {") and b'"error"' in line:
                raise OSError(line.decode())
    return first_s


def counters(url: str) -> dict[str, float]:
    with urllib.request.urlopen(f"{url}/kv.json", timeout=30) as answer:
        seen = json.load(answer)["disaggregation"]
    return {name: float(seen[name]) for name in COUNTERS}


def one(urls: tuple[str, str], bootstrap_port: int, tokens: int, number: int) -> dict[str, float]:
    """One prompt through both servers."""
    prompt = [1000 + (number * 7919 + i * i) % 20_000 for i in range(tokens)]
    room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": bootstrap_port, "bootstrap_room": next(_ROOMS)}
    sampling = {"max_tokens": 4, "temperature": 0, "ignore_eos": True, "stream": True}
    body = {"model": "bench", "prompt": prompt, **sampling, **room}
    before = counters(urls[1])
    other = threading.Thread(target=post, args=(urls[0], body))
    other.start()
    ttft_s = post(urls[1], body)
    other.join()
    after = counters(urls[1])
    return {"ttft_s": ttft_s, **{name: after[name] - before[name] for name in COUNTERS}}


def measure(model: str, lengths: list[int], repeats: int) -> list[dict[str, Any]]:
    ports = [free_port() for _ in range(3)]
    urls = (f"http://127.0.0.1:{ports[0]}", f"http://127.0.0.1:{ports[1]}")
    common = ["--model", model, "--draft", "none", "--no-prefix-cache", "--threads", "1", "--max-model-len", "4096",
              "--served-model-name", "bench", "--accept-license"]  # fmt: skip
    out = []
    with ExitStack() as stack:
        for role, port, more in (("prefill", ports[0], ["--bootstrap-port", str(ports[2])]), ("decode", ports[1], [])):
            command = ["serve", "--role", role, "--port", str(port), *more, *common]
            stack.enter_context(served(command, f"http://127.0.0.1:{port}/ready"))
        one(urls, ports[2], 64, 0)  # the first transfer connects
        for tokens in lengths:
            runs = [one(urls, ports[2], tokens, number) for number in range(1, repeats + 1)]
            middle = {name: sorted(run[name] for run in runs)[len(runs) // 2] for name in runs[0]}
            out.append({"model": model, "tokens": tokens, "runs": runs, **middle,
                        "gb_per_s": middle["bytes"] / middle["read_seconds"] / 1e9,
                        "read_share": middle["read_seconds"] / middle["ttft_s"],
                        "behind_share": middle["behind_seconds"] / middle["ttft_s"],
                        "skipped_share": middle["skipped_bytes"] / (middle["bytes"] + middle["skipped_bytes"])})
            show(out[-1])
    return out


def show(row: dict[str, Any]) -> None:
    print(f"{row['model']:12} {row['tokens']:5} tokens: {row['bytes'] / 1e6:7.1f} MB read at {row['gb_per_s']:.2f} "
          f"GB/s, {row['skipped_share']:5.1%} not sent; TTFT {row['ttft_s']:.3f} s, of it reading "
          f"{row['read_share']:.1%}, behind the computation {row['behind_share']:.1%}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["smollm2", "gemma3-270m"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[128, 512, 1024, 2048])
    parser.add_argument("--repeats", type=int, default=3, help="prompts of each length; medians (default 3)")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows = [row for model in args.models for row in measure(model, args.tokens, args.repeats)]
    if args.out is not None:
        args.out.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
