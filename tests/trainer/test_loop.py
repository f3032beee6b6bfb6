"""What the loop does beside its steps, also where its checkpoints are written while it goes on."""

import gc
import threading
from contextlib import nullcontext
from types import MethodType, SimpleNamespace

import pytest

from lightrft_visual.config.shared import GuardConfig
from lightrft_visual.config.vl import OutputConfig, TrainConfig
from lightrft_visual.errors import CheckpointError, NonFiniteError, RewardError
from lightrft_visual.observe.console import RunConsole
from lightrft_visual.observe.guard.divergence import PairedScores
from lightrft_visual.observe.recorder import RunRecorder
from lightrft_visual.runtime.checkpoint.behind import write_file
from lightrft_visual.runtime.checkpoint.manager import resolve_resume, verify
from lightrft_visual.runtime.files import read_jsonl
from lightrft_visual.runtime.phase_timer import PhaseTimer
from lightrft_visual.trainer import loop
from lightrft_visual.trainer.features.guard import GuardHook
from lightrft_visual.trainer.hooks import Hooks, StepData, StepHook, StopRun
from lightrft_visual.trainer.loop import Evaluated, LoopSettings, PolicyTrainer, start_up_objects_aside


def test_the_collector_skips_what_start_up_made_until_the_steps_end():
    with pytest.raises(RuntimeError), start_up_objects_aside():
        assert gc.get_freeze_count() > 0
        raise RuntimeError("a stage failed")
    assert gc.get_freeze_count() == 0


@pytest.fixture(autouse=True)
def no_walk_through_all_objects(monkeypatch):
    """It takes a second of each run in a process that holds the libraries of many tests."""
    monkeypatch.setattr(loop, "start_up_objects_aside", nullcontext)


class Watched:
    """A run that has nothing to watch beside its metrics."""

    def close(self):
        pass


class Walk(PolicyTrainer):
    """Steps that train nothing but a counter, its weights; the one numbered `fails` raises. golds: by step."""

    def __init__(
        self, folder, fails=None, steps=3, golds=(), guard=None, resume=None, callbacks=(), invalid=(), **output
    ):
        settings = LoopSettings(
            steps, OutputConfig(str(folder), **{"save_steps": -1, "eval_steps": -1} | output), TrainConfig(), resume
        )
        hook = GuardHook(guard or GuardConfig(), Watched(), gold=False, penalties=())
        parts = SimpleNamespace(
            kind="walk", config=None, loop=settings, recorder=RunRecorder(folder), hooks=Hooks([hook]),
            console=RunConsole(steps, active=False), timer=PhaseTimer(lambda: None),
        )  # fmt: skip
        self.guard, self.said = hook.guard, []
        parts.console.message = self.said.append
        super().__init__(parts, callbacks)
        self.fails, self.golds, self.invalid, self.weights = fails, golds, invalid, 0
        self.report.every = self.report.next_step = 1

    def start(self):
        pass

    def train_step(self):
        data = StepData([])
        self.hooks.on_scores([])
        if self.step + 1 == self.fails:
            raise RuntimeError("broken")
        data.metrics.add("reward_mean", 0.25 * (self.step + 1))
        for name, shares in dict(self.invalid).items():  # of each step
            data.metrics.add(name, shares[self.step])
        self.weights += 1
        self.hooks.on_update(SimpleNamespace(applied=True))
        return data

    def sync(self):
        pass

    def evaluate(self):
        metrics = {"eval_reward": 0.0625 * (self.step + 1)}
        if not self.golds:
            return Evaluated(metrics)
        metrics["eval_gold"], worth = self.golds[self.step], [-0.3, -0.1, 0.1, 0.3]  # of four prompts
        columns = ([each + value for each in worth] for value in metrics.values())
        return Evaluated(metrics, paired_scores=PairedScores(self.step, [0, 1, 2, 3], *columns))

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass

    def engines(self):
        return {}

    def save_engines(self, folder):
        (folder / "weights.bin").write_text(str(self.weights))

    def load_engines(self, folder):
        self.weights = int((folder / "weights.bin").read_text())

    def export(self, folder):
        (folder / "model.bin").write_text(str(self.weights))


@pytest.fixture
def walk(tmp_path):
    return lambda **settings: Walk(tmp_path, **settings)


def test_a_run_whose_every_update_was_skipped_ends_as_a_failure_and_is_not_exported(walk, tmp_path, monkeypatch):
    def skipping(applied, begun=0):
        trainer, train_step = walk(steps=2), Walk.train_step
        trainer.step = begun  # as of a checkpoint
        results = iter(applied)

        def step(self):
            data = train_step(self)
            self.count_step(SimpleNamespace(applied=next(results), grad_norm=1.0, learning_rate=1e-6), data.metrics)
            return data

        monkeypatch.setattr(trainer, "train_step", MethodType(step, trainer))
        return trainer

    with pytest.raises(NonFiniteError, match="nothing was trained: in all of 2 updates .* not finite"):
        skipping([False, False]).fit()
    with pytest.raises(NonFiniteError, match="nothing was trained: in all of 1 updates"):
        skipping([False], begun=1).fit()
    assert not (tmp_path / "checkpoint-final").exists()
    skipping([True, False]).fit()
    assert (tmp_path / "checkpoint-final").is_dir()


@pytest.mark.parametrize(("diverged", "fine"), [("", "critic_"), ("critic_", "")])
def test_skipped_steps_in_a_row_are_counted_of_policy_and_critic_apart(walk, diverged, fine):
    trainer, metrics = walk(), StepData([]).metrics

    def step(applied, prefix):
        trainer.count_step(SimpleNamespace(applied=applied, grad_norm=1.0, learning_rate=1e-6), metrics, prefix)

    for _ in range(2):
        step(False, diverged)
        step(True, fine)
    with pytest.raises(NonFiniteError, match=r"step 1: (critic )?loss or gradients .* \(3 in a row\)"):
        step(False, diverged)


@pytest.mark.parametrize(("saved", "wanted"), [({"": 1, "critic_": 2}, 2), (1, 0)])
def test_skipped_steps_in_a_row_resume_also_of_a_checkpoint_that_counts_the_policys_alone(walk, saved, wanted):
    trainer = walk()
    state = dict.fromkeys(("latest_eval", "trainer"), {}) | {"hooks": trainer.hooks.state_dict(), "random": {}}
    trainer.state._take_over({"step": 1, "evaluated_step": -1, "nonfinite_in_a_row": saved, **state})
    assert {"critic_": 0} | trainer.nonfinite_streaks == {"": 1, "critic_": wanted}


def test_the_report_follows_the_run_and_shows_its_end(walk, tmp_path):
    trainer, seen, written = walk(), [], []
    write_due, write, page = trainer.report.write_due, trainer.report.write, tmp_path / "report.html"

    def noted(step):
        write_due(step)
        seen.append("last step" in page.read_text())

    def counted():
        written.append(trainer.step)
        return write()

    trainer.report.write_due, trainer.report.write = noted, counted
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
    trainer = walk(steps=7, golds=GOLDS, eval_steps=1, guard=GuardConfig(policy="stop"), report=False)
    trainer.fit()
    assert trainer.step == 3 and (tmp_path / "checkpoint-000003" / "weights.bin").read_text() == "3"
    assert not (tmp_path / "checkpoint-final").exists()
    assert (tmp_path / "metrics.csv").exists() and not (tmp_path / "report.html").exists()


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


# --- hooks that end a run --------------------------------------------------------------------------------------------


class Ending(StepHook):
    """Raises StopRun in one method, in the step of a number; counts the scores that it was given, in its state."""

    name = "ending"

    def __init__(self, method: str, at: int, export: bool = False) -> None:
        self.scores, self.ended = 0, []
        given = getattr(self, method)

        def ending(*arguments):
            if self.finished() == at:
                raise StopRun("enough", export)
            return given(*arguments)

        setattr(self, method, ending)

    def setup(self, context):
        self.finished = context.step

    def on_scores(self, rollouts):
        self.scores += 1
        return rollouts

    def on_sync(self):
        self.ended.append(self.finished())

    def state_dict(self):
        return {"scores": self.scores}

    def load_state_dict(self, state):
        self.scores = state["scores"]


class CountsScores(Ending):
    """Counts, before the one that ends the run is asked."""

    name = "counts"

    def __init__(self) -> None:
        super().__init__("on_sync", at=-1)


def test_stop_run_before_training_gives_the_step_up_and_saves_where_it_began(walk, tmp_path):
    counts = CountsScores()
    trainer = walk(callbacks=[counts, Ending("on_scores", at=1)])
    trainer.fit()
    assert trainer.step == trainer.weights == 1 and counts.scores == 2
    assert trainer.said[-1] == "enough; a checkpoint of step 1 is saved"
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-000001"]
    again = CountsScores()
    resumed = walk(callbacks=[again], resume=tmp_path / "checkpoint-000001")
    resumed.fit()
    assert resumed.weights == 3 and again.scores == 3  # one of the first step, and the given up one made again


@pytest.mark.parametrize("method", ["on_update", "on_sync", "on_metrics"])
def test_stop_run_of_a_step_that_has_trained_waits_for_its_end(walk, tmp_path, method):
    at = 1 if method == "on_update" else 2  # the step counts as finished once it is trained
    trainer = walk(callbacks=[Ending(method, at)], eval_steps=2)
    assert trainer.fit() == {"eval_reward": 0.1875}  # the evaluation of the step
    assert trainer.step == 2 and (tmp_path / "checkpoint-000002" / "weights.bin").read_text() == "2"
    assert trainer.said[-1] == "enough; a checkpoint is saved" and not (tmp_path / "checkpoint-final").exists()


def test_stop_run_of_an_evaluation_exports_where_it_says_so(walk, tmp_path):
    trainer = walk(callbacks=[Ending("on_evaluation", at=2, export=True)], eval_steps=1)
    trainer.fit()
    assert trainer.step == 2 and (tmp_path / "checkpoint-final" / "model.bin").read_text() == "2"


def test_stop_run_of_a_step_that_has_a_checkpoint_writes_none_again(walk, tmp_path):
    trainer = walk(callbacks=[Ending("on_evaluation", at=2)], eval_steps=1, save_steps=1)
    trainer.fit()
    assert [text.partition(":")[0] for text in trainer.said if "written" in text] == [
        "checkpoint-000001", "checkpoint-000002"]  # fmt: skip


def test_stop_run_of_the_first_evaluation_ends_the_run_before_any_step(walk, tmp_path):
    trainer = walk(callbacks=[Ending("on_evaluation", at=0)])
    trainer.fit()
    assert trainer.step == trainer.weights == 0 and (tmp_path / "checkpoint-000000").is_dir()


# --- checkpoints that are written behind the run ---------------------------------------------------------------------


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
    told = [line for line in trainer.said if "MiB written in" in line]
    assert "checkpoint-000002: " in told[0] and "for which the run waited" in told[0]


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
