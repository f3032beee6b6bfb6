#!/usr/bin/env bash
# Trains the embedded drawing task by every algorithm, with the same samples and optimizer steps a rollout step (two updates
# of 64 samples of 128; offline DPO draws none and makes one update of 32 pairs), evaluated on held-out captions by the gold
# judge, and writes OUT/learning_drawing.md (mean and standard deviation over seeds) and OUT/learning_drawing.png
# (curves). A run that is there is not repeated. learning.sh is the vision-language half.
#   OUT    folder of the runs (default outputs/learning_drawing)
#   SEEDS  default "1 2 3"
#   STEPS  of every run, offline DPO twice as many; default: what each algorithm's embedded recipe says
#   EVERY  steps between evaluations, default 5
#   RUNS   names of rows, default all of them
#   TEACHER of diffusion_opd: a folder of LoRA weights, default flow_grpo's of the first seed in OUT
#   Arguments are passed on to every run: `--eval_split dev` for choosing settings (other captions are held out then).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
[ -x .venv/bin/python ] && export PATH="$PWD/.venv/bin:$PATH"
out=${OUT:-outputs/learning_drawing} steps=${STEPS:-} every=${EVERY:-5}
all="flow_grpo diffusion_opd dance_grpo mix_grpo flow_dppo temp_flow_grpo diffusion_nft awm dgpo crd diffusion_dpo diffusion_dpo_offline rwr reward_fl ddpo dpok"
for name in ${RUNS:-$all}; do
  case " $all " in *" $name "*) ;; *) echo "learning_drawing.sh: no run $name; there are: $all" >&2; exit 2 ;; esac
  flags="--diffusion_algorithm $name --eval_steps $every ${steps:+--max_steps $steps}"
  # 32 pairs are one update of 64 samples: twice as many steps make as many updates
  [ "$name" = diffusion_dpo_offline ] &&
    flags="--diffusion_algorithm diffusion_dpo --pair_data embedded --eval_steps $((2 * every)) ${steps:+--max_steps $((2 * steps))}"
  seeds=${SEEDS:-1 2 3}
  [ "$name" = diffusion_opd ] && flags="$flags --teacher_pretrain ${TEACHER:-$out/flow_grpo-${seeds%% *}/checkpoint-final}"
  for seed in $seeds; do
    run=$out/$name-$seed
    [ -d "$run/checkpoint-final" ] && continue
    mkdir -p "$run"
    # shellcheck disable=SC2086
    deepspeed examples/train_flow_grpo.py --seed "$seed" --output_dir "$run" $flags "$@" >"$run/log.txt" 2>&1 ||
      { tail -n 20 "$run/log.txt" >&2; exit 1; }
    tail -n 1 "$run/eval_metrics.csv"
  done
done
python scripts/bench/learning_drawing.py "$out"
