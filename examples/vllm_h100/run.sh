#!/usr/bin/env bash
# On one node:          run.sh colocated [overrides]
# On two nodes, first:  run.sh servers [overrides]              on the node that draws
#               then:   run.sh trainer SERVER_HOST [overrides]  on the node that learns
set -euo pipefail
cd "$(dirname "$0")/../.."
recipe=configs/recipe/vllm_h100
case "${1:-}" in
  colocated)
    exec .venv/bin/torchrun --standalone --nproc-per-node 8 -m megatron_gcpo.cli train ${recipe}_colocated.yaml "${@:2}"
    ;;
  servers)
    exec .venv/bin/megatron-gcpo serve ${recipe}_split.yaml "${@:2}" --host 0.0.0.0 --port 8000 --replicas 2
    ;;
  trainer)
    host=${2:?run.sh trainer SERVER_HOST}
    exec .venv/bin/torchrun --standalone --nproc-per-node 8 -m megatron_gcpo.cli train ${recipe}_split.yaml \
      "rollout.vllm.urls=[http://$host:8000,http://$host:8001]" "${@:3}"
    ;;
  *)
    sed -n '2,4s/^# //p' "$0"
    exit 2
    ;;
esac
