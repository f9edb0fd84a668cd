"""Which drafter an engine gets, and what it means for the books: decided before weights are read."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from octavo.errors import ConfigError, OctavoError
from octavo.kv.sizing import DecodeReserve
from octavo.spec.checked import CheckedDrafter
from octavo.spec.draft_config import MAX_DRAFT_LAYERS
from octavo.spec.drafter import Drafter
from octavo.spec.lookup_first import LookupFirstDrafter, no_tree
from octavo.spec.ngram import NgramDrafter
from octavo.spec.scripted import Script, ScriptedDrafter
from octavo.spec.verify import MAX_NODES

if TYPE_CHECKING:
    from octavo.config import EngineConfig
    from octavo.model.load.loader import LoadedModel

NGRAM_DRAFT_TOKENS = 5
SCRIPTED_DRAFT_TOKENS = 4


@dataclass(frozen=True)
class Bound:
    """What a drafter is bound to: the network, row count, longest row in tokens (reserve included), device."""

    network: Any
    max_rows: int
    max_tokens: int
    device: torch.device


@dataclass(frozen=True)
class DraftPlan:
    """A drafter to be: what the books must know of it, and how to make it once the network exists."""

    name: str
    reserve: DecodeReserve
    kv_layers: int = 0
    key_mode: str = "token"
    make: Callable[[Bound], Drafter | None] = lambda bound: None
    description: str = "none"


def plan_draft(config: EngineConfig, loaded: LoadedModel) -> DraftPlan:
    """Read the draft options. Raises ConfigError for a combination that cannot work, ModelError for a bad draft."""
    name = _resolve(config, loaded)
    _check_tree_options(name, config)
    overlap = config.overlap_on
    if name == "none":
        return DraftPlan("none", DecodeReserve.plain(overlap=overlap))
    if name == "ngram":
        count = _drafted(NGRAM_DRAFT_TOKENS, config, loaded)
        corpus = _corpus(config, loaded)
        beside = f" and {sum(map(len, corpus))} tokens of {Path(config.draft_model or '').name}" if corpus else ""
        return DraftPlan(
            "ngram",
            DecodeReserve.ngram(max_draft=count, overlap=overlap),
            make=lambda bound: NgramDrafter(draft_tokens=count, corpus=corpus),
            description=f"n-gram, up to {count} tokens, from the request's own text{beside}",
        )
    if name == "scripted":
        return _scripted(config, loaded)
    if ":" in name:
        return _custom(name, config, loaded)
    if name.startswith("ngram+"):
        return _lookup_first(_from_a_file(name.removeprefix("ngram+"), config, loaded), config, loaded)
    return _from_a_file(name, config, loaded)


def _check_tree_options(name: str, config: EngineConfig) -> None:
    """Steps and width of a tree are for EAGLE-3 and scripts. Raises ConfigError where nobody would heed them."""
    if name in ("none", "scripted") or name.endswith("eagle3"):
        return
    for option, value in (("draft_steps", config.draft_steps), ("draft_topk", config.draft_topk)):
        if value is not None and (option, value) != ("draft_topk", 1):
            raise ConfigError(option, value, f"only with --draft eagle3; this engine drafts with {name} "
                              "(--draft-tokens says how many tokens)")


def _from_a_file(name: str, config: EngineConfig, loaded: LoadedModel) -> DraftPlan:
    """A draft that is a folder with a configuration: one with weights, or a table of phrases."""
    from octavo.spec.learned import draft_path, plan_learned

    if name != "table":
        return plan_learned(name, config, loaded)
    from octavo.spec.table import plan_table

    path = draft_path(name, config, loaded)
    vocab = loaded.config.vocab_size
    count = _drafted(NGRAM_DRAFT_TOKENS, config, loaded)
    return plan_table(path, count, vocab, loaded.sha256, overlap=config.overlap_on)


def check_room(draft_tokens: int, config: EngineConfig, loaded: LoadedModel) -> None:
    """Raise ConfigError if a step's rows cannot fit the context at all."""
    context = config.max_model_len or loaded.config.context_tokens
    if draft_tokens >= context:
        raise ConfigError("draft_tokens", draft_tokens, f"below the context of {context} tokens")


def _drafted(usual: int, config: EngineConfig, loaded: LoadedModel) -> int:
    """Tokens drafted at most by a drafter without weights. `draft_tokens` counts the root, as for every algorithm."""
    if config.draft_tokens is None:
        return usual
    if config.draft_tokens < 2:
        raise ConfigError("draft_tokens", config.draft_tokens, "at least 2 (the root included)")
    check_room(config.draft_tokens, config, loaded)
    return config.draft_tokens - 1


def _lookup_first(learned: DraftPlan, config: EngineConfig, loaded: LoadedModel) -> DraftPlan:
    """Prompt lookup before another draft: one reserve that is enough for either."""
    count = _drafted(NGRAM_DRAFT_TOKENS, config, loaded)
    if config.draft_topk is not None and config.draft_topk > 1:
        raise no_tree(config.draft_topk)
    lookup = DecodeReserve.ngram(max_draft=count, overlap=config.overlap_on)
    both = DecodeReserve(
        max(lookup.footprint, learned.reserve.footprint), max(lookup.commit_lag, learned.reserve.commit_lag)
    )

    def make(bound: Bound) -> Drafter:
        return LookupFirstDrafter(NgramDrafter(draft_tokens=count), learned.make(bound))

    description = f"n-gram, up to {count} tokens, else {learned.description}"
    return replace(learned, name=f"ngram+{learned.name}", reserve=both, make=make, description=description)


def _resolve(config: EngineConfig, loaded: LoadedModel) -> str:
    """`auto`: n-gram, and where nothing matches the shipped draft of this very target if one is marked as the default.

    Looking up needs the newest tokens on the host, so with overlap a draft with weights is alone. A table of phrases
    needs them as well: it is never alone."""
    if config.draft != "auto":
        return config.draft
    from octavo.spec.learned import algorithm_of, one_may_ship_for, shipped_draft

    if config.draft_model is not None:
        algorithm = algorithm_of(config.draft_model)
        return f"ngram+{algorithm}" if algorithm == "table" else algorithm

    if one_may_ship_for(loaded.config):  # the target is hashed only where a draft could be for it
        shipped = shipped_draft(loaded.sha256)
        if shipped is not None:
            algorithm = algorithm_of(shipped)
            return algorithm if config.overlap_on and algorithm != "table" else f"ngram+{algorithm}"
    return "ngram"


def _corpus(config: EngineConfig, loaded: LoadedModel) -> list[list[int]]:
    """The shared text of n-gram drafts (`--draft-model FILE`): paragraphs, as the request's tokenizer reads them."""
    if config.draft_model is None:
        return []
    try:
        text = Path(config.draft_model).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        allowed = "for n-gram drafts a UTF-8 text file is allowed, whose paragraphs are looked up too"
        raise ConfigError("draft_model", config.draft_model, f"{allowed} ({error})") from None
    paragraphs = [part for part in text.split("\n\n") if part.strip()]
    encoded = [loaded.tokenizer.encode(part, add_special_tokens=False) for part in paragraphs]
    return [ids for ids in encoded if len(ids) > 1]


def _scripted(config: EngineConfig, loaded: LoadedModel) -> DraftPlan:
    """Drafts from a script file (`--draft-model FILE`), or always wrong ones: for tests and for measuring cost."""
    levels = _drafted(SCRIPTED_DRAFT_TOKENS, config, loaded)
    width = config.draft_topk or 1
    levels = config.draft_steps if config.draft_steps is not None and width > 1 else levels
    script = Script.from_file(config.draft_model) if config.draft_model is not None else Script()
    vocab = loaded.config.vocab_size

    def make(bound: Bound) -> Drafter:
        return ScriptedDrafter(
            script,
            draft_tokens=levels,
            vocab_size=vocab,
            max_rows=bound.max_rows,
            max_tokens=bound.max_tokens,
            width=width,
            device=bound.device,
        )

    nodes = levels * width + 1
    lag = nodes if width == 1 else levels + 1
    reserve = DecodeReserve(nodes, lag if config.overlap_on else 0)
    return DraftPlan("scripted", reserve, make=make, description=f"scripted, {levels} levels of {width}")


def _custom(path: str, config: EngineConfig, loaded: LoadedModel) -> DraftPlan:
    """`module:Class`, made as Class(draft_tokens=…, vocab_size=…); see examples/drafter.py."""
    module, _, name = path.partition(":")
    try:
        cls = getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever a module of somebody else raises while it is imported
        raise ConfigError("draft", path, f"cannot be imported: {type(error).__name__}: {error}") from error
    count = _drafted(SCRIPTED_DRAFT_TOKENS, config, loaded)
    try:
        drafter = cls(draft_tokens=count, vocab_size=loaded.config.vocab_size)
    except OctavoError:
        raise
    except Exception as error:  # another signature, one of the four methods is missing, or a fault of its own
        allowed = "a class that can be made as Class(draft_tokens=…, vocab_size=…), like examples/drafter.py"
        raise ConfigError("draft", path, f"{allowed} ({type(error).__name__}: {error})") from error
    names = (*Drafter.__annotations__, "begin", "propose", "observe", "end")
    missing = ", ".join(name for name in names if not hasattr(drafter, name))
    if missing:
        raise ConfigError("draft", path, f"an octavo.spec.drafter.Drafter is needed; it lacks {missing}")
    _check_numbers(drafter, path, loaded.config.num_layers)
    lag = drafter.commit_lag_tokens if config.overlap_on else 0
    return DraftPlan(
        path,
        DecodeReserve(drafter.footprint_tokens, lag),
        drafter.kv_layers,
        drafter.key_mode,
        make=lambda bound: cast(Drafter, CheckedDrafter(drafter, path, loaded.config.vocab_size)),
        description=f"{path}, up to {drafter.max_draft_tokens} tokens",
    )


def _check_numbers(drafter: Drafter, path: str, num_layers: int) -> None:
    """What the books are told must be what a step can do. Raises ConfigError."""

    def whole(name: str, least: int, most: int | None = None) -> int:
        value: object = getattr(drafter, name)
        if type(value) is not int or value < least or (most is not None and value > most):
            allowed = f"a whole number from {least}" + ("" if most is None else f" to {most}")
            raise ConfigError("draft", path, f"{name} of a drafter is {allowed}, got {value!r}")
        return value

    drafted = whole("max_draft_tokens", 1, MAX_NODES - 1)
    depth = whole("max_depth", 1, drafted)
    whole("footprint_tokens", drafted + 1)  # the root is written too
    whole("commit_lag_tokens", depth + 1)  # the bonus token is committed too
    whole("kv_layers", 0, MAX_DRAFT_LAYERS)
    if drafter.key_mode not in ("token", "pair"):
        raise ConfigError("draft", path, f"key_mode of a drafter is 'token' or 'pair', got {drafter.key_mode!r}")
    taps: object = drafter.taps
    if not isinstance(taps, tuple) or any(type(tap) is not int or not 0 <= tap <= num_layers for tap in taps):
        raise ConfigError("draft", path, f"taps of a drafter are hidden states 0 to {num_layers}, got {taps!r}")
