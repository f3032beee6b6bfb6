"""Diffusion-DPO for diffusion models, on pairs of their own samples or of a file.

    deepspeed examples/train_diffusion_dpo.py                       online: the embedded pipeline ranks its own samples
    deepspeed examples/train_diffusion_dpo.py --pair_data embedded  offline: pairs of drawn shapes; no rollouts
    deepspeed examples/train_diffusion_dpo.py --pretrain PIPELINE --pair_data pairs.jsonl

`--help-all` lists every setting; docs/diffusion.md explains them.
"""

from lightrft_visual.cli import train_command

if __name__ == "__main__":
    train_command("dpo")
