"""Pictures that scripts draw are those of the scripts."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_the_loop_is_what_its_script_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import draw_loop

    assert draw_loop.FILE.read_text() == draw_loop.svg(), "run python scripts/draw_loop.py"
    assert ElementTree.fromstring(draw_loop.svg()).tag.endswith("svg")
