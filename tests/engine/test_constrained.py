"""Constrained answers with drafts: the same tokens, ends and text, whatever was drafted, right or wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.api.tools import call_grammar
from octavo.engine.request import EngineRequest
from octavo.params import SamplingParams
from tests.tiny import EOS, byte_tokenizer, engine

TOKENIZER = byte_tokenizer()
PROMPT = TOKENIZER.encode("Answer: ")
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 22]}, "b": {"enum": ["x", "xyz"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
KINDS: dict[str, dict[str, Any]] = {
    "regex": {"regex": "(yes|no){1,3}[.!]"},
    "open regex": {"regex": "[a-c]{2,9}"},  # complete from the second character on, certain only at the ninth
    "schema": {"json_schema": SCHEMA},
    "lark": {"grammar": 'start: "<" WORD ("," WORD)* ">"\nWORD: /[a-d]{1,2}/'},
    "forced call": {"grammar": call_grammar("hermes", [TOOL], name="look")},
    "any call": {"grammar": call_grammar("llama3", [TOOL], name=None)},
}
BIAS = {TOKENIZER.encode(c)[0]: 9.0 for c in "}>.!\""}  # a random model would write white space and commas for ever


def params_of(kind: str, **more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 150, "logit_bias": BIAS, **KINDS[kind], **more})


Answer = tuple[list[int], str, str | None, Any, int]


def answer(params: SamplingParams, **options: Any) -> tuple[Answer, int]:
    """(token ids, text, finish reason, stop reason, entries of log-probabilities), and drafted tokens accepted."""
    core = engine(page_size=16, max_model_len=256, draft_adaptive=False, **options)
    core.add_request(EngineRequest("r", PROMPT, params))
    ids: list[int] = []
    text, entries = "", 0
    while core.has_work():
        for out in core.step():
            assert out.error is None, out.error
            ids += out.token_ids
            text += out.text
            entries += len(out.logprobs or ())
    accepted = core.report()["speculation"]["accepted_tokens"]
    core.close()
    return (ids, text, out.finish_reason, out.stop_reason, entries), accepted


def script(folder: Path, sequence: list[int], counts: list[int] | None) -> str:
    path = folder / f"{len(sequence)}-{counts}.json"
    path.write_text(json.dumps({"sequences": [sequence], "accept_counts": counts, "wrong_token": 9}))
    return str(path)


def ways(folder: Path, ids: list[int]) -> dict[str, dict[str, Any]]:
    """Drafters that know the answer, and that an end token and more follow it: right, wrong, long, short, trees."""
    known = PROMPT + [t for t in ids if t != EOS] + [EOS] * 3 + [7] * 8
    made: dict[str, dict[str, Any]] = {"ngram": {"draft": "ngram"}}
    for length in (1, 2, 5, 30):
        made[f"right {length}"] = {"draft_tokens": length + 1, "draft_model": script(folder, known, None)}
    for counts in ([0], [1, 0, 3, 2]):
        made[f"wrong {counts}"] = {"draft_tokens": 5, "draft_model": script(folder, known, counts)}
    made["tree"] = {"draft_steps": 4, "draft_topk": 3, "draft_model": script(folder, known, [4, 2, 0, 3])}
    made["overlap"] = {"draft_tokens": 4, "draft_model": script(folder, known, [4, 2]), "overlap": True}
    return {name: {"draft": "scripted", "overlap": False, **options} for name, options in made.items()}


FEW = ("right 2", "right 30", "tree")


@pytest.mark.parametrize("kind", list(KINDS))
def test_an_answer_and_its_end_do_not_depend_on_drafts(kind: str, tmp_path: Path) -> None:
    params = params_of(kind, logprobs=0)
    plain, _ = answer(params, overlap=False)
    ids, _, reason, _, entries = plain
    assert reason == "stop" and len(ids) == entries
    accepted = 0
    for name, options in ways(tmp_path, ids).items():
        got, taken = answer(params, **options)
        assert got == plain, name
        accepted += taken
    assert accepted > 2 * len(ids), "drafts were accepted"


@pytest.mark.parametrize("kind", ["regex", "schema", "forced call"])
def test_a_complete_answer_has_no_end_token_behind_it(kind: str) -> None:
    (ids, text, reason, _, _), _ = answer(params_of(kind))
    assert EOS not in ids and TOKENIZER.decode(ids) == text and reason == "stop"


@pytest.mark.parametrize("kind", ["regex", "open regex", "schema"])
def test_limits_at_the_end_of_an_answer(kind: str, tmp_path: Path) -> None:
    ids = answer(params_of(kind))[0][0]
    for limit in range(len(ids) - 2, len(ids) + 2):
        params = params_of(kind, max_tokens=limit)
        plain, _ = answer(params, overlap=False)
        whole = limit >= len(ids)
        assert plain[0] == ids[:limit] and plain[2] == ("stop" if whole else "length"), limit
        made = ways(tmp_path, ids)
        for name in FEW:
            assert answer(params, **made[name])[0] == plain, (limit, name)


@pytest.mark.parametrize("kind", ["regex", "schema", "forced call"])
def test_stop_strings_inside_and_at_the_end(kind: str, tmp_path: Path) -> None:
    ids, text, *_ = answer(params_of(kind))[0]
    for stop in (text[2:4], text[-2:], text[-1:]):
        params = params_of(kind, stop=[stop])
        plain, _ = answer(params, overlap=False)
        assert plain[1:4] == (text[: text.index(stop)], "stop", stop)
        made = ways(tmp_path, ids)
        for name in FEW:
            assert answer(params, **made[name])[0] == plain, (stop, name)
