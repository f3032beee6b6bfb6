"""docs/diffusion.md and docs/reward_fl.md name every choice there is, and no flag that does not exist."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from lightrft_visual.config import registry
from lightrft_visual.config.diffusion import DiffusionAlgorithmConfig, DiffusionRunConfig
from lightrft_visual.config.leaves import names_of
from lightrft_visual.config.load import parse_run
from lightrft_visual.config.spellings import ALGORITHMS
from lightrft_visual.rewards.differentiable import check_scores, load_differentiable

DOCS = Path(__file__).resolve().parents[3] / "docs"
EXAMPLES = DOCS.parent / "examples"
PAGES = {name: (DOCS / name).read_text() for name in ("diffusion.md", "reward_fl.md")}
TEXT = "".join(PAGES.values())


def test_every_choice_is_documented() -> None:
    for name in (
        *registry.diffusion_algorithms.names(),
        *registry.diffusion_families.names(),
        "auto",
        *registry.differentiable_rewards.names(),
    ):
        assert re.search(rf"[`_ ]{name}`", TEXT), name


def test_flags_exist_and_none_of_the_algorithms_is_left_out() -> None:
    leaves = {leaf.name for leaf in names_of(DiffusionRunConfig).leaves.values()}
    named = set(re.findall(r"--(?:no_)?([a-z_0-9]+)", TEXT)) - {
        "config",
        "help",
        "dry_run",
        "model_paths",
    }  # ROLL's word for pretrain
    assert named <= leaves, named - leaves
    assert {leaf.name for leaf in fields(DiffusionAlgorithmConfig)} <= named


@pytest.mark.parametrize(
    "script,command", re.findall(r"^deepspeed examples/(train_\w+\.py)(.*?)(?: +#.*)?$", TEXT, re.M)
)
def test_commands_are_accepted(script: str, command: str) -> None:
    root, defaults = ALGORITHMS[re.search(r'train_command\("([\w-]+)"\)', (EXAMPLES / script).read_text())[1]]
    assert parse_run(root.schema, command.split(), preset=root.preset, defaults=defaults).config


def test_the_example_reward_works(tmp_path: Path) -> None:
    (tmp_path / "smooth.py").write_text(re.search(r"```python\n(.*?)```", PAGES["reward_fl.md"], re.S)[1])
    media = torch.rand(2, 3, 4, 4, requires_grad=True)
    scores, valid = load_differentiable(f"{tmp_path}/smooth.py:smooth")(media, ["", ""], [{}, {}])
    check_scores(scores, valid, 2, "smooth")
