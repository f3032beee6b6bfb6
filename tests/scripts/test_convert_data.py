"""The converter: what it writes is read as the same rows, and its errors name the row."""

from __future__ import annotations

import datetime
import importlib.util
import io
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from lightrft_visual.config.vl import DataConfig
from lightrft_visual.data.prompts import PromptDataset

SPEC = importlib.util.spec_from_file_location("convert_data", Path(__file__).parents[2] / "scripts" / "convert_data.py")
convert_data = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(convert_data)


@pytest.fixture
def theirs(tmp_path):
    buffer = io.BytesIO()
    Image.new("RGB", (30, 20), "red").save(buffer, "PNG")
    rows = [
        {"caption": "Which <image>?", "shot": {"bytes": buffer.getvalue(), "path": None}, "meta": {"target": "red"},
         "day": datetime.date(2025, 1, 2)},
        {"caption": "What is 1 + 2?", "shot": None, "meta": {"target": "3"}, "day": None},
    ]  # fmt: skip
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "theirs.parquet")
    return tmp_path / "theirs.parquet"


MAP = ["--map", "caption=prompt", "--map", "shot=images", "--map", "meta.target=reference"]


def test_what_is_written_is_read_as_the_same_rows(theirs, tmp_path, capsys):
    target = tmp_path / "ours.jsonl"
    convert_data.main([str(theirs), str(target), *MAP])
    assert capsys.readouterr().out == f"{target}: 2 rows\n"
    first, second = (json.loads(line) for line in target.read_text().splitlines())
    assert first["prompt"] == "Which <image>?" and first["day"] == "2025-01-02" and second["reference"] == "3"
    assert first["images"] == [str(tmp_path / "ours_images" / "000000_0.png")]
    dataset = PromptDataset(str(target), DataConfig(data_format="plain"), split="train", max_rows=9)
    row = dataset.load(0)
    assert (row.reference, row.images[0].size, len(dataset)) == ("red", (30, 20), 2)


def test_other_forms_are_recognised_and_conversations_stay(tmp_path):
    turns = [{"from": who, "value": text} for who, text in (("human", "a"), ("gpt", "b"), ("human", "c"), ("gpt", "d"))]
    (tmp_path / "llava.json").write_text(json.dumps([{"conversations": turns, "id": 7}]))
    convert_data.main([str(tmp_path / "llava.json"), str(tmp_path / "ours.jsonl")])
    row = json.loads((tmp_path / "ours.jsonl").read_text())
    assert [message["role"] for message in row["prompt"]] == ["user", "assistant", "user"]
    assert (row["reference"], row["id"]) == ("d", 7)


def test_rows_that_cannot_be_read_end_it_or_are_counted(theirs, tmp_path, capsys):
    target = tmp_path / "ours.jsonl"
    wrong = ["--map", "meta.answer=reference"]
    with pytest.raises(SystemExit) as caught:
        convert_data.main([str(theirs), str(target), *MAP, *wrong])
    assert "theirs.parquet:row 0: no column 'meta.answer' (--map)" in str(caught.value.code) and not target.exists()
    (tmp_path / "a.jsonl").write_text('{"prompt": "q"}\n{"prompt": ""}\n')
    convert_data.main([str(tmp_path / "a.jsonl"), str(target), "--on_bad_row", "skip"])
    assert "1 of 2 rows left out (50.0%): 1 x prompt form" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="exists already"):
        convert_data.main([str(tmp_path / "a.jsonl"), str(target)])
