"""Is decode held up by prefill? One server against a prefill/decode pair under long prompts and short chats.

    python benchmarks/disagg_latency.py [--model smollm2] [--chats 24] [--long-tokens 1500] [--out FILE]

Both get the same cores: one server with two threads, then `octavo cluster up --prefill 1 --decode 1` with one thread
each. Four short chats stream at a time; beside them a client sends one long prompt after the other. Times are taken
where a client sees them. Prints percentiles of both, and ratios pair / single. `stalled_s` of a run says how long this
process itself did not get to run (more than 0.5 s at a time): such a run measured the machine and not the servers.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from octavo.bench.record import environment
from octavo.bench.server_load import Call, Client, Load, drive

ROOT = Path(__file__).resolve().parent.parent
STREAMS = 4


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def up(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


@contextmanager
def served(command: list[str], ready: str, timeout_s: float = 180.0) -> Iterator[None]:
    """The command running until the block ends."""
    process = subprocess.Popen(
        [sys.executable, "-m", "octavo", *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline_s = time.monotonic() + timeout_s
        while not up(ready):
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise SystemExit(f"octavo {' '.join(command)} did not start (exit code {process.poll()})")
            time.sleep(0.3)
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def long_prompt(number: int, tokens: int) -> str:
    """Different words each time, so that no prefix is found; about one token a word."""
    words = ("river", "stone", "market", "harbour", "lantern", "orchard", "winter", "copper", "violin", "meadow")
    return f"Text {number}: " + " ".join(words[(number * 7 + i * i) % len(words)] for i in range(tokens))


class Stalls:
    """Seconds in which a thread that only wants to sleep for 50 ms was not woken, counted from 0.5 s on."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        before_s = time.monotonic()
        while not self._stop.wait(0.05):
            now_s = time.monotonic()
            if now_s - before_s > 0.5:
                self.seconds += now_s - before_s
            before_s = now_s

    def __enter__(self) -> Stalls:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def measure(url: str, prompts: list[str], long_tokens: int) -> dict[str, Any]:
    client = Client(url, model=None, api_key=None, timeout_s=300)
    drive(client, prompts[:2], streams=2, max_tokens=8, temperature=0.0, extra={}, progress=lambda a, b: None)
    stop = threading.Event()
    long_calls: list[Call] = []

    def long_work() -> None:
        while not stop.is_set():
            prompt = long_prompt(len(long_calls), long_tokens)
            long_calls.append(client.ask(prompt, max_tokens=8, temperature=0.0, extra={"ignore_eos": True}))

    thread = threading.Thread(target=long_work)
    thread.start()
    started_s = time.perf_counter()
    chats = drive(
        client,
        prompts,
        streams=STREAMS,
        max_tokens=64,
        temperature=0.0,
        extra={"ignore_eos": True},
        progress=lambda done, all_: print(f"\r{done}/{all_}", end="", file=sys.stderr, flush=True),
    )
    stop.set()
    thread.join()
    print(file=sys.stderr)
    return {
        "chats": chats.summary(),
        "long": Load(1, time.perf_counter() - started_s, long_calls).summary(),
        "worst_gap_s": {f"p{p}": value for p, value in zip((50, 99), _worst(chats.calls), strict=True)},
    }


def _worst(calls: list[Call]) -> tuple[float, float]:
    """Median and p99 over chats of the longest wait between two pieces of one answer."""
    worst = sorted(max((b - a for a, b in zip(c.pieces_s, c.pieces_s[1:], strict=False)), default=0.0) for c in calls)
    return worst[len(worst) // 2], worst[min(len(worst) - 1, int(0.99 * len(worst)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--chats", type=int, default=24, help="short chats in all (default 24)")
    parser.add_argument("--long-tokens", type=int, default=1500, help="words of a long prompt (default 1500)")
    parser.add_argument("--repeats", type=int, default=3, help="alternating runs of each (default 3)")
    parser.add_argument("--prefill-chunk", type=int, help="longest piece of one prompt in a step, on all servers")
    parser.add_argument("--only", choices=["single", "pair"], help="one of the two")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    args = parser.parse_args()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    lines = (ROOT / "benchmarks" / "prompts" / "chat40.jsonl").read_text().splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    prompts = [prompts[i % len(prompts)] for i in range(args.chats)]
    common = ["--model", args.model, "--draft", "none", "--no-prefix-cache", "--max-model-len", "4096"]
    if args.prefill_chunk is not None:
        common += ["--prefill-chunk", str(args.prefill_chunk)]
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in ("single", "pair") if args.only in (None, name)}
    for repeat in range(args.repeats):
        for name in runs:
            port = free_port()
            url = f"http://127.0.0.1:{port}"
            if name == "single":
                command, ready = ["serve", "--port", str(port), "--threads", "2", *common], f"{url}/ready"
            else:
                command = ["cluster", "up", "--prefill", "1", "--decode", "1", "--router-port", str(port),
                           "--threads", "1", *common]  # fmt: skip
                ready = f"{url}/readiness"
            print(f"{name}, {repeat + 1} of {args.repeats}", file=sys.stderr)
            with served(command, ready), Stalls() as stalls:
                runs[name].append(measure(url, prompts, args.long_tokens))
            runs[name][-1]["stalled_s"] = stalls.seconds
    report(runs, args.out)


def report(runs: dict[str, list[dict[str, Any]]], out: Path | None) -> None:
    def median(name: str, *path: str) -> float:
        values = []
        for run in runs[name]:
            value: Any = run
            for key in path:
                value = value[key]
            values.append(float(value))
        return sorted(values)[len(values) // 2]

    print(f"{'':34}", *(f"{name:>9}" for name in runs), f"{'pair/single':>12}" if len(runs) == 2 else "")
    for label, path in (
        ("chat TTFT p50, s", ("chats", "ttft_s", "p50")),
        ("chat TTFT p99, s", ("chats", "ttft_s", "p99")),
        ("chat between pieces p50, s", ("chats", "inter_piece_s", "p50")),
        ("chat between pieces p99, s", ("chats", "inter_piece_s", "p99")),
        ("longest gap of a chat, median, s", ("worst_gap_s", "p50")),
        ("chat tokens/s, all streams", ("chats", "output_tokens_per_s")),
        ("long prompt TTFT p50, s", ("long", "ttft_s", "p50")),
        ("long prompts/s", ("long", "requests_per_s")),
        ("stalled, s", ("stalled_s",)),
    ):
        values = [median(name, *path) for name in runs]
        ratio = f"{values[1] / values[0]:12.2f}" if len(values) == 2 and values[0] else ""
        print(f"{label:34}", *(f"{value:9.3f}" for value in values), ratio)
    if out is not None:
        out.write_text(json.dumps({"environment": environment(), "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
