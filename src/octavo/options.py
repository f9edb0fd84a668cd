"""One option = one dataclass field: its parser, flag, environment name and help live in the field's metadata.

`config.py` declares the options; the command line, the environment, `LLM(...)` keyword arguments and docs/cli.md
are all made from the same declarations. Imports nothing heavy: `octavo --help` goes through here.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError

Parser = Callable[[object], Any]


class BadValue(ValueError):
    """A value its option does not take. The message says what is allowed; the caller adds option and value."""


@dataclass(frozen=True)
class Option:
    """What the command line, the environment and the documentation know of one field."""

    name: str
    default: Any
    parse: Parser
    allowed: str
    help: str
    group: str
    metavar: str | None
    boolean: bool
    shown_default: str

    @property
    def flag(self) -> str:
        """The option's flag: its name without the unit of a time ("shutdown_timeout_s": --shutdown-timeout)."""
        return "--" + self.name.removesuffix("_s").replace("_", "-")

    @property
    def env(self) -> str:
        return "OCTAVO_" + self.name.removesuffix("_s").removesuffix("_dir").upper()

    def convert(self, value: object, label: str) -> Any:
        """The parsed value. Raises ConfigError with `label`, the value and what is allowed."""
        try:
            return self.parse(value)
        except BadValue as error:
            raise ConfigError(label, value, f"allowed: {error}") from None


def option(
    default: Any,
    parse: Parser,
    help: str,
    *,
    group: str,
    metavar: str | None = None,
    shown_default: str | None = None,
    secret: bool = False,
) -> Any:
    """A dataclass field that is an option. `shown_default` says what a default of None comes to; a `secret`
    never appears in the configuration's repr."""
    shown = shown_default if shown_default is not None else _show(default)
    metadata = {"parse": parse, "help": help, "group": group, "metavar": metavar, "shown_default": shown}
    return dataclasses.field(default=default, metadata=metadata, repr=not secret)


def _show(default: Any) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    return "none" if default is None else str(default)


def options_of(config: type) -> Iterator[Option]:
    """The options of a configuration class, in order of declaration."""
    for field in dataclasses.fields(config):
        parse = field.metadata["parse"]
        yield Option(
            name=field.name,
            default=field.default,
            parse=parse,
            allowed=getattr(parse, "allowed", ""),
            help=field.metadata["help"],
            group=field.metadata["group"],
            metavar=field.metadata["metavar"] or getattr(parse, "metavar", None),
            boolean=getattr(parse, "boolean", False),
            shown_default=field.metadata["shown_default"],
        )


def merge(
    options: Mapping[str, Option], given: Mapping[str, object], environ: Mapping[str, str], *, cli: bool
) -> dict[str, Any]:
    """Parsed values from `given` (they win) and the environment. `cli` says how errors call an option.

    Raises ConfigError for an unknown name (with the nearest known one) and for a bad value.
    """
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name not in options:
            raise ConfigError(name, value, unknown_option(name, options))
        values[name] = options[name].convert(value, options[name].flag if cli else name)
    for name, opt in options.items():
        if name not in values and environ.get(opt.env, "") != "":
            values[name] = opt.convert(environ[opt.env], opt.env)
    return values


def unknown_option(name: str, options: Mapping[str, Option]) -> str:
    import difflib

    near = difflib.get_close_matches(name, options, n=1)
    return "no such option" + (f"; did you mean {near[0]!r}?" if near else f"; allowed: {', '.join(options)}")


# Parsers. Each takes text (flag, environment) or an already typed value (Python), and has `.allowed`.


def _parser(allowed: str, *, metavar: str | None = None, boolean: bool = False) -> Callable[[Parser], Parser]:
    def mark(function: Parser) -> Parser:
        function.allowed = allowed  # type: ignore[attr-defined]
        function.metavar = metavar  # type: ignore[attr-defined]
        function.boolean = boolean  # type: ignore[attr-defined]
        return function

    return mark


def text(allowed: str = "any text", *, metavar: str = "TEXT", optional: bool = False) -> Parser:
    @_parser(allowed, metavar=metavar)
    def parse(value: object) -> str | None:
        if value is None and optional:
            return None
        if isinstance(value, Path):
            value = str(value)
        if not isinstance(value, str) or (value == "" and not optional):
            raise BadValue(allowed)
        return value

    return parse


def choice(*names: str, also: str | None = None, accept: Callable[[str], bool] | None = None) -> Parser:
    """One of `names`; with `accept`, also what it says yes to (described by `also`)."""
    allowed = ", ".join(names) + (f", or {also}" if also else "")

    @_parser(allowed, metavar="{" + ",".join(names) + ("," + also if also else "") + "}")
    def parse(value: object) -> str:
        if isinstance(value, str) and (value in names or (accept is not None and accept(value))):
            return value
        raise BadValue(allowed)

    return parse


def class_path(value: str) -> bool:
    """`module:Class`, the form in which extensions are named."""
    return re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", value) is not None


def integer(
    low: int,
    high: int | None = None,
    *,
    optional: bool = False,
    check: Callable[[int], bool] | None = None,
    allowed: str | None = None,
    metavar: str = "N",
) -> Parser:
    words = allowed or (f"a whole number from {low} to {high}" if high is not None else f"a whole number from {low}")

    @_parser(words, metavar=metavar)
    def parse(value: object) -> int | None:
        if value is None and optional:
            return None
        number = _whole(value)
        bad = number is None or number < low or (high is not None and number > high)
        if bad or (check is not None and number is not None and not check(number)):
            raise BadValue(words)
        return number

    return parse


def _whole(value: object) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, str) and re.fullmatch(r"\s*[+-]?\d[\d_]{0,99}\s*", value):
        return int(value)
    try:
        number = int(value)  # type: ignore[call-overload]  # numpy integers too
    except (TypeError, ValueError, OverflowError):
        return None
    return number if not isinstance(value, str) and number == value else None


def seconds(low: float = 0.0) -> Parser:
    allowed = f"a number of seconds from {low:g}"

    @_parser(allowed, metavar="SECONDS")
    def parse(value: object) -> float:
        try:
            number = float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            raise BadValue(allowed) from None
        if isinstance(value, bool) or not low <= number < float("inf"):
            raise BadValue(allowed)
        return number

    return parse


_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"0", "false", "no", "off"}


def switch(*, optional: bool = False) -> Parser:
    allowed = "1, true, yes, on, 0, false, no or off"

    @_parser(allowed, boolean=True)
    def parse(value: object) -> bool | None:
        if value is None and optional:
            return None
        if isinstance(value, bool):
            return value
        word = value.strip().lower() if isinstance(value, str) else str(value) if isinstance(value, int) else ""
        if word in _TRUE or word in _FALSE:
            return word in _TRUE
        raise BadValue(allowed)

    return parse


_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS[_letter + "b"] = 1000**_power
    _UNITS[_letter] = _UNITS[_letter + "ib"] = 1024**_power


def parse_size(value: object) -> int:
    """Bytes from 2147483648, "2GiB", "1.5g" (K, M, G, T are binary, KB, MB, GB, TB decimal). Raises BadValue."""
    allowed = 'a number of bytes, or a size such as "512MiB" or "2GiB"'
    number = _whole(value)
    if number is None and isinstance(value, str):
        match = re.fullmatch(r"\s*(\d{1,30}(?:\.\d{1,30})?)\s*([A-Za-z]*)\s*", value)
        if match and match[2].lower() in _UNITS:
            number = int(float(match[1]) * _UNITS[match[2].lower()])
    if number is None or number < 0:
        raise BadValue(allowed)
    return number


def size(*, low: int = 1, optional: bool = False) -> Parser:
    allowed = f'at least {low} bytes: a whole number, or a size such as "512MiB" or "2GiB"'

    @_parser(allowed, metavar="SIZE")
    def parse(value: object) -> int | None:
        if value is None and optional:
            return None
        try:
            number = parse_size(value)
        except BadValue:
            raise BadValue(allowed) from None
        if number < low:
            raise BadValue(allowed)
        return number

    return parse


def format_size(size_bytes: float) -> str:
    """ "92.9 MiB": for people; the reverse of `parse_size` up to rounding."""
    amount = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def names() -> Parser:
    """A list of words: commas or spaces between them on the command line, any sequence in Python."""
    allowed = "one or more words with commas between them"

    @_parser(allowed, metavar="NAME[,NAME]")
    def parse(value: object) -> tuple[str, ...]:
        if isinstance(value, str):
            return tuple(word for word in re.split(r"[,\s]+", value) if word)
        if isinstance(value, (list, tuple)) and all(isinstance(word, str) for word in value):
            return tuple(value)
        raise BadValue(allowed)

    return parse
