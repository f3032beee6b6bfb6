"""RLOO for vision-language models: train_grpo_vl.py with advantage_estimator rloo, unless a recipe or flag says else.

deepspeed examples/train_rloo_vl.py
"""

from lightrft_visual.cli import train_command

if __name__ == "__main__":
    train_command("rloo")
