"""Masks of a grammar: what they allow, behind drafts, and that a draft leaves no trace."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import validate

from octavo.engine.grammar import Grammar, GrammarCompiler, Matcher, check_grammar
from octavo.errors import RequestError
from octavo.params import SamplingParams
from tests.unit.tokenizer_zoo import byte_level, pieces, wordpiece

TOKENIZER = byte_level()
EOS = min(TOKENIZER.eos_ids)
MODEL_VOCAB = TOKENIZER.vocab_size + 40  # models pad their head
COMPILER = GrammarCompiler(TOKENIZER, MODEL_VOCAB)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "n": {"enum": [1, 2, 30]}},
    "required": ["name", "n"],
    "additionalProperties": False,
}


def deep(levels: int) -> dict[str, object]:
    schema: dict[str, object] = {}
    for _ in range(levels):
        schema = {"not": schema}
    return schema


def grammar(**field) -> Grammar:
    return COMPILER.compile(SamplingParams(**field))


def allowed(mask: np.ndarray) -> set[int]:
    return set(np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0].tolist())


def next_ids(matcher: Matcher) -> set[int]:
    out = np.zeros((MODEL_VOCAB + 31) // 32, dtype=np.int32)
    matcher.fill_mask(out)
    return allowed(out)


def advance(matcher: Matcher, tokens: list[int]) -> bool:
    """Move behind all tokens; whether the answer was complete behind the last one, and not before."""
    done = [matcher.advance(token) for token in tokens]
    assert not any(done[:-1])
    return done[-1]


def test_regex_masks_are_exactly_the_tokens_that_can_follow() -> None:
    matcher = grammar(regex="(The|Then) [0-9]{2}").matcher()
    texts = {TOKENIZER.decode([i], skip_special_tokens=False) for i in next_ids(matcher)}
    assert texts and texts <= {"T", "Th", "The"}  # forced text may be narrowed to its usual token
    assert not matcher.accept(TOKENIZER.encode("x")[0])
    assert advance(matcher, TOKENIZER.encode("The ")) is False
    digits = {TOKENIZER.decode([i]) for i in next_ids(matcher)}
    assert digits >= set("0123456789") and all(text.isdigit() for text in digits)
    assert advance(matcher, TOKENIZER.encode("42")) is True
    assert matcher.is_accepting and matcher.error is None
    assert next_ids(matcher) == {EOS}


@pytest.mark.parametrize("boxed", [byte_level(), pieces(False)], ids=["byte_level", "pieces"])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_walk_over_allowed_tokens_is_schema_valid(boxed, data: st.DataObject) -> None:
    compiler = GrammarCompiler(boxed, boxed.vocab_size)
    matcher = compiler.compile(SamplingParams(json_schema=SCHEMA)).matcher()
    tokens: list[int] = []
    while not matcher.is_finished and len(tokens) < 200:
        out = np.zeros((boxed.vocab_size + 31) // 32, dtype=np.int32)
        matcher.fill_mask(out)
        choices = sorted(allowed(out) - boxed.eos_ids)
        tokens.append(data.draw(st.sampled_from(choices)))
        assert matcher.accept(tokens[-1])
    if matcher.is_finished:
        validate(json.loads(boxed.decode(tokens)), SCHEMA)


def test_whitespace_is_bounded() -> None:
    matcher = grammar(json_object=True).matcher()
    assert advance(matcher, TOKENIZER.encode("{")) is False
    newline = TOKENIZER.encode("\n")[0]
    taken = 0
    while matcher.accept(newline):
        taken += 1
    assert 8 <= taken <= 32


def reference_masks(make: Grammar, prefix: list[int], tokens: list[int], parents: list[int]) -> list[set[int] | None]:
    """A fresh matcher for every node; None behind a forbidden token."""
    result: list[set[int] | None] = []
    for node in range(len(tokens) + 1):
        path: list[int] = []
        at = node
        while at:
            path.insert(0, tokens[at - 1])
            at = parents[at - 1]
        matcher = make.matcher()
        ok = all(matcher.accept(token) for token in prefix + path)
        result.append(next_ids(matcher) if ok else None)
    return result


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_masks_of_a_drafted_tree_and_no_trace(data: st.DataObject) -> None:
    make = grammar(json_schema=SCHEMA)
    answer = TOKENIZER.encode('{"name": "fox", "n": 30}')
    cut = data.draw(st.integers(0, len(answer)))
    good = answer[cut:] + [EOS]
    count = data.draw(st.integers(0, 8))
    tokens, parents, depth = [], [], [0]
    for column in range(count):
        parent = data.draw(st.integers(0, column))
        right = good[depth[parent] % len(good)]
        tokens.append(data.draw(st.sampled_from([right, right, 5, EOS])))
        parents.append(parent)
        depth.append(depth[parent] + 1)
    matcher = make.matcher()
    assert all(matcher.accept(token) for token in answer[:cut])
    before = next_ids(matcher)
    masks = matcher.masks_for_draft(tokens, parents)
    for mask, want in zip(masks, reference_masks(make, answer[:cut], tokens, parents), strict=True):
        assert (np.all(mask == -1)) if want is None else (allowed(mask) == want)
    assert matcher.error is None and next_ids(matcher) == before


def test_a_chain_is_a_tree_of_single_children() -> None:
    matcher = grammar(json_schema=SCHEMA).matcher()
    chain = TOKENIZER.encode('{"name": "fox", "n": 2}')
    tree = matcher.masks_for_draft(chain, list(range(len(chain))))
    assert np.array_equal(matcher.masks_for_draft(chain), tree)
    assert matcher.masks_for_draft([]).shape == (1, tree.shape[1])
    assert allowed(tree[-1]) == {EOS}


def test_completeness_does_not_depend_on_masks_asked_for_before() -> None:
    schema = '{"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}'
    call = f'start: "<t>" args "</t>"\nargs: %json {schema}'
    for text, field in (
        ('<t>{"a": 1}</t>', {"grammar": call}),
        ("ab", {"regex": "a?b?"}),
        ("yes", {"regex": "yes|no"}),
    ):
        plain, drafted = grammar(**field).matcher(), grammar(**field).matcher()
        for token in TOKENIZER.encode(text):
            drafted.masks_for_draft([token, EOS, 3])
            assert plain.advance(token) == drafted.advance(token)
        assert plain.is_finished and drafted.is_finished, text


def test_matchers_of_one_grammar_are_independent() -> None:
    make = grammar(regex="ab*c")
    first, second = make.matcher(), make.matcher()
    advance(first, TOKENIZER.encode("a"))
    assert next_ids(first) != next_ids(second) == next_ids(make.matcher())
    assert COMPILER.compile(SamplingParams(regex="ab*c")) is make


def test_lark_and_gbnf_grammars() -> None:
    for text in ('start: "yes" | "no"', 'root ::= "yes" | "no"'):
        matcher = grammar(grammar=text).matcher()
        assert advance(matcher, TOKENIZER.encode("yes")) is True


def test_a_token_the_grammar_forbids_ends_the_answer_with_an_error() -> None:
    matcher = grammar(regex="abc").matcher()
    assert advance(matcher, TOKENIZER.encode("x")) is True
    assert matcher.error is not None and "not allowed" in matcher.error
    assert np.all(matcher.masks_for_draft([5], None) == -1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("regex", "(a"),
        ("regex", "(?=a)b"),
        ("json_schema", {"type": "objekt"}),
        ("json_schema", "{not json"),
        ("json_schema", "[1]"),
        ("json_schema", {"$ref": "http://example.com/schema"}),
        ("json_schema", {"type": "object", "dependentRequired": {}}),
        ("grammar", "start: missing"),
        ("grammar", 'start: "a'),
        ("grammar", "root ::= (("),
        ("json_schema", {"const": float("nan")}),
        ("json_schema", {"maximum": float("inf")}),
        ("json_schema", '{"const": NaN}'),
        ("json_schema", {"enum": {1, 2}}),
        ("json_schema", deep(3000)),
    ],
)
def test_bad_specifications_name_their_field(field: str, value: object) -> None:
    params = SamplingParams(**{field: value})
    for check in (COMPILER.compile, check_grammar):
        with pytest.raises(RequestError, match=field) as caught:
            check(params)
        assert caught.value.param == field and caught.value.status == 400


def test_a_grammar_without_an_answer_is_refused_before_its_first_token() -> None:
    with pytest.raises(RequestError, match="grammar: ") as caught:
        grammar(grammar="start: start")
    assert caught.value.param == "grammar" and "<state>" not in str(caught.value)


def test_a_limit_of_the_library_is_the_callers_to_mend_and_shows_no_text() -> None:
    """Its report holds the text so far, which is nobody's to log; who comes next begins with a fresh grammar."""
    for _ in range(2):
        known = grammar(regex="a{1000}{1000}")
        matcher = known.matcher()
        while matcher.error is None:
            matcher.advance(min(next_ids(matcher)))
        error = matcher.failure("call-1")
        assert (error.status, error.param) == (400, "regex")
        assert str(error).startswith("regex: ") and "\n" not in str(error) and "Tokens" not in str(error)
        assert known.spent and grammar(regex="a{1000}{1000}") is not known


def test_a_fault_of_ours_is_no_fault_of_the_caller() -> None:
    matcher = grammar(regex="abc").matcher()
    matcher.advance(TOKENIZER.encode("x")[0])
    assert (matcher.failure("call-1").status, matcher.failure("call-1").param) == (500, None)


def test_good_specifications_pass_the_early_check() -> None:
    check_grammar(SamplingParams())
    check_grammar(SamplingParams(json_schema=json.dumps(SCHEMA)))
    check_grammar(SamplingParams(json_schema=True))
    check_grammar(SamplingParams(regex="^a$"))


def test_a_tokenizer_that_cannot_be_constrained_says_so() -> None:
    with pytest.raises(RequestError, match="tokenizer"):
        GrammarCompiler(wordpiece(), wordpiece().vocab_size).compile(SamplingParams(regex="a"))
