"""What several commands share: options from the table, reading prompts, sampling flags, figures."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from octavo.config import EngineConfig
from octavo.errors import ConfigError, UserError

if TYPE_CHECKING:
    from octavo import LLM
    from octavo.params import SamplingParams

Config = TypeVar("Config", bound=EngineConfig)

# Optional packages a command may find missing -> the extra that brings them.
EXTRA_OF = {
    "fastapi": "server",
    "uvicorn": "server",
    "zmq": "server",
    "msgspec": "server",
    "prometheus_client": "server",
    "starlette": "server",
    "pydantic": "server",
    "llguidance": "grammar",
    "mooncake": "disagg",
    "ray": "cluster",
    "sglang_router": "cluster",
}

GROUP_TITLES = {
    "model": "model",
    "memory": "KV memory",
    "tiers": "KV tiers (HiSparse)",
    "schedule": "scheduling and threads",
    "draft": "drafts",
    "disagg": "prefill and decode on different servers",
    "debug": "debugging",
    "server": "server",
}
_PREFIX = "option_"


def add_config_options(
    parser: argparse.ArgumentParser,
    config: type[EngineConfig],
    *,
    only: Iterable[str] | None = None,
    exclude: Iterable[str] = (),
) -> None:
    """Flags for the options of `config`. Values stay text here: the table parses them and words the errors."""
    groups: dict[str, Any] = {}
    wanted = None if only is None else set(only)
    for opt in config.options().values():
        if opt.name in exclude or (wanted is not None and opt.name not in wanted):
            continue
        if opt.group not in groups:
            groups[opt.group] = parser.add_argument_group(GROUP_TITLES.get(opt.group, opt.group))
        shared: dict[str, Any] = {"dest": _PREFIX + opt.name, "default": argparse.SUPPRESS}
        text = f"{opt.help} (default: {opt.shown_default})".replace("%", "%%")
        if opt.boolean:
            groups[opt.group].add_argument(opt.flag, action=argparse.BooleanOptionalAction, help=text, **shared)
        else:
            groups[opt.group].add_argument(opt.flag, metavar=opt.metavar, help=text, **shared)


def config_from(args: argparse.Namespace, config: type[Config], **overrides: Any) -> Config:
    """The configuration of parsed arguments, the environment and defaults. Raises ConfigError."""
    return config.from_options(given_options(args) | overrides, cli=True)


def given_options(args: argparse.Namespace) -> dict[str, Any]:
    """Options given on the command line itself, by name, still as text."""
    return {k.removeprefix(_PREFIX): v for k, v in vars(args).items() if k.startswith(_PREFIX)}


def open_llm(config: EngineConfig, *, quiet: bool = False) -> LLM:
    """Load the model of `config` and, unless `quiet`, say on stderr what was loaded."""
    from octavo import LLM

    defaults = {f.name: f.default for f in dataclasses.fields(EngineConfig)}
    chosen = {name: getattr(config, name) for name in defaults if getattr(config, name) != defaults[name]}
    chosen.pop("model", None)
    llm = LLM(config.model, **chosen)
    if not quiet:
        for line in llm.startup_lines():
            print(line, file=sys.stderr)
    return llm


# Prompts


def read_stdin(name: str = "standard input") -> str:
    """All of standard input as text. Raises UserError where it is not UTF-8, with the offset."""
    data = sys.stdin.buffer.read()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{name}: byte 0x{data[error.start]:02x} at offset {error.start} is not UTF-8") from None


def check_text(text: str, name: str) -> str:
    """`text`, unless it came from bytes that are not UTF-8 (the shell passes those as lone surrogates)."""
    for position, character in enumerate(text):
        if 0xD800 <= ord(character) <= 0xDFFF:
            raise UserError(f"{name}: the character at position {position} is not UTF-8")
    return text


# Sampling: flag -> (SamplingParams field, type, help). The field checks the value.

_SAMPLING: tuple[tuple[str, str, type, str], ...] = (
    ("--max-tokens", "max_tokens", int, "most tokens of the answer"),
    ("--min-tokens", "min_tokens", int, "fewest tokens before a stop counts"),
    ("--temperature", "temperature", float, "0 is greedy (default: 0)"),
    ("--top-p", "top_p", float, "sample from the likeliest tokens that hold this much probability"),
    ("--top-k", "top_k", int, "sample from this many likeliest tokens"),
    ("--min-p", "min_p", float, "drop tokens below this share of the likeliest one's probability"),
    ("--presence-penalty", "presence_penalty", float, "subtracted from logits of tokens already written"),
    ("--frequency-penalty", "frequency_penalty", float, "the same, times how often"),
    ("--repetition-penalty", "repetition_penalty", float, "divides logits of tokens in prompt and answer"),
)


def _reader(kind: type) -> Callable[[str], Any]:
    """The text as `kind`, or as it is where it is none: `SamplingParams` then says what is allowed."""

    def read(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            return text

    return read


def add_sampling_options(parser: argparse.ArgumentParser, *, max_tokens: int) -> None:
    group = parser.add_argument_group("sampling")
    for flag, field, kind, text in _SAMPLING:
        note = f" (default: {max_tokens})" if field == "max_tokens" else ""
        group.add_argument(
            flag,
            dest=field,
            type=_reader(kind),
            default=argparse.SUPPRESS,
            help=text + note,
            metavar="N" if kind is int else "X",
        )
    group.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        default=argparse.SUPPRESS,
        help="end before this text; may be given several times",
    )
    group.add_argument(
        "--ignore-eos", action="store_true", default=argparse.SUPPRESS, help="go on past the model's end tokens"
    )
    group.add_argument(
        "--logprobs",
        type=_reader(int),
        metavar="N",
        default=argparse.SUPPRESS,
        help="with --json: log-probabilities of the chosen and of the N likeliest tokens",
    )
    parser.set_defaults(default_max_tokens=max_tokens)


def sampling_from(args: argparse.Namespace, config: EngineConfig, **overrides: Any) -> SamplingParams:
    """SamplingParams of parsed arguments; greedy unless a temperature is given. Bad values exit with 2."""
    from octavo.errors import RequestError
    from octavo.params import SamplingParams

    fields = [field for _, field, _, _ in _SAMPLING] + ["stop", "ignore_eos", "logprobs"]
    given = {name: getattr(args, name) for name in fields if hasattr(args, name)}
    values = {"temperature": 0.0, "max_tokens": args.default_max_tokens, "seed": config.seed} | given | overrides
    try:
        return SamplingParams(**values)
    except RequestError as error:
        if error.param is None:
            raise
        _, _, allowed = str(error).partition("; ")
        flag = "--" + error.param.replace("_", "-")
        raise ConfigError(flag, values.get(error.param), allowed or str(error)) from None


# Figures


def metrics_dict(metrics: Any) -> dict[str, Any]:
    """A result's figures as plain data; empty for an answer that was cut off before it had any."""
    return {} if metrics is None else dict(metrics.to_dict())


def figures_line(results: list[Any]) -> str:
    """One line for people: speed, time to first token, accept length, KV pages. Averages over several results."""
    all_metrics = [metrics_dict(result.metrics) for result in results]
    tokens = sum(len(result.token_ids) for result in results)

    def mean(name: str) -> float | None:
        values = [m[name] for m in all_metrics if m.get(name) is not None]
        return sum(values) / len(values) if values else None

    parts = [f"{tokens} token{'s' if tokens != 1 else ''}"]
    speed, first, accept = mean("decode_tokens_per_s"), mean("ttft_s"), mean("accept_length")
    if speed is not None:
        parts.append(f"{speed:.1f} tokens/s")
    if first is not None:
        parts.append(f"first token {first * 1000:.0f} ms")
    if accept is not None:
        parts.append(f"accept length {accept:.2f}")
    pages = sum(m.get("kv_pages", 0) for m in all_metrics)
    parts.append(f"KV {pages} page{'s' if pages != 1 else ''}")
    return " · ".join(parts)
