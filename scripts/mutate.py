"""Mutation testing of src/octavo/kv: does tests/laws notice when a line is wrong?

    python scripts/mutate.py                       every mutant (long)
    python scripts/mutate.py --sample 60 --seed 1  a fixed sample
    python scripts/mutate.py --files sizing.py     one file

Mutants come from the syntax tree: comparisons, arithmetic, ±1, min/max, floor/ceil, any/all, and/or, dropped
statements. Each runs in a forked child against a copy of the package in which one file is changed: quick tests
first, then the simulation. A mutant that passes everything survives; tests/laws/survivors.txt lists those that are
equivalent, with the reason. Prints `N generated, N killed, N listed`; exit status 1 if one survived unlisted.
"""

from __future__ import annotations

import argparse
import ast
import copy
import fnmatch
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
PACKAGE = REPO / "src" / "octavo" / "kv"
TESTS = REPO / "tests" / "laws"
SURVIVORS = TESTS / "survivors.txt"

QUICK = [
    "test_ledger.py",
    "test_ledger_ends.py",
    "test_ledger_books.py",
    "test_prefix.py",
    "test_transfers.py",
    "test_pool.py",
    "test_planted.py",
    "test_tables.py",
]
FIRST_BY_FILE = {
    "sizing.py": ["test_tables.py"], "sliding.py": ["test_tables.py"], "pages.py": ["test_tables.py"],
    "pool.py": ["test_pool.py"], "prefix.py": ["test_prefix.py"], "heap.py": ["test_prefix.py"],
    "policy.py": ["test_trace.py", "test_prefix.py"], "picture.py": ["test_picture.py"],
    "trace.py": ["test_trace.py"], "replay.py": ["test_trace.py"], "balance.py": ["test_planted.py"],
    "balance_tree.py": ["test_planted.py"], "ledger_transfers.py": ["test_transfers.py", "test_tiers.py"],
    "tiers.py": ["test_tiers.py"], "ledger_tiers.py": ["test_tiers.py"], "balance_tiers.py": ["test_tiers.py"],
}  # fmt: skip
LAST = ["test_tiers.py", "test_trace.py", "test_picture.py", "test_machine.py"]
SIMULATED_MOVES = 6_000

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
NAMES = {
    "min": "max", "max": "min", "ceil_p": "floor_p", "floor_p": "ceil_p", "minimum": "maximum", "maximum": "minimum",
    "any": "all", "all": "any", "argmax": "argmin", "argmin": "argmax", "ceil_pages": "floor_p",
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    file: str
    key: str  # file::function::change::occurrence — does not move when lines are added elsewhere
    line: int
    number: int  # among the mutants of its file


# --- making mutants ----------------------------------------------------------------------------------------------


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST | None]]:
    """(description, replacement) for every way to spoil `node`; None deletes the statement."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARISONS:
        new = copy.deepcopy(node)
        new.ops = [COMPARISONS[type(node.ops[0])]()]
        yield f"{type(node.ops[0]).__name__} -> {type(new.ops[0]).__name__}", new
    if isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in ARITHMETIC and not _text(node):
        new_op = copy.deepcopy(node)
        new_op.op = ARITHMETIC[type(node.op)]()
        yield f"{type(node.op).__name__} -> {type(new_op.op).__name__}", new_op
    if isinstance(node, ast.BoolOp):
        other = copy.deepcopy(node)
        other.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield f"{type(node.op).__name__} -> {type(other.op).__name__}", other
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "Not dropped", copy.deepcopy(node.operand)
    if isinstance(node, ast.Constant) and type(node.value) is int:
        for step in (1, -1):
            yield f"{node.value} -> {node.value + step}", ast.Constant(node.value + step)
    if isinstance(node, ast.Constant) and type(node.value) is bool:
        yield f"{node.value} -> {not node.value}", ast.Constant(not node.value)
    if isinstance(node, ast.Call):
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        if name in NAMES:
            called = copy.deepcopy(node)
            if isinstance(called.func, ast.Name):
                called.func.id = NAMES[name]
            elif isinstance(called.func, ast.Attribute):
                called.func.attr = NAMES[name]
            yield f"{name} -> {NAMES[name]}", called
    if isinstance(node, (ast.Raise, ast.AugAssign, ast.Continue, ast.Break, ast.Delete)):
        yield f"{type(node).__name__} deleted", None
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "Call deleted", None
    if isinstance(node, ast.Assign) and any(isinstance(t, (ast.Attribute, ast.Subscript)) for t in node.targets):
        yield "Assign deleted", None


def _text(node: ast.BinOp | ast.AugAssign) -> bool:
    """Adding strings is no arithmetic."""
    parts = [node.left, node.right] if isinstance(node, ast.BinOp) else [node.value]
    return any(
        isinstance(p, ast.JoinedStr) or (isinstance(p, ast.Constant) and isinstance(p.value, str)) for p in parts
    )


def sites(tree: ast.Module) -> Iterator[tuple[str, ast.AST, ast.AST, str, int | None]]:
    """(function, node, parent, field, index) of all code that runs; annotations and messages are left alone."""

    def walk(node: ast.AST, function: str) -> Iterator[tuple[str, ast.AST, ast.AST, str, int | None]]:
        inner = function
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            inner = f"{function}.{node.name}" if function else node.name
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list", "format_spec", "bases", "slice_") or (
                isinstance(node, ast.If) and field == "body" and _typing_only(node)
            ):
                continue
            for index, child in enumerate(value if isinstance(value, list) else [value]):
                if isinstance(child, ast.AST) and not isinstance(child, ast.expr_context):
                    yield inner, child, node, field, index if isinstance(value, list) else None
                    yield from walk(child, inner)

    yield from walk(tree, "")


def _typing_only(node: ast.If) -> bool:
    return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def mutants_of(path: Path) -> list[Mutant]:
    """All mutants of a file, not written out yet."""
    seen: dict[str, int] = {}
    made: list[Mutant] = []
    for number, (node, _, _, _, function, change, _) in enumerate(spoiled(ast.parse(path.read_text()))):
        name = f"{path.name}::{function}::{change}"
        seen[name] = seen.get(name, 0) + 1
        made.append(Mutant(path.name, f"{name}::{seen[name]}", getattr(node, "lineno", 0), number))
    return made


def spoiled(tree: ast.Module) -> Iterator[tuple[ast.AST, ast.AST, str, int | None, str, str, ast.AST | None]]:
    """(node, parent, field, index, function, change, replacement) of every mutant, always in the same order."""
    for function, node, parent, field, index in sites(tree):
        for change, replacement in changes(node):
            yield node, parent, field, index, function, change, replacement


def source_of(mutant: Mutant) -> str:
    tree = ast.parse((PACKAGE / mutant.file).read_text())
    _, parent, field, index, _, _, replacement = next(itertools.islice(spoiled(tree), mutant.number, None))
    put = replacement if replacement is not None else ast.Pass()
    if index is None:
        setattr(parent, field, put)
    else:
        getattr(parent, field)[index] = put
    return ast.unparse(ast.fix_missing_locations(tree))


# --- running them ------------------------------------------------------------------------------------------------


def snapshot(folder: Path) -> None:
    """Work on a copy of the sources: whoever edits them meanwhile does not change what is tested."""
    global PACKAGE
    shutil.copytree(PACKAGE, folder / "kv")
    shutil.copy(PACKAGE.parent / "errors.py", folder / "errors.py")
    PACKAGE = folder / "kv"


def overlay(mutant: Mutant, folder: Path) -> None:
    """A package `octavo` of kv/ and errors.py alone, one file of it changed."""
    kv = folder / "octavo" / "kv"
    kv.mkdir(parents=True)
    (folder / "octavo" / "__init__.py").touch()
    (folder / "octavo" / "errors.py").symlink_to(PACKAGE.parent / "errors.py")
    for file in PACKAGE.glob("*.py"):
        if file.name == mutant.file:
            (kv / file.name).write_text(source_of(mutant))
        else:
            (kv / file.name).symlink_to(file)


def passes(mutant: Mutant, files: list[str], *, timeout_s: float, select: str = "") -> bool:
    """Do these test files pass against the mutant? A child that hangs or dies did not pass."""
    with tempfile.TemporaryDirectory(prefix="mutant") as name:
        folder = Path(name)
        overlay(mutant, folder)
        child = os.fork()
        if child == 0:
            _child(folder, files, select)
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status) == 0
            time.sleep(0.02)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return False


def _child(folder: Path, files: list[str], select: str) -> None:
    code = 1
    try:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        import pytest

        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # they take longer to load than most tests to fail
        os.environ["OCTAVO_LAW_MOVES"] = str(SIMULATED_MOVES)
        os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(folder / "hypothesis")
        # An installed octavo may come with an import hook of its own: the mutant goes first.
        sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in type(f).__module__.lower()]
        sys.path.insert(0, str(folder))
        import octavo

        if not str(octavo.__file__).startswith(str(folder)):
            os._exit(99)
        ini = folder / "pytest.ini"
        ini.write_text(f"[pytest]\naddopts = --import-mode=importlib\npythonpath = {REPO}\nmarkers = soak\n")
        options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not soak", "-c", str(ini), "--rootdir", str(REPO)]
        if select:
            options += ["-k", select]
        code = int(pytest.main([*options, *(str(TESTS / file) for file in files)]))
    finally:
        os._exit(code)


def survives(mutant: Mutant) -> bool:
    first = FIRST_BY_FILE.get(mutant.file, ["test_ledger.py"])
    rest = [file for file in QUICK if file not in first]
    return all(passes(mutant, files, timeout_s=400) for files in (first, rest, LAST))


# --- the list of equivalent mutants --------------------------------------------------------------------------------


def listed_survivors() -> dict[str, str]:
    """Pattern of mutant keys -> why those mutants change nothing that can be observed."""
    found: dict[str, str] = {}
    for line in SURVIVORS.read_text().splitlines() if SURVIVORS.exists() else []:
        if line.strip() and not line.startswith("#"):
            pattern, _, reason = line.partition(" | ")
            if not reason.strip():
                sys.exit(f"{SURVIVORS.name}: no reason for {pattern}")
            found[pattern.strip()] = reason.strip()
    return found


def is_listed(mutant: Mutant, patterns: dict[str, str]) -> bool:
    return any(fnmatch.fnmatchcase(mutant.key, pattern.replace("[", "[[]")) for pattern in patterns)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, help="so many mutants, the same for the same --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--files", nargs="*", help="only these files of kv/")
    parser.add_argument("--results", type=Path, help="JSON file of outcomes: finished mutants are not run again")
    parser.add_argument("--list", action="store_true", help="print the mutants and stop")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="stop starting mutants after so long")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at the same time")
    args = parser.parse_args()
    files = sorted(p for p in PACKAGE.glob("*.py") if p.stem != "__init__" and (not args.files or p.name in args.files))
    mutants = [mutant for file in files for mutant in mutants_of(file)]
    if args.sample:
        mutants = random.Random(args.seed).sample(mutants, min(args.sample, len(mutants)))
    if args.list:
        print("\n".join(f"{m.line:4} {m.key}" for m in mutants))
        return 0
    import hypothesis  # noqa: F401  loaded once, inherited by the children
    import numpy  # noqa: F401
    import pytest  # noqa: F401

    with tempfile.TemporaryDirectory(prefix="octavo-kv") as folder:
        snapshot(Path(folder))
        return run_all(mutants, args.results, args.limit_s, args.jobs)


def run_all(mutants: list[Mutant], results: Path | None, limit_s: float, jobs: int) -> int:
    """Run every mutant, print the outcome; the exit status."""
    patterns = listed_survivors()
    outcomes: dict[str, str] = json.loads(results.read_text()) if results and results.exists() else {}
    start = time.monotonic()
    left = [mutant for mutant in mutants if mutant.key not in outcomes]
    outcomes.update({mutant.key: "listed" for mutant in left if is_listed(mutant, patterns)})
    left = [mutant for mutant in left if mutant.key not in outcomes]
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("fork")) as pool:
        for number, (mutant, alive) in enumerate(zip(left, pool.map(survives, left), strict=True), 1):
            outcomes[mutant.key] = "survived" if alive else "killed"
            if alive:
                print(f"survived: {mutant.file}:{mutant.line} {mutant.key}", flush=True)
            if results:
                results.write_text(json.dumps(outcomes, indent=0))
            if number % 50 == 0:
                print(f"{number} of {len(left)}, {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
            if time.monotonic() - start > limit_s:
                pool.shutdown(cancel_futures=True)
                break
    found = [outcomes.get(mutant.key, "not run") for mutant in mutants]
    print(f"{len(mutants)} generated, {found.count('killed')} killed, {found.count('listed')} listed", end="")
    print("".join(f", {found.count(word)} {word}" for word in ("survived", "not run") if word in found))
    return 1 if "survived" in found or "not run" in found else 0


if __name__ == "__main__":
    sys.exit(main())
