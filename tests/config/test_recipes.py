"""Recipes composed of layers."""

from pathlib import Path

import pytest

from lightrft_visual.config.load import parse_run
from lightrft_visual.config.spellings import ROOTS
from lightrft_visual.config.vl import RunConfig
from lightrft_visual.errors import ConfigError

FILES = {
    "base/distributed/zero2.yaml": "distributed: {zero_stage: 2}\n",
    "base/distributed/zero3.yaml": "distributed: {zero_stage: 3}\ntrain: {max_epochs: 3}\n",
    "base/algorithm/rloo.yaml": "algorithm.advantage_estimator: rloo\n",
    "experiment/shared.yaml": "train: {seed: 5, max_steps: 5}\n",
    "experiment/run.yaml": (
        "defaults:\n- /base/distributed: zero2\n- /base/algorithm: rloo\n- shared\ntrain:\n  seed: 6\n"
    ),
    "experiment/first.yaml": "defaults: [_self_, shared]\nseed: 6\n",
    "experiment/child.yaml": "defaults:\n  - run\n  - override /base/distributed: zero3\n",
    "experiment/lost.yaml": "defaults:\n  - run\n  - override /base/distribution: zero3\n",
    "experiment/a.yaml": "defaults: [b]\n",
    "experiment/b.yaml": "defaults: [a]\n",
    "experiment/missing.yaml": "defaults: [/base/distributed/zero4]\n",
    "experiment/shape.yaml": "defaults: {run: 1, b: 2}\n",
    "experiment/typo.yaml": "train:\n  seed: 1\n  sede: 2\n",
    "experiment/type.yaml": "train:\n  seed: many\n",
    "experiment/null.yaml": "train:\n  seed:\n",
    "experiment/twice.yaml": "train:\n  seed: 1\n  seed: 2\n",
    "experiment/broken.yaml": "train:\n  seed: [1\n",
    "experiment/list.yaml": "- 1\n",
    "experiment/empty.yaml": "train:\nmodel: {}\nplan:\n",
    "experiment/nothing.yaml": "",
    "experiment/texts.yaml": (
        "model: {freeze_prefix: true}\ndata: {prompt_data: [a.jsonl, b.jsonl], prompt_data_probs: [0.5, 0.5]}\n"
        "reward:\n  reward_recipe:\n    '*': [[rule, exact, 1.0]]\n"
        "output: {output_dir: out, save_path: '${output.output_dir}/final', run_name: None}\n"
    ),
}


@pytest.fixture
def configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        file = tmp_path / "configs" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "configs"


def load(configs: Path, *argv: str) -> RunConfig:
    return parse_run(RunConfig, list(argv), config_dirs=[configs], preset=None).config


def refused(configs: Path, *argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(configs, *argv)
    return str(caught.value)


def test_layers_come_first_in_order_then_the_file_then_the_command_line(configs: Path) -> None:
    run = parse_run(RunConfig, ["--config", "experiment/run", "--max_steps=7"], config_dirs=[configs], preset=None)
    config = run.config
    assert config.distributed.zero_stage == 2 and config.algorithm.advantage_estimator == "rloo"
    assert (config.train.seed, config.train.max_steps) == (6, 7)
    assert load(configs, "--config", "experiment/first").train.seed == 5  # as _self_ says
    assert run.sources["train.seed"] == "configs/experiment/run.yaml:6"
    assert run.sources["distributed.zero_stage"] == "configs/base/distributed/zero2.yaml:1"


def test_a_config_is_found_by_name_and_by_path_and_several_are_read_in_order(configs: Path) -> None:
    for name in ("experiment/run", "configs/experiment/run.yaml", str(configs / "experiment/run.yaml")):
        assert load(configs, f"--config={name}").train.seed == 6
    assert load(configs, "--config", "experiment/run", "--config", "experiment/shared").train.seed == 5


def test_layers_are_swapped_and_dropped_and_empty_files_set_nothing(configs: Path) -> None:
    swapped = load(configs, "--config", "experiment/run", "/base/distributed=zero3")
    assert (swapped.distributed.zero_stage, swapped.train.max_epochs) == (3, 3)
    dropped = load(configs, "--config", "experiment/run", "/base/algorithm=null")
    assert dropped.algorithm.advantage_estimator == "group_norm"
    assert load(configs, "--config", "experiment/child").distributed.zero_stage == 3  # over zero2 of run
    assert load(configs, "--config", "experiment/child", "/base/distributed=zero2").distributed.zero_stage == 2
    for name in ("empty", "nothing"):
        assert load(configs, "--config", f"experiment/{name}") == RunConfig()


def test_yaml_values_suit_text_fields(configs: Path) -> None:
    config = load(configs, "--config", "experiment/texts")
    assert config.model.freeze_prefix == "true"
    assert (config.data.prompt_data, config.data.prompt_data_probs) == ("a.jsonl,b.jsonl", "0.5,0.5")
    assert config.reward.reward_recipe == '{"*": [["rule", "exact", 1.0]]}'
    assert (config.output.save_path, config.output.run_name) == ("out/final", None)


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["experiment/a"], ("circle", "a.yaml -> configs/experiment/b.yaml -> configs/experiment/a.yaml")),
        (["experiment/missing"], ("missing.yaml", "base/distributed/zero4", "did you mean 'base/distributed/zero")),
        (["experiment/rum"], ("experiment/rum", "did you mean 'experiment/run'")),
        (["experiment/run", "/base/distributed=zero33"], ("run.yaml", "did you mean 'base/distributed/zero3'")),
        (["experiment/run", "/base/distribution=zero3"], ("/base/distribution", "layers: /base/algorithm")),
        (["experiment/lost"], ("/base/distribution", "lost.yaml")),
        (["experiment/shape"], ("shape.yaml", "- /group: name")),
        (["experiment/typo"], ("'train.sede'", "typo.yaml:3", "train.seed")),
        (["experiment/type"], ("train.seed", "'many'", "type.yaml:2", "int")),
        (["experiment/null"], ("train.seed", "null", "null.yaml:2", "int")),
        (["experiment/twice"], ("twice.yaml:3", "duplicate key")),
        (["experiment/broken"], ("broken.yaml:3",)),
        (["experiment/list"], ("list.yaml", "mapping")),
    ],
)  # fmt: skip
def test_mistakes_name_file_line_and_the_way_out(configs: Path, argv: list[str], parts: tuple[str, ...]) -> None:
    message = refused(configs, "--config", *argv)
    assert all(part in message for part in parts), message


@pytest.mark.parametrize("kind", [0, 1], ids=lambda kind: ROOTS[kind].kind)
def test_a_recipe_of_the_other_kind_of_run_is_recognized(kind: int) -> None:
    root, other = ROOTS[kind], ROOTS[1 - kind]
    recipes = {"vl": "experiment/vl/geometry3k_grpo", "diffusion": "experiment/diffusion/sd3_5/online_grpo_ocr"}
    with pytest.raises(ConfigError) as caught:
        parse_run(root.schema, ["--config", recipes[other.kind]], preset=root.preset)
    kinds = ("vision-language", "diffusion") if other.kind == "vl" else ("diffusion", "vision-language")
    assert f"it belongs to {kinds[0]} runs, and this is a {kinds[1]} run; is the recipe" in str(caught.value)
    assert ".yaml:" in str(caught.value)


def test_a_setting_of_the_other_kind_on_the_command_line_keeps_its_advice() -> None:
    with pytest.raises(ConfigError, match="belongs to diffusion runs.*run$"):
        parse_run(RunConfig, ["--height", "64"])
    with pytest.raises(ConfigError, match="belongs to diffusion runs.*; did you mean 'rollout.n_samples_per_prompt'"):
        parse_run(RunConfig, ["--sampling.n_samples_per_prompt", "4"])
