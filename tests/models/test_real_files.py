"""The two real models' files: their vocabularies give the ids of transformers, their headers the right models."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from octavo.model.load import LoadedModel, load_model

pytestmark = pytest.mark.models

TEXTS = [
    "Hello, world!", "  leading and  double  ", "a\n\n\nb\t\tx\r\n", "def f(x):\n    return x + 1  # 42\n",
    "naïve café, 漢字かな交じり文, Ελλάδα, עברית",
    "🙂👩‍👩‍👧‍👦", "don't I'll WE'RE they'd", "x² + 3,141.59 =½", "\u200b\xa0 nbsp",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>", "<start_of_turn>user\nhi<end_of_turn>\n<table><tr>", "", " ", "\n",
    "z" * 400, "\x00\x07\x7f", "e\u0301 é ﬁ", "{\"a\": [1, 2, {\"b\": null}]}", "https://example.org/a?b=c&d=%20#e",
]  # fmt: skip
PIECES = [" ", "  ", "\n", "\t", "a", "the", "ing", "Paris", "9", "12", ".", "!", "é", "漢", "🙂", "'s", "<", "|",
          "\u0301", "\r\n", "_", "Ж", "<|im_end|>", "<eos>", "\xa0"]  # fmt: skip


def texts(spaces_before_digits: bool) -> list[str]:
    rng = random.Random(11)
    made = ["".join(rng.choice(PIECES) for _ in range(rng.randint(1, 50))) for _ in range(300)]
    return TEXTS + [text for text in made if spaces_before_digits or not blank_before_digit(text)]


def blank_before_digit(text: str) -> bool:
    """transformers leaves out SmolLM's digit splitting when it reads a GGUF: it differs behind more than one blank."""
    return any(a.isspace() and b.isspace() and c.isdigit() for a, b, c in zip(text, text[1:], text[2:], strict=False))


@pytest.fixture(scope="module")
def smollm2() -> LoadedModel:
    return load_model("smollm2")


def compare(loaded: LoadedModel, *, spaces_before_digits: bool) -> None:
    from transformers import AutoTokenizer

    path = Path(loaded.path)
    reference = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    for text in texts(spaces_before_digits):
        ids = loaded.tokenizer.encode(text)
        assert ids == reference.encode(text), text
        for skip in (True, False):
            back = loaded.tokenizer.decode(ids, skip_special_tokens=skip)
            assert back == reference.decode(ids, skip_special_tokens=skip), text
    assert loaded.tokenizer.eos_id == reference.eos_token_id
    if reference.chat_template:
        chat = [{"role": "user", "content": "Hi <b> & 'x'"}, {"role": "assistant", "content": "Yes."}]
        for prompt in (True, False):
            want = reference.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt)
            assert loaded.tokenizer.apply_chat_template(chat, add_generation_prompt=prompt) == want
            ids = reference.apply_chat_template(chat, add_generation_prompt=prompt, return_dict=False)
            assert loaded.tokenizer.encode_chat(chat, add_generation_prompt=prompt) == list(ids)


def test_smollm2_tokenizer(smollm2: LoadedModel) -> None:
    compare(smollm2, spaces_before_digits=False)
    assert smollm2.tokenizer.eos_ids == {0, 2}  # <|endoftext|> and <|im_end|>
    assert not smollm2.tokenizer.adds_bos
    # What the model was trained with: digits one by one, blanks before them together.
    assert smollm2.tokenizer.encode("  12", add_special_tokens=False) == [256, 33, 34]


def test_smollm2_description(smollm2: LoadedModel) -> None:
    config = smollm2.config
    assert smollm2.format == "GGUF Q4_1" and smollm2.name == "smollm2"
    assert (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads) == (30, 576, 9, 3)
    assert (config.head_dim, config.vocab_size, config.context_tokens) == (64, 49152, 8192)
    assert config.tie_embeddings and config.rope.theta == 100000.0


def test_every_matrix_of_smollm2_has_its_groups(smollm2: LoadedModel) -> None:
    source = smollm2.tensors
    for name in source.names():
        groups = source.groups32(name)
        if len(source.shape(name)) == 1:
            assert groups is None
            continue
        assert groups is not None
        assert torch.equal(torch.from_numpy(groups.dequantize()), source.tensor(name)), name


def test_the_cached_conversion_is_the_conversion(smollm2: LoadedModel, tmp_path: Path) -> None:
    fresh = load_model(smollm2.path, cache_dir=tmp_path)
    cached = load_model(smollm2.path, cache_dir=tmp_path)
    assert json.loads(fresh.tokenizer.backend.to_str()) == json.loads(cached.tokenizer.backend.to_str())


def gemma() -> Path | None:
    from octavo.model.load.cache import cache_folder
    from octavo.model.load.packages import KNOWN_MODELS, is_cached, known_path

    model = KNOWN_MODELS["gemma3-270m"]
    return known_path(model, cache_folder()) if is_cached(model, cache_folder()) else None


if gemma() is not None:  # its terms have to be accepted by whoever runs this: it is fetched for nobody

    def test_gemma3_tokenizer() -> None:
        loaded = load_model("gemma3-270m")
        compare(loaded, spaces_before_digits=True)
        assert loaded.tokenizer.eos_ids == {1, 106}  # <eos> and <end_of_turn>
        assert loaded.tokenizer.encode("Hi")[0] == loaded.tokenizer.bos_id == 2
        assert loaded.chat_template is None

    def test_gemma3_description() -> None:
        loaded = load_model("gemma3-270m")
        config = loaded.config
        assert (config.architecture, config.num_layers, config.head_dim, config.num_kv_heads) == ("gemma3", 18, 256, 1)
        assert [i for i, w in enumerate(config.windows) if w is None] == [5, 11, 17]
        assert config.window_tokens == 512
        assert config.rope.theta == 1e6 and config.rope_local is not None and config.rope_local.theta == 1e4
        assert config.attention_scale == 256**-0.5 and config.embed_scale == 640**0.5
