"""GRPO for vision-language models.

    deepspeed examples/train_grpo_vl.py                      the embedded task and model
    deepspeed examples/train_grpo_vl.py --pretrain DIR --prompt_data rows.jsonl --reward_fn my.py:score

`--help-all` lists every setting; docs/ explains them.
"""

from lightrft_visual.cli import train_command

if __name__ == "__main__":
    train_command("grpo")
