"""Plugins are imported before anything is checked, and what they register is a choice like any other."""

import sys
from pathlib import Path

import pytest

from lightrft_visual.algorithms.advantages import AdvantageCalculator
from lightrft_visual.cli import train_command
from lightrft_visual.config import kinds, registry
from lightrft_visual.config.load import parse_run
from lightrft_visual.config.vl import AlgorithmConfig, RunConfig
from lightrft_visual.errors import ConfigError
from lightrft_visual.trainer.vl.trainer import VLTrainer

PLUGIN = """
from lightrft_visual.config import registry
import mine_helper

registry.policy_losses.register("{name}", about="mine")(lambda inputs, config: None)
"""


@pytest.fixture(autouse=True)
def own_entries(monkeypatch):
    for value in vars(registry).values():
        if isinstance(value, registry.Registry):
            monkeypatch.setattr(value, "_entries", dict(value._entries))


@pytest.fixture
def plugin(tmp_path) -> Path:
    (tmp_path / "mine_helper.py").write_text("")
    file = tmp_path / "mine.py"
    file.write_text(PLUGIN.format(name="mine_loss"))
    return file


def config(*argv: str) -> RunConfig:
    return parse_run(RunConfig, list(argv), preset=None).config


def test_from_the_command_line_and_from_a_recipe(plugin, tmp_path):
    assert config("--plugins", str(plugin), "--policy_loss", "mine_loss").algorithm.policy_loss == "mine_loss"
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"plugins: {plugin}\npolicy_loss: mine_loss\n")
    assert config("--config", str(recipe)).plugins == str(plugin)


def test_help_of_a_command_that_names_one_shows_its_choices(plugin, capsys):
    train_command("grpo", ["--nonsense", "--plugins", str(plugin), "--help-all"])
    assert "| mine_loss" in capsys.readouterr().out


def test_several_and_a_module_of_the_working_directory(plugin, tmp_path, monkeypatch):
    (tmp_path / "mine_too.py").write_text(PLUGIN.format(name="mine_second").replace("import mine_helper", ""))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert config("--plugins", str(plugin), "mine_too", "--policy_loss=mine_second")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "plugin .*mine.py does not exist"),
        ("1 / 0", r"mine.py fails on import.*ZeroDivisionError"),
        (PLUGIN.format(name="ppo").replace("import mine_helper", ""), "policy loss 'ppo' is registered already"),
        (
            "from lightrft_visual.config import registry\nregistry.engines.register('x', tensor_paralel=True)",
            "no fact 'tensor_paralel'; did you mean 'tensor_parallel'",
        ),
        (
            "from lightrft_visual.config import registry\nregistry.policy_losses.register('x', aliases='ppo')",
            r"policy loss 'x': aliases is a tuple of names, such as \('ppo',\)",
        ),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(tmp_path, text, message):
    file = tmp_path / "mine.py"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        config("--plugins", str(file))


def test_a_folder_is_no_plugin(tmp_path):
    with pytest.raises(ConfigError, match=f"plugin {tmp_path} is a folder: name a file in it"):
        config("--plugins", str(tmp_path))


def test_an_unknown_setting_beside_a_plugins_choice_is_told_alone(plugin):
    with pytest.raises(ConfigError, match=r"^unknown setting 'my_power'.*$"):
        config("--plugins", str(plugin), "--policy_loss", "mine_loss", "--my_power", "2")


def test_a_plugin_that_fails_is_told_beside_an_unknown_setting(tmp_path):
    (tmp_path / "mine.py").write_text("1 / 0")
    with pytest.raises(ConfigError, match=r"2 things are wrong:\n.*'my_power'(.|\n)*mine.py fails on import"):
        config("--plugins", str(tmp_path / "mine.py"), "--policy_loss", "mine_loss", "--my_power", "2")


def takes_nothing_of_a_group(self):
    """`group_rewards` of an estimator, without its argument."""


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (AdvantageCalculator, "grouped=True, but AdvantageCalculator lacks group_rewards"),
        (lambda config: 0.0, "makes a float; it makes an AdvantageCalculator"),
        (
            type("Own", (AdvantageCalculator,), {"group_rewards": takes_nothing_of_a_group}),
            r"Own\.group_rewards is called with \(statistics\): too many positional arguments",
        ),
        (type("Own", (AdvantageCalculator,), {"__init__": lambda self, config: None}), "begins with super"),
        ("platform:system", r"advantage estimator 'mine_alone' is called with \(config\): too many"),
    ],
)
def test_an_estimator_is_held_to_what_it_was_registered_with_before_a_model_loads(made, message):
    registry.advantage_estimators.add(kinds.AdvantageEstimator("mine_alone", made, "mine", grouped=True))
    with pytest.raises(ConfigError, match=message):
        VLTrainer.from_config(RunConfig(algorithm=AlgorithmConfig(advantage_estimator="mine_alone")))
