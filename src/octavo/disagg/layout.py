"""What this server's pages look like: compared at the handshake, and where they lie in memory."""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.disagg.protocol import VERSION, Layout, Region
from octavo.ops.weights import storage_kind
from octavo.spec.drafter import kv_owner

if TYPE_CHECKING:
    from octavo.engine.setup import Parts
    from octavo.model.load.loader import LoadedModel

_SAMPLES, _SAMPLE_BYTES = 16, 256  # of each tensor


def fingerprint(loaded: LoadedModel) -> str:
    """16 hex digits that tell models apart, whatever they are called and however their files are cut: the
    configuration, and of every tensor name, type, shape and some of its stored bytes, from one end to the other."""
    digest = hashlib.blake2b(repr(loaded.config).encode(), digest_size=8)
    source = loaded.tensors
    for name in sorted(source.names()):
        digest.update(f"{name} {source.kind(name)} {source.shape(name)}".encode())
        stored = source.stored(name)
        for at in np.linspace(0, max(0, len(stored) - _SAMPLE_BYTES), _SAMPLES).astype(np.int64).tolist():
            digest.update(stored[at : at + _SAMPLE_BYTES].tobytes())
    return digest.hexdigest()


def arithmetic(loaded: LoadedModel, quantization: Any, dtype: Any) -> str:
    """What the weights are computed in, e.g. "float32: int4 × 210, int8 × 1": as asked for, whatever kernels a machine
    has for it."""
    names = [name for name in loaded.tensors.names() if len(loaded.tensors.shape(name)) == 2]
    kinds = Counter(storage_kind(loaded.tensors, name, quantization, dtype) for name in names)
    shown = ", ".join(f"{kind} × {count}" for kind, count in sorted(kinds.items()))
    return f"{str(dtype).removeprefix('torch.')}: {shown}"


def draft_identity(drafter: Any) -> str:
    """A name for drafts that keep KV or a seed in what travels; "none" for the others."""
    if drafter is None or not drafter.needs_draft_kv:
        return "none"
    owner = kv_owner(drafter)
    digest = hashlib.blake2b(repr(owner.config).encode(), digest_size=6)
    return f"{owner.name}-{digest.hexdigest()}-{owner.identity}"


def layout_of(parts: Parts) -> Layout:
    """The layout of built parts."""
    network, ledger = parts.runner.network, parts.ledger
    return Layout(
        version=VERSION,
        model=parts.model_name,
        weights=str(parts.info.get("fingerprint", "")),
        arithmetic=str(parts.info["arithmetic"]),
        page_size=ledger.page_size,
        kv_dtype=str(network.kv_dtype).removeprefix("torch."),
        full_layers=network.host_page_layers,
        swa_layers=network.swa_layers,
        kv_heads=network.config.num_kv_heads,
        head_dim=network.config.head_dim,
        window_tokens=ledger.config.window_tokens,
        draft=draft_identity(parts.drafter),
        byte_order=sys.byteorder,
    )


def regions_of(parts: Parts) -> dict[str, Region]:
    """The pools that have bytes. A page is one contiguous block over all layers of its pool (page-first).

    With HiSparse full pages are those of the host tier: they hold the same layers in the same order."""
    out = {}
    kv = parts.runner.kv
    for name, pool in (("full", kv.full if kv.sparse is None else kv.sparse.host), ("swa", kv.swa)):
        if pool is not None:
            out[name] = Region(pool.data_ptr(), pool.stride(0) * pool.element_size(), pool.shape[0])
    return out


def seed_bytes(drafter: Any, row: int) -> bytes | None:
    """What a row's next proposal starts from, as float32 bytes; None for drafters without such a thing."""
    export = getattr(kv_owner(drafter), "export_seed", None)
    if export is None:
        return None
    values: np.ndarray = export(row).float().cpu().numpy()
    return values.tobytes()


def seed_size_bytes(drafter: Any) -> int | None:
    """What `seed_bytes` is long; None for drafters without a seed."""
    seed = seed_bytes(drafter, 0)
    return None if seed is None else len(seed)


def import_seed(drafter: Any, row: int, seed: bytes | None) -> None:
    """Give a row the seed that `seed_bytes` made on another server."""
    take = getattr(kv_owner(drafter), "import_seed", None)
    if take is None or seed is None:
        return
    import torch

    take(row, torch.from_numpy(np.frombuffer(seed, np.float32).copy()))
