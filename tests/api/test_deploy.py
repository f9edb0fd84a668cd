"""What deploy/ and docs/ promise, checked where this machine can."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from octavo.config import ServerConfig
from tests.api.serving import ROOT, Server

UNIT = ROOT / "deploy" / "octavo.service"


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None and "CI" not in os.environ,
    reason="no systemd-analyze (Debian package systemd): the test command says so",
)
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    text = UNIT.read_text()
    assert "ExecStart=/opt/octavo/bin/octavo serve" in text
    copy = tmp_path / "octavo.service"
    copy.write_text(text.replace("/opt/octavo/bin/octavo", "/bin/true"))  # it must exist for `verify`
    done = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr.strip(), done.stderr
    copy.write_text(copy.read_text().replace("KillMode=mixed", "KillMode=nonsense"))
    again = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True)
    assert "kill mode" in again.stderr


def test_files_name_options_that_exist() -> None:
    known = {option.env for option in ServerConfig.options().values()}
    flags = {option.flag for option in ServerConfig.options().values()}
    for path in (UNIT, ROOT / "deploy/Containerfile", ROOT / "docs/server.md"):
        for name in re.findall(r"OCTAVO_[A-Z_]+", path.read_text()):
            assert name in known, f"{path.name}: {name}"
    assert "NOT BUILT" in (ROOT / "deploy/Containerfile").read_text()
    first_column = re.findall(r"^\| (`--[^|]*) \|", (ROOT / "docs/coming-from.md").read_text(), re.MULTILINE)
    named = {flag for cell in first_column for flag in re.findall(r"--[a-z-]+", cell)}
    assert len(named) >= 25
    for flag in named:
        positive = flag.replace("--no-", "--", 1)
        assert flag in flags or positive in flags or flag == "--role", flag


def test_documented_endpoints_exist(server: Server) -> None:
    paths = set(server.get("/openapi.json").json()["paths"])
    text = (ROOT / "docs/server.md").read_text()
    section = text.partition("## Endpoints")[2].partition("## Fields")[0]
    named = {p.replace("{id}", "{name}") for p in re.findall(r"`(?:GET |POST )?(/[\w/.{}]+)`", section)}
    assert named - {"/openapi.json"} == paths
