"""A start that bad rows end leaves the list of them; of a live or earlier run in the folder nothing is lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightrft_visual.config.vl import DataConfig
from lightrft_visual.data.bad_rows import TooManyBadRows
from lightrft_visual.data.prompts import PromptDataset
from lightrft_visual.errors import ConfigError, FolderInUse
from lightrft_visual.runtime import collectives
from lightrft_visual.trainer.run_state import output_folder_held, refused_data_listed


def refused(output: Path, *prompts: str) -> list[dict]:
    """What is listed after a start with these prompts, of which too many are empty."""
    data = output.parent / "rows.jsonl"
    data.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    with pytest.raises(TooManyBadRows), refused_data_listed(str(output)):
        PromptDataset.for_training(DataConfig(prompt_data=str(data), on_bad_row="skip"))
    return [json.loads(line) for line in (output / "bad_rows.jsonl").read_text().splitlines()]


def test_the_rows_that_ended_a_start_are_listed(tmp_path):
    rows = refused(tmp_path / "run", "a", "", "b", "")
    assert [(Path(row["source"]).name, row["cause"], row["found"]) for row in rows] == [
        ("rows.jsonl:2", "prompt form", "start"),
        ("rows.jsonl:4", "prompt form", "start"),
    ]


def test_the_next_start_begins_a_new_list(tmp_path):
    refused(tmp_path / "run", "", "")  # no row is left
    assert len(refused(tmp_path / "run", "a", "")) == 1


def test_the_list_of_an_earlier_run_is_kept(tmp_path):
    (tmp_path / "run" / "checkpoint-000001").mkdir(parents=True)
    earlier = {"source": "other:7", "cause": "file missing", "message": "other:7: gone", "found": "start"}
    (tmp_path / "run" / "bad_rows.jsonl").write_text(json.dumps(earlier) + "\n")
    rows = refused(tmp_path / "run", "a", "")
    assert rows[0] == earlier and len(rows) == 2


def test_a_folder_is_held_until_its_lock_is_released(tmp_path):
    with output_folder_held(str(tmp_path)) as lock:
        pass
    with pytest.raises(FolderInUse), output_folder_held(str(tmp_path)):
        pytest.fail("two runs in one folder")
    lock.release()
    with output_folder_held(str(tmp_path)) as lock:
        lock.release()


def test_a_start_that_fails_releases_the_folder(tmp_path):
    with pytest.raises(ConfigError) as failure, output_folder_held(str(tmp_path)):
        raise ConfigError("no such model")
    with output_folder_held(str(tmp_path)) as lock:
        lock.release()
    assert str(failure.value) == "no such model"


@pytest.mark.parametrize("refused", [FolderInUse("taken"), None])
def test_other_ranks_hear_from_rank_0_whether_the_folder_is_free(tmp_path, monkeypatch, refused):
    monkeypatch.setattr(collectives, "is_rank_0", lambda: False)
    monkeypatch.setattr(collectives, "broadcast_object", lambda mine: refused)
    if refused is None:
        with output_folder_held(str(tmp_path)) as lock:
            assert lock is None
    else:
        with pytest.raises(FolderInUse, match="taken"), output_folder_held(str(tmp_path)):
            pytest.fail("it went on")
    assert not list(tmp_path.iterdir())
