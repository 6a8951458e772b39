#!/bin/sh
# Builds one port and runs it on a weight file: run_port.sh platform|cuda|host FILE fp16|bf16 [WARMUP REPEATS]
# Called by each platform's run.sh from its folder. The output goes beside the file.
set -eu
target=$1 file=$2 dtype=$3
shift 3
case $target in
  platform) program=build/nf4_dequant ;;
  cuda | host) program=build/nf4_dequant_$target ;;
  *) echo "run.sh: the first argument is platform, cuda or host; got '$target'" >&2; exit 2 ;;
esac
make "$target"
"$program" "$file" "${file%.bin}-$(basename "$PWD")-$target-$dtype.raw" "$dtype" "$@"
