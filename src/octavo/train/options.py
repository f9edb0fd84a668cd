"""Options of `octavo train-draft`, checked; no torch here."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError

ALGORITHMS = ("eagle3", "dflash", "table")
_OF_TABLES = ("order", "min_count", "min_probability")
_OF_NETWORKS = (
    "epochs", "minutes", "unroll", "draft_vocab", "layers", "features", "intermediate", "block_size", "anchors",
    "batch_tokens", "max_tokens", "learning_rate", "train_dtype",
)  # fmt: skip


@dataclass(frozen=True)
class TrainOptions:
    """Everything a training run depends on. Paths may be strings. Raises ConfigError naming option and value."""

    algorithm: str
    out: Path
    target: str = "smollm2"
    data: Path | None = None  # corpus file; built there if it is not complete
    init: Path | None = None  # draft whose weights and vocabulary training starts from
    answer_tokens: int = 500_000
    seed: int = 1
    epochs: int = 2
    minutes: float | None = None
    unroll: int = 4
    draft_vocab: int = 8192
    layers: int = 2
    features: int = 3
    intermediate: int | None = None
    block_size: int = 8
    anchors: int = 24
    order: int = 3
    min_count: int = 2
    min_probability: float = 0.15
    batch_tokens: int = 2048
    max_tokens: int = 512
    learning_rate: float = 1e-3
    train_dtype: str = "float32"
    max_question_tokens: int = 160
    max_answer_tokens: int = 256
    generate_batch: int = 32
    generate_minutes: float | None = None
    held_out: int = 40
    prompts: Path | None = None
    cache_dir: Path | None = None
    threads: int | None = None
    quantization: str = "auto"
    dtype: str | None = None
    measure: bool = True
    default: bool = False  # mark the shipped draft as the one `--draft auto` takes

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS:
            raise ConfigError("algorithm", self.algorithm, "eagle3, dflash or table")
        for name in ("out", "data", "init", "prompts", "cache_dir"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, Path(value).expanduser())
        if self.train_dtype not in ("float32", "bfloat16"):
            raise ConfigError("train_dtype", self.train_dtype, "float32 or bfloat16")
        at_least = {
            "answer_tokens": 1, "epochs": 1, "unroll": 1, "draft_vocab": 16, "layers": 1, "features": 1,
            "block_size": 2, "anchors": 1, "min_count": 1, "batch_tokens": 16, "max_tokens": 8,
            "generate_batch": 1, "held_out": 0, "max_question_tokens": 4, "max_answer_tokens": 4,
        }  # fmt: skip
        for name, least in at_least.items():
            if getattr(self, name) < least:
                raise ConfigError(name, getattr(self, name), f"at least {least}")
        for name in ("minutes", "generate_minutes"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(name, value, "above 0")
        if not 0 < self.learning_rate < 1:
            raise ConfigError("learning_rate", self.learning_rate, "between 0 and 1")
        if self.intermediate is not None and self.intermediate < 1:
            raise ConfigError("intermediate", self.intermediate, "at least 1")
        if not 1 <= self.order <= 3:
            raise ConfigError("order", self.order, "1 to 3")
        if not 0 <= self.min_probability <= 1:
            raise ConfigError("min_probability", self.min_probability, "0 to 1")
        if self.block_size > 64:
            raise ConfigError("block_size", self.block_size, "2 to 64")

    def card(self) -> dict[str, Any]:
        """What is kept with the draft: every option that shaped it. An earlier draft's shape is its own."""
        shaping = self.shaping()
        if self.init is not None and self.algorithm != "table":
            for name in ("draft_vocab", "layers", "features", "intermediate", "block_size"):
                del shaping[name]
        return shaping

    def shaping(self) -> dict[str, Any]:
        """Every option that the result depends on."""
        shaping = asdict(self)
        for name in ("out", "data", "init", "cache_dir", "prompts", "threads", "measure", "default"):
            del shaping[name]
        for name in _OF_NETWORKS if self.algorithm == "table" else _OF_TABLES:
            del shaping[name]
        return shaping


_HELP = {
    "target": "model to draft for: a known name, a .gguf file, a safetensors folder or a hub id",
    "data": "corpus file (.npz); gone on with if it is there, else made by self-prompting",
    "init": "folder of an earlier draft to go on from: its weights, shape and vocabulary",
    "answer_tokens": "answer tokens the corpus should have",
    "seed": "of data, initial weights and order",
    "epochs": "passes over the corpus",
    "minutes": "stop training after so many minutes; the learning rate falls accordingly",
    "unroll": "EAGLE-3: steps of the training-time test",
    "draft_vocab": "most frequent answer tokens that training looks at (EAGLE-3: the draft's vocabulary)",
    "layers": "DFlash: decoder layers",
    "features": "DFlash: hidden states of the target it sees",
    "intermediate": "width of the draft's MLP (the target's if not given)",
    "block_size": "DFlash: tokens of a block, anchor included",
    "anchors": "DFlash: blocks trained per text and epoch",
    "order": "table: tokens of the longest context",
    "min_count": "table: phrases that the target wrote less often are left out",
    "min_probability": "table: a draft ends where the chance that all of it is right falls below this",
    "batch_tokens": "padded tokens of a batch",
    "max_tokens": "longest text; what is beyond is cut off",
    "learning_rate": "peak of the schedule",
    "train_dtype": "type of training's matrix products, float32 or bfloat16 (twice as fast where the processor has "
    "bf16 instructions; weights, sums of gradients and the loss stay float32)",
    "max_question_tokens": "longest question; one that does not end by then is dropped",
    "max_answer_tokens": "longest answer; it is cut off there",
    "generate_batch": "questions asked at once while the corpus is made",
    "generate_minutes": "stop making the corpus after so many minutes",
    "held_out": "texts kept for evaluation",
    "prompts": "folder of benchmark prompts (JSON lines): excluded from the data, used for the final measurement",
    "cache_dir": "where features and checkpoints live; may be deleted",
    "threads": "threads of training and of the engine",
    "quantization": "weights of the target: auto, none, int8 or int4, as they will be served",
    "dtype": "activations of the target, as they will be served",
    "measure": "measure the served accept length at the end",
    "default": "mark the draft as the one that --draft auto takes",
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `octavo train-draft`, one for each option."""
    parser.add_argument("--algorithm", required=True, choices=ALGORITHMS, help="which kind of draft")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder the draft is written to")
    kinds: dict[str, type] = {"int": int, "float": float, "str": str}
    for field in fields(TrainOptions):
        if field.name not in _HELP:
            continue
        flag = "--" + field.name.replace("_", "-")
        if field.type == "bool":
            action = argparse.BooleanOptionalAction
            parser.add_argument(flag, action=action, default=field.default, help=_HELP[field.name])
            continue
        base = str(field.type).split(" ")[0]
        shown = "" if field.default is None else f" (default {field.default})"
        metavar = {"int": "N", "float": "X", "str": "TEXT"}.get(base, "PATH")
        parser.add_argument(
            flag, type=kinds.get(base, str), default=field.default, metavar=metavar, help=_HELP[field.name] + shown
        )


def from_args(args: argparse.Namespace) -> TrainOptions:
    return TrainOptions(**{field.name: getattr(args, field.name) for field in fields(TrainOptions)})
