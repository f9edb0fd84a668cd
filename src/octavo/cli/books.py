"""The KV books for a terminal: `--show-kv` and `/kv`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo import LLM


def print_books(llm: LLM) -> None:
    """Print pools and requests as `kv_report` gives them."""
    from octavo.cli.generate import plain

    report = plain(llm.kv_report())
    for name, pool in report.get("pools", {}).items():
        states = ", ".join(f"{state} {pages}" for state, pages in pool.items() if isinstance(pages, int))
        print(f"KV {name} pool (pages): {states}")
    for request in report.get("requests", []):
        lengths = ", ".join(f"{key} {value}" for key, value in request.items())
        print(f"  request: {lengths}")
