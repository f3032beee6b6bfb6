"""RLOO for vision-language models: as train_grpo_vl.py, with advantage_estimator rloo unless another is given.

deepspeed examples/train_rloo_vl.py
"""

import sys

from lightrft_visual.config.load import config_or_exit
from lightrft_visual.config.schema import RunConfig

if __name__ == "__main__":
    config = config_or_exit(RunConfig, ["advantage_estimator=rloo", *sys.argv[1:]])
    from lightrft_visual.launch import run_vl

    run_vl(config)
