"""`octavo pull`: fetch models before they are needed."""

from __future__ import annotations

import argparse
import json

from octavo.cli import common
from octavo.config import EngineConfig
from octavo.options import format_size

HELP = "fetch models into the cache, resuming what was cut off"
EXAMPLES = [
    "octavo pull smollm2",
    "octavo pull gemma3-270m --accept-license",
    "octavo pull HuggingFaceTB/SmolLM2-135M-Instruct",
    "octavo pull smollm2 --verify",
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="+", metavar="NAME", help="a name `octavo models` lists, or a hub id")
    parser.add_argument("--verify", action="store_true", help="hash what is here, fetch it again if it is wrong")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress bar")
    parser.add_argument("--json", action="store_true", help="print a JSON list of name, path, size_bytes")
    common.add_config_options(parser, EngineConfig, only=("accept_license", "cache_dir"))


def run(args: argparse.Namespace) -> int:
    from octavo.model.load.hub import pull

    config = common.config_from(args, EngineConfig)
    fetched = []
    for name in args.names:
        path = pull(
            name,
            cache_dir=config.cache_dir,
            accept_license=config.accept_license,
            progress=not (args.quiet or args.json),
            verify=args.verify,
        )
        files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
        size_bytes = sum(file.stat().st_size for file in files)
        fetched.append({"name": name, "path": str(path), "size_bytes": size_bytes})
        if not args.json:
            print(f"{name}: {path} ({format_size(size_bytes)})")
    if args.json:
        print(json.dumps(fetched, indent=1))
    return 0
