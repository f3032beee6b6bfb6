"""DDPO for diffusion models.

    deepspeed examples/train_ddpo.py                       the embedded pipeline and its drawn shapes

`--help` lists every setting; docs/diffusion.md explains them.
"""

from lightrft_visual.config.diffusion import DiffusionRunConfig
from lightrft_visual.config.load import config_or_exit
from lightrft_visual.config.spellings import DIFFUSION_PRESET

if __name__ == "__main__":
    defaults = {"diffusion_algorithm": "ddpo"}  # recipes and flags win over it
    config = config_or_exit(DiffusionRunConfig, preset=DIFFUSION_PRESET, defaults=defaults)
    from lightrft_visual.launch import run_diffusion

    run_diffusion(config)
