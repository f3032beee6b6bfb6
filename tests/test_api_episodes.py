"""Episodes from Python: a class, a function that makes one, a list of tools."""

import pytest
from PIL import Image

from lightrft_visual import FlowGRPOTrainer, GRPOTrainer, SFTTrainer, evaluate
from lightrft_visual.errors import ConfigError
from lightrft_visual.models.tiny.vlm import build_tiny_checkpoint

ROWS = [
    {"prompt": "how many?", "images": [Image.new("RGB", (56, 56), (40 * index, 0, 0))], "reference": str(index)}
    for index in range(4)
]
SMALL = {
    "engine_type": "hf", "rollout_batch_size": 4, "n_samples_per_prompt": 2, "train_batch_size": 8,
    "prompt_max_len": 1024, "generate_max_len": 4, "max_steps": 1, "init_kl_coef": 0.0, "image_dependence_every": 0,
    "report": False, "save_steps": -1, "parity_every": 0,
}  # fmt: skip


class Twice:
    """Two turns: the second answer is judged by its length."""

    def reset(self, row):
        self.image, self.turn = row["images"][0], 0

    def step(self, action):
        self.turn += 1
        return [self.image, "again"], float(len(action.text)), self.turn == 2, {}


def enlarge(factor: int) -> Image.Image:
    """Enlarge the image.

    Args:
        factor: how much larger.
    """
    return Image.new("RGB", (28 * factor, 56))


def test_an_environment_must_be_made_anew_for_each_episode():
    with pytest.raises(ConfigError, match="environment is a Twice: give its class"):
        GRPOTrainer("embedded", environment=Twice())


@pytest.mark.parametrize("name,value", [("use_fire", True), ("noisy_rollout_share", 0.5), ("max_staleness", 1)])
def test_what_cannot_be_part_of_episodes_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=f"{name} cannot be part of episodes|{name} above 0"):
        GRPOTrainer("embedded", environment=Twice, **{name: value})


@pytest.mark.slow
def test_rewards_read_the_last_turn_of_every_episode_the_one_that_they_are_asked_with_included(tmp_path):
    folder, asked = build_tiny_checkpoint(tmp_path / "tiny", "qwen2_vl"), []

    class FailsAtOnce(Twice):
        def reset(self, row):
            if row["reference"] == "1":
                raise OSError("no server here")
            super().reset(row)

    def last_turn(completions, turns):
        asked.append(len(completions))
        return [float(len(own[-1]["text"])) for own in turns]

    more = {"max_turns": 3, "output_dir": str(tmp_path / "out"), **SMALL}
    (step,) = GRPOTrainer(str(folder), [last_turn], ROWS, environment=FailsAtOnce, **more).fit().history
    assert step["environment_errors"] == 2 and asked[0] == 2 and sum(asked[1:]) == 8


@pytest.mark.slow
def test_run_with_an_environment_from_python_is_evaluated_with_its_settings(tmp_path):
    folder = build_tiny_checkpoint(tmp_path / "tiny", "qwen2_vl")
    result = GRPOTrainer(
        str(folder), None, ROWS, environment=Twice, output_dir=str(tmp_path / "environment"), max_turns=3, **SMALL
    ).fit()
    (step,) = result.history
    assert step["turns"] >= 1 and "reward/environment" in step and step["environment_errors"] == 0
    found = evaluate(str(result.checkpoint), ROWS, environment=Twice)  # the run's other settings are kept
    assert found["eval_reward"] > 0


def test_environment_factory_is_environment_as_trl_calls_it_and_tools_are_functions():
    assert GRPOTrainer("embedded", environment_factory=Twice).config.episodes.environment.endswith("Twice")
    assert GRPOTrainer("embedded", tools=[enlarge]).config.episodes.tools.endswith("enlarge")


@pytest.mark.parametrize("kind", [GRPOTrainer, FlowGRPOTrainer, SFTTrainer])
def test_no_environment_and_no_tools_are_taken_by_trainers_without_episodes_too(kind):
    assert kind("embedded", environment=None, tools=()).config
    if kind is not GRPOTrainer:
        with pytest.raises(ConfigError, match="unknown setting 'tools'"):
            kind("embedded", tools=[enlarge])


def test_environment_and_tools_are_also_given_by_position():
    episodes = GRPOTrainer("org/model", "exact", ROWS, None, None, (), Twice, [enlarge]).config.episodes
    assert episodes.environment.endswith("Twice") and episodes.tools.endswith("enlarge")


@pytest.mark.parametrize("none", [[], (), ""])
def test_no_tools_are_none_also_over_those_of_a_recipe(tmp_path, none):
    (tmp_path / "tools.yaml").write_text("episodes: {tools: 'mine.py:enlarge'}")
    for recipes in ((), [str(tmp_path / "tools.yaml")]):
        assert not GRPOTrainer("org/model", "exact", ROWS, tools=none, config=recipes).config.episodes.used
    assert not GRPOTrainer("org/model", "exact", ROWS, tools=none, environment="").config.episodes.used
