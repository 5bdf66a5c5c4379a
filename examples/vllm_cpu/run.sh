#!/usr/bin/env bash
# Warm start (once), a vLLM server, twenty steps of GCPO with rollouts from it. Arguments: overrides of the recipe.
set -euo pipefail
cd "$(dirname "$0")/../.."
gcpo=.venv/bin/megatron-gcpo
recipe=configs/recipe/vllm_cpu.yaml

$gcpo train configs/recipe/quickstart_warm_start.yaml   # a finished run is shown again, not repeated
$gcpo serve $recipe "$@" &
server=$!
trap 'kill $server 2>/dev/null; wait $server' EXIT
until (exec 3<>/dev/tcp/127.0.0.1/8731) 2>/dev/null; do
  kill -0 $server || exit 1
  sleep 0.5
done
$gcpo train $recipe "$@"
