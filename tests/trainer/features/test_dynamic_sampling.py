"""Dynamic sampling around a maker: what is drawn again, and how the numbers of rounds make those of a step."""

import weakref
from types import SimpleNamespace

import torch
from tiny_models import actor_of, checkpoint_of, turn

from lightrft_visual.algorithms.kl import FixedKLController
from lightrft_visual.experience.rollouts import PromptBatch, PromptFeatures, Rollout, Rollouts, SamplingSettings
from lightrft_visual.observe.metrics import MetricsAccumulator
from lightrft_visual.rewards.batch import RewardOutput
from lightrft_visual.trainer.fast_exp_maker import FastExperienceMaker, MakerSettings
from lightrft_visual.trainer.features.dynamic_sampling import ResamplingMaker, over_rounds
from lightrft_visual.trainer.hooks import Hooks


def test_equal_groups_are_drawn_again_and_hooks_see_the_scores_of_what_is_kept(tmp_path):
    rounds, called = [], []

    def equal_at_first(completions):
        rounds.append(len(completions))
        return [1.0] * len(completions) if len(rounds) < 3 else [float(place) for place in range(len(completions))]

    def noting(name):
        return lambda rollouts: called.append(name) or rollouts

    checkpoint, batch = checkpoint_of(tmp_path, "qwen2"), PromptBatch.of([turn("how many?"), turn("where?")])
    hook = SimpleNamespace(on_rollouts=noting("rollouts"), on_scores=noting("scores"))
    settings = MakerSettings(sampling=SamplingSettings(n=2, max_new_tokens=4), hooks=Hooks([hook]))
    one = FastExperienceMaker(
        actor_of(checkpoint), None, None, None, checkpoint.tokenizer, 64, FixedKLController(0.0),
        SimpleNamespace(device=torch.device("cpu")), reward_fn=equal_at_first, settings=settings,
    )  # fmt: skip
    maker = ResamplingMaker(one.maker, tries=4, more=lambda: batch)
    made = maker.make_experience(maker.score(maker.generate(batch)))
    assert rounds == [4, 4, 4] and made.rollouts.counts["dynamic_rounds"] == 3
    assert called == ["rollouts"] * 3 + ["scores"]
    assert [each.reward for each in made.rollouts] == [0.0, 1.0, 2.0, 3.0]
    assert sum(len(each.sequences) for each in made.batches) == 4
    assert all((each.advantages[:, 0] != 0).all() for each in made.batches)


def test_rollouts_of_earlier_rounds_that_are_out_leave_memory_before_the_next_round():
    drawn, held = [], []

    def generate(batch, sampling, sleep):
        held.append(sum(rollout() is not None for rollout in drawn))
        prompts = [PromptFeatures("", [1], group_id=number) for number in range(2 * len(held), 2 * len(held) + 2)]
        made = [Rollout(each, [2], None, "", False, 0, reward=0.5) for each in prompts for _ in range(3)]
        drawn.extend(map(weakref.ref, made))
        return Rollouts(made, SamplingSettings(n=len(held)), counts={"reward/failures": 1.0})

    maker = SimpleNamespace(generate=generate, judge=lambda rollouts: None, sleep=lambda: None)
    kept = ResamplingMaker(maker, tries=5, more=lambda: [None, None]).generate([None, None])
    assert held == [0, 6, 6, 6, 6]
    assert len(kept) == 6 and kept.sampling == SamplingSettings(n=1) and kept.counts["reward/failures"] == 5.0


def test_rounds_of_sampling_make_one_step():
    rounds = [
        {"reward/a/failures": 1.0, "reward/invalid_share": 0.5, "reward/time": 2.0},
        {"reward/a/failures": 2.0, "reward/invalid_share": 0.0, "reward/time": 3.0, "reward/b/not_applicable": 4.0},
    ]
    step = over_rounds(rounds)
    assert step == {
        "reward/a/failures": 3, "reward/invalid_share": 0.25, "reward/time": 5, "reward/b/not_applicable": 4,
    }  # fmt: skip
    metrics = MetricsAccumulator()
    metrics.add_mean("reward/a", torch.tensor([1.0, 3.0]))
    metrics.add_numbers(step)
    assert metrics.reduce() == {**step, "reward/a": 2.0}
    assert RewardOutput(torch.ones(1), {"a": torch.ones(1)}, torch.ones(1).bool(), {"reward/a": 1.0}).counts == {}
