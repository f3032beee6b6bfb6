"""What the loop does beside its steps, also where its checkpoints are written while it goes on."""

import gc
import json
import os
import signal
import threading
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest

from lightrft_visual.api import _History, _result
from lightrft_visual.config.shared import GuardConfig
from lightrft_visual.config.vl import OutputConfig
from lightrft_visual.errors import (
    CheckpointError,
    ConfigError,
    NonFiniteError,
    OutputClosed,
    RewardError,
    StoppedBySignal,
    TooManyInvalid,
)
from lightrft_visual.observe.console import RunConsole
from lightrft_visual.observe.guard.divergence import PairedScores
from lightrft_visual.observe.metrics import csv_records
from lightrft_visual.observe.recorder import RunRecorder
from lightrft_visual.runtime.checkpoint import manager
from lightrft_visual.runtime.checkpoint.behind import write_file
from lightrft_visual.runtime.checkpoint.manager import resolve_resume, verify
from lightrft_visual.runtime.files import read_jsonl, remove_folder
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


class Walk(PolicyTrainer):
    """Steps that train nothing but a counter, its weights; the one numbered `fails` raises. golds: by step."""

    def __init__(self, folder, fails=None, steps=3, golds=(), guard=None, resume=None, callbacks=(), **output):
        saved = OutputConfig(str(folder), **{"save_steps": -1, "eval_steps": -1} | output)
        settings = LoopSettings(steps, saved, resume)
        hook = GuardHook(guard or GuardConfig(), gold=False, paying=())
        config = SimpleNamespace(updates=lambda steps: steps)
        parts = SimpleNamespace(
            kind="walk", config=config, loop=settings, recorder=RunRecorder(folder), hooks=Hooks([hook]),
            console=RunConsole(steps, active=False), timer=PhaseTimer(lambda: None), closed_behind=list,
        )  # fmt: skip
        self.guard, self.said = hook.guard, []
        parts.console.message = self.said.append
        super().__init__(parts, callbacks)
        self.fails, self.golds, self.weights, self.invalid = fails, golds, 0, {}
        self.report.next_step = 1

    def start(self):
        pass

    sync = start

    def train_step(self):
        data = StepData([])
        self.hooks.on_scores([])
        if self.step + 1 == self.fails:
            raise RuntimeError("broken")
        data.metrics.add("reward_mean", 0.25 * (self.step + 1))
        for name, shares in self.invalid.items():  # of each step
            data.metrics.add(name, shares[self.step])
        self.weights += 1
        self.hooks.on_update(SimpleNamespace(applied=True))
        return data

    def evaluate(self):
        metrics = {"eval_reward": 0.0625 * (self.step + 1)}
        if not self.golds:
            return Evaluated(metrics)
        metrics["eval_gold"], worth = self.golds[self.step], [-0.3, -0.1, 0.1, 0.3]  # of four prompts
        columns = ([each + value for each in worth] for value in metrics.values())
        return Evaluated(metrics, paired_scores=PairedScores(self.step, [0, 1, 2, 3], *columns))

    def state_dict(self):
        return {}

    engines = state_dict

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


def test_files_have_all_records_of_a_step_and_the_table_those_that_are_only_shown_too(walk, tmp_path):
    trainer, shown, data = walk(num_trajectories_to_save=1), [], StepData([])
    trainer.console.samples = lambda step, records: shown.append((step, records))
    best, own, worst = ({"prompt": "p", "reward": reward, "sample_id": reward} for reward in (1.0, 0.5, 0.0))
    data.records, data.shown = [own, best], [worst]  # one of them is a hook's
    trainer._finish_step(data)
    (file,) = (tmp_path / "rollouts").glob("step_*.jsonl")
    assert shown == [(1, [own, best, worst])] and [each["reward"] for each in read_jsonl(file)] == [0.5, 1.0]


def test_the_steps_are_made_while_the_collector_skips_what_start_up_made(walk, monkeypatch):
    inside = []

    @contextmanager
    def aside():
        inside.append(True)
        yield
        inside.pop()

    monkeypatch.setattr(loop, "start_up_objects_aside", aside)
    trainer = walk()
    step = trainer.train_step
    trainer.train_step = lambda: step() if inside else pytest.fail("a step outside")
    trainer.fit()
    assert not inside and trainer.step == 3


def names_in(folder):
    """Its checkpoints."""
    return sorted(path.name for path in folder.glob("checkpoint-*"))


@pytest.mark.parametrize(
    ("applied", "goes_on", "told"),
    [
        ([False, False], False, "nothing was trained: in all of 2 updates .* not finite"),
        ([False], True, None),  # from a checkpoint, so that the model is not as it was
        ([True, False], False, None),
    ],
)
def test_a_run_whose_every_update_was_skipped_ends_as_a_failure_and_is_not_exported(
    walk, tmp_path, applied, goes_on, told
):
    if goes_on:
        walk(steps=1, save_steps=1, save_path=str(tmp_path / "of one step")).fit()
    trainer, results = walk(steps=2, resume=tmp_path / "checkpoint-000001" if goes_on else None), iter(applied)
    train_step = trainer.train_step

    def step():
        data = train_step()
        trainer.count_step(SimpleNamespace(applied=next(results), grad_norm=1.0, learning_rate=1e-6), data.metrics)
        return data

    trainer.train_step = step
    with pytest.raises(NonFiniteError, match=told) if told else nullcontext():
        trainer.fit()
    assert (tmp_path / "checkpoint-final").exists() == (told is None)


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


def test_skipped_steps_are_as_many_as_the_updates_that_were_skipped(walk):
    trainer, metrics = walk(), StepData([]).metrics
    for applied in (False, True, False):
        trainer.count_step(SimpleNamespace(applied=applied, grad_norm=1.0, learning_rate=1e-6), metrics)
    assert metrics.reduce()["skipped_steps"] == 2


def test_skipped_steps_in_a_row_resume_of_policy_and_critic(walk):
    trainer, saved = walk(), {"": 1, "critic_": 2}
    state = dict.fromkeys(("latest_eval", "first_eval", "trainer", "random"), {}) | {"step_size": 0}
    state |= {"step": 1, "evaluated_step": -1, "nonfinite_in_a_row": saved, "hooks": trainer.hooks.state_dict()}
    trainer.state._take_over(state)
    assert trainer.nonfinite_streaks == saved


def test_a_run_by_episodes_that_goes_on_with_another_size_is_told_how_many_steps_it_has(walk):
    """Of 100 prompts it made 5 steps of 10; the other 50 are 3 steps of 20, and the new count of all 100 is 5."""
    trainer = walk(steps=5)
    trainer.settings.step_size, state = 20, {"step": 5, "step_size": 10}
    trainer.config.train = SimpleNamespace(max_steps=-1)
    with pytest.raises(ConfigError, match="num_episodes counted steps by 10 of the data, now .* 20: .* --max_steps 8"):
        trainer.state._take_over(state)
    trainer.config.train.max_steps = 8
    with pytest.raises(KeyError, match="nonfinite"):  # it goes on to take what else a state holds
        trainer.state._take_over(state)


def test_the_last_line_of_a_resumed_run_begins_at_the_evaluation_before_its_first_step(walk, tmp_path):
    walk(steps=1, eval_steps=1, save_steps=1).fit()
    resumed = walk(resume=tmp_path / "checkpoint-000001", eval_steps=1)
    resumed.fit()
    assert "eval reward 0.0625 -> 0.25" in resumed.said[-1]


def test_a_run_that_goes_on_from_an_earlier_checkpoint_puts_the_later_ones_aside(walk, tmp_path):
    """One that fails before its own first save goes on from the same checkpoint, and none of the others is its best."""
    every, earlier = {"save_steps": 1, "eval_steps": 1, "max_ckpt_num": 5}, tmp_path / "checkpoint-000002"
    walk(steps=4, **every).fit()
    again = walk(fails=3, resume=earlier, **every)
    settings = tmp_path / "config.resolved.yaml"
    settings.write_text("train: {seed: 1}\n")
    again.settings.taken_over = Mock(side_effect=lambda: settings.write_text("train: {seed: 2}\n"))
    with pytest.raises(RuntimeError, match="broken"):
        again.fit()
    assert again.settings.taken_over.mock_calls == [call()]
    assert resolve_resume("auto", tmp_path) == earlier and any("earlier_runs/run now" in text for text in again.said)
    assert names_in(tmp_path) == ["checkpoint-000001", "checkpoint-000002", "checkpoint-final"]
    moved = sorted(path.name for path in (tmp_path / "earlier_runs" / "run").iterdir())
    assert moved == ["checkpoint-000003", "checkpoint-000004", "config.resolved.yaml", "latest"]
    assert "seed: 1" in (tmp_path / "earlier_runs" / "run" / "config.resolved.yaml").read_text()


@pytest.mark.parametrize("fails", ["none", "hooks", "policy", "rewards"])
def test_all_that_a_trainer_holds_is_closed_the_engine_last_also_where_a_part_fails(walk, fails):
    closed = []

    def part(name):
        def close():
            closed.append(name)
            if name == fails:
                raise RuntimeError(f"{name} stays open")

        return SimpleNamespace(close=close)

    trainer = walk()
    trainer.hooks, trainer.engines = part("hooks"), lambda: {"policy": part("policy")}
    trainer.parts.closed_behind = lambda: (part("rewards"), part("engine"))
    with pytest.raises(RuntimeError, match=f"{fails} stays open") if fails != "none" else nullcontext():
        trainer.close()
    assert closed == ["hooks", "policy", "rewards", "engine"]


@pytest.mark.parametrize("fails", [None, 3])
def test_the_report_follows_the_run_and_shows_its_end_or_where_it_failed(walk, tmp_path, monkeypatch, fails):
    trainer, written, page = walk(fails=fails), [], tmp_path / "report.html"
    write = trainer.report.write
    monkeypatch.setattr("lightrft_visual.observe.report.page.EVERY", 1)
    monkeypatch.setattr(trainer.report, "write", lambda: written.append(trainer.step) or write())
    with pytest.raises(RuntimeError, match="broken") if fails else nullcontext():
        assert trainer.fit() == {"eval_reward": 0.25}
    done = 2 if fails else 3
    assert written == [*range(done + 1), done]  # after the last step and at the end, not at the evaluation between them
    text = page.read_text()  # the last training reward and the last evaluation
    assert f"{0.25 * done:.3f}" in text and "last step" in text and (fails or "0.250" in text)
    failed = {"how": "failed", "text": "RuntimeError: broken"}
    assert json.loads((tmp_path / "ended.json").read_text()) == (failed if fails else {"how": "finished", "text": ""})
    assert ("<b>failed</b> RuntimeError: broken" in text) == bool(fails) and "<b>finished</b>" not in text


@pytest.mark.parametrize(
    ("most", "shares", "told"),
    [
        (1.0, {"reward_invalid": [0.75, 1.0]}, "step 2: 100% .*nothing to learn: the reward has no score"),
        (0.5, {"reward_invalid": [0.5, 0.75]}, r"step 2: 75% .*\(reward_max_invalid is 50%\): the reward"),
        (1.0, {"reward_invalid": [0.0, 1.0], "dropped_stale": [0.0, 0.25]}, "step 2.* 25% are older .*batches_ahead"),
    ],
)
def test_a_step_of_invalid_samples_ends_the_run_and_is_not_done(walk, tmp_path, most, shares, told):
    trainer = walk(save_steps=1)
    trainer.most_invalid, trainer.invalid = most, {f"{name}_share": each for name, each in shares.items()}
    with pytest.raises(RewardError, match=told):
        trainer.fit()
    assert trainer.step == 1 and [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [1]
    assert names_in(tmp_path) == ["checkpoint-000001"]


GOLDS = (0.3, 0.5, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)  # best after step 2; on every prompt, so it is certain at once


def alarms(folder):
    return [(each["step"], each["signal"], each["since"]) for each in read_jsonl(folder / "alarms.jsonl")]


def test_an_alarm_warns_once_and_the_run_goes_on_with_the_best_gold_beside_the_last_checkpoint(walk, tmp_path):
    trainer = walk(steps=7, golds=GOLDS, eval_steps=1, save_steps=1, max_ckpt_num=2)
    trainer.fit()
    assert alarms(tmp_path) == [(3, "eval_gold", 2)] and trainer.step == 7
    assert names_in(tmp_path) == ["checkpoint-000002", "checkpoint-000007", "checkpoint-final"]
    page = (tmp_path / "report.html").read_text()
    assert "eval_gold went from 0.6 (step 2) to 0.5" in page and "parted" in page


def test_an_alarm_stops_the_run_with_a_checkpoint(walk, tmp_path):
    trainer = walk(steps=7, golds=GOLDS, eval_steps=1, guard=GuardConfig(policy="stop"), report=False)
    trainer.fit()
    assert trainer.step == 3 and (tmp_path / "checkpoint-000003" / "weights.bin").read_text() == "3"
    assert not (tmp_path / "checkpoint-final").exists()
    assert (tmp_path / "metrics.csv").exists() and not (tmp_path / "report.html").exists()
    told = "stopped by the guard at step 3 (eval_gold); a checkpoint is saved"
    assert json.loads((tmp_path / "ended.json").read_text()) == {"how": "stopped", "text": told}


def test_an_alarm_goes_back_to_the_best_gold_from_which_the_run_is_resumed(walk, tmp_path):
    trainer = walk(steps=7, golds=GOLDS, eval_steps=1, save_steps=1, guard=GuardConfig(policy="rollback"))
    assert trainer.fit()["eval_gold"] == 0.6 and trainer.step == 2
    assert (tmp_path / "checkpoint-final" / "model.bin").read_text() == "2"
    found = resolve_resume("auto", tmp_path)
    assert found.name == "checkpoint-best"
    told = "<b>stopped</b> the guard (eval_gold, step 3) went back to the best gold: step 2, eval_gold 0.6</p>"
    assert told in (tmp_path / "report.html").read_text()
    again = walk(steps=7, golds=GOLDS, eval_steps=1, resume=found)
    again.fit()
    assert json.loads((tmp_path / "ended.json").read_text())["how"] == "finished"
    assert again.step == again.weights == 7 and again.guard.best == (0.6, 2)
    assert alarms(tmp_path) == [(3, "eval_gold", 2)]  # the first run's was cut back, this one's is its own


@pytest.mark.parametrize(
    ("first", "resumed", "golds", "reached", "exported"),
    [
        pytest.param("warn", 2, GOLDS, (3, 0.5), None, id="none was kept, an alarm before one is"),
        pytest.param("rollback", 1, (0.3, 0.5, 0.2), (2, 0.2), None, id="of steps given up, an alarm before another"),
        pytest.param("rollback", 1, (0.3, 0.5, 0.55, 0.4), (2, 0.55), "2", id="of steps given up, and a new one"),
    ],
)
def test_an_alarm_goes_back_to_no_best_checkpoint_but_the_runs_own(
    walk, tmp_path, first, resumed, golds, reached, exported
):
    trainer = walk(steps=7, golds=GOLDS, eval_steps=1, save_steps=1, max_ckpt_num=9, guard=GuardConfig(policy=first))
    trainer.fit()
    remove_folder(tmp_path / "checkpoint-final")
    settings = {"eval_steps": 1, "guard": GuardConfig(policy="rollback")}
    again = walk(steps=7, golds=golds, resume=tmp_path / f"checkpoint-{resumed:06}", **settings)
    again.fit()
    assert (again.step, again.latest_eval["eval_gold"]) == reached
    assert any("checkpoint-best is not of this run up to here" in text for text in again.said)
    assert ("stopped by the guard" in again.said[-1]) == (exported is None)
    model = tmp_path / "checkpoint-final" / "model.bin"
    assert (model.read_text() if model.exists() else None) == exported


def test_gold_that_a_signal_ends_leaves_none_of_the_step_before_behind():
    """A step that has trained is reported all the same."""

    def hangs(rollouts):
        raise StoppedBySignal("the judge did not return")

    hook = GuardHook(GuardConfig(gold_every=1), gold=True, paying=())
    hook.context, hook.scores = SimpleNamespace(step=lambda: 1, parts=SimpleNamespace(gold_of=hangs)), [1.0]
    hook.paired_scores = PairedScores(1, [0], [1.0], [1.0])
    with pytest.raises(StoppedBySignal):
        hook.on_scores([])
    assert hook.scores is hook.paired_scores is None


# --- hooks that end a run --------------------------------------------------------------------------------------------


class Ending(StepHook):
    """Raises StopRun in one method, in the step of a number; counts the scores that it was given, in its state."""

    name = "ending"

    def __init__(self, method: str, at: int, export: bool = False) -> None:
        self.scores = 0
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

    def state_dict(self):
        return {"scores": self.scores}

    def load_state_dict(self, state):
        self.scores = state["scores"]


def test_a_state_that_no_checkpoint_can_keep_ends_the_run_before_its_first_step(walk, tmp_path):
    hook = Ending("on_sync", at=-1)
    hook.state_dict = lambda: {"seen": {1, 2}}
    trainer = walk(callbacks=[hook])
    with pytest.raises(ConfigError, match=r"hook ending\.seen: a set cannot be saved"):
        trainer.fit()
    assert trainer.weights == 0 and names_in(tmp_path) == []


def test_stop_run_before_training_gives_the_step_up_and_saves_where_it_began(walk, tmp_path):
    counts, again = (Ending("on_sync", at=-1) for _ in range(2))  # it ends nothing, and is asked first
    trainer = walk(callbacks=[counts, Ending("on_scores", at=1)])
    trainer.fit()
    assert trainer.step == trainer.weights == 1 and counts.scores == 2
    assert trainer.said[-1] == "enough; a checkpoint of step 1 is saved"
    assert names_in(tmp_path) == ["checkpoint-000001"]
    resumed = walk(callbacks=[again], resume=tmp_path / "checkpoint-000001")
    resumed.fit()
    assert resumed.weights == 3 and again.scores == 3  # one of the first step, and the given up one made again


@pytest.mark.parametrize(
    ("hook", "output", "written"),
    [
        pytest.param(("on_update", 1), {"eval_steps": 2}, [2], id="on_update, before the step counts as finished"),
        pytest.param(("metrics", 1), {"eval_steps": 2}, [2], id="metrics, before the step counts as finished"),
        pytest.param(("on_metrics", 2), {"eval_steps": 2}, [2], id="on_metrics"),
        pytest.param(("on_evaluation", 2), {"eval_steps": 1, "save_steps": 1}, [1, 2], id="no checkpoint twice"),
        pytest.param(("on_evaluation", 2, True), {"eval_steps": 1}, [2, "final"], id="export"),
        pytest.param(("on_evaluation", 0), {}, [0], id="the evaluation before any step"),
    ],
)
def test_stop_run_of_a_step_that_has_trained_waits_for_its_end(walk, tmp_path, hook, output, written):
    trainer, step = walk(callbacks=[Ending(*hook)], **output), 2 if hook[1] else 0
    assert trainer.fit() == {"eval_reward": 0.0625 * (step + 1)}  # the evaluation of the step
    assert trainer.step == trainer.weights == step and "enough; a checkpoint is saved" in trainer.said
    names = [f"checkpoint-{each:06}" if isinstance(each, int) else f"checkpoint-{each}" for each in written]
    assert names_in(tmp_path) == names
    told = [text.partition(":")[0] for text in trainer.said if "written" in text]
    assert told == [name for name in names if name != "checkpoint-final"]


def test_a_signal_before_the_first_step_ends_the_run_without_one(walk, tmp_path):
    def evaluate():  # of step 0, as the last thing before it
        os.kill(os.getpid(), signal.SIGTERM)
        return Evaluated({"eval_reward": 0.5})

    first, begun = walk(), []
    first.evaluate = evaluate
    assert first.fit() == {"eval_reward": 0.5} and first.weights == 0
    assert names_in(tmp_path) == ["checkpoint-000000"]
    assert "stopped by signal at step 0; a checkpoint is saved" in first.said and first.state.exit_code == 143
    resumed = walk(resume=tmp_path / "checkpoint-000000")
    resumed.start = lambda: os.kill(os.getpid(), signal.SIGTERM)  # while it starts
    resumed.fit()
    assert resumed.weights == 0 and names_in(tmp_path) == ["checkpoint-000000"]  # written again, over its own
    resumed = walk(resume=tmp_path / "checkpoint-000000", callbacks=[SimpleNamespace(on_evaluation=begun.append)])
    resumed.fit()
    assert resumed.weights == 3 and len(begun) == 1  # that of the last step; the first one is not made again


def test_the_result_of_a_run_that_was_stopped_names_its_own_checkpoint_beside_an_earlier_export(
    walk, tmp_path, monkeypatch
):
    first, history = walk(save_steps=1), _History()
    first.fit()
    done = _result(first, history)
    assert done.checkpoint == tmp_path / "checkpoint-final" and not done.stopped
    more = walk(steps=6, save_steps=1, resume=tmp_path / "checkpoint-000003")
    more.hooks.on_update = lambda result: setattr(more.state._stop, "made", more.step == 4)  # in step 5
    more.fit()
    monkeypatch.setattr(manager, "check_hashes", lambda *read: pytest.fail("the whole checkpoint is read again"))
    cut = _result(more, history)
    assert cut.metrics["step"] == 5 and cut.checkpoint == tmp_path / "checkpoint-000005" and cut.stopped


def test_the_result_of_a_run_says_stopped_on_every_rank_and_not_of_a_signal_in_its_last_step(walk):
    last = walk(steps=1)
    last.hooks.on_update = lambda result: setattr(last.state._stop, "made", True)
    last.fit()
    assert last.state.signalled() and not _result(last, _History()).stopped
    other = walk(steps=2)
    other.state.stop_requested = lambda: True  # as another rank was asked
    other.fit()
    assert _result(other, _History()).stopped


def test_a_signal_in_a_step_leaves_its_evaluation_to_the_run_that_goes_on_but_for_the_last(walk, tmp_path):
    first = walk(eval_steps=1, save_steps=2)
    first.hooks.on_update = lambda result: setattr(first.state._stop, "made", first.step == 1)
    first.fit()
    again = walk(eval_steps=1, save_steps=5, resume=tmp_path / "checkpoint-000002")
    assert first.evaluated_step == 1 and names_in(tmp_path) == ["checkpoint-000002"]
    assert verify(tmp_path / "checkpoint-000002")["metrics"] == {}
    again.hooks.on_update = lambda result: setattr(again.state._stop, "made", True)
    again.fit()
    assert verify(tmp_path / "checkpoint-000002")["metrics"] == {"eval_reward": 0.1875}  # it may be the best one
    assert [record["step"] for record in csv_records(tmp_path / "eval_metrics.csv")] == ["0", "1", "2", "3"]


@pytest.mark.parametrize("step", [1, 3])
def test_an_evaluation_that_a_signal_ended_is_made_when_the_run_goes_on(walk, tmp_path, step):
    def hangs():
        if first.step == step:
            raise StoppedBySignal("the judge did not return")
        return Evaluated({"eval_reward": 0.5})

    first = walk(eval_steps=1)
    first.evaluate = hangs
    first.fit()
    assert names_in(tmp_path) == [f"checkpoint-{step:06}"]
    walk(eval_steps=1, resume=tmp_path / f"checkpoint-{step:06}").fit()
    assert [record["step"] for record in csv_records(tmp_path / "eval_metrics.csv")] == ["0", "1", "2", "3"]


@pytest.mark.parametrize("at", ["scoring", "evaluation"])
def test_a_run_whose_rewards_are_gone_saves_before_it_ends_and_is_resumed_as_if_they_had_stayed(walk, tmp_path, at):
    """As of a server that is down: what was trained since the last checkpoint costs more than it."""

    def gone(step):
        if step == 2:
            raise TooManyInvalid("100% of 8 rewards are invalid")

    def evaluate():
        if at == "evaluation":
            gone(first.step)
        return Evaluated({"eval_reward": 0.5})

    hook = SimpleNamespace(on_scores=lambda rollouts: gone(first.step if at == "scoring" else 0) or rollouts)
    first = walk(eval_steps=1, save_steps=-1, callbacks=[hook])
    first.evaluate = evaluate
    with pytest.raises(TooManyInvalid, match="100% of 8"):
        first.fit()
    assert names_in(tmp_path) == ["checkpoint-000002"] and "a checkpoint of step 2 is saved" in first.said
    again = walk(eval_steps=1, resume=tmp_path / "checkpoint-000002")
    again.fit()
    assert again.step == again.weights == 3
    assert [record["step"] for record in csv_records(tmp_path / "eval_metrics.csv")] == ["0", "1", "2", "3"]


def test_a_save_that_fails_does_not_hide_that_rewards_are_gone(walk):
    def gone(rollouts):
        if trainer.step == 1:
            raise TooManyInvalid("100% of 8 rewards are invalid")
        return rollouts

    def full(rewound):
        raise CheckpointError("the disk is full")

    trainer = walk(callbacks=[SimpleNamespace(on_scores=gone)])
    trainer.state.keep = full
    with pytest.raises(TooManyInvalid):
        trainer.fit()
    assert "no checkpoint of step 1 is saved: the disk is full" in trainer.said


def test_a_run_whose_rewards_are_gone_in_its_first_step_has_nothing_to_save(walk, tmp_path):
    def gone(rollouts):
        raise TooManyInvalid("100% of 8 rewards are invalid")

    with pytest.raises(TooManyInvalid):
        walk(callbacks=[SimpleNamespace(on_scores=gone)]).fit()
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("pressed", [False, True])
def test_a_run_whose_output_nobody_reads_any_more_saves_before_it_ends(walk, tmp_path, pressed):
    """As of `| tee log.txt`, which Ctrl-C ends before the run."""

    def lose(metrics):
        trainer.console.output.lost = OutputClosed("nobody is there")
        if pressed:
            signal.raise_signal(signal.SIGINT)

    trainer = walk(callbacks=[SimpleNamespace(on_metrics=lose)])
    with nullcontext() if pressed else pytest.raises(OutputClosed, match="nobody is there"):
        trainer.fit()
    assert trainer.step == 1 and names_in(tmp_path) == ["checkpoint-000001"]
    assert trainer.state.exit_code == (130 if pressed else 143)


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


@pytest.mark.parametrize("fails", [None, 3])
def test_the_run_goes_on_or_fails_while_its_checkpoint_is_written(tmp_path, fails):
    trainer, seen = Writing(tmp_path, save_steps=2, fails=fails), []
    trainer.gate.clear()
    step = trainer.train_step

    def train_step():
        if trainer.step == 2:
            seen.extend(path.name for path in tmp_path.iterdir() if "checkpoint" in path.name)
            threading.Timer(0.3 if fails else 0.0, trainer.gate.set).start()
        return step()

    trainer.train_step = train_step
    with pytest.raises(RuntimeError, match="broken") if fails else nullcontext():
        trainer.fit()
    assert seen == [".staging-checkpoint-000002"]
    assert (tmp_path / "checkpoint-000002" / "weights.bin").read_text() == "2"
    assert verify(resolve_resume("auto", tmp_path))["step"] == (2 if fails else 3)
    told = [line for line in trainer.said if "MiB written in" in line]
    assert fails or ("checkpoint-000002: " in told[0] and "for which the run waited" in told[0])


def test_a_checkpoint_that_cannot_be_written_ends_the_run_where_it_was_asked_for(tmp_path):
    asked, unasked = (Writing(tmp_path / name, full=[2], save_steps=every) for name, every in (("a", 1), ("b", None)))
    with pytest.raises(CheckpointError, match="saving checkpoint-000002 failed: the disk is full: .*weights.bin"):
        asked.fit()
    assert asked.step in (2, 3) and verify(resolve_resume("auto", tmp_path / "a"))["step"] == 1
    unasked.fit()
    assert [line for line in unasked.said if "checkpoint-000002 failed: the disk is full" in line]
    assert verify(resolve_resume("auto", tmp_path / "b"))["step"] == 3


def test_a_checkpoint_at_the_end_of_a_run_is_not_written_behind_it(tmp_path):
    trainer = Writing(tmp_path, steps=3)
    trainer.step = 1
    trainer.state.save()
    assert verify(tmp_path / "checkpoint-000001")["step"] == 1
