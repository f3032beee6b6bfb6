"""DiffusionNFT for diffusion models.

    deepspeed examples/train_diffusion_nft.py                       the embedded pipeline and its drawn shapes

`--help-all` lists every setting; docs/diffusion.md explains them.
"""

from lightrft_visual.cli import train_command

if __name__ == "__main__":
    train_command("nft")
