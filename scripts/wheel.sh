#!/usr/bin/env bash
# Build sdist and wheel in a clean environment, install the wheel into an empty one outside the checkout with no
# compiler on the PATH, and answer a prompt with it.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
bin=$PWD/${VENV:-.venv}/bin
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

rm -rf dist
"$bin"/python -m venv "$scratch/build"
"$scratch"/build/bin/python -m pip --disable-pip-version-check install --quiet ${PIP_ARGS:-} -c constraints.txt build
"$scratch"/build/bin/python -m build --outdir dist .
wheel=$(ls dist/*.whl)
echo "built $(ls dist | tr '\n' ' ')"

# A PATH with the tools a user without a compiler has: links to everything but compilers and build tools.
mkdir "$scratch/path"
IFS=: read -ra folders <<<"$PATH"
for folder in "${folders[@]}"; do
    for tool in "$folder"/*; do
        case ${tool##*/} in
            cc | c++ | gcc* | g++* | clang* | *-gcc* | *-g++* | cmake | ninja | make | ld | ld.*) ;;
            *) [ -e "$scratch/path/${tool##*/}" ] || ln -s "$tool" "$scratch/path/${tool##*/}" 2>/dev/null || true ;;
        esac
    done
done
"$bin"/python -m venv "$scratch/user"
cd "$scratch"
export PATH="$scratch/user/bin:$scratch/path"
if command -v cc c++ gcc g++ clang cmake ninja; then echo "a compiler is still on the PATH" >&2; exit 1; fi
python -m pip --disable-pip-version-check install --quiet ${PIP_ARGS:-} -c "$root/constraints.txt" "$root/$wheel"
python -c 'import octavo; assert "site-packages" in octavo.__file__, octavo.__file__'
octavo generate --model "${MODEL:-smollm2}" --max-tokens 24 "Name three colours."
octavo doctor --no-check
echo "wheel: installed without a compiler, answered a prompt"
