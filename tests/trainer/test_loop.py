"""What the loop does beside its steps."""

from __future__ import annotations

import gc
import signal

import pytest

from lightrft_visual.config.vl import OutputConfig, TrainConfig
from lightrft_visual.observe.console import RunConsole
from lightrft_visual.observe.recorder import RunRecorder
from lightrft_visual.strategy.phase_timer import PhaseTimer
from lightrft_visual.trainer.loop import Evaluated, LoopSettings, PolicyTrainer, StepData, start_up_objects_aside


def test_the_collector_skips_what_start_up_made_until_the_steps_end():
    with pytest.raises(RuntimeError), start_up_objects_aside():
        assert gc.get_freeze_count() > 0
        raise RuntimeError("a stage failed")
    assert gc.get_freeze_count() == 0


class Walk(PolicyTrainer):
    """Steps that train nothing; the one numbered `fails` raises."""

    def __init__(self, folder, fails=None, **output):
        settings = LoopSettings(3, OutputConfig(output_dir=str(folder), **output), TrainConfig())
        super().__init__(settings, RunRecorder(folder), RunConsole(3, active=False), PhaseTimer(lambda: None))
        self.fails = fails
        self.report.every = self.report._next = 1

    def start(self):
        pass

    def collect(self):
        return StepData([])

    def learn(self, data):
        if self.step + 1 == self.fails:
            raise RuntimeError("broken")
        data.metrics.add("reward_mean", 0.25 * (self.step + 1))

    def sync(self):
        pass

    def evaluate(self):
        return Evaluated({"eval_reward": 0.0625 * (self.step + 1)}, [])

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass

    def save_engines(self, folder):
        (folder / "weights.bin").write_bytes(b"w")

    def load_engines(self, folder):
        pass

    def export(self, folder):
        (folder / "model.bin").write_bytes(b"m")


@pytest.fixture
def walk(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    yield lambda **settings: Walk(tmp_path, **settings)
    signal.signal(signal.SIGTERM, before)


def test_the_report_follows_the_run_and_shows_its_end(walk, tmp_path):
    trainer, seen = walk(), []
    after_step, page = trainer.report.after_step, tmp_path / "report.html"

    def noted(step):
        after_step(step)
        seen.append("last step" in page.read_text())

    trainer.report.after_step = noted
    assert trainer.fit() == {"eval_reward": 0.25}
    assert seen == [True] * 3
    text = page.read_text()
    assert "0.750" in text and "0.250" in text  # the last training reward and the last evaluation


def test_a_run_that_ends_with_an_error_has_a_report_of_what_it_did(walk, tmp_path):
    with pytest.raises(RuntimeError, match="broken"):
        walk(fails=3).fit()
    text = (tmp_path / "report.html").read_text()
    assert "0.500" in text and "last step" in text


def test_a_run_without_a_report(walk, tmp_path):
    walk(report=False).fit()
    assert (tmp_path / "metrics.csv").exists() and not (tmp_path / "report.html").exists()
