"""Tokenizers of GGUF files and folders: the ids of transformers, every end token, BOS, the cached conversion."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from octavo.errors import RequestError
from octavo.model.load import Tokenizer, load_model
from octavo.model.load.expected import expected_tensors
from octavo.model.load.gguf_file import GGUFFile
from octavo.model.load.tokenizer_gguf import gguf_tokenizer, recover_merges
from tests.unit.load_files import byte_tokens, hf_config_json, random_tensors, tiny, write_folder, write_gguf

CONFIG = tiny("llama", num_layers=1)
TEXTS = [
    "hello world", "  leading and  double", "a\n\n\nb\t\tx", "def f(x):\n    return x+1  # 12345\n",
    "naïve café 漢字 🙂👩‍👩‍👧",
    "<|im_start|>user\nhello<|im_end|>", "don't I'll WE'RE", "1234567.89 x²", "\u200b\xa0 nbsp", "", " ", "\n",
    "a" * 300, "\x00\x07", "e\u0301 é ﬁ", "\r\n\r\n x",
]  # fmt: skip


def mixed_texts(count: int = 200) -> list[str]:
    rng = random.Random(0)
    bits = [" ", "  ", "\n", "\t", "a", "the", "ing", "hello", "9", "12", ".", "!", "é", "漢", "🙂", "'s", "<", "|",
            "\u0301", "\r\n", "X", "<|im_end|>", "_"]  # fmt: skip
    return ["".join(rng.choice(bits) for _ in range(rng.randint(1, 40))) for _ in range(count)]


def byte_level(tmp_path: Path, **options: Any) -> Path:
    tensors = random_tensors(expected_tensors(CONFIG))
    return write_gguf(tmp_path / "model.gguf", CONFIG, tensors, tokenizer=options)


def loaded(path: Path) -> Tokenizer:
    return load_model(path, cache_dir=path.parent / "cache", progress=False).tokenizer


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "default", "llama-bpe", "qwen2", "tekken"])
def test_text_comes_back(pre: str, tmp_path: Path) -> None:
    tokenizer = loaded(byte_level(tmp_path, pre=pre))
    for text in [*TEXTS, *mixed_texts()]:
        back = tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False)
        if pre == "qwen2":  # it composes characters first
            import unicodedata

            text = unicodedata.normalize("NFC", text)
        assert back == text


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "tekken"])
def test_ids_are_those_of_transformers(pre: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    path = byte_level(tmp_path, pre=pre)
    tokenizer = loaded(path)
    reference = AutoTokenizer.from_pretrained(str(tmp_path), gguf_file=path.name)
    for text in [*TEXTS, *mixed_texts()]:
        if pre == "qwen2" and "\u0301" in text:  # the reference leaves out Qwen's NFC when it reads a GGUF
            continue
        ids = tokenizer.encode(text)
        assert ids == reference.encode(text), text
        assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)


def test_smollm_splits_digits_from_the_spaces_before_them(tmp_path: Path) -> None:
    """Digits stand alone, so spaces before them stay together; a plain GPT-2 split would tear one off."""
    smollm, plain = loaded(byte_level(tmp_path)), loaded(byte_level(tmp_path, pre="gpt-2"))
    tokens = byte_tokens()
    assert smollm.encode("12") == [tokens.index("1"), tokens.index("2")]
    assert plain.encode("12") == [tokens.index("12")]


def sentencepiece(tmp_path: Path, architecture: str = "llama", **options: bool) -> Path:
    """A SentencePiece vocabulary without merges, as llama.cpp writes it."""
    spaces = ["  ", "   "] if architecture == "gemma3" else ["\u2581\u2581", "\u2581\u2581\u2581"]
    pieces = ["\u2581", "h", "e", "l", "o", "w", "r", "d", "1", "\u2581h", "he", "ll", "el", "llo", "hello",
              "\u2581hello", "wo", "rld", "or", "ld", "world", "\u2581wo", "\u2581world"]  # fmt: skip
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        "<end_of_turn>",
        "<table>",
        *spaces,
        *(f"<0x{b:02X}>" for b in range(256)),
        *pieces,
    ]
    kind = gguf.TokenType
    kinds = ([kind.UNKNOWN, kind.CONTROL, kind.CONTROL, kind.CONTROL, kind.USER_DEFINED]
             + ([kind.USER_DEFINED] * 2 if architecture == "gemma3" else [kind.NORMAL] * 2)
             + [kind.BYTE] * 256 + [kind.NORMAL] * len(pieces))  # fmt: skip
    config = tiny(architecture, num_layers=7, vocab_size=len(tokens))
    path = tmp_path / f"{architecture}.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    from tests.unit.load_files import add_config, gguf_name

    add_config(writer, config)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * (7 + 256) + [-float(i) for i in range(len(pieces))])
    writer.add_token_types(kinds)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for key, value in options.items():
        writer.add_bool(f"tokenizer.ggml.{key}", value)
    for name, weight in random_tensors(expected_tensors(config)).items():
        writer.add_tensor(gguf_name(name, architecture), weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


SP_TEXTS = ["hello world", " hello", "  hello  world", "hello   1", "漢字 🙂", "", " ", "<table>hello</table>",
            "hello</s>x", "\n\thello", "\u2581x \u2581"]  # fmt: skip


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_sentencepiece_ids_are_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    path = sentencepiece(tmp_path, architecture)
    tokenizer = loaded(path)
    reference = AutoTokenizer.from_pretrained(str(tmp_path), gguf_file=path.name)
    for text in SP_TEXTS:
        ids = tokenizer.encode(text)
        assert ids == reference.encode(text), text
        assert ids[0] == 1  # SentencePiece vocabularies begin with BOS unless the file says otherwise
        assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True), text


def test_sentencepiece_text_comes_back(tmp_path: Path) -> None:
    for architecture in ("llama", "gemma3"):
        tokenizer = loaded(sentencepiece(tmp_path, architecture))
        # (A leading space is the one thing that transformers' reading of a Llama vocabulary loses, and so do we.)
        for text in [
            "hello world",
            "hello  world ",
            "漢字 🙂\n\tx",
            "hello   1",
            *["  x"] * (architecture == "gemma3"),
        ]:
            assert tokenizer.decode(tokenizer.encode(text)) == text, (architecture, text)
        assert 3 in tokenizer.eos_ids and 2 in tokenizer.eos_ids  # <end_of_turn> stops too


def test_recovered_merges_prefer_better_pieces() -> None:
    merges = recover_merges(["a", "b", "c", "ab", "bc", "abc"], np.array([0.0, 0, 0, -2, -1, -3]))
    assert merges == [("b", "c"), ("a", "b"), ("ab", "c"), ("a", "bc")]


# -- ends and beginnings ---------------------------------------------------------------------------------------------


def test_every_end_token_stops(tmp_path: Path) -> None:
    tokens = byte_tokens()
    tokenizer = loaded(byte_level(tmp_path, eot_token_id=tokens.index("<|im_start|>")))
    assert tokenizer.eos_ids == {tokens.index(t) for t in ("<|eos|>", "<|im_start|>", "<|im_end|>")}
    assert tokenizer.eos_id == tokens.index("<|eos|>")


@pytest.mark.parametrize("add", [True, False, None])
def test_bos_is_added_where_the_file_asks_for_it(add: bool | None, tmp_path: Path) -> None:
    tokenizer = loaded(byte_level(tmp_path, **({} if add is None else {"add_bos_token": add})))
    bos = byte_tokens().index("<|bos|>")
    assert tokenizer.bos_id == bos
    assert tokenizer.adds_bos is bool(add)
    assert tokenizer.encode("hello")[:1] == ([bos] if add else [byte_tokens().index("hello")])
    assert bos not in tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.encode("") == ([bos] if add else [])


def test_older_folders_name_bos_only_in_the_tokenizer_config(tmp_path: Path) -> None:
    tensors = random_tensors(expected_tensors(CONFIG))
    values = hf_config_json(CONFIG, "LlamaForCausalLM")
    for add in (True, False):
        options = {"add_bos_token": add, "bos_token": {"content": "<|bos|>", "special": True}}
        folder = write_folder(tmp_path / str(add), values, tensors, tokenizer_config=options)
        assert loaded(folder).adds_bos is add


def test_text_that_is_not_unicode_is_a_request_error(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="character 2 .*not valid Unicode") as caught:
        loaded(byte_level(tmp_path)).encode("ab\ud800c")
    assert caught.value.param == "prompt"


def test_ids_outside_the_vocabulary_decode_to_nothing(tmp_path: Path) -> None:
    tokenizer = loaded(byte_level(tmp_path))
    assert tokenizer.decode([10**6, *tokenizer.encode("hello")]) == "hello"
    assert tokenizer.id_to_token(10**6) is None and tokenizer.id_to_token(-1) is None
    assert tokenizer.id_to_token(tokenizer.encode("hello")[0]) == "hello"
    assert tokenizer.vocab_size == len(byte_tokens())


# -- the cached conversion -------------------------------------------------------------------------------------------


def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    import octavo.model.load.tokenizer_gguf as module

    made: list[Path] = []
    convert = module._convert
    monkeypatch.setattr(module, "_convert", lambda file: (made.append(file.path), convert(file))[1])
    return made


def test_the_conversion_is_cached_and_stale_ones_are_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import octavo.model.load.tokenizer_gguf as module

    made = conversions(monkeypatch)
    file, cache = GGUFFile(byte_level(tmp_path)), tmp_path / "cache"
    want = gguf_tokenizer(file, cache).encode("hello 漢")
    (kept,) = (cache / "tokenizers").iterdir()
    assert gguf_tokenizer(file, cache).encode("hello 漢") == want and len(made) == 1
    good = kept.read_bytes()
    for damaged in (
        good[:-9],
        good.replace(b"tokenizer 1 ", b"tokenizer 0 "),
        good.replace(b"hello", b"jello"),
        b"",
        b"\n",
    ):
        kept.write_bytes(damaged)
        before = len(made)
        assert gguf_tokenizer(file, cache).encode("hello 漢") == want
        assert len(made) == before + 1, "a damaged or stale cache file was believed"
        assert kept.read_bytes() == good
    monkeypatch.setattr(module, "CACHE_FORMAT", module.CACHE_FORMAT + 1)
    gguf_tokenizer(file, cache)
    assert len(made) == 7 and kept.read_bytes() != good


def test_another_vocabulary_is_another_cache_entry(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    plain = gguf_tokenizer(GGUFFile(byte_level(tmp_path)), cache)
    path = byte_level(tmp_path, merges=["h e"])
    assert gguf_tokenizer(GGUFFile(path), cache).encode("hello") != plain.encode("hello")
    assert len(list((cache / "tokenizers").iterdir())) == 2


def test_a_cache_that_cannot_be_written_is_no_fault(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("a file where the folder should be")
    assert gguf_tokenizer(GGUFFile(byte_level(tmp_path)), blocked).encode("hello")
