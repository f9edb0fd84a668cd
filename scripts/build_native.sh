#!/bin/sh
# Builds the native operations into src/octavo/ops/ of this checkout. Needs a C++17 compiler and CMake.
#   scripts/build_native.sh            optimised
#   scripts/build_native.sh sanitize   with AddressSanitizer and UBSan (run Python with LD_PRELOAD=libasan.so)
set -eu
cd "$(dirname "$0")/.."
mode=${1:-release}
build=build/native-$mode
case $mode in
  release) flags="" ;;
  sanitize) flags="-DOCTAVO_SANITIZE=ON" ;;
  *) echo "usage: $0 [release|sanitize]" >&2; exit 2 ;;
esac
cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release $flags >/dev/null
cmake --build "$build"
# by renaming: a process that has the old library mapped keeps it
cmake --install "$build" --prefix "$build/prefix" >/dev/null
cp "$build/prefix/octavo/ops/liboctavo_native.so" src/octavo/ops/.liboctavo_native.new
mv -f src/octavo/ops/.liboctavo_native.new src/octavo/ops/liboctavo_native.so
echo "installed: src/octavo/ops/liboctavo_native.so"
