"""`octavo bench --server URL`: drives any OpenAI-compatible server with the chat prompts, N streams at a time.

Times are taken where a client sees them: from sending the request to the first piece with text (TTFT), and between
pieces. Token counts are the server's own (`stream_options.include_usage`); a server that gives none is counted by
pieces, and the result says so. Standard library only.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from octavo.errors import ConfigError, OctavoError

PERCENTILES = (50, 90, 99)


@dataclass
class Call:
    """One request as the client saw it. Seconds from sending it."""

    first_s: float | None = None
    end_s: float = 0.0
    pieces_s: list[float] = field(default_factory=list)
    tokens: int = 0
    counted_by_pieces: bool = False
    error: str | None = None


class Client:
    """Where the server is, and how it is asked."""

    def __init__(self, url: str, *, model: str | None, api_key: str | None, timeout_s: float) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError("--server", url, "allowed: http://HOST:PORT or https://HOST:PORT, with or without /v1")
        self._https, self._host = parts.scheme == "https", parts.hostname
        self._port, self._timeout_s = parts.port, timeout_s
        path = parts.path.rstrip("/")
        self._base = path if path.endswith("/v1") else f"{path}/v1"
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self.model = model or self._first_model()

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._https else http.client.HTTPConnection
        return kind(self._host, self._port, timeout=self._timeout_s)

    def _first_model(self) -> str:
        connection = self._connect()
        try:
            connection.request("GET", f"{self._base}/models", headers=self._headers)
            response = connection.getresponse()
            body = response.read()
            if response.status != 200:
                raise OctavoError(f"{self._base}/models answered {response.status}: {body[:200]!r}")
            return str(json.loads(body)["data"][0]["id"])
        except (OSError, ValueError, KeyError, IndexError, http.client.HTTPException) as error:
            raise OctavoError(f"no OpenAI-compatible server at {self._host}:{self._port}: {error}") from None
        finally:
            connection.close()

    def ask(self, prompt: str, *, max_tokens: int, temperature: float, extra: dict[str, Any]) -> Call:
        """One streamed chat completion. Failures are in the result, not raised: the load goes on."""
        call = Call()
        body = {
            "model": self.model, "messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens,
            "temperature": temperature, "stream": True, "stream_options": {"include_usage": True}, **extra,
        }  # fmt: skip
        connection = self._connect()
        start = time.perf_counter()
        try:
            connection.request("POST", f"{self._base}/chat/completions", json.dumps(body), self._headers)
            response = connection.getresponse()
            if response.status != 200:
                call.error = f"{response.status}: {response.read()[:300].decode(errors='replace')}"
            else:
                self._read(response, call, start)
        except (OSError, ValueError, http.client.HTTPException) as error:
            call.error = f"{type(error).__name__}: {error}"
        finally:
            connection.close()
        call.end_s = time.perf_counter() - start
        return call

    def _read(self, response: http.client.HTTPResponse, call: Call, start: float) -> None:
        usage = None
        for event in _events(response):
            if "error" in event:
                call.error = str(event["error"])[:300]
                return
            usage = event.get("usage") or usage
            if any(_has_text(choice) for choice in event.get("choices", ())):
                call.pieces_s.append(time.perf_counter() - start)
        call.first_s = call.pieces_s[0] if call.pieces_s else None
        call.counted_by_pieces = usage is None
        call.tokens = len(call.pieces_s) if usage is None else int(usage["completion_tokens"])


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Server-sent events until [DONE]. Raises ValueError where the stream ends without it."""
    for raw in response:
        line = raw.strip()
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        yield json.loads(data)
    raise ValueError("the stream ended without [DONE]")


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    return bool(delta.get("content") or delta.get("tool_calls") or delta.get("reasoning_content"))


@dataclass
class Load:
    """What a run came to."""

    streams: int
    wall_s: float
    calls: list[Call]

    def summary(self) -> dict[str, Any]:
        good = [call for call in self.calls if call.error is None and call.first_s is not None]
        gaps = [b - a for call in good for a, b in zip(call.pieces_s, call.pieces_s[1:], strict=False)]
        per_token = [(call.pieces_s[-1] - call.pieces_s[0]) / (call.tokens - 1) for call in good if call.tokens > 1]
        tokens = sum(call.tokens for call in good)
        return {
            "streams": self.streams,
            "requests": len(self.calls),
            "failed": len(self.calls) - len(good),
            "errors": sorted({call.error for call in self.calls if call.error is not None})[:5],
            "wall_s": self.wall_s,
            "output_tokens": tokens,
            "output_tokens_per_s": tokens / self.wall_s if self.wall_s else 0.0,
            "requests_per_s": len(good) / self.wall_s if self.wall_s else 0.0,
            "tokens_counted_by_pieces": any(call.counted_by_pieces for call in good),
            "ttft_s": percentiles([call.first_s for call in good if call.first_s is not None]),
            "time_per_output_token_s": percentiles(per_token),
            "inter_piece_s": percentiles(gaps),
            "e2e_s": percentiles([call.end_s for call in good]),
        }


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p90, p99 and the mean (nearest rank); empty without values."""
    if not values:
        return {}
    ordered = sorted(values)
    ranked = {f"p{p}": ordered[min(len(ordered) - 1, max(0, -(-p * len(ordered) // 100) - 1))] for p in PERCENTILES}
    return ranked | {"mean": sum(ordered) / len(ordered)}


def drive(client: Client, prompts: Sequence[str], *, streams: int, max_tokens: int, temperature: float,
          extra: dict[str, Any], progress: Callable[[int, int], None]) -> Load:  # fmt: skip
    """Send every prompt, `streams` at a time, each stream taking the next one when it is free."""
    calls: list[Call | None] = [None] * len(prompts)
    numbers = iter(range(len(prompts)))
    lock = threading.Lock()
    done = 0

    def work() -> None:
        nonlocal done
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            calls[number] = client.ask(prompts[number], max_tokens=max_tokens, temperature=temperature, extra=extra)
            with lock:
                done += 1
                progress(done, len(prompts))

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(streams, len(prompts)))]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():  # in slices, so that Ctrl-C is heard
            thread.join(timeout=0.2)
    return Load(streams, time.perf_counter() - start, [call for call in calls if call is not None])


def rows(loads: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Rows of a table: milliseconds at p50 / p90 / p99."""
    table = [["streams", "requests", "failed", "tokens/s", "requests/s", "TTFT ms", "per token ms", "end to end s"]]
    for load in loads:
        table.append([
            str(load["streams"]), str(load["requests"]), str(load["failed"]), f"{load['output_tokens_per_s']:.1f}",
            f"{load['requests_per_s']:.2f}", _three(load["ttft_s"], 1000),
            _three(load["time_per_output_token_s"], 1000), _three(load["e2e_s"], 1),
        ])  # fmt: skip
    return table


def _three(values: dict[str, float], factor: float) -> str:
    return " / ".join(f"{values[f'p{p}'] * factor:.1f}" for p in PERCENTILES) if values else "–"
