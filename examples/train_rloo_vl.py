"""RLOO for vision-language models: train_grpo_vl.py with advantage_estimator rloo, unless a recipe or flag says else.

deepspeed examples/train_rloo_vl.py
"""

from lightrft_visual.config.load import config_or_exit
from lightrft_visual.config.vl import RunConfig

if __name__ == "__main__":
    config = config_or_exit(RunConfig, defaults={"advantage_estimator": "rloo"})  # recipes and flags win over it
    from lightrft_visual.launch import run_vl

    run_vl(config)
