"""docs/invariants.md keeps up with the tests and checks it names."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from octavo.kv import balance, balance_tree

REPO = Path(__file__).resolve().parents[2]
DOCUMENT = (REPO / "docs" / "invariants.md").read_text()
ROWS = re.findall(r"^\| (\d+) \*\*(.+?)\*\*(.*)$", DOCUMENT, re.MULTILINE)


def defined(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        if isinstance(node, ast.Assign):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
    return names


def test_every_law_has_a_row() -> None:
    assert [int(number) for number, _, _ in ROWS] == list(range(1, 16))


@pytest.mark.parametrize(("number", "title", "rest"), ROWS, ids=[row[0] for row in ROWS])
def test_the_named_tests_exist(number: str, title: str, rest: str) -> None:
    named = re.findall(r"`(test_\w+\.py)::(\w+)`", rest)
    assert named, f"law {number} ({title}) names no test"
    for file, test in named:
        assert test in defined(REPO / "tests" / "laws" / file), f"{file}::{test}"


def test_the_named_checks_exist() -> None:
    for module, name in re.findall(r"`(balance(?:_tree)?)\.(\w+)`", DOCUMENT):
        assert hasattr({"balance": balance, "balance_tree": balance_tree}[module], name), name


def test_tests_named_in_the_text_exist() -> None:
    for file, test in re.findall(r"`(?:tests/laws/)?(test_\w+\.py)::(\w+)`", DOCUMENT):
        assert test in defined(REPO / "tests" / "laws" / file), f"{file}::{test}"
