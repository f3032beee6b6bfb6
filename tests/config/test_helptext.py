"""--help covers the schema and the switches of the loader."""

import re

import pytest

from lightrft_visual.config.command_line import help_text
from lightrft_visual.config.leaves import names_of
from lightrft_visual.config.spellings import ROOTS


@pytest.mark.parametrize("root,columns", [*zip(ROOTS, (60, 200, 80))], ids=[root.kind for root in ROOTS])
def test_every_leaf_is_there_with_its_type_and_comment(monkeypatch, root, columns) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    text = help_text(names_of(root.schema))
    flat = " ".join(text.split())
    for leaf in names_of(root.schema).leaves.values():
        kind = re.escape(leaf.type_name.replace(" | None", ""))
        assert len(re.findall(rf"^  --{leaf.name} {kind} \(", text, re.M)) == 1
        assert leaf.help and " ".join(leaf.help.split()) in flat, f"{leaf.path} has no comment"
    assert max(map(len, text.partition("Names of other systems")[0].splitlines())) <= 120
