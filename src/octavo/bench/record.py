"""A result that can be traced: where, when, with what it was measured; and the table people read."""

from __future__ import annotations

import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from octavo import hardware
from octavo.bench.measure import Line, Ratio, identical_share

SCHEMA = "octavo-bench-1"


def environment() -> dict[str, Any]:
    """Commit, command, processor, versions."""
    return {
        "schema": SCHEMA,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain", "--untracked-files=no", "--", "src", "native")),
        "command": f"{_program()} {shlex.join(sys.argv[1:])}",
        "cpu": hardware.cpu_model(),
        "cores": hardware.physical_cores(),
        "instruction_sets": sorted(
            f for f in hardware.cpu_flags() if f.startswith(("avx", "amx", "fma", "f16c", "asimd"))
        ),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("octavo", "torch", "numpy", "tokenizers")},
    }


def _program() -> str:
    script = Path(sys.argv[0]).name
    return f"python benchmarks/{script}" if script.endswith(".py") and script != "__main__.py" else "octavo"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def peak_memory_bytes() -> int:
    """Largest resident size of this process so far."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def best_threads(lines: Sequence[Line]) -> list[Line]:
    """Of a peer measured with several thread counts, keep the fastest line of each case."""
    best: dict[tuple[Any, ...], Line] = {}
    for line in lines:
        key = (line.case, line.engine, line.mode)
        if key not in best or line.median > best[key].median:
            best[key] = line
    return list(best.values())


def document(
    lines: Sequence[Line], engines: dict[str, Any], model: dict[str, Any], seeds: dict[str, int]
) -> dict[str, Any]:
    """The whole result as plain data."""
    return environment() | {
        "model": model,
        "engines": engines,
        "seeds": seeds,
        "peak_memory_bytes": peak_memory_bytes(),
        "lines": [line.summary() | _compared(line, lines) for line in lines],
    }


def _compared(line: Line, lines: Sequence[Line]) -> dict[str, Any]:
    """This engine's line over those it is compared with, as plain data."""
    ratios, identical = _ratios(line, lines), _identical(line, lines)
    return {
        "ratios": {name: ratio.median for name, ratio in ratios.items()}
        | ({} if identical is None else {"identical_to_plain": identical}),
        "ratio_intervals": {name: list(ratio.interval) for name, ratio in ratios.items()},
        "ratios_by_repeat": {name: ratio.rounds for name, ratio in ratios.items()},
    }


def _others(line: Line, lines: Sequence[Line]) -> dict[str, Line]:
    """By name, whom a line of this engine is compared with: each other engine's plain line, and its own plain one."""
    if line.engine != "octavo":
        return {}
    return {
        other.engine if other.engine != "octavo" else "plain": other
        for other in best_threads(lines)
        if other.case == line.case and other is not line and other.mode == "plain"
    }


def _ratios(line: Line, lines: Sequence[Line]) -> dict[str, Ratio]:
    return {
        name: Ratio([a / b for a, b in zip(line.speed, other.speed, strict=True)])
        for name, other in _others(line, lines).items()
    }


def _identical(line: Line, lines: Sequence[Line]) -> float | None:
    """Share of outputs that are the plain ones; None where there are none to compare with."""
    plain = _others(line, lines).get("plain")
    return None if plain is None else identical_share(line, plain)


def save(result: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def table(lines: Sequence[Line]) -> str:
    """For people. A speed whose spread, a ratio whose interval is over a tenth is marked void."""
    head = ["work", "engine", "mode", "threads", "tokens/s", "spread", "first token", "accept", "ratio"]
    rows = [head]
    for line in best_threads(lines):
        shown = ", ".join(_shown(name, ratio) for name, ratio in _ratios(line, lines).items())
        identical = _identical(line, lines)
        if identical is not None and identical < 1:
            shown += f" ({identical:.0%} identical{_margins(line)})"
        rows.append(
            [
                line.case.label,
                line.engine,
                line.mode,
                str(line.threads),
                f"{line.median:.1f}",
                f"{line.spread:.0%}" + (" void" if line.void else ""),
                f"{sorted(line.first_token_s)[len(line.first_token_s) // 2] * 1000:.0f} ms",
                _accepts(line),
                shown,
            ]
        )
    return render(rows)


def _shown(name: str, ratio: Ratio) -> str:
    low, high = ratio.interval
    sure = f" ({low:.2f}–{high:.2f}{', void' if ratio.void else ''})" if len(ratio.rounds) > 1 else ""
    return f"{ratio.median:.2f} × {name}{sure}"


def _margins(line: Line) -> str:
    """How close the two likeliest tokens were where outputs parted."""
    margins = sorted(d.top2_margin for d in line.divergences)
    return f", top-2 margins {margins[0]:.2g} to {margins[-1]:.2g}" if margins else ""


def _accepts(line: Line) -> str:
    """Accept length; where outputs loop, also that of the others."""
    every, real = line.accept_length(), line.accept_length(loops=False)
    if every is None:
        return "–"
    if not any(line.looping):
        return f"{every:.2f}"
    return f"{every:.2f} ({sum(line.looping)} loop" + (f", others {real:.2f})" if real is not None else ")")


def render(rows: Sequence[Sequence[str]]) -> str:
    """Columns under the first row's titles."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("─" * width for width in widths), *lines[1:]])
