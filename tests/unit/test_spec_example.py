"""The example drafter, as a user would load it: short, accepted where it is right, and without effect on the text."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import ClassVar

import pytest

from octavo.engine.request import EngineRequest
from octavo.errors import ConfigError
from octavo.params import SamplingParams
from octavo.spec.drafter import Draft, Drafter, DraftRequest, Observation, ProposeBatch
from tests.tiny import engine

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def answer(draft: str, prompt: list[int]) -> tuple[list[int], int]:
    """(tokens, accepted drafts) of one greedy request."""
    core = engine(draft=draft, draft_adaptive=False)
    three = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logit_bias={5: 90.0, 6: 90.0, 7: 90.0})
    core.add_request(EngineRequest("r", prompt, three))  # an answer of three different tokens repeats itself
    tokens: list[int] = []
    while core.has_work():
        for out in core.step():
            tokens.extend(out.token_ids)
    accepted = int(core.report()["speculation"]["accepted_tokens"])
    core.close()
    return tokens, accepted


class NoEnd(Drafter):
    """Three of the four methods."""

    def __init__(self, *, draft_tokens: int, vocab_size: int) -> None:
        pass

    def begin(self, request: DraftRequest) -> None: ...

    def propose(self, batch: ProposeBatch) -> Draft:
        raise NotImplementedError

    def observe(self, observation: Observation) -> None: ...


class OwnEnd(NoEnd):
    """All four, but none of the numbers that the books need."""

    def end(self, row: int) -> None: ...


class Odd(OwnEnd):
    """Numbers that do not fit each other: `max_depth` above `max_draft_tokens`, a footprint without the root, …"""

    name = "odd"
    needs_host_tokens = needs_draft_kv = False
    key_mode = "token"
    kv_layers = 0
    taps: tuple[int, ...] = ()
    changes: ClassVar[dict[str, object]] = {}

    def __init__(self, *, draft_tokens: int, vocab_size: int) -> None:
        self.max_draft_tokens = self.max_depth = draft_tokens
        self.footprint_tokens = self.commit_lag_tokens = draft_tokens + 1
        for name, value in self.changes.items():
            setattr(self, name, value)


class Fails(OwnEnd):
    """Made with a fault of its own."""

    def __init__(self, *, draft_tokens: int, vocab_size: int) -> None:
        raise ZeroDivisionError("a fault of its own")


def one_argument(vocab: int) -> None:
    """Not made the way drafters are."""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("NoEnd", "abstract method.*end"),
        ("OwnEnd", "it lacks name, max_draft_tokens, max_depth, footprint_tokens"),
        ("one_argument", "Class.draft_tokens=…, vocab_size=….*unexpected keyword"),
        ("Nobody", "cannot be imported.*Nobody"),
        ("Fails", "ZeroDivisionError: a fault of its own"),
    ],
)
def test_a_class_that_is_no_drafter_is_refused(name: str, words: str) -> None:
    """None of begin, propose, observe, end has a default that could be forgotten."""
    with pytest.raises(ConfigError, match=words) as caught:
        engine(draft=f"{__name__}:{name}")
    assert caught.value.option == "draft"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_draft_tokens", 0), ("max_draft_tokens", 64), ("max_draft_tokens", "4"), ("max_depth", 5),
        ("max_depth", 0), ("footprint_tokens", 4), ("footprint_tokens", None), ("commit_lag_tokens", 4),
        ("kv_layers", -1), ("key_mode", "pairs"), ("taps", (5,)), ("taps", [0]),
    ],
)  # fmt: skip
def test_numbers_that_would_break_the_books_are_refused(
    name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine(draft=f"{__name__}:Odd").close()
    monkeypatch.setattr(Odd, "changes", {name: value})
    with pytest.raises(ConfigError, match=rf"{name} of a drafter|{name}.*hidden states"):
        engine(draft=f"{__name__}:Odd")


def test_a_module_that_fails_while_it_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_drafter.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="cannot be imported: ZeroDivisionError"):
        engine(draft="broken_drafter:Any")


def test_the_example_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    source = (EXAMPLES / "drafter.py").read_text()
    assert len(source.splitlines()) <= 80
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from drafter import Bigram  # type: ignore[import-not-found]

    assert isinstance(Bigram(draft_tokens=3, vocab_size=10), Drafter)
    prompt = [5, 6, 7, 8] * 6
    plain, none = answer("none", prompt)
    drafted, accepted = answer("drafter:Bigram", prompt)
    assert drafted == plain and none == 0 < accepted
    sys.modules.pop("drafter", None)
