#!/bin/sh
# Compares the kernels of every instruction set with plain C++, bit by bit.
#   scripts/test_native_kernels.sh             on this machine
#   scripts/test_native_kernels.sh sanitize    the same under AddressSanitizer and UBSan
#   scripts/test_native_kernels.sh aarch64     NEON: cross-built with g++-aarch64-linux-gnu, run by qemu-aarch64
set -eu
cd "$(dirname "$0")/.."
mode=${1:-host}
run=""
case $mode in
  host) flags="" ;;
  sanitize) flags="-DOCTAVO_SANITIZE=ON" ;;
  aarch64)
    flags="-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++"
    run="qemu-aarch64 -cpu max -L /usr/aarch64-linux-gnu" ;;
  *) echo "usage: $0 [host|sanitize|aarch64]" >&2; exit 2 ;;
esac
build=build/native-test-$mode
# shellcheck disable=SC2086  # flags are words
cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DOCTAVO_KERNEL_TEST=ON $flags >/dev/null
cmake --build "$build" --target octavo_kernel_test
$run "$build/octavo_kernel_test"
