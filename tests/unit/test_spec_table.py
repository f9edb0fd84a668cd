"""Tables of phrases: counting, back-off, where a draft ends, files good and bad, and which draft `auto` takes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo.errors import ConfigError, ModelError, ModelNotFound
from octavo.ops.meta import KVView
from octavo.spec.columns import ColumnChooser, Worth
from octavo.spec.drafter import Drafter, DraftRequest, ProposeBatch
from octavo.spec.lookup_first import LookupFirstDrafter
from octavo.spec.ngram import NgramDrafter
from octavo.spec.table import NgramTable, Phrases, TableDrafter, read_table
from octavo.spec.tensor_file import read_tensors, write_tensors
from octavo.train.corpus import Sample
from octavo.train.options import TrainOptions
from octavo.train.table import accept_length, count_phrases
from tests.tables import write_table

KV = KVView(None, None, torch.zeros(8, 1, dtype=torch.int32), None, 16)
VOCAB = 50


def counted(texts: list[list[int]], *, order: int = 3, min_count: int = 1, least: float = 0.0) -> Phrases:
    return count_phrases(texts, order=order, min_count=min_count, vocab_size=VOCAB, min_probability=least)


def lines(phrases: Phrases) -> dict[tuple[int, ...], tuple[int, int, int]]:
    rows = zip(phrases.contexts.tolist(), phrases.next.tolist(), phrases.counts.tolist(), strict=True)
    return {tuple(t for t in context if t >= 0): (token, *counts) for context, token, counts in rows}


def test_phrases_are_counted_at_every_length() -> None:
    assert lines(counted([[1, 2, 3], [1, 2, 4], [1, 2, 4]])) == {
        (1,): (2, 3, 3), (2,): (4, 2, 3), (1, 2): (4, 2, 3)
    }  # fmt: skip
    assert lines(counted([[1, 2, 3], [1, 2, 4], [1, 2, 4]], min_count=3)) == {(1,): (2, 3, 3)}
    assert lines(counted([[7, 9], [7, 8]])) == {(7,): (8, 1, 2)}, "a tie goes to the lowest id"
    assert max(map(len, lines(counted([list(range(9))], order=2)))) == 2
    with pytest.raises(ConfigError, match="min_count"):
        counted([[1, 2, 3]], min_count=2)


def test_a_draft_takes_the_longest_context_that_is_known() -> None:
    table = NgramTable(counted([[1, 2, 3, 4], [9, 3, 5], [9, 3, 5], [8, 0]]))
    assert table.draft([1, 2, 3], 1).tokens == [4]  # three tokens say 4, the last one alone says 5
    assert table.draft([7, 7, 3], 1).tokens == [5]
    assert table.draft([7, 8], 3).tokens == [0], "nothing follows 0"
    assert table.draft([7], 3).tokens == [] and table.draft([], 3).tokens == []
    assert [table.draft([1], limit).tokens for limit in (9, 2, 0)] == [[2, 3, 4], [2, 3], []]


def test_a_draft_ends_where_it_becomes_unlikely() -> None:
    texts = [[1, 2, 3, 4, 5]] * 9
    assert NgramTable(counted(texts, least=0.8)).draft([1], 9).tokens == [2, 3]  # 0.9, 0.81, 0.73
    assert NgramTable(counted(texts, least=0.0)).draft([1], 9).tokens == [2, 3, 4, 5]
    assert NgramTable(counted(texts, least=1.0)).draft([1], 9).tokens == []


def test_it_walks_as_far_as_what_was_learned_says() -> None:
    """What followed in half of the places, but has been right every time lately, is drafted on."""
    texts = [[1, 2, 3, 4, 5]] * 9 + [[1, 7], [2, 7], [3, 7], [4, 7]] * 9
    table = NgramTable(count_phrases(texts, order=1, min_count=1, vocab_size=VOCAB, min_probability=0.0))
    chances = list(ColumnChooser(5).chances)
    assert table.draft([1], 4, Worth(chances, floor=0.4)).tokens == [2]
    assert table.draft([1], 4, Worth([1.0] * len(chances), floor=0.4)).tokens == [2, 3, 4, 5]


def test_large_vocabularies_do_not_mix_contexts_up() -> None:
    size = 1 << 21
    texts = [[size - 1, size - 2, size - 1, 5], [size - 1, size - 1, size - 2, 6], [0, size - 1, 7], [0, 0, 0, 8]]
    table = NgramTable(count_phrases(texts, order=3, min_count=1, vocab_size=size, min_probability=0.0))
    assert [table.draft(text[:-1], 1).tokens for text in texts] == [[5], [6], [7], [8]]


def test_the_drafter_follows_rows_and_limits() -> None:
    drafter = TableDrafter(NgramTable(counted([[1, 2, 3, 4, 5]])), draft_tokens=4)
    assert isinstance(drafter, Drafter)
    rows, texts = (3, 5, 6), ([9, 1], [1, 2], [9])
    drafter.begin(DraftRequest(3, (9,), 8, 0))

    def batch(tokens: int, host: tuple[list[int], ...] | None) -> ProposeBatch:
        return ProposeBatch(torch.tensor(rows), rows, torch.tensor([1, 1, 0]), torch.tensor([1, 2, 9]), tokens,
                            (9, 2, 9), host, KV, 64)  # fmt: skip

    draft = drafter.propose(batch(3, texts))
    assert draft.lengths == (3, 2, 0) and draft.parents is None
    assert [line[:n] for line, n in zip(draft.tokens.tolist(), draft.lengths, strict=True)] == [[2, 3, 4], [3, 4], []]
    assert drafter.propose(batch(0, texts)).lengths == (0, 0, 0)
    with pytest.raises(ValueError, match="host"):
        drafter.propose(batch(3, None))
    drafter.end(3)
    with pytest.raises(ConfigError, match="draft_tokens"):
        TableDrafter(drafter.table, draft_tokens=0)


def test_behind_prompt_lookup_it_has_no_draft_kv() -> None:
    table = TableDrafter(NgramTable(counted([[1, 2, 3]])), draft_tokens=5)
    both = LookupFirstDrafter(NgramDrafter(draft_tokens=5), table)
    assert both.name == "ngram+table" and not both.needs_draft_kv and both.kv_layers == 0
    both.begin(DraftRequest(0, (1,), 9, 0))
    given = ([4, 5, 6, 4, 5, 1],), ([4, 5, 6, 4, 5, 1, 4, 5],)
    drafts = [
        both.propose(ProposeBatch(torch.tensor([0]), (0,), torch.tensor([len(texts[0]) - 1]),
                                  torch.tensor([texts[0][-1]]), 5, (2,), texts, KV, 64))
        for texts in given
    ]  # fmt: skip
    assert drafts[0].tokens.tolist() == [[2, 3]], "1 was never said before: the table"
    assert drafts[1].tokens.tolist() == [[1, 4]], "4 5 was: the text itself"


def test_how_far_it_walks_through_answers() -> None:
    table = NgramTable(counted([[1, 2, 3, 4]]))
    assert accept_length(table, [Sample((9, 1, 2, 3, 4), 1, 2)], 5) == 3.0
    assert accept_length(table, [Sample((9, 1, 2, 3, 8, 8), 1, 2)], 5) == 2.0
    assert accept_length(table, [Sample((9, 9, 9), 1, 1)], 5) == 1.0


def test_a_file_holds_what_was_written(tmp_path: Path) -> None:
    texts = [[1, 2, 3, 4], [4, 3, 2, 1]]
    write_table(tmp_path, texts, VOCAB, 0.25)
    read = read_table(tmp_path, VOCAB)
    assert lines(read) == lines(counted(texts)) and read.min_probability == 0.25


def tensors(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        found = dict(read_tensors(folder)[0])
        change(found)
        write_tensors(folder / "model.safetensors", found, {})

    return spoil


def config(**changes: Any) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return spoil


def at(name: str, index: tuple[int, ...], value: int) -> Callable[[Path], None]:
    def change(found: dict[str, torch.Tensor]) -> None:
        found[name] = found[name].clone()
        found[name][index] = value

    return tensors(change)


def swapped(name: str, tensor: torch.Tensor) -> Callable[[Path], None]:
    return tensors(lambda found: found.update({name: tensor}))


BAD: list[tuple[Callable[[Path], None], str]] = [
    (config(architectures=["LlamaForCausalLMEagle3"]), "not a table"),
    (config(architectures=None), "not an EAGLE-3 or DFlash draft, nor a table"),
    (config(octavo_format=9), "format 9"),
    (config(vocab_size=VOCAB + 1), "51 tokens, the target's 50"),
    (config(vocab_size="50"), "vocab_size is '50'"),
    (config(vocab_size=True), "vocab_size is True"),
    (config(min_probability=1.5), "min_probability 1.5"),
    (config(min_probability=float("nan")), "min_probability is nan"),
    (config(min_probability="much"), "min_probability is 'much'"),
    (config(min_probability=None), "min_probability -1.0: 0 to 1"),
    (config(min_probability=10**400), "min_probability is 1000.*a finite number"),
    (config(octavo_format=True), "octavo_format is True"),
    (config(target_sha256=5), "target_sha256 is 5"),
    (config(target_sha256="ab" * 32), "is for the target with SHA-256 abab"),
    (tensors(lambda found: found.pop("next")), "missing"),
    (swapped("next", torch.zeros(3)), "int32 expected"),
    (swapped("next", torch.zeros(3, dtype=torch.int32)), "one line for each"),
    (swapped("contexts", torch.zeros(3, dtype=torch.int32)), "n rows"),
    (swapped("contexts", torch.zeros(6, 4, dtype=torch.int32)), "n rows"),
    (at("contexts", (0, 2), VOCAB), "contexts: token ids below 50"),
    (at("contexts", (0, 2), -1), "-1 only in front"),
    (at("contexts", (0, 0), -2), "contexts: token ids below 50"),
    (at("contexts", (0, 0), 3), "-1 only in front"),
    (at("next", (0,), VOCAB), "next: token ids below 50"),
    (at("next", (0,), -1), "next: token ids below 50"),
    (at("counts", (0, 0), 0), "counts"),
    (at("counts", (0, 0), 99), "counts"),
    (lambda folder: (folder / "model.safetensors").write_bytes(b"12345678901"), "corrupt"),
    (lambda folder: (folder / "config.json").write_text("{"), "not JSON"),
]  # fmt: skip


@pytest.mark.parametrize(("spoil", "message"), BAD, ids=[message for _, message in BAD])
def test_a_bad_table_is_named(spoil: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    write_table(tmp_path, [[1, 2, 3, 4]], VOCAB)
    assert len(read_table(tmp_path, VOCAB, "cd" * 32).next) == 6
    spoil(tmp_path)
    with pytest.raises(ModelError, match=message) as error:
        read_table(tmp_path, VOCAB, "cd" * 32)
    assert str(tmp_path) in str(error.value)


def test_no_table_is_no_table(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        read_table(tmp_path / "none", VOCAB)
    with pytest.raises(ModelError, match=r"vocab_size"):
        Phrases(np.zeros((1, 1), np.int32), np.zeros(1, np.int32), np.ones((1, 2), np.int32), 1 << 22, 0.5)


@pytest.mark.parametrize(
    ("option", "value"), [("order", 0), ("order", 4), ("min_count", 0), ("min_probability", 1.1), ("algorithm", "x")]
)
def test_bad_options_are_named(option: str, value: object, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=option):
        TrainOptions(**{"algorithm": "table", "out": tmp_path, option: value})  # type: ignore[arg-type]
