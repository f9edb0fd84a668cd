"""What the README tells people to type works as it stands there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.cli.parser import COMMANDS, build_parser
from octavo.engine.process import DEFAULT_CORE
from tests.api.serving import running

pytestmark = pytest.mark.models
ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_the_minute_of_python_runs() -> None:
    code = next(block for block in blocks("python") if "from octavo import LLM" in block)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    assert "'free'" in done.stdout.splitlines()[-1]


def test_the_minute_of_the_openai_client_runs(tmp_path: Path) -> None:
    code = next(block for block in blocks("python") if "from openai import OpenAI" in block)
    with running(tmp_path, core=DEFAULT_CORE, model="smollm2", kv_memory="256MiB") as server:
        moved = code.replace("http://127.0.0.1:8000", server.url)
        assert moved != code
        done = subprocess.run([sys.executable, "-c", moved], capture_output=True, text=True, timeout=900, check=False)
        assert done.returncode == 0, done.stderr
    city = json.loads(done.stdout[done.stdout.rindex("{") :])  # behind a streamed answer without a line end
    assert isinstance(city["name"], str) and isinstance(city["people"], int)


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
