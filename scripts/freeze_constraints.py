"""Rewrite constraints.txt from the environment that was tested: `python scripts/freeze_constraints.py`.

Local version labels ("+cpu") are dropped: a constraint `torch==2.13.0` is met by every build of 2.13.0.
"""

from __future__ import annotations

import re
from importlib.metadata import distributions
from pathlib import Path

HEADER = "# Versions everything is tested with. Rewritten by scripts/freeze_constraints.py.\n"
NOT_PINNED = {"octavo", "pip", "setuptools", "wheel", "dflash", "specforge", "speculators"}


def main() -> None:
    pins = {}
    for dist in distributions():
        name = re.sub(r"[-_.]+", "-", dist.metadata["Name"]).lower()
        if name not in NOT_PINNED:
            pins[name] = dist.version.split("+", 1)[0]
    lines = [f"{name}=={version}\n" for name, version in sorted(pins.items())]
    Path(__file__).resolve().parent.parent.joinpath("constraints.txt").write_text(HEADER + "".join(lines))


if __name__ == "__main__":
    main()
