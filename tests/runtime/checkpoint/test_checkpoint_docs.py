"""The code on docs/checkpoints.md runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lightrft_visual.errors import CheckpointError

PAGE = Path(__file__).parents[3] / "docs" / "checkpoints.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def test_the_example_saves_and_resumes_and_verifies(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    verify, example = BLOCKS
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        exec(verify, {})
    exec(example, {})
    exec(verify, {})
    assert (tmp_path / "outputs" / "run" / "latest").read_text() == "checkpoint-000100\n"
