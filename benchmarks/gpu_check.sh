#!/usr/bin/env bash
# On a GPU machine with no network: install carried wheels, run the GPU tests, then measure. From the repository's root:
#   benchmarks/gpu_check.sh WHEELS OUT MODEL [ENGINE...]     MODEL: qwen2.5-7b or qwen2.5-1.5b; ENGINE: mini-infer, vllm
# WHEELS is a folder of .whl files, ours among them. vLLM is found through VLLM_SITE, FlashAttention-3 through FA3_SITE.
# Each part has a time limit; what was measured until then is in OUT as JSON.
set -euo pipefail
WHEELS=$1; OUT=$2; MODEL=$3; shift 3
SITE=$(mktemp -d); mkdir -p "$OUT"
python3 -m pip install -q --no-index --no-deps --no-compile --target "$SITE" "$WHEELS"/*.whl
ours() { PYTHONPATH="$SITE:${FA3_SITE:-}:$PWD" timeout "$@"; }
ours 240 python3 -m pytest -m gpu tests/plugins tests/core tests/models || echo "the GPU tests did not pass"
for engine in "${@:-mini-infer}"; do
  case $engine in
    mini-infer) ours 240 python3 -m benchmarks gpu rows "$MODEL" --engine mini-infer --json "$OUT/$MODEL-mini-infer.json" ;;
    vllm) PYTHONPATH="${VLLM_SITE:?where vLLM is}:$PWD" timeout 300 python3 -m benchmarks gpu rows "$MODEL" --engine vllm --json "$OUT/$MODEL-vllm.json" ;;
  esac
done
ours 120 python3 -m benchmarks gpu arrivals "$MODEL" --json "$OUT/$MODEL-arrivals.json"
ours 120 python3 -m benchmarks gpu breakdown "$MODEL" --json "$OUT/$MODEL-breakdown.json"
ours 120 python3 -m benchmarks gpu attention --json "$OUT/attention.json"
ours 120 python3 -m benchmarks gpu sampler --json "$OUT/sampler.json"
if [ -f "$OUT/$MODEL-vllm.json" ]; then ours 60 python3 -m benchmarks gpu compare "$OUT/$MODEL-mini-infer.json" "$OUT/$MODEL-vllm.json"; fi
