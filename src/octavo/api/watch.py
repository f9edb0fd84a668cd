"""The line in the log: one per 10 s under load, none when idle."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from octavo.api.scrape import held_share
from octavo.errors import EngineDead

if TYPE_CHECKING:
    from octavo.api.service import Service

logger = logging.getLogger("octavo.load")

INTERVAL_S = 10.0


async def log_load(service: Service) -> None:
    """Runs for the life of the server."""
    before: dict[str, Any] = {}
    while True:
        await asyncio.sleep(INTERVAL_S)
        if not (service.client.in_flight or service.rates.per_second()):
            continue
        try:
            now = await service.client.query("stats", 2.0)
        except EngineDead:
            continue
        service.last_stats = now
        fields = load_fields(before, now)
        before = now
        logger.info(
            "running %(running)d, waiting %(waiting)d, %(tokens_per_s).1f tok/s, KV %(kv_percent).0f %%, "
            "prefix hits %(hit_percent).0f %%, accept length %(accept_length)s", fields, extra={"fields": fields})


def load_fields(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Figures of the time between two statistics."""

    def grown(name: str) -> float:
        return float(now.get(name, 0) - before.get(name, 0))

    drafts, queries = grown("drafts"), grown("cache_query_tokens")
    share = max((held_share(pages) for pages in now.get("pools", {}).values()), default=0.0)
    return {
        "running": now.get("running", 0),
        "waiting": now.get("waiting", 0),
        "tokens_per_s": grown("generation_tokens") / INTERVAL_S,
        "kv_percent": 100 * share,
        "hit_percent": 100 * grown("cache_hit_tokens") / queries if queries else 0.0,
        "accept_length": f"{1 + grown('accepted_tokens') / drafts:.2f}" if drafts else "-",
    }
