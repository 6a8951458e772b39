#!/bin/sh
# Builds the CPU library's sources with AddressSanitizer and UndefinedBehaviorSanitizer and runs the shape sweep at every
# level this machine has. Usage: tests/host_cpu/run_sanitizers.sh [build folder]
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
build=${1:-$(mktemp -d)}
cmake -S "$root/tests/host_cpu" -B "$build" -DCMAKE_BUILD_TYPE=None
cmake --build "$build" -j 2
for level in portable avx2 avx512_core avx512; do
  NF4LINEAR_CPU_LEVEL=$level UBSAN_OPTIONS=halt_on_error=1 ASAN_OPTIONS=detect_leaks=1 "$build/sweep"
done
