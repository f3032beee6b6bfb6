#!/usr/bin/env bash
# Trains the embedded vision-language task by every algorithm, with equal numbers of samples and of optimizer steps (two
# updates a rollout, but for the first row, at half of its learning rate after a warm-up), and writes OUT/learning.md
# (test rewards, mean and standard deviation over seeds) and OUT/learning.png (curves). A run that is there is not
# repeated. learning_drawing.sh is the drawing half.
#   OUT    folder of the runs (default outputs/learning)
#   SEEDS  default "1 2 3"
#   RUNS   names of rows, default all of them
#   Arguments are passed on to every run: bash scripts/bench/learning.sh --eval_split dev
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
[ -x .venv/bin/python ] && export PATH="$PWD/.venv/bin:$PATH"
out=${OUT:-outputs/learning}
two="--train_batch_size 128 --actor_learning_rate 2.5e-4 --lr_warmup_ratio 0.05"
declare -A flags=(
  [quickstart]=""
  [grpo]="$two"
  [rloo]="$two --advantage_estimator rloo"
  [gae]="$two --advantage_estimator gae"
  [reinforce_baseline]="$two --advantage_estimator reinforce_baseline --advantages_norm true"
  [dr_grpo]="$two --advantage_estimator dr_grpo"
  [gspo]="$two --policy_loss gspo"
  [gmpo]="$two --policy_loss gmpo"
  [cispo]="$two --policy_loss cispo"
  [cpgd]="$two --advantage_estimator cpgd --policy_loss cpgd"
  [sapo]="$two --policy_loss sapo"
  [luspo]="$two --policy_loss luspo --loss_agg_mode seq-mean-token-sum"
  [dppo_tv]="$two --policy_loss dppo_tv --eps_clip 0.15"
  [dppo_kl]="$two --policy_loss dppo_kl --eps_clip 0.05"
  [vespo]="$two --policy_loss vespo"
  [clip_cov]="$two --policy_loss clip_cov --cov_share 0.01 --clip_cov_low 0.2"
  [kl_cov]="$two --policy_loss kl_cov --cov_share 0.01"
  [off_policy_mask]="$two --off_policy_delta 0.05"
  [entropy_target]="$two --entropy_target 0.8 --entropy_coef_step 1e-3 --entropy_coef_max 0.02"
  [kl_loss]="$two --init_kl_coef 0.01 --use_kl_loss true --kl_estimator k3"
  [kl_loss_unbiased]="$two --init_kl_coef 0.01 --use_kl_loss true --kl_estimator k3_unbiased"
)
all="quickstart grpo rloo gae reinforce_baseline dr_grpo gspo gmpo cispo cpgd sapo luspo dppo_tv dppo_kl vespo clip_cov"
all+=" kl_cov off_policy_mask entropy_target kl_loss kl_loss_unbiased"
for name in ${RUNS:-$all}; do
  [ -v "flags[$name]" ] || { echo "learning.sh: no run $name; there are: ${!flags[*]}" >&2; exit 2; }
  for seed in ${SEEDS:-1 2 3}; do
    run=$out/$name-$seed
    [ -d "$run/checkpoint-final" ] && continue
    mkdir -p "$run"
    # shellcheck disable=SC2086
    deepspeed examples/train_grpo_vl.py --seed "$seed" --output_dir "$run" ${flags[$name]} "$@" >"$run/log.txt" 2>&1 ||
      { tail -n 20 "$run/log.txt" >&2; exit 1; }
    tail -n 1 "$run/eval_metrics.csv"
  done
done
python scripts/bench/learning.py "$out"
