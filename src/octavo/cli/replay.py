"""`octavo replay`: recorded ledger calls on other books, without a model."""

from __future__ import annotations

import argparse
import json

from octavo.cli import common
from octavo.config import EngineConfig
from octavo.errors import ConfigError

HELP = "replay a --record-trace file with another page size, pool size, host tier or eviction policy"
EXAMPLES = [
    "octavo generate 'Hello' --record-trace trace.jsonl",
    "octavo replay trace.jsonl",
    "octavo replay trace.jsonl --page-size 64 --num-pages 500 --evict-policy mymodule:MyPolicy",
    "octavo replay hisparse.jsonl --host-pages 2000",
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", metavar="FILE", help="what --record-trace wrote")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--host-pages", metavar="N", help="pages of the host tier (traces recorded with --hisparse)")
    only = ("page_size", "num_pages", "num_swa_pages", "evict_policy")
    common.add_config_options(parser, EngineConfig, only=only)


def run(args: argparse.Namespace) -> int:
    from octavo.kv.trace import replay

    config = common.config_from(args, EngineConfig)
    given = common.given_options(args)
    outcome = replay(
        args.trace,
        page_size=config.page_size if "page_size" in given else None,
        num_pages=config.num_pages,
        swa_pages=config.num_swa_pages,
        host_pages=None if args.host_pages is None else _pages(args.host_pages),
        evict_policy=config.evict_policy if "evict_policy" in given else None,
    )
    if args.json:
        print(json.dumps(outcome, indent=1))
    else:
        for name, value in outcome.items():
            print(f"{name.replace('_', ' '):18} {_shown(value)}")
    return 1 if outcome["violations"] else 0


def _pages(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError("--host-pages", text, "allowed: a whole number from 1")
    return int(text)


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {number}" for key, number in value.items())
    return f"{value:.3f}" if isinstance(value, float) else str(value)
