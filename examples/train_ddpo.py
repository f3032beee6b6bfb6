"""DDPO for diffusion models.

    deepspeed examples/train_ddpo.py                       the embedded pipeline and its drawn shapes

`--help-all` lists every setting; docs/diffusion.md explains them.
"""

from lightrft_visual.cli import train_command

if __name__ == "__main__":
    train_command("ddpo")
