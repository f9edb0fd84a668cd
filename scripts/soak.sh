#!/usr/bin/env bash
# What is too long for `make test`: long property tests, mutation sweep, soaks, sanitizers. Prints what it ran.
# Closing lines belong in docs/soak.md, with date and commit.
set -uo pipefail
cd "$(dirname "$0")/.."
bin=${VENV:-.venv}/bin
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} TOKENIZERS_PARALLELISM=false
failed=()

step() { # name, command…
    local name=$1 start=$SECONDS
    shift
    echo "soak: $name"
    if "$@"; then echo "soak: $name passed in $((SECONDS - start)) s"; else failed+=("$name"); fi
}

sanitized() {
    local runtime
    runtime=$(c++ -print-file-name=libasan.so) || return 1
    bash scripts/build_native.sh sanitize || return 1
    # Python itself leaks by design at exit; everything else counts.
    LD_PRELOAD=$runtime ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1 \
        "$bin"/python -m pytest -q -p no:cacheprovider tests/unit -k "ops or native"
    local code=$?
    bash scripts/build_native.sh
    return $code
}

echo "soak: $(git rev-parse --short HEAD), $(date -u +%Y-%m-%dT%H:%MZ)"
step "long tests" "$bin"/python -m pytest -q -m soak --timeout 14400 tests
if [ -f scripts/mutate.py ]; then step "mutation sweep" "$bin"/python scripts/mutate.py --all; fi
if [ -f CMakeLists.txt ] && command -v c++ >/dev/null; then step "sanitizers" sanitized; fi
if [ ${#failed[@]} -gt 0 ]; then
    printf 'soak failed: %s\n' "${failed[@]}"
    exit 1
fi
echo "soak: everything passed"
