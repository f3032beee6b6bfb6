#!/usr/bin/env bash
# A GRPO step beside TRL 1.16: the same embedded model, prompts and machine, runs alternating. Prints a markdown table.
#   bash scripts/bench/against_trl.sh [--learn | --replay] [ROUNDS [STEPS]]   default: 3 rounds of 10 after a warm-up of 3
# --learn prints the training reward against the number of samples instead, on the embedded questions with one image
# (default: 3 rounds, each with another seed, of 160 steps with 32 x 8 samples); FIRST is the first seed (default 1).
# --replay gives TRL the rollouts of our first steps (default: 1 round of 4) and compares losses, gradients and weights.
# Needs .venv (scripts/setup.sh). TRL, pinned, gets an environment of its own that shares .venv's torch, vLLM and
# transformers, so both sides run on the same libraries; what TRL needs to run there is said in trl_steps.py.
#   TRL_ENV           folder of that environment (default: outputs/bench/trl)
#   OMP_NUM_THREADS   threads of both sides (default: 2)
#   OURS              further flags for our side, such as '--packing_samples true'
#   FURTHER           with --learn: flags of a second run of our side for each seed, which TRL has nothing like
#                     (default: '--selective_replay 512'; empty: none)
#   CASES             default: '8x8x32@56/64 4x16x64@448/16', prompts x samples x tokens @ image size / micro-batch
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
learn=false replay=false
if [ "${1:-}" = --learn ]; then learn=true && shift; fi
if [ "${1:-}" = --replay ]; then replay=true && shift; fi
default=10
if $learn; then default=160; elif $replay; then default=4; fi
rounds=${1:-3} steps=${2:-$default}
further=${FURTHER---selective_replay 512}
cases=${CASES:-8x8x32@56/64 4x16x64@448/16}
ours=.venv/bin/python
env=${TRL_ENV:-outputs/bench/trl}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} GOMP_SPINCOUNT=50000 HF_HUB_OFFLINE=1
# TRL's environment sees this package's entry point for PyTorch (setup.py), but not the package.
theirs=(env TORCH_DEVICE_BACKEND_AUTOLOAD=0 "$env/bin/python")

if [ ! -x "$env/bin/python" ]; then
  "$ours" -m venv "$env"
  packages='import sysconfig; print(sysconfig.get_paths()["purelib"])'
  "$ours" -c "$packages" >"$("$env/bin/python" -c "$packages")/project.pth"
  "$env/bin/python" -m pip install --quiet --no-deps trl==1.16.0
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
read -r model data < <("$ours" -c '
from lightrft_visual.plugins.embedded.warmup import WarmUp, embedded_checkpoint, embedded_task
print(embedded_checkpoint(WarmUp(), report=lambda text: None), embedded_task().train)' | tail -n 1)

questions=(--config examples/configs/embedded_vl.yaml --pretrain "$model" --prompt_data "$work/rows/rows.jsonl"
  --reward.components.exact 1.0 --max_steps "$steps" --max_eval_samples 0 --eval_steps 0)
if $replay; then
  "$ours" scripts/bench/picture_rows.py "$data" "$work/rows" 56 10000
  # shellcheck disable=SC2086
  PYTHONPATH=. "$ours" scripts/bench/trl_replay.py ours "$work" "${questions[@]}" ${OURS:-} >&2
  PYTHONPATH=. "${theirs[@]}" scripts/bench/trl_replay.py trl "$work" "$model" >&2
  PYTHONPATH=. "$ours" scripts/bench/trl_replay.py table "$work"
  exit
fi

if $learn; then
  "$ours" scripts/bench/picture_rows.py "$data" "$work/rows" 56 10000
  for seed in $(seq "${FIRST:=1}" $((FIRST + rounds - 1))); do
    # shellcheck disable=SC2086
    "$ours" examples/train_grpo_vl.py "${questions[@]}" --seed "$seed" \
      --output_dir "$work/ours-$seed" ${OURS:-} >&2
    # shellcheck disable=SC2086
    [ -z "$further" ] || "$ours" examples/train_grpo_vl.py "${questions[@]}" --seed "$seed" \
      --output_dir "$work/further-$seed" ${OURS:-} $further >&2
    PYTHONPATH=. "${theirs[@]}" scripts/bench/trl_learn.py "$model" "$work/rows/rows.jsonl" --steps "$steps" \
      --seed "$seed" --out "$work/trl-$seed.json" >&2
  done
  # shellcheck disable=SC2086
  "$ours" scripts/bench/trl_learn_table.py "$work" 256 $further
  exit
fi

for case in $cases; do
  IFS='x@/' read -r prompts samples tokens size micro <<<"$case"
  rows="$work/$size/rows.jsonl" name=${case//\//_}
  [ -f "$rows" ] || "$ours" scripts/bench/picture_rows.py "$data" "$work/$size" "$size"
  for round in $(seq "$rounds"); do
    # shellcheck disable=SC2086
    "$ours" scripts/bench/step_time.py --steps "$steps" --json "$work/$name.ours.$round.json" --pretrain "$model" \
      --prompt_data "$rows" --rollout_batch_size "$prompts" --n_samples_per_prompt "$samples" \
      --generate_max_len "$tokens" --min_new_tokens "$tokens" --prompt_max_len 512 \
      --train_batch_size $((prompts * samples)) --micro_rollout_batch_size "$micro" \
      --micro_train_batch_size "$micro" --init_kl_coef 0 --actor_learning_rate 1e-6 ${OURS:-} >&2
    "${theirs[@]}" scripts/bench/trl_steps.py "$model" "$rows" --prompts "$prompts" --samples "$samples" \
      --tokens "$tokens" --micro "$micro" --steps "$steps" --out "$work/$name.trl.$round.json" >&2
  done
done

"$ours" -c '
import json, statistics, sys
from pathlib import Path

print("| case | ours | TRL 1.16 | ratio | our sync | weight load of TRL |\n|---|---|---|---|---|---|")
for case in sys.argv[2:]:
    stem = case.replace("/", "_")
    read = lambda side: [json.loads(p.read_text()) for p in sorted(Path(sys.argv[1]).glob(f"{stem}.{side}.*.json"))]
    ours, theirs = read("ours"), read("trl")
    middle = lambda side, name: statistics.median(each[name] for each in side)
    step, other = middle(ours, "step"), middle(theirs, "step")
    sync, load = middle(ours, "sync"), middle(theirs, "weights")
    print(f"| {case} | {step:.2f} s | {other:.2f} s | {step / other:.2f} | {sync:.3f} s | {load:.3f} s |")
' "$work" $cases
