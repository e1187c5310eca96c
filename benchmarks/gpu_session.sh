#!/usr/bin/env bash
# One visit to a GPU machine: tests, kernels, log-prob error, throughput. Full logs under $OUT, a short table last.
#   bash benchmarks/gpu_session.sh [tests|kernels|logprob|nano ...]
set -uo pipefail
OUT=${OUT:-/tmp/hf_paged_gpu}
mkdir -p "$OUT"
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
steps=("$@")
[ ${#steps[@]} -gt 0 ] || steps=(tests kernels logprob nano)
for step in "${steps[@]}"; do
  start=$SECONDS
  case $step in
    tests) timeout 300 python3 -m pytest -q -n 8 -m gpu -p no:cacheprovider tests >"$OUT/tests.log" 2>&1 ;;
    kernels) timeout 150 python3 benchmarks/kernel_speed.py --out "$OUT/kernels.json" >"$OUT/kernels.log" 2>&1 ;;
    logprob) timeout 200 python3 benchmarks/logprob_error.py --out "$OUT/logprob.json" >"$OUT/logprob.log" 2>&1 ;;
    nano) timeout 240 python3 benchmarks/throughput.py --workload nano --out "$OUT/nano.json" >"$OUT/nano.log" 2>&1 ;;
  esac
  echo "== $step: exit $?, $((SECONDS - start)) s"
  tail -n 12 "$OUT/$step.log"
done
