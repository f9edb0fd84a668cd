"""Tool calls read as they stream: split at every byte the result is the same; forced calls satisfy their schema."""

from __future__ import annotations

import codecs
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import validate

from octavo.api.tools import (
    CallArguments,
    CallBegin,
    Content,
    Event,
    call_grammar,
    detect_format,
    inline_tools,
    make_parser,
)
from octavo.engine.grammar import GrammarCompiler
from octavo.params import SamplingParams
from tests.unit.tokenizer_zoo import byte_level


def tool(name: str, **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


WEATHER = tool(
    "get_weather",
    type="object",
    properties={"city": {"type": "string", "maxLength": 8}, "days": {"$ref": "#/$defs/days"}},
    required=["city", "days"],
    additionalProperties=False,
    **{"$defs": {"days": {"enum": [1, 3, 7]}}},
)
TOOLS = [WEATHER, tool("stop_all"), tool("send", type="object", properties={"text": {"type": "string"}})]

# (format, answer, content, calls)
CASES: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("hermes", "Just text, a < b, <tool_box> and <tool_cal", "Just text, a < b, <tool_box> and <tool_cal", []),
    ("hermes", "trailing space kept \n", "trailing space kept \n", []),
    ("hermes", '<tool_call>\n{"name": "stop_all", "arguments": {}}\n</tool_call>', "", [("stop_all", "{}")]),
    (
        "hermes",
        'Grüße 🙂\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln }\\" {", "days": 3}}\n</tool_call>'
        '\n<tool_call>{"arguments":{"text":"</tool_call>"},"name":"send"}</tool_call>\n',
        "Grüße 🙂",
        [("get_weather", '{"city": "Köln }\\" {", "days": 3}'), ("send", '{"text":"</tool_call>"}')],
    ),
    ("hermes", '<tool_call>{"name": "stop_all"}</tool_call> bye', " bye", [("stop_all", "{}")]),
    ("hermes", '<tool_call>{"name": "x", "arguments": "{\\"a\\": 1}", "id": null}', "", [("x", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "x", "arguments": {"a": [1, {', "", [("x", '{"a": [1, {')]),
    ("hermes", '<tool_call>{"name": "x", "argum', '<tool_call>{"name": "x", "argum', [("x", "")]),
    ("hermes", '<tool_call>{"na', '<tool_call>{"na', []),
    ("hermes", "<tool_call>oops</tool_call>", "<tool_call>oops</tool_call>", []),
    ("hermes", "<tool_call></tool_call> x", "<tool_call></tool_call> x", []),
    ("hermes", '<tool_call>\n<tool_call>{"name": "a"}</tool_call>', "<tool_call>\n", [("a", "{}")]),
    ("hermes", '<tool_call>{"name": "x", "arguments": {"a": 1}} extra}</tool_call>.', " extra}</tool_call>.",
     [("x", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "x", "arguments": {"a": 1}, oops}</tool_call>.', ".", [("x", '{"a": 1}oops}')]),
    ("hermes", '<tool_call>{"name": "a"}\n<tool_call>{"name": "b"}', "", [("a", "{}"), ("b", "{}")]),
    ("hermes", '<think>\n<tool_call>{"name": "a"}</tool_call>', "<think>", [("a", "{}")]),
    (
        "qwen3",
        '<think>\nI could <tool_call>{"name": "no"}</tool_call> now\n</think>\n\n<tool_call>\n{"name": "stop_all", '
        '"arguments": {}}\n</tool_call>',
        '<think>\nI could <tool_call>{"name": "no"}</tool_call> now\n</think>',
        [("stop_all", "{}")],
    ),
    ("qwen3", "text <think> is text", "text <think> is text", []),
    (
        "qwen3",
        "Now:\n<tool_call>\n<function=get_weather>\n<parameter=city>\nKöln\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n</function>\n</tool_call>",
        "Now:",
        [("get_weather", '{"city": "Köln", "days": 3}')],
    ),
    ("qwen3", "<tool_call><function=send><parameter=text>12</parameter></function></tool_call>", "",
     [("send", '{"text": "12"}')]),
    ("qwen3", "<tool_call><function=send>", "<tool_call><function=send>", []),
    ("llama3", '{"name": "get_weather", "parameters": {"city": "Rom", "days": 1}}', "",
     [("get_weather", '{"city": "Rom", "days": 1}')]),
    ("llama3", ' <|python_tag|>{"type": "function", "name": "stop_all", "parameters": {}}; {"name": "send", '
     '"arguments": {"text": "; {"}}\n', "", [("stop_all", "{}"), ("send", '{"text": "; {"}')]),
    ("llama3", '{"name": "unknown", "parameters": {}}', '{"name": "unknown", "parameters": {}}', []),
    ("llama3", '{"answer": 42}', '{"answer": 42}', []),
    ("llama3", "Plain {text} with braces", "Plain {text} with braces", []),
    ("llama3", '{"name": "send"', '{"name": "send"', [("send", "")]),
    ("llama3", "<|python_", "<|python_", []),
    ("llama3", '{"name": "stop_all"} and more', " and more", [("stop_all", "{}")]),
]  # fmt: skip


def collect(events: list[Event]) -> tuple[str, list[tuple[str, str]]]:
    content, calls, ids = "", [], set()
    for event in events:
        if isinstance(event, Content):
            content += event.text
        elif isinstance(event, CallBegin):
            assert event.index == len(calls)
            calls.append((event.name, ""))
            ids.add(event.id)
        else:
            assert isinstance(event, CallArguments) and event.text
            calls[event.index] = (calls[event.index][0], calls[event.index][1] + event.text)
    assert len(ids) == len(calls)
    return content, calls


def read(style: str, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    parser = make_parser(style, TOOLS)
    events = [event for piece in pieces for event in parser.push(piece)]
    return collect(events + parser.finish())


def as_bytes(text: str, at: set[int]) -> list[str]:
    """Cut the UTF-8 bytes at given places, decoded as a server does: whole characters only."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    raw = text.encode()
    edges = [0, *sorted(i for i in at if 0 < i < len(raw)), len(raw)]
    return [decoder.decode(raw[a:b]) for a, b in zip(edges, edges[1:], strict=False)]


def expected(content: str, calls: list[tuple[str, str]]) -> tuple[str, list[tuple[str, str]]]:
    if calls and calls[-1][1] == "":  # ended before the arguments began: the call stands, nothing is repeated as text
        content = ""
    return content, calls


@pytest.mark.parametrize(("style", "answer", "content", "calls"), CASES, ids=range(len(CASES)))
def test_answers_cut_at_every_byte(style: str, answer: str, content: str, calls: list[tuple[str, str]]) -> None:
    want = expected(content, calls)
    assert read(style, [answer]) == want
    size = len(answer.encode())
    assert read(style, as_bytes(answer, set(range(size)))) == want
    for at in range(1, size):
        assert read(style, as_bytes(answer, {at})) == want


@settings(max_examples=300, deadline=None)
@given(
    style=st.sampled_from(["hermes", "qwen3", "llama3"]),
    parts=st.lists(
        st.sampled_from([
            "<tool_call>", "</tool_call>", "<think>", "</think>", '{"name": "send"', ', "arguments": {', '"a": 1}', "}",
            "\n", " ", "<", "text", "<function=send>", "</function>", ";", '"', "🙂", "<|python_tag|>", "{", "\\",
        ]),
        max_size=14,
    ),
    cuts=st.sets(st.integers(1, 120)),
)  # fmt: skip
def test_any_text_reads_the_same_however_it_is_cut(style: str, parts: list[str], cuts: set[int]) -> None:
    text = "".join(parts)
    whole = read(style, [text])
    assert read(style, as_bytes(text, cuts)) == whole
    content, calls = whole
    if not calls:
        assert content == text, "an answer without calls must come through unchanged"


def test_arguments_stream_before_the_call_is_complete() -> None:
    parser = make_parser("hermes", TOOLS)
    assert collect(parser.push('<tool_call>{"name": "send", "arguments": {"text": "lo')) == (
        "",
        [("send", '{"text": "lo')],
    )
    assert parser.push("ng") == [CallArguments(0, "ng")]


def test_long_hostile_text_is_read_in_time() -> None:
    for style in ("hermes", "qwen3", "llama3"):
        for unit in (
            "<tool_call><function=",
            '<tool_call>{"type": "',
            "<tool_call>",
            " " * 40,
            '{"name": "',
            "<think>",
        ):
            read(style, [unit * (60_000 // len(unit))])


def test_formats_are_found_in_templates() -> None:
    hermes = "{% if tools %}<tools>{{ tools }}</tools> answer in <tool_call></tool_call>{% endif %}"
    llama = '{% if tools %}Respond {"name": function name, "parameters": dictionary}{% endif %}'
    assert detect_format(hermes) == "hermes"
    assert detect_format(hermes + "<think>") == "qwen3"
    assert detect_format(llama) == "llama3"
    assert detect_format(None) == detect_format("{{ messages }}") == "hermes"


# ---- forced calls ----

TOKENIZER = byte_level()
COMPILER = GrammarCompiler(TOKENIZER, TOKENIZER.vocab_size)


def random_answer(grammar: str, data: st.DataObject, limit: int = 150) -> str | None:
    matcher = COMPILER.compile(SamplingParams(grammar=grammar)).matcher()
    tokens: list[int] = []
    while not matcher.is_finished:
        mask = np.zeros((TOKENIZER.vocab_size + 31) // 32, dtype=np.int32)
        matcher.fill_mask(mask)
        ids = set(np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0].tolist())
        if ids & TOKENIZER.eos_ids and data.draw(st.booleans()):
            break
        ids -= TOKENIZER.eos_ids
        quote = [i for i in ids if TOKENIZER.backend.id_to_token(i) == '"']
        if len(tokens) > limit and not quote:
            return None
        tokens.append(quote[0] if quote and len(tokens) > limit else data.draw(st.sampled_from(sorted(ids))))
        assert matcher.accept(tokens[-1])
    return TOKENIZER.decode(tokens)


@pytest.mark.parametrize("style", ["hermes", "qwen3", "llama3"])
@settings(max_examples=20, deadline=None)
@given(data=st.data(), named=st.booleans())
def test_forced_calls_are_schema_valid(style: str, data: st.DataObject, named: bool) -> None:
    tools = TOOLS[:1] if named else [WEATHER, tool("noop", type="object", additionalProperties=False)]
    answer = random_answer(call_grammar(style, tools, name="get_weather" if named else None), data)
    if answer is None:
        return
    parser = make_parser(style, tools)
    content, calls = collect(parser.push(answer) + parser.finish())
    assert content == "" and 1 <= len(calls) <= (1 if named else 8)
    for name, arguments in calls:
        schema = next(t["function"]["parameters"] for t in tools if t["function"]["name"] == name)
        validate(json.loads(arguments), schema)


def test_a_forced_call_of_a_missing_tool_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing"):
        call_grammar("hermes", TOOLS, name="nothing")


def test_odd_tool_names_survive() -> None:
    name = 'we"ird\\näme'
    matcher = COMPILER.compile(SamplingParams(grammar=call_grammar("hermes", [tool(name)], name=name))).matcher()
    text = f'<tool_call>\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {{}}}}\n</tool_call>'
    done = [matcher.advance(token) for token in TOKENIZER.encode(text)]
    assert done == [False] * (len(done) - 1) + [True] and matcher.error is None
    assert read("hermes", [text]) == ("", [(name, "{}")])


# ---- templates that know no tools ----


def test_tools_are_taught_and_earlier_calls_written_out() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "send", "arguments": {"text": "é"}}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "done", "tool_call_id": "c"},
        {"role": "tool", "content": "twice"},
    ]
    out = inline_tools(messages, TOOLS)
    assert [m["role"] for m in out] == ["system", "user", "assistant", "user"]
    assert json.dumps(WEATHER) in out[0]["content"] and "<tool_call>" in out[0]["content"]
    assert read("hermes", [out[2]["content"]]) == ("", [("send", '{"text": "é"}')])
    assert out[3]["content"].count("<tool_response>") == 2
    system = inline_tools([{"role": "system", "content": "Be brief."}], TOOLS)
    assert len(system) == 1 and system[0]["content"].startswith("Be brief.\n\n")
    assert inline_tools(messages[:1], None) == [{"role": "user", "content": "Hi"}]
