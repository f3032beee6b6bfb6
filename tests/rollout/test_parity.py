"""The parity gate with engines that are wrong in one known way: what it measures, and what it says."""

import math

import pytest
import torch
from engine_rig import Rig, hf_rig
from tiny_models import checkpoint_of, mixed_prompts, text_prompts

from lightrft_visual.errors import NonFiniteError, RolloutError
from lightrft_visual.rollout.parity import RolloutCheck, log_prob_difference


class Wrong:
    """The transformers engine with log-probs shifted by `shift` for the prompts that `when` picks, until `cure`."""

    lacks_weights = False

    def __init__(self, engine, shift, cure="never", when=lambda request: True):
        self.engine, self.shift, self.cure, self.when = engine, shift, cure, when

    def generate(self, requests, settings):
        made = self.engine.generate(requests, settings)
        for request, completions in zip(requests, made):
            for completion in completions if self.when(request) else ():
                completion.log_probs = [each + self.shift for each in completion.log_probs]
        return made

    def wake(self):
        pass

    def reset_caches(self):
        self.shift = 0.0 if self.cure == "reset" else self.shift

    def update_weights(self, named_tensors):
        self.shift = 0.0 if self.cure == "reload" else self.shift


@pytest.fixture(scope="module")
def rig(root):
    return hf_rig(checkpoint_of(root, "qwen2_5_vl"))


def gate_of(rig, **wrong):
    other = Rig(rig.checkpoint, rig.actor, Wrong(rig.engine, **wrong))
    return other.gate()


def test_it_gives_the_largest_difference_within_the_tolerance(rig):
    assert gate_of(rig, shift=0.0).check(mixed_prompts()) <= 1e-5
    assert gate_of(rig, shift=1.0).check(text_prompts().select([])) == 0.0
    assert gate_of(rig, shift=5e-6).check(text_prompts()) == pytest.approx(5e-6, abs=3e-6)


@pytest.mark.parametrize(
    ("wrong", "prompts", "cause"),
    [
        ({"cure": "reset"}, mixed_prompts, "stale cache"),
        ({"cure": "reload"}, mixed_prompts, "stale weight"),
        ({"when": lambda request: request.images or request.videos}, mixed_prompts, "positions or image features"),
        ({}, mixed_prompts, "dtype"),
        ({}, text_prompts, "dtype .*, or positions"),
    ],
)
def test_the_likely_cause_is_named(rig, wrong, prompts, cause):
    with pytest.raises(RolloutError, match=rf"differ by 0\.5.*Likely cause: {cause}"):
        gate_of(rig, shift=0.5, **wrong).check(prompts())


def test_the_figure_of_a_rollout_is_held_against_the_same_tolerance(rig):
    gate = rig.gate()
    gate.check_rollouts(1e-5)
    for difference in (1.1e-5, math.inf, math.nan):
        with pytest.raises(RolloutError, match="what was sampled is not what would be trained"):
            gate.check_rollouts(difference)


def test_the_cause_of_a_rollouts_difference_is_looked_for(rig):
    gate, asleep, broken = (gate_of(rig, shift=0.5, cure="reload") for _ in range(3))
    asleep.engine.lacks_weights = True  # it gets them for the search
    broken.stage = None
    for each, told in (
        (gate, "would be trained. Likely cause: stale weight"),
        (gate, "Likely cause: numeric"),  # cured: a probe shows nothing any more
        (asleep, "Likely cause: stale weight or cache"),
        (broken, "what would be trained. Likely cause: unknown, the search failed"),
    ):
        with pytest.raises(RolloutError, match=told):
            each.check_rollouts(0.5, text_prompts())


def test_a_rollout_is_held_against_the_gate_as_a_whole(rig):
    ours, theirs, mask = torch.zeros(1, 2), torch.tensor([[1e-6, 2e-6]]), torch.ones(1, 2, dtype=torch.bool)
    check = RolloutCheck(rig.gate(), None)
    check.add(ours, theirs, mask)
    check.add(ours, None, mask)
    check.settle()
    assert check.compared and check.largest == check.difference == pytest.approx(2e-6)
    check.add(ours, theirs + 1, mask)
    with pytest.raises(RolloutError, match="up to 1"):
        check.settle()
    silent = RolloutCheck(None, None)
    silent.add(ours, theirs + 1, mask)
    silent.settle()
    assert silent.largest == pytest.approx(1.0, abs=1e-5) and not RolloutCheck(None, None).compared


def test_a_mean_is_that_of_all_tokens_however_they_are_cut(rig):
    """One rare token in a micro-batch of a short answer is no reason to stop a run in bfloat16."""
    gate = rig.gate(tolerance=0.05)
    gate.averages = True
    ours, theirs = torch.zeros(8, 4), torch.zeros(8, 4)
    theirs[0, 0], mask = 0.4, torch.ones(8, 4, dtype=torch.bool)
    for rows in (1, 8):
        check = RolloutCheck(gate, None)
        for start in range(0, 8, rows):
            part = slice(start, start + rows)
            check.add(ours[part], theirs[part], mask[part])
        check.settle()
        assert check.difference == pytest.approx(0.4 / 32) and check.largest == pytest.approx(0.4)
    check.add(ours, theirs + 0.1, mask)
    with pytest.raises(RolloutError, match="what was sampled is not what would be trained"):
        check.settle()
    broken = RolloutCheck(gate, None)
    broken.add(ours, torch.full_like(theirs, math.nan), mask)
    with pytest.raises(RolloutError, match="by inf in the mean"):
        broken.settle()


def test_a_reference_that_is_not_the_starting_policy_is_found_before_the_first_step(rig):
    gate = rig.gate()
    gate.check_reference(rig.score, mixed_prompts())
    gate.check_reference(rig.score, mixed_prompts().select([]))
    with pytest.raises(RolloutError, match=r"not the starting policy.* differ by 0\.01 in the mean"):
        gate.check_reference(lambda inputs, rule: rig.score(inputs, rule) - 0.01, mixed_prompts())


def test_the_engine_sleeps_while_the_reference_is_compared_and_has_its_weights_again(rig):
    gate, told = gate_of(rig, shift=0.0), []
    engine = gate.engine
    gate.reload = lambda: told.append("weights")

    def sleep(keep_weights):
        told.append("asleep")
        engine.lacks_weights = not keep_weights

    engine.sleep, engine.wake = sleep, lambda: told.append("awake")

    def score(inputs, rule):
        told.append("scores")
        return rig.score(inputs, rule)

    gate.score = score
    gate.check_reference(score, text_prompts())
    assert told == ["asleep", "scores", "scores", "awake", "weights"]


def test_differences_under_a_mask():
    ours, theirs = torch.tensor([[-1.0, -2.0, 9.0]]), torch.tensor([[-1.5, -2.1, 0.0]])
    mask = torch.tensor([[True, True, False]])
    for mean, wanted in ((False, 0.5), (True, 0.3)):
        assert log_prob_difference(ours, theirs, mask, mean) == pytest.approx(wanted)
        assert log_prob_difference(ours, theirs, torch.zeros_like(mask), mean) == 0.0
        for bad in (math.nan, -math.inf):
            assert log_prob_difference(ours, torch.full_like(theirs, bad), mask, mean) == math.inf


def test_a_policy_that_has_diverged_is_said_to_have(rig):
    gate = rig.gate()
    gate.score = lambda inputs, rule: rig.score(inputs, rule) * math.nan
    for check in (lambda: gate.check(text_prompts()), lambda: gate.check_rollouts(0.5, text_prompts())):
        with pytest.raises(NonFiniteError, match=r"log-probs hold NaN.*diverged.*--actor_learning_rate"):
            check()


def test_rollouts_scored_by_a_policy_that_has_diverged_say_so(rig):
    ours, theirs, mask = torch.zeros(1, 3), torch.zeros(1, 3), torch.tensor([[True, True, False]])
    check = RolloutCheck(rig.gate(), None)
    check.add(ours.clone().index_fill_(1, torch.tensor([2]), math.nan), theirs, mask)  # outside of the mask
    check.settle()
    check.add(ours * math.nan, theirs, mask)
    with pytest.raises(NonFiniteError, match="this rollout hold NaN"):
        check.settle()
