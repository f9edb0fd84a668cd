"""The KV books for a terminal: `--show-kv` and `/kv`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo.options import format_size

if TYPE_CHECKING:
    from octavo import LLM


def print_books(llm: LLM) -> None:
    """Print pools and requests as a page map, the totals that must add up, and what a second pool saves."""
    from octavo.kv import picture

    report = llm.kv_report()
    print(picture.text(report))
    for line in saving_lines(report.get("sliding", {})):
        print(line)


def saving_lines(sliding: dict[str, Any]) -> list[str]:
    """`sliding` of the report, a line for now, for the peak so far, and for the longest requests that run together."""
    if not sliding:
        return []
    capacity = sliding["capacity"]
    names = {
        "now": "now",
        "peak": "at the peak",
        "capacity": f"{capacity['requests']} × {capacity['context_tokens']} tokens",
    }
    lines = ["KV of requests in two pools, and in one pool for all layers"]
    for key, name in names.items():
        saving = sliding[key]
        lines.append(
            f"  {name:<18}{saving['full_pages']} full and {saving['swa_pages']} sliding-window pages, "
            f"{format_size(saving['two_pools_bytes'])}; in one pool {format_size(saving['one_pool_bytes'])}: "
            f"{format_size(saving['saved_bytes'])} saved"
        )
    return lines
