"""What the README tells people to type works as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.cli.parser import COMMANDS, build_parser

pytestmark = pytest.mark.models
ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_the_minute_of_python_runs() -> None:
    code = next(block for block in blocks("python") if "from octavo import LLM" in block)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert "'free'" in done.stdout.splitlines()[-1]


def test_commands_and_flags_of_the_readme_exist() -> None:
    commands = build_parser()._subparsers._group_actions[0].choices  # type: ignore[union-attr]
    named = re.findall(r"(?:^|`)octavo ([a-z][a-z-]+)", README, re.MULTILINE)
    assert set(named) <= set(COMMANDS), named
    known = {flag for sub in commands.values() for action in sub._actions for flag in action.option_strings}  # type: ignore[union-attr]
    for block in blocks(""):
        for line in block.splitlines():
            if line.startswith("octavo "):
                assert set(re.findall(r"(?<=\s)--[a-z-]+", line)) <= known, line


def test_documents_the_readme_links_to_exist() -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", README):
        assert (ROOT / target).exists(), target


def test_targets_of_make_the_readme_names_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"(?:^|`)make ([a-z-]+)", README, re.MULTILINE)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
