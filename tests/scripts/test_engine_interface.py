"""What we use of vLLM is there in the installed version, and what is not there would be told."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from engine_interface import USED, Used, missing, vllm_table  # noqa: E402


def test_the_installed_version_has_all(capsys):
    assert vllm_table([]) == 0
    table = capsys.readouterr().out
    assert "lacks" not in table and len(table.splitlines()) == 2 + len(USED)


def test_what_a_version_lacks_is_named(tmp_path):
    """Names come from the class, its bases in other files, and its constructor."""
    root = tmp_path / "vllm"
    (root / "entrypoints").mkdir(parents=True)
    (root / "entrypoints" / "base.py").write_text("class Offline:\n    def generate(self): ...\n")
    (root / "entrypoints" / "llm.py").write_text(
        "from vllm.entrypoints.base import Offline\n\nclass LLM(Offline):\n    def __init__(self, model): ...\n"
        "    def sleep(self, level=1): ...\n"
    )
    used = Used("entrypoints/llm.py", "LLM", ("generate", "model", "sleep", "wake_up"))
    assert missing(root, used) == ["wake_up"]
    assert missing(root, Used("entrypoints/llm.py", "LLM.sleep", ("level",))) == []
    assert missing(root, Used("sampling_params.py", "X", ())) == ["sampling_params.py"]
