"""Pool sizes given in pages (--num-pages, --num-swa-pages), with and without tiers."""

from __future__ import annotations

from octavo.config import EngineConfig
from octavo.kv.sizing import PoolSizes, min_swa_pages


def explicit_pools(
    config: EngineConfig,
    default_full_pages: int,
    *,
    window_tokens: int,
    swa_page_bytes: int,
    reserve_tokens: int,
    chunk_tokens: int,
) -> PoolSizes:
    """Pages of both pools as the options say. Without --num-pages there are `default_full_pages`; without
    --num-swa-pages what the running requests' windows hold at most, but no more than there are full pages."""
    full = default_full_pages if config.num_pages is None else config.num_pages
    if not swa_page_bytes:
        return PoolSizes(full, 0)
    least = min_swa_pages(window_tokens, reserve_tokens, chunk_tokens, config.page_size, overlap=config.overlap_on)
    swa = max(least, min(full, least * config.max_running)) if config.num_swa_pages is None else config.num_swa_pages
    return PoolSizes(full, swa)
