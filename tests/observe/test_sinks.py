"""CSV whose columns grow, JSON lines, TensorBoard and W&B."""

import csv
import json
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightrft_visual.errors import ConfigError
from lightrft_visual.observe import metrics as sinks
from lightrft_visual.observe.metrics import METRIC_COLUMNS, CsvSink, JsonlSink, TensorBoardSink, WandbSink, csv_records
from lightrft_visual.observe.report.data import read_columns
from lightrft_visual.runtime.files import read_jsonl


def read(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_first_columns_stand_in_their_order(tmp_path):
    sink = CsvSink(tmp_path / "m.csv")
    sink.append(1, {"zeta": 1, "time_sync": 0.5, "loss": 2.0, "reward_mean": 0.1})
    header = (tmp_path / "m.csv").read_text().splitlines()[0].split(",")
    assert header == [*METRIC_COLUMNS, "zeta"]
    assert header[:6] == ["step", "reward_mean", "reward_std", "loss", "kl", "grad_norm"]


def test_the_first_columns_are_those_of_the_documentation():
    text = (Path(__file__).resolve().parents[2] / "docs" / "observability.md").read_text()
    table = text.partition("\n## metrics.csv\n")[2].partition("\n## ")[0]
    names = [name for cell in re.findall(r"^\| (`.*?) \|", table, re.M) for name in re.findall(r"`(\w+)`", cell)]
    assert tuple(names) == METRIC_COLUMNS


def test_new_columns_widen_the_file(tmp_path):
    sink = CsvSink(tmp_path / "m.csv", ("step", "a"))
    sink.append(1, {"a": 1.0})
    sink.append(2, {"b": 2.0})
    assert read(tmp_path / "m.csv") == [{"step": "1", "a": "1.0", "b": ""}, {"step": "2", "a": "", "b": "2.0"}]


@settings(max_examples=30, deadline=None)
@given(values=st.lists(st.floats(allow_nan=False), min_size=1, max_size=5))
def test_every_bit_of_a_number_survives(tmp_path_factory, values):
    path = tmp_path_factory.getbasetemp() / "bits.csv"
    path.unlink(missing_ok=True)
    sink = CsvSink(path, ("step",))
    for step, value in enumerate(values):
        sink.append(step, {"x": value})
    assert [float(row["x"]) for row in read(path)] == values


@pytest.mark.parametrize("bytes_after", [b"2,\xff\xfe\n", b'2,"' + b"x" * 200_000 + b"\n3,1.0\n"])
def test_rows_before_bytes_that_cannot_be_read_are_kept(tmp_path, bytes_after):
    path = tmp_path / "m.csv"
    path.write_bytes(b"step,a\n1,1.0\n" + bytes_after)
    sink = CsvSink(path, ("step", "a"))
    assert read(path)[0] == {"step": "1", "a": "1.0"}
    sink.cut_back(1)
    sink.append(2, {"a": 2.0})
    assert [row["step"] for row in read(path)] == ["1", "2"]


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_cutting_back_equals_never_having_gone_on(tmp_path_factory, data):
    """k steps + (some steps, cut, the rest) leaves the same bytes as an uninterrupted run."""
    names = st.sampled_from(["a", "b", "c"])
    rows = data.draw(st.lists(st.dictionaries(names, st.floats(-9, 9)), min_size=2, max_size=8))
    stop, cut = sorted(data.draw(st.tuples(*[st.integers(0, len(rows))] * 2)), reverse=True)
    folder = tmp_path_factory.mktemp("cut")
    for kind, suffix in ((CsvSink, "csv"), (JsonlSink, "jsonl")):
        whole, resumed = folder / f"whole.{suffix}", folder / f"resumed.{suffix}"
        sink = kind(whole)
        for step, row in enumerate(rows, start=1):
            sink.append(step, row)
        sink = kind(resumed)
        for step, row in enumerate(rows[:stop], start=1):
            sink.append(step, row)
        sink = kind(resumed)
        sink.cut_back(cut)
        for step, row in enumerate(rows[cut:], start=cut + 1):
            sink.append(step, row)
        assert resumed.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("kind", [CsvSink, JsonlSink])
def test_a_cut_behind_the_last_step_does_not_write_the_file_anew(tmp_path, kind):
    kind(tmp_path / "m").append(3, {"a": 1.0})
    sink, before = kind(tmp_path / "m"), (tmp_path / "m").stat()
    sink.cut_back(3)
    assert (tmp_path / "m").stat() == before
    sink.cut_back(2)
    assert (tmp_path / "m").stat() != before


def test_columns_of_a_file_that_a_spreadsheet_has_saved_are_read(tmp_path):
    (tmp_path / "m.csv").write_text("\ufeffstep,a\n1,0.5\n")
    assert read_columns(tmp_path / "m.csv") == {"a": [(1, 0.5)]}
    (tmp_path / "m.csv").write_text(",step,a\n0,1,0.5\n")  # by pandas, with its index
    assert read_columns(tmp_path / "m.csv") == {"a": [(1, 0.5)]}


def test_a_torn_last_row_is_dropped(tmp_path):
    path = tmp_path / "m.csv"
    path.write_text("step,a\n1,0.5\n2,0.1")  # of 0.123
    assert read_columns(path) == {"a": [(1, 0.5)]}
    CsvSink(path, ("step",)).append(3, {"a": 1.0})
    assert [row["step"] for row in read(path)] == ["1", "3"]
    path.write_text("step,a,b\n1,0.5,1\n2,0.")
    assert [row["step"] for row in csv_records(CsvSink(path, ("step",)).path)] == ["1"]


def test_rows_behind_one_that_cannot_be_read_stay(tmp_path, caplog):
    path, broken = tmp_path / "m.csv", "2," + "x" * 200_000
    path.write_text(f"step,a\n1,0.5\n{broken}\n3,0.5\n{broken}\n5,0.5\n")
    assert read_columns(path) == {"a": [(1, 0.5), (3, 0.5), (5, 0.5)]}
    CsvSink(path, ("step",)).append(6, {"a": 1.0})
    assert [row["step"] for row in read(path)] == ["1", "3", "5", "6"]
    assert caplog.text.count("has rows that cannot be read and are left out: field larger than") == 2


def test_a_step_logged_again_replaces_what_followed(tmp_path):
    for sink in (CsvSink(tmp_path / "m.csv", ("step", "a")), JsonlSink(tmp_path / "m.jsonl")):
        for step in (1, 2, 3):
            sink.append(step, {"a": float(step)})
        sink.append(2, {"a": 20.0})
    assert read(tmp_path / "m.csv") == [{"step": "1", "a": "1.0"}, {"step": "2", "a": "20.0"}]
    assert read_jsonl(tmp_path / "m.jsonl") == [{"step": 1, "a": 1.0}, {"step": 2, "a": 20.0}]


def test_json_lines_are_strict(tmp_path):
    sink = JsonlSink(tmp_path / "m.jsonl")
    sink.append(1, {"a": math.nan, "b": math.inf, "text": "line\u2028end", "list": [1, math.nan]})
    line = (tmp_path / "m.jsonl").read_text().rstrip("\n")
    record = json.loads(line, parse_constant=lambda name: pytest.fail(name))
    assert record == {"step": 1, "a": None, "b": None, "text": "line\u2028end", "list": [1, None]}
    with open(tmp_path / "m.jsonl", "a") as file:
        file.write('{"step": 2, "a"')
    assert len(read_jsonl(tmp_path / "m.jsonl")) == 1
    JsonlSink(tmp_path / "m.jsonl").append(2, {"a": 1})
    assert [record["step"] for record in read_jsonl(tmp_path / "m.jsonl")] == [1, 2]


def test_a_broken_line_that_is_not_a_torn_last_one_is_named(tmp_path, caplog):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "a"\n[3]\n\n{"step": 4}\n{"step": 5, "a')
    assert [record["step"] for record in read_jsonl(path)] == [1, 4]
    assert [record.getMessage() for record in caplog.records] == [
        f"{path}: 2 line(s) are no JSON records and are left out, the first of them line 2"
    ]
    caplog.clear()
    path.write_text('{"step": 1}\n{"step": 2, "a')  # what a killed process leaves
    assert read_jsonl(path) == [{"step": 1}] and not caplog.records
    path.write_text('{"step": 1}\n{"step": 2}')
    assert len(read_jsonl(path)) == 2 and not caplog.records


def test_tensorboard_hides_the_steps_that_were_cut(tmp_path):
    sink = TensorBoardSink(tmp_path / "tb")
    for step in (1, 2, 3, 4):
        sink.append(step, {"loss": float(step)})
    sink.cut_back(2)
    sink.append(3, {"loss": 30.0})
    sink.close()
    events = EventAccumulator(str(tmp_path / "tb"), purge_orphaned_data=True)
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 1.0), (2, 2.0), (3, 30.0)]


@pytest.mark.parametrize("make, name", [(TensorBoardSink, "tensorboard"), (WandbSink, "'lightrft_visual[wandb]'")])
def test_a_missing_package_is_named_at_the_start(tmp_path, monkeypatch, make, name):
    monkeypatch.setattr(sinks.importlib.util, "find_spec", lambda package: None)
    arguments = (tmp_path, "run") if make is WandbSink else (tmp_path,)
    with pytest.raises(ConfigError, match=re.escape(f"pip install {name}")):
        make(*arguments)


class FakeWandb(SimpleNamespace):
    """The package as far as the sink uses it. calls: what its runs were told; given: the settings of the last."""

    errors = SimpleNamespace(Error=RuntimeError)

    def __init__(self):
        super().__init__(run=None, calls=[], given={})

    def init(self, **settings):
        self.given = settings
        told = self.calls.append
        self.run = SimpleNamespace(define_metric=lambda name, **_: told(name), log=told, finish=self.finish)
        return self.run

    def finish(self, exit_code):
        self.calls.append(f"finish {exit_code}")
        self.run = None


@pytest.fixture
def wandb(monkeypatch):
    package = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", package)
    monkeypatch.setattr(sinks.importlib.util, "find_spec", lambda package: True)
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    for name in ("WANDB_NAME", "WANDB_RUN_GROUP"):
        monkeypatch.delenv(name, raising=False)
    return package


def test_wandb_gets_steps_and_how_the_run_ended_and_not_the_command_line(tmp_path, wandb):
    sink = WandbSink(tmp_path / "w", "run", config={"lr": 1})
    sink.append(3, {"loss": 0.5})
    sink.close()
    assert wandb.given["project"] == "mine" and wandb.given["config"] == {"lr": 1}
    assert wandb.given["settings"]["x_disable_meta"] is True
    assert wandb.calls == ["step", "*", {"step": 3, "loss": 0.5}, "finish 0"]
    WandbSink(tmp_path / "w", "run").close(failed=True)
    assert wandb.calls[-1] == "finish 1"


def test_wandb_takes_the_environments_name_and_group_before_the_runs(tmp_path, wandb, monkeypatch):
    WandbSink(tmp_path / "w", "run").close()
    assert (wandb.given["name"], wandb.given["group"]) == ("run", "run")
    monkeypatch.setenv("WANDB_NAME", "seed 3")
    monkeypatch.setenv("WANDB_RUN_GROUP", "seeds")
    WandbSink(tmp_path / "w", "run").close()
    assert (wandb.given["name"], wandb.given["group"]) == ("seed 3", "seeds")


def test_wandb_without_a_key_is_refused_with_what_helps(tmp_path, wandb, monkeypatch):
    def no_key(**settings):
        raise RuntimeError("api_key not configured")

    monkeypatch.setattr(wandb, "init", no_key)
    with pytest.raises(ConfigError, match="WANDB_API_KEY"):
        WandbSink(tmp_path / "w", "run")


def test_a_wandb_run_of_the_program_gets_the_metrics_and_keeps_its_axes_and_goes_on(tmp_path, wandb):
    own = wandb.init()
    for _ in range(2):
        sink = WandbSink(tmp_path / "w", "run")
        sink.append(4, {"loss": 0.5})
        sink.close()
    assert wandb.calls == [{"step": 4, "loss": 0.5}] * 2 and wandb.run is own


def test_the_wandb_run_of_a_start_that_failed_ends_as_failed_before_the_next_begins(tmp_path, wandb):
    for _ in range(2):
        sink = WandbSink(tmp_path / "w", "run")
    sink.close()
    assert wandb.calls == ["step", "*", "finish 1", "step", "*", "finish 0"]


def test_lines_whose_step_is_no_whole_number_do_not_stop_a_resume(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = ['{"step": 1}', '{"step": 1e400}', '{"step": [2]}', '{"step": "x"}', '{"step": ' + "9" * 5000 + "}"]
    path.write_text("\n".join([*lines, '{"step": "2"}', '{"step": 3}', ""]))
    sink = JsonlSink(path)
    sink.cut_back(2)
    sink.append(4, {"loss": 1.0})
    assert [record["step"] for record in read_jsonl(path)] == [1, "2", 4]


@pytest.mark.parametrize("kind", ["emptied", "spreadsheet", "other order", "index", "unterminated", "semicolons"])
def test_a_csv_that_somebody_saves_anew_during_the_run_keeps_its_rows_under_their_names(kind, tmp_path):
    sink = CsvSink(tmp_path / "metrics.csv", ("step", "loss"))
    for step in (1, 2):
        sink.append(step, {"loss": step / 2, "kl": step * 10})
    saved = {
        "emptied": "",
        "spreadsheet": "\ufeffstep,loss,kl\r\n1,0.5,10\r\n2,1.0,20\r\n",
        "other order": "kl,step,loss\n10,1,0.5\n20,2,1.0\n",
        "index": ",step,loss,kl\n0,1,0.5,10\n1,2,1.0,20\n",
        "unterminated": "step,loss,kl\n1,0.5,10\n2,1.0,20",
        "semicolons": "step;loss;kl\n1;0,5;10\n2;1,0;20\n",
    }
    sink.path.write_text(saved[kind], newline="")
    sink.append(3, {"loss": 1.5, "kl": 30})
    sink.append(4, {"loss": 2.0, "kl": 40, "new": 7})
    again = csv_records(CsvSink(sink.path).path)
    numbers = [{name: float(value) for name, value in row.items() if value} for row in again]
    rows = [{"step": step, "loss": step / 2, "kl": step * 10} for step in (1, 2, 3, 4)]
    torn = [rows[0], *rows[2:]]  # the last may be
    kept = {"emptied": rows[2:], "unterminated": torn, "semicolons": rows[2:]}.get(kind, rows)
    assert numbers == [*kept[:-1], kept[-1] | {"new": 7}]
    aside = tmp_path / "metrics.csv.unreadable"
    assert (aside.read_text() if aside.exists() else None) == (saved[kind] if kind == "semicolons" else None)


def test_csv_that_cannot_be_read_twice_is_kept_twice(tmp_path):
    sink = CsvSink(tmp_path / "metrics.csv", ("step", "loss"))
    for step in (1, 2):
        sink.append(step, {"loss": 0.5})
        sink.path.write_text(f"step;loss\n{step};0,5\n")
    sink.append(3, {"loss": 1.5})
    kept = [tmp_path / f"metrics.csv.unreadable{number}" for number in ("", "1")]
    assert [path.read_text() for path in kept] == ["step;loss\n1;0,5\n", "step;loss\n2;0,5\n"]


def test_csv_that_cannot_be_read_is_kept_where_a_run_is_resumed(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text("step;loss\n1;0,5\n")
    sink = CsvSink(path, ("step", "loss"))
    sink.append(2, {"loss": 1.5})
    assert [path.name for path in tmp_path.glob("*.unreadable*")] == ["metrics.csv.unreadable"]
    assert path.read_text() == "step,loss\n2,1.5\n"
    path.write_text("step,loss\n2,1.")  # torn where the disk was full
    CsvSink(path, ("step", "loss"))
    assert path.read_text() == "step,loss\n" and not (tmp_path / "metrics.csv.unreadable1").exists()
