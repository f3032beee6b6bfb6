"""The commands, files and errors that docs/recipes.md shows are what happens."""

import re
import shlex
from pathlib import Path

import pytest

from lightrft_visual.config.load import CONFIG_DIRS, parse_run
from lightrft_visual.errors import ConfigError

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "recipes.md").read_text()
LAUNCH = "deepspeed examples/train_grpo_vl.py"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.M | re.S)


COMMANDS = [line.removeprefix(LAUNCH) for block in blocks("bash") for line in block.splitlines()]
ERRORS = re.findall(rf"^\$ {re.escape(LAUNCH)} (.*)\nerror: (.*)$", "".join(blocks("console")), re.M)


@pytest.fixture(autouse=True)
def written_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for block in blocks("yaml"):
        file = tmp_path / block.splitlines()[0].removeprefix("# ")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(block)


@pytest.mark.plugin("compat")
def test_the_spellings_are_equal() -> None:
    first, *rest = [parse_run(argv=shlex.split(command)).config for command in COMMANDS[:7]]
    assert first.rollout.n_samples_per_prompt == 16 and all(config == first for config in rest)


def test_the_recipes_do_what_is_said() -> None:
    recipe = ["--config", "recipes/configs/experiment/mine.yaml"]
    assert parse_run(argv=[*recipe, "/base/distributed=zero3_offload"]).config.distributed.adam_offload
    assert parse_run(argv=[*recipe, "/base/rollout=null"]).config.rollout.generate_max_len == 1024
    rloo = parse_run(argv=["--config", "recipes/configs/experiment/mine_rloo.yaml"]).config
    assert (rloo.algorithm.advantage_estimator, rloo.train.num_episodes) == ("rloo", 2)


@pytest.mark.parametrize(("command", "error"), ERRORS)
def test_errors_read_as_shown(command: str, error: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_run(argv=shlex.split(command))
    assert str(caught.value) == error


def test_the_code_runs() -> None:
    for block in blocks("python"):
        exec(compile(block, "docs/recipes.md", "exec"), {})
    assert Path("outputs/mine/config.resolved.yaml").exists()


def test_something_was_found() -> None:
    assert len(COMMANDS) >= 10 and len(ERRORS) == 6 and CONFIG_DIRS[0].is_dir()
