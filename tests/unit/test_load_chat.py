"""Chat templates: what the hub's templates expect, nothing more; no second BOS; typed errors."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import ModelError, RequestError
from octavo.model.load import Tokenizer, load_model
from octavo.model.load.chat_template import render_chat
from octavo.model.load.expected import expected_tensors
from tests.unit.load_files import TEMPLATE, byte_tokens, random_tensors, tiny, write_gguf

CONFIG = tiny("llama", num_layers=1)
CHAT = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello <b>&amp;</b> 'x'"}]


def tokenizer(tmp_path: Path, **options: Any) -> Tokenizer:
    tensors = random_tensors(expected_tensors(CONFIG))
    path = write_gguf(tmp_path / "m.gguf", CONFIG, tensors, tokenizer=options)
    return load_model(path, cache_dir=tmp_path / "cache", progress=False).tokenizer


def reference(template: str, messages: list[dict[str, Any]], **kwargs: Any) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered = render_jinja_template([messages], chat_template=template, **kwargs)
    return (rendered[0] if isinstance(rendered, tuple) else rendered)[0]


TOOLS = [{"type": "function", "function": {"name": "f", "description": "a <b> & 'c' — é", "parameters": {}}}]
TEMPLATES = {
    "plain": TEMPLATE,
    "json": "{% for t in tools %}{{ t | tojson }}\n{{ t | tojson(indent=2) }}\n{% endfor %}{{ messages[0].content }}",
    "blocks": "{% for m in messages %}\n  {% if m.role == 'user' %}\n  [{{ m.content }}]\n {% endif %}\n{% endfor %}\n",
    "loopcontrols": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "namespace": "{% set s = namespace(n=0) %}{% for m in messages %}{% set s.n = s.n + 1 %}{% endfor %}{{ s.n }}",
    "tests": "{{ messages is iterable }}{{ tools is none }}{{ x is defined }}{{ documents is none }}",
    "macro": "{% macro f(m) %}<{{ m.role | upper }}>{{ m.content | trim }}{% endmacro %}{{ f(messages[1]) }}",
    "slice": "{{ messages[1:] | length }}{{ messages[-1]['content'].split(' ')[0] }}{{ '%02d' | format(3) }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("prompt", [True, False])
def test_templates_render_as_transformers_renders_them(name: str, prompt: bool) -> None:
    tools = TOOLS if name == "json" else None
    ours = render_chat(TEMPLATES[name], CHAT, tools=tools, add_generation_prompt=prompt)
    assert ours == reference(TEMPLATES[name], CHAT, tools=tools, add_generation_prompt=prompt)


def test_extra_variables_and_the_date() -> None:
    assert render_chat("{{ thinking }}", CHAT, variables={"thinking": False}) == "False"
    year = render_chat("{{ strftime_now('%Y') }}", CHAT)
    assert year == str(datetime.datetime.now().year)


def test_what_a_template_refuses_is_a_request_error() -> None:
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        render_chat("{{ raise_exception('roles must alternate') }}", CHAT)
    assert caught.value.param == "messages"
    for template in (
        "{{ messages[9].content.x }}",
        "{{ 1 / 0 }}",
        "{{ missing() }}",
        "{% include 'x' %}",
        "{{ 'a' + 1 }}",
    ):
        with pytest.raises(RequestError, match="chat template"):
            render_chat(template, CHAT)


def test_a_template_that_is_not_jinja_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="chat template, line 2"):
        render_chat("a\n{% for %}", CHAT)
    with pytest.raises(ModelError, match="line 1"):
        tokenizer(tmp_path).with_template("{% if %}")


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ raise_exception.__globals__['__builtins__']['open']('/etc/passwd').read() }}",
        "{{ strftime_now.__globals__ }}",
        "{{ messages.append({'role': 'x'}) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ ''.join.__self__.__class__ }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ ('{0.__class__.__mro__}' | attr('format'))(messages) }}",
        "{{ self.__init__ }}",
        "{{ lipsum.__globals__ }}",
        "{% for i in range(999999999) %}x{% endfor %}",
        "{% import 'os' as os %}",
        "{{ 'class' * 999999999 }}",
        "{{ 999999999 * ['class'] }}",
        "{{ 9 ** 9 ** 9 }}",
    ],
)
def test_nothing_can_be_executed_or_changed(attack: str) -> None:
    messages = [{"role": "user", "content": "x"}]
    try:
        text = render_chat(attack, messages)
    except RequestError:
        text = ""
    for leak in ("class", "subclass", "globals", "built-in", "root:", "uid="):
        assert leak not in text
    assert messages == [{"role": "user", "content": "x"}]


def test_a_base_model_says_how_to_pass_a_template(tmp_path: Path) -> None:
    base = tokenizer(tmp_path, chat_template="")
    assert base.chat_template is None
    for call in (base.apply_chat_template, base.encode_chat):
        with pytest.raises(RequestError, match="--chat-template FILE") as caught:
            call(CHAT)
        assert caught.value.code == "no_chat_template"
    assert base.with_template(TEMPLATE).apply_chat_template(CHAT).startswith("<|im_start|>system\nbe kind<|im_end|>")
    assert base.chat_template is None


def test_a_template_file_replaces_the_models_own(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", CONFIG, random_tensors(expected_tensors(CONFIG)), tokenizer={})
    file = tmp_path / "t.jinja"
    file.write_text("[{{ messages[0].content }}]")
    loaded = load_model(path, cache_dir=tmp_path, chat_template=file)
    assert loaded.tokenizer.apply_chat_template(CHAT) == "[be kind]" and loaded.chat_template == file.read_text()
    with pytest.raises(ModelError, match="cannot be read"):
        load_model(path, cache_dir=tmp_path, chat_template=tmp_path / "absent.jinja")
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match="UTF-8"):
        load_model(path, cache_dir=tmp_path, chat_template=file)


@pytest.mark.parametrize("add", [True, False])
@pytest.mark.parametrize("template", ["{{ bos_token }}" + TEMPLATE, TEMPLATE])
def test_there_is_never_a_second_bos(add: bool, template: str, tmp_path: Path) -> None:
    model = tokenizer(tmp_path, add_bos_token=add, chat_template=template)
    ids = model.encode_chat(CHAT)
    bos = byte_tokens().index("<|bos|>")
    assert ids.count(bos) == (1 if add or "bos_token" in template else 0)
    assert (ids[0] == bos) == (ids.count(bos) == 1)
    assert model.decode(ids, skip_special_tokens=True).startswith("system\nbe kind")


@pytest.mark.parametrize("tail", ["half a sent", "with space ", "  both  ", "", "two\nlines\n"])
def test_the_last_message_can_be_continued(tail: str) -> None:
    chat = [*CHAT, {"role": "assistant", "content": tail}]
    text = render_chat(TEMPLATE, chat, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\n" + tail)
    assert text == reference(TEMPLATE, chat, continue_final_message=True) or tail != tail.strip()


def test_a_continued_message_that_the_template_hides() -> None:
    with pytest.raises(RequestError, match="continue_final_message"):
        render_chat("{{ messages[0].content }}", CHAT, continue_final_message=True)
    with pytest.raises(RequestError, match="no text to continue"):
        render_chat(TEMPLATE, [{"role": "assistant", "content": None}], continue_final_message=True)


def test_parts_of_text_are_joined_and_others_named() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert "user\na\nb<|im_end|>" in render_chat(TEMPLATE, [{"role": "user", "content": parts}])
    with pytest.raises(RequestError, match=r"messages\[0\].content\[1\]: got 'image_url'"):
        render_chat(TEMPLATE, [{"role": "user", "content": [*parts[:1], {"type": "image_url"}]}])
    no_text = [[{"role": "user", "content": content}] for content in (5, True, {"type": "text", "text": "a"})]
    for bad in ([], [{"content": "x"}], ["x"], *no_text):
        with pytest.raises(RequestError, match="messages"):
            render_chat(TEMPLATE, bad)  # type: ignore[arg-type]
