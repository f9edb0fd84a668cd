"""The KV books for a terminal: `--show-kv` and `/kv`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo import LLM


def print_books(llm: LLM) -> None:
    """Print pools and requests as a page map, and the totals that must add up."""
    from octavo.kv import picture

    report = llm.kv_report()
    print(picture.text(report))
