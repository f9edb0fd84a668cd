"""Alternating repeats, medians and spreads.

Every engine runs each case once as a warm-up, then the engines take turns, group of prompts by group and piece by
piece, for `repeats` rounds, so that a machine that slows down slows all of them. The median counts. Where the range of
a speed is more than a tenth of it, the line is void; a ratio has an interval of its own, from the rounds (`Ratio`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from octavo.bench.engines import Engine, Sample, run
from octavo.bench.workload import Case

VOID_SPREAD = 0.10
SURE = 0.95  # that the median of a ratio lies in its interval
TOLD = 4  # times that progress is told in one repeat


class Prompts(Protocol):
    def groups(self, case: Case, repeat: int) -> list[list[list[int]]]: ...


@dataclass(frozen=True)
class Ratio:
    """How many times as fast one engine is as another, in each round in which they took turns. What slows a machine
    for longer than a round is not in it."""

    rounds: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)

    @property
    def interval(self) -> tuple[float, float]:
        """Where the true median lies with at least `SURE` probability, whatever the noise is like: it misses the range
        from the k-th smallest to the k-th largest of n rounds with 2·P(Binomial(n, ½) < k) (the interval of the sign
        test). Fewer than six rounds do not suffice; then it is their range (five: 94 %)."""
        values, n = sorted(self.rounds), len(self.rounds)
        skipped, missed = 0, 2 * 0.5**n
        while missed + 2 * math.comb(n, skipped + 1) * 0.5**n <= 1 - SURE:
            skipped += 1
            missed += 2 * math.comb(n, skipped) * 0.5**n
        return values[skipped], values[n - 1 - skipped]

    @property
    def void(self) -> bool:
        """Known to less than a tenth."""
        low, high = self.interval
        return high - low > VOID_SPREAD * self.median


@dataclass(frozen=True)
class Divergence:
    """Where an output stops being the plain one, and by how much the plain engine preferred its token there.

    top2_margin  log-probability of the likeliest token minus that of the second: near 0 is a tie that rounding broke
    """

    output: int
    position: int
    top2_margin: float


@dataclass
class Line:
    """One engine on one case over all repeats. Speeds are tokens per second over all streams together; those of
    decoding and of prefill are 0 where some streams decode while others are at their prompt."""

    case: Case
    engine: str
    mode: str
    threads: int
    decode_tokens_per_s: list[float] = field(default_factory=list)
    output_tokens_per_s: list[float] = field(default_factory=list)
    prefill_tokens_per_s: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    output_ids: list[list[int]] = field(default_factory=list)  # of the last repeat, for identity checks
    figures: list[dict[str, Any]] = field(default_factory=list)  # of the last repeat, one per output; peers have none
    divergences: list[Divergence] = field(default_factory=list)  # of the last repeat's outputs from the plain ones

    @property
    def speed(self) -> list[float]:
        """What is compared: decode speed of one stream, output throughput of several."""
        if self.case.output_tokens == 1:
            return self.prefill_tokens_per_s
        return self.decode_tokens_per_s if self.case.streams == 1 else self.output_tokens_per_s

    @property
    def median(self) -> float:
        return statistics.median(self.speed)

    @property
    def spread(self) -> float:
        """(largest − smallest) / median."""
        return (max(self.speed) - min(self.speed)) / self.median

    @property
    def void(self) -> bool:
        return self.spread > VOID_SPREAD

    def add(self, samples: Sequence[Sample], groups: Sequence[Sequence[list[int]]]) -> None:
        """One repeat: the samples of all groups, summed."""
        tokens = sum(len(ids) for s in samples for ids in s.output_ids)
        firsts = [t for s in samples for t in s.first_token_s]
        decode_s = sum(s.decode_s for s in samples)
        decoded = tokens - len(firsts)
        prompt_tokens = sum(len(p) for group in groups for p in group)
        apart = all(len(group) <= self.case.streams for group in groups)  # else prompts and answers overlap
        self.decode_tokens_per_s.append(decoded / decode_s if apart and decoded and decode_s > 0 else 0.0)
        self.output_tokens_per_s.append(tokens / sum(s.wall_s for s in samples))
        self.prefill_tokens_per_s.append(prompt_tokens / sum(max(s.first_token_s) for s in samples) if apart else 0.0)
        self.first_token_s.append(statistics.median(firsts))
        self.output_ids = [ids for s in samples for ids in s.output_ids]
        self.figures = [figures for s in samples for figures in s.figures]

    @property
    def looping(self) -> list[bool]:
        """Which outputs repeat themselves: drafts are accepted there that say nothing about real text."""
        from octavo.train.corpus import loops

        return [loops(ids) for ids in self.output_ids]

    def accept_length(self, *, loops: bool = True) -> float | None:
        """Mean tokens per decode step over the outputs; without `loops`, over those that do not repeat themselves."""
        kept = (
            [f["accept_length"] for f, bad in zip(self.figures, self.looping, strict=True) if loops or not bad]
            if self.figures
            else []
        )
        kept = [value for value in kept if value is not None]
        return statistics.fmean(kept) if kept else None

    @property
    def accepted_by_position(self) -> list[float]:
        """Share of verifies that accepted the draft at position 1, 2, …"""
        drafts = sum(f["drafts"] for f in self.figures)
        longest = max((len(f["accepted_per_position"]) for f in self.figures), default=0)
        counts = [sum((*f["accepted_per_position"], *[0] * longest)[i] for f in self.figures) for i in range(longest)]
        return [count / drafts for count in counts] if drafts else []

    def summary(self) -> dict[str, Any]:
        """Plain data: raw repeats, median, spread."""
        return {
            "engine": self.engine,
            "mode": self.mode,
            "threads": self.threads,
            "case": self.case.label,
            "kind": self.case.kind,
            "streams": self.case.streams,
            "prompt_tokens": self.case.prompt_tokens,
            "output_tokens": self.case.output_tokens,
            "temperature": self.case.temperature,
            "median_tokens_per_s": self.median,
            "spread": self.spread,
            "void": self.void,
            "median_first_token_s": statistics.median(self.first_token_s),
            "accept_length": self.accept_length(),
            "accept_length_without_loops": self.accept_length(loops=False),
            "looping_outputs": sum(self.looping),
            "accepted_by_position": self.accepted_by_position,
            "divergences": [asdict(d) for d in self.divergences],
            "repeats": {
                "decode_tokens_per_s": self.decode_tokens_per_s,
                "output_tokens_per_s": self.output_tokens_per_s,
                "prefill_tokens_per_s": self.prefill_tokens_per_s,
                "first_token_s": self.first_token_s,
            },
        }


def measure(
    engines: Sequence[Engine],
    cases: Sequence[Case],
    prompts: dict[str, Prompts],
    repeats: int,
    progress: Callable[[str], None],
) -> list[Line]:
    """Lines for every case and engine. `prompts` by kind of case; `progress` hears what runs next."""
    lines = []
    for case in cases:
        row = [Line(case, engine.name, engine.mode, engine.threads) for engine in engines]
        for engine in engines:  # warm-up: first touches, thread pools, frequency
            progress(f"{case.label}: {engine.name} {engine.mode}, warm-up")
            run(engine, prompts[case.kind].groups(case, repeats)[0], case)
        for repeat in range(repeats):
            groups = prompts[case.kind].groups(case, repeat)
            samples: list[list[Sample]] = [[] for _ in engines]
            for number, group in enumerate(groups):
                if number * TOLD // len(groups) != (number - 1) * TOLD // len(groups):
                    progress(f"{case.label}: repeat {repeat + 1} of {repeats}, prompts {number + 1} of {len(groups)}")
                for at, sample in _in_turns(engines, group, case, first=repeat + number):
                    samples[at].append(sample)
            for line, own in zip(row, samples, strict=True):
                line.add(own, groups)
        lines.extend(row)
    return lines


def _in_turns(
    engines: Sequence[Engine], group: list[list[int]], case: Case, first: int
) -> Iterator[tuple[int, Sample]]:
    """Every engine's sample of one group as it is there, with the engine's number. Number `first` (modulo) begins, so
    that nobody always runs behind the same other one."""
    order = [(first + turn) % len(engines) for turn in range(len(engines))]
    under_way = {at: engines[at].pieces(group, case) for at in order}
    while under_way:
        for at, pieces in list(under_way.items()):
            if (sample := next(pieces)) is not None:
                del under_way[at]
                yield at, sample


def divergences(
    line: Line, plain: Line, prompts: Sequence[list[int]], margin: Callable[[list[int]], float]
) -> list[Divergence]:
    """The first different token of every output that is not the plain one. `prompts`: those of the last repeat, in
    the order of the outputs; `margin`: top-2 margin of the plain engine behind the given ids."""
    found = []
    for number, (ours, theirs, prompt) in enumerate(zip(line.output_ids, plain.output_ids, prompts, strict=True)):
        at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
        if at is not None:
            found.append(Divergence(number, at, margin([*prompt, *theirs[:at]])))
    return found


def identical_share(line: Line, plain: Line) -> float:
    """Share of outputs that are the plain run's, token for token."""
    same = sum(a == b for a, b in zip(line.output_ids, plain.output_ids, strict=True))
    return same / max(1, len(plain.output_ids))
