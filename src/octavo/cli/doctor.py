"""`octavo doctor`: a report on this machine, and checks that can fail."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from octavo.cli import common
from octavo.config import EngineConfig
from octavo.options import format_size

if TYPE_CHECKING:
    from octavo.doctor import Report

HELP = "say what this machine offers and check that the kernels are right"
EXAMPLES = ["octavo doctor", "octavo doctor --no-check", "octavo doctor --json > report.json"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object (docs/schemas/doctor.json)")
    parser.add_argument("--no-check", action="store_true", help="look at the machine only; load no model")
    common.add_config_options(parser, EngineConfig)


def run(args: argparse.Namespace) -> int:
    from octavo.doctor import examine

    config = common.config_from(args, EngineConfig)
    report = examine(config, lambda text: print(f"{text} …", file=sys.stderr), model=not args.no_check)
    print(json.dumps(report.to_dict(), indent=1) if args.json else _text(report))
    return 0 if report.healthy else 1


def _text(report: Report) -> str:
    machine, software = report.machine, report.software
    lines = [
        f"octavo    {report.version}",
        f"system    {machine['system']}, Python {software['python']}",
        f"cpu       {machine['cpu']}: {machine['physical_cores']} cores for this process",
        f"          {' '.join(machine['instruction_sets'])}",
        f"memory    {format_size(machine['memory_available_bytes'])} available",
        f"torch     {software['torch']} ({software['torch_cpu_capability']}), "
        + (f"CUDA: {software['cuda']}" if software["cuda"] else "no CUDA device"),
        f"native    {software['native_operations']}",
        *(f"set       {name}={value}" for name, value in report.environment.items()),
        *report.engine,
        *(f"{'ok ' if check.passed else 'BAD'}       {check.name}: {check.detail}" for check in report.checks),
    ]
    return "\n".join(lines)
