"""Images of a step's prompts: other hooks see them, what people are shown keeps them, all others are let go of."""

from types import SimpleNamespace

from PIL import Image

from lightrft_visual.config import kinds, registry
from lightrft_visual.config.vl import RunConfig
from lightrft_visual.experience.rollouts import PromptFeatures, Rollout, Rollouts
from lightrft_visual.trainer.features import records
from lightrft_visual.trainer.hooks import Hooks, StepData
from lightrft_visual.trainer.vl.parts import VLParts


def test_a_hook_sees_images_and_what_is_shown_has_them_whatever_it_makes_of_the_rewards(monkeypatch):
    samples, kept, widths, config = 12, 3, [], RunConfig()
    config.output.num_trajectories_to_save = kept

    def turned(rollouts):
        for each in rollouts:
            each.reward = -each.reward
        return rollouts

    def seen(rollouts):
        widths.extend(each.prompt.images[0].width for each in rollouts)
        return turned(rollouts)

    monkeypatch.setattr(registry, "hooks", registry.Registry("hook", kinds.Hook))
    registry.hooks.register("records", about="")(records.build)
    own = SimpleNamespace(on_scores=seen, on_experience=lambda step: turned(step.rollouts) and step)
    hooks = Hooks()
    hooks.build(SimpleNamespace(config=config, kind="vl", records_of=VLParts.records_of), [own])
    hooks.setup(SimpleNamespace(step=lambda: 3))
    prompts = [PromptFeatures("what?", [1], n, images=[Image.new("RGB", (8 + n, 8))]) for n in range(samples)]
    made = [Rollout(each, [5], [-0.5], "a", False, sample_id=n, reward=float(n)) for n, each in enumerate(prompts)]
    found = hooks.on_experience(StepData([], hooks.on_scores(Rollouts(made)))).records
    assert widths == [8 + n for n in range(samples)]
    assert len(found) == kept and all(image is not None for record in found for image in record["images"])
    assert {record["sample_id"] for record in found} > {0, samples - 1}
    assert sum(prompt.images != [None] for prompt in prompts) == kept
