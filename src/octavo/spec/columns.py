"""Which looked-up tokens of a step are verified: the ones that pay, over all of its rows.

A token looked up on the host (spec/ngram.py, spec/table.py) costs nothing but its verify row, and how far it can be
trusted is known before: by the length of the match in front of it, or by how often the target wrote it there. With
P the chance that a token and all before it in its row are right, the n tokens of highest P in a step of b rows give

    speed(n) = (b + sum of P) / t(b, n)

and the n of the highest speed is taken; t, the seconds of a step, is measured while serving. A row that copies a text
is drafted at length beside rows that draft nothing. The chances are measured without drafting: whatever was looked
up is compared with what the target then said, verified or not, so a step is spent on a try only for its cost.
Source of choosing by expected tokens over time: X. Liu et al., "Optimizing Speculative Decoding for Serving Large
Language Models Using Goodput" (2024); here it is done token by token.

A request's text never depends on any of this, and the reserve stays at its maximum (01), so a switch moves no page.
Deterministic: given the same calls with the same costs it chooses the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from octavo.spec.adaptive import ROW_COST, StepCosts
from octavo.spec.drafter import ProposeBatch

_GAIN = 1.05  # verifying must beat plain decode by this much: of many numbers near it the best looks better than it is
_DECAY = 0.98  # per trial: what is older than some 50 trials of a kind no longer counts
_PRIOR_WEIGHT = 4.0  # trials that the first guess of a chance is worth
_MEASURED = 2  # samples by which a cost counts as known
_ASKED = 8  # steps at most that are spent on that: beside prompts none is timed
_SHORT_TOKENS = 2  # what is drafted in a batch for the first time, to learn what a token costs there
_TRY_CHANCE = 0.25  # … with tokens that are right at least so often
# While drafting: a plain step behind so many without one, and more tokens in one of so many, as costs change.
_CHECK_STEPS = 40
_FIRST_PROBE_STEPS, _LAST_PROBE_STEPS, _BURST_STEPS = 64, 512, 2  # while nothing pays: whether costs have changed

_REST_LOOKS, _REST_STEPS = 8, 4  # after so many steps that took nothing only one in so many looks anything up
_LOOK_STEPS = 8  # what a step costs is looked at so often …
_EARLY_STEPS = 64  # … and every time at first
_FLOOR_SHARE = 0.7  # of the average chance that would pay: a later token may be a little less certain than that

_MATCH_KINDS, _CHANCE_KINDS = 16, 10
_PRIORS = (
    *(max(0.3, 1.0 - 1.0 / max(1, match)) for match in range(_MATCH_KINDS)),
    *((tenth + 0.5) / _CHANCE_KINDS for tenth in range(_CHANCE_KINDS)),
)


def kind_of_match(match_tokens: int) -> int:
    """The kind of a token that followed the last occurrence of the `match_tokens` before it."""
    return min(match_tokens, _MATCH_KINDS - 1)


def kind_of_chance(chance: float) -> int:
    """The kind of a token that the target wrote so often in such a place, 0 to 1."""
    return _MATCH_KINDS + min(_CHANCE_KINDS - 1, int(chance * _CHANCE_KINDS))


@dataclass(frozen=True)
class Found:
    """What was looked up for a row: tokens in order, and of each the kind, by which its chance is known."""

    tokens: list[int]
    kinds: list[int]

    def cut(self, count: int) -> Found:
        return Found(self.tokens[:count], self.kinds[:count])


NOTHING = Found([], [])


@dataclass
class Worth:
    """What is known of steps of one batch size, looked at anew every few steps."""

    chances: list[float]  # by kind, the chooser's own
    seconds: list[float] = field(default_factory=list)  # of a step, by drafted tokens: 0, 1, …; [] while none was timed
    least: float = 0.0  # chance below which a token cannot pay
    floor: float = 0.0  # `least`, or what is tried in this step: tokens of a lower chance are not worth finding
    phrases: bool = True  # whether any phrase of a table is
    reach: list[int] = field(default_factory=list)  # by length of a match: tokens worth finding behind it, one at least
    looks: int = 0
    idle: int = 0  # steps since something was taken
    asked: int = 0  # plain steps that were asked for before two were timed
    tried: int = 0  # short drafts before two were timed
    since_plain: int = 0
    on_steps: int = 0
    off_steps: int = 0  # since drafting paid, or was tried
    interval: int = _FIRST_PROBE_STEPS
    burst: int = 0


class ColumnChooser:
    """Chooses the looked-up tokens of every step; `most_tokens` a row at most."""

    def __init__(self, most_tokens: int) -> None:
        self.most_tokens = most_tokens
        self.chances = list(_PRIORS)  # by kind: how often such a token was right, all before it being right
        self._right = [prior * _PRIOR_WEIGHT for prior in _PRIORS]
        self._trials = [_PRIOR_WEIGHT] * len(_PRIORS)
        self._waiting: dict[int, tuple[int, Found]] = {}  # row -> its text's tokens when this was looked up
        self._costs = StepCosts()
        self._batches: dict[int, Worth] = {}
        self.measuring = False  # whether the newest choice is for its cost: no other draft may be in that step

    # -- what the engine asks and tells ------------------------------------------------------------------------------

    def choose(self, batch: int) -> int:
        """Upper bound of the next step's draft length: which tokens are taken is known only when they are found. 0
        where nothing is looked up."""
        known = self._of(_bin(max(1, batch)))
        known.idle += 1
        if known.looks < _EARLY_STEPS or known.burst or known.idle <= _REST_LOOKS or known.idle % _REST_STEPS == 0:
            return self.most_tokens
        known.off_steps += 1
        return 0

    def record(
        self,
        batch: int,
        drafted: Sequence[int],
        accepted: Sequence[int],
        step_s: float | None,
        sources: Sequence[int] = (),
    ) -> None:
        """What a step of `batch` rows drafted per row, and how long it took (None: not timed)."""
        if step_s is not None and step_s > 0 and batch > 0:
            bucket, count = _bin(batch), sum(drafted)
            self._costs.add(bucket, _bin(count), step_s)
            known = self._of(bucket)
            known.since_plain = 0 if count == 0 else known.since_plain + 1

    # -- what the drafters ask ---------------------------------------------------------------------------------------

    def begin(self, row: int) -> None:
        """The row has a new owner."""
        self._waiting.pop(row, None)

    def worth(self, batch: int) -> Worth:
        """What is worth finding for a step of `batch` rows; called once a step, before anything is looked up."""
        bucket = _bin(batch)
        known = self._of(bucket)
        grown = 0 < len(known.seconds) <= batch * self.most_tokens
        if known.looks % _LOOK_STEPS == 0 or known.looks < _EARLY_STEPS or grown:
            self._look(known, batch, bucket)
        tried = known.burst > 0 or known.off_steps + 1 >= known.interval or not self._knows_drafts(bucket)
        known.floor = min(known.least, _TRY_CHANCE) if tried else known.least
        # now and then a table is asked all the same: its chances may have changed
        known.phrases = known.looks % _LOOK_STEPS == 0 or max(self.chances[_MATCH_KINDS:]) >= known.floor
        known.looks += 1
        return known

    def value(self, found: Found) -> float:
        """How many tokens of it are expected to be right."""
        chance, total = 1.0, 0.0
        for kind in found.kinds:
            chance *= self.chances[kind]
            total += chance
        return total

    def take(self, batch: ProposeBatch, found: list[Found], worth: Worth) -> list[Found]:
        """What of `found` (one for each row of `batch`) the step verifies. Learns from what became of the last."""
        if batch.host_tokens is None:
            raise ValueError("looking up needs the tokens on the host: settle the rows first")
        chances: list[tuple[float, int]] = []
        for at, (row, text, now) in enumerate(zip(batch.host_rows, batch.host_tokens, found, strict=True)):
            self._learn(row, text)
            if now.tokens:
                self._waiting[row] = len(text), now
                chance = 1.0
                for kind in now.kinds:
                    chance *= self.chances[kind]
                    if chance < worth.floor:
                        break
                    chances.append((chance, at))
        self.measuring = False
        if not chances:
            worth.off_steps += 1
            return [NOTHING] * len(found)
        chances.sort(reverse=True)  # the chance never rises along a row, so a row's first tokens come first
        counts = [0] * len(found)
        taken = self._count(len(found), worth, [chance for chance, _ in chances])
        if taken:
            worth.idle = 0
        for _, at in chances[:taken]:
            counts[at] += 1
        return [row.cut(count) if count else NOTHING for row, count in zip(found, counts, strict=True)]

    # -- chances -----------------------------------------------------------------------------------------------------

    def _learn(self, row: int, text: list[int]) -> None:
        """Compare what was looked up for the row with how its text went on."""
        start, found = self._waiting.pop(row, (len(text), NOTHING))
        for said, token, kind in zip(text[start:], found.tokens, found.kinds, strict=False):
            self._trials[kind] = self._trials[kind] * _DECAY + 1.0
            self._right[kind] = self._right[kind] * _DECAY + (said == token)
            self.chances[kind] = self._right[kind] / self._trials[kind]
            if said != token:
                break

    # -- how many ----------------------------------------------------------------------------------------------------

    def _look(self, worth: Worth, batch: int, bucket: int) -> None:
        most = batch * self.most_tokens
        worth.seconds = self._costs.line(bucket, [_bin(n) for n in range(most + 1)])
        floor = 0.0
        if worth.seconds:
            plain = worth.seconds[0]
            # n tokens pay if they are right so often on average
            floor = min((_GAIN * batch * worth.seconds[n] / plain - batch) / n for n in range(1, most + 1))
        worth.least = min(max(0.0, _FLOOR_SHARE * floor), 1.0)
        for match in range(_MATCH_KINDS):
            chance, count = 1.0, 0
            while count < self.most_tokens:
                chance *= self.chances[kind_of_match(match + count)]
                if count and chance < worth.least:
                    break
                count += 1
            worth.reach[match] = count

    def _count(self, batch: int, worth: Worth, chances: list[float]) -> int:
        """How many of the step's tokens, likeliest first, are verified."""
        bucket = _bin(batch)
        if not worth.seconds:
            return self._best(batch, [1.0 + ROW_COST * n for n in range(len(chances) + 1)], chances)[0]
        if self._costs.samples(bucket, 0) < _MEASURED and worth.asked < _ASKED:
            worth.asked += 1
            self.measuring = True
            return 0
        likely = sum(chance >= _TRY_CHANCE for chance in chances)
        if likely and not self._knows_drafts(bucket) and worth.tried < _ASKED:
            worth.tried += 1
            self.measuring = True
            return min(likely, _SHORT_TOKENS)
        count, nearest = self._best(batch, worth.seconds, chances)
        if count:
            worth.off_steps, worth.interval, worth.burst = 0, _FIRST_PROBE_STEPS, 0
            worth.on_steps += 1
            if worth.since_plain >= _CHECK_STEPS:
                worth.since_plain = 0
                self.measuring = True
                return 0
            if worth.on_steps % _CHECK_STEPS:
                return count
            self.measuring = True
            return min(count + max(1, count // 2), len(chances))
        worth.off_steps += 1
        if not likely or (worth.burst == 0 and worth.off_steps < worth.interval):
            return 0
        if worth.burst == 0:
            worth.interval, worth.burst = min(2 * worth.interval, _LAST_PROBE_STEPS), _BURST_STEPS
        worth.off_steps = 0
        worth.burst -= 1
        self.measuring = True
        return nearest

    def _of(self, bucket: int) -> Worth:
        known = self._batches.get(bucket)
        if known is None:
            known = self._batches[bucket] = Worth(self.chances, reach=[self.most_tokens] * _MATCH_KINDS)
        return known

    def _knows_drafts(self, bucket: int) -> bool:
        return any(self._costs.samples(bucket, _bin(n)) >= _MEASURED for n in range(1, _SHORT_TOKENS + 1))

    @staticmethod
    def _best(batch: int, seconds: list[float], chances: list[float]) -> tuple[int, int]:
        """The number of tokens of the highest speed, 0 unless it beats plain decode by 5 %; and the best above 0."""
        tokens, best, best_speed = float(batch), 1, 0.0
        for count, chance in enumerate(chances, 1):
            tokens += chance
            if tokens > best_speed * seconds[count]:
                best, best_speed = count, tokens / seconds[count]
        return (best if best_speed * seconds[0] > _GAIN * batch else 0), best


def _bin(tokens: int) -> int:
    """Numbers of similar cost: one by one to 8, then in steps of about an eighth."""
    if tokens <= 8:
        return tokens
    step = 1 << (tokens.bit_length() - 4)
    return tokens // step * step
