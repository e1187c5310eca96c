#!/usr/bin/env bash
# LoRA on a GPU: tests, nano, layers, log-prob error. bash gpu_lora.sh [tests nano layers error compile tune nano8 ...]
set -uo pipefail
OUT=${OUT:-/tmp/hf_paged_lora}
mkdir -p "$OUT"
export OUT PYTHONPATH=$PWD:${SITE:-/tmp/site}:${PYTHONPATH:-} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TRITON_CACHE_DIR=/tmp/triton_lora
steps=("$@")
[ ${#steps[@]} -gt 0 ] || steps=(tests nano layers error)
python3 -c "import torch, triton, transformers; print(torch.__version__, triton.__version__, transformers.__version__); import peft; print('peft', peft.__version__)"
S="setsid -w timeout -k 5"
for step in "${steps[@]}"; do
  start=$SECONDS
  case $step in
    tests) $S 90 python3 -m pytest -q -n 12 -m gpu -p no:cacheprovider tests/kernels/test_lora_kernels.py tests/models/test_lora.py >"$OUT/tests.log" 2>&1 ;;
    compile) # candidates for tune, in parallel: no timing
      pids=()
      for kind in fp32 bf16 "fp32 mixed"; do for rows in 64 128 256 8192; do
        $S 80 python3 benchmarks/lora_speed.py layers --models 0.6B --compile --kinds "$kind" --rows $rows >>"$OUT/compile.log" 2>&1 & pids+=($!)
      done; done
      wait "${pids[@]}" ;;
    tune) $S 100 python3 benchmarks/lora_speed.py layers --models 0.6B --tune --seconds 85 --kinds fp32 --rows 8192 128 256 64 --out "$OUT/tune.json" >"$OUT/tune.log" 2>&1 ;;
    layers) $S 75 python3 benchmarks/lora_speed.py layers --models 0.6B 8B --rows 256 128 64 8192 --out "$OUT/layers.json" >"$OUT/layers.log" 2>&1 ;;
    nano) $S 150 python3 benchmarks/lora_speed.py workload --model 0.6B --out "$OUT/nano.json" >"$OUT/nano.log" 2>&1 ;;
    nano8) $S 200 python3 benchmarks/lora_speed.py workload --model 8B --out "$OUT/nano8.json" >"$OUT/nano8.log" 2>&1 ;;
    error) for lora in float32 bfloat16; do
        $S 45 python3 benchmarks/logprob_error.py --lora $lora --seeds 1 --sequences 8 --length 512 --out "$OUT/error_$lora.json"
      done >"$OUT/error.log" 2>&1 ;;
    *) echo "unknown step '$step'" >&2; exit 2 ;;
  esac
  echo "== $step: exit $?, $((SECONDS - start)) s"
  case $step in
    tests) tail -n 15 "$OUT/tests.log" | cut -c1-220 ;;
    tune) grep -v "^{" "$OUT/tune.log" | awk '{if (c[$1$3$4]++ < 8) print}' | cut -c1-130; grep "^{" "$OUT/tune.log" | cut -c1-400 ;;
    *) tail -n 12 "$OUT/$step.log" | cut -c1-1500 ;;
  esac
done
