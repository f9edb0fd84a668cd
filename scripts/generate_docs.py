"""Write the documents that are generated from code; with --check, only say whether they are in step.

python scripts/generate_docs.py [--check]
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# document -> module:function that returns its text
DOCUMENTS = {
    "docs/cli.md": "octavo.cli.docs:markdown",
    "docs/metrics.md": "octavo.obs.metrics:document",
    "docs/models.md": "octavo.model.document:markdown",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a document is out of step")
    check = parser.parse_args().check
    stale = []
    for path, source in DOCUMENTS.items():
        module, _, function = source.partition(":")
        text = getattr(importlib.import_module(module), function)()
        target = ROOT / path
        if target.exists() and target.read_text() == text:
            continue
        stale.append(path)
        if not check:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
            print(f"wrote {path}")
    if check and stale:
        print(f"out of step with the code: {', '.join(stale)}; run `make docs`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
