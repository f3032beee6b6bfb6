"""Which reward a diffusion run is trained on: the user's where there is one, the drawing task's own otherwise."""

from pathlib import Path

import pytest

from lightrft_visual.config.diffusion import DiffusionRunConfig
from lightrft_visual.config.load import load_config
from lightrft_visual.config.spellings import DIFFUSION_PRESET
from lightrft_visual.errors import ConfigError
from lightrft_visual.rewards.settings import engine_arguments
from lightrft_visual.trainer.diffusion.build import with_reward


def chosen(*argv: str) -> dict:
    """What the reward engine of an embedded run is built from."""
    config = with_reward(load_config(DiffusionRunConfig, list(argv), preset=DIFFUSION_PRESET))
    return engine_arguments(config.reward)


def test_the_embedded_task_has_its_own_reward_unless_the_user_names_one(tmp_path: Path):
    (entry,) = chosen()["reward_recipe"].components()
    assert (entry.type, entry.key) == ("rule", "shape_match")
    (tmp_path / "mine.py").write_text("def score(images):\n    return [0.0] * len(images)\n")
    function, server = (
        chosen("--reward_fn", f"{tmp_path}/mine.py:score"),
        chosen("--remote_rm_url", "http://127.0.0.1/r"),
    )
    assert function["reward_fn"].__name__ == "score" and server["remote_rm_url"]
    assert function["reward_recipe"] is server["reward_recipe"] is None
    (entry,) = chosen("reward.components.jpeg_compressibility=1.0")["reward_recipe"].components()
    assert entry.key == "jpeg_compressibility"


@pytest.mark.parametrize(
    ("more", "refused"),
    [((), True), (("diffusion_algorithm=reward_fl",), False), (("diffusion_algorithm=reward_fl", "eval_data=b"), True)],
)
def test_prompts_of_the_user_need_a_reward(more, refused):
    config = load_config(DiffusionRunConfig, ["--pretrain", "a", "--prompt_data", "p.jsonl", *more])
    if refused:
        with pytest.raises(ConfigError, match="no reward is given; .*--reward_fn"):
            with_reward(config)
    else:
        assert with_reward(config) is config
