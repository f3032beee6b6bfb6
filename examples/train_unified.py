"""One model that sees and draws, trained on both rewards in one batch and one buffer.

    deepspeed examples/train_unified.py                      the embedded task and model
    deepspeed examples/train_unified.py --pretrain DIR --prompt_data rows.jsonl --reward_recipe rewards.yaml

Rows with `"draw": true` are answered by an image, the others by text. `--help` lists every setting; docs/unified.md
explains them.
"""

from lightrft_visual.config.load import config_or_exit
from lightrft_visual.config.spellings import VL_PRESET
from lightrft_visual.config.vl import RunConfig

if __name__ == "__main__":
    defaults = {"embedded_family": "janus", "engine_type": "hf"}  # recipes and flags win over it
    config = config_or_exit(RunConfig, preset=VL_PRESET, defaults=defaults)
    from lightrft_visual.launch import run_vl

    run_vl(config)
