"""`octavo.kv` is host arithmetic: no torch (law 8), no asserts, one writer of lengths (law 7), typed ids (law 15)."""

from __future__ import annotations

import ast
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import octavo.kv

PACKAGE = Path(octavo.kv.__path__[0])
MODULES = sorted(f"octavo.kv.{module.name}" for module in pkgutil.iter_modules(octavo.kv.__path__))
LENGTHS = {"_committed", "_known", "_allocated", "_protected", "_evicted", "_fill", "_generation"}


def test_no_torch_is_imported() -> None:
    code = f"""
import importlib, sys
for name in {MODULES!r}:
    importlib.import_module(name)
heavy = sorted(m for m in sys.modules if m.split(".")[0] in ("torch", "transformers", "tokenizers", "fastapi"))
sys.exit(", ".join(heavy) or 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parents[2])
    assert done.returncode == 0, done.stderr


def trees() -> list[tuple[Path, ast.Module]]:
    return [(path, ast.parse(path.read_text())) for path in sorted(PACKAGE.glob("*.py"))]


def test_laws_are_not_asserts() -> None:
    """`python -O` strips asserts; a broken law must raise."""
    for path, tree in trees():
        found = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)]
        assert not found, f"{path.name}: assert on lines {found}"


def test_only_the_ledger_writes_lengths() -> None:
    for path, tree in trees():
        if path.stem in ("ledger", "ledger_base", "ledger_transfers"):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in LENGTHS:
                pytest.fail(f"{path.name}:{node.lineno} touches {node.attr}")


def test_nothing_outside_the_package_writes_lengths() -> None:
    for path in sorted(PACKAGE.parent.rglob("*.py")):
        if PACKAGE in path.parents:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in LENGTHS and isinstance(node.value, ast.Attribute):
                assert node.value.attr != "ledger", f"{path.name}:{node.lineno} touches ledger.{node.attr}"


def test_files_stay_small() -> None:
    for path in PACKAGE.glob("*.py"):
        assert len(path.read_text().splitlines()) <= 420, path.name


MIXED = {
    "SWA pages to the full pool": "full.give_back(swa.take(1), PageState.HELD)",
    "full pages to the SWA pool": "swa.move(full.take(1), PageState.HELD, PageState.CACHED)",
    "host pages to the full pool": "full.give_back(host.take(1), PageState.HELD)",
    "full page as SWA page": "one: SwaPage = FullPage(3)",
    "plain array as pages": "swa.give_back(np.zeros(1, np.int32), PageState.HELD)",
}
RIGHT = """
import numpy as np
from octavo.kv.pages import FullPage, FullPages, HostPages, SwaPage, SwaPages
from octavo.kv.pool import PagePool, PageState
full: PagePool[FullPages] = PagePool("full", 4)
swa: PagePool[SwaPages] = PagePool("swa", 4)
host: PagePool[HostPages] = PagePool("host", 4)
full.give_back(full.take(1), PageState.HELD)
swa.give_back(swa.take(1), PageState.HELD)
page: FullPage = FullPage(3)
"""


def test_index_spaces_do_not_mix(tmp_path: Path) -> None:
    """Law 15, by the type checker: each wrong line is found, the right ones are not."""
    first = len(RIGHT.splitlines()) + 1
    file = tmp_path / "mixed.py"
    file.write_text(RIGHT + "\n".join(MIXED.values()) + "\n")
    package = tmp_path / "octavo"  # kv alone: the type checker need not read the rest of the package
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "kv").symlink_to(PACKAGE)
    (package / "errors.py").symlink_to(PACKAGE.parent / "errors.py")
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "--follow-imports=silent", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    wrong = sorted({int(line.split(":")[1]) for line in done.stdout.splitlines() if f"{file.name}:" in line})
    assert wrong == list(range(first, first + len(MIXED))), done.stdout + done.stderr
