"""Where the time of a decode step goes: wall time by part, exclusive of the parts called from inside it.

The parts are methods of one engine; they are wrapped while the profile runs and put back afterwards. With native
operations the network's own time is split further, by the operation the compiled module was in.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo import LLM
    from octavo.params import SamplingParams

# Shown in this order; what no part claims is "other Python".
PARTS = ("scheduling", "draft", "network", "head", "sampling", "books and text", "other Python")


@dataclass
class Profile:
    """Seconds by part over `steps` decode steps that made `tokens` tokens."""

    mode: str
    steps: int = 0
    tokens: int = 0
    wall_s: float = 0.0
    parts_s: dict[str, float] = field(default_factory=dict)
    operations_s: dict[str, float] = field(default_factory=dict)  # inside "network"; empty on torch operations
    weight_bytes: int = 0  # read once a step by the network's operations

    @property
    def step_ms(self) -> float:
        return 1000 * self.wall_s / max(1, self.steps)

    def to_dict(self) -> dict[str, Any]:
        return {
            "mode": self.mode, "steps": self.steps, "tokens": self.tokens, "wall_s": self.wall_s,
            "step_ms": self.step_ms, "parts_s": self.parts_s, "operations_s": self.operations_s,
            "network_weight_bytes": self.weight_bytes,
        }  # fmt: skip


class Stopwatch:
    """Exclusive time by label: while a wrapped call runs inside another, only the inner one's clock goes."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._stack: list[str] = []
        self._since = 0.0
        self._undo: list[Callable[[], None]] = []

    def wrap(self, owner: Any, name: str, label: str) -> None:
        original = getattr(owner, name)
        shadowed = name in vars(owner)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._switch(label)
            try:
                return original(*args, **kwargs)
            finally:
                self._back()

        setattr(owner, name, timed)
        self._undo.append(lambda: setattr(owner, name, original) if shadowed else delattr(owner, name))

    def _switch(self, label: str) -> None:
        now = time.perf_counter()
        if self._stack:
            self.seconds[self._stack[-1]] += now - self._since
        self._stack.append(label)
        self._since = now

    def _back(self) -> None:
        now = time.perf_counter()
        self.seconds[self._stack.pop()] += now - self._since
        self._since = now

    def unwrap(self) -> None:
        while self._undo:
            self._undo.pop()()


@contextmanager
def _watched(llm: LLM) -> Iterator[Stopwatch]:
    core = llm.core
    watch = Stopwatch()
    runner = core.runner
    watch.wrap(core, "step", "other Python")
    watch.wrap(core, "_plan", "scheduling")
    watch.wrap(core, "_settle", "books and text")
    watch.wrap(runner, "_propose", "draft")
    watch.wrap(runner, "_observe", "draft")
    watch.wrap(runner, "write_pending", "draft")
    watch.wrap(runner.network, "forward", "network")
    watch.wrap(runner.network, "logits", "head")
    watch.wrap(runner.network, "argmax", "head")
    watch.wrap(runner.sampler, "sample", "sampling")
    try:
        yield watch
    finally:
        watch.unwrap()


def profile(llm: LLM, mode: str, prompt: list[int], params: SamplingParams) -> Profile:
    """Profile the decode steps of one answer; the prefill, which ends with the first token, is left out."""
    drafter = llm.core.runner.drafter
    program = llm.core.runner.network.program(drafter.taps if drafter is not None else ())
    native = hasattr(program, "start_profile")
    result = Profile(mode)
    with _watched(llm) as watch:
        stream = llm.stream(prompt, params)
        next(stream)
        watch.seconds.clear()
        if native:
            program.start_profile()
        start = time.perf_counter()
        last = None
        for last in stream:
            result.tokens += len(last.token_ids)
        result.wall_s = time.perf_counter() - start
    if last is not None and last.metrics is not None:
        result.steps = last.metrics.decode_steps
    result.parts_s = {part: watch.seconds.get(part, 0.0) for part in PARTS}
    if native:
        operations: defaultdict[str, float] = defaultdict(float)
        for name, weight_bytes, seconds in program.profile():
            operations[name] += seconds
            result.weight_bytes += weight_bytes
        result.operations_s = dict(sorted(operations.items(), key=lambda item: -item[1]))
    return result


def rows(profiles: list[Profile]) -> list[list[str]]:
    """Rows of a table: milliseconds a step and share, by part, then by operation inside the network."""
    table = [["mode", "part", "ms a step", "share"]]
    for p in profiles:
        steps = max(1, p.steps)
        table.append(
            [p.mode, f"whole step ({p.steps} steps, {p.tokens / steps:.2f} tokens each)", f"{p.step_ms:.3f}", ""]
        )
        for part, seconds in p.parts_s.items():
            table.append(["", part, f"{1000 * seconds / steps:.3f}", f"{seconds / p.wall_s:.1%}"])
            if part == "network":
                for name, inner in p.operations_s.items():
                    table.append(["", f"  {name}", f"{1000 * inner / steps:.3f}", f"{inner / p.wall_s:.1%}"])
    return table
