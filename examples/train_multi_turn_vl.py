"""GRPO over episodes of several turns: an environment answers the model, with text, images, or the results of tools.

    deepspeed examples/train_multi_turn_vl.py --environment my_env.py:Zoom
    deepspeed examples/train_multi_turn_vl.py --tools my_tools.py:search,my_tools.py:crop --reward_fn my.py:score

docs/multi_turn.md shows how to write an environment. `--help-all` lists every setting.
"""

from lightrft_visual.cli import train_command

if __name__ == "__main__":
    train_command("grpo")
