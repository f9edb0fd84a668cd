"""Accepted runs: the earliest end wins and the rest is discarded."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.backend.results import HostLogprobs
from octavo.engine.output import OutputProcessor, RequestOutput, RequestOutputState, TokenLogprob
from octavo.params import SamplingParams
from tests.unit.tokenizer_zoo import byte_level

TOKENIZER = byte_level()
EOS = min(TOKENIZER.eos_ids)
PROCESSOR = OutputProcessor(TOKENIZER, TOKENIZER.eos_ids)


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text)


def start(max_tokens: int = 100, **params) -> RequestOutputState:
    return PROCESSOR.start(SamplingParams(**params), max_tokens=max_tokens, prompt_token_ids=ids("say:"))


def test_eos_inside_a_run() -> None:
    run = [*ids("The fox"), EOS, *ids(" never")]
    state = start(logprobs=0)
    logprobs = [TokenLogprob(token, -1.0) for token in run]
    delta = state.append(run, logprobs)
    kept = run.index(EOS) + 1
    assert delta.text == state.output.text == "The fox"
    assert (delta.finished, delta.finish_reason, delta.stop_reason) == (True, "stop", None)
    assert delta.kept_tokens == kept == len(delta.token_ids) == len(delta.logprobs) == len(state.output.logprobs)
    assert state.output.token_ids == run[:kept]


def test_nothing_is_kept_after_the_end() -> None:
    state = start()
    state.append([EOS])
    delta = state.append(ids("The ignored step"))
    assert (delta.kept_tokens, delta.text, delta.token_ids, delta.finished) == (0, "", (), True)
    assert state.finish("abort").finish_reason == "stop"


def test_ignore_eos_and_stop_token_ids() -> None:
    dot = ids(".")[0]
    state = start(ignore_eos=True, stop_token_ids=[dot])
    delta = state.append([*ids("fox"), EOS, *ids("dog"), dot, *ids("cat")])
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("foxdog", "stop", dot)
    shown = start(stop_token_ids=[dot], include_stop_str_in_output=True)
    assert shown.append([*ids("fox"), dot]).text == "fox."


def test_max_tokens_inside_a_run_and_a_stop_on_the_last_token() -> None:
    run = ids("The quick brown fox")
    state = start(max_tokens=2)
    delta = state.append(run)
    assert (delta.kept_tokens, delta.finish_reason, delta.token_ids) == (2, "length", tuple(run[:2]))
    assert delta.text == TOKENIZER.decode(run[:2])
    both = start(max_tokens=len(run), stop="fox")
    assert both.append(run).finish_reason == "stop"


def test_max_tokens_zero_ends_at_once() -> None:
    state = start(max_tokens=0)
    delta = state.finish("length")
    assert (delta.text, delta.token_ids, delta.finish_reason) == ("", (), "length")


def test_stop_string_over_token_borders_is_cut_and_kept_in_the_ids() -> None:
    run = ids("The quick STOP ### more")
    state = start(stop=["P #", "zzz"])
    delta = state.append(run)
    assert (delta.text, delta.stop_reason) == ("The quick STO", "P #")
    assert "P #" in TOKENIZER.decode(state.output.token_ids)
    assert "P #" not in TOKENIZER.decode(state.output.token_ids[:-1])
    included = start(stop="P #", include_stop_str_in_output=True)
    assert included.append(run).text == "The quick STOP #"


def test_a_partial_stop_is_shown_when_the_answer_ends_otherwise() -> None:
    for end, reason in (([EOS], "stop"), ([], "abort")):
        state = start(stop="STOP!")
        parts = [state.append(ids("go STOP")), state.append(end) if end else state.finish(reason)]
        assert parts[0].text == "go " and parts[1].text == "STOP"
        assert state.output.text == "go STOP" and parts[1].finish_reason == reason


def test_min_tokens_ignores_ends_before_it() -> None:
    run = [*ids("fox"), EOS, *ids("dog"), EOS]
    count = len(ids("fox")) + 1
    state = start(min_tokens=count)
    assert state.append(run).text == "foxdog"
    assert start(min_tokens=count - 1).append(run).text == "fox"
    assert start(min_tokens=3, json_object=True).append([EOS]).finish_reason == "stop"
    stopped = start(min_tokens=len(ids("a STOP b")), stop="STOP")
    assert stopped.append(ids("a STOP b STOP c")).text == "a STOP b "


def test_half_a_character_at_the_length_limit() -> None:
    run = ids("🙂")
    assert len(run) > 1
    state = start(max_tokens=len(run) - 1)
    assert state.append(run).text == "\ufffd"


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(alphabet="abS TOP#.🙂", max_size=30),
    eos_at=st.integers(0, 40),
    cuts=st.sets(st.integers(1, 60)),
    max_tokens=st.integers(1, 40),
    min_tokens=st.integers(0, 6),
    stops=st.lists(st.sampled_from(["STOP", "ST", "a", "P #", "🙂", ". "]), max_size=3),
    include=st.booleans(),
)
def test_a_run_of_many_equals_one_token_at_a_time(
    text: str, eos_at: int, cuts: set[int], max_tokens: int, min_tokens: int, stops: list[str], include: bool
) -> None:
    run = ids(text)
    run[eos_at:eos_at] = [EOS]
    params = {"stop": stops, "min_tokens": min(min_tokens, max_tokens), "include_stop_str_in_output": include}
    single, grouped = start(max_tokens, **params), start(max_tokens, **params)
    singles = [single.append([token]) for token in run]
    edges = [0, *sorted(cut for cut in cuts if cut < len(run)), len(run)]
    groups = [grouped.append(run[a:b]) for a, b in itertools.pairwise(edges)]
    for name in ("text", "token_ids", "finish_reason", "stop_reason"):
        assert getattr(single.output, name) == getattr(grouped.output, name)
    for deltas, state in ((singles, single), (groups, grouped)):
        assert "".join(delta.text for delta in deltas) == state.output.text
        assert [token for delta in deltas for token in delta.token_ids] == state.output.token_ids
        assert sum(delta.kept_tokens for delta in deltas) == len(state.output.token_ids) <= max_tokens


def test_logprob_entries_keep_what_the_row_wanted() -> None:
    found = HostLogprobs(
        np.array([-0.5, -1.0]), np.array([[4, 9, 1], [7, 5, 2]]), np.array([[-0.5, -3.0, -4.0], [-0.25, -1.0, -5.0]])
    )
    both = [TokenLogprob(4, -0.5, ((4, -0.5),)), TokenLogprob(5, -1.0, ((7, -0.25),))]
    assert found.entries([4, 5], 1) == both
    assert found.entries([5, 4], 1, [1, 0]) == both[::-1]
    assert found.entries([5], 0, [1]) == [TokenLogprob(5, -1.0, ())]


def test_request_output_shows_the_first_answer() -> None:
    states = [PROCESSOR.start(SamplingParams(n=2), max_tokens=9, index=i) for i in range(2)]
    states[0].append([*ids("fox"), EOS])
    out = RequestOutput("r", ids("say:"), [state.output for state in states])
    assert (out.text, out.finish_reason, out.finished) == ("fox", "stop", False)
    states[1].append([*ids("dog"), EOS])
    assert out.finished and [o.index for o in out.outputs] == [0, 1]


def test_speculation_metrics() -> None:
    metrics = states_metrics = start().output.metrics.speculation
    for drafted, accepted in ((3, 2), (3, 0), (0, 0), (3, 3)):
        metrics.add(drafted, accepted)
    assert (metrics.drafts, metrics.draft_tokens, metrics.accepted_tokens) == (3, 9, 5)
    assert states_metrics.accepted_per_position == [2, 2, 1]
    assert metrics.mean_accept_length == pytest.approx(1 + 5 / 3)
