"""`octavo bench`: speed of this engine, of a peer in the same run, and what a weight format costs."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.bench import MODES
from octavo.cli import common
from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.options import format_size

if TYPE_CHECKING:
    from octavo.bench.engines import Engine
    from octavo.bench.measure import Line
    from octavo.bench.perplexity import Perplexity
    from octavo.bench.profile import Profile
    from octavo.bench.workload import Case

HELP = "measure speed, compare with a peer, score weight formats"
EXAMPLES = [
    "octavo bench --mode plain,ngram --depth 128,2048 --repeats 5",
    "octavo bench --chat --mode plain,best --streams 1,4,16 --json",
    "octavo bench --depth 128 --peer llama.cpp --out benchmarks/results/decode.json",
    "octavo bench --prefill 512 --peer llama.cpp",
    "octavo bench --server http://127.0.0.1:8000 --streams 1,8,32 --requests 200",
    "octavo bench --perplexity exact,auto,int8,int4 --perplexity-tokens 8192",
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    work = parser.add_argument_group("work")
    work.add_argument("--mode", default="plain", metavar="MODE[,MODE]", help=f"{', '.join(MODES)} (default: plain)")
    work.add_argument("--depth", metavar="N[,N]", help="prompts of exactly N tokens (default: 128)")
    work.add_argument("--prefill", metavar="N[,N]", help="prefill alone: prompts of N tokens, one token of answer")
    work.add_argument("--chat", action="store_true", help="the chat prompts of --prompts")
    work.add_argument(
        "--prompts", metavar="FILE", help="JSON lines with a field 'prompt' (default: benchmarks/prompts/chat40.jsonl)"
    )
    work.add_argument("--limit", metavar="N", help="only N of the chat prompts, evenly from all of them")
    work.add_argument(
        "--streams", "--concurrency", default="1", metavar="N[,N]", help="requests at a time (default: 1)"
    )
    work.add_argument("--output-tokens", default="128", metavar="N", help="forced length of answers (default: 128)")
    work.add_argument("--temperature", default="0", metavar="X[,X]", help="0 is greedy (default: 0)")
    work.add_argument("--repeats", default="5", metavar="N", help="timed rounds after a warm-up (default: 5)")
    work.add_argument("--turns", default="1", metavar="N", help="prompts of --depth and --prefill a round (default: 1)")
    peers = parser.add_argument_group("peers")
    peers.add_argument("--peer", metavar="NAME[,NAME]", help="llama.cpp, vllm, transformers: same ids, same run")
    peers.add_argument("--peer-python", metavar="PATH", help="the peer's interpreter (default: of `make peers`)")
    peers.add_argument("--peer-model", metavar="PATH", help="the peer's model (default: the same file)")
    peers.add_argument("--peer-threads", metavar="N[,N]", help="the fastest counts (default: 1 up to --threads)")
    server = parser.add_argument_group("a server")
    server.add_argument("--server", metavar="URL", help="drive an OpenAI-compatible server instead of this engine")
    server.add_argument("--server-model", metavar="NAME", help="model to ask for (default: the server's first)")
    server.add_argument("--server-key", metavar="KEY", help="API key (better: OCTAVO_API_KEY or OPENAI_API_KEY)")
    server.add_argument("--requests", metavar="N", help="how many; prompts repeat (default: once each)")
    server.add_argument("--timeout", default="600", metavar="SECONDS", help="for one answer (default: 600)")
    look = parser.add_argument_group("a closer look")
    look.add_argument("--profile", action="store_true", help="also split a decode step of each mode into its parts")
    look.add_argument("--plot", metavar="FILE", help="write acceptance by position and the parts of a step as SVG")
    quality = parser.add_argument_group("quality of weight formats")
    quality.add_argument(
        "--perplexity",
        nargs="?",
        const="exact,auto,int8,int4,bf16",
        metavar="FORMAT[,FORMAT]",
        help="score a fixed text instead of timing: exact, float32, auto, int8, int4, bf16",
    )
    quality.add_argument("--perplexity-tokens", default="4096", metavar="N", help="tokens of text (default: 4096)")
    quality.add_argument(
        "--perplexity-text", metavar="FILE", help="text to score (default: Python's help topics; see scripts/texts.sh)"
    )
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print one JSON object (docs/schemas/bench.json)")
    output.add_argument("--out", metavar="FILE", help="write the JSON to FILE as well")
    common.add_config_options(parser, EngineConfig, exclude=("draft", "prefix_cache"))


def run(args: argparse.Namespace) -> int:
    config = common.config_from(args, EngineConfig)
    if args.server:
        result, table = _server(args)
    else:
        result, table = _perplexity(args, config) if args.perplexity else _speed(args, config)
    if args.out:
        from octavo.bench.record import save

        save(result, Path(args.out))
    print(json.dumps(result, indent=1) if args.json else table)
    return 0


# Arguments


def _numbers(args: argparse.Namespace, name: str, low: int) -> list[int]:
    """Whole numbers from `low` of an argument with commas. Raises ConfigError."""
    text, flag = getattr(args, name), "--" + name.replace("_", "-")
    try:
        values = [int(word) for word in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < low:
        raise ConfigError(flag, text, f"allowed: whole numbers from {low}, with commas between them")
    return values


def _temperatures(text: str) -> list[float]:
    try:
        values = [float(word) for word in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(0 <= v < float("inf") for v in values):
        raise ConfigError("--temperature", text, "allowed: numbers from 0, with commas between them")
    return values


def _cases(args: argparse.Namespace) -> list[Case]:
    from octavo.bench.workload import Case

    output_tokens = _numbers(args, "output_tokens", 1)[0]
    streams, temperatures = _numbers(args, "streams", 1), _temperatures(args.temperature)
    kinds: list[tuple[str, int | None, int]] = []
    if args.depth or not (args.prefill or args.chat):
        args.depth = args.depth or "128"
        kinds += [("depth", depth, output_tokens) for depth in _numbers(args, "depth", 1)]
    if args.prefill:
        kinds += [("depth", length, 1) for length in _numbers(args, "prefill", 1)]
    if args.chat:
        kinds.append(("chat", None, output_tokens))
    return [Case(kind, s, length, out, t) for kind, length, out in kinds for s in streams for t in temperatures]


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
    else:
        print(text, file=sys.stderr, flush=True)


# Speed


def _speed(args: argparse.Namespace, config: EngineConfig) -> tuple[dict[str, Any], str]:
    from octavo.bench import measure, record
    from octavo.bench.engines import Ours
    from octavo.bench.profile import rows as profile_rows
    from octavo.bench.workload import ChatPrompts, DepthPrompts, chat_prompts_path

    cases = _cases(args)
    modes = args.mode.split(",")
    repeats = _numbers(args, "repeats", 1)[0]
    limit = _numbers(args, "limit", 1)[0] if args.limit else None
    path = chat_prompts_path(args.prompts) if args.chat else None
    if unknown := [mode for mode in modes if mode not in MODES]:
        raise ConfigError("--mode", unknown[0], f"allowed: {', '.join(MODES)}")
    config = config.replace(max_running=max(config.max_running, *(case.streams for case in cases)))
    engines: list[Engine] = []
    try:
        for mode in modes:
            _progress(f"loading {config.model}, {mode}")
            engines.append(Ours(mode, config))
        tokenizer = engines[0].llm.tokenizer  # type: ignore[attr-defined]
        prompts: dict[str, measure.Prompts] = {"depth": DepthPrompts(tokenizer.encode, _numbers(args, "turns", 1)[0])}
        if path is not None:
            prompts["chat"] = ChatPrompts(path, tokenizer.encode_chat, limit)
        engines += _peers(args, config, cases, prompts)
        lines = measure.measure(engines, cases, prompts, repeats, _progress)
        _compare_with_plain(engines, lines, prompts, repeats)
        profiles = _profiles(engines, prompts, cases) if args.profile or args.plot else []
        described = {f"{e.name} {e.mode} {e.threads}": e.describe() for e in engines}
    finally:
        for engine in engines:
            engine.close()
        if sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr)
    result = record.document(lines, described, {"name": config.model}, {"sampling": 1})
    result["profiles"] = [p.to_dict() for p in profiles]
    if args.plot:
        _plot(Path(args.plot), lines, profiles)
    note = f"peak memory {format_size(record.peak_memory_bytes())}; {config.num_threads} threads; {repeats} repeats"
    table = record.table(lines) + "\n" + note
    if args.profile:
        table += "\n\n" + record.render(profile_rows(profiles))
    return result, table


def _compare_with_plain(engines: list[Engine], lines: list[Line], prompts: dict[str, Any], repeats: int) -> None:
    """Where outputs of drafting modes part from plain ones, as they may where kernels depend on the row count."""
    from octavo.bench.engines import Ours
    from octavo.bench.measure import divergences

    plain = next((e for e in engines if isinstance(e, Ours) and e.mode == "plain"), None)
    own = [line for line in lines if line.engine == Ours.name]
    for line in own:
        other = next((n for n in own if n.case == line.case and n.mode == "plain"), None)
        if plain is not None and other is not None and other is not line:
            asked = [p for group in prompts[line.case.kind].groups(line.case, repeats - 1) for p in group]
            line.divergences = divergences(line, other, asked, plain.top2_margin)


def _profiles(engines: list[Engine], prompts: dict[str, Any], cases: list[Case]) -> list[Profile]:
    """A decode step of each mode of this engine, one stream, on the first case's first prompt."""
    from octavo.bench.engines import Ours
    from octavo.bench.profile import profile
    from octavo.params import SamplingParams

    case = next((c for c in cases if c.output_tokens > 1), None)
    if case is None:
        raise ConfigError("--profile", True, "allowed: with answers of more than one token (--depth or --chat)")
    prompt = prompts[case.kind].groups(case, 0)[0][0]
    params = SamplingParams(temperature=0, max_tokens=case.output_tokens, ignore_eos=True)
    ours = [engine for engine in engines if isinstance(engine, Ours)]
    for engine in ours:
        _progress(f"profile of {engine.mode}")
    return [profile(engine.llm, engine.mode, prompt, params) for engine in ours]


def _plot(path: Path, lines: list[Line], profiles: list[Profile]) -> None:
    from octavo.bench.plot import svg

    acceptance = {n.mode: n.accepted_by_position for n in lines if n.accepted_by_position}
    steps = {p.mode: {k: 1000 * v / max(1, p.steps) for k, v in p.parts_s.items()} for p in profiles}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(svg(acceptance, steps))


def _peers(args: argparse.Namespace, config: EngineConfig, cases: list[Case], prompts: dict[str, Any]) -> list[Engine]:
    """Peers to measure beside this engine, each with every thread count asked for."""
    from octavo.bench.engines import Peer, peer_python

    if not args.peer:
        return []
    model = args.peer_model or _model_path(config)
    threads = _numbers(args, "peer_threads", 1) if args.peer_threads else sorted({1, config.num_threads})
    longest = max(len(p) for case in cases for group in prompts[case.kind].groups(case, 0) for p in group)
    context = longest + max(case.output_tokens for case in cases) + 8
    peers: list[Engine] = []
    for name in args.peer.split(","):
        python = peer_python(name, args.peer_python)
        for count in threads:
            _progress(f"starting {name} with {count} threads")
            peers.append(
                Peer(
                    name,
                    python,
                    model,
                    threads=count,
                    streams=max(case.streams for case in cases),
                    context_tokens=context,
                )
            )
    return peers


def _model_path(config: EngineConfig) -> str:
    """The file or folder this engine itself reads."""
    from octavo.model.load.loader import resolve

    path, _ = resolve(config.model, cache_dir=config.cache_dir, accept_license=config.accept_license)
    return str(path)


# Perplexity


def _perplexity(args: argparse.Namespace, config: EngineConfig) -> tuple[dict[str, Any], str]:
    from octavo.bench import perplexity, record
    from octavo.bench.workload import read_text, source_text, text_sha256
    from octavo.model.load import load_model

    formats = args.perplexity.split(",")
    if unknown := [name for name in formats if name not in perplexity.FORMATS]:
        raise ConfigError("--perplexity", unknown[0], f"allowed: {', '.join(perplexity.FORMATS)}")
    loaded = load_model(config.model, cache_dir=config.cache_dir, accept_license=config.accept_license)
    wanted = _numbers(args, "perplexity_tokens", 2)[0]
    text = source_text() if args.perplexity_text is None else read_text(args.perplexity_text)
    ids = list(loaded.tokenizer.encode(text[: 16 * wanted]))[:wanted]
    scores = perplexity.measure(
        loaded, formats, ids, config.page_size, lambda name, done, total: _progress(f"{name}: window {done} of {total}")
    )
    scores += _peer_scores(args, config, ids)
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr)
    base = next((s for name in ("exact", "float32") for s in scores if s.format == name), None)
    lines = [
        {
            "format": s.format,
            "weights": s.formats_line,
            "perplexity": s.value,
            "nll": s.nll,
            "tokens": s.tokens,
            "change": s.value / base.value - 1 if base else None,
        }
        for s in scores
    ]
    rows = [["format", "weights", "perplexity", "change"]]
    rows += [
        [
            str(n["format"]),
            str(n["weights"]),
            f"{n['perplexity']:.4f}",
            f"{n['change']:+.2%}" if n["change"] is not None else "–",
        ]
        for n in lines
    ]
    result = record.environment() | {
        "model": {"name": config.model},
        "text": args.perplexity_text and Path(args.perplexity_text).name,
        "text_sha256": text_sha256(text),
        "window_tokens": perplexity.WINDOW_TOKENS,
        "perplexity": lines,
    }
    return result, record.render(rows)


def _peer_scores(args: argparse.Namespace, config: EngineConfig, ids: list[int]) -> list[Perplexity]:
    """What peers make of the same ids in the same windows."""
    from octavo.bench.engines import Peer, peer_python
    from octavo.bench.perplexity import WINDOW_TOKENS, Perplexity

    scores = []
    for name in args.peer.split(",") if args.peer else ():
        _progress(f"{name}: scoring")
        peer = Peer(
            name,
            peer_python(name, args.peer_python),
            args.peer_model or _model_path(config),
            threads=config.num_threads,
            streams=1,
            context_tokens=WINDOW_TOKENS,
        )
        try:
            scores.append(Perplexity(name, "the peer's own", *peer.perplexity(ids, WINDOW_TOKENS)))
        finally:
            peer.close()
    return scores


# A server


def _server(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from octavo.bench import record, server_load
    from octavo.bench.workload import chat_prompts_path, read_prompts

    prompts = [entry["prompt"] for entry in read_prompts(chat_prompts_path(args.prompts))]
    if args.limit:
        count = min(_numbers(args, "limit", 1)[0], len(prompts))
        prompts = [prompts[i * len(prompts) // count] for i in range(count)]
    wanted = _numbers(args, "requests", 1)[0] if args.requests else len(prompts)
    prompts = [prompts[i % len(prompts)] for i in range(wanted)]
    key = args.server_key or os.environ.get("OCTAVO_API_KEY") or os.environ.get("OPENAI_API_KEY")
    timeout_s = _numbers(args, "timeout", 1)[0]
    client = server_load.Client(args.server, model=args.server_model, api_key=key, timeout_s=timeout_s)
    loads = []
    for streams in _numbers(args, "streams", 1):
        load = server_load.drive(
            client,
            prompts,
            streams=streams,
            max_tokens=_numbers(args, "output_tokens", 1)[0],
            temperature=_temperatures(args.temperature)[0],
            extra={},
            progress=lambda done, total, streams=streams: _bar(f"{streams} streams", done, total),
        )
        loads.append(load.summary())
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr)
    result = record.environment() | {"model": {"name": client.model}, "server": args.server, "loads": loads}
    table = record.render(server_load.rows(loads)) + "\nmilliseconds and seconds at p50 / p90 / p99"
    failures = [error for load in loads for error in load["errors"]]
    return result, "\n".join([table, *(f"failed: {error}" for error in failures)])


def _bar(label: str, done: int, total: int) -> None:
    width = 30
    if sys.stderr.isatty() or done == total:
        filled = width * done // total
        _progress(f"{label} [{'█' * filled}{'·' * (width - filled)}] {done}/{total}")
