"""One model that sees and draws, trained on both rewards in one batch and one buffer.

    deepspeed examples/train_unified.py                      the embedded task and model
    deepspeed examples/train_unified.py --pretrain DIR --prompt_data rows.jsonl --reward_recipe rewards.yaml

Rows with `"draw": true` are answered by an image, the others by text. `--help-all` lists every setting; docs/unified.md
explains them.
"""

from lightrft_visual.cli import train_command

if __name__ == "__main__":
    train_command("unified")
