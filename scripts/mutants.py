"""Mutants of a Python file, from its syntax tree: comparisons, arithmetic, ±1, min/max, floor/ceil, any/all, and/or,
dropped statements. Annotations, messages and decorators are left alone."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

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
    number: int  # among the mutants of its file
    line: int
    first_line: int  # of the simple statement, or of the head of the compound one, that it is in
    last_line: int
    function: tuple[str, int] | None  # outermost function around it, as its code object says; None: runs at import


class Site(NamedTuple):
    """A node of the syntax tree and where it hangs: parent.field, or parent.field[index]."""

    node: ast.AST
    parent: ast.AST
    field: str
    index: int | None
    name: str  # dotted name of the innermost function or class
    function: tuple[str, int] | None
    lines: tuple[int, int]


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


def sites(tree: ast.Module) -> Iterator[Site]:
    """All code that runs."""

    def walk(node: ast.AST, name: str, function: tuple[str, int] | None, lines: tuple[int, int]) -> Iterator[Site]:
        inner = name
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            inner = f"{name}.{node.name}" if name else node.name
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list", "format_spec", "bases", "slice_") or (
                isinstance(node, ast.If) and field == "body" and _typing_only(node)
            ):
                continue
            # Default values are computed when the function is defined, its body when it runs.
            runs_in = function
            if function is None and field == "body" and isinstance(node, ast.FunctionDef):
                runs_in = inner, min([node.lineno, *(d.lineno for d in node.decorator_list)])
            for index, child in enumerate(value if isinstance(value, list) else [value]):
                if isinstance(child, ast.AST) and not isinstance(child, ast.expr_context):
                    at = _lines(child) if isinstance(child, (ast.stmt, ast.ExceptHandler)) else lines
                    yield Site(child, node, field, index if isinstance(value, list) else None, inner, runs_in, at)
                    yield from walk(child, inner, runs_in, at)

    yield from walk(tree, "", None, (0, 0))


def _lines(node: ast.stmt | ast.ExceptHandler) -> tuple[int, int]:
    """First and last line of a simple statement, or of a compound one up to its body."""
    body = getattr(node, "body", None)
    if body:
        return node.lineno, max(node.lineno, body[0].lineno - 1)
    return node.lineno, node.end_lineno or node.lineno


def _typing_only(node: ast.If) -> bool:
    return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def spoiled(tree: ast.Module) -> Iterator[tuple[Site, str, ast.AST | None]]:
    """(site, change, replacement) of every mutant, always in the same order."""
    for site in sites(tree):
        for change, replacement in changes(site.node):
            yield site, change, replacement


@lru_cache
def _parsed(path: Path) -> tuple[ast.Module, list[tuple[Site, str, ast.AST | None]]]:
    tree = ast.parse(path.read_text())
    return tree, list(spoiled(tree))


def mutants_of(path: Path) -> list[Mutant]:
    """All mutants of a file, not written out yet."""
    seen: dict[str, int] = {}
    made: list[Mutant] = []
    for number, (site, change, _) in enumerate(_parsed(path)[1]):
        name = f"{path.name}::{site.name}::{change}"
        seen[name] = seen.get(name, 0) + 1
        line = getattr(site.node, "lineno", 0)
        made.append(Mutant(path.name, f"{name}::{seen[name]}", number, line, *site.lines, site.function))
    return made


@contextmanager
def spoiled_tree(path: Path, mutant: Mutant | None) -> Iterator[ast.Module]:
    """The syntax tree of the file, changed; with its old line numbers. Without a mutant: as it is."""
    tree, every = _parsed(path)
    if mutant is None:
        yield tree
        return
    site, _, replacement = every[mutant.number]
    put = ast.copy_location(replacement if replacement is not None else ast.Pass(), site.node)
    ast.fix_missing_locations(put)
    _put(site, put)
    try:
        yield tree
    finally:
        _put(site, site.node)


def _put(site: Site, node: ast.AST) -> None:
    if site.index is None:
        setattr(site.parent, site.field, node)
    else:
        getattr(site.parent, site.field)[site.index] = node
