"""What a run refuses to start with, and which evaluation a checkpoint is judged by."""

import os
import signal
import threading
from types import SimpleNamespace

import pytest
import torch

from lightrft_visual.config.shared import OutputConfig
from lightrft_visual.config.vl import RunConfig
from lightrft_visual.errors import CheckpointError, ConfigError
from lightrft_visual.runtime.checkpoint.manager import CheckpointManager
from lightrft_visual.runtime.checkpoint.same_model import check_model
from lightrft_visual.runtime.checkpoint.state import load_state, save_state
from lightrft_visual.runtime.usercode.surroundings import set_rng_state
from lightrft_visual.trainer.hooks import Hooks
from lightrft_visual.trainer.run_state import RunState, best_metric, check_output
from lightrft_visual.trainer.vl import build


def output(tmp_path, **settings) -> OutputConfig:
    return OutputConfig(output_dir=str(tmp_path / "run"), **settings)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("eval_reward", ("eval_reward", "max")),
        ("max:eval_reward", ("eval_reward", "max")),
        ("min:eval_length", ("eval_length", "min")),
    ],
)
def test_best_metric(tmp_path, text, expected):
    assert best_metric(output(tmp_path, best_metric=text, eval_steps=2, save_steps=4)) == expected


@pytest.mark.parametrize("text", ["most:eval_reward", "max:", ":eval_reward"])
def test_a_best_metric_that_cannot_be_read(tmp_path, text):
    with pytest.raises(ConfigError, match="NAME, max:NAME or min:NAME"):
        best_metric(output(tmp_path, best_metric=text, eval_steps=2, save_steps=4))


@pytest.mark.parametrize(("evaluate", "save"), [(-1, 4), (2, -1), (4, 2), (2, 3)])
def test_checkpoints_are_compared_by_evaluations_of_their_own(tmp_path, evaluate, save):
    with pytest.raises(ConfigError, match="multiple of eval_steps"):
        check_output(output(tmp_path, best_metric="eval_reward", eval_steps=evaluate, save_steps=save))


@pytest.mark.parametrize(
    ("total", "settings", "expected"),
    [
        (240, {}, (24, 24)),
        (3000, {}, (50, 50)),
        (3, {}, (1, 1)),
        (240, {"save_steps": -1}, (-1, 24)),
        (240, {"save_steps": 7, "eval_steps": 0}, (7, 0)),
        (240, {"eval_steps": 60}, (20, 60)),
        (240, {"eval_steps": 5}, (20, 5)),
        (240, {"eval_steps": 61}, (24, 61)),
        (240, {"eval_steps": 60, "best_metric": "eval_reward"}, (60, 60)),
        (240, {"save_steps": 10, "best_metric": "eval_reward"}, (10, 10)),
    ],
)
def test_intervals_left_at_their_default_are_tenths_of_the_run_that_meet(tmp_path, total, settings, expected):
    assert output(tmp_path, **settings).intervals(total) == expected


def test_what_is_no_checkpoint_is_not_overwritten(tmp_path):
    target = tmp_path / "precious"
    target.mkdir()
    (target / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="precious exists and is no checkpoint"):
        check_output(output(tmp_path, save_path=str(target)))


@pytest.mark.parametrize("settings", [{"resume_from": "auto"}, {"load_checkpoint": True}])
def test_nothing_to_resume_from(tmp_path, settings):
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        check_output(output(tmp_path, **settings))


@pytest.mark.parametrize("name", ["save_path", "ckpt_path"])
def test_a_path_that_cannot_be_written_is_refused_at_the_start(tmp_path, name):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=f"{name}.*no checkpoint can be written into .*file"):
        check_output(output(tmp_path, **{name: str(tmp_path / "file" / "model" / "final")}))


def test_an_empty_resume_from_is_no_fresh_start(tmp_path):
    with pytest.raises(CheckpointError, match="resume_from is empty"):
        check_output(output(tmp_path, resume_from=""))


class Trainer:
    """As much of a trainer as `RunState` reads when it saves."""

    def __init__(self):
        self.step, self.evaluated_step, self.nonfinite_streaks = 0, -1, {"": 0}
        self.latest_eval: dict[str, float] = {}
        self.settings = SimpleNamespace(model=None)
        self.hooks, self.told = Hooks(), []
        self.console = SimpleNamespace(message=self.told.append)

    def state_dict(self) -> dict:
        return {}

    def save_engines(self, folder) -> None:
        (folder / "weights.bin").write_bytes(b"w")


def test_only_an_evaluation_of_the_same_weights_counts_for_the_best(tmp_path):
    trainer = Trainer()
    settings = output(tmp_path, best_metric="eval_reward", eval_steps=1, save_steps=1, max_ckpt_num=1)
    state = RunState(trainer, settings)
    trainer.step, trainer.evaluated_step, trainer.latest_eval = 1, 1, {"eval_reward": 0.5}
    first = state.save()
    trainer.step = 2  # stopped by a signal: not evaluated
    last = state.save()
    assert last.is_dir() and first.is_dir()  # the best stays beside the last


@pytest.mark.parametrize(
    ("most", "kept"), [(2, ["000001", "000004"]), (3, ["000001", "000003", "000004"]), (1, ["000004"])]
)
def test_without_best_metric_the_best_reward_stays_where_more_than_one_checkpoint_does(tmp_path, most, kept):
    trainer = Trainer()
    state = RunState(trainer, output(tmp_path, max_ckpt_num=most))
    for step, reward in enumerate((0.9, 0.5, 0.6, 0.7), 1):
        trainer.step = trainer.evaluated_step = step
        trainer.latest_eval = {"eval_reward": reward}
        state.save()
    assert sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*")) == [f"checkpoint-{n}" for n in kept]


def test_a_step_that_is_given_up_is_saved_as_if_it_had_not_begun(tmp_path):
    trainer = Trainer()
    state = RunState(trainer, output(tmp_path, sigterm_exit_code=75))
    trainer.step, drawn = 3, torch.rand(1)
    trainer.state_dict = lambda: {"consumed": 24}
    state.mark()
    expected = torch.rand(2)
    trainer.state_dict = lambda: {"consumed": 32}
    folder = state.stop(rewound=True)
    saved = load_state(folder / "run_state_rank0.safetensors")
    set_rng_state(saved["random"])
    assert folder.name == "checkpoint-000003" and saved["trainer"] == {"consumed": 24}
    assert torch.equal(torch.rand(2), expected) and not torch.equal(drawn, expected[:1])
    assert state.exit_code == 75


def test_a_stop_behind_a_checkpoint_of_its_step_writes_none_again(tmp_path):
    """The time until a scheduler's SIGKILL is short, and a checkpoint may be large."""
    trainer, writes = Trainer(), []
    state = RunState(trainer, output(tmp_path))
    trainer.save_engines = lambda folder: writes.append((folder / "weights.bin").write_bytes(b"w"))
    trainer.step = 3
    assert state.save() == state.stop() and len(writes) == 1
    state.mark()
    assert state.stop(rewound=True).name == "checkpoint-000003" and len(writes) == 1
    trainer.step = 4
    assert state.stop().name == "checkpoint-000004" and len(writes) == 2


def test_a_checkpoint_of_a_version_without_hooks_is_refused_before_anything_is_taken_over(tmp_path):
    trainer = Trainer()
    folder = RunState(trainer, output(tmp_path)).save()
    path = folder / "run_state_rank0.safetensors"
    save_state(path, {name: value for name, value in load_state(path).items() if name != "hooks"} | {"step": 7})
    trainer.load_engines = lambda folder: None
    with pytest.raises(CheckpointError, match="checkpoint-000000 is of an earlier version .*resume with that one"):
        RunState(trainer, output(tmp_path), folder).resume()
    assert trainer.step == 0


def test_sigterm_asks_a_run_to_stop_while_it_listens(tmp_path):
    state, before = RunState(Trainer(), output(tmp_path)), signal.getsignal(signal.SIGTERM)
    with pytest.raises(ValueError), state.listening():
        os.kill(os.getpid(), signal.SIGTERM)
        assert state.stop_requested()
        raise ValueError("a stage fails")
    assert signal.getsignal(signal.SIGTERM) is before


def test_ctrl_c_asks_a_run_to_stop_and_its_code_is_that_of_shells(tmp_path, capfd):
    state, before = RunState(Trainer(), output(tmp_path)), signal.getsignal(signal.SIGINT)
    with state.listening():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # a launcher sends it again at once
        assert state.signalled() and state.stop_requested()
        state.stop()
    assert state.exit_code == 130 and (tmp_path / "run" / "checkpoint-000000").is_dir()
    assert signal.getsignal(signal.SIGINT) is before
    assert capfd.readouterr().err.count("Ctrl-C: this step is finished and a checkpoint saved") == 1


def test_a_second_ctrl_c_ends_the_process_at_once(tmp_path, monkeypatch):
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    state = RunState(Trainer(), output(tmp_path))
    with state.listening():
        signal.raise_signal(signal.SIGINT)
        state._interrupt.first -= 2.1
        signal.raise_signal(signal.SIGINT)
    assert ended == [130]


def test_a_checkpoint_that_nobody_asked_for_and_cannot_be_written_does_not_end_the_run(tmp_path):
    trainer = Trainer()
    state = RunState(trainer, output(tmp_path))

    def full(folder):
        raise OSError("no space left")

    trainer.save_engines = full
    state.save_due()
    assert "no checkpoint: saving checkpoint-000000 failed" in trainer.told[0]
    assert "no space left" in trainer.told[0] and "goes on" in trainer.told[0]
    with pytest.raises(CheckpointError, match="no space left"):
        state.save()


def test_a_run_in_another_thread_leaves_signals_alone(tmp_path):
    state, found = RunState(Trainer(), output(tmp_path)), []

    def run():
        with state.listening():
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGTERM)]


def test_a_best_metric_that_the_evaluation_does_not_give(tmp_path):
    settings = output(tmp_path, best_metric="eval_rewards", eval_steps=1, save_steps=1)
    state = RunState(SimpleNamespace(), settings)
    with pytest.raises(ConfigError, match="those are: eval_reward, eval_reward_greedy"):
        state.check_metrics({"eval_reward": 1.0, "eval_reward_greedy": 1.0})
    with pytest.raises(ConfigError, match="there is no evaluation data"):
        state.check_metrics({})


def test_what_a_vision_language_checkpoint_belongs_to(tmp_path):
    """The model's files under whatever name, and what decides the shapes and meaning of its weights."""
    (tmp_path / "config.json").write_text("{}")
    checkpoint = SimpleNamespace(config=SimpleNamespace(model_type="qwen3_vl"), path=str(tmp_path))

    def belongs_to(named, **model):
        config = RunConfig()
        for name, value in model.items():
            setattr(config.model, name, value)
        return build.model_of(named, config, checkpoint, config.algorithm.estimator.critic)

    own = belongs_to("mine")
    assert own["model_type"] == "qwen3_vl" and own["content"] and own["lora_alpha"] is None and own["critic"] is False
    assert belongs_to("embedded")["content"] is None  # built anew elsewhere, with other last bits
    folder = CheckpointManager(tmp_path / "run").save(1, lambda path: (path / "a").touch(), model=own)
    check_model(folder, belongs_to("elsewhere"), False)
    for changed in ({"lora_rank": 4}, {"freeze_prefix": "true"}):
        with pytest.raises(CheckpointError, match=rf"trained with .*{next(iter(changed))} .*here\)"):
            check_model(folder, belongs_to("mine", **changed), False)
