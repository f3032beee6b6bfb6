"""What the loop does beside its steps."""

from __future__ import annotations

import gc
import signal

import pytest

from lightrft_visual.checkpoint.manager import resolve_resume
from lightrft_visual.config.shared import GuardConfig
from lightrft_visual.config.vl import OutputConfig, TrainConfig
from lightrft_visual.errors import RewardError
from lightrft_visual.guard.gains import Look
from lightrft_visual.observe.console import RunConsole
from lightrft_visual.observe.recorder import RunRecorder
from lightrft_visual.strategy.files import read_jsonl
from lightrft_visual.strategy.phase_timer import PhaseTimer
from lightrft_visual.trainer.loop import Evaluated, LoopSettings, PolicyTrainer, StepData, start_up_objects_aside


def test_the_collector_skips_what_start_up_made_until_the_steps_end():
    with pytest.raises(RuntimeError), start_up_objects_aside():
        assert gc.get_freeze_count() > 0
        raise RuntimeError("a stage failed")
    assert gc.get_freeze_count() == 0


class Walk(PolicyTrainer):
    """Steps that train nothing but a counter, its weights; the one numbered `fails` raises. golds: by step."""

    def __init__(self, folder, fails=None, steps=3, golds=(), guard=None, resume=None, invalid=(), **output):
        settings = LoopSettings(
            steps, OutputConfig(output_dir=str(folder), **output), TrainConfig(), resume, guard=guard or GuardConfig()
        )
        super().__init__(settings, RunRecorder(folder), RunConsole(steps, active=False), PhaseTimer(lambda: None))
        self.fails, self.golds, self.invalid, self.weights = fails, golds, invalid, 0
        self.report.every = self.report._next = 1

    def start(self):
        pass

    def collect(self):
        return StepData([])

    def learn(self, data):
        if self.step + 1 == self.fails:
            raise RuntimeError("broken")
        data.metrics.add("reward_mean", 0.25 * (self.step + 1))
        for name, shares in dict(self.invalid).items():  # of each step
            data.metrics.add(name, shares[self.step])
        self.weights += 1

    def sync(self):
        pass

    def evaluate(self):
        metrics = {"eval_reward": 0.0625 * (self.step + 1)}
        if not self.golds:
            return Evaluated(metrics, [])
        metrics["eval_gold"], worth = self.golds[self.step], [-0.3, -0.1, 0.1, 0.3]  # of four prompts
        columns = ([each + value for each in worth] for value in metrics.values())
        return Evaluated(metrics, [], Look(self.step, [0, 1, 2, 3], *columns))

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass

    def save_engines(self, folder):
        (folder / "weights.bin").write_text(str(self.weights))

    def load_engines(self, folder):
        self.weights = int((folder / "weights.bin").read_text())

    def export(self, folder):
        (folder / "model.bin").write_text(str(self.weights))


@pytest.fixture
def walk(tmp_path):
    return lambda **settings: Walk(tmp_path, **settings)


def test_a_run_handles_sigterm_only_while_it_lasts(walk):
    trainer, before, during = walk(), signal.getsignal(signal.SIGTERM), []
    sync = trainer.sync
    trainer.sync = lambda: (during.append(signal.getsignal(signal.SIGTERM)), sync())
    assert signal.getsignal(signal.SIGTERM) is before
    trainer.fit()
    assert during and before not in during and signal.getsignal(signal.SIGTERM) is before


def test_the_report_follows_the_run_and_shows_its_end(walk, tmp_path):
    trainer, seen, written = walk(), [], []
    after_step, write, page = trainer.report.after_step, trainer.report.write, tmp_path / "report.html"

    def noted(step):
        after_step(step)
        seen.append("last step" in page.read_text())

    def counted():
        written.append(trainer.step)
        return write()

    trainer.report.after_step, trainer.report.write = noted, counted
    assert trainer.fit() == {"eval_reward": 0.25}
    assert seen == [True] * 3
    assert written == [0, 1, 2, 3, 3]  # after the last step and at the end, not at the evaluation between them
    text = page.read_text()
    assert "0.750" in text and "0.250" in text  # the last training reward and the last evaluation


def test_a_run_that_ends_with_an_error_has_a_report_of_what_it_did(walk, tmp_path):
    with pytest.raises(RuntimeError, match="broken"):
        walk(fails=3).fit()
    text = (tmp_path / "report.html").read_text()
    assert "0.500" in text and "last step" in text


@pytest.mark.parametrize(
    ("most", "invalid", "told"),
    [
        (1.0, {"reward_invalid_share": [0.75, 1.0]}, "step 2: 100% .*nothing to learn: the reward has no score"),
        (0.5, {"reward_invalid_share": [0.5, 0.75]}, r"step 2: 75% .*\(reward_max_invalid is 50%\): the reward"),
        (
            1.0,
            {"reward_invalid_share": [0.0, 1.0], "dropped_stale_share": [0.0, 0.25]},
            "step 2: .*: 25% are older than max_staleness",
        ),
    ],
)
def test_a_step_of_invalid_samples_ends_the_run_and_is_not_done(walk, tmp_path, most, invalid, told):
    trainer = walk(invalid=invalid, save_steps=1)
    trainer.most_invalid = most
    with pytest.raises(RewardError, match=told):
        trainer.fit()
    assert trainer.step == 1 and [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [1]
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-000001"]


def test_a_run_without_a_report(walk, tmp_path):
    walk(report=False).fit()
    assert (tmp_path / "metrics.csv").exists() and not (tmp_path / "report.html").exists()


GOLDS = (0.3, 0.5, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)  # best after step 2; on every prompt, so it is certain at once


def alarms(folder):
    return [(each["step"], each["signal"], each["since"]) for each in read_jsonl(folder / "alarms.jsonl")]


def test_an_alarm_warns_once_and_the_run_goes_on(walk, tmp_path):
    trainer = walk(steps=7, golds=GOLDS, eval_steps=1)
    trainer.fit()
    assert alarms(tmp_path) == [(3, "eval_gold", 2)] and trainer.step == 7
    assert "checkpoint-best" not in [path.name for path in tmp_path.iterdir()]
    page = (tmp_path / "report.html").read_text()
    assert "eval_gold went from 0.6 (step 2) to 0.5" in page and "parted" in page


def test_an_alarm_stops_the_run_with_a_checkpoint(walk, tmp_path):
    trainer = walk(steps=7, golds=GOLDS, eval_steps=1, guard=GuardConfig(policy="stop"))
    trainer.fit()
    assert trainer.step == 3 and (tmp_path / "checkpoint-000003" / "weights.bin").read_text() == "3"
    assert not (tmp_path / "checkpoint-final").exists()


def test_an_alarm_goes_back_to_the_best_gold_from_which_the_run_is_resumed(walk, tmp_path):
    trainer = walk(steps=7, golds=GOLDS, eval_steps=1, save_steps=1, guard=GuardConfig(policy="rollback"))
    assert trainer.fit()["eval_gold"] == 0.6 and trainer.step == 2
    assert (tmp_path / "checkpoint-final" / "model.bin").read_text() == "2"
    found = resolve_resume("auto", tmp_path)
    assert found.name == "checkpoint-best"
    again = walk(steps=7, golds=GOLDS, eval_steps=1, resume=found)
    again.fit()
    assert again.step == again.weights == 7 and again.guard.best == (0.6, 2)
    assert alarms(tmp_path) == [(3, "eval_gold", 2)]  # the first run's was cut back, this one's is its own


def test_the_best_by_gold_outlives_the_rotation(walk, tmp_path):
    walk(steps=7, golds=GOLDS, eval_steps=1, save_steps=1, max_ckpt_num=2).fit()
    assert sorted(path.name for path in tmp_path.glob("checkpoint-0*")) == ["checkpoint-000002", "checkpoint-000007"]
