"""Streamed text equals the full decode; stops are found wherever the text is cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine.detokenizer import REPLACEMENT, Detokenizer
from octavo.engine.stops import StopMatcher
from tests.unit.tokenizer_zoo import TEXT, byte_level, pieces, zoo

FAMILIES = list(zoo())


def streamed(family: str, ids: list[int], *, skip: bool = True, prompt: list[int] | None = None) -> list[str]:
    stream = Detokenizer(zoo()[family]).stream(skip_special_tokens=skip, prompt_token_ids=prompt or [])
    return [stream.push(token) for token in ids] + [stream.flush()]


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_takes_its_exact_path(family: str) -> None:
    shared = Detokenizer(zoo()[family])
    assert shared.byte_level == (family == "byte_level")
    assert (shared.pieces is not None) == (family in ("gemma_like", "llama2_like", "metaspace"))


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_tokens_stream_to_their_decode(family: str, data: st.DataObject) -> None:
    tokenizer = zoo()[family]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=24))
    skip = data.draw(st.booleans())
    if family == "wordpiece":  # a window is exact for what text encodes to, not for any order of pieces
        ids = tokenizer.encode(data.draw(st.text(alphabet="abcdefghij qu.", max_size=40)))
    assert "".join(streamed(family, ids, skip=skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("family", ["byte_level", "gemma_like", "llama2_like"])
@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=30), cut=st.integers(0, 30))
def test_an_answer_continues_its_prompt(family: str, text: str, cut: int) -> None:
    tokenizer = zoo()[family]
    ids = tokenizer.encode("x" + text)
    cut = 1 + cut % len(ids)
    prompt, answer = ids[:cut], ids[cut:]
    whole, before = tokenizer.decode(ids), tokenizer.decode(prompt)
    if REPLACEMENT in before:  # the prompt ends inside a character
        return
    assert before + "".join(streamed(family, answer, prompt=prompt)) == whole


@pytest.mark.parametrize("family", ["byte_level", "gemma_like"])
def test_no_piece_holds_half_a_character(family: str) -> None:
    text = "naïve 🙂👩‍👩‍👧‍👦語 ꙮ 𐍈 ᚠ"
    tokenizer = zoo()[family]
    ids = tokenizer.encode(text)
    assert len(ids) > 12
    parts = streamed(family, ids)
    assert "".join(parts) == text and not any(REPLACEMENT in part for part in parts)


def test_an_unfinished_character_comes_out_once_at_the_end() -> None:
    ids = byte_level().encode("a🙂")[:-1]
    assert "".join(streamed("byte_level", ids)) == "a" + REPLACEMENT == byte_level().decode(ids)


def test_ids_outside_the_vocabulary_are_empty() -> None:
    for family in FAMILIES:
        assert "".join(streamed(family, [10**6])) == ""


def test_prefix_space() -> None:
    llama = pieces(True)
    ids = llama.encode("The quick")
    assert "".join(streamed("llama2_like", ids)) == "The quick"
    assert "".join(streamed("llama2_like", ids, prompt=llama.encode("x"))) == " The quick"
    bos = llama.backend.token_to_id("<s>")
    assert "".join(streamed("llama2_like", ids, prompt=[bos])) == "The quick"


@pytest.mark.parametrize("family", ["byte_level", "gemma_like"])
def test_token_bytes_add_up_to_the_text(family: str) -> None:
    tokenizer = zoo()[family]
    shared = Detokenizer(tokenizer)
    for text in TEXT[:2]:
        joined = b"".join(shared.token_bytes(token) for token in tokenizer.encode(text))
        assert joined.decode() == text


# ---- stop strings ----


def reference(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Character by character, the obvious way."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@settings(max_examples=600, deadline=None)
@given(
    text=st.text(alphabet="abc", max_size=20),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=4),
    cuts=st.sets(st.integers(0, 20)),
    include=st.booleans(),
)
def test_stops_do_not_depend_on_the_cuts(text: str, stops: list[str], cuts: set[int], include: bool) -> None:
    matcher = StopMatcher(stops, include_stop=include)
    edges = sorted({0, len(text), *(c for c in cuts if c < len(text))})
    shown, stop = "", None
    want, want_stop = reference(text, stops, include)
    for begin, end in zip(edges, edges[1:], strict=False):
        piece, stop = matcher.push(text[begin:end])
        shown += piece
        assert want.startswith(shown), "text was shown that belongs to a stop"
        if stop is not None:
            break
    if stop is None:
        shown += matcher.flush()
    assert (shown, stop) == (want, want_stop)


def test_text_is_held_only_while_it_may_become_a_stop() -> None:
    matcher = StopMatcher(["STOP", "ST!"])
    assert matcher.push("go S") == ("go ", None)
    assert matcher.push("T") == ("", None)
    assert matcher.push("A") == ("STA", None)
    assert matcher.push("ST!") == ("", "ST!")


def test_a_stop_that_is_a_prefix_of_another_ends_first() -> None:
    assert StopMatcher(["ab", "abc"]).push("xabc") == ("x", "ab")
    assert StopMatcher(["abc", "bc"]).push("xabc") == ("x", "abc")
    assert StopMatcher(["abcd", "bc"]).push("xabcd") == ("xa", "bc")


def test_before_min_tokens_stops_pass_but_may_begin() -> None:
    matcher = StopMatcher(["ab"])
    assert matcher.push("abxa", enabled=False) == ("abx", None)
    assert matcher.push("b") == ("", "ab")
