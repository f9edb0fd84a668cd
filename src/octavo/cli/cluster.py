"""`octavo cluster up`: prefill and decode servers placed by Ray, with a router in front."""

from __future__ import annotations

import argparse
import dataclasses

from octavo.cli import common
from octavo.config import ServerConfig
from octavo.errors import ConfigError

HELP = "place prefill and decode servers on machines (Ray) with a router in front"
EXAMPLES = [
    "octavo cluster up --prefill 1 --decode 2",
    "octavo cluster up --ray-address auto --prefill 2 --decode 6 --model ./model.gguf",
]
_PLACED = ("role", "bootstrap_host", "bootstrap_port", "port", "host", "ssl_certfile", "ssl_keyfile", "root_path")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=["up"], help="up: start, and stop everything with Ctrl-C")
    group = parser.add_argument_group("cluster")
    group.add_argument("--prefill", type=int, default=1, metavar="N", help="prefill servers (default: 1)")
    group.add_argument("--decode", type=int, default=1, metavar="N", help="decode servers (default: 1)")
    group.add_argument("--ray-address", default="local", metavar="ADDRESS",
                       help="a running Ray cluster (auto, or ray://…); local starts one here (default: local)")
    group.add_argument("--router-host", default="127.0.0.1", metavar="HOST",
                       help="address the router listens on (default: 127.0.0.1)")
    group.add_argument("--router-port", type=int, default=8000, metavar="PORT",
                       help="port the router listens on; 0 takes a free one (default: 8000)")
    common.add_config_options(parser, ServerConfig, exclude=_PLACED)


def run(args: argparse.Namespace) -> int:
    for flag, value, low, high in (("--prefill", args.prefill, 1, 4096), ("--decode", args.decode, 1, 4096),
                                   ("--router-port", args.router_port, 0, 65535)):
        if not low <= value <= high:
            raise ConfigError(flag, value, f"allowed: {low} to {high}")
    config = common.config_from(args, ServerConfig)
    flags = serve_flags(common.given_options(args))
    from octavo.disagg.cluster import up

    return up(flags, prefill=args.prefill, decode=args.decode, ray_address=args.ray_address,
              router=(args.router_host, args.router_port), threads=config.num_threads, api_key=config.api_key)


def serve_flags(given: dict[str, object]) -> list[str]:
    """Options given here, as flags for `octavo serve`; secrets go through the environment instead."""
    options = ServerConfig.options()
    secrets = {field.name for field in dataclasses.fields(ServerConfig) if not field.repr}
    flags: list[str] = []
    for name, value in given.items():
        option = options[name]
        if name in secrets:
            continue
        if option.boolean:
            flags.append(option.flag if value else "--no-" + option.flag.removeprefix("--"))
        else:
            flags += [option.flag, str(value)]
    return flags
