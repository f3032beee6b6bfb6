"""GRPO over episodes of several turns: an environment answers the model, with text, images, or the results of tools.

    deepspeed examples/train_multi_turn_vl.py                an embedded task that needs a closer look, and its model
    deepspeed examples/train_multi_turn_vl.py --prompt_data rows.jsonl --pretrain DIR --environment my_env.py:Zoom
    deepspeed examples/train_multi_turn_vl.py --prompt_data rows.jsonl --pretrain DIR --tools my_tools.py:crop

docs/multi_turn.md shows how to write an environment. `--help-all` lists every setting.
"""

import sys

from lightrft_visual.cli import train_command

if __name__ == "__main__":
    train_command("grpo", ["--prompt_data", "embedded_zoom", *sys.argv[1:]])
