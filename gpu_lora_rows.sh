#!/bin/bash
# Rows under adapters on a GPU: tokens against stock, graphs kept between calls, rates of mixed batches. About 100 s.
set -u
OUT=${OUT:-/tmp/out}
mkdir -p "$OUT"
run() { echo "== $1"; shift; setsid timeout -k 5 "$@" 2>&1 | tee -a "$OUT/lora_rows.log" | tail -12; }
export OMP_NUM_THREADS=8 PYTHONPATH=$PWD
run adapters 80 python -m pytest -q -p no:randomly -m gpu tests/gpu/test_adapters_cuda.py
