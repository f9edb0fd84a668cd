"""`octavo models`: what can be run by name, and what is already here."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from octavo.cli import common
from octavo.config import EngineConfig
from octavo.options import format_size

HELP = "list the models that have a name, and those already fetched"
EXAMPLES = ["octavo models", "octavo models --json"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print a JSON list (docs/schemas/models.json)")
    common.add_config_options(parser, EngineConfig, only=("cache_dir",))


def run(args: argparse.Namespace) -> int:
    from octavo.model.load.cache import cache_folder
    from octavo.model.load.hub import list_models

    config = common.config_from(args, EngineConfig)
    models = list_models(config.cache_dir)
    if args.json:
        listed = [asdict(model) | {"path": str(model.path) if model.path else None} for model in models]
        print(json.dumps(listed, indent=1))
        return 0
    from octavo.bench.record import render

    rows = [["name", "size", "here", "licence", "model"]]
    for model in models:
        here = "yes" if model.path is not None else "no"
        rows.append([model.name, format_size(model.size_bytes), here, model.licence, model.title])
    print(render(rows))
    print(f"\ncache: {cache_folder(config.cache_dir)}")
    print("Any .gguf file, safetensors folder or hub id works too: octavo generate --model PATH_OR_ID …")
    return 0
