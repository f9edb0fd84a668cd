"""Sizes of HiSparse's tiers: how the given memory becomes device slots, dense pages, window pages and a host tier."""

from __future__ import annotations

import importlib
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from octavo import hardware
from octavo.backend.host_tier import HostTier
from octavo.config import EngineConfig
from octavo.engine.setup_pools import explicit_pools
from octavo.errors import ConfigError
from octavo.kv.pages import ceil_pages
from octavo.kv.sizing import DecodeReserve, PoolSizes, pool_sizes, row_width_pages
from octavo.kv.tiers import TierConfig, dense_limit_tokens, least_device_pages, max_chunk_tokens, max_verify_rows
from octavo.model.load.loader import LoadedModel
from octavo.model.registry import TierBytes, tier_bytes
from octavo.ops.meta import PageSelector, SparseView
from octavo.ops.sparse_state import new_sparse_view
from octavo.options import format_size

DEFAULT_ROWS = 4  # verified rows whose union of pages the default buffer is sure to hold, whatever drafts


@dataclass(frozen=True)
class TierPlan:
    """What HiSparse takes: sizes of the books, limits of a step, bytes."""

    config: TierConfig
    sizes: PoolSizes
    max_model_len: int
    chunk_tokens: int
    max_draft_tokens: int
    bytes: TierBytes


def plan_tiers(
    config: EngineConfig,
    loaded: LoadedModel,
    reserve: DecodeReserve,
    kv_dtype: torch.dtype,
    draft_layers: int,
    page_bytes: tuple[int, int],
) -> TierPlan:
    """`page_bytes`: of a page of the full pool (dense and draft layers) and of the SWA pool. Raises ConfigError."""
    each = tier_bytes(loaded.config, config.page_size, kv_dtype, draft_layers, config.sparse_dense_layers)
    if each.slot == 0:
        raise ConfigError(
            "hisparse", True,
            f"{loaded.name} has no full-attention layer behind the first {config.sparse_dense_layers}; leave it off,"
            " or lower --sparse-dense-layers",
        )  # fmt: skip
    if config.recent_tokens < reserve.tokens:
        raise ConfigError(
            "recent_tokens", config.recent_tokens, f"at least {reserve.tokens}, the reserve of this draft's steps"
        )
    context = loaded.config.context_tokens
    wanted = config.max_model_len
    if wanted is not None and wanted > context:
        raise ConfigError("max_model_len", wanted, f"the model's context is {context} tokens")
    longest = wanted or context
    row_pages = row_width_pages(longest, reserve.tokens, config.page_size)
    device_pages = _device_pages(config, longest)
    chunk = _chunk_tokens(config, device_pages)
    host_pages = _host_pages(config, loaded, each, row_pages)
    if config.num_pages is not None or config.num_swa_pages is not None:
        slots = config.max_running * device_pages
        sizes = explicit_pools(
            config, host_pages, window_tokens=loaded.config.window_tokens or 0, swa_page_bytes=page_bytes[1],
            reserve_tokens=reserve.tokens, chunk_tokens=chunk,
        )  # fmt: skip
    else:
        sizes, slots = _from_memory(
            config, loaded, reserve, host_pages, device_pages, page_bytes, each, chunk, longest, row_pages
        )
    held = min(sizes.full_pages, host_pages) * config.page_size - reserve.tokens + 1
    if held < longest and (wanted is not None or held < 2):
        raise ConfigError(
            "max_model_len" if wanted is not None else "host_memory",
            wanted if wanted is not None else config.host_memory,
            f"the host tier holds {max(held, 0)} tokens of one request; raise --host-memory, or lower --max-model-len",
        )
    drafts = reserve.footprint
    if device_pages < row_pages:
        rows = max_verify_rows(device_pages, config.topk_pages, config.recent_tokens, config.page_size)
        drafts = min(drafts, rows - 1)
    tiers = TierConfig(host_pages, slots, device_pages, config.topk_pages, config.recent_tokens)
    return TierPlan(tiers, sizes, min(longest, held), chunk, drafts, each)


def _device_pages(config: EngineConfig, longest_tokens: int) -> int:
    """Pages of one request's buffer: the option, or enough for the union of a step's rows; at most what makes the whole
    context dense. Text depends on it, so it must not depend on the draft."""
    p, topk, recent = config.page_size, config.topk_pages, config.recent_tokens
    whole = ceil_pages(longest_tokens + recent, p)
    if config.device_pages is None:
        return min(whole, least_device_pages(topk, recent, p, DEFAULT_ROWS))
    least = min(whole, least_device_pages(topk, recent, p))
    if config.device_pages < least:
        raise ConfigError(
            "device_pages",
            config.device_pages,
            f"at least {least}: --topk-pages {topk} and the pages that always count (--recent-tokens {recent})",
        )
    return min(config.device_pages, whole)


def _chunk_tokens(config: EngineConfig, device_pages: int) -> int:
    most = max_chunk_tokens(device_pages, config.recent_tokens, config.page_size, overlap=config.overlap_on)
    if most < 1:
        least = least_device_pages(config.topk_pages, config.recent_tokens, config.page_size)
        raise ConfigError(
            "device_pages", device_pages, f"no prompt chunk fits beside --recent-tokens; at least {least} for this page"
        )
    return min(config.prefill_chunk_tokens, most)


def _host_pages(config: EngineConfig, loaded: LoadedModel, each: TierBytes, row_pages: int) -> int:
    """Pages of the host tier. A file's size may pass what memory there is."""
    most = config.max_running * row_pages
    if config.host_memory is None:
        if config.num_pages is not None:
            return config.num_pages
        if config.host_tier_path is None:
            room = hardware.available_memory_bytes() - loaded.weight_bytes
        else:
            room = _free_disk_bytes(config.host_tier_path)
        pages = min(most, room // 2 // each.host)
    else:
        pages = config.host_memory // each.host - 1  # one page is spare
    if pages < 2:
        raise ConfigError(
            "host_memory", config.host_memory, f"at least {format_size(3 * each.host)}: a page takes {each.host} bytes"
        )
    if config.host_memory is not None and config.host_tier_path is None:
        room = hardware.available_memory_bytes() - loaded.weight_bytes
        if config.host_memory > room:
            raise ConfigError(
                "host_memory", format_size(config.host_memory),
                f"{format_size(max(0, room))} are available beside the weights; lower it or give --host-tier-path",
            )  # fmt: skip
    return pages


def _free_disk_bytes(path: str) -> int:
    folder = Path(path).resolve().parent
    try:
        return shutil.disk_usage(folder).free
    except OSError as error:
        raise ConfigError("host_tier_path", path, f"a file in a folder that exists ({error.strerror})") from error


def _from_memory(
    config: EngineConfig,
    loaded: LoadedModel,
    reserve: DecodeReserve,
    host_pages: int,
    device_pages: int,
    page_bytes: tuple[int, int],
    each: TierBytes,
    chunk_tokens: int,
    longest: int,
    row_pages: int,
) -> tuple[PoolSizes, int]:
    """Device memory: bounds of every host page, slots for as many requests as half of the rest holds, then pages."""
    full_bytes, swa_bytes = page_bytes
    available = hardware.available_memory_bytes() - loaded.weight_bytes
    one_row = device_pages * each.slot
    bounds = (host_pages + 1) * each.bounds
    cap = bounds + config.max_running * (one_row + row_pages * (full_bytes + swa_bytes))
    memory = min(available // 4, cap) if config.kv_memory is None else config.kv_memory  # the host tier takes a half
    if config.kv_memory is not None and memory > available:
        raise ConfigError(
            "kv_memory", format_size(memory), f"{format_size(max(0, available))} are available beside the weights"
        )
    rows = min(config.max_running, max(1, (memory - bounds) // 2 // one_row))
    left = memory - bounds - rows * one_row
    if full_bytes + swa_bytes == 0 and left >= 0:
        return PoolSizes(host_pages, 0), rows * device_pages
    common: dict[str, Any] = {
        "window_tokens": loaded.config.window_tokens or 0,
        "page_size": config.page_size,
        "largest_reserve_tokens": reserve.tokens,
        "chunk_tokens": chunk_tokens,
        "request_slots": config.max_running,
        "context_tokens": longest,
        "overlap": config.overlap_on,
    }
    try:
        sizes = pool_sizes(left, full_page_bytes=full_bytes, swa_page_bytes=swa_bytes, **common)
    except ConfigError as error:
        raise ConfigError(
            "kv_memory",
            format_size(memory),
            f"{format_size(bounds)} for page bounds and {format_size(one_row)} for one request's buffer leave"
            f" {format_size(max(0, left))}: {error.allowed}",
        ) from None
    if full_bytes == 0:  # pages of zero bytes on the device: as many as the host tier has
        return PoolSizes(host_pages, min(sizes.swa_pages, config.max_running * row_pages)), rows * device_pages
    return PoolSizes(min(sizes.full_pages, host_pages), sizes.swa_pages), rows * device_pages


def make_tiers(
    config: EngineConfig, plan: TierPlan, network: Any, reserve: DecodeReserve, *, max_rows: int, width_pages: int,
    device: torch.device,
) -> tuple[HostTier, SparseView]:  # fmt: skip
    """The host tier's memory and the device state beside it. Raises ConfigError for a file that cannot be made."""
    c, tiers = network.config, plan.config
    shape = (tiers.host_pages + 1, network.host_page_layers, 2, c.num_kv_heads, network.page_size, c.head_dim)
    tier = HostTier(shape, network.kv_dtype, path=config.host_tier_path, device=device)
    view = new_sparse_view(
        sparse_layers=network.sparse_layers,
        host_layers=network.host_layers,
        dense_host_layers=network.dense_host_layers,
        slots=tiers.device_slots,
        host=tier.tensor,
        max_rows=max_rows,
        width_pages=width_pages,
        device_pages=tiers.device_pages,
        topk_pages=tiers.topk_pages,
        recent_tokens=tiers.recent_tokens,
        footprint_tokens=reserve.tokens,
        dense_limit_tokens=dense_limit_tokens(tiers.device_pages, network.page_size, tiers.recent_tokens),
        selector=None if config.page_selector == "bounds" else load_selector(config.page_selector),
        device=device,
    )
    return tier, view


def load_selector(spec: str) -> PageSelector:
    """`module:Class` -> an instance. Raises `ConfigError` naming the option."""
    module_name, _, class_name = spec.partition(":")
    allowed = "bounds, or module:Class with methods summarise(layer, keys) and score(layer, queries, summaries)"
    try:
        made = getattr(importlib.import_module(module_name), class_name)()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError("page_selector", spec, f"{allowed} ({error})") from error
    if not (callable(getattr(made, "summarise", None)) and callable(getattr(made, "score", None))):
        raise ConfigError("page_selector", spec, allowed)
    selector: PageSelector = made
    return selector


def tier_line(config: EngineConfig, plan: TierPlan) -> str:
    """The start-up line of the tiers."""
    tiers, p = plan.config, config.page_size
    where = "memory" if config.host_tier_path is None else config.host_tier_path
    selector = "" if config.page_selector == "bounds" else f"; {config.page_selector} selects, in torch operations"
    slots = f"device buffer {tiers.device_pages} pages a request, {tiers.device_slots} slots"
    host = f"host tier {tiers.host_pages} pages, {tiers.host_pages * p} tokens, "
    return (
        f"tiers    {slots}, {format_size(tiers.device_slots * plan.bytes.slot)};"
        f" {host}{format_size(tiers.host_pages * plan.bytes.host)} in {where};"
        f" top {tiers.topk_pages} pages, {tiers.recent_tokens} newest tokens always{selector}"
    )
