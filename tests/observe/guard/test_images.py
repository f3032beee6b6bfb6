"""What is counted on sets of images: exact facts."""

from __future__ import annotations

import math

import torch

from lightrft_visual.observe.guard.divergence import SIDE, coverage, distances, diversity, thumbnails


def flat(*levels: int) -> torch.Tensor:
    return torch.tensor(levels, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, SIDE, SIDE)


def drawings(groups: torch.Tensor) -> torch.Tensor:
    """A square of the group's colour at a place of its own, on a light ground."""
    drawn = flat(*[240] * len(groups)).clone()
    for number, group in enumerate(groups.tolist()):
        top = number % (SIDE // 2)
        drawn[number, group, top : top + SIDE // 2, : SIDE // 2] = 0
        drawn[number, 2, top : top + SIDE // 2, : SIDE // 2] = 0
    return drawn


def test_thumbnails_of_images_and_of_the_middle_frame_of_videos():
    image = torch.rand(2, 3, 64, 48)
    assert thumbnails(image).shape == (2, 3, SIDE, SIDE) and thumbnails(image).dtype == torch.uint8
    video = torch.zeros(1, 3, 5, 32, 32)
    video[:, :, 2] = 1.0
    assert thumbnails(video).float().mean() == 255


def test_distance_is_a_share_of_full_brightness():
    assert torch.allclose(distances(flat(0, 255), flat(0, 51)), torch.tensor([[0.0, 0.2], [1.0, 0.8]]), atol=1e-4)


def test_diversity_is_the_mean_over_the_pairs_of_a_group():
    thumbs, groups = flat(0, 255, 0, 51), torch.tensor([0, 0, 1, 1])
    assert math.isclose(diversity(thumbs, groups), 0.6, rel_tol=1e-5)  # pairs of 1 and 0.2
    assert math.isclose(diversity(thumbs, groups, torch.tensor([0, 1, 2, 2])), 0.2, rel_tol=1e-5)
    assert math.isnan(diversity(thumbs, torch.arange(4)))


def test_coverage_of_the_references_themselves_of_one_of_them_and_of_others():
    groups = torch.arange(32) % 2
    references = drawings(groups)
    assert coverage(references, groups, references, groups) == 1.0
    single = references[:2].repeat(16, 1, 1, 1)
    assert 2 / 32 <= coverage(single, groups, references, groups) < 0.6
    assert coverage(references.roll(1, 0), groups, references, groups) == 0.0  # each drawn for the other caption
    assert coverage(flat(*[200] * 32), groups, references, groups) == 0.0
