#!/usr/bin/env bash
# A Flow-GRPO iteration beside the loop that its authors publish: the same embedded SD3, prompts, reward and machine, runs
# alternating. Prints a markdown table. What the other side is, and that it is not their own code, says flow_grpo_loop.py.
#   bash scripts/bench/against_flow_grpo.sh [--learn] [ROUNDS [ITERATIONS]]   default: 3 rounds of 10 after a warm-up of 3
# --learn prints the mean reward against the number of samples instead (default: 3 rounds, each with another seed, of 90).
#   OMP_NUM_THREADS   threads of both sides (default: 2)
#   OURS, THEIRS      further settings of a side, such as OURS='train.steps_per_forward=1' or THEIRS='--batch 8'
#   PROMPTS, IMAGES, STEPS   default: 8 prompts x 8 images x 10 denoising steps
# Seconds of the processor are printed beside those of the wall: on a machine that does other work compare them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
learn=false
if [ "${1:-}" = --learn ]; then learn=true && shift; fi
rounds=${1:-3}
if $learn; then iterations=${2:-90}; else iterations=$((${2:-10} + 3)); fi
prompts=${PROMPTS:-8} images=${IMAGES:-8} steps=${STEPS:-10}
python=${PYTHON:-.venv/bin/python}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} GOMP_SPINCOUNT=50000 HF_HUB_OFFLINE=1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

read -r model data < <("$python" -c '
from lightrft_visual.plugins.embedded.captions import embedded_prompts
from lightrft_visual.plugins.embedded.resolve import embedded_folder
from lightrft_visual.runtime.files import cache_root
print(embedded_folder(), embedded_prompts(cache_root())[0])' | tail -n 1)

for round in $(seq "$rounds"); do
  seed=42
  if $learn; then seed=$((41 + round)); fi
  # shellcheck disable=SC2086
  "$python" scripts/bench/diffusion_step.py --prompts "$prompts" --images "$images" --steps "$steps" \
    --iterations $((iterations - 1)) --json "$work/ours.$round.json" seed="$seed" scheduler=model_default \
    enable_ema=true ${OURS:-} >&2
  # shellcheck disable=SC2086
  "$python" scripts/bench/flow_grpo_loop.py "$model" "$data" --prompts "$prompts" --images "$images" --steps "$steps" \
    --iterations "$iterations" --seed "$seed" --out "$work/theirs.$round.json" ${THEIRS:-} >&2
done

"$python" -c '
import json, statistics, sys
from pathlib import Path

work, learn, samples = Path(sys.argv[1]), sys.argv[2] == "true", int(sys.argv[3])
ours, theirs = ([json.loads(p.read_text()) for p in sorted(work.glob(f"{side}.*.json"))] for side in ("ours", "theirs"))
if learn:
    print("| samples | reward, ours | reward, the published loop |\n|---|---|---|")
    window = 10  # iterations
    for start in range(0, len(ours[0]), window):
        cells = []
        for side in (ours, theirs):
            means = [statistics.mean(row["reward"] for row in run[start : start + window]) for run in side]
            spread = statistics.pstdev(means) if len(means) > 1 else 0.0
            cells.append(f"{statistics.mean(means):.3f} ± {spread:.3f}")
        print(f"| {start * samples} to {min(start + window, len(ours[0])) * samples} | {cells[0]} | {cells[1]} |")
else:
    print("| an iteration | ours | the published loop | ratio |\n|---|---|---|---|")
    middle = lambda side, name: statistics.median(row[name] for run in side for row in run[3:])
    for name, said in (("wall", "seconds of the wall"), ("cpu", "seconds of the processor")):
        a, b = middle(ours, name), middle(theirs, name)
        print(f"| {said} | {a:.3f} | {b:.3f} | {a / b:.2f} |")
    for name in ("reward", "loss"):
        print(f"| {name}, first iteration | {ours[0][0][name]:.4g} | {theirs[0][0][name]:.4g} | |")
' "$work" "$learn" $((prompts * images))
