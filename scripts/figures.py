"""Rewrite the README's table of figures from benchmarks/results; with --check, only say whether it is in step.

    python scripts/figures.py [--check]

benchmarks/results/figures.json lists the rows: {"row": text, "file": result, "engine", "mode", "case", "against"}.
`case` is the label in the result; the ratio is taken inside that one result, against another engine's plain line: the
median over the rounds in which both took turns. A row is refused if a speed varied by more than a tenth, unless there
were rounds enough to know the ratio to a tenth nevertheless.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from octavo.bench.measure import Ratio

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


def compare(ours: dict[str, Any], peer: dict[str, Any]) -> Ratio:
    """How they compare in each round, in the speed that lines of their kind are judged by."""
    kind = "prefill" if ours["output_tokens"] == 1 else "decode" if ours["streams"] == 1 else "output"
    speeds = (line["repeats"][f"{kind}_tokens_per_s"] for line in (ours, peer))
    return Ratio([a / b for a, b in zip(*speeds, strict=True)])


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
        ratio = compare(ours, peer)
        if (ours["void"] or peer["void"]) and ratio.void:
            raise SystemExit(f"figures: {row['file']} has a spread over 10 % on {row['case']!r}; measure again")
        low, high = ratio.interval
        out.append(
            f"| {row['row']} | {ours['median_tokens_per_s']:.0f} tokens/s | "
            f"{row['against']} {peer['median_tokens_per_s']:.0f} tokens/s | "
            f"{ratio.median:.2f} ({low:.2f}–{high:.2f}) | "
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
