"""A fresh start in an earlier run's folder loses nothing."""

import json

from lightrft_visual.config.vl import ModelConfig, RewardConfig, RunConfig
from lightrft_visual.observe.environment import set_aside
from lightrft_visual.observe.recorder import ALARMS, EVALUATIONS, GOLD
from lightrft_visual.trainer.start import paths_read


def run_folder(folder):
    (folder / "rollouts" / "images").mkdir(parents=True)
    (folder / "checkpoint-000005").mkdir()
    (folder / "checkpoint-000005" / "manifest.json").write_text("{}")
    (folder / "metrics.csv").write_text("step,loss\n1,0.5\n")
    (folder / "metrics.csv.unreadable1").write_text("step;loss\n")
    (folder / "env.json").write_text(json.dumps({"started": "2026-01-02T03:04:05+00:00"}))
    for name in (ALARMS, GOLD, EVALUATIONS):
        (folder / name).write_text('{"step": 1}\n')
    (folder / ".replaced-checkpoint-000004").mkdir()  # of a run that was killed while it saved
    (folder / "log.txt").write_text("of libraries")  # a `tee` of the new run may write it just now
    (folder / "my_notes.txt").write_text("mine")
    return folder


def test_an_earlier_run_is_put_aside_whole_and_other_files_stay(tmp_path):
    folder = run_folder(tmp_path / "run")
    aside = set_aside(folder)
    assert aside == folder / "earlier_runs" / "2026-01-02T03-04-05"
    assert (aside / "metrics.csv").read_text() == "step,loss\n1,0.5\n"
    assert (aside / "checkpoint-000005" / "manifest.json").is_file() and (aside / "rollouts" / "images").is_dir()
    assert all((aside / name).read_text() == '{"step": 1}\n' for name in (ALARMS, GOLD, EVALUATIONS))
    assert {path.name for path in folder.iterdir()} == {"earlier_runs", "log.txt", "my_notes.txt"}


def test_two_runs_of_one_name_do_not_meet(tmp_path):
    first = set_aside(run_folder(tmp_path / "run"))
    (tmp_path / "run" / "checkpoint-final").mkdir()
    (tmp_path / "run" / "env.json").write_text(json.dumps({"started": "2026-01-02T03:04:05+00:00"}))
    second = set_aside(tmp_path / "run")
    assert first != second and (first / "metrics.csv").is_file() and (second / "checkpoint-final").is_dir()
    unreadable = run_folder(tmp_path / "other")
    (unreadable / "env.json").write_text("[")
    assert set_aside(unreadable) == unreadable / "earlier_runs" / "run"


def test_a_run_that_never_made_a_step_is_no_run_and_one_that_was_killed_while_it_saved_is(tmp_path):
    (tmp_path / "metrics.csv").write_text("step,loss\n")
    (tmp_path / "env.json").write_text("{}")
    assert set_aside(tmp_path) is None
    (tmp_path / ".replaced-checkpoint-000004").mkdir()
    assert set_aside(tmp_path) is not None
    assert set_aside(tmp_path / "not there") is None


def test_what_the_new_run_reads_stays(tmp_path):
    folder = run_folder(tmp_path / "run")
    model = folder / "checkpoint-final" / "model.safetensors"
    model.parent.mkdir()
    model.write_text("weights")
    config = RunConfig(model=ModelConfig(pretrain=str(model.parent)), reward=RewardConfig(reward_pretrain="rm=else, b"))
    aside = set_aside(folder, paths_read(config))
    assert model.is_file() and (aside / "checkpoint-000005").is_dir() and not (aside / "checkpoint-final").exists()
