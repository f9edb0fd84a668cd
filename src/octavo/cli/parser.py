"""The parser of every command, made from the option table and the commands' own arguments."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any

from octavo._version import __version__

# Command name -> its module. Each has HELP, EXAMPLES, add_arguments(parser) and run(args) -> exit code.
COMMANDS = {
    "generate": "octavo.cli.generate",
    "chat": "octavo.cli.chat",
    "serve": "octavo.cli.serve",
    "cluster": "octavo.cli.cluster",
    "bench": "octavo.cli.bench",
    "pull": "octavo.cli.pull",
    "models": "octavo.cli.models",
    "doctor": "octavo.cli.doctor",
    "train-draft": "octavo.train.main",
    "replay": "octavo.cli.replay",
}

DESCRIPTION = "Octavo: LLM inference whose KV memory is exact to the page."
EPILOG = """start here:
  octavo generate "Why is the sky blue?"     fetches a small model once, then answers
  octavo chat                                a conversation in the terminal
  octavo doctor                              what this machine offers

Every option can be set by an environment name too, e.g. OCTAVO_MODEL for --model (see docs/cli.md).
exit codes: 0 done, 1 failure, 2 bad usage, 130 interrupted"""


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps examples as they are written; room for long flags."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=100)


class Parser(argparse.ArgumentParser):
    """One line for a usage error, and where help is; exit code 2."""

    def error(self, message: str) -> Any:
        self.exit(2, f"octavo: {message} (see `{self.prog} --help`)\n")


def build_parser() -> Parser:
    parser = Parser(
        prog="octavo", description=DESCRIPTION, epilog=EPILOG, formatter_class=HelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"octavo {__version__}")
    parser.add_argument("-v", "--verbose", action="store_true", help="show tracebacks of errors")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands", parser_class=Parser)
    for name, module_name in COMMANDS.items():
        module = importlib.import_module(module_name)
        sub = commands.add_parser(
            name,
            help=module.HELP,
            description=module.HELP[0].upper() + module.HELP[1:] + ".",
            epilog="examples:\n" + "\n".join(f"  {line}" for line in module.EXAMPLES),
            formatter_class=HelpFormatter,
            allow_abbrev=False,
        )
        sub.add_argument(
            "-v", "--verbose", action="store_true", default=argparse.SUPPRESS, help="show tracebacks of errors"
        )
        module.add_arguments(sub)
        sub.set_defaults(run=module.run)
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parsed arguments with `run` set. Exits (2, or 0 for --help) as argparse does."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help(sys.stderr)
        parser.exit(2)
    return args
