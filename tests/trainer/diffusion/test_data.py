"""Rows of diffusion runs: what rewards find in them, and which are refused by file and row."""

from __future__ import annotations

import json

import pytest

from lightrft_visual.config.diffusion_schema import DiffusionDataConfig
from lightrft_visual.errors import DataError
from lightrft_visual.trainer.diffusion.data import DrawPrompts


def prompts(tmp_path, *rows, **settings) -> list:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DrawPrompts(str(path), "train", 100, DiffusionDataConfig(**settings), False).rows


def test_columns_by_default_names(tmp_path):
    (row,) = prompts(tmp_path, {"prompt": "a cat", "label": "x", "reference": "cat", "text": "CAT"})
    assert (row.prompt, row.label, row.reference, row.metadata) == ("a cat", "x", "cat", {"text": "CAT"})


def test_a_column_that_a_flag_names_keeps_its_name_for_rewards(tmp_path):
    given = {"caption": "a cat", "kind": "x", "target": "cat", "label": "other"}
    (row,) = prompts(tmp_path, given, input_key="caption", label_key="kind", reference_key="target")
    assert (row.prompt, row.label, row.reference, row.metadata) == ("a cat", "x", "cat", given)


@pytest.mark.parametrize("row", [["a"], "a", None, 3])
def test_a_row_that_is_no_mapping(tmp_path, row):
    with pytest.raises(DataError, match=r"prompts.jsonl:2.*(mapping of columns|JSON object)"):
        prompts(tmp_path, {"prompt": "a cat"}, row)


@pytest.mark.parametrize("flag", ["label_key", "reference_key"])
def test_a_flag_that_names_a_column_makes_it_required(tmp_path, flag):
    with pytest.raises(DataError, match=rf"prompts.jsonl:1: no column 'kin' \({flag}\); the row has: prompt, kind"):
        prompts(tmp_path, {"prompt": "a cat", "kind": "x"}, **{flag: "kin"})
