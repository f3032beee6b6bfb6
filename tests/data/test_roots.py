"""Data named by relative paths: in the working directory, below a root of the environment, or shipped."""

from pathlib import Path

import pytest

from lightrft_visual.data.sources import located, open_source
from lightrft_visual.errors import DataError
from lightrft_visual.rewards.functions.ocr import quoted_text


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.delenv("LIGHTRFT_DATA", raising=False)
    monkeypatch.delenv("VRL_DATA_ROOT", raising=False)


@pytest.mark.parametrize("variable", ["LIGHTRFT_DATA", "VRL_DATA_ROOT"])
def test_a_root_of_the_environment(variable: str, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "root" / "set").mkdir(parents=True)
    (tmp_path / "root" / "set" / "train.txt").write_text("from the root\n")
    with pytest.raises(DataError, match=r"not found: set/train.txt.*LIGHTRFT_DATA"):
        open_source("set/train.txt", "train")
    monkeypatch.setenv(variable, str(tmp_path / "root"))
    assert open_source("set/train.txt", "train")[0]["prompt"] == "from the root"
    (tmp_path / "work" / "set").mkdir()
    (tmp_path / "work" / "set" / "train.txt").write_text("from here\n")
    assert open_source("set/train.txt", "train")[0]["prompt"] == "from here"
    assert located(tmp_path / "root" / "set") == tmp_path / "root" / "set"


def test_sets_that_are_shipped_are_found_from_anywhere() -> None:
    train, test = (open_source(f"datasets/ocr/{name}.txt", "train") for name in ("train", "test"))
    wanted = [{quoted_text(rows[i]["prompt"]) for i in range(len(rows))} for rows in (train, test)]
    assert len(train) >= 200 and len(test) >= 40 and None not in wanted[0] | wanted[1]
    assert not wanted[0] & wanted[1]  # no text of the evaluation is trained on
    drawing = open_source("datasets/drawbench_like/prompts.jsonl", "train")
    labels = {drawing[i]["label"] for i in range(len(drawing))}
    assert len(drawing) >= 60 and len(labels) >= 8
