#!/usr/bin/env bash
# Form, types, licences, and every generated document in step with what it is generated from.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=${VENV:-.venv}/bin

"$bin"/ruff check --quiet .
"$bin"/mypy
"$bin"/python scripts/check_licences.py
"$bin"/python scripts/generate_docs.py --check
"$bin"/python scripts/figures.py --check
echo "check: form, types, licences, documents and figures are in order"
