"""Small real tokenizers of each decoder family, made in milliseconds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

TEXT = [
    'The quick brown fox jumps over the lazy dog. {"name": "value", "n": 12}',
    "Grüße aus Köln, naïve café; 日本語のテキスト 🙂🙃 and emoji 👩‍👩‍👧‍👦 — done.\n\nNew   line\tstop STOP ###",
] * 4
SPECIAL = ["<s>", "</s>", "<|im_start|>"]


@dataclass(frozen=True)
class Boxed:
    """Looks like `model.load.Tokenizer` to the code under test."""

    backend: Tokenizer
    eos_ids: frozenset[int]

    @property
    def vocab_size(self) -> int:
        return self.backend.get_vocab_size()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)


def _box(tokenizer: Tokenizer) -> Boxed:
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIAL])
    tokenizer.add_tokens([AddedToken("two words", normalized=False)])
    return Boxed(tokenizer, frozenset({tokenizer.token_to_id("</s>")}))


@cache
def byte_level() -> Boxed:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(TEXT, trainer)
    return _box(tokenizer)


def _piece_vocab() -> dict[str, int]:
    pieces = ["<unk>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += ["▁"] + sorted({c for line in TEXT for c in line if c.isascii() and c not in " \n\t"})
    pieces += ["▁T", "he", "▁the", "▁The", "▁▁", "ST", "OP", "▁qu", "ick", "é", "語"]
    return {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}


@cache
def pieces(strip: bool) -> Boxed:
    """SentencePiece with byte fallback: with a stripped prefix space (Llama 2) or without (Gemma)."""
    merges = [("▁", "T"), ("h", "e"), ("▁", "▁"), ("S", "T"), ("O", "P"), ("▁T", "he")]
    tokenizer = Tokenizer(models.BPE(vocab=_piece_vocab(), merges=merges, byte_fallback=True, unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    before: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
    if strip:
        steps.append(decoders.Strip(" ", 1, 0))
        before.insert(0, normalizers.Prepend("▁"))
        before.reverse()
    tokenizer.normalizer = normalizers.Sequence(before)
    tokenizer.decoder = decoders.Sequence(steps)
    return _box(tokenizer)


@cache
def metaspace() -> Boxed:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(
        TEXT, trainers.UnigramTrainer(vocab_size=150, unk_token="<unk>", special_tokens=["<unk>"])
    )
    return _box(tokenizer)


@cache
def wordpiece() -> Boxed:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.train_from_iterator(TEXT, trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]"]))
    return _box(tokenizer)


def zoo() -> dict[str, Boxed]:
    return {
        "byte_level": byte_level(),
        "gemma_like": pieces(False),
        "llama2_like": pieces(True),
        "metaspace": metaspace(),
        "wordpiece": wordpiece(),
    }
