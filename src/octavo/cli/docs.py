"""docs/cli.md, written from the parser and the option table (scripts/generate_docs.py)."""

from __future__ import annotations

import argparse
import importlib

from octavo.cli.parser import COMMANDS, build_parser
from octavo.config import ServerConfig
from octavo.options import Option

_HEAD = """# Command line

Written by `make docs` from the parser and the option table in `src/octavo/config.py`; `make check` fails where this
file is out of step.

Exit codes: 0 done, 1 failure, 2 bad usage, 130 interrupted. An error of the user's is one line; `-v` adds its
traceback. A bad value names the option, the value and what is allowed.
"""

_OPTIONS_HEAD = """## Options

Options of engine and server. Each can also be given as a keyword of `LLM(...)` (the name without dashes, in snake
case) and by its environment name. A flag or keyword wins over the environment, the environment over the default. A
switch `--x` has a `--no-x`; in the environment it takes 1, true, yes, on, 0, false, no or off. Sizes take a number of
bytes or `512MiB`, `2GiB` (K, M, G, T are binary; KB, MB, GB, TB decimal).
"""


def markdown() -> str:
    """The whole document."""
    parser = build_parser()
    parts = [_HEAD]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            parts.extend(_command(name, sub) for name, sub in action.choices.items())
    parts.append(_OPTIONS_HEAD)
    parts.append(_option_table(list(ServerConfig.options().values())))
    return "\n".join(parts)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _command(name: str, parser: argparse.ArgumentParser) -> str:
    module = importlib.import_module(COMMANDS[name])
    lines = [f"## octavo {name}\n", f"{module.HELP[0].upper()}{module.HELP[1:]}.\n", "```"]
    lines += [*module.EXAMPLES, "```\n"]
    rows, has_options = [], False
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction) or "--verbose" in action.option_strings:
            continue
        if action.dest.startswith("option_"):
            has_options = True
            continue
        shown = ", ".join(f"`{flag}`" for flag in action.option_strings) or f"`{action.metavar or action.dest}`"
        value = f" `{action.metavar}`" if action.option_strings and action.metavar else ""
        rows.append(f"| {shown}{value} | {_cell(action.help or '')} |")
    if rows:
        lines += ["| argument | meaning |", "|---|---|", *rows, ""]
    if has_options:
        lines.append("Takes the options below that concern it (`octavo " + name + " --help` lists them).\n")
    return "\n".join(lines)


def _option_table(options: list[Option]) -> str:
    lines = ["| flag | environment | default | allowed | meaning |", "|---|---|---|---|---|"]
    for opt in options:
        flag = f"`{opt.flag}`" + (f", `--no-{opt.flag[2:]}`" if opt.boolean else "")
        allowed = "a switch" if opt.boolean else opt.allowed
        lines.append(f"| {flag} | `{opt.env}` | {_cell(opt.shown_default)} | {_cell(allowed)} | {_cell(opt.help)} |")
    return "\n".join(lines) + "\n"
