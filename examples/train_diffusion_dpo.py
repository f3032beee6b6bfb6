"""Diffusion-DPO for diffusion models, on pairs of their own samples or of a file.

    deepspeed examples/train_diffusion_dpo.py                       online: the embedded pipeline ranks its own samples
    deepspeed examples/train_diffusion_dpo.py --pair_data embedded  offline: pairs of drawn shapes; no rollouts
    deepspeed examples/train_diffusion_dpo.py --pretrain PIPELINE --pair_data pairs.jsonl

`--help` lists every setting; docs/diffusion.md explains them.
"""

from lightrft_visual.config.diffusion import DiffusionRunConfig
from lightrft_visual.config.load import config_or_exit
from lightrft_visual.config.spellings import DIFFUSION_PRESET

if __name__ == "__main__":
    defaults = {"diffusion_algorithm": "diffusion_dpo"}  # recipes and flags win over it
    config = config_or_exit(DiffusionRunConfig, preset=DIFFUSION_PRESET, defaults=defaults)
    from lightrft_visual.launch import run_diffusion

    run_diffusion(config)
