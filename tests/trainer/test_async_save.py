"""Runs whose checkpoints are written while they go on."""

import threading

import pytest
from test_loop import Walk

from lightrft_visual.errors import CheckpointError
from lightrft_visual.runtime.checkpoint.behind import write_file
from lightrft_visual.runtime.checkpoint.manager import resolve_resume, verify


class Writing(Walk):
    """Steps whose weights a thread writes, when `gate` is open; those of the steps in `full` it cannot write."""

    def __init__(self, folder, full=(), **settings):
        super().__init__(folder, save_steps=settings.pop("save_steps", 1), async_save=True, **settings)
        self.full, self.gate = full, threading.Event()
        self.gate.set()

    def save_engines(self, folder):
        path, step = folder / "weights.bin", self.step

        def write(weights):
            assert self.gate.wait(20)
            if step in self.full:
                raise OSError(28, "No space left on device", str(path))
            path.write_text(str(weights[0]))

        write_file(path, [self.weights], write)


def test_the_run_goes_on_while_its_checkpoint_is_written(tmp_path):
    trainer, seen = Writing(tmp_path, save_steps=2, steps=3), []
    trainer.gate.clear()
    step = trainer.train_step

    def train_step():
        if trainer.step == 2:
            seen.extend(path.name for path in tmp_path.iterdir() if "checkpoint" in path.name)
            trainer.gate.set()
        return step()

    trainer.train_step = train_step
    trainer.fit()
    assert seen == [".staging-checkpoint-000002"]
    assert (tmp_path / "checkpoint-000002" / "weights.bin").read_text() == "2"
    assert verify(resolve_resume("auto", tmp_path))["step"] == 3


def test_size_and_seconds_of_each_checkpoint_are_said(tmp_path):
    trainer = Writing(tmp_path, steps=2)
    trainer.fit()
    told = [line for line in trainer.said if "MiB written in" in line]
    assert [line.split(":")[0] for line in told] == ["checkpoint-000001", "checkpoint-000002"]
    assert all("for which the run waited" in line for line in told)


def test_a_checkpoint_that_cannot_be_written_ends_the_run_at_the_next_step(tmp_path):
    trainer = Writing(tmp_path, full=[2], steps=9)
    with pytest.raises(CheckpointError, match="saving checkpoint-000002 failed: the disk is full: .*weights.bin"):
        trainer.fit()
    assert trainer.step in (2, 3)
    assert verify(resolve_resume("auto", tmp_path))["step"] == 1


def test_one_that_nobody_asked_for_and_cannot_be_written_is_said_and_the_run_goes_on(tmp_path):
    trainer = Writing(tmp_path, full=[2], steps=3, save_steps=None)
    trainer.fit()
    assert [line for line in trainer.said if "checkpoint-000002 failed: the disk is full" in line]
    assert verify(resolve_resume("auto", tmp_path))["step"] == 3


def test_a_run_that_fails_leaves_the_checkpoint_that_was_being_written(tmp_path):
    trainer = Writing(tmp_path, save_steps=2, steps=3, fails=3)
    trainer.gate.clear()
    threading.Timer(0.3, trainer.gate.set).start()
    with pytest.raises(RuntimeError, match="broken"):
        trainer.fit()
    assert verify(resolve_resume("auto", tmp_path))["step"] == 2


def test_a_checkpoint_at_the_end_of_a_run_is_not_written_behind_it(tmp_path):
    trainer = Writing(tmp_path, steps=3)
    trainer.step = 1
    trainer.state.save()
    assert verify(tmp_path / "checkpoint-000001")["step"] == 1
