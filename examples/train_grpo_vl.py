"""GRPO for vision-language models.

    deepspeed examples/train_grpo_vl.py                      the embedded task and model
    deepspeed examples/train_grpo_vl.py --pretrain DIR --prompt_data rows.jsonl --reward_fn my.py:score

`--help` lists every setting; docs/ explains them.
"""

from lightrft_visual.config.load import config_or_exit
from lightrft_visual.config.vl import RunConfig

if __name__ == "__main__":
    config = config_or_exit(RunConfig)
    from lightrft_visual.launch import run_vl

    run_vl(config)
