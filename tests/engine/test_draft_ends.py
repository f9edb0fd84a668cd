"""Everything a user sees of an answer is the same with drafts: text, ends, reasons, log-probabilities, choices.

Ends fall inside accepted runs here: end tokens, stop tokens, stop strings of several tokens, max_tokens, the end of
the context. Learned drafts are random over four tokens that many of the settings prefer, so some of what they draft is
accepted.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.engine.core import EngineCore
from octavo.engine.request import EngineRequest
from octavo.params import SamplingParams
from octavo.spec.checkpoint import random_draft, save_draft
from octavo.spec.draft_config import DFlashConfig, EagleConfig, LayerShape, default_eagle_taps
from tests.engine.test_core import prompts
from tests.tables import write_table
from tests.tiny import EOS, VOCAB, byte_tokenizer, config_of, engine

CONTEXT = 72
FEW = [*byte_tokenizer().encode("abc"), EOS]
LIKED: dict[int, float] = dict.fromkeys(FEW[:-1], 40.0)
LIKELY_END = {EOS: 12.0}
Call = tuple[list[int], SamplingParams]
Answer = tuple[list[int], str, str | None, object, object]  # ids, text, finish reason, stop reason, log-probabilities


def calls_without_stops() -> list[Call]:
    settings: list[dict[str, Any]] = [
        {"temperature": 0, "logprobs": 3},
        {"temperature": 0, "logit_bias": LIKED, "logprobs": 20, "presence_penalty": 0.5},
        {"temperature": 0.9, "seed": 4, "logit_bias": LIKED, "logprobs": 0, "n": 2},
        {"temperature": 1.0, "n": 2, "top_p": 0.9},  # a seed of its own, from the request's name
        {"temperature": 0, "ignore_eos": False, "logit_bias": LIKELY_END, "logprobs": 1},
        {"temperature": 0.8, "seed": 1, "ignore_eos": False, "logit_bias": LIKED | {EOS: 40.0}, "min_tokens": 9},
        {"temperature": 0, "max_tokens": None, "logit_bias": LIKED, "frequency_penalty": 0.1, "logprobs": 0},
        {"temperature": 0.7, "seed": 2, "max_tokens": None, "repetition_penalty": 1.1},
        {"temperature": 0, "max_tokens": 1},
        {"temperature": 0, "max_tokens": 2, "logit_bias": LIKED},
    ]
    given = prompts(len(settings), seed=6, low=4, high=30)
    given[0] = prompts(1, seed=2, low=CONTEXT - 5, high=CONTEXT - 5)[0]
    base = {"max_tokens": 24, "ignore_eos": True}
    return [(prompt, SamplingParams(**(base | more))) for prompt, more in zip(given, settings, strict=True)]


def answers(core: EngineCore, calls: list[Call]) -> list[list[Answer]]:
    """What every choice of every call got, each added as it came."""
    kept: dict[tuple[str, int], list[Any]] = {}
    for i, (tokens, params) in enumerate(calls):
        core.add_request(EngineRequest(f"r{i}", tokens, params))
        kept |= {(f"r{i}", choice): [[], "", None, None, []] for choice in range(params.n)}
    while core.has_work():
        for out in core.step():
            assert out.error is None, out.error
            one = kept[out.request_id, out.index]
            one[0] += out.token_ids
            one[1] += out.text
            one[2:4] = out.finish_reason, out.stop_reason
            one[4] += out.logprobs or []
    return [[tuple(kept[f"r{i}", choice]) for choice in range(p.n)] for i, (_, p) in enumerate(calls)]  # type: ignore[misc]


def plain(kind: str, calls: list[Call]) -> list[list[Answer]]:
    core = engine(kind, max_model_len=CONTEXT, prefix_cache=False)
    got = answers(core, calls)
    core.close()
    return got


def with_stops(calls: list[Call], got: list[list[Answer]]) -> list[Call]:
    """The calls, and some of them again with stops that are found in the middle of what they say."""
    more: list[Call] = []
    for i in (1, 2, 6, 7):
        (prompt, params), (ids, text, *_) = calls[i], got[i][0]
        middle = len(text) // 2
        for change in (
            {"stop": [text[middle : middle + 4]]},
            {"stop": [text[middle : middle + 2] + "zz", text[middle : middle + 3]], "include_stop_str_in_output": True},
            {"stop_token_ids": [ids[len(ids) // 2]]},
        ):
            more.append((prompt, params.with_changes(**change)))
    return calls + more


@pytest.fixture(scope="module")
def truth() -> dict[str, tuple[list[Call], list[list[Answer]]]]:
    made = {}
    for kind in ("llama", "gemma3"):
        calls = calls_without_stops()
        calls = with_stops(calls, plain(kind, calls))
        made[kind] = calls, plain(kind, calls)
    return made


def test_the_calls_end_in_every_way(truth: dict[str, tuple[list[Call], list[list[Answer]]]]) -> None:
    for calls, got in truth.values():
        ends = {(reason, type(stop)) for choices in got for _, _, reason, stop, _ in choices}
        assert ends == {("length", type(None)), ("stop", type(None)), ("stop", str), ("stop", int)}
        full = [len(p) + len(choices[0][0]) for (p, s), choices in zip(calls, got, strict=True) if s.max_tokens is None]
        assert CONTEXT in full
        for (_, params), choices in zip(calls, got, strict=True):
            assert all(len(c[4]) == (0 if params.logprobs is None else len(c[0])) for c in choices)  # type: ignore[arg-type]


def save_drafts(kind: str, folder: Path) -> None:
    target = config_of(kind)
    shape, layers = LayerShape.of(target), target.num_layers
    eagle = EagleConfig(shape, VOCAB, len(FEW), default_eagle_taps(layers))
    block = DFlashConfig(shape, VOCAB, len(FEW), 2, (1, 2), 7, VOCAB - 1, (None, 9), (False, True))
    for name, config in (("eagle3", eagle), ("dflash", block)):
        weights = replace(random_draft(config, seed=3), token_ids=torch.tensor(FEW))
        save_draft(folder / name, weights, dtype=torch.float32)


def way(name: str, calls: list[Call], got: list[list[Answer]], folder: Path) -> dict[str, Any]:
    if name in ("right", "sometimes", "comb"):
        ends = [EOS, EOS, 7, 7, 7, 7, 7, 7]  # an end token and more is drafted behind every answer
        known = [p + choices[0][0] + ends for (p, _), choices in zip(calls, got, strict=True)]
        counts = {"right": None, "sometimes": [2, 0, 1, 8], "comb": [3, 1]}[name]
        script = folder / f"{name}.json"
        script.write_text(json.dumps({"sequences": known, "accept_counts": counts}))
        shape = {"draft_steps": 3, "draft_topk": 3} if name == "comb" else {"draft_tokens": 9}
        return {"draft": "scripted", "draft_model": str(script), **shape}
    if name == "ngram":
        return {"draft": "ngram"}
    if name == "tree":
        shape = {"draft_steps": 3, "draft_topk": 3, "draft_tokens": 12}
        return {"draft": "eagle3", "draft_model": str(folder / "eagle3"), **shape}
    if name == "ngram+table":
        texts = [p + choices[0][0] for (p, _), choices in zip(calls, got, strict=True)]
        return {"draft": name, "draft_model": write_table(folder / "table", texts, VOCAB)}
    return {"draft": name, "draft_model": str(folder / name.removeprefix("ngram+"))}


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        "right", "sometimes", "comb", "ngram", "eagle3", "tree", "dflash", "ngram+eagle3", "ngram+dflash",
        "ngram+table",
    ],
)  # fmt: skip
def test_answers_with_drafts_are_the_answers_without(
    kind: str, overlap: bool, name: str, truth: dict[str, tuple[list[Call], list[list[Answer]]]], tmp_path: Path
) -> None:
    calls, expected = truth[kind]
    save_drafts(kind, tmp_path)
    core = engine(kind, page_size=16, overlap=overlap, max_model_len=CONTEXT, max_batched_tokens=300, max_running=6,
                  draft_adaptive=False, **way(name, calls, expected, tmp_path))  # fmt: skip
    for _ in range(2):  # cold and warm
        for call, got, same in zip(calls, answers(core, calls), expected, strict=True):
            assert got == same, call
    assert core.report()["speculation"]["accepted_tokens"] > 10
    core.close()
