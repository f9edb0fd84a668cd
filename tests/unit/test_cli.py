"""The command line without a model: help, usage errors, start-up time, generated documentation."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from octavo import cli
from octavo.cli.parser import COMMANDS, build_parser
from octavo.config import EngineConfig

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str, stdin: bytes = b"", **environ: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "octavo", *arguments],
        input=stdin,
        capture_output=True,
        timeout=300,
        env=os.environ | environ,
        check=False,
    )


def test_help_is_fast_and_loads_nothing_heavy() -> None:
    """Under 0.5 s of one core, which is its wall time where nothing else runs; no torch, no tokenizers."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert run("--help").returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime) < 0.5
    code = (
        "import sys; from octavo.cli.parser import build_parser; build_parser();"
        "sys.exit(bool({'torch', 'tokenizers', 'numpy', 'fastapi'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_help_names_every_command() -> None:
    text = run("--help").stdout.decode()
    assert all(f"  {name}" in text for name in COMMANDS)


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_has_help_with_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        build_parser().parse_args([command, "--help"])
    text = capsys.readouterr().out
    assert exit_.value.code == 0
    assert f"octavo {command}" in text.partition("examples:")[2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("generate", "x", "--page-size", "3"), ("--page-size", "'3'", "power of two")),
        (("generate", "x", "--page-size", "0"), ("--page-size", "'0'", "power of two")),
        (("generate", "x", "--kv-memory", "lots"), ("--kv-memory", "'lots'", "2GiB")),
        (("generate", "x", "--temperature", "-1"), ("--temperature", "-1", "0")),
        (("generate", "x", "--max-tokens", "-3"), ("--max-tokens", "-3")),
        (("generate", "x", "--max-tokens", "many"), ("--max-tokens", "many", "an integer from 0")),
        (("generate", "x", "--temperature", "hot"), ("--temperature", "'hot'", "a number from 0")),
        (("generate", "x", "--raw", "--system", "s"), ("--system", "--raw")),
        (("generate", "x", "--kv-memory", "9" * 400 + "GiB"), ("--kv-memory", "512MiB")),
        (("generate", "x", "--num-pages", "9" * 5000), ("--num-pages", "from 1")),
        (("generate", "x", "--tensor-parallel-size", "2"), ("--tensor-parallel-size",)),
        (("chat", "--draft", "magic"), ("--draft", "'magic'", "ngram")),
        (("nosuch",), ("nosuch",)),
    ],
)
def test_usage_errors_are_one_line_and_exit_2(arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    done = run(*arguments)
    message = done.stderr.decode()
    assert done.returncode == 2, message
    assert message.count("\n") == 1 and message.startswith("octavo: ")
    assert all(word in message for word in words), message
    assert done.stdout == b""


def test_a_bad_environment_value_is_a_usage_error_too() -> None:
    done = run("generate", "x", OCTAVO_PAGE_SIZE="7")
    assert done.returncode == 2
    assert b"OCTAVO_PAGE_SIZE: got '7'" in done.stderr


def test_no_command_prints_help_and_exits_2() -> None:
    done = run()
    assert done.returncode == 2
    assert b"start here" in done.stderr


def test_text_that_is_not_utf8_is_refused_with_its_place() -> None:
    done = run("generate", "-", stdin=b"abc\xff")
    assert done.returncode == 1
    assert b"byte 0xff at offset 3 is not UTF-8" in done.stderr
    assert b"Traceback" not in done.stderr


def test_verbose_shows_the_traceback() -> None:
    done = run("-v", "generate", "x", "--page-size", "3")
    assert done.returncode == 2
    assert b"Traceback" in done.stderr and done.stderr.rstrip().splitlines()[-1].startswith(b"octavo: --page-size")


def test_every_option_is_a_flag_of_generate() -> None:
    flags = {flag for action in _sub("generate")._actions for flag in action.option_strings}
    for opt in EngineConfig.options().values():
        assert opt.flag in flags
        assert not opt.boolean or f"--no-{opt.flag[2:]}" in flags


def _sub(name: str):  # type: ignore[no-untyped-def]
    parser = build_parser()
    return next(a.choices[name] for a in parser._actions if hasattr(a, "choices") and a.choices)


def test_interrupt_is_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("octavo.cli.generate.common.config_from", interrupted)
    assert cli.main(["generate", "x"]) == 130
    assert capsys.readouterr().err == "octavo: interrupted\n"


def test_the_command_document_is_in_step() -> None:
    from octavo.cli.docs import markdown

    assert (ROOT / "docs/cli.md").read_text() == markdown(), "run `make docs`"
