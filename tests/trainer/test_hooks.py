"""Several hooks as one: their order, what they return, how they end a run, and their part of a checkpoint."""

from collections import deque
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import TrainerCallback

from lightrft_visual.config import kinds, registry
from lightrft_visual.config.diffusion import DiffusionRunConfig
from lightrft_visual.config.sft import SFTRunConfig
from lightrft_visual.config.vl import RunConfig
from lightrft_visual.errors import CheckpointError, ConfigError
from lightrft_visual.experience.rollouts import Rollouts, SamplingSettings
from lightrft_visual.observe.metrics import MetricsAccumulator
from lightrft_visual.trainer.diffusion.build import build_diffusion_trainer
from lightrft_visual.trainer.hooks import Hooks, StepHook, StopRun, check_state
from lightrft_visual.trainer.vl.sft import build_supervised
from lightrft_visual.trainer.vl.trainer import build_trainer

THROUGH = ("on_prompts", "on_rollouts", "on_scores", "on_experience", "on_buffer", "on_train_batch")


class Adds:
    """Puts a word behind the list that it is given, a new list each time; not a StepHook, and with some methods."""

    def __init__(self, word: str) -> None:
        self.word = word

    def _added(self, words: list[str]) -> list[str]:
        return [*words, self.word]

    on_prompts = on_rollouts = on_scores = on_experience = on_buffer = on_train_batch = _added


@pytest.mark.parametrize("method", THROUGH)
def test_each_hook_is_given_what_the_one_before_it_returned(method):
    given = ["start"]
    assert getattr(Hooks([Adds("a"), StepHook(), Adds("b")]), method)(given) == ["start", "a", "b"]
    assert given == ["start"] and getattr(Hooks(), method)(given) is given


class Ends(StepHook):
    def _ends(self, *_):
        raise StopRun("enough")

    on_scores = on_buffer = on_train_batch = on_update = on_sync = on_metrics = on_evaluation = _ends


@pytest.mark.parametrize("method", [name for name in vars(Ends) if name.startswith("on_")])
def test_a_stop_is_raised_before_training_and_waits_in_a_step_that_trains_for_the_other_hooks(method):
    asked, given = [], ["batch"]
    after = SimpleNamespace(**{method: lambda *value: asked.append(method) or (value[0] if value else None)})
    hooks, at_once = Hooks([Ends(), after]), method in ("on_scores", "on_buffer")
    with pytest.raises(StopRun, match="enough") if at_once else nullcontext():
        returned = getattr(hooks, method)(*(() if method == "on_sync" else (given,)))
        assert hooks.stopping.reason == "enough" and asked == [method]
        assert returned is (given if method == "on_train_batch" else None)
    assert (hooks.stopping is None) == at_once


@pytest.mark.parametrize("method", THROUGH)
@pytest.mark.parametrize("returned", [None, ["a list"]])
def test_a_method_that_returns_nothing_or_something_else_is_refused_by_its_name(method, returned):
    def forgets(value):
        return returned

    forgets.__qualname__ = f"Forgets.{method}"
    told = rf"Forgets\.{method} returned {type(returned).__name__}; .* a Rollouts"
    with pytest.raises(ConfigError, match=told):
        getattr(Hooks([SimpleNamespace(**{method: forgets})]), method)(Rollouts([]))


@pytest.mark.parametrize("method", ["on_rollouts", "on_scores"])
def test_other_rollouts_of_a_hook_keep_what_is_known_of_those_whose_place_they_take(method):
    sampling, pending, seen = SamplingSettings(n=2, temperature=0.7, max_new_tokens=8192), object(), []
    drawn = Rollouts([], sampling, pending, counts={"drawn": 2.0, "kept": 2.0})
    chosen = [lambda given: Rollouts(given, counts={"kept": 1.0}), lambda given: seen.append(given) or given]
    made = getattr(Hooks([SimpleNamespace(**{method: each}) for each in chosen]), method)(drawn)
    assert seen == [made] and made is not drawn  # the next hook finds it already
    assert (made.sampling, made.pending, made.scored) == (sampling, pending, False)
    assert made.counts == {"drawn": 2.0, "kept": 1.0}
    drawn.settle({})
    made = getattr(Hooks([SimpleNamespace(**{method: chosen[0]})]), method)(drawn)
    assert (made.pending, made.scored) == (None, True)


@pytest.mark.parametrize("method", ["on_rollouts", "on_scores"])
def test_a_hook_that_keeps_no_rollout_is_refused_by_its_name(method):
    def drops(rollouts):
        return Rollouts([])

    with pytest.raises(ConfigError, match="drops keeps nothing of this rank: use leave_out"):
        getattr(Hooks([SimpleNamespace(**{method: drops})]), method)(Rollouts([object()]))


@pytest.mark.parametrize(
    ("returned", "told"),
    [([], "own keeps nothing of this rank$"), (["x"], "own returned a list with a str; it was given int$")],
)
def test_a_hook_that_leaves_no_prompts_or_things_of_another_type_is_refused_by_its_name(returned, told):
    def own(requests):
        return returned

    own.__qualname__ = "own"
    with pytest.raises(ConfigError, match=told):
        Hooks([SimpleNamespace(on_prompts=own)]).on_prompts([1, 2])


@pytest.mark.parametrize(
    ("reward", "right"),
    [(1, True), (torch.tensor(0.5), True), (np.float32(2), True), (None, False), ("1", False), (float("nan"), False),
     (torch.ones(2), False)],
)  # fmt: skip
def test_a_reward_that_a_hook_makes_no_finite_number_is_refused_by_its_name(reward, right):
    def own(rollouts):
        rollouts[0].reward = reward
        return rollouts

    scored = Rollouts([SimpleNamespace(reward=1.0, valid=True), SimpleNamespace(reward=float("nan"), valid=False)])
    with nullcontext() if right else pytest.raises(ConfigError, match="own a reward is .*; it is a finite number"):
        assert Hooks([SimpleNamespace(on_scores=own)]).on_scores(scored) is scored


def test_those_of_the_configuration_come_in_the_registrys_order_and_then_a_users_own_and_the_last(monkeypatch):
    kept, last = registry.Registry("hook", kinds.Hook), Adds("the last")
    last.last = True
    monkeypatch.setattr(registry, "hooks", kept)
    kept.register("behind", about="")(lambda parts: last)
    kept.below("lightrft_visual.plugins")("of a plug-in that was deleted", "deleted.hook:build", "")
    kept.below("nowhere")("of another kind of run", "hook:build", "", kinds=("sft",))
    kept.register("first", about="")(lambda parts: Adds(f"{parts.word} 1"))
    kept.register("unasked", about="")(lambda parts: None)
    kept.register("drawing only", about="", kinds=("diffusion",))(lambda parts: Adds("of another kind of run"))
    kept.register("second", about="", kinds=("vl",))(lambda parts: Adds(f"{parts.word} 2"))
    hooks = Hooks()
    hooks.build(
        SimpleNamespace(kind="vl", word="own", config=None), [type("Own", (Adds,), {"last": deque()})("user's")]
    )
    assert hooks.on_scores([]) == ["own 1", "own 2", "user's", "the last"]


class Kept:
    """Counts; known by the name of its class."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def test_each_hook_finds_its_own_state_also_among_others_of_its_name():
    hooks, again = [Kept(1), Kept(2), Kept(3)], [Kept(), Kept(), Kept()]
    hooks[0].name = hooks[1].name = again[0].name = again[1].name = "kept"
    saved = Hooks([hooks[0], Adds("stateless"), *hooks[1:]]).state_dict()
    assert saved == {"kept": {"count": 1}, "kept_2": {"count": 2}, "Kept": {"count": 3}}
    Hooks(again).load_state_dict(saved)
    assert [each.count for each in again] == [1, 2, 3]


def test_a_state_that_was_taken_stays_while_the_hook_goes_on():
    steps, weights = {"seen": [1], "by label": {"a": [2]}}, torch.ones(2)
    hook = SimpleNamespace(name="counts", state_dict=lambda: {**steps, "average": weights})
    taken = Hooks([hook]).state_dict()["counts"]
    steps["seen"].append(3), steps["by label"]["a"].append(4)
    assert taken["seen"] == [1] and taken["by label"] == {"a": [2]} and taken["average"] is weights


@pytest.mark.parametrize("state", [{"seen": {1, 2}}, {"at": [object()]}])
def test_a_state_that_no_checkpoint_can_keep_is_refused_by_the_name_of_its_hook(state):
    hooks = Hooks([Kept(1), SimpleNamespace(name="mine", state_dict=lambda: state)])
    with pytest.raises(ConfigError, match=r"state_dict of hook mine\.(seen|at\[0\]): a (set|object) cannot be saved"):
        hooks.check_states()
    Hooks([Kept(1), Adds("stateless")]).check_states()
    with pytest.raises(ConfigError, match="state_dict of estimator mine"):
        check_state(SimpleNamespace(state_dict=lambda: state), "estimator mine")


def test_a_key_that_a_hook_misses_in_its_state_is_told_by_the_hooks_name():
    with pytest.raises(CheckpointError, match="load_state_dict of hook Kept asks for 'count'.* holds other"):
        Hooks([Kept()]).load_state_dict({"Kept": {"other": 1}})


def test_weights_of_all_hooks_are_lent_together_and_given_back_in_turn():
    told = []

    @contextmanager
    def lent(name):
        told.append(f"{name} lent")
        yield
        told.append(f"{name} back")

    def lends(name, purpose):
        return SimpleNamespace(weights_for=lambda asked: lent(name) if asked == purpose else None)

    hooks = Hooks([lends("a", "evaluation"), lends("b", "export"), lends("c", "evaluation"), StepHook()])
    with hooks.weights_for("evaluation"):
        told.append("evaluated")
    assert told == ["a lent", "c lent", "evaluated", "c back", "a back"]
    assert Hooks([StepHook()]).weights_for("export") is None


class Reports(StepHook):
    def __init__(self, **numbers):
        self.numbers, self.closed = numbers, False

    def metrics(self):
        return self.numbers

    def close(self):
        self.closed = True


@pytest.fixture
def of_a_step() -> MetricsAccumulator:
    metrics = MetricsAccumulator()
    metrics.add("loss", 1.0)
    metrics.add_moments("reward", torch.ones(2))
    return metrics


def test_numbers_of_all_hooks_are_reported_and_all_are_closed(of_a_step):
    hooks = [Reports(a=1.0), StepHook(), Reports(b=torch.tensor(2.0))]
    Hooks(hooks).report(of_a_step)
    assert of_a_step.reduce() == {"loss": 1.0, "a": 1.0, "b": 2.0, "reward_mean": 1.0, "reward_std": 0.0}
    Hooks(hooks).close()
    assert hooks[0].closed and hooks[2].closed


def test_a_stop_while_numbers_are_asked_waits_and_the_other_hooks_numbers_are_reported(of_a_step):
    ends = SimpleNamespace(metrics=Ends()._ends)
    hooks = Hooks([Reports(a=1.0), ends, Reports(b=2.0)])
    hooks.report(of_a_step)
    assert hooks.stopping.reason == "enough" and of_a_step.reduce().items() >= {"a": 1.0, "b": 2.0}.items()


@pytest.mark.parametrize(
    "numbers, told",
    [({name: 3.0}, f" gives {name}, a metric that there is") for name in ("loss", "reward_mean", "time_step", "twice")]
    + [({"a": none}, ": a is no number") for none in (None, "much", [1.0, 2.0], torch.ones(2), 10**400)],
)
def test_number_that_cannot_be_reported_is_refused(of_a_step, numbers, told):
    with pytest.raises(ConfigError, match=f"Reports.metrics{told}"):
        Hooks([Reports(twice=1.0), Reports(**numbers)]).report(of_a_step)


def test_numbers_that_are_no_mapping_are_refused_by_the_hooks_name(of_a_step):
    lists = Reports()
    lists.numbers = [1]
    with pytest.raises(ConfigError, match=r"Reports.metrics returned a list, not numbers by name"):
        Hooks([lists]).report(of_a_step)


def test_metrics_that_a_hook_writes_into_stay_as_they_are_for_the_others():
    seen, metrics = [], {"reward_mean": 1.0}
    writes = SimpleNamespace(on_metrics=lambda given: given.update(reward_mean=5.0))
    Hooks([writes, SimpleNamespace(on_metrics=seen.append)]).on_metrics(metrics)
    assert seen == [metrics] == [{"reward_mean": 1.0}]


@pytest.mark.parametrize(
    "schema, build",
    [(RunConfig, build_trainer), (SFTRunConfig, build_supervised), (DiffusionRunConfig, build_diffusion_trainer)],
)
def test_what_no_moment_would_call_is_refused_before_anything_loads(schema, build):
    with pytest.raises(ConfigError, match="no hook is object; one has some of the methods setup, on_prompts"):
        build(schema(), [StepHook(), object()])


class Follows(StepHook):
    """Its moment is replaced; the others are not its own."""

    def on_scores(self, rollouts):
        return rollouts


OFFLINE, REWARD_FL = DiffusionRunConfig(), DiffusionRunConfig()
OFFLINE.data.pair_data, REWARD_FL.algorithm.diffusion_algorithm = "pairs.jsonl", "reward_fl"


@pytest.mark.parametrize(
    "config, silent",
    [
        (RunConfig(), ()),
        (DiffusionRunConfig(), ()),
        (REWARD_FL, ["on_buffer"]),
        (OFFLINE, ["on_prompts", "on_scores"]),
        (SFTRunConfig(), ["on_prompts", "on_scores", "on_buffer"]),
    ],
)
def test_a_hook_is_told_of_moments_that_its_run_never_calls(caplog, config, silent):
    hooks = [StepHook(), Reports(), Follows(), SimpleNamespace(on_prompts=print, on_buffer=Adds("a").on_buffer)]
    Hooks().build(SimpleNamespace(config=config, kind="none"), hooks)
    assert [text.split("this run has no ")[1].split(",")[0] for text in caplog.messages] == [*silent]


def test_a_method_that_no_run_ever_calls_is_told_of(caplog):
    class Ends(TrainerCallback):
        on_policy = True

        def on_step_end(self, *given, **named):
            """Transformers', and so is `on_log`, which stays theirs."""

        def on_metrics(self, metrics):
            return metrics

    Hooks().build(SimpleNamespace(config=RunConfig(), kind="none"), [Reports(), Ends()])
    assert [text.partition(";")[0] for text in caplog.messages] == ["Ends: a run never calls on_step_end"]


@pytest.mark.parametrize(("kind", "built"), [("vl", ["own"]), ("diffusion", ["own"]), ("sft", [])])
def test_a_hook_without_kinds_follows_rollouts_and_is_told_of_in_other_runs(monkeypatch, caplog, kind, built):
    kept = registry.Registry("hook", kinds.Hook, "parts")
    monkeypatch.setattr(registry, "hooks", kept)
    kept.register("own", about="")(lambda parts: Adds("own"))
    hooks = Hooks()
    hooks.build(SimpleNamespace(kind=kind, config=None))
    assert hooks.on_scores([]) == built
    assert ("not built: own" in caplog.text) == (not built)


@pytest.mark.parametrize("name", ["loss_terms", "policy_masks"])
@pytest.mark.parametrize("kind", ["vl", "diffusion", "sft"])
def test_what_vision_language_runs_alone_read_is_told_of_in_other_runs(monkeypatch, caplog, name, kind):
    kept = getattr(registry, name)
    monkeypatch.setattr(kept, "_entries", dict(kept._entries))
    kept.register("own", about="")(lambda *given: None)
    monkeypatch.setattr(registry.hooks, "_entries", {})
    Hooks().build(SimpleNamespace(kind=kind, config=None))
    told = f"of another kind of run than {kind}, and not built: own"
    assert caplog.messages == ([] if kind == "vl" else [told])


@pytest.mark.parametrize("shipped", [True, False])
def test_only_hooks_of_a_plugin_are_asked_whether_the_run_calls_them(monkeypatch, caplog, shipped):
    kept = registry.Registry("hook", kinds.Hook, "parts")
    monkeypatch.setattr(registry, "hooks", kept)
    monkeypatch.setattr(kinds.Hook, "shipped", shipped)
    kept.register("own", about="", kinds=("sft",))(lambda parts: Follows())
    Hooks().build(SimpleNamespace(kind="sft", config=SFTRunConfig()))
    assert ("Follows.on_scores is never called" in caplog.text) == (not shipped)
