#!/bin/sh
# usage: run.sh platform|cuda|host FILE fp16|bf16 [WARMUP REPEATS]; FILE is a path from where it is called.
set -eu
file=$(cd "$(dirname "$2")" && pwd)/$(basename "$2")
target=$1 dtype=$3
cd "$(dirname "$0")"
shift 3
exec ../run_port.sh "$target" "$file" "$dtype" "$@"
