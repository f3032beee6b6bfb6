"""Whether gold follows the reward: a sequential test on what single prompts gained.

Every evaluation draws the same prompts with the same seeds, so two of them are compared prompt by prompt: what a prompt
is worth by itself cancels out, and a loss that is lost in the noise of two means is certain in the differences. Steps
have other prompts each time; there the groups are samples of one population.

For each possible change point before now, the looks since then are compared with those before it (a generalised
likelihood ratio for a shift of the mean), in the number

    d = share · reward / s_reward - gold / s_gold        of each prompt; s: standard deviation over prompts

A prompt's own reward and gold come from the same samples, so what they share in noise cancels out as well. Gold parted
- where it fell: with share 1, d has risen by CERTAIN standard errors, gold has fallen by FALLEN, TOGETHER in their sum,
  and the reward has not fallen;
- where it stayed behind: since the base the reward has gained, and with share SHARE d has risen by CERTAIN.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch
from torch.nn import functional as F

from ...runtime.collectives import all_gather_object

T = torch.Tensor

SHARE = 0.25  # of the reward's gain that gold has to make, each in its own standard deviations
CERTAIN = 4.0  # standard errors of d, for some twelve comparisons a look; see docs/guard.md for how often it errs
FALLEN = 1.0  # standard errors that gold itself must have fallen by
TOGETHER = 6.0
RISEN = 3.0  # standard errors, or deviations of a running mean, by which gold or the reward has risen for certain
WINDOW = 6  # looks after a change point
BEFORE = (1, 3, WINDOW)  # and before it
GAIN = 0.2  # standard deviations that the reward must have gained since the base before gold is asked to follow
LOSS = 0.05  # standard deviations that gold must have lost since a change point


@dataclass(frozen=True)
class PairedScores:
    """Mean reward and gold of each prompt (N) of an evaluation, or of each group of a step."""

    step: int
    prompts: list[int]
    reward: list[float]
    gold: list[float]

    @cached_property
    def table(self) -> T:
        """(N, 2) of rewards and golds."""
        return torch.tensor([self.reward, self.gold], dtype=torch.float64).T

    def only(self, prompts: Collection[int]) -> PairedScores:
        """The same look at some of its prompts, in their order here."""
        wanted = set(prompts)
        kept = [index for index, prompt in enumerate(self.prompts) if prompt in wanted]
        columns = ([column[index] for index in kept] for column in (self.prompts, self.reward, self.gold))
        return PairedScores(self.step, *columns)


@dataclass(frozen=True)
class Divergence:
    """Where gold parted from the reward: after the look of step `since`. Both in the looks until step `start` that were
    compared, and since."""

    since: int
    start: int
    reward: tuple[float, float]
    gold: tuple[float, float]


def paired_scores_of(step: int, mine: Sequence[tuple[int, float, float]]) -> PairedScores:
    """Means by prompt over all ranks, in the order of the prompts' numbers. A collective. mine: (prompt, reward, gold)
    of this rank's samples."""
    by_prompt: dict[int, list[tuple[float, float]]] = {}
    for prompt, reward, gold in (sample for part in all_gather_object(mine) for sample in part):
        by_prompt.setdefault(prompt, []).append((reward, gold))
    prompts = sorted(by_prompt)
    means = [[sum(column) / len(column) for column in zip(*by_prompt[each])] for each in prompts]
    return PairedScores(step, prompts, [reward for reward, _ in means], [gold for _, gold in means])


class DivergenceTest:
    """Takes looks and says where gold parted from the reward. paired: all looks are at the same prompts. base: how many
    of the first looks are the start that gains are counted from."""

    def __init__(self, paired: bool, base: int = 1):
        self.paired, self.base = paired, base
        self.first: list[PairedScores] = []
        self.last: list[PairedScores] = []  # the newest ones, at most 2 WINDOW

    def see(self, scores: PairedScores) -> Divergence | None:
        """What is certain with this look, None where nothing is."""
        if not scores.prompts or (self.paired and not self._comparable(scores)):
            return None
        if len(self.first) < self.base:
            self.first.append(scores)
        self.last = [*self.last, scores][-2 * WINDOW :]
        if len(self.first) < self.base or scores in self.first:
            return None
        found = [each for split in self._splits() if (each := self._compare(*split)) is not None]
        return max(found, key=lambda each: each[0])[1] if found else None

    def _comparable(self, scores: PairedScores) -> bool:
        """Whether an evaluation has half of the base's prompts or more: a scorer may miss some. Other prompts than
        before are a new start; of the same ones too few say nothing."""
        if not self.first:
            return True
        base, found = set(self.first[0].prompts), set(scores.prompts)
        if 2 * len(base & found) >= max(len(base), len(found)):
            return True
        if found <= base:
            return False
        self.forget()
        return True

    def forget(self) -> None:
        """A new start: what was seen cannot be compared with what follows."""
        self.first, self.last = [], []

    @property
    def compares(self) -> bool:
        """Whether there is a look after those of the base."""
        return any(each not in self.first for each in self.last)

    def risen(self) -> bool:
        """Whether gold has risen for certain since the base."""
        if not self.compares:
            return False
        after = [each for each in self.last if each not in self.first][-WINDOW:]
        return self._contrast(self.first, after, torch.tensor([0.0, 1.0], dtype=torch.float64)) > RISEN

    def _splits(self) -> Iterable[tuple[int, list[PairedScores], list[PairedScores]]]:
        """(step, before, after) of each change point: looks next to it, and the base against those since."""
        for at in range(max(1, len(self.last) - WINDOW), len(self.last)):
            after = [each for each in self.last[at:] if each not in self.first]
            if after:
                yield self.last[at - 1].step, self.first, after
                for length in BEFORE:  # short ones for where gold rose until there
                    yield self.last[at - 1].step, self.last[max(0, at - length) : at], after

    def _compare(
        self, since: int, before: list[PairedScores], after: list[PairedScores]
    ) -> tuple[float, Divergence] | None:
        """(standard errors, what parted) where this change is certain."""
        scales = self._scales()
        if scales is None:
            return None
        means = torch.stack([table.mean(dim=(0, 1)) for table in self._tables(before, after)])
        reward, gold = ((means[1] - means[0]) / scales).tolist()
        errors = 0.0
        if reward >= 0 and gold <= -LOSS:
            fallen, apart = (self._errors(before, after, scales, share) for share in (0.0, 1.0))
            errors = apart if fallen >= FALLEN and fallen + apart >= TOGETHER else 0.0
        if before is self.first and reward >= GAIN:
            errors = max(errors, self._errors(before, after, scales, SHARE))
        if errors < CERTAIN:
            return None
        (old_reward, old_gold), (new_reward, new_gold) = means.tolist()
        return errors, Divergence(since, before[-1].step, (old_reward, new_reward), (old_gold, new_gold))

    def _errors(self, before: list[PairedScores], after: list[PairedScores], scales: T, share: float) -> float:
        """Standard errors by which d has risen."""
        return self._contrast(before, after, torch.stack([share / scales[0], -1 / scales[1]]))

    def _contrast(self, before: list[PairedScores], after: list[PairedScores], weights: T) -> float:
        """Standard errors of what reward and gold gained, weighted (2); 0 of fewer than 3 prompts, or 1 of a side."""
        old, new = (table @ weights for table in self._tables(before, after))  # (looks, prompts)
        sides = [new.mean(dim=0) - old.mean(dim=0)] if self.paired else [new.flatten(), -old.flatten()]
        degrees = sum(map(len, sides)) - len(sides)
        if degrees < 2 or min(map(len, sides)) < 2:
            return 0.0
        mean = sum(float(side.mean()) for side in sides)
        error = math.sqrt(sum(float(side.var()) / len(side) for side in sides))
        if error > 0:
            return as_normal(mean / error, degrees)
        return math.copysign(math.inf, mean) if mean else 0.0

    def _scales(self) -> T | None:
        """(2): standard deviations over prompts of reward and gold, the larger of base and present, or over looks where
        all prompts are alike; None where one of them never varies."""
        tables = [self._table(each).flatten(0, 1) for each in (self.first, self.last[-1:])]
        stds = [table.std(dim=0, correction=min(1, len(table) - 1)) for table in tables]  # of one prompt 0
        scales = torch.stack(stds).amax(dim=0)
        scales = torch.where(scales > 0, scales, torch.cat(tables).std(dim=0))
        return scales if bool((scales > 0).all()) else None

    def _tables(self, before: list[PairedScores], after: list[PairedScores]) -> tuple[T, T]:
        """`_table` of both sides, of evaluations at the prompts that all of these have."""
        first = before[0].prompts
        if self.paired and any(each.prompts != first for each in before + after):
            common = set.intersection(*(set(each.prompts) for each in before + after))
            before, after = ([each.only(common) for each in side] for side in (before, after))
        return self._table(before), self._table(after)

    def _table(self, items: Sequence[PairedScores]) -> T:
        """(looks, prompts, 2) of rewards and golds; where prompts differ, (1, groups of all looks, 2)."""
        parts = [each.table for each in items]
        return torch.stack(parts) if self.paired else torch.cat(parts).unsqueeze(0)

    def state_dict(self) -> dict[str, Any]:
        """The looks that later ones are compared with. It shares their lists, as every step takes one."""
        looks, names = {"first": self.first, "last": self.last}, [each.name for each in fields(PairedScores)]
        return {kind: [{name: getattr(each, name) for name in names} for each in own] for kind, own in looks.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`'s."""
        self.first, self.last = ([PairedScores(**each) for each in state[name]] for name in ("first", "last"))


def as_normal(t: float, degrees: int) -> float:
    """The normal deviate that is about as unlikely as Student's t of so many degrees of freedom (Wallace 1959)."""
    size = math.sqrt(degrees * math.log1p(t * t / degrees)) * (8 * degrees + 1) / (8 * degrees + 3)
    return math.copysign(size, t)


SIDE = 32  # pixels of a thumbnail
LEVELS = 4  # of each colour channel in the histogram of colours
BLANK = 0.03  # standard deviation of pixels below which an image shows nothing
COVERING = 2  # which nearest neighbour of a reference image bounds what covers it


def thumbnails(media: T) -> T:
    """uint8 (N, 3, SIDE, SIDE) of images (N, 3, H, W) in 0..1, or of the middle frame of videos (N, 3, T, H, W)."""
    images = media[:, :, media.shape[2] // 2] if media.dim() == 5 else media
    images = images.detach().float().cpu().expand(-1, 3, -1, -1)  # grey ones have one channel
    if images.shape[-2:] != (SIDE, SIDE):
        images = F.interpolate(images, (SIDE, SIDE), mode="bilinear", antialias=True)
    return (images.nan_to_num(0.0).clamp(0, 1) * 255).round().to(torch.uint8)


def distances(one: T, two: T) -> T:
    """(N, M) root mean square difference of thumbnails (N, 3, S, S) and (M, 3, S, S), in units of full brightness.

    Their bytes and the sums of their products are whole numbers, which float64 holds exactly: one matrix product
    suffices.
    """
    first, second = (each.flatten(1).double() for each in (one, two))
    squares = first.square().sum(dim=1)[:, None] + second.square().sum(dim=1) - 2 * first @ second.T
    return (squares.sqrt() / (255 * first.shape[1] ** 0.5)).float()


def diversity(thumbs: T, groups: T, kinds: T | None = None) -> float:
    """Mean distance of the pairs of images in a group; NaN where no group has two.

    An image that shows the right thing more often resembles its neighbours more, which is no loss of variety: variety
    is what is left among equals.

    Args:
        thumbs: uint8 (N, 3, S, S).
        groups: (N), of each image.
        kinds: (N), what each image shows: only pairs that show the same count; None: all pairs of a group do.
    """
    kinds = torch.zeros_like(groups) if kinds is None else kinds
    found = []
    present, counts = groups.unique(return_counts=True)
    for group in present[counts > 1]:
        own = groups == group
        pairs = (kinds[own][:, None] == kinds[own]).triu(diagonal=1)
        found.append(distances(thumbs[own], thumbs[own])[pairs])
    return torch.cat(found).mean().item() if found and any(map(len, found)) else float("nan")


def groups_of(prompts: Sequence[str]) -> T:
    """(N): the index at which each prompt stands first, for evaluations that draw a prompt several times."""
    first: dict[str, int] = {}
    return torch.tensor([first.setdefault(prompt, index) for index, prompt in enumerate(prompts)])


def drift(thumbs: T, base: T) -> float:
    """Mean root mean square difference of each image (N, 3, S, S) from its own counterpart."""
    return ((thumbs.float() - base.float()) / 255).square().mean(dim=(1, 2, 3)).sqrt().mean().item()


def coverage(thumbs: T, groups: T, references: T, reference_groups: T) -> float:
    """Share of reference images that some image of their group covers: it lies within the distance of the reference's
    COVERING-th nearest neighbour among the references of the group ("coverage", arXiv 2002.09797). Left out are those
    of groups that have no more than COVERING; NaN without others.

    Args:
        thumbs: uint8 (N, 3, S, S) of the images that were drawn.
        groups: (N), of each of them.
        references: uint8 (M, 3, S, S) of right images.
        reference_groups: (M), of each reference, in the numbers of `groups`.
    """
    among = distances(references, references).masked_fill(reference_groups[:, None] != reference_groups, torch.inf)
    radius = F.pad(among, (0, COVERING), value=torch.inf).sort(dim=1).values[:, COVERING]  # 0 is the image itself
    nearest = distances(references, thumbs).masked_fill(reference_groups[:, None] != groups, torch.inf).amin(dim=1)
    return (nearest <= radius)[radius.isfinite()].float().mean().item()


def image_statistics(media: T, groups: T) -> dict[str, float]:
    """Of the images of all ranks, by their thumbnails; nothing without any. A collective.

    `image_diversity` within groups (left out where there are no pairs), and means over images of `image_colours`
    (entropy of the histogram of LEVELS³ colours, bits), `image_edges` (mean difference of neighbouring pixels),
    `image_brightness`, and `image_blank`, the share of images whose pixels are all but equal. media: of this rank, as
    `thumbnails` takes them, with their groups (N).
    """
    parts = all_gather_object((thumbnails(media).numpy(), groups.tolist()))
    thumbs = torch.cat([torch.from_numpy(each) for each, _ in parts])
    groups = torch.tensor([group for _, part in parts for group in part])
    if not len(thumbs):
        return {}
    images = thumbs.float() / 255
    varied = diversity(thumbs, groups)
    edges = (images.diff(dim=2).abs().mean(dim=(1, 2, 3)) + images.diff(dim=3).abs().mean(dim=(1, 2, 3))) / 2
    found = {
        "image_colours": colour_entropy(thumbs).mean().item(),
        "image_edges": edges.mean().item(),
        "image_brightness": images.mean().item(),
        "image_blank": (images.flatten(2).std(dim=2).mean(dim=1) < BLANK).float().mean().item(),
    }
    return found | ({"image_diversity": varied} if varied == varied else {})


def colour_entropy(thumbs: T) -> T:
    """(N) bits: entropy of the LEVELS³ colours that the pixels of each image (N, 3, S, S) have."""
    level = (thumbs // (256 // LEVELS)).flatten(2).long()
    colour = (level[:, 0] * LEVELS + level[:, 1]) * LEVELS + level[:, 2]
    image = torch.arange(len(thumbs))[:, None] * LEVELS**3
    counts = torch.bincount((colour + image).flatten(), minlength=len(thumbs) * LEVELS**3).view(len(thumbs), -1)
    shares = counts / counts.sum(dim=1, keepdim=True)
    return torch.special.entr(shares).sum(dim=1) / torch.log(torch.tensor(2.0))
