"""The example drafter, as a user would load it: short, accepted where it is right, and without effect on the text."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

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


def chain(tokens: list[int], lengths: object = None, **more: object) -> Draft:
    return Draft(torch.tensor([tokens]), more.get("parents"), more.get("depths"),  # type: ignore[arg-type]
                 (len(tokens),) if lengths is None else lengths)  # type: ignore[arg-type]


def tree(parents: list[int], depths: list[int]) -> Draft:
    return chain([1] * len(parents), parents=torch.tensor([parents]), depths=torch.tensor([depths]))


def raises() -> Draft:
    raise ZeroDivisionError("in propose")


PROPOSALS: dict[str, tuple[Callable[[], object], str]] = {
    "nothing": (lambda: None, "propose returned NoneType"),
    "error": (raises, "ZeroDivisionError: in propose"),
    "list": (lambda: Draft([[1]], None, None, (1,)), "tokens of a draft for 1 rows are int64"),  # type: ignore[arg-type]
    "float": (lambda: Draft(torch.ones(1, 2), None, None, (2,)), "float32"),
    "rows": (lambda: Draft(torch.ones(2, 2, dtype=torch.int64), None, None, (2, 2)), "for 1 rows"),
    "length": (lambda: chain([1, 2], (3,)), "drafts 3 tokens, allowed: 0 to 2"),
    "negative length": (lambda: chain([1, 2], (-1,)), "drafts -1 tokens"),
    "no length": (lambda: chain([1, 2], ()), "1 whole numbers"),
    "too long": (lambda: chain([1] * 20), "drafts 20 tokens, allowed: 0 to 4"),
    "token": (lambda: chain([1, 10**9]), "drafts token 1000000000"),
    "negative token": (lambda: chain([-1]), "drafts token -1"),
    "no depths": (lambda: chain([1], parents=torch.zeros(1, 1, dtype=torch.int64)), "depths of a draft"),
    "own parent": (lambda: tree([0, 2], [1, 2]), "parent of column 1 is node 2"),
    "depth": (lambda: tree([0, 1], [1, 1]), "depth of column 1 is 1, behind its parent it is 2"),
}


class Faulty(Odd):
    """Proposes what it is told to; `observe` and `end` are of no interest."""

    said = "nothing"

    def propose(self, batch: ProposeBatch) -> Draft:
        return PROPOSALS[self.said][0]()  # type: ignore[return-value]


class Stumbles(Odd):
    """Falls over while it looks at what the target has computed."""

    def observe(self, observation: Observation) -> None:
        raise KeyError("row")


class Scribbles(Odd):
    """Counts on in the tensors it was given."""

    def propose(self, batch: ProposeBatch) -> Draft:
        for given in (batch.rows, batch.seq_lens, batch.last_tokens):
            given += 1
        return chain([3], (1,))


def test_a_drafter_that_writes_into_its_batch_changes_nothing() -> None:
    assert answer(f"{__name__}:Scribbles", [3, 1, 4])[0] == answer("none", [3, 1, 4])[0]


@pytest.mark.parametrize("said", PROPOSALS)
def test_a_faulty_proposal_ends_the_drafts_and_not_the_request(
    said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Faulty, "said", said)
    assert answer(f"{__name__}:Faulty", [3, 1, 4]) == (answer("none", [3, 1, 4])[0], 0)
    told = [record.getMessage() for record in caplog.records if record.name == "octavo.spec"]
    assert len(told) == 1 and f"{__name__}:Faulty" in told[0] and PROPOSALS[said][1] in told[0], told


def test_a_drafter_that_fails_elsewhere_is_left_alone_too(caplog: pytest.LogCaptureFixture) -> None:
    assert answer(f"{__name__}:Stumbles", [3, 1, 4])[0] == answer("none", [3, 1, 4])[0]
    assert "KeyError: 'row'; from now on nothing is drafted" in caplog.text


@pytest.mark.parametrize(("option", "value"), [("draft_topk", 4), ("draft_steps", 3)])
@pytest.mark.parametrize("draft", ["ngram", "auto", "drafter:Bigram"])
def test_tree_options_that_nobody_heeds_are_refused(
    draft: str, option: str, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    given: dict[str, Any] = {option: value}
    with pytest.raises(ConfigError, match="only with --draft eagle3") as caught:
        engine(draft=draft, **given)
    assert caught.value.option == option
