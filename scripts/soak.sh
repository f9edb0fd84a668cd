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

sanitized() { # the module in use stays as it is: the sanitizers' build is loaded by its path
    local runtime build=build/native-sanitized
    bash scripts/test_native_kernels.sh sanitize || return 1
    runtime=$(c++ -print-file-name=libasan.so) || return 1
    cmake -S . -B $build -G Ninja -DCMAKE_BUILD_TYPE=Release -DOCTAVO_SANITIZE=ON >/dev/null || return 1
    cmake --build $build || return 1
    # Python itself never frees some things; everything else counts. Bus errors are the tests' own (test_native_guard.py).
    LD_PRELOAD=$runtime ASAN_OPTIONS=detect_leaks=0:handle_sigbus=0 UBSAN_OPTIONS=halt_on_error=1 \
        OCTAVO_NATIVE_LIB=$PWD/$build/liboctavo_native.so \
        "$bin"/python -m pytest -q -p no:cacheprovider tests/unit -k "ops or native or chains"
}

forced() { # the op tests with every table this CPU runs forced, and torch at lower capabilities
    local isa
    for isa in generic avx2; do
        OCTAVO_NATIVE_ISA=$isa "$bin"/python -m pytest -q -p no:cacheprovider tests/unit -k "ops or native" || return 1
    done
    for isa in default avx2; do
        ATEN_CPU_CAPABILITY=$isa OCTAVO_NATIVE=0 "$bin"/python -m pytest -q -p no:cacheprovider tests/unit \
            -k "ops or model_invariance" || return 1
    done
}

echo "soak: $(git rev-parse --short HEAD), $(date -u +%Y-%m-%dT%H:%MZ)"
step "long tests" "$bin"/python -m pytest -q -m soak --timeout 14400 tests
step "mutation sweep" "$bin"/python scripts/mutate.py --jobs "$(nproc)"
if command -v c++ >/dev/null; then
    step "forced instruction sets" forced
    step "sanitizers" sanitized
fi
if [ ${#failed[@]} -gt 0 ]; then
    printf 'soak failed: %s\n' "${failed[@]}"
    exit 1
fi
echo "soak: everything passed"
