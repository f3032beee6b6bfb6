"""PPO for vision-language models: train_grpo_vl.py with advantage_estimator gae, unless a recipe or flag names another.

deepspeed examples/train_ppo_vl.py
"""

from lightrft_visual.config.load import config_or_exit
from lightrft_visual.config.vl import RunConfig

if __name__ == "__main__":
    config = config_or_exit(RunConfig, defaults={"advantage_estimator": "gae"})  # recipes and flags win over it
    from lightrft_visual.launch import run_vl

    run_vl(config)
