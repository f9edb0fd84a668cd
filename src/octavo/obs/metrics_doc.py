"""Write docs/metrics.md from the table of metrics: `python -m octavo.obs.metrics_doc [--check] [FILE]`."""

from __future__ import annotations

import sys
from pathlib import Path

from octavo.obs.metrics import document


def main(arguments: list[str]) -> int:
    """0 when the file is (now) in step, 1 when `--check` finds a difference."""
    check = "--check" in arguments
    rest = [a for a in arguments if a != "--check"]
    path = Path(rest[0]) if rest else Path("docs/metrics.md")
    text = document()
    if check:
        if path.exists() and path.read_text() == text:
            return 0
        print(f"{path} is out of step: run python -m octavo.obs.metrics_doc", file=sys.stderr)
        return 1
    path.write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
