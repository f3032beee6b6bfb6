"""The rows that docs/data.md shows are accepted."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from lightrft_visual.config.vl import DataConfig
from lightrft_visual.data.rows import parse_row

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "data.md").read_text()
ROWS = [line for block in re.findall(r"^```jsonl\n(.*?)^```$", TEXT, re.M | re.S) for line in block.splitlines()]


@pytest.mark.parametrize("line", ROWS)
def test_rows_parse(line):
    row = parse_row(json.loads(line), DataConfig(), source="docs", root="/data")
    assert row.reference is not None
    assert all(image.startswith("/data/") for image in row.images)


def test_flags_exist():
    known = "|".join(DataConfig.__dataclass_fields__) + "|prompt_max_len|seed|rollout_batch_size"
    assert all(re.fullmatch(known, flag) for flag in re.findall(r"--([a-z_]+)", TEXT))
