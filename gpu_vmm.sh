#!/usr/bin/env bash
# The KV pool in reserved addresses: GPU tests, the driver's rates, release and return, growth, speed. About 90 s.
set -uo pipefail
OUT=${OUT:-/tmp/hf_paged_vmm}
mkdir -p "$OUT"
export OUT PYTHONPATH=$PWD:${PYTHONPATH:-} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
S="setsid -w timeout -k 5"
steps=("$@")
[ ${#steps[@]} -gt 0 ] || steps=(tests engine speed old_tests)
nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader
python3 -c "import torch, cuda.bindings; print(torch.__version__, torch.version.cuda, 'cuda.bindings', cuda.bindings.__version__)"
for step in "${steps[@]}"; do
  start=$SECONDS
  case $step in
    rates) $S 40 python3 benchmarks/kv_memory.py rates --out "$OUT/rates.json" >"$OUT/rates.log" 2>&1 ;;
    tests) $S 80 python3 -m pytest -q -m gpu -p no:cacheprovider -p no:randomly --durations=8 \
      tests/models/test_virtual_memory.py tests/runner/test_kv_cache.py >"$OUT/tests.log" 2>&1 ;;
    old_tests) $S 60 python3 -m pytest -q -n 8 -m gpu -p no:cacheprovider tests/gpu/test_generate_cuda.py tests/runner/test_graphs.py \
      tests/runner/test_memory.py tests/models/test_merged.py tests/models/test_adjacent.py >"$OUT/old_tests.log" 2>&1 ;;
    engine) $S 60 python3 benchmarks/kv_memory.py engine --out "$OUT/engine.json" >"$OUT/engine.log" 2>&1 ;;
    growth) $S 60 python3 benchmarks/kv_memory.py growth --out "$OUT/growth.json" >"$OUT/growth.log" 2>&1 ;;
    speed) $S 60 python3 benchmarks/kv_memory.py speed --out "$OUT/speed.json" >"$OUT/speed.log" 2>&1 ;;
    *) echo "unknown step '$step'" >&2; exit 2 ;;
  esac
  echo "== $step: exit $?, $((SECONDS - start)) s"
  tail -n "$([[ $step == *tests ]] && echo 30 || echo 14)" "$OUT/$step.log" | cut -c1-400
done
