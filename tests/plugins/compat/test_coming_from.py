"""Settings of other systems in settings.md: every row is read as a command line of that system."""

import re
import shlex
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from lightrft_visual.config.diffusion import DiffusionRunConfig
from lightrft_visual.config.load import parse_run
from lightrft_visual.config.sft import SFTRunConfig
from lightrft_visual.config.vl import RunConfig
from lightrft_visual.errors import ConfigError

TEXT = Path(__file__).with_name("settings.md").read_text()
SCHEMAS = {"vl": RunConfig, "diffusion": DiffusionRunConfig, "sft": SFTRunConfig}
SYSTEMS = ("LightRFT", "OpenRLHF", "TRL", "verl", "EasyR1", "ROLL", "flow_grpo", "VRL", "FastVideo")
ROW = re.compile(r"^\| `([^`]+)` \| (vl|diffusion|sft) \| (.+) \|$", re.M)


def section(title: str) -> str:
    return re.search(rf"^## {title}\n(.*?)(?=^##|\Z)", TEXT, re.M | re.S)[1]


ROWS = [(system, *row) for system in SYSTEMS for row in ROW.findall(section(system))]


@pytest.mark.parametrize("system,there,kind,here", ROWS, ids=[f"{row[0]}:{row[1]}" for row in ROWS])
def test_a_row(system: str, there: str, kind: str, here: str) -> None:
    if here.startswith("refused: "):
        with pytest.raises(ConfigError, match=re.escape(here.removeprefix("refused: "))):
            parse_run(SCHEMAS[kind], shlex.split(there), preset=None)
        return
    resolved = OmegaConf.create(asdict(parse_run(SCHEMAS[kind], shlex.split(there), preset=None).config))
    expected = dict(part.split("=", 1) for part in re.findall(r"`([^`]+)`", here))
    assert expected
    for path, value in expected.items():
        found, wanted = OmegaConf.select(resolved, path), yaml.safe_load(value)
        if isinstance(found, float):  # YAML reads 1e-6 as text
            wanted = float(wanted)
        assert found == wanted, path


@pytest.mark.parametrize("system", SYSTEMS)
def test_no_row_is_left_out(system: str) -> None:
    lines = [line for line in section(system).splitlines() if line.startswith("|")]
    assert sum(row[0] == system for row in ROWS) == len(lines) - 2 >= 5
