"""Pictures of the books: well formed, every page and request in them, large pools folded."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

from octavo.kv import picture
from tests.laws.helpers import make, prefill, sliding, tokens

SVG = "{http://www.w3.org/2000/svg}"


def busy():
    ledger = sliding(full_pages=20, swa_pages=18, window_tokens=8)
    first = prefill(ledger, tokens(18), publish=True)
    ledger.evict([first.row])
    ledger.plan_decode([first.row], 8)
    ledger.preallocate(tokens(6, 50), 6)
    lost = ledger.preallocate(tokens(3, 70), 3)
    ledger.quarantine(lost.row, lost.generation)
    return ledger


def test_pictures_are_as_they_were() -> None:
    """Every coordinate counts: after a wanted change, look at the new picture and store it."""
    report = busy().report()
    golden = Path(__file__).parent / "golden"
    assert picture.svg(report) == (golden / "books.svg").read_text()
    assert picture.text(report) + "\n" == (golden / "books.txt").read_text()


def titles(root: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}title")]


def test_svg_shows_every_page_with_state_and_owner() -> None:
    root = ElementTree.fromstring(picture.svg(busy().report()))
    cells = [title for title in titles(root) if title.startswith("page ")]
    assert len(cells) == 20 + 18
    assert cells.count("page 0: cached") == 2
    assert sum("held, row 0" in title for title in cells) == 6
    assert sum("leased, row 1" in title for title in cells) == 4
    assert sum("quarantined" in title for title in cells) == 2
    words = " ".join(element.text or "" for element in root.iter(f"{SVG}text"))
    assert "full pool: 20 pages" in words and "swa pool: 18 pages" in words and "row 0 18/28" in words


def test_rows_have_their_own_colours() -> None:
    assert len({picture.row_colour(row) for row in range(40)}) == 40
    assert picture.row_colour(2) == f"hsl({2 * 137 + 205 - 360} 62% 52%)"
    held = re.findall(r'fill="(hsl[^"]*)"', picture.svg(busy().report()))
    assert {picture.row_colour(0), picture.row_colour(1)} <= set(held)


def test_text_shows_pages_and_requests() -> None:
    shown = picture.text(busy().report())
    lines = shown.splitlines()
    assert lines[0] == "full pool, 20 pages of 4 tokens"
    assert lines[1].strip() == "▒▒▒▒███◇◇✖··········"
    assert "free 10" in lines[2] and "held 3" in lines[2] and "quarantined 1" in lines[2]
    assert "committed 18 of 28, active, 8 slid out" in shown and "in transfer" in shown
    bar = next(line for line in lines if line.startswith("  row 0"))
    assert (bar.count("▒"), bar.count("█"), bar.count("░")) == (37, 4, 23)


def test_nobody_there() -> None:
    report = make().report()
    assert "no requests" in picture.text(report)
    assert "requests" not in picture.svg(report)


def test_large_pools_are_folded() -> None:
    ledger = make(full_pages=5000, context_tokens=20_000)
    prefill(ledger, tokens(9_000))
    report = ledger.report()
    cells = [t for t in titles(ElementTree.fromstring(picture.svg(report))) if t.startswith("page ")]
    assert len(cells) == 1667 and sum("held, row 0" in t for t in cells) == 750
    assert "(3 pages per sign)" in picture.text(report)
    bare = ledger.report(page_map=False)
    assert picture.text(bare).count("█") >= 700
    assert len(cells_of(picture.svg(bare))) == 750 + 2750 // 3
    assert len(cells_of(picture.svg(busy().report(page_map=False)))) == 20 + 18


def cells_of(drawn: str) -> list[ElementTree.Element]:
    return [rect for rect in ElementTree.fromstring(drawn).iter(f"{SVG}rect") if "page " in "".join(rect.itertext())]


def test_cells_stand_in_rows_of_64() -> None:
    ledger = make(full_pages=130)
    drawn = picture.svg(ledger.report())
    places = [(int(cell.attrib["x"]), int(cell.attrib["y"])) for cell in cells_of(drawn)]
    assert places == [(20 + i % 64 * 10, 32 + i // 64 * 10) for i in range(130)]
    rects = list(ElementTree.fromstring(drawn).iter(f"{SVG}rect"))
    legend = rects[rects.index(next(rect for rect in rects if rect.attrib["width"] == "9" and not list(rect)))]
    assert int(legend.attrib["y"]) == 32 + 3 * 10 + 22 - 9


def by_hand(letters: str, rows: list[dict]) -> dict:
    words = {word: letters.count(letter) for letter, word in picture.STATE_WORDS.items()}
    blank = {"committed": 0, "fill": 0, "protected": 0, "evicted": 0, "state": "active"}
    pools = {"full": {"map": letters, "total": len(letters), **words}}
    return {"page_size": 4, "pools": pools, "rows": [{**blank, **row} for row in rows]}


def test_a_folded_cell_belongs_to_whom_most_of_it_does() -> None:
    rows = [{"row": 0, "allocated": 8, "full_pages": [2]}, {"row": 1, "allocated": 8, "full_pages": [0, 1]}]
    drawn = picture.svg(by_hand("h" * 3 + "f" * (3 * 2048 - 3), rows))
    shown = [title for title in titles(ElementTree.fromstring(drawn)) if title.startswith("page ")]
    assert shown == ["page 0: held, row 1", *(f"page {page}: free" for page in range(3, 3 * 2048, 3))]


def test_pools_are_folded_beyond_2048_pages() -> None:
    assert "per sign" not in picture.text(by_hand("f" * 2048, []))
    assert "(2 pages per sign)" in picture.text(by_hand("f" * 2049, []))


def test_the_smallest_request_has_a_sign() -> None:
    lines = picture.text(by_hand("f", [{"row": 0, "allocated": 4}, {"row": 1, "allocated": 4000}])).splitlines()
    assert next(line for line in lines if line.startswith("  row 0")).count("░") == 1
