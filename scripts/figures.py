"""Rewrite the README's table of figures from benchmarks/results; with --check, only say whether it is in step.

    python scripts/figures.py [--check]

benchmarks/results/figures.json lists the rows: {"row": text, "file": result, "engine", "mode", "case", "against"}.
`case` is the label in the result; the ratio is taken inside that one result, against another engine's plain line.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"
BEGIN, END = "<!-- figures: written by make figures -->", "<!-- end of figures -->"


def find(lines: list[dict[str, Any]], engine: str, mode: str, case: str) -> dict[str, Any]:
    """The fastest line (thread counts of a peer) of one engine and mode on one case."""
    found = [n for n in lines if (n["engine"], n["mode"], n["case"]) == (engine, mode, case)]
    if not found:
        raise SystemExit(f"figures: no line {engine} {mode} on {case!r}")
    best: dict[str, Any] = max(found, key=lambda n: n["median_tokens_per_s"])
    return best


def table() -> str:
    """The table in Markdown; empty while nothing has been measured."""
    rows = json.loads((RESULTS / "figures.json").read_text()) if (RESULTS / "figures.json").exists() else []
    if not rows:
        return ""
    out = ["| work | Octavo | peer | ratio | measured in |", "|---|---|---|---|---|"]
    for row in rows:
        if not (RESULTS / row["file"]).exists():
            continue  # not measured (yet)
        result = json.loads((RESULTS / row["file"]).read_text())
        ours = find(result["lines"], "octavo", row.get("mode", "plain"), row["case"])
        peer = find(result["lines"], row["against"], row.get("against_mode", "plain"), row["case"])
        if ours["void"] or peer["void"]:
            raise SystemExit(f"figures: {row['file']} has a spread over 10 % on {row['case']!r}; measure again")
        ratio = ours["median_tokens_per_s"] / peer["median_tokens_per_s"]
        out.append(
            f"| {row['row']} | {ours['median_tokens_per_s']:.0f} tokens/s | "
            f"{row['against']} {peer['median_tokens_per_s']:.0f} tokens/s | {ratio:.2f} | "
            f"[{row['file']}](benchmarks/results/{row['file']}): {result['cpu']}, {result['cores']} cores |"
        )
    return "\n".join(out) + "\n" if len(out) > 2 else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where the README is out of step")
    check = parser.parse_args().check
    text = README.read_text()
    wanted = table()
    if BEGIN not in text:
        if wanted:
            print(f"README.md has figures to show but no line {BEGIN!r}", file=sys.stderr)
            return 1
        return 0
    pattern = re.compile(re.escape(BEGIN) + r"\n.*?" + re.escape(END), re.DOTALL)
    updated = pattern.sub(lambda _: f"{BEGIN}\n{wanted}{END}", text)
    if updated == text:
        return 0
    if check:
        print("README.md: figures are out of step with benchmarks/results; run `make figures`", file=sys.stderr)
        return 1
    README.write_text(updated)
    return 0


if __name__ == "__main__":
    sys.exit(main())
