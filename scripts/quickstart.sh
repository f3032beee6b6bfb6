#!/usr/bin/env bash
# Sets everything up and trains the embedded vision-language model: a few minutes on two cores.
# Arguments are passed on: bash scripts/quickstart.sh --seed 2 --output_dir outputs/seed2
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
export PATH="$PWD/.venv/bin:$PATH"
exec deepspeed --quiet examples/train_grpo_vl.py "$@" # DeepSpeed would speak before the run and after it
