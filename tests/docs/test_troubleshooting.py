"""The messages that docs/troubleshooting.md explains are messages of the package."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "troubleshooting.md").read_text()
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


SAID = said()


@pytest.mark.parametrize("message", MESSAGES)
def test_message_is_one_of_the_package(message: str) -> None:
    assert message in SAID


def test_messages_were_found() -> None:
    assert len(MESSAGES) > 25
