"""Samples beside themselves with hidden image patches: what is hidden, and that one forward equals two."""

from dataclasses import replace

import pytest
import torch
from stock_families import PLAIN, STOCK, stock_checkpoint, stock_prompts
from tiny_models import actor_of, checkpoint_of, inputs_of, picture, prompts_for, rollouts_of

from lightrft_visual.experience.rollouts import PromptBatch, ScoringRule
from lightrft_visual.experience.vision import PATCHES, VisionTensors
from lightrft_visual.models.vlm.masked_images import HIDDEN, beside_hidden, halves, hide_patches
from lightrft_visual.rollout.multimodal import MultimodalDataProcessor
from lightrft_visual.runtime.host_copies import on_host


def test_a_share_of_the_patches_is_hidden_alike_for_samples_of_one_prompt():
    shown = {"pixel_values": torch.ones(20, 6), "image_grid_thw": torch.tensor([[1, 4, 5]])}
    other = {"pixel_values": torch.ones(20, 6), "image_grid_thw": torch.tensor([[1, 4, 5]])}
    hidden = hide_patches(VisionTensors([shown, shown, {}, other]), 0.6, [1, 1, 2, 3])
    rows = hidden.samples[0]["pixel_values"].sum(dim=1)
    assert sorted(rows.tolist()) == [0.0] * 12 + [6.0] * 8
    assert hidden.samples[1] is hidden.samples[0] and hidden.samples[2] == {}
    assert not torch.equal(hidden.samples[3]["pixel_values"], hidden.samples[0]["pixel_values"])
    assert torch.equal(hidden.samples[0]["image_grid_thw"], shown["image_grid_thw"])
    assert shown["pixel_values"].min() == 1
    again = hide_patches(VisionTensors([shown]), 0.6, [1])
    assert torch.equal(again.samples[0]["pixel_values"], hidden.samples[0]["pixel_values"])


def test_whole_images_lose_squares_of_fourteen_pixels():
    images = VisionTensors([{"pixel_values": torch.ones(2, 3, 30, 28)}])
    hidden, everything = (hide_patches(images, share, [0]).samples[0]["pixel_values"] for share in (0.5, 1.0))
    squares = hidden[:, :, :28].reshape(2, 3, 2, 14, 2, 14)
    assert torch.equal(squares.amin(dim=(1, 3, 5)), squares.amax(dim=(1, 3, 5)))
    assert 0 < hidden.mean() < 1 and torch.equal(everything, torch.full_like(everything, HIDDEN))


@pytest.mark.parametrize(
    ("name", "patch"), [("gemma4", 3 * 16 * 16), ("lfm2_vl", 3 * 8 * 8), ("minicpmv4_6", 3 * 14 * 14)]
)
def test_patches_of_each_image_are_hidden_whole(name, patch):
    processor = (STOCK | PLAIN)[name]()[1]
    data = MultimodalDataProcessor(processor.tokenizer, processor, 2048)
    text = data.family.placeholders(processor)["image"]
    (shown,) = data.features(PromptBatch.of([text], [[picture(0, 90, 60)]]))[0].vision.samples
    hidden = hide_patches(VisionTensors([shown]), 0.6, [0]).samples[0]
    before, after = (each["pixel_values"].reshape(-1, patch) for each in (shown, hidden))
    gone = ((after == 0) | (after == HIDDEN)).all(1)
    assert gone.sum() >= round(0.6 * len(after)) and torch.equal(after[~gone], before[~gone])


@pytest.mark.parametrize("packed", [False, True])
def test_ids_masks_and_pixels_of_both_are_known_on_the_host_without_their_device(root, packed):
    """The device is `meta`, of which nothing can be read."""
    checkpoint = checkpoint_of(root, "qwen2_5_vl")
    rollouts = rollouts_of(checkpoint, prompts_for(checkpoint, videos=False))
    inputs = inputs_of(checkpoint, rollouts, packed=packed)
    wanted, both = beside_hidden(inputs, 0.5, 1), beside_hidden(inputs.to("meta"), 0.5, 1)
    for name in ("sequences", "attention_mask", "action_mask", "group_ids"):
        moved = getattr(both, name)
        assert moved is None or moved.device.type == "meta" and torch.equal(on_host(moved), getattr(wanted, name)), name
    for moved, plain in zip(both.vision.parts, wanted.vision.parts, strict=True):
        for name in PATCHES.keys() & plain.keys():
            assert moved[name].device.type == "meta" and torch.equal(on_host(moved[name]), plain[name])
    assert any(PATCHES.keys() & part.keys() for part in wanted.vision.parts)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "internvl"])
def test_one_forward_of_both_equals_two(root, kind, packed):
    checkpoint = checkpoint_of(root, kind)
    actor, rule = actor_of(checkpoint), ScoringRule()
    rollouts = rollouts_of(checkpoint, prompts_for(checkpoint, videos=False))
    inputs = inputs_of(checkpoint, rollouts, packed)
    shown, hidden = halves(actor(beside_hidden(inputs, 1.0, seed=0), rule))
    alone = actor(inputs, rule)
    torch.testing.assert_close(shown.log_probs, alone.log_probs, atol=1e-5, rtol=0)
    torch.testing.assert_close(shown.entropy, alone.entropy, atol=1e-5, rtol=0)
    blind = hide_patches(inputs.vision, 1.0, [0] * len(inputs.vision.samples))
    blinded = actor(replace(inputs, vision=blind), rule)
    torch.testing.assert_close(hidden.log_probs, blinded.log_probs, atol=1e-5, rtol=0)
    moved = (shown.log_probs - hidden.log_probs).abs().amax(dim=1)
    assert torch.equal(moved > 1e-5, torch.tensor([bool(rollout.prompt.images) for rollout in rollouts]))


@pytest.mark.parametrize("kind", ["idefics2", "idefics3", "smolvlm"])
def test_all_patches_can_be_hidden_from_models_that_leave_out_images_of_zeros(tmp_path, kind):
    checkpoint = stock_checkpoint(tmp_path, kind)
    rollouts = rollouts_of(checkpoint, stock_prompts(checkpoint))
    inputs = inputs_of(checkpoint, rollouts)
    shown, hidden = halves(actor_of(checkpoint)(beside_hidden(inputs, 1.0, seed=0), ScoringRule()))
    moved = (shown.log_probs - hidden.log_probs).abs().amax(dim=1)
    assert torch.equal(moved > 1e-3, torch.tensor([bool(rollout.prompt.images) for rollout in rollouts]))
