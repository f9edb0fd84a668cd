"""Drafts with weights: from the options to a checked plan, and from the plan to a drafter bound to a network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from octavo.config import DRAFTS
from octavo.errors import ConfigError, ModelError
from octavo.kv.sizing import DecodeReserve
from octavo.model.config import ModelConfig, RopeConfig
from octavo.model.rope import rope_tables
from octavo.ops.weights import Kind, Matrix, read_matrix
from octavo.spec import draft_config
from octavo.spec.checkpoint import DraftWeights, load_draft
from octavo.spec.dflash import DFlashDrafter, check_block
from octavo.spec.draft_config import DFlashConfig
from octavo.spec.draft_layers import DraftTarget
from octavo.spec.drafter import Drafter
from octavo.spec.eagle import EagleDrafter, check_eagle, default_nodes

if TYPE_CHECKING:
    from octavo.config import EngineConfig
    from octavo.model.load.loader import LoadedModel
    from octavo.model.load.source import TensorSource
    from octavo.spec.choose import Bound, DraftPlan

EAGLE_STEPS = 3


def algorithm_of(path: str | Path) -> str:
    """ "eagle3", "dflash" or "table" as a draft's config says. Raises ModelError naming the file."""
    file, data = draft_config.read_draft_json(path)
    try:
        return draft_config.algorithm_of(data)
    except ModelError as error:
        raise ModelError(str(error), file=file) from error


def shipped_folders() -> list[Path]:
    """Folders of the drafts that come with Octavo."""
    root = Path(__file__).resolve().parent.parent / "drafts"
    return sorted(config.parent for config in root.glob("*/config.json"))


def one_may_ship_for(target: ModelConfig) -> bool:
    """Whether a shipped draft has the target's shape. Its hash decides, and costs reading the whole file."""
    for folder in shipped_folders():
        data = json.loads((folder / "config.json").read_text())
        if (data.get("hidden_size"), data.get("vocab_size")) == (target.hidden_size, target.vocab_size):
            return True
    return False


def shipped_draft(target_sha256: str | None, algorithm: str | None = None) -> Path | None:
    """The shipped draft of one algorithm for this very target. Without `algorithm` the one marked as the default:
    a draft is marked where it was measured to be faster than n-gram look-up."""
    if target_sha256 is None:
        return None
    for folder in shipped_folders():
        data = json.loads((folder / "config.json").read_text())
        if data.get("target_sha256") != target_sha256:
            continue
        marked = bool((data.get("octavo") or {}).get("default", False))
        if marked if algorithm is None else draft_config.algorithm_of(data) == algorithm:
            return folder
    return None


def plan_learned(name: str, config: EngineConfig, loaded: LoadedModel) -> DraftPlan:
    """An EAGLE-3 or DFlash draft, loaded and checked. Raises ConfigError, ModelError, ValueError (block size)."""
    if name not in ("eagle3", "dflash"):
        raise ConfigError("draft", name, f"{', '.join(DRAFTS)} or module:Class")
    weights = _weights(name, config, loaded)
    if isinstance(weights.config, DFlashConfig):
        return _plan_dflash(weights, config, loaded)
    return _plan_eagle(weights, config, loaded)


def draft_path(name: str, config: EngineConfig, loaded: LoadedModel) -> str | Path:
    """The draft to take for an algorithm: the one given, else the one that ships. Raises ConfigError, ModelError."""
    path: str | Path | None = config.draft_model
    if path is None:
        path = shipped_draft(loaded.sha256, name)
        if path is None:
            raise ConfigError(
                "draft_model", None, f"no {name} draft ships for {loaded.name}: give one, or train it (train-draft)"
            )
    found = algorithm_of(path)
    if found != name:
        raise ConfigError("draft", name, f"{path} holds a draft for {found}")
    return path


def _weights(name: str, config: EngineConfig, loaded: LoadedModel) -> DraftWeights:
    return load_draft(draft_path(name, config, loaded), loaded.config, loaded.sha256)


def _plan_eagle(weights: DraftWeights, config: EngineConfig, loaded: LoadedModel) -> DraftPlan:
    from octavo.spec.choose import DraftPlan, check_room

    top_k = 1 if config.draft_topk is None else config.draft_topk
    steps = config.draft_steps
    if steps is None:
        steps = EAGLE_STEPS if config.draft_tokens is None or top_k > 1 else max(1, config.draft_tokens - 1)
    nodes = default_nodes(steps, top_k) if config.draft_tokens is None else config.draft_tokens
    check_eagle(steps, top_k, nodes, weights.config.draft_vocab_size)
    check_room(max(steps * top_k, nodes), config, loaded)

    def make(bound: Bound) -> Drafter:
        target = bind_target(bound.network, loaded.tensors, max_tokens=bound.max_tokens, device=bound.device)
        return EagleDrafter(weights, target, steps=steps, top_k=top_k, draft_tokens=nodes, max_rows=bound.max_rows)

    shape = f"chain of {steps}" if top_k == 1 else f"tree of {nodes} nodes, {steps} steps, top {top_k}"
    return DraftPlan(
        "eagle3",
        DecodeReserve.eagle(steps=steps, topk=top_k, draft_tokens=nodes, overlap=config.overlap_on),
        kv_layers=1,
        key_mode="pair",
        make=make,
        description=f"EAGLE-3, {shape} ({_where(weights)})",
    )


def _plan_dflash(weights: DraftWeights, config: EngineConfig, loaded: LoadedModel) -> DraftPlan:
    from octavo.spec.choose import DraftPlan, check_room

    trained = weights.config
    if not isinstance(trained, DFlashConfig):
        raise TypeError("a DFlash draft is needed")
    size = trained.block_size if config.draft_tokens is None else config.draft_tokens
    check_block(size, trained.block_size)
    check_room(trained.block_size, config, loaded)

    def make(bound: Bound) -> Drafter:
        target = bind_target(bound.network, loaded.tensors, max_tokens=bound.max_tokens, device=bound.device)
        return DFlashDrafter(weights, target, block_size=size, max_rows=bound.max_rows)

    return DraftPlan(
        "dflash",
        DecodeReserve.dflash(block_size=trained.block_size, overlap=config.overlap_on),
        kv_layers=trained.num_layers,
        key_mode="token",
        make=make,
        description=f"DFlash, block of {size} ({_where(weights)})",
    )


def _where(weights: DraftWeights) -> str:
    return "random" if weights.path is None else str(weights.path.parent.name)


def bind_target(
    network: Any, tensors: TensorSource, *, max_tokens: int, device: torch.device, kind: Kind | None = None
) -> DraftTarget:
    """What a draft needs of a built network (model/registry.py) and of its checkpoint.

    `max_tokens` sizes the draft's position tables (context plus reserve). The draft's own weights are kept as int8
    where compiled operations run, else in the dtype of the activations; `kind` overrides that.
    """
    native = not str(network.ops.name).startswith("torch")
    dtype = torch.float32 if native else network.dtype
    if kind is None:
        kind = "int8" if native else ("fp32" if dtype == torch.float32 else "bf16")
    head = "lm_head.weight" if "lm_head.weight" in tensors.names() else "model.embed_tokens.weight"
    store = kind

    def head_rows(ids: torch.Tensor) -> Matrix:
        return _rows(tensors, head, ids, store)

    def rope(config: RopeConfig, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        return rope_tables(config, head_dim, max_tokens)

    return DraftTarget(network, network.ops, head_rows, rope, kind, dtype, device)


def _rows(tensors: Any, name: str, ids: torch.Tensor, kind: Kind) -> Matrix:
    """Rows `ids` of a weight in `kind`: the file's own int8 codes where it has them."""
    if kind == "int8" and tensors.shape(name)[1] % 32 == 0:
        whole = read_matrix(tensors, name, "int8")
        pick = ids.numpy()
        if whole.codes is not None and whole.scale is not None:
            minimum = None if whole.minimum is None else whole.minimum[pick]
            return Matrix("int8", len(pick), whole.in_features, whole.codes[pick], whole.scale[pick], minimum)
    rows = tensors.tensor(name).index_select(0, ids)
    dense = rows.to(torch.bfloat16) if kind == "bf16" else rows.float()
    return Matrix("bf16" if kind == "bf16" else "fp32", rows.shape[0], rows.shape[1], dense=dense.contiguous())
