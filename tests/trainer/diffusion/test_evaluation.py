"""Means of an evaluation over ranks that have met other rewards."""

import math
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from lightrft_visual.config.diffusion import DiffusionRunConfig, DiffusionSamplingConfig
from lightrft_visual.data.prompts import PromptRow
from lightrft_visual.experience.diffusion_sampling import SamplingConfig
from lightrft_visual.observe import metrics
from lightrft_visual.rewards.batch import RewardOutput
from lightrft_visual.trainer.diffusion import build, evaluation
from lightrft_visual.trainer.diffusion.stages import Sampled, drawing_batch
from lightrft_visual.trainer.features.conditions import held_out


def test_ranks_whose_prompts_have_other_rewards_meet_in_one_collective(monkeypatch):
    """By a recipe with labels, a rank of few prompts may score what the other one does not, and in another order."""
    ranks = [
        [(0, {"eval_reward": 1.0, "text": math.nan}), (2, {"eval_reward": 2.0, "text": 4.0})],
        [(1, {"shape": 6.0, "eval_reward": 3.0})],
    ]
    monkeypatch.setattr(metrics, "all_gather_object", lambda mine: ranks)
    assert [metrics.means_over_ranks(own) for own in ranks] == [{"eval_reward": 2.0, "text": 4.0, "shape": 6.0}] * 2


class Rows(list):
    rows = property(list)


def evaluated(reward: torch.Tensor, labels: list[str], **components: torch.Tensor) -> dict[str, float]:
    """Of prompts that have these labels and rewards."""
    prompts = Rows(PromptRow(label, [], label=label) for label in labels)
    rewards = SimpleNamespace(score_media=lambda *asked, **more: RewardOutput(reward, components, reward.isfinite()))
    sampled = lambda requests, step, purpose: [Sampled(None, {}, torch.rand(len(labels), 3, 8, 8), 0)]  # noqa: E731
    return evaluation.DiffusionEvaluation(SimpleNamespace(draw=sampled), prompts, rewards, 0).run(1)


def test_an_evaluation_draws_each_prompt_from_noise_of_its_own_as_that_of_an_exported_model_does():
    policy = SimpleNamespace(latent_shape=lambda *size: (4, 4, 4), device=torch.device("cpu"))
    requests = drawing_batch([PromptRow("a", []), PromptRow("a", [])], [0, 1], first=0)
    config = DiffusionRunConfig(sampling=DiffusionSamplingConfig(same_latent=True))
    found = build._evaluation(config, SimpleNamespace(policy=policy), Rows(), None, None)
    assert found.sampling.batch(requests, {}, 0, "eval").latents is None and config.sampling.same_latent


def test_drift_is_told_against_what_the_base_drew_for_the_same_prompts_noise_and_sizes():
    def drawn(requests, step, purpose):
        return [Sampled(None, {}, torch.full((2, 3, 8, 8), 0.5 * step), 0)]

    rewards = SimpleNamespace(score_media=lambda *asked, **more: RewardOutput(torch.ones(2), {}, torch.ones(2).bool()))
    settings, sampler = DiffusionSamplingConfig(), SimpleNamespace(config=SamplingConfig(4))
    sampling = SimpleNamespace(draw=drawn, settings=settings, sampler=sampler, run_seed=1)
    red, again, blue = (Image.new("RGB", (2, 2), colour) for colour in ("red", "red", "blue"))

    def evaluation_of(text, image):
        rows = Rows([PromptRow("a", []), PromptRow(text, [image])])
        return evaluation.DiffusionEvaluation(sampling, rows, rewards, 0)

    first = evaluation_of("b", red)
    first.run(0)
    for text, image, compared in (("b", again, True), ("c", again, False), ("b", blue, False)):
        resumed = evaluation_of(text, image)
        resumed.base, resumed.base_identity = first.base, first.base_identity
        assert ("eval_drift" in resumed.run(1)) is compared
        assert (held_out(resumed) == held_out(first)) is compared


@pytest.mark.parametrize("colour", ["red", "blue"])
def test_edits_of_one_instruction_are_a_group_where_they_start_from_one_image(colour):
    rewards = SimpleNamespace(score_media=lambda *asked, **more: RewardOutput(torch.ones(2), {}, torch.ones(2).bool()))
    sampled = lambda requests, step, purpose: [Sampled(None, {}, torch.rand(2, 3, 8, 8), 0)]  # noqa: E731
    rows = Rows(PromptRow("a", [Image.new("RGB", (2, 2), each)]) for each in ("red", colour))
    gold = evaluation.DrawingGold(rewards)
    found = evaluation.DiffusionEvaluation(SimpleNamespace(draw=sampled), rows, rewards, 0, gold).run(1)
    assert ("eval_image_diversity" in found, "eval_diversity" in found) == (colour == "red",) * 2


@pytest.mark.parametrize(("own", "plays_at", "told"), [(30.0, 16.0, 30.0), (None, 16.0, 16.0), (None, None, None)])
def test_videos_of_an_evaluation_are_shown_at_the_rate_of_their_model(own, plays_at, told):
    def sampled(requests, step, purpose):
        return [Sampled(None, {}, torch.rand(2, 3, 5, 8, 8), 0)]

    rewards = SimpleNamespace(score_media=lambda *asked, **more: RewardOutput(torch.ones(2), {}, torch.ones(2).bool()))
    family = SimpleNamespace(frame_rate=own, plays_at=plays_at)
    sampling = SimpleNamespace(draw=sampled, model=SimpleNamespace(family=family))
    found = evaluation.DiffusionEvaluation(sampling, Rows([PromptRow("a", [])] * 2), rewards, 1).run(1)
    assert [record.get("fps") for record in found.sheet] == [told] * 2


@pytest.mark.parametrize(("saved", "kept"), [(True, 5), (False, 0)])
def test_an_evaluation_makes_records_for_files_where_these_are_asked_for_and_a_contact_sheet_anyway(saved, kept):
    config, policy = DiffusionRunConfig(), SimpleNamespace(latent_shape=lambda *size: (4, 4, 4), device="cpu")
    config.output.save_trajectories, config.output.num_trajectories_to_save = saved, 5
    found = build._evaluation(config, SimpleNamespace(policy=policy), Rows(), None, None)
    assert found.records_to_keep == kept


@pytest.mark.parametrize(("scores", "lost"), [([1.0, 3.0, 2.0], None), ([1.0, math.nan, 2.0], 1 / 3)])
def test_prompts_without_a_reward_are_counted_beside_the_mean_that_leaves_them_out(scores, lost):
    found = evaluated(torch.tensor(scores), ["a"] * 3)
    assert found.get("eval_invalid_share") == (None if lost is None else pytest.approx(lost))
    assert found["eval_reward"] == (2.0 if lost is None else 1.5)


def test_parts_of_a_reward_that_no_prompt_has_are_left_out_of_an_evaluation():
    found = evaluated(torch.ones(2), ["a"] * 2, colors=torch.tensor([1.0, math.nan]), two=torch.full((2,), math.nan))
    assert {name for name in found if name.startswith("validation/")} == {"validation/reward/colors"}


@pytest.mark.parametrize("scored", [60, 2])
def test_every_label_counts_alike_in_their_mean_and_24_have_columns(scored):
    """30 labels: the first of three prompts, the others of one, so that only the first has a column."""
    reward = torch.tensor([3.0] * 3 + [1.0] * 29)
    reward[scored:] = math.nan
    found = evaluated(reward, ["often"] * 3 + [f"once {number:02}" for number in range(29)])
    columns = [name for name in found if name.startswith("eval_reward_")]
    assert columns == ["eval_reward_often", "eval_reward_label_mean"]
    wanted = (3 + 29) / 30 if scored > 32 else math.nan
    assert found["eval_reward_label_mean"] == pytest.approx(wanted, nan_ok=True)
