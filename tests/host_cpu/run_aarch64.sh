#!/bin/sh
# Builds the shape sweep for 64-bit ARM and runs it, in an emulator where this machine is none. Needs a cross compiler and
# qemu (Debian: g++-aarch64-linux-gnu, qemu-user). Usage: tests/host_cpu/run_aarch64.sh [folder for the program]
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
program=${1:-$(mktemp -d)}/sweep
cd "$root/csrc/cpu"
${CXX:-aarch64-linux-gnu-g++} -O2 -static -std=c++17 -ffp-contract=off -Wall -Wextra -DNF4L_PORTABLE_ONLY -I.. \
  entry.cpp level.cpp parallel.cpp scratch.cpp level_portable.cpp ../../tests/host_cpu/sweep.cpp -o "$program"
if [ "$(uname -m)" = aarch64 ]; then "$program"; else qemu-aarch64 "$program"; fi
