#!/usr/bin/env bash
# LoRA on a GPU: kernel tests, tuning, layers, nano. bash gpu_lora.sh [tests compile tune layers nano error ...]
set -uo pipefail
OUT=${OUT:-/tmp/hf_paged_lora}
mkdir -p "$OUT"
export OUT PYTHONPATH=$PWD:${SITE:-/tmp/site}:${PYTHONPATH:-} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TRITON_CACHE_DIR=/tmp/triton_lora
steps=("$@")
[ ${#steps[@]} -gt 0 ] || steps=(tests compile tune layers nano error)
python3 -c "import torch, triton, transformers; print(torch.__version__, triton.__version__, transformers.__version__); import peft; print('peft', peft.__version__)"
S="setsid -w timeout -k 5"
for step in "${steps[@]}"; do
  start=$SECONDS
  case $step in
    tests) $S 100 python3 -m pytest -q -n 8 -m gpu -p no:cacheprovider tests/kernels/test_lora_kernels.py tests/models/test_lora.py >"$OUT/tests.log" 2>&1 ;;
    compile) # candidates for tune, in parallel: no timing
      pids=()
      for kind in fp32 bf16 "fp32 mixed"; do for rows in 16 64 256 8192; do
        $S 70 python3 benchmarks/lora_speed.py layers --models 0.6B --compile --kinds "$kind" --rows $rows >>"$OUT/compile.log" 2>&1 & pids+=($!)
      done; done
      wait "${pids[@]}" ;;
    tune) $S 75 python3 benchmarks/lora_speed.py layers --models 0.6B --tune --seconds 60 --kinds fp32 bf16 "fp32 mixed" --rows 256 64 16 8192 --out "$OUT/tune.json" >"$OUT/tune.log" 2>&1 ;;
    layers) $S 60 python3 benchmarks/lora_speed.py layers --models 0.6B 8B --rows 1 16 64 256 8192 --out "$OUT/layers.json" >"$OUT/layers.log" 2>&1 ;;
    nano) $S 110 python3 benchmarks/lora_speed.py workload --model 0.6B --out "$OUT/nano.json" >"$OUT/nano.log" 2>&1 ;;
    nano8) $S 160 python3 benchmarks/lora_speed.py workload --model 8B --out "$OUT/nano8.json" >"$OUT/nano8.log" 2>&1 ;;
    error) $S 60 python3 benchmarks/logprob_error.py --lora float32 --seeds 1 --sequences 8 --out "$OUT/error.json" >"$OUT/error.log" 2>&1 ;;
    *) echo "unknown step '$step'" >&2; exit 2 ;;
  esac
  echo "== $step: exit $?, $((SECONDS - start)) s"
  case $step in
    tests) tail -n 25 "$OUT/tests.log" ;;
    compile) tail -n 3 "$OUT/compile.log" ;;
    tune) grep -v "^{" "$OUT/tune.log" | awk '{k=$1" "$2" "$3" "$4" "$5; if (c[$1$3$4]++ < 14) print}' | cut -c1-130; grep "^{" "$OUT/tune.log" | cut -c1-1200; tail -n 2 "$OUT/tune.log" | cut -c1-300 ;;
    *) tail -n 12 "$OUT/$step.log" | cut -c1-900 ;;
  esac
done
