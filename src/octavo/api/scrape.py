"""What the engine says, in the forms of `/metrics` and `/kv.json`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from octavo._version import __version__
from octavo.disagg.failures import CAUSES
from octavo.engine.process import rss_bytes
from octavo.errors import EngineDead

if TYPE_CHECKING:
    from octavo.api.service import Service

PAGE_STATES = ("free", "cached", "held", "leased", "quarantined")
SCRAPE_TIMEOUT_S = 2.0


async def metric_values(service: Service) -> dict[str, Any]:
    """Values for `ServerMetrics.render`: the engine's now, or its last known where it does not answer."""
    client = service.client
    try:
        service.last_stats = await client.query("stats", SCRAPE_TIMEOUT_S)
    except EngineDead:
        pass  # the last known counters stay: a counter that vanishes reads as a reset
    values = stats_values(service.last_stats)
    values["up"] = float(client.healthy)
    values["restarts"] = client.restarts
    values["steps"] = client.beat.steps
    values["rss_bytes"] = {"api": rss_bytes(), "engine": client.beat.rss_bytes}
    values["info"] = {(service.model, __version__): 1}
    return values


def stats_values(stats: dict[str, Any]) -> dict[str, Any]:
    """`EngineStats` (as builtins) by the sources of the metrics table."""
    if not stats:
        return {"running": 0, "waiting": 0}
    values: dict[str, Any] = {name: stats[name] for name in (
        "running", "waiting", "preemptions", "prompt_tokens", "generation_tokens", "drafts", "draft_tokens",
        "accepted_tokens", "balance_violations") if name in stats}
    values["prefix_queries_tokens"] = stats.get("cache_query_tokens", 0)
    values["prefix_hits_tokens"] = stats.get("cache_hit_tokens", 0)
    values["accepted_per_position"] = dict(enumerate(stats.get("accepted_per_position", ())))
    pools = stats.get("pools", {})
    values["kv_pages"] = {(pool, state): pages.get(state, 0) for pool, pages in pools.items() for state in PAGE_STATES}
    values["kv_pool_pages"] = {pool: pages["total"] for pool, pages in pools.items()}
    values["kv_leases"] = {pool: pages.get("leased", 0) for pool, pages in pools.items()}
    values["kv_usage"] = max((held_share(pages) for pages in pools.values()), default=0.0)
    values["kv_tier_pages"] = {
        (tier, state): sum(pages.get(state, 0) for name, pages in pools.items() if (name == "host") == (tier == "host"))
        for tier in ("device", "host") for state in PAGE_STATES if tier == "device" or "host" in pools}
    tiers = stats.get("tiers", {})
    if tiers:
        values["kv_tier_hits"], values["kv_tier_swaps"] = tiers["hits"], tiers["swaps"]
        values["kv_tier_bytes"] = {"in": tiers["bytes_in"], "out": tiers["bytes_out"]}
        values["kv_tier_backups_waiting"], values["kv_tier_retracted"] = tiers["backups_waiting"], tiers["tickets"]
    transfers = stats.get("transfers", {})
    values["kv_transfers"] = transfers.get("results", {"done": 0, "failed": 0})
    values["kv_transfer_failures"] = dict.fromkeys(CAUSES, 0) | transfers.get("failures", {})
    values["kv_transfer_bytes"] = transfers.get("bytes", 0)
    return values


def held_share(pages: dict[str, Any]) -> float:
    """Pages that cannot be had by evicting the cache, over all pages; 0 to 1."""
    total = pages.get("total", 0)
    busy = sum(pages.get(state, 0) for state in ("held", "leased", "quarantined"))
    return busy / total if total else 0.0


async def kv_view(service: Service) -> dict[str, Any]:
    """The document of `/kv.json`: the books as `kv_report()` gives them, and what else the page shows."""
    report: dict[str, Any] = await service.client.query("report")
    stats: dict[str, Any] = await service.client.query("stats")
    service.last_stats = stats
    queries, hits = stats.get("cache_query_tokens", 0), stats.get("cache_hit_tokens", 0)
    spec = report.get("speculation", {})
    return {
        **report,
        "time": time.time(),
        "model": service.model,
        "version": __version__,
        "max_model_len": service.max_model_len,
        "running": stats.get("running", 0),
        "waiting": stats.get("waiting", 0),
        "in_flight": service.client.in_flight,
        "tokens_per_s": service.rates.per_second(window_s=5),
        "generation_tokens": stats.get("generation_tokens", 0),
        "prompt_tokens": stats.get("prompt_tokens", 0),
        "preemptions": stats.get("preemptions", 0),
        "prefix_cache": {"query_tokens": queries, "hit_tokens": hits, "hit_rate": hits / queries if queries else None},
        "accept_length": spec.get("mean_accept_length"),
        "balance_violations": stats.get("balance_violations", 0),
    }
