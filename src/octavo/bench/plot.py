"""The pictures `octavo bench --plot` writes: one self-contained SVG, no plotting library.

Left to right: acceptance by drafted position of each mode, and the parts of a step as stacked bars.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

COLOURS = ("#1565c0", "#ef6c00", "#2e7d32", "#6a1b9a", "#00838f", "#c62828", "#757575", "#9e9d24")
WIDTH, HEIGHT, MARGIN = 420, 260, 48


def svg(acceptance: Mapping[str, Sequence[float]], steps_ms: Mapping[str, Mapping[str, float]]) -> str:
    """`acceptance`: mode -> share accepted at positions 1, 2, …; `steps_ms`: mode -> part -> milliseconds."""
    panels = []
    if any(acceptance.values()):
        panels.append(_acceptance(acceptance))
    if steps_ms:
        panels.append(_steps(steps_ms))
    return picture(panels)


def picture(panels: Sequence[str]) -> str:
    """Panels side by side as one document."""
    placed = [
        f'<g transform="translate({i * (WIDTH + 2 * MARGIN) + MARGIN},{MARGIN})">{p}</g>' for i, p in enumerate(panels)
    ]
    width = max(1, len(panels)) * (WIDTH + 2 * MARGIN)
    height = HEIGHT + 2 * MARGIN + 22 * 8
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="system-ui, sans-serif" font-size="12"><rect width="100%" height="100%" fill="#ffffff"/>'
        + "".join(placed)
        + "</svg>\n"
    )


def _text(x: float, y: float, words: str, *, anchor: str = "start", bold: bool = False) -> str:
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#212121"{weight}>{escape(words)}</text>'


def _axis(top: float, unit: str) -> list[str]:
    parts = [f'<line x1="0" y1="{HEIGHT}" x2="{WIDTH}" y2="{HEIGHT}" stroke="#424242"/>']
    for tick in range(5):
        y = HEIGHT - tick * HEIGHT / 4
        parts.append(f'<line x1="0" y1="{y}" x2="{WIDTH}" y2="{y}" stroke="#e0e0e0"/>')
        parts.append(_text(-6, y + 4, f"{top * tick / 4:.3g}{unit}", anchor="end"))
    return parts


def _acceptance(acceptance: Mapping[str, Sequence[float]]) -> str:
    """Lines: how often the draft at each position was accepted."""
    shown = {mode: list(values) for mode, values in acceptance.items() if values}
    longest = max(len(values) for values in shown.values())
    parts = [_text(0, -18, "accepted, by drafted position", bold=True), *_axis(100, " %")]
    step = WIDTH / max(1, longest)
    for position in range(longest):
        parts.append(_text((position + 0.5) * step, HEIGHT + 16, str(position + 1), anchor="middle"))
    for number, (mode, values) in enumerate(shown.items()):
        parts += _line([((i + 0.5) * step, HEIGHT * (1 - value)) for i, value in enumerate(values)], number)
        parts += _legend(number, mode)
    return "".join(parts)


def _steps(steps_ms: Mapping[str, Mapping[str, float]]) -> str:
    """Stacked bars: what a step of each mode is made of."""
    top = max(sum(parts.values()) for parts in steps_ms.values()) or 1.0
    names = list(dict.fromkeys(name for parts in steps_ms.values() for name in parts))
    drawn = [_text(0, -18, "milliseconds of a decode step, by part", bold=True), *_axis(top, "")]
    slot = WIDTH / len(steps_ms)
    for place, (mode, parts) in enumerate(steps_ms.items()):
        y = float(HEIGHT)
        for name, amount in parts.items():
            height = HEIGHT * amount / top
            y -= height
            colour = COLOURS[names.index(name) % len(COLOURS)]
            drawn.append(
                f'<rect x="{place * slot + slot * 0.2:.1f}" y="{y:.1f}" width="{slot * 0.6:.1f}" height="{height:.1f}" '
                f'fill="{colour}"><title>{escape(name)}: {amount:.3f} ms</title></rect>'
            )
        drawn.append(_text((place + 0.5) * slot, HEIGHT + 16, mode, anchor="middle"))
    for number, name in enumerate(names):
        drawn += _legend(number, name)
    return "".join(drawn)


def lines(title: str, labels: Sequence[str], series: Mapping[str, Sequence[float | None]]) -> str:
    """A panel of lines over equally spaced labels; None: no point there."""
    top = max((value for values in series.values() for value in values if value is not None), default=1.0) or 1.0
    drawn = [_text(0, -18, title, bold=True), *_axis(top, "")]
    step = WIDTH / max(1, len(labels))
    for place, label in enumerate(labels):
        drawn.append(_text((place + 0.5) * step, HEIGHT + 16, label, anchor="middle"))
    for number, (name, values) in enumerate(series.items()):
        points = [((i + 0.5) * step, HEIGHT * (1 - value / top)) for i, value in enumerate(values) if value is not None]
        drawn += _line(points, number) + _legend(number, name)
    return "".join(drawn)


def _line(points: Sequence[tuple[float, float]], number: int) -> list[str]:
    colour = COLOURS[number % len(COLOURS)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    line = f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
    return [line, *(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points)]


def _legend(number: int, name: str) -> list[str]:
    colour, y = COLOURS[number % len(COLOURS)], HEIGHT + 34 + 20 * number
    return [f'<rect x="0" y="{y}" width="12" height="12" fill="{colour}"/>', _text(18, y + 10, name)]
