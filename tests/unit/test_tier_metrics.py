"""What `/metrics` says of the tiers, from a real engine's statistics."""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.api.scrape import stats_values
from octavo.obs.metrics import ServerMetrics
from octavo.params import SamplingParams
from tests.engine.test_core import prompts, run
from tests.tiny import engine


def scraped(**options: Any) -> tuple[dict[str, float], Any]:
    core = engine(page_size=8, num_pages=60, max_batched_tokens=64, **options)
    prompt = prompts(1, seed=3, low=150, high=150)[0]
    run(core, [(prompt, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))], close=False)
    text = ServerMetrics().render(stats_values(msgspec.to_builtins(core.stats()))).decode()
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#")]
    report = core.report()
    core.close()
    return {name: float(value) for name, value in lines}, report


def test_tiers_are_shown() -> None:
    values, report = scraped(hisparse=True, device_pages=8, topk_pages=2, recent_tokens=32)
    tiers = report["tiers"]
    assert values["octavo:kv_tier_swaps_total"] == tiers["swaps"] > 0
    assert values["octavo:kv_tier_hits_total"] == tiers["hits"] > 0
    assert values['octavo:kv_tier_bytes_total{direction="in"}'] == tiers["swaps"] * 2 * 2 * 8 * 16 * 4
    assert values['octavo:kv_tier_bytes_total{direction="out"}'] == tiers["backed_up_pages"] * 4 * 2 * 2 * 8 * 16 * 4
    assert values["octavo:kv_tier_backups_waiting"] == values["octavo:kv_tier_retracted"] == 0
    states = ("free", "cached", "held", "leased", "quarantined")
    for pool in ("full", "host", "slots"):
        total = sum(values[f'octavo:kv_pages{{pool="{pool}",state="{state}"}}'] for state in states)
        assert total == values[f'octavo:kv_pool_pages{{pool="{pool}"}}'] == report["pools"][pool]["total"]
    host = {state: values[f'octavo:kv_tier_pages{{state="{state}",tier="host"}}'] for state in states}
    assert host == {state: report["pools"]["host"][state] for state in states}
    assert host["cached"] > 0


def test_without_tiers_nothing_is_said_of_them() -> None:
    values, _ = scraped()
    assert not any("kv_tier_swaps" in name or 'tier="host"' in name for name in values)
    assert any('tier="device"' in name for name in values)
