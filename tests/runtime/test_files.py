"""Files of a run can be written whatever text a model, a reward or a row brings."""

from __future__ import annotations

from lightrft_visual.runtime.files import append_line, read_jsonl, to_json, write_atomic


def test_any_text_can_be_written_and_read_back(tmp_path):
    record = {"response": "half \ud800 pair", "name": "\u2028 ä \x00"}
    path = tmp_path / "records.jsonl"
    append_line(path, to_json(record) + "\n")
    write_atomic(tmp_path / "whole.jsonl", to_json(record) + "\n")
    assert read_jsonl(path) == read_jsonl(tmp_path / "whole.jsonl") == [record]
