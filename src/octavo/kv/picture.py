"""Pictures of the KV books: a page map coloured by state and owner, and every request's watermark against what is
committed. `svg(report)` for documents and the server's page, `text(report)` for a terminal. Input: `Ledger.report()`.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from octavo.kv.report import STATE_LETTERS

STATE_COLOURS = {"f": "#eceff1", "c": "#90a4ae", "h": "#42a5f5", "l": "#ffb300", "q": "#e53935"}
STATE_WORDS = dict(zip(STATE_LETTERS, ("free", "cached", "held", "leased", "quarantined"), strict=True))
TEXT_SIGNS = {"f": "·", "c": "▒", "h": "█", "l": "◇", "q": "✖"}
MAX_CELLS = 2048
COLUMNS = 64
CELL = 10  # pixels


def row_colour(row: int) -> str:
    """A colour per row; neighbours differ."""
    return f"hsl({(row * 137 + 205) % 360} 62% 52%)"


def _cells(pool: dict[str, Any], owners: dict[int, int]) -> tuple[list[tuple[str, int | None]], int]:
    """(letter, owner row) per cell, and pages per cell. Big pools show the commonest state of several pages."""
    letters: str = pool.get("map") or _spread(pool)
    per_cell = -(-len(letters) // MAX_CELLS)
    cells: list[tuple[str, int | None]] = []
    for start in range(0, len(letters), per_cell):
        part = letters[start : start + per_cell]
        letter = max(STATE_LETTERS, key=part.count)
        named = [owners[page] for page in range(start, start + len(part)) if page in owners]
        cells.append((letter, max(named, key=named.count) if named and letter in "hl" else None))
    return cells, per_cell


def _spread(pool: dict[str, Any]) -> str:
    """A map in proportion, for pools too large to be mapped page by page."""
    scale = -(-pool["total"] // MAX_CELLS)
    return "".join(letter * (pool[STATE_WORDS[letter]] // scale) for letter in "hlcqf")


def _owners(report: dict[str, Any], pool: str) -> dict[int, int]:
    return {page: row["row"] for row in report["rows"] for page in row.get(f"{pool}_pages", ())}


# --- SVG -------------------------------------------------------------------------------------------------------


def svg(report: dict[str, Any]) -> str:
    """A self-contained SVG document."""
    width = COLUMNS * CELL + 40
    parts: list[str] = []
    y = 24
    for name, pool in report["pools"].items():
        y = _svg_pool(parts, name, pool, _owners(report, name), y)
    y = _svg_legend(parts, y)
    y = _svg_rows(parts, report, y, width - 40)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{y + 8}" viewBox="0 0 {width} {y + 8}" '
        f'font-family="ui-monospace, monospace" font-size="11" role="img"><title>KV pages</title>'
        f'<rect width="100%" height="100%" fill="#ffffff"/>'
    )
    return head + "".join(parts) + "</svg>"


def _svg_text(parts: list[str], x: int, y: int, words: str) -> None:
    parts.append(f'<text x="{x}" y="{y}" fill="#263238">{escape(words)}</text>')


def _svg_pool(parts: list[str], name: str, pool: dict[str, Any], owners: dict[int, int], y: int) -> int:
    cells, per_cell = _cells(pool, owners)
    scale = "" if per_cell == 1 else f", {per_cell} pages per cell"
    used = ", ".join(f"{pool[word]} {word}" for word in STATE_WORDS.values() if pool[word])
    _svg_text(parts, 20, y, f"{name} pool: {pool['total']} pages{scale}: {used}")
    y += 8
    for i, (letter, owner) in enumerate(cells):
        colour = STATE_COLOURS[letter] if owner is None else row_colour(owner)
        edge = ' stroke="#ffb300" stroke-width="2"' if letter == "l" else ""
        whose = "" if owner is None else f", row {owner}"
        parts.append(
            f'<rect x="{20 + i % COLUMNS * CELL}" y="{y + i // COLUMNS * CELL}" width="{CELL - 1}" '
            f'height="{CELL - 1}" fill="{colour}"{edge}><title>page {i * per_cell}: {STATE_WORDS[letter]}{whose}'
            f"</title></rect>"
        )
    return y + -(-len(cells) // COLUMNS) * CELL + 22


def _svg_legend(parts: list[str], y: int) -> int:
    x = 20
    for letter, word in STATE_WORDS.items():
        label = "held (colour of its row)" if letter == "h" else word
        parts.append(f'<rect x="{x}" y="{y - 9}" width="9" height="9" fill="{STATE_COLOURS[letter]}"/>')
        _svg_text(parts, x + 13, y, label)
        x += 13 + 7 * len(label) + 16
    return y + 22


def _svg_rows(parts: list[str], report: dict[str, Any], y: int, width: int) -> int:
    """One bar per request: evicted, shared prefix, committed, and the watermark as a frame."""
    longest = max((row["allocated"] for row in report["rows"]), default=0)
    if not longest:
        return y
    _svg_text(
        parts, 20, y, f"requests: frame = allocated, full = committed, grey = shared prefix (0 … {longest} tokens)"
    )
    y += 8
    scale = (width - 150) / longest
    for row in report["rows"]:
        _svg_text(parts, 20, y + 10, f"row {row['row']} {row['committed']}/{row['allocated']}")
        x = 150
        final = max(row["committed"], row["fill"])
        for length, colour, opacity in (
            (final, row_colour(row["row"]), 0.35 if row["fill"] else 1.0),
            (row["protected"], STATE_COLOURS["c"], 1.0),
        ):
            parts.append(
                f'<rect x="{x}" y="{y + 1}" width="{length * scale:.1f}" height="10" fill="{colour}" '
                f'fill-opacity="{opacity}"/>'
            )
        evicted = row["evicted"] * scale
        if evicted:
            parts.append(f'<line x1="{x}" x2="{x + evicted:.1f}" y1="{y + 11}" y2="{y + 11}" stroke="#e53935"/>')
        parts.append(
            f'<rect x="{x}" y="{y + 0.5}" width="{row["allocated"] * scale:.1f}" height="11" fill="none" '
            f'stroke="#263238"/>'
        )
        y += 16
    return y


# --- terminal --------------------------------------------------------------------------------------------------


def text(report: dict[str, Any], *, columns: int = COLUMNS) -> str:
    """The same for a terminal, without colour."""
    lines: list[str] = []
    for name, pool in report["pools"].items():
        cells, per_cell = _cells(pool, {})
        scale = "" if per_cell == 1 else f" ({per_cell} pages per sign)"
        lines.append(f"{name} pool, {pool['total']} pages of {report['page_size']} tokens{scale}")
        signs = "".join(TEXT_SIGNS[letter] for letter, _ in cells)
        lines.extend("  " + signs[start : start + columns] for start in range(0, len(signs), columns))
        lines.append("  " + "  ".join(f"{TEXT_SIGNS[s]} {word} {pool[word]}" for s, word in STATE_WORDS.items()))
    lines.extend(_text_rows(report["rows"], columns))
    return "\n".join(lines)


def _text_rows(rows: Sequence[dict[str, Any]], columns: int) -> list[str]:
    longest = max((row["allocated"] for row in rows), default=0)
    if not longest:
        return ["no requests"]
    lines = [f"requests (▒ shared, █ committed, ░ reserved; {longest} tokens wide)"]
    for row in rows:
        end = max(1, round(row["allocated"] * columns / longest))
        final = round(max(row["committed"], row["fill"]) * columns / longest)
        shared = round(row["protected"] * columns / longest)
        bar = "▒" * shared + "█" * (final - shared) + "░" * (end - final)
        evicted = f", {row['evicted']} slid out" if row["evicted"] else ""
        lines.append(f"  row {row['row']:<4}{bar}")
        lines.append(f"          committed {row['committed']} of {row['allocated']}, {row['state']}{evicted}")
    return lines
