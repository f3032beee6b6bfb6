"""How much responses depend on their images, measured in forwards of a micro-batch."""

import pytest
import torch

from lightrft_visual.experience.rollouts import PromptFeatures, Rollout, ScoringRule
from lightrft_visual.experience.vision import VisionTensors
from lightrft_visual.models.vlm.actor import ActorOutput
from lightrft_visual.observe.metrics import MetricsAccumulator
from lightrft_visual.runtime import collectives
from lightrft_visual.trainer.features.image_dependence import MOVED, PROMPTS, ImageDependenceHook


def rollout(number: int) -> Rollout:
    """Prompts with an even number have a label of their own."""
    vision = VisionTensors.of(pixel_values=torch.ones(4, 8), image_grid_thw=torch.tensor([[1, 2, 2]]))
    label = "odd" if number % 2 else "even"
    prompt = PromptFeatures("p", [1], number, label=label, images=["image"], vision=vision)
    return Rollout(prompt, [3] * (number % 3 + 1), None, "x", False, sample_id=number)


def measured(micro_batch_size: int, prompts: int) -> tuple[list[int], dict[str, float]]:
    """(samples of each forward, the metrics); of every prompt with an even number the first token depends on it."""
    sizes: list[int] = []

    def actor(inputs, rule):
        sizes.append(len(inputs.action_mask))
        scores = torch.zeros(inputs.action_mask.shape)
        hidden = slice(len(scores) // 2, None)
        scores[hidden, 0] = 2 * MOVED * (inputs.group_ids[hidden] % 2 == 0)
        return ActorOutput(scores, torch.zeros_like(scores))

    device = torch.device("cpu")
    hook = ImageDependenceHook(actor, ScoringRule(), 0, device, micro_batch_size, 1, {"odd", "even"})
    metrics = MetricsAccumulator()
    hook.measure([rollout(number) for number in range(prompts)], metrics)
    return sizes, metrics.reduce()


@pytest.mark.parametrize("size, forwards", [(1, [2] * 16), (6, [6] * 5 + [2]), (32, [32])])
def test_no_forward_has_more_samples_than_a_micro_batch(size, forwards):
    sizes, found = measured(size, PROMPTS + 3)
    assert sizes == forwards and found == measured(2 * PROMPTS, PROMPTS)[1]
    assert found["image_dependence_odd"] == 0 < found["image_dependence"] < found["image_dependence_even"]


def test_a_rank_with_fewer_prompts_makes_as_many_forwards_which_it_does_not_count(monkeypatch):
    alone = measured(4, 3)
    monkeypatch.setattr(collectives, "all_reduce_max", lambda own: torch.full_like(own, 3.0))
    sizes, found = measured(4, 3)
    assert alone[0] == [4, 2] and sizes == [4, 2, 4] and found == alone[1]
