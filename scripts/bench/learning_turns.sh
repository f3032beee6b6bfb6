#!/usr/bin/env bash
# Trains the embedded tasks of several turns, and measures what a trained policy of the zoom task is worth without what
# its tool shows: with the image as it was in its place, and with another mark's colour. Writes OUT/TASK-SEED, and
# OUT/TASK-SEED/checks.txt. A run that is there is not repeated.
#   OUT    folder of the runs (default outputs/turns)
#   SEEDS  default "1 2 3"
#   TASKS  default "embedded_zoom embedded_click"
#   Arguments are passed on to every run: bash scripts/bench/learning_turns.sh --eval_split dev
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
[ -x .venv/bin/python ] && export PATH="$PWD/.venv/bin:$PATH"
out=${OUT:-outputs/turns}
for task in ${TASKS:-embedded_zoom embedded_click}; do
  for seed in ${SEEDS:-1 2 3}; do
    run=$out/$task-$seed
    if [ ! -d "$run/checkpoint-final" ]; then
      mkdir -p "$run"
      deepspeed examples/train_grpo_vl.py --prompt_data "$task" --seed "$seed" --output_dir "$run" "$@" \
        >"$run/log.txt" 2>&1 || { tail -n 20 "$run/log.txt" >&2; exit 1; }
    fi
    echo "$task $seed: $(tail -n 1 "$run/eval_metrics.csv")"
    [ "$task" = embedded_zoom ] || continue
    [ -f "$run/checks.txt" ] || for check in EmbeddedZoomOfNothing EmbeddedZoomOfAnother; do
      python -m lightrft_visual eval "$run/checkpoint-final" --environment "scripts/bench/zoom_checks.py:$check" \
        --output_dir "$run/$check" 2>>"$run/log.txt" | grep greedy | sed "s/^/$check /" | tee -a "$run/checks.txt"
    done
  done
done
