"""How many tokens to draft: what acceptance and a step's cost say pays best, down to none at all.

With a_j the chance that position j is accepted once j - 1 was, and t(m) the seconds of a step that drafts m tokens,

    speed(m) = (1 + c · sum over i <= m of a_1 · … · a_i) / t(m)

and the length with the highest speed is taken. c is the share of rows that have a draft in a step that drafts: where
one row of four has one, all four pay for the step and one gains. All are measured while serving. At length 0 the
drafter is probed again from time to time, ever more rarely while it does not pay. A request's text never depends on
any of this, and the reserve stays at its maximum (01), so a switch moves no page. What is looked up on the host is
chosen token by token instead (spec/columns.py).

Deterministic: given the same calls with the same costs it chooses the same lengths.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median_low

import numpy as np

from octavo.errors import ConfigError

_DECAY = 0.97  # per recorded step: what is older than some 30 steps no longer counts
_PRIOR, _PRIOR_WEIGHT = 0.7, 2.0  # optimistic, so that an unknown drafter gets its chance
_SAMPLES = 9  # step times kept per (batch, length); their (lower) median is the cost
GAIN = 1.02  # drafting must beat plain decode by this much
_NOW_SAMPLES = 3  # a plain step of now is the median of so many
_FRESH_STEPS = 8  # a plain step that was timed at most so many drafted steps ago is one of now
_FIRST_PROBE_STEPS, _LAST_PROBE_STEPS = 32, 512
_BURST_ROWS, _BURST_STEPS = 3, 2  # a probe is one step where it has so many rows to learn from, else so many steps
ROW_COST = 0.15  # cost of one drafted token relative to a plain step, before anything was measured
_LEAST_ROW_COST = 0.04  # … and the least that one more token could cost: a length that cannot pay even so is not tried
_CHECK_STEPS = 40  # while drafting, one step in so many goes to plain decode or a neighbouring length: costs change
_LOOK_STEPS = 8  # while nothing is drafted, whether it would pay is asked every so many steps


class StepCosts:
    """Seconds of a step by batch and draft length: the (lower) median of the newest samples.

    A machine slows down and recovers. Where plain steps are common and drafted ones rare, an old drafted sample says
    less about its seconds than about its relation to a plain step then: it is kept as that, and goes with the plain
    steps of now.
    """

    def __init__(self) -> None:
        # bucket -> length -> newest samples: seconds, and what they are of a plain step of then (None: too long ago)
        self._samples: dict[int, dict[int, deque[tuple[float, float | None]]]] = {}
        self._since_plain: dict[int, int] = {}  # bucket -> drafted steps
        self._known: dict[int, dict[int, float]] = {}  # medians by bucket and length, made anew after a sample

    def add(self, bucket: int, length: int, step_s: float) -> None:
        samples = self._samples.setdefault(bucket, {})
        ratio = None
        if length == 0:
            self._since_plain[bucket] = 0
        elif bucket in self._since_plain:
            self._since_plain[bucket] += 1
            if self._since_plain[bucket] <= _FRESH_STEPS:
                ratio = step_s / median_low([plain_s for plain_s, _ in samples[0]][-_NOW_SAMPLES:])
        samples.setdefault(length, deque(maxlen=_SAMPLES)).append((step_s, ratio))
        self._known.pop(bucket, None)

    def knows(self, bucket: int) -> bool:
        """Whether any step of such a batch was timed."""
        return bucket in self._samples

    def samples(self, bucket: int, length: int) -> int:
        return len(self._samples.get(bucket, {}).get(length, ()))

    def _medians(self, bucket: int) -> dict[int, float]:
        medians = self._known.get(bucket)
        if medians is None:
            samples = self._samples.get(bucket, {})
            plain = median_low(step_s for step_s, _ in samples[0]) if 0 in samples else 0.0
            medians = self._known[bucket] = {
                length: median_low(step_s if ratio is None else ratio * plain for step_s, ratio in newest)
                for length, newest in samples.items()
            }
        return medians

    def line(self, bucket: int, lengths: Sequence[int]) -> list[float]:
        """Seconds of a step for each of `lengths`, [] where nothing was timed: on the lines between what was measured,
        and beyond the longest three quarters of what its line says for a token, which is worth a try."""
        known = sorted(self._medians(bucket).items())
        if not known:
            return []
        longest, most_s = known[-1]
        slope = (self.of(bucket, longest + 1) - most_s) * 0.75
        at, seconds = zip(*known, strict=True)
        inside = np.interp(lengths, at, seconds)
        return [max(most_s * 0.5, most_s + slope * (n - longest)) if n > longest else float(s)
                for n, s in zip(lengths, inside, strict=True)]  # fmt: skip

    def of(self, bucket: int, length: int) -> float:
        """Measured, or on the line between (beyond) the nearest measured lengths; 1 is a plain step's where none is."""
        medians = self._medians(bucket)
        if not medians:
            return 1.0 + ROW_COST * length
        exact = medians.get(length)
        if exact is not None:
            return exact
        known = sorted(medians.items())
        if len(known) == 1:
            at, cost = known[0]
            return cost * (1.0 + ROW_COST * length) / (1.0 + ROW_COST * at)
        below = [k for k in known if k[0] < length]
        above = [k for k in known if k[0] > length]
        (m0, t0), (m1, t1) = (below[-1], above[0]) if below and above else (known[-2:] if below else known[:2])
        return max(t0 + (t1 - t0) * (length - m0) / (m1 - m0), min(t0, t1) * 0.5)


class AdaptiveLength:
    """Chooses the draft length of every step. `max_draft_tokens` columns at most, root not included."""

    def __init__(self, max_draft_tokens: int, *, max_depth: int | None = None, enabled: bool = True) -> None:
        """`max_depth` below `max_draft_tokens` means a tree: it is drafted whole or not at all."""
        if max_draft_tokens < 0:
            raise ConfigError("draft_tokens", max_draft_tokens, "at least 0")
        self.max_draft_tokens = max_draft_tokens
        self.enabled = enabled
        self._depth = max_draft_tokens if max_depth is None else max_depth
        tree = self._depth < max_draft_tokens
        self._lengths = (0, max_draft_tokens) if tree else tuple(range(max_draft_tokens + 1))
        self._accepted = [_PRIOR * _PRIOR_WEIGHT] * self._depth
        self._tried = [_PRIOR_WEIGHT] * self._depth
        self._costs = StepCosts()
        self._shares: dict[int, float] = {}  # of rows with a draft, by bucket
        self._off_steps = 0
        self._interval = _FIRST_PROBE_STEPS
        self._on_steps = 0
        self._burst = 0
        self._off_bucket: int | None = None  # batches for which drafting was seen not to pay, nothing drafted since

    # -- choosing ----------------------------------------------------------------------------------------------------

    def choose(self, batch: int) -> int:
        """Draft length of the next step of `batch` decoding rows."""
        if not self.enabled or self.max_draft_tokens == 0:
            return self.max_draft_tokens
        return self._choose(max(1, batch))

    def _choose(self, batch: int) -> int:
        if self._still_off(batch):
            self._off_steps += 1
            return 0
        unknown = self._unmeasured(batch)
        if unknown is not None:
            return unknown
        if self._burst > 0:
            self._burst -= 1
            return self._probe_length()
        best = self.best_length(batch)
        if best:
            self._off_steps, self._interval, self._off_bucket = 0, _FIRST_PROBE_STEPS, None
            return self._checked(best)
        self._off_bucket = _bucket(batch)
        self._off_steps += 1
        if self._off_steps < self._interval:
            return 0
        self._off_steps = 0
        self._interval = min(2 * self._interval, _LAST_PROBE_STEPS)
        self._burst = 0 if batch >= _BURST_ROWS else _BURST_STEPS - 1
        self._forget()
        return self._probe_length()

    def _checked(self, best: int) -> int:
        """`best`, or now and then what its cost is compared with: the length above, the length below, plain decode."""
        self._on_steps += 1
        if self._on_steps % _CHECK_STEPS:
            return best
        at = self._lengths.index(best)
        above = self._lengths[min(at + 1, len(self._lengths) - 1)]
        return (above, self._lengths[at - 1], 0)[(self._on_steps // _CHECK_STEPS - 1) % 3]

    def _still_off(self, batch: int) -> bool:
        """What was found the last time still holds: plain steps of the same batch say nothing about the drafter."""
        due = self._off_steps + 1 >= self._interval or self._off_steps % _LOOK_STEPS == 0
        return not due and self._burst == 0 and self._off_bucket == _bucket(batch)

    def _unmeasured(self, batch: int) -> int | None:
        """Once steps are timed, plain and a short draft are tried early in a new batch size; the longest and the
        middle length too where they could pay at all."""
        bucket = _bucket(batch)
        if not self._costs.knows(bucket):
            return None
        middle = self._lengths[len(self._lengths) // 2]
        short = self._probe_length()
        for length in (0, short, self._lengths[-1], middle):
            if self._costs.samples(bucket, length) < 2 and (length <= short or self._could_pay(bucket, length)):
                return length
        return None

    def _could_pay(self, bucket: int, length: int) -> bool:
        """Whether a length that was not measured would beat plain decode if its tokens cost next to nothing."""
        short, plain = self._probe_length(), self._costs.of(bucket, 0)
        least = self._costs.of(bucket, short) + _LEAST_ROW_COST * plain * (length - short)
        return self._row_tokens(bucket)[min(length, self._depth)] * plain > GAIN * least

    def _probe_length(self) -> int:
        """What would pay if the drafter were as good as hoped, and cheap to try."""
        return self._lengths[-1] if len(self._lengths) == 2 else min(2, self.max_draft_tokens)

    def _forget(self) -> None:
        """Before a probe: what is known counts as two trials, so that a few good ones can turn it."""
        for j in range(self._depth):
            if self._tried[j] > _PRIOR_WEIGHT:
                self._accepted[j] *= _PRIOR_WEIGHT / self._tried[j]
                self._tried[j] = _PRIOR_WEIGHT

    def best_length(self, batch: int) -> int:
        """The length with the highest expected speed; 0 unless drafting beats plain decode by 2 %."""
        bucket = _bucket(max(1, batch))
        tokens = self._row_tokens(bucket)
        plain = 1.0 / self._costs.of(bucket, 0)
        best, best_speed = 0, plain * GAIN
        for length in self._lengths[1:]:
            speed = tokens[min(length, self._depth)] / self._costs.of(bucket, length)
            if speed > best_speed:
                best, best_speed = length, speed
        return best

    def _row_tokens(self, bucket: int) -> list[float]:
        """`expected_tokens` of a row in a step of such a batch, where it may have no draft."""
        share = self._shares.get(bucket, 1.0)
        return [1.0 + share * (tokens - 1.0) for tokens in self.expected_tokens()]

    def expected_tokens(self) -> list[float]:
        """Expected output tokens of a row that has a draft, by accepted depth allowed: index 0 is plain decode."""
        total, chance, result = 1.0, 1.0, [1.0]
        for accepted, tried in zip(self._accepted, self._tried, strict=True):
            chance *= accepted / tried
            total += chance
            result.append(total)
        return result

    # -- measuring ---------------------------------------------------------------------------------------------------

    def record(
        self,
        batch: int,
        drafted: Sequence[int],
        accepted: Sequence[int],
        step_s: float | None,
        sources: Sequence[int] = (),
    ) -> None:
        """What a step of `batch` rows drafted and accepted per row, and how long it took (None: not timed).
        There is one source: `sources` is for drafters that have two (spec/lookup_first.py)."""
        longest = max(drafted, default=0)
        if longest:
            self._off_bucket = None
            self._learn(drafted, accepted)
            bucket = _bucket(max(1, batch))
            now = sum(columns > 0 for columns in drafted) / len(drafted)
            before = self._shares.get(bucket, now)
            self._shares[bucket] = before + (1.0 - _DECAY) * (now - before)
        if step_s is not None and step_s > 0 and batch > 0:
            self._costs.add(_bucket(batch), longest, step_s)

    def _learn(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        tried = [0.0] * self._depth
        hits = [0.0] * self._depth
        for columns, count in zip(drafted, accepted, strict=True):
            if columns <= 0:
                continue
            for j in range(min(count + 1, columns, self._depth)):
                tried[j] += 1
                hits[j] += j < count
        for j in range(self._depth):
            if tried[j]:
                self._accepted[j] = self._accepted[j] * _DECAY + hits[j]
                self._tried[j] = self._tried[j] * _DECAY + tried[j]


def _bucket(batch: int) -> int:
    """Batches of similar cost: 1, 2, 3-4, 5-8, …"""
    return (batch - 1).bit_length()
