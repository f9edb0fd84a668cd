"""Engines behind one face: this one in a mode of its own, or a peer in its own process. Each times one group, this one
in pieces where there are several streams: what others compute in between is not in its times."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

from octavo.bench import MODES
from octavo.bench.workload import Case
from octavo.cli.common import metrics_dict, open_llm
from octavo.config import EngineConfig
from octavo.engine import collect
from octavo.engine.output import RequestOutput
from octavo.engine.request import EngineRequest
from octavo.errors import ConfigError, OctavoError
from octavo.params import SamplingParams

if TYPE_CHECKING:
    from octavo import LLM

PIECE_S = 0.5  # how long this engine runs before others have a turn

PEERS = {"llama.cpp": "llamacpp_peer.py", "vllm": "vllm_peer.py", "transformers": "transformers_peer.py"}


@dataclass
class Sample:
    """One timed group, as many requests at a time as the case has streams; `output_ids` and `figures` per prompt.
    `first_token_s` counts from a request's own start, the other seconds from the first one's. Pauses do not count."""

    wall_s: float
    first_token_s: list[float]
    decode_s: float  # from every first token to the end; means nothing where prompts wait in line
    output_ids: list[list[int]]
    figures: list[dict[str, Any]] = field(default_factory=list)  # this engine's own, per stream
    step_s: list[float] = field(default_factory=list)  # of each step behind the first tokens, where the engine says


class Engine(Protocol):
    name: str
    mode: str
    threads: int

    def describe(self) -> dict[str, Any]: ...

    def pieces(self, prompts: Sequence[list[int]], case: Case) -> Iterator[Sample | None]:
        """One group: None wherever others may have a turn, at last the sample."""
        ...

    def close(self) -> None: ...


def run(engine: Engine, prompts: Sequence[list[int]], case: Case) -> Sample:
    """One group in one piece."""
    return next(sample for sample in engine.pieces(prompts, case) if sample is not None)


class Ours:
    """This engine in one mode, prefix cache off."""

    name = "octavo"

    def __init__(self, mode: str, config: EngineConfig) -> None:
        if mode not in MODES:
            raise ConfigError("--mode", mode, f"allowed: {', '.join(MODES)}")
        self.mode, self.threads = mode, config.num_threads
        weights = config.draft_model if MODES[mode] not in ("none", "ngram", "auto") else None
        self.config = config.replace(draft=MODES[mode], draft_model=weights, prefix_cache=False)
        start = time.perf_counter()
        self.llm: LLM = open_llm(self.config, quiet=True)
        self.load_s = time.perf_counter() - start

    def describe(self) -> dict[str, Any]:
        return {"startup": list(self.llm.startup_lines()), "load_s": self.load_s}

    def pieces(self, prompts: Sequence[list[int]], case: Case) -> Iterator[Sample | None]:
        params = SamplingParams(temperature=case.temperature, max_tokens=case.output_tokens, ignore_eos=True, seed=1)
        if len(prompts) > case.streams:
            yield from self._streams(prompts, params, case.streams)
            return
        start = time.perf_counter()
        results = self.llm.generate(list(prompts), params)
        wall_s = time.perf_counter() - start
        yield _sample(results, [result.metrics.ttft_s or 0.0 for result in results], wall_s)

    def _streams(
        self, prompts: Sequence[list[int]], params: SamplingParams, streams: int
    ) -> Iterator[Sample | None]:
        """`streams` clients, each of which asks again when it has its answer. Between two steps nothing is under way
        (without `--overlap`), so a pause there changes nothing."""
        core, results = self.llm.core, [collect.empty(str(i), ids, 1) for i, ids in enumerate(prompts)]
        waiting, running, paused_s = deque(results), 0, 0.0
        asked_s, first_s = [0.0] * len(results), [-1.0] * len(results)
        start = resumed = time.perf_counter()
        while waiting or running:
            while waiting and running < streams:
                asked = waiting.popleft()
                asked_s[int(asked.request_id)] = time.perf_counter() - paused_s
                core.add_request(EngineRequest(asked.request_id, asked.prompt_token_ids, params, time.monotonic()))
                running += 1
            for piece in core.step():
                if piece.error is not None:
                    raise piece.error
                at = int(piece.request_id)
                collect.add(results[at], piece)
                if first_s[at] < 0 and results[at].token_ids:
                    first_s[at] = time.perf_counter() - paused_s - asked_s[at]
                running -= piece.finished
            if (now := time.perf_counter()) - resumed > PIECE_S and (waiting or running):
                yield None
                resumed = time.perf_counter()
                paused_s += resumed - now
        yield _sample(results, first_s, time.perf_counter() - paused_s - start)

    def top2_margin(self, ids: list[int]) -> float:
        """Log-probability of the likeliest next token minus that of the second."""
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=2, ignore_eos=True)
        entries = self.llm.generate([ids], params)[0].logprobs or []
        (_, first), (_, second) = entries[0].top
        return first - second

    def close(self) -> None:
        self.llm.close()


def _sample(results: Sequence[RequestOutput], first_token_s: list[float], wall_s: float) -> Sample:
    return Sample(
        wall_s=wall_s,
        first_token_s=first_token_s,
        decode_s=wall_s - max(first_token_s),
        output_ids=[list(result.token_ids) for result in results],
        figures=[metrics_dict(result.metrics) for result in results],
    )


class PeerFailed(OctavoError):
    """The peer's process said no, or is gone."""


class Peer:
    """A peer in its own environment, driven over JSON lines (octavo/bench/peers/protocol.py)."""

    mode = "plain"

    def __init__(self, peer: str, python: Path, model: str, *, threads: int, streams: int, context_tokens: int) -> None:
        script = Path(__file__).with_name("peers") / PEERS[peer]
        environ = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": ""}
        self.name, self.threads = peer, threads
        self._process = subprocess.Popen(
            [str(python), str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environ,
        )
        self._errors = _Tail(self._process.stderr)
        self.info = self._ask(op="load", model=model, threads=threads, streams=streams, context_tokens=context_tokens)

    def _ask(self, **request: Any) -> dict[str, Any]:
        if self._process.stdin is None or self._process.stdout is None:
            raise PeerFailed(f"{self.name}: no pipe")
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise PeerFailed(f"{self.name} ended (exit code {self._process.wait()}): {self._errors.last()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerFailed(f"{self.name}: {answer['error']}")
        return answer

    def describe(self) -> dict[str, Any]:
        return self.info

    def pieces(self, prompts: Sequence[list[int]], case: Case) -> Iterator[Sample | None]:
        """A peer answers a group in one piece."""
        answer = self._ask(
            op="run",
            prompts=list(prompts),
            streams=case.streams,
            output_tokens=case.output_tokens,
            temperature=case.temperature,
        )
        yield Sample(
            wall_s=answer["wall_s"],
            first_token_s=answer["first_token_s"],
            decode_s=answer["decode_s"],
            output_ids=answer["output_tokens"],
            step_s=answer.get("step_s", []),
        )

    def perplexity(self, ids: Sequence[int], window_tokens: int) -> tuple[float, int]:
        """Sum of negative log-likelihoods (nats) and how many tokens it is over."""
        answer = self._ask(op="perplexity", token_ids=list(ids), window_tokens=window_tokens)
        return answer["nll"], answer["tokens"]

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class _Tail:
    """Drains a stream in the background and keeps its last lines."""

    def __init__(self, stream: IO[str] | None) -> None:
        import threading
        from collections import deque

        self._lines: deque[str] = deque(maxlen=5)
        if stream is not None:
            threading.Thread(target=lambda: self._lines.extend(stream), daemon=True).start()

    def last(self) -> str:
        return " / ".join(line.strip() for line in self._lines if line.strip())


def peer_python(peer: str, given: str | None) -> Path:
    """The peer's interpreter: the given one, or that of `make peers`. Raises ConfigError where there is none."""
    if peer not in PEERS:
        raise ConfigError("--peer", peer, f"allowed: {', '.join(PEERS)}")
    folder = Path(os.environ.get("OCTAVO_PEERS_DIR") or Path.home() / ".cache/octavo/peers")
    python = Path(given) if given else folder / peer.replace(".", "") / "bin/python"
    if not python.is_file():
        raise ConfigError(
            "--peer-python", str(python), f"no such interpreter; `make peers` builds it, or name one that has {peer}"
        )
    return python
