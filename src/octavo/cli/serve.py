"""`octavo serve`: the OpenAI-compatible HTTP server."""

from __future__ import annotations

import argparse

from octavo.cli import common
from octavo.config import ServerConfig

HELP = "serve an OpenAI-compatible HTTP API"
EXAMPLES = [
    "octavo serve",
    "octavo serve --model ./model.gguf --host 0.0.0.0 --port 8080",
    "OCTAVO_API_KEY=secret octavo serve --draft ngram --max-running 16",
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_config_options(parser, ServerConfig)


def run(args: argparse.Namespace) -> int:
    config = common.config_from(args, ServerConfig)
    from octavo.api.server import serve

    return serve(config)
