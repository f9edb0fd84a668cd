#!/usr/bin/env bash
# The test command: checks, then every test in an order that fails early. Called by `make test`.
# The last line says what was not run here, and why.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=${VENV:-.venv}/bin
PATH="$PWD/$bin:$PATH" # cmake and ninja may live there
export TOKENIZERS_PARALLELISM=false HF_HUB_DISABLE_TELEMETRY=1 PYTHONUNBUFFERED=1

not_run=()
missing=()
while read -r package probe purpose; do
    case $package in '' | '#'*) continue ;; esac
    case $probe in
        command:*) command -v "${probe#command:}" >/dev/null 2>&1 && continue ;;
        file:*) compgen -G "${probe#file:}" >/dev/null && continue ;;
    esac
    missing+=("$package")
    not_run+=("$purpose (Debian package $package is missing)")
done <scripts/debian_packages.txt
has() { [[ " ${missing[*]-} " != *" $1 "* ]]; }
if [ ${#missing[@]} -gt 0 ]; then
    echo "Missing Debian packages; for everything to run: apt-get install ${missing[*]}"
fi

bash scripts/check.sh

if [ "${OCTAVO_NATIVE:-1}" != 0 ] && has g++; then
    bash scripts/test_native_kernels.sh
    if has g++-aarch64-linux-gnu && has qemu-user; then bash scripts/test_native_kernels.sh aarch64; fi
fi

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
"$bin"/python -m pytest -q -m "not soak and not cuda" --durations=15 "${order[@]}"
"$bin"/python scripts/mutate.py --sample 60 --seed 1 --jobs "$(nproc)"

if ! "$bin"/python -c 'import torch, sys; sys.exit(not torch.cuda.is_available())'; then
    not_run+=("CUDA (no device; make test-cuda on a machine with one)")
fi
line="not run: "
for part in "${not_run[@]:-nothing}"; do line+="$part; "; done
echo "${line%; }"
