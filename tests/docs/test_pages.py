"""Pages name every choice there is and no setting that does not exist; rows, values, code, pictures and the messages
that troubleshooting explains are right."""

import ast
import json
import re
from pathlib import Path

import pytest
import torch
from packaging.version import Version

from lightrft_visual import __version__
from lightrft_visual.config import registry
from lightrft_visual.config.diffusion import DiffusionAlgorithmConfig
from lightrft_visual.config.leaves import names_of
from lightrft_visual.config.shared import RewardConfig
from lightrft_visual.config.spellings import ROOTS
from lightrft_visual.config.vl import AlgorithmConfig, DataConfig
from lightrft_visual.data.rows import parse_row
from lightrft_visual.errors import CheckpointError
from lightrft_visual.rewards.differentiable import check_scores, load_differentiable
from lightrft_visual.rewards.registry import scorer_names

ROOT = Path(__file__).resolve().parents[2]
DOCS = {path.stem: path.read_text() for path in (ROOT / "docs").glob("*.md")}
DRAWING = DOCS["diffusion"] + DOCS["reward_fl"]
OWN = (
    "algorithms", "architecture", "choices", "data", "diffusion", "guard", "hooks", "multi_turn", "reward_fl", "sft",
    "troubleshooting", "unified",
)  # fmt: skip
NO_SETTINGS = {"config", "dry_run", "help", "master_port", "model_paths"}  # of the command, DeepSpeed's and ROLL's
KINDS = ("advantage_estimators", "policy_losses", "policy_masks", "aggregations", "kl_estimators", "tis_modes")
DRAWING_KINDS = ("diffusion_algorithms", "diffusion_families", "differentiable_rewards")
ROWS = [
    line for block in re.findall(r"^```jsonl\n(.*?)^```$", DOCS["data"], re.M | re.S) for line in block.splitlines()
]


def flags(text: str) -> set[str]:
    return set(re.findall(r"--(?:no_)?([a-z_0-9]+)(?![a-z_.])", text))


@pytest.mark.parametrize("page", OWN)
def test_settings_of_a_page_exist(page: str) -> None:
    assert flags(DOCS[page]) - NO_SETTINGS <= {
        leaf.name for root in ROOTS for leaf in names_of(root.schema).leaves.values()
    }


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (DOCS["algorithms"], [name for kind in KINDS for name in vars(registry)[kind].names()]),
        (DRAWING, ["auto", *(name for kind in DRAWING_KINDS for name in vars(registry)[kind].names())]),
        (DOCS["rewards"], scorer_names()),
    ],
    ids=["algorithms", "diffusion", "rewards"],
)
def test_every_choice_is_documented(text: str, names: list[str]) -> None:
    assert [name for name in names if not re.search(rf"[`_ ]{name}`", text)] == []


@pytest.mark.parametrize(
    ("text", "section"),
    [(DOCS["algorithms"], AlgorithmConfig), (DRAWING, DiffusionAlgorithmConfig), (DOCS["rewards"], RewardConfig)],
    ids=["algorithms", "diffusion", "rewards"],
)
def test_every_setting_of_a_section_is_documented(text: str, section: type) -> None:
    assert {name for name in vars(section()) if f"`{name}`" not in text} <= flags(text)


def test_defaults_are_those_of_the_configuration() -> None:
    config = AlgorithmConfig()
    for name, value in re.findall(r"`--([a-z_]+) ([0-9.]+)`", DOCS["algorithms"]):
        if name in ("overlong_buffer_len", "overlong_buffer_penalty_factor", "lambd", "init_kl_coef", "tis_cap"):
            assert value in (str(getattr(config, name)), "0"), name


def test_the_version_is_not_below_the_last_one_of_the_changelog() -> None:
    (last, *_) = re.findall(r"^## ([0-9.]+) ", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert Version(__version__) > Version(last)


def test_rows_of_the_data_page_parse() -> None:
    for line in ROWS:
        row = parse_row(json.loads(line), DataConfig(), source="docs", root="/data")
        assert row.reference is not None
        assert all(image.startswith("/data/") for image in row.images)


def test_the_example_of_a_differentiable_reward_works(tmp_path: Path) -> None:
    (tmp_path / "smooth.py").write_text(re.search(r"```python\n(.*?)```", DOCS["reward_fl"], re.S)[1])
    media = torch.rand(2, 3, 4, 4, requires_grad=True)
    check_scores(load_differentiable(f"{tmp_path}/smooth.py:smooth")(media, ["", ""], [{}, {}]), media, "smooth")


def test_the_example_of_checkpoints_saves_and_resumes_and_verifies(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    verify, example = re.findall(r"```python\n(.*?)```", DOCS["checkpoints"], re.S)
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        exec(verify, {})
    exec(example, {})
    exec(verify, {})
    assert (tmp_path / "outputs" / "run" / "latest").read_text() == "checkpoint-000100\n"


TEXT = DOCS["troubleshooting"]
LEARNING = TEXT.index("## It runs and does not learn"), TEXT.index("## Resuming")
MESSAGES = re.findall(r"^\| `([^`]+)` \|", TEXT[: LEARNING[0]] + TEXT[LEARNING[1] :], re.M)


def said() -> str:
    """All texts of the package, what they are filled with left out; neighbours joined."""
    found = []
    for path in (ROOT / "lightrft_visual").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [each.value if isinstance(each, ast.Constant) else "\0" for each in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


@pytest.mark.plugin("memory_plan")  # which says one of them
def test_messages_are_of_the_package() -> None:
    text = said()
    assert len(MESSAGES) > 25 and [each for each in MESSAGES if each not in text] == []
