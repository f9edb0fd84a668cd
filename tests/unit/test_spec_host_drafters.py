"""Scripted and n-gram drafters, and the host statistics of a decode step."""

from __future__ import annotations

import json
import random
import time

import numpy as np
import pytest
import torch

from octavo.errors import ConfigError, LawViolation
from octavo.ops.meta import KVView
from octavo.spec.drafter import Drafter, DraftRequest, ProposeBatch
from octavo.spec.ngram import NgramDrafter, SuffixAutomaton
from octavo.spec.prepare import prepare_dflash, prepare_eagle
from octavo.spec.scripted import Script, ScriptedDrafter
from octavo.spec.verify import accept

KV = KVView(None, None, torch.zeros(8, 1, dtype=torch.int32), None, 16)


def batch(rows: tuple[int, ...], seqs: list[list[int]], draft_tokens: int, limits: tuple[int, ...]) -> ProposeBatch:
    return ProposeBatch(
        torch.tensor(rows),
        rows,
        torch.tensor([len(s) - 1 for s in seqs]),
        torch.tensor([s[-1] for s in seqs]),
        draft_tokens,
        limits,
        tuple(seqs),
        KV,
        64,
    )


def begin(drafter: Drafter, row: int, prompt: list[int]) -> None:
    drafter.begin(DraftRequest(row, tuple(prompt), 64, 0))


# -- scripted --------------------------------------------------------------------------------------------------------


def scripted(script: Script, draft_tokens: int, width: int = 1) -> ScriptedDrafter:
    return ScriptedDrafter(
        script, draft_tokens=draft_tokens, vocab_size=50, max_rows=8, max_tokens=64, width=width
    )


def test_scripted_follows_counts_position_by_position() -> None:
    truth = list(range(10, 40))
    drafter = scripted(Script((tuple(truth),), (0, 2, 4)), 4)
    assert isinstance(drafter, Drafter)
    begin(drafter, 3, truth[:5])
    known = 6
    for expected in (0, 2, 4, 0):
        draft = drafter.propose(batch((3,), [truth[:known]], 4, (4,)))
        right = [a == b for a, b in zip(draft.tokens[0].tolist(), truth[known:], strict=False)]
        assert right == [True] * expected + [False] * (4 - expected)
        known += expected + 1


def test_scripted_forgets_the_former_owner_of_a_row() -> None:
    drafter = scripted(Script((tuple(range(20)),)), 2)
    begin(drafter, 0, [0, 1])
    assert drafter.propose(batch((0,), [[0, 1, 2]], 2, (2,))).tokens.tolist() == [[3, 4]]
    drafter.end(0)
    begin(drafter, 0, [7, 7])
    assert drafter.propose(batch((0,), [[7, 7, 7]], 2, (2,))).tokens.tolist() == [[0, 0]]


def test_scripted_respects_limits_and_draft_length() -> None:
    drafter = scripted(Script(), 4)
    begin(drafter, 0, [1])
    begin(drafter, 1, [1])
    draft = drafter.propose(batch((0, 1), [[1, 2], [1, 2]], 3, (1, 9)))
    assert draft.lengths == (1, 3) and draft.tokens.shape == (2, 3)
    assert drafter.propose(batch((0, 1), [[1, 2], [1, 2]], 0, (1, 9))).lengths == (0, 0)


@pytest.mark.parametrize("accepted", [0, 1, 3, 4])
def test_a_scripted_comb_accepts_what_it_is_told_to(accepted: int) -> None:
    truth = list(range(10, 40))
    drafter = scripted(Script((tuple(truth),), (accepted,)), 4, width=3)
    begin(drafter, 0, truth[:4])
    known = truth[:7]
    draft = drafter.propose(batch((0,), [known], 4, (4,)))
    assert draft.parents is not None and draft.depths is not None
    assert draft.lengths == (12,) and drafter.footprint_tokens == 13 and drafter.commit_lag_tokens == 5
    sampled = torch.tensor([[truth[6 + 1 + d] for d in [0, *draft.depths[0].tolist()]]])
    nodes, counts, out = accept(draft.tokens, draft.parents, draft.lengths, sampled, drafter.max_depth)
    assert counts.tolist() == [accepted]
    assert out[0, : accepted + 1].tolist() == truth[7 : 8 + accepted]
    siblings: dict[int, list[int]] = {}
    for parent, token in zip(draft.parents[0].tolist(), draft.tokens[0].tolist(), strict=True):
        siblings.setdefault(parent, []).append(token)
    assert all(len(set(words)) == len(words) for words in siblings.values())


def test_a_script_file(tmp_path: object) -> None:
    from pathlib import Path

    path = Path(str(tmp_path)) / "script.json"
    path.write_text('{"sequences": [[1, 2, 3]], "accept_counts": [1]}')
    assert Script.from_file(path) == Script(((1, 2, 3),), (1,))
    wrong = (
        {"accept_counts": [-3]}, {"accept_counts": [1.5]}, {"accept_counts": ["1"]}, {"accept_counts": 3},
        {"accept_counts": [10**30]}, {"sequences": [[1, -7]]}, {"sequences": [[True]]}, {"sequences": {"a": [1]}},
        {"sequences": "abc"}, {"sequences": [3]}, {"wrong_token": None}, {"wrong_token": 1e999}, {"seqences": []},
    )  # fmt: skip
    for text in ("[1]", "[" * 100_000, "3", *map(json.dumps, wrong)):
        path.write_text(text)
        with pytest.raises(ConfigError, match="draft_model"):
            Script.from_file(path)


@pytest.mark.parametrize(
    "script", [Script(((1, 20),)), Script(wrong_token=20), Script(wrong_token=-1), Script(accept_counts=())], ids=str
)
def test_a_script_that_cannot_be_followed_is_refused(script: Script) -> None:
    """A token outside the vocabulary would end the engine at the verify; no count is no count."""
    with pytest.raises(ConfigError, match="draft_model"):
        ScriptedDrafter(script, draft_tokens=2, vocab_size=20, max_rows=1, max_tokens=8)


# -- n-gram ----------------------------------------------------------------------------------------------------------


def longest_suffix(text: list[int]) -> int:
    """Length of the longest proper suffix that occurs earlier, by trying them all."""
    n = len(text)
    for length in range(n - 1, 0, -1):
        suffix = text[n - length :]
        if any(text[i : i + length] == suffix for i in range(n - length)):
            return length
    return 0


@pytest.mark.parametrize("seed", range(12))
def test_the_automaton_finds_the_longest_suffix(seed: int) -> None:
    rng = random.Random(seed)
    automaton = SuffixAutomaton()
    text: list[int] = []
    for _ in range(80):
        text.append(rng.randint(0, 1 + seed % 4))
        automaton.extend(text[-1:])
        length = longest_suffix(text)
        assert automaton.match_len == length
        if length:
            end = automaton.match_end
            assert end < len(text) - 1
            assert text[end + 1 - length : end + 1] == text[-length:]


def test_ngram_drafts_what_followed_and_nothing_without_a_match() -> None:
    drafter = NgramDrafter(draft_tokens=4)
    assert isinstance(drafter, Drafter) and drafter.needs_host_tokens
    for row in (0, 1, 2):
        begin(drafter, row, [])
    texts = [[1, 2, 3, 4, 9, 7, 2, 3, 4, 8, 1, 2, 3, 4], [1, 2, 3, 4], [5, 6, 5, 6, 5]]
    draft = drafter.propose(batch((0, 1, 2), texts, 4, (4, 4, 3)))
    assert draft.lengths == (4, 0, 3)
    assert draft.tokens[0].tolist() == [9, 7, 2, 3]  # the longer match wins over the later one
    assert draft.tokens[2, :3].tolist() == [6, 5, 6]  # a loop goes on
    again = drafter.propose(batch((1,), [[1, 2, 3, 4, 1, 2]], 2, (2,)))
    assert again.tokens.tolist() == [[3, 4]]
    drafter.end(1)
    begin(drafter, 1, [])
    assert drafter.propose(batch((1,), [[1, 2, 7]], 2, (2,))).lengths == (0,)


def test_ngram_corpus_helps_a_row_that_has_said_nothing_yet() -> None:
    drafter = NgramDrafter(draft_tokens=3, corpus=[[1, 2, 3, 4, 5], [4, 5, 9]])
    begin(drafter, 0, [])
    assert drafter.lookup(0, [8, 2, 3], 3).tokens == [4, 5]  # never across two texts
    assert drafter.lookup(0, [8, 2, 3, 8, 2], 3).tokens == [3, 8, 2]


def test_ngram_cost_does_not_grow_with_the_text() -> None:
    def seconds(length: int, fresh: int) -> float:
        rng = random.Random(1)
        text = [rng.randint(0, 999) for _ in range(length)]
        drafter = NgramDrafter(draft_tokens=4)
        begin(drafter, 0, text)
        drafter.lookup(0, text, 4)
        start = time.thread_time()
        for _ in range(fresh):
            text.append(rng.randint(0, 999))
            drafter.lookup(0, text, 4)
        return time.thread_time() - start

    # processor time, the least of a few: a machine that stands still or is shared does not count
    long, short = (min(seconds(length, 400) for _ in range(5)) for length in (40_000, 1_000))
    assert long < 20 * short + 0.05
    repeated = [3] * 20_000
    drafter = NgramDrafter(draft_tokens=4)
    begin(drafter, 0, [])
    assert drafter.lookup(0, repeated, 4).tokens == [3, 3, 3, 3]


@pytest.mark.parametrize("bad", [0, -1, 64])
def test_ngram_bad_lengths(bad: int) -> None:
    with pytest.raises(ConfigError, match="draft_tokens"):
        NgramDrafter(draft_tokens=bad)


# -- prepare_for_decode ----------------------------------------------------------------------------------------------


def test_eagle_decode_index_and_row_width() -> None:
    prep = prepare_eagle([2, 5], [7, 30], [16, 48], draft_tokens=4, width_tokens=64)
    assert prep.decode_index.tolist() == [[135, 136, 137, 138], [350, 351, 352, 353]]
    assert prep.max_allocated_tokens == 48
    with pytest.raises(LawViolation, match="law 10 row 5"):
        prepare_eagle([2, 5], [7, 30], [16, 80], draft_tokens=4, width_tokens=64)
    with pytest.raises(LawViolation, match="law 9 row 2"):
        prepare_eagle([2, 5], [13, 30], [16, 48], draft_tokens=4, width_tokens=64)


def test_dflash_statistics() -> None:
    prep = prepare_dflash([5, 5], [100, 30], block_size=8, vocab_size=1000)
    assert (prep.max_top_k, prep.uniform_top_k, prep.committed_sum, prep.next_sum) == (5, 5, 130, 146)
    assert prepare_dflash([5, 0], [1, 1], block_size=8, vocab_size=1000).max_top_k == 1000
    with pytest.raises(ValueError, match="one value per row"):
        prepare_dflash([5, 5, 5], [1], block_size=8, vocab_size=10)
    with pytest.raises(ValueError, match="one value per row"):
        prepare_eagle([0, 1], [1], [16], draft_tokens=2, width_tokens=32)
    assert prepare_dflash([5, 0], [1, 1], block_size=8, vocab_size=1000).uniform_top_k is None
    assert prepare_dflash([-1, 0], [1, 1], block_size=8, vocab_size=1000).uniform_top_k == 1000
    assert prepare_dflash(np.array([], dtype=np.int64), [], block_size=8, vocab_size=9).uniform_top_k is None
    for size in (0, -3):
        with pytest.raises(ValueError, match=str(size)):
            prepare_dflash([1], [1], block_size=size, vocab_size=10)
