"""What the loop does beside its steps."""

import gc
from types import MethodType, SimpleNamespace

import pytest

from lightrft_visual.config.shared import GuardConfig
from lightrft_visual.config.vl import OutputConfig, TrainConfig
from lightrft_visual.errors import NonFiniteError, RewardError
from lightrft_visual.observe.console import RunConsole
from lightrft_visual.observe.guard.divergence import PairedScores
from lightrft_visual.observe.recorder import RunRecorder
from lightrft_visual.runtime.checkpoint.manager import resolve_resume
from lightrft_visual.runtime.files import read_jsonl
from lightrft_visual.runtime.phase_timer import PhaseTimer
from lightrft_visual.trainer.features.guard import GuardHook
from lightrft_visual.trainer.hooks import Hooks, StepData, StepHook, StopRun
from lightrft_visual.trainer.loop import Evaluated, LoopSettings, PolicyTrainer, start_up_objects_aside


def test_the_collector_skips_what_start_up_made_until_the_steps_end():
    with pytest.raises(RuntimeError), start_up_objects_aside():
        assert gc.get_freeze_count() > 0
        raise RuntimeError("a stage failed")
    assert gc.get_freeze_count() == 0


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
