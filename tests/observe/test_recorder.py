"""What a run's folder holds after logging, cutting back and closing."""

import csv
import io
import json
import re
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from lightrft_visual.config.shared import OutputConfig
from lightrft_visual.errors import ConfigError, FolderInUse
from lightrft_visual.observe.console import RunConsole
from lightrft_visual.observe.metrics import TensorBoardSink, column_name
from lightrft_visual.observe.recorder import ALARMS, RunRecorder
from lightrft_visual.runtime.files import FolderLock, read_jsonl


def picture(shade: int, size: int = 20) -> Image.Image:
    return Image.new("RGB", (size, size), (shade, 0, 0))


def recorder(folder, **options) -> RunRecorder:
    return RunRecorder(folder, OutputConfig(**options))


def test_metrics_go_to_csv_and_json(tmp_path):
    run = recorder(tmp_path)
    run.log_step(1, {"loss": torch.tensor(0.5), "step": 99, "grad_norm": np.float32(2)})
    run.log_eval(0, {"eval_reward": 0.25, "eval_count": 1})
    run.close()
    assert read_jsonl(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 0.5, "grad_norm": 2.0}]
    assert (tmp_path / "metrics.csv").read_text().splitlines()[1].startswith("1,,,0.5,,2.0,")
    assert (
        tmp_path / "eval_metrics.csv"
    ).read_text() == "step,eval_reward,eval_reward_greedy,eval_count\n0,0.25,,1.0\n"


def test_rollouts_keep_pictures_as_files(tmp_path):
    run = recorder(tmp_path)
    shared = picture(200)
    records = [
        {"prompt": "a\nb", "reward": 1.0, "images": [shared, torch.zeros(3, 900, 600)]},
        {"prompt": "c", "reward": float("nan"), "images": [shared], "videos": [torch.rand(3, 9, 16, 16)]},
        {"prompt": "text only", "reward": 0.0},
    ]
    path = run.save_rollouts(12, records)
    assert path == tmp_path / "rollouts" / "step_000012.jsonl"
    assert "base64" not in path.read_text()
    first, second, third = read_jsonl(path)
    assert first["step"] == 12 and first["images"][0] == second["images"][0]
    assert second["reward"] is None and "images" not in third
    for name in (*first["images"], *second["images"], *second["videos"]):
        assert re.fullmatch(r"images/[0-9a-f]{20}\.(png|jpg)", name)
        with Image.open(tmp_path / "rollouts" / name) as stored:
            assert max(stored.size) <= 1100
    with Image.open(tmp_path / "rollouts" / first["images"][0]) as stored:
        assert stored.format == "PNG" and stored.convert("RGB").tobytes() == shared.tobytes()
    with Image.open(tmp_path / "rollouts" / first["images"][1]) as stored:
        assert stored.size == (341, 512)
    assert records[0]["images"][0] is shared


def test_cut_back_removes_everything_after_the_step(tmp_path):
    run = recorder(tmp_path, use_tensorboard=True)
    for step in (1, 2, 3):
        run.log_step(step, {"loss": step})
        run.log_eval(step, {"eval_reward": step})
        run.save_rollouts(step, [{"images": [picture(step)]}, {"images": [picture(100)]}])
        run.save_rollouts(step, [{"images": [picture(10 + step)]}], "eval_step")
        run.save_contact_sheet(step, [{"prompt": "p", "reward": 0.5, "images": [picture(step)]}])
    run.close()
    run = recorder(tmp_path)
    run.cut_back(2)
    assert [record["step"] for record in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2]
    assert len((tmp_path / "metrics.csv").read_text().splitlines()) == 3
    assert len((tmp_path / "eval_metrics.csv").read_text().splitlines()) == 3
    names = sorted(path.name for path in (tmp_path / "rollouts").glob("*.jsonl"))
    assert names == ["eval_step_000001.jsonl", "eval_step_000002.jsonl", "step_000001.jsonl", "step_000002.jsonl"]
    assert sorted(path.name for path in tmp_path.glob("eval_epoch_*")) == ["eval_epoch_000001", "eval_epoch_000002"]
    assert len(list((tmp_path / "rollouts" / "images").iterdir())) == 5
    (tmp_path / "eval_epoch_000002").rename(tmp_path / "elsewhere")
    (tmp_path / "eval_epoch_000002").symlink_to(tmp_path / "elsewhere")
    run.cut_back(-1)  # a fresh start in an old folder
    assert not list(tmp_path.glob("eval_epoch_*")) and list((tmp_path / "elsewhere").iterdir())
    assert (tmp_path / "eval_metrics.csv").read_text() == "step,eval_reward,eval_reward_greedy\n"
    assert not list((tmp_path / "rollouts" / "images").iterdir())


def test_other_ranks_write_nothing(tmp_path):
    run = RunRecorder(tmp_path / "run", active=False)
    run.write_env()
    run.log_step(1, {"loss": 1})
    run.log_eval(1, {"eval_reward": 1})
    assert run.save_rollouts(1, [{"prompt": "x"}]) is None
    assert run.save_contact_sheet(1, []) is None
    run.cut_back(0)
    run.close()
    assert not (tmp_path / "run").exists()


def test_env_keeps_the_first_start(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py", "--hf_token", "topsecret"])
    recorder(tmp_path).write_env()
    first = json.loads((tmp_path / "env.json").read_text())
    recorder(tmp_path).write_env()
    second = json.loads((tmp_path / "env.json").read_text())
    assert first["command"][1:] == ["train.py", "--hf_token", "***"]
    assert second["started"] == first["started"] and len(second["restarts"]) == 1 and first["restarts"] == []


@pytest.mark.parametrize("restarts", [5, None, "2025", {"a": 1}])
def test_an_env_whose_restarts_are_no_list_begins_them_anew(tmp_path, restarts):
    (tmp_path / "env.json").write_text(json.dumps({"started": "2025", "restarts": restarts}))
    recorder(tmp_path).write_env()
    content = json.loads((tmp_path / "env.json").read_text())
    assert content["started"] == "2025" and len(content["restarts"]) == 1


def test_a_record_whose_images_are_no_names_does_not_stop_a_resume(tmp_path):
    run = recorder(tmp_path)
    run.save_rollouts(1, [{"images": [picture(1)]}])
    with open(tmp_path / "rollouts" / "step_000001.jsonl", "a") as file:
        file.write('{"images": [5, null]}\n{"images": 5}\n{"videos": {"a": 1}}\n')
    run.cut_back(1)
    assert len(list((tmp_path / "rollouts" / "images").iterdir())) == 1


def test_a_folder_that_cannot_be_written_is_a_config_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="output_dir"):
        RunRecorder(tmp_path / "file" / "run")


@settings(max_examples=30, deadline=None)
@given(text=st.text(st.characters(exclude_categories=()), max_size=8), more=st.text(max_size=4))
def test_any_text_can_be_written_and_reads_back(tmp_path_factory, text, more):
    folder = tmp_path_factory.mktemp("texts")
    run = recorder(folder, use_tensorboard=True)
    name = f"eval_reward_{text}\ud800"
    run.log_step(1, {name: 0.5})
    run.log_eval(1, {name: 0.5})
    run.log_eval(2, {name: 0.25, more: 1.0})  # rewrites the file with a wider header
    record = {"prompt": text + "\udfff", "reward": 1.0, "reference": [text], "images": [picture(1)]}
    (stored,) = read_jsonl(run.save_rollouts(1, [record]))
    assert stored["prompt"] == record["prompt"] and stored["reference"] == [text]
    run.save_contact_sheet(1, [record])
    stream = io.StringIO()
    console = RunConsole(None, stream=stream, active=True, table_every=1)
    console.evaluation(1, {name: 0.5})
    console.samples(1, [record])
    stream.getvalue().encode()
    run.close()
    with open(folder / "eval_metrics.csv", newline="", encoding="utf-8") as file:
        values = [row[column_name(name)] for row in csv.DictReader(file)]
    assert values == ["0.5", "0.25"]


def test_a_folder_that_is_removed_during_the_run_is_said_and_made_again(tmp_path, caplog):
    folder = tmp_path / "run"
    lock = FolderLock.take(folder)
    run = RunRecorder(folder, locks=[lock])
    run.log_step(1, {"loss": 1.0})
    shutil.rmtree(folder)
    run.log_line(ALARMS, 2, {"text": "x"})
    run.log_step(2, {"loss": 2.0})
    assert caplog.text.count(f"{folder} was removed or replaced during the run") == 1
    assert [record["step"] for record in read_jsonl(folder / "metrics.jsonl")] == [2]
    with pytest.raises(FolderInUse):
        FolderLock.take(folder)
    run.close()
    FolderLock.take(folder).release()


def test_a_removed_folder_that_another_run_has_taken_ends_this_one(tmp_path):
    run = RunRecorder(tmp_path / "run", locks=[FolderLock.take(tmp_path / "run")])
    shutil.rmtree(tmp_path / "run")
    other = FolderLock.take(tmp_path / "run")
    with pytest.raises(FolderInUse):
        run.log_step(1, {"loss": 1.0})
    run.close()
    assert other.path.is_file()
    other.release()


@pytest.mark.parametrize("call", ["append", "cut_back", "close"])
def test_a_service_that_fails_is_said_once_and_left_and_the_run_goes_on(tmp_path, monkeypatch, caplog, call):
    def lost(*_, **__):
        raise ConnectionResetError("Connection lost")

    monkeypatch.setattr(TensorBoardSink, call, lost)
    run = recorder(tmp_path, use_tensorboard=True)
    run.log_step(1, {"loss": 0.5})
    run.cut_back(1)
    run.log_step(2, {"loss": 0.5})
    run.log_eval(2, {"eval_reward": 1.0})
    run.close()
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        "use_tensorboard: raised ConnectionResetError: Connection lost; the run goes on without, metrics.csv has all"
    ]
    assert (tmp_path / "metrics.csv").read_text().count("\n") == 3
