#!/usr/bin/env bash
# One visit to a GPU machine: tests, kernels, log-prob error, throughput. Full logs under $OUT, a short table last.
#   bash benchmarks/gpu_session.sh [tests|kernels|linear|sampler|options|logprob|throughput|ab|profile|memory|timeline
#                                  |shadow|autocast_tests|logprob_autocast|autocast ...]
#   bash benchmarks/gpu_session.sh "first_token" "lora_speed workload --model 8B"   # any script of this folder, its words
#   MODELS=32B SIZE=4 bash benchmarks/gpu_session.sh rank_tests all_reduce ranks ranks_filtered    # several GPUs
set -uo pipefail
OUT=${OUT:-/tmp/hf_paged_gpu}
mkdir -p "$OUT"
export OUT PYTHONPATH=$PWD PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
steps=("$@")
[ ${#steps[@]} -gt 0 ] || steps=(tests kernels logprob throughput profile)
for step in "${steps[@]}"; do
  start=$SECONDS
  name=${step%% *} words=${step#"${step%% *}"}
  case $step in
    tests) timeout 300 python3 -m pytest -q -n 12 -m gpu -p no:cacheprovider tests >"$OUT/tests.log" 2>&1 ;;
    kernels) timeout 150 python3 benchmarks/kernel_speed.py --out "$OUT/kernels.json" >"$OUT/kernels.log" 2>&1 ;;
    linear) timeout 240 python3 benchmarks/linear_tuning.py --out "$OUT/linear.json" >"$OUT/linear.log" 2>&1 ;;
    sampler) timeout 90 python3 benchmarks/sampler_speed.py --out "$OUT/sampler.json" >"$OUT/sampler.log" 2>&1 ;;
    logprob) timeout 200 python3 benchmarks/logprob_error.py --out "$OUT/logprob.json" >"$OUT/logprob.log" 2>&1 ;;
    shadow) timeout 90 python3 benchmarks/shadow_speed.py --out "$OUT/shadow.json" >"$OUT/shadow.log" 2>&1 ;;
    autocast_tests) timeout 200 python3 -m pytest -q -n 6 -m gpu -p no:cacheprovider tests/gpu/test_autocast_cuda.py tests/kernels/test_cast_copies.py \
      tests/kernels/layer/test_add_rms_norm.py tests/kernels/layer/test_qk_norm_rope_store.py >"$OUT/autocast_tests.log" 2>&1 ;;
    logprob_autocast) timeout 200 python3 benchmarks/logprob_error.py --autocast --seeds ${SEEDS:-3} --out "$OUT/logprob_autocast.json" >"$OUT/logprob_autocast.log" 2>&1 ;;
    autocast) timeout 300 python3 benchmarks/run_all.py --engines ours --workloads nano --batches --autocast --models ${MODELS:-0.6B} \
      --out "$OUT/autocast" >"$OUT/autocast.log" 2>&1 ;;
    profile) timeout 150 bash -c 'for b in 256 8 1; do python3 benchmarks/profile_decode.py --batch $b --out $OUT/profile_$b.txt; done' >"$OUT/profile.log" 2>&1 ;;
    throughput) timeout 400 python3 benchmarks/run_all.py --engines ours --models ${MODELS:-0.6B} --out "$OUT/figures" >"$OUT/throughput.log" 2>&1 ;;
    ab) timeout 400 python3 benchmarks/run_all.py --engines ours --workloads nano single --batches --ab all --out "$OUT/ab" >"$OUT/ab.log" 2>&1 ;;
    options) timeout 150 python3 benchmarks/options_speed.py --out "$OUT/options.json" >"$OUT/options.log" 2>&1 ;;
    rank_tests) timeout 400 python3 -m pytest -q -m gpu -p no:cacheprovider --durations=0 tests/gpu/test_tensor_parallel_cuda.py \
      tests/kernels/comm/test_all_reduce.py >"$OUT/rank_tests.log" 2>&1 ;;
    all_reduce) timeout 90 python3 benchmarks/all_reduce_speed.py --size ${SIZE:-2} --out "$OUT/all_reduce.json" >"$OUT/all_reduce.log" 2>&1 ;;
    ranks) timeout 200 python3 benchmarks/tensor_parallel.py --model ${MODELS:-8B} --size ${SIZE:-2} --out "$OUT/ranks.json" >"$OUT/ranks.log" 2>&1 ;;
    ranks_filtered) timeout 100 python3 benchmarks/tensor_parallel.py --model ${MODELS:-8B} --size ${SIZE:-2} --workloads nano \
      --options '{"top_k": 50, "top_p": 0.9}' --out "$OUT/ranks_filtered.json" >"$OUT/ranks_filtered.log" 2>&1 ;;
    memory) timeout 200 bash -c 'python3 -m pytest -q -m gpu -p no:cacheprovider tests/device/test_virtual_memory.py tests/runner/test_kv_cache.py &&
      python3 benchmarks/kv_memory.py --out $OUT/memory.json' >"$OUT/memory.log" 2>&1 ;;
    timeline) timeout 90 python3 benchmarks/timeline.py >"$OUT/timeline.log" 2>&1 ;;
    *)
      [ -f "benchmarks/$name.py" ] || { echo "unknown step '$step': expected one of this file's, or a script of its folder" >&2; exit 2; }
      # shellcheck disable=SC2086
      timeout ${LIMIT:-150} python3 "benchmarks/$name.py" $words >"$OUT/$name.log" 2>&1 ;;
  esac
  echo "== $step: exit $?, $((SECONDS - start)) s"
  tail -n "$([ "$step" = throughput ] || [ "$step" = ab ] && echo 40 || echo 12)" "$OUT/$name.log"
done
