#!/usr/bin/env bash
# The test command: checks, then every test in an order that fails early. Called by `make test`.
# The last line says what was not run here, and why.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=${VENV:-.venv}/bin
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} TOKENIZERS_PARALLELISM=false HF_HUB_DISABLE_TELEMETRY=1 PYTHONUNBUFFERED=1

not_run=()
missing=()
markers="not soak and not cuda"
while read -r package probe marker purpose; do
    case $package in '' | '#'*) continue ;; esac
    case $probe in
        command:*) command -v "${probe#command:}" >/dev/null 2>&1 && continue ;;
        file:*) compgen -G "${probe#file:}" >/dev/null && continue ;;
    esac
    missing+=("$package")
    [ "$marker" = - ] || markers+=" and not $marker"
    not_run+=("$purpose (Debian package $package is missing)")
done <scripts/debian_packages.txt
if [ ${#missing[@]} -gt 0 ]; then
    echo "Missing Debian packages; for everything to run: apt-get install ${missing[*]}"
fi

bash scripts/check.sh

# Cheapest level first: a broken law is seen within seconds, a real model's text last.
order=()
for folder in laws unit ops spec engine train api disagg models; do
    if [ -n "$(find "tests/$folder" -name 'test_*.py' -print -quit 2>/dev/null)" ]; then order+=("tests/$folder"); fi
done
for folder in tests/*/; do
    folder=${folder%/}
    if [[ " ${order[*]} " != *" $folder "* ]] && [ -n "$(find "$folder" -name 'test_*.py' -print -quit)" ]; then
        order+=("$folder")
    fi
done
"$bin"/python -m pytest -q -m "$markers" --durations=15 "${order[@]}"

"$bin"/python -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' || not_run+=("CUDA (no device; make test-cuda on a machine with one)")
if [ ${#not_run[@]} -eq 0 ]; then not_run+=("nothing"); fi
printf 'not run: %s' "${not_run[0]}"
printf '; %s' "${not_run[@]:1}" | sed 's/^; $//'
echo
