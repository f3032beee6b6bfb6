"""PPO for vision-language models: train_grpo_vl.py with advantage_estimator gae, unless a recipe or flag names another.

deepspeed examples/train_ppo_vl.py
"""

from lightrft_visual.cli import train_command

if __name__ == "__main__":
    train_command("ppo")
